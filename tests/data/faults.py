"""Image sources that fail as a week on a cluster has them fail, on purpose and as often as they are told to."""

import errno
import os
import signal
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import torch
from jaxtyping import UInt8
from torch import Tensor

from cribo.data.images import ImageFiles, ImageSource
from cribo.data.reading import UnreadableImage

Fault = Callable[[], None]
ALWAYS = 10**9


class Noise:
    """Images of noise in memory, some of which cannot be read."""

    def __init__(self, count: int, broken: Collection[int] = ()) -> None:
        self.count = count
        self.broken = frozenset(broken)

    def __len__(self) -> int:
        return self.count

    def load(self, index: int) -> UInt8[Tensor, "3 h w"]:
        if index in self.broken:
            raise UnreadableImage(self.name(index), "broken on purpose")
        generator = torch.Generator().manual_seed(index)
        height, width = 30 + index % 7, 40 + index % 5
        return torch.randint(0, 256, (3, height, width), dtype=torch.uint8, generator=generator)

    def name(self, index: int) -> str:
        return f"noise {index}"


class Faulty:
    """A source of which some images meet with a fault, the first so many times that they are asked for.

    Times are counted in files, for all processes together: a worker that is killed does not forget.

    Args:
        source: the images.
        folder: for the counts.
        faults: what happens, and how many times, by image.
    """

    def __init__(self, source: ImageSource, folder: Path, faults: Mapping[int, tuple[Fault, int]]) -> None:
        self.source = source
        self.folder = folder
        self.faults = dict(faults)
        folder.mkdir(exist_ok=True)

    def __len__(self) -> int:
        return len(self.source)

    def load(self, index: int) -> UInt8[Tensor, "3 h w"]:
        if index in self.faults:
            fault, times = self.faults[index]
            if self.asked(index) < times:
                with (self.folder / str(index)).open("a") as file:
                    file.write("x")
                fault()
        return self.source.load(index)

    def name(self, index: int) -> str:
        return self.source.name(index)

    def asked(self, index: int) -> int:
        """How often an image has met with its fault."""
        path = self.folder / str(index)
        return path.stat().st_size if path.exists() else 0


def drawn(count: int, seed: int, share: float, fault: Fault, times: int) -> dict[int, tuple[Fault, int]]:
    """A share of so many images that a seed draws, all with the same fault."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randperm(count, generator=generator)[: round(share * count)]
    return {int(image): (fault, times) for image in images}


def fails(number: int = errno.EIO) -> Fault:
    """Reading fails, as a network file system lets it."""

    def fault() -> None:
        raise OSError(number, os.strerror(number))

    return fault


def fails_within_pillow() -> None:
    """Reading fails as `ImageFiles` reports it."""
    raise UnreadableImage("x.jpg", "the server is away") from OSError(errno.ESTALE, os.strerror(errno.ESTALE))


def stalls(seconds: float) -> Fault:
    """Reading takes a while, or for ever as far as a test can tell."""
    return lambda: time.sleep(seconds)


def kills() -> None:
    """The process that reads is killed, as by a system without memory."""
    os.kill(os.getpid(), signal.SIGKILL)


def stops() -> None:
    """The process that reads is stopped with all of its threads: it answers nobody."""
    os.kill(os.getpid(), signal.SIGSTOP)


def after(path: Path, fault: Fault) -> Fault:
    """A fault as soon as there is a file."""

    def wait() -> None:
        while not path.exists():
            time.sleep(0.005)
        fault()

    return wait


def crashes() -> None:
    """The decoder accesses memory that is not its own."""
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGSEGV)


def loses(files: ImageFiles, index: int) -> Fault:
    """The file is deleted just before it is read."""
    return lambda: Path(files.path(index)).unlink(missing_ok=True)
