"""Interface between the work of a command and the engines that run it."""

from collections.abc import Generator, Iterable, Sequence
from typing import Protocol, TypeVar

Part_contra = TypeVar("Part_contra", contravariant=True)
Result_co = TypeVar("Result_co", covariant=True)
Part = TypeVar("Part")
Result = TypeVar("Result")


class Work(Protocol[Part_contra, Result_co]):
    """Work on parts of a collection, which an engine may pickle, and call in several processes.

    It opens the backbone in the process that calls it. It writes its results itself, a part atomically, and returns
    a short account of each part. A part may be repeated after a failure, and must then have the same results.
    """

    def __call__(self, parts: Iterable[Part_contra]) -> Generator[Result_co, None, None]:
        """Work on each part, and yield its result."""
        ...


class Engine(Protocol):
    """Runs work on parts."""

    def run(self, work: Work[Part, Result], parts: Sequence[Part]) -> Generator[Result, None, None]:
        """Yield the result of each part once, in any order, as soon as it is complete."""
        ...
