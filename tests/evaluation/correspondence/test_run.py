"""Semantic correspondence from the command line, in the layout of SPair-71k and on a folder."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from cribo.base.errors import DataError, MissingData
from cribo.cli import main
from cribo.data.labelled import correspondence as data
from cribo.data.labelled.correspondence import open_pairs
from cribo.evaluation import read_result

COLOURS = np.array([[230, 30, 30], [30, 230, 30], [30, 30, 230], [230, 230, 30]])
POINTS = [(8, 8), (40, 8), (8, 40), (40, 40)]
RUN = ("--cache", "none", "--devices", "cpu", "--runtime.workers", "0", "--size", "64")


def write_pair(folder: Path, images: Path, **changes: Any) -> dict[str, Any]:
    """Write four coloured squares on black, and the same squares in another order as the target."""
    order, content = [3, 2, 0, 1], {}
    images.mkdir(parents=True, exist_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    for name, places in (("src", range(4)), ("trg", order)):
        pixels = np.zeros((64, 64, 3), dtype=np.uint8)
        for colour, place in enumerate(places):
            x, y = POINTS[place]
            pixels[y - 8 : y + 8, x - 8 : x + 8] = COLOURS[colour]
        Image.fromarray(pixels).save(images / f"{name}.png")
        content |= {f"{name}_imname": f"{name}.png", f"{name}_kps": [POINTS[place] for place in places]}
    content |= {"trg_bndbox": [0, 0, 48, 40], "category": "cat", "pair_id": 1, **changes}
    (folder / "1-src-trg:cat.json").write_text(json.dumps(content))
    return content


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_pair(tmp_path / "mine" / "pairs", tmp_path / "mine" / "images")
    return tmp_path / "mine"


def words(*more: str) -> list[str]:
    return ["evaluate", "correspondence", "--backbone", "mean-colour", "--data", "mine", *RUN, *more]


def test_points_are_found_in_a_folder(folder: Path) -> None:
    """Both images are alike around each point, so points are found within a pixel or two."""
    assert main(words("--alphas", "0.05,0.2", "--out", "result")) == 0
    result = read_result("result")
    assert [(row["alpha"], row["pck_image"], row["pck_point"]) for row in result.results] == [(0.05, 1, 1), (0.2, 1, 1)]
    assert result.results[1]["per_class"] == {"cat": 1.0}
    assert (result.data["pairs"], result.data["points"], result.data["images"]) == (1, 4, 2)
    assert sorted(path.name for path in Path("result").glob("*.png")) == ["pairs.png", "pck_image.png"]


def test_distant_points_are_incorrect(folder: Path) -> None:
    content = write_pair(folder / "pairs", folder / "images")
    swapped = [content["trg_kps"][place] for place in (1, 0, 2, 3)]
    write_pair(folder / "pairs", folder / "images", trg_kps=swapped)
    assert main(words("--out", "result")) == 0
    assert read_result("result").results[0]["pck_point"] == 0.5


def test_spair_is_read_in_its_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "SPair-71k"
    write_pair(root / "PairAnnotation" / "test", root / "JPEGImages" / "cat")
    with pytest.raises(
        DataError, match="must have the 12,234 pairs of SPair-71k, got 1: complete it, or accept it with"
    ):
        open_pairs(root)
    images = open_pairs(root, partial=True)
    assert [images.name(index) for index in range(2)] == ["cat/src.png", "cat/trg.png"]
    assert (images.pairs[0].name, images.pairs[0].category) == ("1-src-trg:cat", "cat")
    assert images.pairs[0].box == (0, 0, 48, 40)
    monkeypatch.setitem(data.SPAIR_SIZES, "test", 1)
    out = tmp_path / "out"
    assert main([*words(), "--data", str(root), "--out", str(out)]) == 0
    result = read_result(out)
    assert (result.data["name"], result.data["split"], result.title) == (
        *("spair", "test"),
        "Semantic correspondence on SPair-71k",
    )
    with pytest.raises(DataError, match="split must be trn, val, test, got 'train'"):
        open_pairs(root, "train")
    with pytest.raises(MissingData, match="there is no 'val'"):
        open_pairs(root, "val")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"trg_kps": [[65, 3]] * 4}, "point 0 of trg_kps must be inside the image, 64 x 64, got 65, 3"),
        ({"src_kps": [[8, 24]] * 3 + [[3, -1]]}, "point 3 of src_kps must be inside the image, 64 x 64, got 3, -1"),
        ({"src_kps": []}, "src_kps must be one or more pairs of x and y in pixels, got []"),
        ({"src_kps": [[1, 2, 3]]}, "src_kps must be one or more pairs of x and y"),
        ({"src_kps": [[1, 2]]}, "src_kps and trg_kps must have the same number of points, got 1 and 4"),
        ({"trg_bndbox": [5, 5, 5, 9]}, "trg_bndbox must be left, top, right and bottom in pixels, got [5, 5, 5, 9]"),
        ({"trg_imname": "nowhere.png"}, "refers to the image nowhere.png, which is not in"),
    ],
)
def test_invalid_files_are_named(
    folder: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], reason: str
) -> None:
    write_pair(folder / "pairs", folder / "images", **changes)
    assert main(words()) == 2
    output = " ".join(capsys.readouterr().err.split())
    assert reason in output
    assert "1-src-trg:cat.json" in output


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (("--alphas", "0"), "alphas must be > 0 and <= 1, got"),
        (("--size", "60"), "size must be a multiple of the patch size 16, got 60x60"),
        (("--data.split", "test"), "has no splits, got 'test': omit data.split"),
        (("--data.limit", "0"), "data.limit must be >= 1"),
        (("--data", "."), "must contain PairAnnotation and JPEGImages (SPair-71k), or pairs/*.json and images"),
    ],
)
def test_invalid_settings_are_refused_before_any_work(
    folder: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...], reason: str
) -> None:
    assert main(words(*more)) == 2
    assert reason in " ".join(capsys.readouterr().err.split())
    assert sorted(path.name for path in Path().iterdir()) == ["mine"]


def test_files_other_than_pairs_are_refused(folder: Path) -> None:
    (folder / "pairs" / "2.json").write_text("{}")
    with pytest.raises(DataError, match=r"2\.json is not in the format of SPair-71k: missing src_imname, trg"):
        open_pairs(folder)
    (folder / "pairs" / "2.json").write_text("{")
    with pytest.raises(DataError, match=r"2\.json is not valid JSON"):
        open_pairs(folder)
    for file in (folder / "pairs").iterdir():
        file.unlink()
    with pytest.raises(DataError, match=r"no \*\.json files in"):
        open_pairs(folder)
