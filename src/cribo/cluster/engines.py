"""Engines, which run the work of a command on the parts of a collection."""

from collections.abc import Generator, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Protocol, TypeVar

from cribo.cluster.config import EngineOptions

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


class LocalEngine:
    """Runs work in this process, part by part."""

    def run(self, work: Work[Part, Result], parts: Sequence[Part]) -> Generator[Result, None, None]:
        """Yield the result of each part, in order."""
        return work(iter(parts))


def open_engine(options: EngineOptions, *, writes_to: Path | None = None) -> AbstractContextManager[Engine]:
    """Return the engine of a command for a `with` statement, after checking it.

    Args:
        options: of the command.
        writes_to: folder to which the work writes, which all workers must see; None for a URL.

    Raises:
        ConfigError: the cluster cannot run the workers.
        ConnectionError: the cluster does not answer.
        ImportError: Ray is not installed.
    """
    if options.engine == "local":
        return nullcontext(LocalEngine())
    from cribo.cluster.ray_engine import open_ray

    return open_ray(options.ray, writes_to=writes_to)
