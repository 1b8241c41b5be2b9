"""Clips of frames in folders, in shards, in video files, and of moving scenes."""

import pickle
import struct
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from PIL import Image

from cribo.base.errors import DataError, InputError, UnreadableImage
from cribo.data.config import Reading
from cribo.data.samples import LazyImage
from cribo.data.scenes import Scenes
from cribo.data.sources.clips import Clips
from cribo.data.sources.images import OrderedSource, open_images
from cribo.data.sources.shard_writing import write_shards
from cribo.data.sources.shards import open_shards
from cribo.data.sources.video_files import open_video_files

MOVING = Scenes(1, size=96, frames=60)


def write_frames(folder: Path, names: list[str]) -> None:
    folder.mkdir(parents=True)
    for name in names:
        Image.new("RGB", (8, 8)).save(folder / name)


def write_file(path: Path, codec: str, frames: int = 60) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream(codec, rate=25)
        stream.width = stream.height = 96
        stream.pix_fmt, stream.bit_rate = "yuv420p", 5_000_000
        for index in range(frames):
            pixels = MOVING.load(index).permute(1, 2, 0).numpy()
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())


def frame_names(clips: Clips) -> list[list[str]]:
    return [[clips.images.name(frame) for frame in clips.frames(index)] for index in range(len(clips))]


def test_frames_are_ordered_by_number_within_folder_and_prefix(tmp_path: Path) -> None:
    write_frames(tmp_path / "a", ["f10.png", "f9.png", "f11.png", "g1.png", "g2.png"])
    write_frames(tmp_path / "b", ["f12.png", "f13.png"])
    assert frame_names(Clips(open_images(tmp_path))) == [
        ["a/f9.png", "a/f10.png", "a/f11.png"],
        ["a/g1.png", "a/g2.png"],
        ["b/f12.png", "b/f13.png"],
    ]


def test_channels_of_frames_are_chosen(tmp_path: Path) -> None:
    write_file(tmp_path / "a.mp4", "mpeg4", frames=3)
    frame = open_video_files(tmp_path).load(1)
    chosen = open_video_files(tmp_path, reading=Reading(channels=(2, 0)))
    assert torch.equal(chosen.load(1), frame[[2, 0]])
    for reading in (Reading(channels=(0, 3)), Reading(page=1), Reading(channels=(0, 1), range=(0, 1, 0, 1))):
        with pytest.raises(InputError, match=r"--(channels|page|range)"):
            open_video_files(tmp_path, reading=reading)


def test_long_videos_are_cut_into_clips_of_nearly_equal_length() -> None:
    clips = Clips(Scenes(2, size=16, frames=11), most=4)
    assert [len(clips.frames(index)) for index in range(len(clips))] == [4, 4, 3, 4, 4, 3]
    strided = Clips(Scenes(1, size=16, frames=11), most=4, stride=2)
    assert [strided.frames(index) for index in range(2)] == [[0, 2, 4], [6, 8, 10]]


def test_the_image_of_a_clip_is_its_middle_frame() -> None:
    scenes = Scenes(2, size=16, frames=5)
    clips = Clips(scenes)
    assert torch.equal(clips.load(1), scenes.load(7))
    clip = LazyImage(clips, 1)
    assert [frame.name for frame in clip.frames] == [scenes.name(index) for index in range(5, 10)]
    assert torch.equal(clip.frames[3].load(), scenes.load(8))
    with pytest.raises(DataError, match="scene-0-000000 is an image, not a clip"):
        _ = LazyImage(Scenes(1, size=16), 0).frames


def test_clips_of_shards_are_read_in_the_order_of_their_shards(tmp_path: Path) -> None:
    for video in range(8):
        write_frames(tmp_path / "frames" / f"v{video}", [f"{number}.png" for number in range(3)])
    write_shards(open_images(tmp_path / "frames"), tmp_path / "shards", shard_bytes=4096)
    shards = open_shards(tmp_path / "shards")
    clips = Clips(shards)
    assert isinstance(clips, OrderedSource)
    order = clips.epoch_order(0, 0)
    assert sorted(order.tolist()) == list(range(len(clips)))
    place = shards.epoch_order(0, 0).argsort()
    first = place[torch.tensor([clips.frames(index)[0] for index in order.tolist()])]
    assert torch.equal(first, first.sort().values)
    assert len(LazyImage(pickle.loads(pickle.dumps(clips)), 0).frames) == len(clips.frames(0))


@pytest.mark.parametrize(("name", "codec"), [("a.mp4", "libx264"), ("b.mkv", "mpeg4")])
def test_frames_of_video_files_in_any_order(tmp_path: Path, name: str, codec: str) -> None:
    write_file(tmp_path / "videos" / name, codec)
    files = open_video_files(tmp_path / "videos")
    assert len(files) == 60
    originals = torch.stack([MOVING.load(index) for index in range(60)]).float()
    order = [*range(10), *torch.randperm(60, generator=torch.Generator().manual_seed(0)).tolist()]
    nearest = [int((originals - files.load(index).float()).abs().mean(dim=(1, 2, 3)).argmin()) for index in order]
    assert nearest == order
    clips = Clips(files, most=32)
    assert clips.name(1) == f"{name}/000030 to 000059"
    assert torch.equal(pickle.loads(pickle.dumps(files)).load(7), files.load(7))


def test_damaged_video_files(tmp_path: Path) -> None:
    write_file(tmp_path / "whole" / "a.mp4", "libx264")
    content = bytearray((tmp_path / "whole" / "a.mp4").read_bytes())
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "a.mp4").write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match=r"a\.mp4 cannot be read as a video .*: remove or replace it"):
        open_video_files(tmp_path / "cut")
    third = len(content) // 3
    content[third : 2 * third] = bytes(third)
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "a.mp4").write_bytes(content)
    files = open_video_files(tmp_path / "damaged")
    LazyImage(files, 0).load()
    with pytest.raises(UnreadableImage, match=r"a\.mp4/000040: "):
        LazyImage(files, 40).load()
    files.load(1)  # after an error


def test_a_file_that_is_no_video(tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_text("not a video")
    with pytest.raises(DataError, match=r"a\.mp4 cannot be read as a video"):
        open_video_files(tmp_path)


def test_a_frame_of_a_file_does_not_depend_on_earlier_reads(tmp_path: Path) -> None:
    """A file whose frames are shown for different times."""
    (tmp_path / "videos").mkdir()
    random = torch.Generator().manual_seed(0)
    with av.open(str(tmp_path / "videos" / "a.mp4"), "w") as container:
        stream: Any = container.add_stream("libx264", rate=25)
        stream.width = stream.height = 96
        stream.pix_fmt = "yuv420p"
        stream.codec_context.time_base = Fraction(1, 1000)
        time = 0
        for index in range(60):
            frame = av.VideoFrame.from_ndarray(MOVING.load(index).permute(1, 2, 0).numpy(), format="rgb24")
            frame.pts, frame.time_base = time, Fraction(1, 1000)
            time += 10 + int(torch.randint(60, (), generator=random))
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    files = open_video_files(tmp_path / "videos")
    in_order = [files.load(index) for index in range(len(files))]
    for index in torch.randperm(len(files), generator=random).tolist():
        assert torch.equal(files.load(index), in_order[index])
    assert torch.equal(open_video_files(tmp_path / "videos").load(len(files) - 1), in_order[-1])


def test_video_files_are_upright(tmp_path: Path) -> None:
    path = tmp_path / "a.mp4"
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 96, 64, "yuv420p"
        pixels = np.zeros((64, 96, 3), np.uint8)
        pixels[:32] = [255, 0, 0]
        container.mux([*stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")), *stream.encode()])
    content = path.read_bytes()
    one = 0x10000
    upright = struct.pack(">9i", one, 0, 0, 0, one, 0, 0, 0, 2**30)
    sideways = struct.pack(">9i", 0, one, 0, -one, 0, 0, 64 * one, 0, 2**30)  # to be shown turned by 90 degrees
    start = content.index(upright, content.index(b"tkhd"))
    path.write_bytes(content[:start] + sideways + content[start + len(upright) :])
    frame = open_video_files(path).load(0).float()
    assert frame.shape == (3, 96, 64)
    assert frame[0, :, 40:].mean() > 200
    assert frame[0, :, :24].mean() < 50
