"""Anomalies among images: maps, threshold, and resumed results."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image

from cribo.apps.segment.anomaly import STEPS, find_anomalies
from cribo.apps.segment.config import AnomalyConfig
from cribo.base.errors import DataError, FolderError, MissingData
from cribo.cli import main
from cribo.features import BackboneSource
from cribo.features.config import AnomalySettings

SETTINGS = AnomalySettings(scale=1)
DEFECT = (slice(32, 48), slice(64, 96))  # two patches


def write(path: str, green: int, *, defect: bool = False) -> None:
    """Write an image of a colour, with a red region if there is a defect."""
    values = np.full((64, 128, 3), (60, green, 60), dtype=np.uint8)
    if defect:
        values[DEFECT] = (200, 30, 30)
    Path(path).parent.mkdir(exist_ok=True)
    Image.fromarray(values).save(path)


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write normal images of similar greens, and images of which one has a defect."""
    monkeypatch.chdir(tmp_path)
    for step in range(4):
        write(f"normal/{step}.png", 120 + 10 * step)
    for step in range(3):
        write(f"images/{step}.png", 123 + 10 * step, defect=step == 1)


def config(**options: object) -> AnomalyConfig:
    values = {"images": "images", "examples": "normal", "device": "cpu", "workers": 0, **options}
    return AnomalyConfig(BackboneSource("mean-colour"), **values)


def rows() -> dict[str, dict[str, str]]:
    with Path("out/summary.csv").open(newline="") as file:
        return {row["image"]: row for row in csv.DictReader(file)}


def test_a_defect_is_found_where_it_is() -> None:
    words = ("--backbone", "mean-colour", "--examples", "normal", "--scale", "1", "--device", "cpu", "--out", "out")
    assert main(["segment", "images", "--anomaly", *words]) == 0
    assert [name for name, row in rows().items() if row["above threshold"] == "1"] == ["1.png"]
    distances = np.array(Image.open("out/maps/1.png"))
    assert distances.shape == (64, 128)
    values = np.array([(200, 30, 30), *((60, 120 + 10 * step, 60) for step in range(4))]) / 255
    values = (values - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    values /= np.linalg.norm(values, axis=1, keepdims=True)
    score = 1 - float((values[1:] @ values[0]).max())  # 1 % of 32 patches is one patch
    assert float(rows()["1.png"]["score"]) == pytest.approx(score, rel=1e-3)
    assert distances.max() == distances[DEFECT].max() == pytest.approx(STEPS * score, rel=0.05)
    assert distances[:, :48].max() < STEPS / 50
    drawn = np.array(Image.open("out/overlays/1.jpg")).astype(int)
    assert drawn[40, 80].sum() > drawn[8, 8].sum() + 100
    assert {"about.json", "contact.png"} <= {path.name for path in Path("out").iterdir()}


def test_the_threshold_is_the_largest_score_of_a_left_out_normal_image() -> None:
    write("normal/odd.png", 200)
    found = find_anomalies(config(), SETTINGS, out=Path("out"))
    about = json.loads(Path("out/about.json").read_text())
    assert len(about["left_out_scores"]) == 5
    assert found.threshold == about["threshold"] == max(about["left_out_scores"].values())
    assert found.worst == "odd.png"
    assert found.images[0].name == "1.png"


def test_a_single_normal_image_gives_no_threshold() -> None:
    found = find_anomalies(config(examples="normal/0.png"), SETTINGS, out=Path("out"))
    assert found.threshold is None
    assert found.images[0].name == "1.png"
    assert {row["above threshold"] for row in rows().values()} == {""}


def test_normal_images_among_the_images_are_compared_with_the_others() -> None:
    write("normal/odd.png", 200)
    write("images/odd.png", 200)
    found = find_anomalies(config(), SETTINGS, out=Path("out"))
    odd = next(image for image in found.images if image.name == "odd.png")
    assert odd.is_normal
    assert odd.score == found.threshold
    assert [image.is_normal for image in found.images].count(True) == 1


def test_unreadable_images_are_skipped() -> None:
    for path in ("images/bad.png", "normal/bad.png"):
        Path(path).write_bytes(b"no image")
    found = find_anomalies(config(), SETTINGS, out=Path("out"))
    assert (list(found.skipped), list(found.unread), found.normal) == (["bad.png"], ["bad.png"], 4)
    assert rows()["bad.png"]["error"]


def write_without_data(path: str, green: int, columns: int) -> None:
    """Write an image as `write` does, as a TIFF whose first columns are black and have no data."""
    values = np.full((64, 128, 3), (60, green, 60), dtype=np.uint8)
    values[:, :columns] = 0
    tifffile.imwrite(path, values, photometric="rgb", extratags=[(42113, "s", 0, "0", True)])


def test_pixels_without_data_are_no_anomalies() -> None:
    write_without_data("images/normal.tif", 123, 44)
    write_without_data("images/part.tif", 90, 44)  # 2.75 patches
    write_without_data("images/none.tif", 123, 128)
    write("images/whole.png", 90)
    found = find_anomalies(config(), SETTINGS, out=Path("out"))
    scores = {image.name: image.score for image in found.images}
    assert scores["normal.tif"] == pytest.approx(scores["0.png"], abs=1e-6)
    assert scores["part.tif"] == pytest.approx(scores["whole.png"], abs=1e-6)
    distances, whole = (np.array(Image.open(f"out/maps/{name}.png")).astype(int) for name in ("part", "whole"))
    assert not distances[:, :44].any()
    assert distances[:, 44:].min() > 100
    np.testing.assert_allclose(distances[:, 44:], whole[:, 44:], atol=1)
    drawn = np.array(Image.open("out/overlays/part.jpg"))
    assert drawn[:, :32].max() < 20
    assert list(found.skipped) == ["none.tif"]
    assert rows()["none.tif"]["error"]


def test_pixels_without_data_are_not_normal() -> None:
    write_without_data("normal/part.tif", 125, 40)
    write_without_data("normal/none.tif", 125, 128)
    values = np.full((64, 128, 3), (60, 123, 60), dtype=np.uint8)
    values[:, :44] = 0  # black, but data
    Image.fromarray(values).save("images/black.png")
    write_without_data("images/same.tif", 125, 40)
    found = find_anomalies(config(), SETTINGS, out=Path("out"))
    assert (found.normal, list(found.unread)) == (5, ["none.tif"])
    by_name = {image.name: image for image in found.images}
    assert found.is_above(by_name["black.png"])
    assert by_name["black.png"].score > 0.1
    assert by_name["same.tif"].is_normal
    assert found.threshold is not None
    assert by_name["same.tif"].score <= found.threshold < 0.1


def test_an_interrupted_command_is_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    find_anomalies(config(), SETTINGS, out=Path("out"))
    first = rows()
    Path("out/maps/2.png").unlink()
    kept = Path("out/maps/0.png").stat().st_mtime_ns
    with pytest.raises(FolderError, match="--resume"):
        find_anomalies(config(), SETTINGS, out=Path("out"))
    with pytest.raises(FolderError, match="scale"):
        find_anomalies(config(), AnomalySettings(scale=2), out=Path("out"), resume=True)
    found = find_anomalies(config(batch_size=1), SETTINGS, out=Path("out"), resume=True)
    assert (len(found.images), found.reused) == (3, 2)
    assert Path("out/maps/0.png").stat().st_mtime_ns == kept
    assert rows() == first
    write("normal/new.png", 180)
    with pytest.raises(FolderError, match="normal images"):
        find_anomalies(config(), SETTINGS, out=Path("out"), resume=True)


def test_no_normal_images() -> None:
    Path("empty").mkdir()
    for path in Path("normal").iterdir():
        path.write_bytes(b"no image")
    with pytest.raises(MissingData):
        find_anomalies(config(examples="missing"), SETTINGS, out=Path("out"))
    for folder in ("empty", "normal"):
        with pytest.raises(DataError, match=folder):
            find_anomalies(config(examples=folder), SETTINGS, out=Path("out"))
    assert not Path("out").exists()
