"""A small work whose parts can fail; workers of Ray import it."""

import errno
import os
import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from cribo.errors import MissingData
from cribo.files import write_text


class Poisoned(Exception):
    """An error that cannot be pickled, because its arguments are not its message."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} and {two}")


class Part(NamedTuple):
    """A name, and what happens to it."""

    name: str
    fault: str = ""


class Account(NamedTuple):
    """A completed part."""

    name: str
    pid: int


@dataclass
class ToyWork:
    """Writes a file for each part, with its name twice.

    Args:
        folder: output folder; `begun` in it has an empty file for each attempt.
        seconds: duration of each part.
    """

    folder: Path
    seconds: float = 0

    def __call__(self, parts: Iterable[Part]) -> Iterator[Account]:
        for part in parts:
            attempt = self._begin(part)
            if part.fault == "kill" or (part.fault == "kill once" and attempt == 1):
                os.kill(os.getpid(), signal.SIGKILL)
            elif part.fault == "wait":
                self._wait_for("release")
            elif part.fault:
                raise ERRORS[part.fault]
            time.sleep(self.seconds)
            write_text(self.folder / f"{part.name}.txt", content_of(part))
            yield Account(part.name, os.getpid())

    def _begin(self, part: Part) -> int:
        begun = self.folder / "begun"
        begun.mkdir(exist_ok=True)
        (begun / f"{part.name}-{os.getpid()}-{time.time_ns()}").touch()
        return attempts_of(self.folder, part)

    def _wait_for(self, name: str) -> None:
        while not (self.folder / name).exists():
            time.sleep(0.02)


ERRORS: dict[str, Exception] = {
    "missing data": MissingData("photographs/ does not exist: did you mean photos/"),
    "full disk": OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "features.lance"),
    "unpicklable": Poisoned("one", "two"),
}


def content_of(part: Part) -> str:
    return part.name * 2


def attempts_of(folder: Path, part: Part) -> int:
    return len([*(folder / "begun").glob(f"{part.name}-*")])


def workers_of(folder: Path, part: Part) -> list[int]:
    """Return the process of each attempt."""
    return [int(path.name.split("-")[1]) for path in (folder / "begun").glob(f"{part.name}-*")]
