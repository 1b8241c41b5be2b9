"""Video label propagation from the command line, in the layout of DAVIS 2017 and on a folder."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cribo.base.errors import DataError, MissingData
from cribo.cli import main
from cribo.data.labelled import video as data
from cribo.data.labelled.video import open_videos, read_objects
from cribo.evaluation import read_result

RUN = ("--cache", "none", "--devices", "cpu", "--runtime.workers", "0", "--side", "64")
COLOURS = np.array([[20, 20, 20], [230, 30, 30], [30, 30, 230]], dtype=np.uint8)
FRAMES = 5


def objects_at(step: int, size: tuple[int, int] = (64, 128)) -> np.ndarray:
    """Draw two squares of two patches of 16 pixels on black, which approach each other by a patch per frame."""
    objects = np.zeros(size, dtype=np.uint8)
    objects[0:32, 16 * step : 16 * step + 32] = 1
    objects[32:64, 96 - 16 * step : 128 - 16 * step] = 2
    return objects


def write_video(root: Path, name: str, *, inside: str = "480p", frames: int = FRAMES) -> None:
    for part in ("JPEGImages", "Annotations"):
        (root / part / inside / name).mkdir(parents=True)
    for step in range(frames):
        objects = objects_at(step)
        Image.fromarray(COLOURS[objects]).save(root / "JPEGImages" / inside / name / f"{step:05}.jpg", quality=95)
        annotation = Image.fromarray(objects)
        annotation.putpalette(COLOURS.tobytes())
        annotation.save(root / "Annotations" / inside / name / f"{step:05}.png")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("first", "second"):
        write_video(tmp_path / "mine", name, inside="")
    return tmp_path / "mine"


def words(*more: str) -> list[str]:
    return ["evaluate", "video", "--backbone", "mean-colour", "--data", "mine", *RUN, *more]


def output(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().err.split())


def test_squares_are_tracked(folder: Path) -> None:
    """Squares cover whole patches of one colour, so only pixels between patches are wrong."""
    assert main(words("--out", "result")) == 0
    result = read_result("result")
    assert result.title == "Video label propagation on mine"
    assert (result.data["videos"], result.data["frames"], result.data["objects"]) == (2, 10, 4)
    row = result.results[0]
    assert row["j_mean"] > 0.7
    assert row["j_recall"] == 1
    assert list(row["per_class"]) == ["first", "second"]
    assert row["per_object"].keys() == {"first_1", "first_2", "second_1", "second_2"}
    pictures = sorted(path.name for path in Path("result").glob("*.png"))
    assert pictures == ["videos.png"]
    maps = sorted(path.name for path in Path("result/segmentations/first").iterdir())
    assert maps == [f"{step:05}.png" for step in range(FRAMES)]
    centres = np.array(Image.open("result/segmentations/first/00003.png"))[8::16, 8::16]
    np.testing.assert_array_equal(centres, objects_at(3)[8::16, 8::16])


def test_the_score_excludes_first_and_last_frame(folder: Path) -> None:
    assert main(words("--limit", "1", "--out", "result")) == 0
    row = read_result("result").results[0]
    regions = []
    for number in (1, 2):
        for step in range(1, FRAMES - 1):
            found = np.array(Image.open(f"result/segmentations/first/{step:05}.png")) == number
            true = objects_at(step) == number
            regions.append((found & true).sum() / (found | true).sum())
    assert row["j_mean"] == pytest.approx(np.mean(regions))


def test_davis_is_read_in_its_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "DAVIS"
    for name in ("bike-packing", "blackswan", "unlisted"):
        write_video(root, name)
    (root / "ImageSets" / "2017").mkdir(parents=True)
    (root / "ImageSets" / "2017" / "val.txt").write_text("blackswan\nbike-packing\n")
    with pytest.raises(DataError, match="must list the 30 videos of DAVIS 2017, got 2: complete it, or accept it with"):
        open_videos(root)
    images = open_videos(root, partial=True)
    assert [(video.name, video.frames, video.objects) for video in images.videos] == [
        ("blackswan", range(5), 2),
        ("bike-packing", range(5, 10), 2),
    ]
    np.testing.assert_array_equal(images.objects(7).numpy(), objects_at(2))
    monkeypatch.setattr(data, "DAVIS_SIZES", {"val": 2})
    assert main([*words(), "--data", str(root), "--out", str(tmp_path / "out")]) == 0
    result = read_result(tmp_path / "out")
    assert (result.data["name"], result.title) == ("davis2017", "Video label propagation on DAVIS 2017")
    with pytest.raises(MissingData, match=r"there is no 'test\.txt'"):
        open_videos(root, "test")
    shutil.rmtree(root / "Annotations" / "480p" / "blackswan")
    with pytest.raises(MissingData, match=r"1 of the 2 videos of .* have no folder in .* the first is blackswan"):
        open_videos(root)
    assert [video.name for video in open_videos(root, partial=True).videos] == ["bike-packing"]


def test_frames_of_several_sizes(folder: Path) -> None:
    """Each size is encoded separately; results keep the order of the videos."""
    for path in [*(folder / "JPEGImages/first").iterdir(), *(folder / "Annotations/first").iterdir()]:
        image = Image.open(path)
        image.resize((256, 128), Image.Resampling.NEAREST).save(path)
    write_video(folder, "third", inside="")
    assert main(words("--out", "result")) == 0
    row = read_result("result").results[0]
    assert list(row["per_class"]) == ["first", "second", "third"]
    assert Image.open("result/segmentations/first/00001.png").size == (256, 128)
    assert row["per_class"]["second"] == row["per_class"]["third"]


def test_pixels_without_class_are_background(folder: Path) -> None:
    objects = objects_at(0)
    objects[60:, :20] = 255
    path = folder / "Annotations/first/00000.png"
    Image.fromarray(objects).save(path)
    assert open_videos(folder).videos[0].objects == 2
    np.testing.assert_array_equal(read_objects(path).numpy(), np.where(objects == 255, 0, objects))


def spoil(folder: Path, what: str) -> None:
    frames, annotations = folder / "JPEGImages/second", folder / "Annotations/second"
    first = annotations / "00000.png"
    if what == "one frame":
        for path in [*frames.iterdir(), *annotations.iterdir()]:
            if path.stem != "00000":
                path.unlink()
    elif what == "no object":
        Image.fromarray(np.zeros((64, 128), np.uint8)).save(first)
    elif what == "other size":
        Image.fromarray(objects_at(0)[:, :100]).save(first)
    elif what == "other size later":
        Image.fromarray(objects_at(2)[:, :100]).save(annotations / "00002.png")
    elif what == "no frame":
        (frames / "00002.jpg").unlink()
    elif what == "no annotation":
        (annotations / "00003.png").unlink()
    elif what == "gap":
        (frames / "00002.jpg").unlink()
        (annotations / "00002.png").unlink()
    elif what == "frames of two sizes":
        Image.fromarray(COLOURS[objects_at(1)][:, :100]).save(frames / "00001.jpg")
    elif what == "colours":
        Image.fromarray(COLOURS[objects_at(0)]).save(first)
    elif what == "grey":
        Image.fromarray(100 * objects_at(0)).save(first)


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("one frame", "mine/JPEGImages/second must have at least 3 frames, got 1: the first one is given"),
        ("no object", "00000.png: the first frame of a video must have an object, and all its pixels are background"),
        ("other size", "Annotations/second/00000.png: frames and annotations of a video must have one size, that of"),
        ("other size later", "Annotations/second/00002.png: frames and annotations of a video must have one size"),
        ("no frame", "mine/JPEGImages/second lacks 1 of the 5 frames, the first is 00002: each frame must have"),
        ("no annotation", "mine/Annotations/second lacks 1 of the 5 annotations, the first is 00003"),
        ("gap", "mine/JPEGImages/second has no frames between 00001 and 00003, but others are 1 apart"),
        ("frames of two sizes", "that of the first frame, 128 x 64, got 100 x 64"),
        ("colours", "00000.png: annotations must be object numbers in a grey or palette PNG with 8 bits, got mode RGB"),
        ("grey", "00000.png: objects must be numbered from 1 to 100 at most, got 200"),
    ],
)
def test_invalid_videos_are_named(folder: Path, capsys: pytest.CaptureFixture[str], what: str, reason: str) -> None:
    spoil(folder, what)
    assert main(words()) == 2
    assert reason in output(capsys)
    assert sorted(path.name for path in Path().iterdir()) == ["mine"]


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (("--neighbours", "0"), "neighbours must be >= 1"),
        (("--radius", "0"), "radius must be >= 1"),
        (("--previous", "-1"), "previous must be >= 0"),
        (("--temperature", "0"), "temperature must be > 0"),
        (("--data.limit", "0"), "data.limit must be >= 1"),
        (("--data", "mine/JPEGImages"), "there is no 'JPEGImages'"),
    ],
)
def test_invalid_settings_are_refused_before_any_work(
    folder: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...], reason: str
) -> None:
    assert main(words(*more)) == 2
    assert reason in output(capsys)
    assert sorted(path.name for path in Path().iterdir()) == ["mine"]
