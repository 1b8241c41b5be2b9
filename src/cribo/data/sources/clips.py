"""Clips: consecutive frames of videos, as the items of a collection.

The frames of a video are the images of a folder whose names differ in their last number only, such as street_0001.jpg
and street_0002.jpg; the number gives their order. Video files are read as folders of numbered frames (`VideoFiles`).
"""

import re
from collections.abc import Iterable
from functools import partial
from pathlib import PurePosixPath

import numpy as np
import torch
from jaxtyping import Int, Int64, UInt8
from torch import Tensor

from cribo.base.errors import DataError
from cribo.data.sources.images import ImageSource, OrderedSource

CLIP_FRAMES = 32
"""Default maximum number of frames of a clip."""

_LAST_NUMBER = re.compile(r"(.*?)(\d*)$", re.DOTALL)


class Clips:
    """The clips of a collection of frames; an ImageSource whose items are clips, each shown as its middle frame.

    Args:
        images: frames of any number of videos.
        most: maximum number of frames of a clip; longer videos are cut into clips of nearly equal length.
        stride: use one in this many frames.

    >>> from cribo.data.scenes import Scenes
    >>> clips = Clips(Scenes(2, frames=5), most=3)
    >>> len(clips), clips.frames(0), clips.frames(1), clips.name(2)
    (4, [0, 1, 2], [3, 4], 'scene-0-000001-00 to 02')
    """

    def __init__(self, images: ImageSource, *, most: int = CLIP_FRAMES, stride: int = 1) -> None:
        self.images = images
        self.most, self.stride = most, stride
        clips = []
        for video in videos_in(images.name(index) for index in range(len(images))):
            used = np.array(video[::stride])
            clips += np.array_split(used, -(-len(used) // most))
        # Flat arrays contain no Python objects, so workers share them.
        self._frames = np.concatenate(clips)
        self._ends = np.cumsum([0, *map(len, clips)])
        if isinstance(images, OrderedSource):
            self.epoch_order = partial(_clip_order, images, self._frames[self._ends[:-1]])

    def __len__(self) -> int:
        return len(self._ends) - 1

    def frames(self, index: int) -> list[int]:
        """Return the indices of a clip's frames in `images`, in order."""
        if not 0 <= index < len(self):
            raise IndexError(f"clip index must be in 0..{len(self) - 1}, got {index}")
        return self._frames[self._ends[index] : self._ends[index + 1]].tolist()

    def name(self, index: int) -> str:
        """Return the name of a clip's first frame, and the last part of that of its last frame."""
        first, last = (self.images.name(self.frames(index)[place]) for place in (0, -1))
        return f"{first} to {_LAST_NUMBER.fullmatch(PurePosixPath(last).stem)[2] or last}"  # pyright: ignore

    def load(self, index: int) -> UInt8[Tensor, "c h w"]:
        """Load the middle frame of a clip; raises UnreadableImage as `images` does."""
        frames = self.frames(index)
        return self.images.load(frames[len(frames) // 2])

    def require_frames(self, least: int) -> None:
        """Check that every clip has enough frames.

        Args:
            least: number of frames that a sample reads.

        Raises:
            DataError: a clip is shorter.
        """
        lengths = np.diff(self._ends)
        short = np.flatnonzero(lengths < least)
        if len(short):
            first = self.images.name(self.frames(int(short[0]))[0])
            raise DataError(
                f"a clip must have at least {least} frames, which a sample reads, but {len(short)} of {len(self)} have "
                f"fewer: the first, of {first}, has {lengths[short[0]]}. Frames of a video are the images of a folder "
                "whose names differ in their last number only. Remove short videos, read fewer frames "
                f"(objective.args.frames), or change data.video.frames {self.most} or data.video.stride {self.stride}: "
                "a video is cut into clips of nearly equal length"
            )


def videos_in(names: Iterable[str]) -> list[list[int]]:
    """Group the frames of a collection by video.

    Args:
        names: paths of the frames.

    Returns:
        The indices of the frames of each video, in the order of their numbers.

    >>> videos_in(["a/f2.jpg", "a/f10.jpg", "a/f1.jpg", "b/1.png", "b/still.png"])
    [[2, 0, 1], [3], [4]]
    """
    videos: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for index, name in enumerate(names):
        path = PurePosixPath(name)
        match = _LAST_NUMBER.fullmatch(path.stem)
        assert match is not None
        videos.setdefault((str(path.parent), match[1]), []).append((int(match[2] or 0), index))
    return [[index for _, index in sorted(frames)] for frames in videos.values()]


def _clip_order(images: OrderedSource, first: Int64[np.ndarray, " n"], seed: int, epoch: int) -> Int[Tensor, " n"]:
    """Return the clips in the order of their first frames in an epoch of the frames."""
    place = images.epoch_order(seed, epoch).argsort()
    return place[torch.from_numpy(first)].argsort()
