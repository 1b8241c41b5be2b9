"""Labels propagated through videos, against the evaluation protocol and on moving squares."""

import csv
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.evaluation.video.test_run import COLOURS, FRAMES, objects_at, write_video

from cribo.apps.segment.config import VideoConfig
from cribo.apps.segment.video import segment_video
from cribo.base.errors import DataError, FolderError
from cribo.cli import main
from cribo.features import BackboneSource
from cribo.features.config import PropagationSettings

SETTINGS = PropagationSettings(side=64)


@pytest.fixture
def clip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two videos in the layout of DAVIS."""
    monkeypatch.chdir(tmp_path)
    for name in ("first", "second"):
        write_video(tmp_path / "mine", name, inside="")
    return tmp_path / "mine"


def keep(clip: Path, *steps: int) -> Path:
    """Delete the annotations of all other frames, and return the folder of the annotations."""
    for path in (clip / "Annotations").rglob("*.png"):
        if int(path.stem) not in steps:
            path.unlink()
    return clip / "Annotations"


def config(clip: Path, **options: object) -> VideoConfig:
    values = {"labels": str(clip / "Annotations"), "device": "cpu", "workers": 0, **options}
    return VideoConfig(BackboneSource("mean-colour"), str(clip / "JPEGImages"), **values)


def labels(folder: Path, name: str) -> np.ndarray:
    return np.array(Image.open(folder / "labels" / f"{name}.png"))


def centres(values: np.ndarray) -> np.ndarray:
    return values[8::16, 8::16]


def test_labels_equal_those_of_the_protocol(clip: Path) -> None:
    options = ("--cache", "none", "--devices", "cpu", "--runtime.workers", "0", "--side", "64", "--out", "scored")
    assert main(["evaluate", "video", "--backbone", "mean-colour", "--data", "mine", *options]) == 0
    keep(clip, 0)
    words = ("--video", "--backbone", "mean-colour", "--labels", "mine/Annotations", "--side", "64", "--device", "cpu")
    assert main(["segment", "mine/JPEGImages", *words, "--out", "out", "--write", "coco"]) == 0
    for video in ("first", "second"):
        for step in range(FRAMES):
            expected = np.array(Image.open(f"scored/segmentations/{video}/{step:05}.png"))
            np.testing.assert_array_equal(labels(Path("out"), f"{video}/{step:05}"), expected)
    assert {"contact.png", "coco.json", "about.json", "summary.csv"} <= {path.name for path in Path("out").iterdir()}


@pytest.mark.parametrize("steps", [(4,), (2,), (0, 4)])
def test_labels_are_propagated_both_ways(clip: Path, steps: tuple[int, ...]) -> None:
    keep(clip, *steps)
    segment_video(config(clip), SETTINGS, out=Path("out"))
    for step in range(FRAMES):
        np.testing.assert_array_equal(centres(labels(Path("out"), f"second/{step:05}")), centres(objects_at(step)))


def test_between_two_labelled_frames_the_nearer_one_counts_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The class of a still frame changes from 1 to 2 where the second labelled frame becomes nearer."""
    monkeypatch.chdir(tmp_path)
    for folder in ("frames", "labels"):
        Path(folder).mkdir()
    for step in range(6):
        Image.fromarray(COLOURS[np.ones((64, 64), dtype=int)]).save(f"frames/{step}.png")
    for step, value in ((0, 1), (5, 2)):
        Image.fromarray(np.full((64, 64), value, dtype=np.uint8)).save(f"labels/{step}.png")
    options = VideoConfig(BackboneSource("mean-colour"), "frames", labels="labels", device="cpu")
    segment_video(options, SETTINGS, out=Path("out"))
    assert [int(labels(Path("out"), str(step))[32, 32]) for step in range(6)] == [1, 1, 1, 2, 2, 2]


def test_pixels_without_a_class_remain_without(clip: Path) -> None:
    for path in keep(clip, 0).rglob("*.png"):
        values = np.array(Image.open(path))
        values[:, :16] = 255
        Image.fromarray(values).save(path)
    segment_video(config(clip), SETTINGS, out=Path("out"))
    assert (labels(Path("out"), "first/00000")[:, :16] == 255).all()


def test_an_interrupted_command_is_resumed(clip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(clip, 0, 4)
    broken = clip / "JPEGImages/second/00002.jpg"
    whole = broken.read_bytes()
    image = Image.open(broken).convert("RGB")
    image.resize((64, 64)).save(broken)
    with pytest.raises(DataError, match="00002"):
        segment_video(config(clip), SETTINGS, out=Path("out"))
    broken.write_bytes(whole)
    kept = {path: path.stat().st_mtime_ns for path in Path("out/labels/first").iterdir()}
    assert len(kept) == FRAMES
    with pytest.raises(FolderError, match="--resume"):
        segment_video(config(clip), SETTINGS, out=Path("out"))
    with pytest.raises(FolderError, match="neighbours"):
        segment_video(config(clip), PropagationSettings(side=64, neighbours=3), out=Path("out"), resume=True)
    found = segment_video(config(clip), SETTINGS, out=Path("out"), resume=True)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert (found.images, found.reused) == (2 * FRAMES, FRAMES + 2)


def test_unreadable_frames_are_skipped(clip: Path) -> None:
    keep(clip, 0, 4)
    (clip / "JPEGImages/first/00002.jpg").write_bytes(b"no image")
    found = segment_video(config(clip), SETTINGS, out=Path("out"))
    assert (found.images, list(found.skipped)) == (2 * FRAMES - 1, ["first/00002.jpg"])
    np.testing.assert_array_equal(centres(labels(Path("out"), "first/00003")), centres(objects_at(3)))
    with Path("out/summary.csv").open(newline="") as file:
        assert next(row for row in csv.DictReader(file) if row["image"] == "first/00002.jpg")["error"]


def test_frames_of_a_file_are_labelled(clip: Path) -> None:
    av = pytest.importorskip("av", reason="requires the extra video")
    with av.open("clip.mkv", "w") as container:
        stream = container.add_stream("ffv1", rate=25, options={})
        stream.width, stream.height, stream.pix_fmt = 128, 64, "bgr0"
        for step in range(FRAMES):
            frame = av.VideoFrame.from_ndarray(COLOURS[objects_at(step)], format="rgb24").reformat(format="bgr0")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    Path("labels").mkdir()
    Image.fromarray(objects_at(1)).save("labels/000001.png")
    options = VideoConfig(BackboneSource("mean-colour"), "clip.mkv", labels="labels", device="cpu")
    segment_video(options, SETTINGS, out=Path("out"))
    for step in range(FRAMES):
        np.testing.assert_array_equal(centres(labels(Path("out"), f"clip.mkv/{step:06}")), centres(objects_at(step)))


def unlabelled(clip: Path) -> None:
    (clip / "Annotations/second/00000.png").unlink()


def renamed(clip: Path) -> None:
    (clip / "Annotations/second/00000.png").rename(clip / "Annotations/second/00009.png")


def ambiguous(clip: Path) -> None:
    (clip / "Annotations/second/00000.png").rename(clip / "Annotations/00000.png")


def resized(clip: Path) -> None:
    path = clip / "Annotations/second/00000.png"
    Image.open(path).resize((64, 32), Image.Resampling.NEAREST).save(path)


def unreadable(clip: Path) -> None:
    (clip / "JPEGImages/second/00000.jpg").write_bytes(b"no image")


@pytest.mark.parametrize("spoil", [unlabelled, renamed, ambiguous, resized, unreadable])
def test_labels_that_fit_no_frame(clip: Path, spoil: Callable[[Path], None]) -> None:
    keep(clip, 0)
    spoil(clip)
    with pytest.raises(DataError, match=r"second|00000"):
        segment_video(config(clip), SETTINGS, out=Path("out"))
    assert not Path("out").exists()
