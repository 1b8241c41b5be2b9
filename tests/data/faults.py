"""Image sources with injected faults, as they occur on clusters."""

import errno
import fcntl
import os
import signal
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import torch
from jaxtyping import UInt8
from torch import Tensor

from cribo.base.errors import UnreadableImage
from cribo.data.sources.images import ImageFiles, ImageSource

Fault = Callable[[], None]
ALWAYS = 10**9


class Noise:
    """Noise images in memory, some of which are unreadable."""

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
    """An image source that injects faults into the first loads of some images.

    Loads are counted in files shared by all processes, so that killed workers do not reset them.

        Args:
            source: the images.
            folder: folder of the counts.
            faults: fault and number of repetitions of each image.
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
            with (self.folder / str(index)).open("a") as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # two workers may load an image for successive epochs at once
                due = self.asked(index) < times
                if due:
                    file.write("x")
            if due:
                fault()
        return self.source.load(index)

    def name(self, index: int) -> str:
        return self.source.name(index)

    def asked(self, index: int) -> int:
        """Return how often the fault of an image has been injected."""
        path = self.folder / str(index)
        return path.stat().st_size if path.exists() else 0


def drawn(count: int, seed: int, share: float, fault: Fault, times: int) -> dict[int, tuple[Fault, int]]:
    """Return the same fault for a random share of `count` images."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randperm(count, generator=generator)[: round(share * count)]
    return {int(image): (fault, times) for image in images}


def fails(number: int = errno.EIO) -> Fault:
    """Raise an error of a network file system."""

    def fault() -> None:
        raise OSError(number, os.strerror(number))

    return fault


def fails_within_pillow() -> None:
    """Raise a network error as `ImageFiles` does."""
    raise UnreadableImage("x.jpg", "the server is away") from OSError(errno.ESTALE, os.strerror(errno.ESTALE))


def stalls(seconds: float) -> Fault:
    """Delay reading, possibly longer than a test runs."""
    return lambda: time.sleep(seconds)


def kills() -> None:
    """Kill the reading process, as the out-of-memory killer does."""
    os.kill(os.getpid(), signal.SIGKILL)


def stops() -> None:
    """Stop the reading process with all of its threads."""
    os.kill(os.getpid(), signal.SIGSTOP)


def after(path: Path, fault: Fault) -> Fault:
    """Inject a fault once a file exists."""

    def wait() -> None:
        while not path.exists():
            time.sleep(0.005)
        fault()

    return wait


def crashes() -> None:
    """Raise SIGSEGV, as a broken decoder does."""
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGSEGV)


def loses(files: ImageFiles, index: int) -> Fault:
    """Delete the file just before it is read."""
    return lambda: Path(files.path(index)).unlink(missing_ok=True)
