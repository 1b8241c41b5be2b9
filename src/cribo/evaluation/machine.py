"""Where and how features are computed and searched, where nothing is trained."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cribo.arguments import ConfigError
from cribo.devices import resolve_workers
from cribo.evaluation.cache import Encoder, FeatureCache
from cribo.retrieval.search import available_memory


@dataclass
class EvaluationRuntime:
    """Where and how it is computed; results do not depend on it beyond rounding.

    Attributes:
        devices: such as cuda:0,cuda:1 or cpu, which share the search. All GPUs, or the CPU where there is none, when
            not given.
        batch_size: images encoded at once, where they are of one size. Lower it if the device runs out of memory.
        workers: processes that read images; when not given, half of the cores.
        memory_gib: what the search may use on each device; half of what is free when not given. Less of it means
            reading the keys more often, with the same result.
        cache: folder that keeps features for the next evaluation of this backbone; none to hold them in memory.
    """

    devices: tuple[str, ...] | None = None
    batch_size: int = 16
    workers: int | None = None
    memory_gib: float | None = None
    cache: str = "~/.cache/cribo/features"

    def __post_init__(self) -> None:
        for name, least in (("batch_size", 1), ("workers", 0)):
            if (value := getattr(self, name)) is not None and value < least:
                raise ConfigError(f"runtime.{name} must be >= {least}, got {value}")
        if self.memory_gib is not None and self.memory_gib <= 0:
            raise ConfigError(f"runtime.memory_gib must be > 0, got {self.memory_gib}")


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
