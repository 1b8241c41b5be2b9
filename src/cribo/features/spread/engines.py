"""Engines, which run the work of a command on the parts of a collection."""

from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from cribo.features.spread.config import EngineOptions
from cribo.features.spread.work import Engine, Part, Result, Work


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
    from cribo.features.spread.ray_engine import open_ray

    return open_ray(options.ray, writes_to=writes_to)
