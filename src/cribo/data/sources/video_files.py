"""Frames of video files, as an ImageSource. Requires the extra `video` (PyAV)."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cribo.base.errors import DataError, InputError, TooManyPixels, UnreadableImage
from cribo.base.packages import require_packages
from cribo.base.wording import counted
from cribo.data.config import DEFAULT_READING, Reading
from cribo.data.readers.pillow import chosen_channels, require_plain
from cribo.data.sources.images import PackedNames, list_files

if TYPE_CHECKING:
    from jaxtyping import UInt8
    from torch import Tensor

_NEAR = 1.0  # seconds up to which frames are decoded one after the other rather than sought

VIDEO_EXTENSIONS = (".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".mpg", ".mpeg")


class VideoFiles:
    """The frames of video files, file after file; created by `open_video_files`.

    Opening reads only the header of each file. A frame is found by its time, number / frame rate, so frames of
    files with variable frame rates are evenly spaced, too; such a file can have the same frame twice. Reading the
    frames of a file in order decodes each of them once.

    Args:
        folder: folder of the files.
        names: their paths below it.
        reading: how images are read.

    Raises:
        DataError: a file has no video stream, or its header cannot be read.
        InputError: a pixel size is given, since video files state none; or a page, a range for each channel, or a
            channel that frames do not have.
        MissingPackage: PyAV is not installed.
    """

    def __init__(
        self, folder: str | os.PathLike[str], names: Iterable[str], *, reading: Reading = DEFAULT_READING
    ) -> None:
        if reading.pixel_size:
            raise InputError(
                f"video files state no pixel size, which --pixel_size {reading.pixel_size:g} requires: give "
                "--pixel_size 0"
            )
        require_plain("frames of video files", reading)
        require_packages("reading video files", "av", extra="video")
        self.folder, self.reading = os.fspath(folder), reading
        self.names = PackedNames(names)
        self._ends = np.cumsum([0, *(_count_frames(self._path(file)) for file in range(len(self.names)))])
        self._reader: _Reader | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reader": None}

    def __len__(self) -> int:
        return int(self._ends[-1])

    def name(self, index: int) -> str:
        """Return the path of the file and the number of the frame in it, from 0."""
        file, frame = self._place(index)
        return f"{self.names[file]}/{frame:06d}"

    def load(self, index: int) -> UInt8[Tensor, "c h w"]:
        """Decode a frame as RGB, or the chosen channels of it.

        Raises:
            UnreadableImage: the file is damaged or ends before this frame, or the frame has too many pixels.
        """
        file, frame = self._place(index)
        path, reader, self._reader = self._path(file), self._reader, None  # not kept after an error
        with _errors_as_unreadable(path):
            # A forked worker must not share the position in a file with its parent.
            if reader is None or (reader.path, reader.process) != (path, os.getpid()):
                reader = _Reader(path, self.reading)
            pixels = reader.read(frame)
        self._reader = reader
        return pixels

    def _place(self, index: int) -> tuple[int, int]:
        """Return the number of the file, and that of the frame in it."""
        if not 0 <= index < len(self):
            raise IndexError(f"index must be in 0..{len(self) - 1}, got {index}")
        file = int(np.searchsorted(self._ends, index, side="right")) - 1
        return file, index - int(self._ends[file])

    def _path(self, file: int) -> str:
        return str(Path(self.folder) / self.names[file])


class _Reader:
    """Decoder of one file that continues from the frame that was read last.

    Frame `number` is the first one that is shown after (number - 1/2) / rate seconds, whatever was read before.
    """

    def __init__(self, path: str, reading: Reading) -> None:
        import av

        self.path, self.process, self._reading = path, os.getpid(), reading
        self._container = av.open(path)
        self._stream = self._container.streams.video[0]
        if self._stream.width * self._stream.height > reading.max_pixels:
            raise TooManyPixels(path, f"{self._stream.width} x {self._stream.height} pixels", reading.max_pixels)
        self._frames: Iterator[Any] = iter(())
        self._frame: Any = None
        self._earliest = 0.0  # time from which on `_frame` is the first one, in seconds

    def read(self, number: int) -> UInt8[Tensor, "c h w"]:
        import torch

        stream, unit = self._stream, self._stream.time_base or Fraction(1, 90_000)
        start = stream.start_time or 0
        earliest = float(start * unit) + (number - 0.5) / _rate(stream)
        if self._frame is None or not self._earliest <= earliest <= self._frame.time + _NEAR:
            self._container.seek(max(start, int(earliest / unit)), stream=stream)  # to the key frame before this time
            self._frames, self._frame, self._earliest = self._container.decode(stream), None, earliest
        while self._frame is None or self._frame.time < earliest:
            if self._frame is not None:
                self._earliest = math.nextafter(self._frame.time, math.inf)
            self._frame = next(self._frames, None)
            if self._frame is None or self._frame.time is None:
                raise UnreadableImage(
                    self.path, f"it has no frame {number}: the file is damaged, or its header is wrong"
                )
        pixels = chosen_channels(self._frame.to_ndarray(format="rgb24"), self._reading)
        # Phones store upright frames sideways, with the rotation in degrees, counter-clockwise.
        turned = np.ascontiguousarray(np.rot90(pixels, round(self._frame.rotation / 90)))
        return torch.from_numpy(turned).permute(2, 0, 1)


def _rate(stream: Any) -> float:
    """Return the mean number of frames per second."""
    return float(stream.average_rate or 25)


def _count_frames(path: str) -> int:
    """Return the number of frames according to the header, or to the duration if it has none."""
    import av.error

    try:
        with av.open(path) as container:
            if not container.streams.video:
                raise DataError(f"{path} has no video stream: remove it")
            stream = container.streams.video[0]
            if stream.frames:
                return stream.frames
            if stream.duration is not None and stream.time_base is not None:
                return int(float(stream.duration * stream.time_base) * _rate(stream))
            return int((container.duration or 0) / av.time_base * _rate(stream))
    except (av.error.FFmpegError, OSError) as error:
        raise DataError(
            f"{path} cannot be read as a video ({error.strerror or error}): remove or replace it"
        ) from error


@contextmanager
def _errors_as_unreadable(path: str) -> Iterator[None]:
    import av.error

    try:
        yield
    except av.error.FFmpegError as error:
        cause = error if isinstance(error, OSError) else None
        raise UnreadableImage(path, error.strerror or str(error)) from cause


def has_video_files(path: Path) -> bool:
    """Whether a path is a video file, or a folder that contains one at any depth."""
    if path.is_dir():
        return next(list_files(path, VIDEO_EXTENSIONS), None) is not None
    return path.suffix.lower() in VIDEO_EXTENSIONS and path.is_file()


def open_video_files(path: Path, *, reading: Reading = DEFAULT_READING) -> VideoFiles:
    """Open a video file, or all those below a folder.

    Raises:
        DataError: a file cannot be read, or there is no frame.
        MissingPackage: PyAV is not installed.
    """
    folder, names = (path, list(list_files(path, VIDEO_EXTENSIONS))) if path.is_dir() else (path.parent, [path.name])
    files = VideoFiles(folder, names, reading=reading)
    if not len(files):
        raise DataError(f"the {counted(len(names), 'video file')} of {path} have no frames")
    return files
