"""Base class and registry of evaluation protocols. This module does not import torch."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from cribo.base.errors import ConfigError, InputError
from cribo.base.trust import import_by_path
from cribo.evaluation.data import SegmentationData
from cribo.evaluation.runtime import EvaluationRuntime, TrainingRuntime
from cribo.evaluation.settings import Settings
from cribo.features.config import BackboneSource

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor

    from cribo.evaluation.pictures import Panel
    from cribo.evaluation.results import EvaluationResult
    from cribo.evaluation.run import Run


PROTOCOLS: Mapping[str, str] = {
    "dense-nn": "cribo.evaluation.dense_neighbours.protocol.DenseNN",
    "linear": "cribo.evaluation.segmentation.protocol.Linear",
    "segmenter": "cribo.evaluation.segmentation.protocol.FinetunedSegmenter",
    "detection": "cribo.evaluation.detection.protocol.Detection",
    "image-nn": "cribo.evaluation.image_neighbours.protocol.ImageNN",
    "overclustering": "cribo.evaluation.overclustering.protocol.Overclustering",
    "discovery": "cribo.evaluation.discovery.protocol.Discovery",
    "correspondence": "cribo.evaluation.correspondence.protocol.Correspondence",
    "depth": "cribo.evaluation.depth.protocol.Depth",
    "video": "cribo.evaluation.video.protocol.VideoPropagation",
}
"""Import path of each protocol's class, by its name on the command line."""


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
    """Base class of evaluation protocols: settings, data, measurement and description.

    A protocol is a frozen dataclass. Its fields are its settings; they become options of `cribo evaluate`, with the
    `Attributes:` section of its docstring as their help. Backbone, data and runtime are not part of it. Modules of
    protocols import torch inside functions, which keeps help and option errors fast.

    Attributes:
        title: title in headings.
        metrics: metrics of each row, the headline metric first.
        varies: setting that varies between rows.
        class_metric: per-class metric: IoU, accuracy or AP.
        data_type: dataclass of the `--data` options; its `open` returns `Splits`. For `cribo benchmark`, its `find`
            returns the data in a folder, and its `layout` names the expected files.
        runtime_type: dataclass of the `--runtime` options, `EvaluationRuntime` or `TrainingRuntime`.
        runtime_defaults: defaults that override those of `runtime_type`.
        roles: names that replace keys of the data description in `results.json`, such as memory for train.
        description: help text of the command.
        aliases: aliases of options, in addition to the common ones.
        pictures: meaning of the number --pictures, for its help.
        quick_limit: number of images per split for `cribo benchmark --quick`.
        less_memory: advice printed when a device runs out of memory.
    """

    title: ClassVar[str]
    metrics: ClassVar[tuple[str, ...]]
    varies: ClassVar[str]
    class_metric: ClassVar[str] = "IoU"
    data_type: ClassVar[type[Any]] = SegmentationData
    runtime_type: ClassVar[type[Any]] = EvaluationRuntime
    runtime_defaults: ClassVar[Mapping[str, Any]] = {}
    roles: ClassVar[Mapping[str, str]] = {}
    description: ClassVar[str] = ""
    aliases: ClassVar[Mapping[str, str]] = {}
    pictures: ClassVar[str] = "images for which the prediction is drawn"
    quick_limit: ClassVar[int] = 40
    less_memory: ClassVar[str] = "lower --runtime.batch_size or --runtime.memory_gib"

    @classmethod
    def trains(cls) -> bool:
        """Whether the protocol trains; its evaluations write checkpoints and can be resumed."""
        return issubclass(cls.runtime_type, TrainingRuntime)

    @classmethod
    def data_in(cls, folder: Path) -> Any | None:
        """Return the data configuration of a folder, None if its layout does not match.

        An incomplete data set matches; opening it raises an error that names the missing files. A `data_type` without
        `find` matches if it can be opened with the folder as `root`, provided that no other field is required.
        """
        if hasattr(cls.data_type, "find"):
            return cls.data_type.find(folder)
        needed = {part.name for part in fields(cls.data_type) if MISSING is part.default is part.default_factory}
        if "root" not in {part.name for part in fields(cls.data_type)} or needed - {"root"}:
            return None
        data = cls.data_type(root=str(folder))
        try:
            data.open()
        except InputError:
            return None
        return data

    @classmethod
    def quick(cls, patch_size: int, image_size: int | None) -> Self:
        """Return the protocol with the settings of `cribo benchmark --quick`; by default its default settings.

        Args:
            patch_size: patch size of the backbone in pixels.
            image_size: fixed input size of the backbone in pixels; None if it accepts any size.
        """
        return cls()

    def check_packages(self) -> None:
        """Check that the optional packages of these settings are installed; called before anything is opened.

        Raises:
            MissingPackage: a package is not installed.
        """

    def check_backbone(self, source: BackboneSource) -> None:
        """Validate the source of a backbone before it is opened.

        Raises:
            ConfigError: the protocol does not support the backbone.
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


def find_protocol(name: str) -> type[Protocol]:
    """Return the class of a protocol, by its name or the import path of your own protocol.

    Raises:
        ConfigError: no such protocol, or the class does not implement `Protocol`.
    """
    found = import_by_path(PROTOCOLS.get(name, name), "evaluation", known=PROTOCOLS)
    if not (isinstance(found, type) and issubclass(found, Protocol)):
        raise ConfigError(f"{name} must be a subclass of cribo.evaluation.Protocol, see docs/extending.md")
    missing = [part for part in ("name", "title", "metrics", "varies") if not hasattr(found, part)]
    missing += sorted(found.__abstractmethods__)
    if missing:
        raise ConfigError(f"the protocol {name} has no {', '.join(missing)}: see docs/extending.md")
    return found
