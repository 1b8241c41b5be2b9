from pathlib import Path

import pytest
from tests.features.memory.coded import blocks, save_image

from cribo.apps.segment.targets import open_targets
from cribo.base.errors import DataError, MissingData
from cribo.data.sources.images import ImageFiles

LABELS = blocks([0, 1])


@pytest.fixture
def frames(tmp_path: Path) -> Path:
    for name in ("1.bmp", "a/2.bmp", "a/b/3.png", "note.txt"):
        save_image(tmp_path / "frames" / Path(name).with_suffix(".bmp"), LABELS)
    (tmp_path / "frames" / "note.bmp").unlink()
    (tmp_path / "frames" / "note.txt").write_text("1.bmp\na/2.bmp\n")
    save_image(tmp_path / "lists" / "0.bmp", LABELS)
    (tmp_path / "lists" / "above.txt").write_text("../frames/1.bmp\n0.bmp\n")
    (tmp_path / "lists" / "elsewhere.txt").write_text(f"{tmp_path}/frames/a/2.bmp\n../frames/1.bmp\n")
    return tmp_path / "frames"


def targets(source: Path, apart_from: Path | None = None) -> tuple[Path, list[str]]:
    """Return the folder and the names of the images to label."""
    images = open_targets(str(source), apart_from=apart_from)
    assert isinstance(images, ImageFiles)
    return Path(images.folder), [*images.names]


@pytest.mark.parametrize(
    ("source", "folder", "names"),
    [
        ("frames", "frames", ["1.bmp", "a/2.bmp", "a/b/3.bmp"]),
        ("frames/**/*.bmp", "frames", ["1.bmp", "a/2.bmp", "a/b/3.bmp"]),
        ("frames/a/*", "frames/a", ["2.bmp"]),
        ("frames/?/b/[1-3].bmp", "frames", ["a/b/3.bmp"]),
        ("frames/note.txt", "frames", ["1.bmp", "a/2.bmp"]),
        ("frames/a/2.bmp", "frames/a", ["2.bmp"]),
        ("lists/above.txt", "", ["frames/1.bmp", "lists/0.bmp"]),
        ("lists/elsewhere.txt", "frames", ["a/2.bmp", "1.bmp"]),
    ],
)
def test_images_by_folder_glob_list_and_name(frames: Path, source: str, folder: str, names: list[str]) -> None:
    assert targets(frames.parent / source) == (frames.parent / folder, names)


def test_a_folder_with_brackets_is_no_wildcard(frames: Path) -> None:
    folder = frames.rename(frames.with_name("frames [1]"))
    assert targets(folder / "**" / "*.bmp") == (folder, ["1.bmp", "a/2.bmp", "a/b/3.bmp"])


def test_earlier_results_are_not_images(frames: Path) -> None:
    assert targets(frames, apart_from=frames / "a") == (frames, ["1.bmp"])
    with pytest.raises(DataError, match=r"all images of .* are in .*frames, the output folder"):
        open_targets(str(frames), apart_from=frames)


def test_missing_images_raise(frames: Path) -> None:
    with pytest.raises(DataError, match=r"no images match .*\*\.jpg: searched .* for \.jpg"):
        open_targets(str(frames / "*.jpg"))
    with pytest.raises(MissingData, match="did you mean 'frames'"):
        open_targets(str(frames.parent / "frame"))


def test_images_with_colliding_results(frames: Path) -> None:
    save_image(frames / "1.png", LABELS)
    with pytest.raises(DataError, match=r"results of 1\.bmp and 1\.png would have the same name, 1: rename one"):
        open_targets(str(frames))
    (frames / "1.png").rename(frames / "1.x")
    (frames / "note.txt").write_text("1.x\na/../1.bmp\n")
    with pytest.raises(DataError, match=r"results of 1\.x and 1\.bmp would have the same name"):
        open_targets(str(frames / "note.txt"))
