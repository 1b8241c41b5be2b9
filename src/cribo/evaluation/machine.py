"""Where and how features are computed and searched, where nothing is trained."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cribo.devices import resolve_workers
from cribo.evaluation.cache import Encoder, FeatureCache
from cribo.evaluation.runtime import EvaluationRuntime
from cribo.retrieval.search import available_memory


@dataclass
class Machine:
    """Where and how it is computed; the result does not depend on it beyond rounding.

    Args:
        devices: the search is shared among all of them.
        batch_size: images encoded at once, where they are of one size.
        workers: processes that read images.
        memory_gib: what the search may use on each device; by default, half of what is free.
        cache: folder that keeps features, None to hold them in memory.
    """

    devices: tuple[str, ...] = ("cpu",)
    batch_size: int = 16
    workers: int = 0
    memory_gib: float | None = None
    cache: FeatureCache | None = None

    @property
    def budget(self) -> int:
        """Bytes that a search may use on each device."""
        if self.memory_gib is not None:
            return int(self.memory_gib * 2**30)
        return min(available_memory(device) for device in self.devices) // 2


def make_machine(
    config: EvaluationRuntime, devices: tuple[str, ...], encoder: Encoder, about: dict[str, Any]
) -> Machine:
    """What a runtime configuration means for an encoder.

    Args:
        config: what is asked for.
        devices: that are there.
        encoder: whose features are kept.
        about: the encoder's `source` and `architecture`, for those who look at the cache.
    """
    cache = None
    if config.cache != "none":
        cache = FeatureCache(Path(config.cache), encoder, {name: about[name] for name in ("source", "architecture")})
    return Machine(devices, config.batch_size, resolve_workers(config.workers), config.memory_gib, cache)
