"""Base class of evaluation protocols. This module does not import torch."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from cribo.base.errors import ConfigError
from cribo.base.trust import import_by_path
from cribo.evaluation.config import PROTOCOLS, Settings

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor

    from cribo.evaluation.pictures import Panel
    from cribo.evaluation.results import EvaluationResult
    from cribo.evaluation.run import Run


@dataclass
class Outcome:
    """Measurement of a protocol.

    Attributes:
        rows: one row per value of the varied setting, with its metrics in 0-1 and optionally `<metric>_std`,
            `per_class`, `confusion` and `draws` (`EvaluationResult`).
        classes: class names.
        panels: images with labels and predictions, to draw.
        palette: colour of each class.
        data: further description of the data for `results.json`.
        packages: versions of further packages that the result depends on.
        device: device of the measurement; the run's first device if None.
        seconds: duration of the measurement; the time since the start of the evaluation if None.
        image_counts: counts of each scored image for intervals (`intervals.image_counts`), by value of the varied
            setting; written to `images.npz`.
        write: callback that writes further files to the folder; called on rank 0 with the result and the folder.
    """

    rows: list[dict[str, Any]]
    classes: Sequence[str]
    panels: "Sequence[Panel]" = ()
    palette: Sequence[tuple[int, int, int]] = ()
    data: dict[str, Any] = field(default_factory=dict)
    packages: dict[str, str] = field(default_factory=dict)
    device: Any = None
    seconds: float | None = None
    image_counts: "Mapping[Any, Int[Tensor, 'd q 3 c']]" = field(default_factory=dict)
    write: "Callable[[EvaluationResult, Path], object] | None" = None


@dataclass(frozen=True, kw_only=True)
class Protocol(Settings, ABC):
    """Base class of evaluation protocols: settings, and the measurement of a backbone.

    A protocol is a frozen dataclass. Its fields are its settings, and its class variables (`config.Settings`) describe
    it; backbone, data and runtime are not part of it. A protocol of your own may be one class, which imports torch
    inside its methods to keep help and option errors fast.
    """

    def prepare(self, run: "Run") -> Self:
        """Return this protocol with all settings set and validated against backbone and data.

        Raises:
            ValueError: settings, backbone and data are incompatible.
        """
        return self

    def used(self, run: "Run") -> dict[str, Any]:
        """Return the settings for `results.json` that the metrics depend on; called after `prepare`."""
        return asdict(self)

    @abstractmethod
    def measure(self, run: "Run") -> Outcome:
        """Evaluate the backbone of a run; called after `prepare`."""

    def report(self, result: "EvaluationResult") -> list[Any]:
        """Return further renderables to print below the tables of a result."""
        return []

    def places(self, folder: Path) -> dict[str, Any]:
        """Return further paths to print, by label."""
        return {}


class PatchProtocol(Protocol):
    """Base class of protocols that use the patch features of a frozen backbone (`Run.patches`)."""

    def used(self, run: "Run") -> dict[str, Any]:
        """Return the settings, with the number of layers that provide features."""
        return {**asdict(self), "layers": run.source.layers}


def find_settings(name: str) -> type[Settings]:
    """Return the class whose fields are the options of a protocol, without importing torch for built-in protocols.

    Raises:
        ConfigError: as in `find_protocol`.
    """
    return import_by_path(PROTOCOLS[name].settings, "evaluation") if name in PROTOCOLS else find_protocol(name)


def find_protocol(name: str) -> type[Protocol]:
    """Return the class of a protocol, by its name or the import path of your own protocol.

    Raises:
        ConfigError: no such protocol, or the class does not implement `Protocol`.
    """
    path = PROTOCOLS[name].protocol if name in PROTOCOLS else name
    found = import_by_path(path, "evaluation", known=PROTOCOLS)
    if not (isinstance(found, type) and issubclass(found, Protocol)):
        raise ConfigError(f"{name} must be a subclass of cribo.evaluation.Protocol, see docs/extending.md")
    missing = [part for part in ("name", "title", "metrics", "varies") if not hasattr(found, part)]
    missing += sorted(found.__abstractmethods__)
    if missing:
        raise ConfigError(f"the protocol {name} has no {', '.join(missing)}: see docs/extending.md")
    return found
