"""Options and names of images through whole commands: --range, --max_pixels, and names that are not UTF-8."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image
from tests.end_to_end.conftest import Run

from cribo.apps.adapt.planning import open_listable
from cribo.base.errors import DataError
from cribo.cli import main
from cribo.data.config import DEFAULT_READING
from cribo.evaluation.config import PROTOCOLS

NOT_UTF8 = os.fsdecode(b"caf\xe9.png")
HOW = ("--backbone", "mean-colour", "--device", "cpu")


def picture(number: int, highest: int) -> np.ndarray:
    """Return a bright square on a dark ground, up to the highest value."""
    values = np.random.default_rng(number).integers(0, highest // 4, (64, 96))
    values[8:40, 16 + 4 * number : 64] = highest
    return values.astype(np.uint16)


@pytest.fixture
def twelve_bits(cribo: Run, tmp_path: Path) -> Path:
    (tmp_path / "images").mkdir()
    (tmp_path / "examples").mkdir()
    for number in range(3):
        values = picture(number, 4095)
        Image.fromarray(values).save(tmp_path / "images" / f"{number}.png")
        Image.fromarray(values).save(tmp_path / "examples" / f"{number}.tif")
        Image.fromarray((values == 4095).astype(np.uint8)).save(tmp_path / "examples" / f"{number}_labels.png")
    return tmp_path


def test_embed_reads_by_range_and_does_not_resume_with_another(cribo: Run, twelve_bits: Path) -> None:
    cribo("embed", "images", *HOW, "--out", "surveyed")  # without a range, by percentiles of the collection
    low, high = json.loads(Path("surveyed/about.json").read_text())["same"]["range"]
    assert low < 50
    assert high == 4095
    cribo("embed", "images", *HOW, "--out", "surveyed", "--resume")
    cribo("embed", "images", *HOW, "--out", "out", "--range", "0,4095")
    about = json.loads(Path("out/about.json").read_text())
    assert about["same"]["range"] == [0, 4095]
    cribo("embed", "images", *HOW, "--out", "out", "--range", "0,4095", "--resume")
    how = ("embed", "images", *HOW, "--out")
    assert "range" in cribo(*how, "out", "--range", "0,8191", "--resume", status=2)
    assert "--max_pixels" in cribo(*how, "o", "--range", "0,4095", "--max_pixels", 99, status=2)


def test_results_without_out_are_named_after_the_images_and_never_replaced(cribo: Run, twelve_bits: Path) -> None:
    how = (*HOW, "--range", "0,4095")
    for name in ("images", "images-2"):
        assert f"features/{name}/" in cribo("embed", "images", *how)
        assert f"segmented/{name}/" in cribo("segment", "images", *how, "--examples", "examples", "--pictures", 0)
    assert "3 already encoded" in cribo("embed", "images", *how, "--resume")
    assert "--out" in cribo("embed", "images", *how, "--overwrite", status=2)
    assert sorted(path.name for path in Path("features").iterdir()) == ["images", "images-2"]
    assert "objects/images.lance" in cribo("index", "--images", "images", *how)
    assert "3 unchanged" in cribo("index", "images", *how)
    assert "objects/images-2of3.lance" in cribo("index", "images", *how, "--part", "2/3")
    assert "shards/images" in cribo("shard", "images", *how[4:])
    cribo("shard", "images", *how[4:], status=2)


def test_segment_remembers_the_range_in_the_memory(cribo: Run, twelve_bits: Path) -> None:
    how = ("segment", *HOW, "--images", "images", "--memory", "m.safetensors", "--pictures", 0)
    cribo(*how, "--examples", "examples", "--out", "a", "--range", "0,4095")
    cribo(*how, "--out", "b")
    assert Path("a/labels/0.png").read_bytes() == Path("b/labels/0.png").read_bytes()
    assert "range" in cribo(*how, "--out", "c", "--range", "0,8191", status=2)
    assert "--max_pixels" in cribo(*how, "--out", "d", "--max_pixels", 99, status=2)


def test_index_remembers_the_range_in_the_database(cribo: Run, twelve_bits: Path) -> None:
    cribo("index", *HOW, "--images", "images", "--db", "objects.db", "--range", "0,4095")
    assert "3 unchanged" in cribo("index", "--db", "objects.db", "--device", "cpu")
    assert "range 0,4095" in cribo("index", "--db", "objects.db", "--range", "0,8191", status=2)
    query = ("search", "--db", "objects.db", "--image", "examples/0.tif", "--device", "cpu")
    cribo(*query, "--out", "found")
    assert "was built with" in cribo(*query, "--out", "other", "--range", "1,2", status=2)
    assert "--max_pixels" in cribo(*query, "--out", "other", "--max_pixels", 99, status=1)


@pytest.fixture
def five_channels(cribo: Run, tmp_path: Path) -> Path:
    """Stacks of two pages of five channels, of which three of the second page show a square."""
    for folder in ("images", "examples"):
        (tmp_path / folder).mkdir()
        for number in range(3):
            values = np.random.default_rng(number).integers(0, 4096, (2, 5, 64, 96)).astype(np.uint16)
            square = picture(number, 4095)
            values[1, [0, 2, 4]] = square
            tifffile.imwrite(tmp_path / folder / f"{number}.tif", values, ome=True, metadata={"axes": "ZCYX"})
            if folder == "examples":
                Image.fromarray((square == 4095).astype(np.uint8)).save(tmp_path / folder / f"{number}_labels.png")
    return tmp_path


def test_every_command_reads_the_same_channels(cribo: Run, five_channels: Path) -> None:
    chosen = ("--channels", "4,0,2", "--page", 1, "--range", "0,4095")
    assert "--page" in cribo("embed", "images", *HOW, "--out", "none", status=2)
    assert "--channels" in cribo("embed", "images", *HOW, "--page", 1, "--out", "none", status=2)
    cribo("embed", "images", *HOW, "--out", "features", *chosen)
    assert json.loads(Path("features/about.json").read_text())["same"]["channels"] == [4, 0, 2]
    assert "channels" in cribo("embed", "images", *HOW, "--out", "features", "--page", 1, "--resume", status=2)
    how = ("segment", *HOW, "--images", "images", "--memory", "m.safetensors", "--pictures", 0)
    cribo(*how, "--examples", "examples", "--out", "a", *chosen)
    cribo(*how, "--out", "b")  # the memory remembers them
    assert (np.array(Image.open("a/labels/0.png")) == np.array(Image.open("examples/0_labels.png"))).mean() > 0.9
    assert Path("a/labels/0.png").read_bytes() == Path("b/labels/0.png").read_bytes()
    assert "channels" in cribo(*how, "--out", "c", "--channels", "1,2,3", status=2)
    cribo("index", *HOW, "--images", "images", "--db", "objects.db", *chosen)
    assert "channels 4,0,2" in cribo("index", "--db", "objects.db", "--channels", "0,1,2", status=2)
    assert "3 unchanged" in cribo("index", "--db", "objects.db", "--device", "cpu")


@pytest.fixture
def named(cribo: Run, tmp_path: Path) -> Path:
    (tmp_path / "images").mkdir()
    for number in range(3):
        Image.fromarray((picture(number, 255)).astype(np.uint8)).save(tmp_path / "images" / f"{number}.png")
    try:
        Image.new("RGB", (96, 64)).save(tmp_path / "images" / NOT_UTF8)
    except OSError:
        pytest.skip("this file system accepts UTF-8 names only")
    return tmp_path


def test_names_that_are_not_utf8_are_skipped_alike(cribo: Run, named: Path) -> None:
    (named / "examples").mkdir()
    for number in range(2):
        (named / "examples" / f"{number}.png").write_bytes((named / "images" / f"{number}.png").read_bytes())
        mask = (picture(number, 255) == 255).astype(np.uint8)
        Image.fromarray(mask).save(named / "examples" / f"{number}_labels.png")
    for words in (
        ("embed", "images", *HOW, "--out", "embedded"),
        ("segment", *HOW, "--images", "images", "--examples", "examples", "--out", "segmented", "--pictures", 0),
        ("index", *HOW, "--images", "images", "--db", "objects.db"),
        ("shard", "images", "--max_unreadable", "0.5"),
    ):
        shown = cribo(*words)
        assert "1 image could not be read" in shown
        assert words[0] == "shard" or r"caf\udce9.png: its name is not valid UTF-8: rename it" in shown
    cribo("search", "--db", "objects.db", "--image", f"images/{NOT_UTF8}", "--out", "found", status=1)


def test_adapt_trains_without_names_that_a_list_cannot_hold(named: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("two\nlines.png", "two\u2028lines.png"):
        Image.new("RGB", (96, 64)).save(named / "images" / name)
    with caplog.at_level("WARNING", "cribo"):
        images = open_listable(str(named / "images"), DEFAULT_READING)
    assert list(images.names) == ["0.png", "1.png", "2.png"]
    assert "3 images are ignored" in caplog.text
    for number in range(3):
        (named / "images" / f"{number}.png").unlink()
    with pytest.raises(DataError, match="rename"):
        open_listable(str(named / "images"), DEFAULT_READING)


COMMANDS = (
    *("segment", "embed", "index", "search", "explore", "adapt"),
    *("distill", "pretrain", "shard", "benchmark", "figures"),
)


@pytest.mark.parametrize("command", [*((name,) for name in COMMANDS), *(("evaluate", name) for name in PROTOCOLS)])
def test_every_command_that_reads_images_has_these_options(command: tuple[str, ...], capsys) -> None:
    with pytest.raises(SystemExit):
        main([*command, "--help"])
    text = capsys.readouterr().out
    for option in ("--max_pixels MAX_PIXELS", "--range ", "--channels ", "--page PAGE"):
        assert text.count(f"\n  {option}") == 1
