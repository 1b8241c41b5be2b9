"""Settings of evaluations, and the table of the protocols. This module does not import torch."""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    Optional,
    Self,
    TypeVar,
    get_args,
    get_type_hints,
)

from cribo.base.bounds import above, at_least, check_bounds
from cribo.base.errors import ConfigError, InputError
from cribo.evaluation.data import SegmentationData
from cribo.features.config import BackboneSource
from cribo.training.loggers import TENSORBOARD, require_known


@dataclass(frozen=True)
class BuiltIn:
    """A built-in protocol, as a row of `PROTOCOLS`.

    Attributes:
        settings: import path of its settings, a module that does not import torch.
        protocol: import path of the protocol, a subclass of these settings.
        summary: line in the help of `cribo evaluate`.
        metrics: titles of its metrics; a metric without a title has its name.
        metres: its metrics in metres; all others are fractions in 0-1.
        sets: titles of the data sets that it recognises, by name.
    """

    settings: str
    protocol: str
    summary: str
    metrics: Mapping[str, str] = field(default_factory=dict)
    metres: tuple[str, ...] = ()
    sets: Mapping[str, str] = field(default_factory=dict)


PROTOCOLS: Mapping[str, BuiltIn] = {
    "dense-nn": BuiltIn(
        "cribo.evaluation.dense_neighbours.config.DenseNNSettings",
        "cribo.evaluation.dense_neighbours.protocol.DenseNN",
        "dense nearest-neighbour retrieval: label patches by their nearest labelled patches",
        metrics={"miou": "mIoU"},
    ),
    "linear": BuiltIn(
        "cribo.evaluation.segmentation.config.LinearSettings",
        "cribo.evaluation.segmentation.linear.Linear",
        "linear segmentation: train one linear layer on the frozen features",
        metrics={"miou": "mIoU"},
    ),
    "segmenter": BuiltIn(
        "cribo.evaluation.segmentation.config.SegmenterSettings",
        "cribo.evaluation.segmentation.finetuning.FinetunedSegmenter",
        "finetuning with Segmenter: train the backbone and a mask transformer end to end",
        metrics={"miou": "mIoU"},
    ),
    "detection": BuiltIn(
        "cribo.evaluation.detection.config.DetectionSettings",
        "cribo.evaluation.detection.protocol.Detection",
        "object detection with YOLOS: train a detector initialised with the backbone's weights",
        sets={"coco": "COCO"},
    ),
    "image-nn": BuiltIn(
        "cribo.evaluation.image_neighbours.config.ImageNNSettings",
        "cribo.evaluation.image_neighbours.protocol.ImageNN",
        "image-level nearest neighbours: classify images by their nearest training images",
        metrics={"top1": "top-1", "top5": "top-5"},
        sets={"imagenet": "ImageNet-1k"},
    ),
    "overclustering": BuiltIn(
        "cribo.evaluation.overclustering.config.OverclusteringSettings",
        "cribo.evaluation.overclustering.protocol.Overclustering",
        "unsupervised segmentation: cluster patches, and match the clusters with classes",
        metrics={"miou": "mIoU"},
    ),
    "discovery": BuiltIn(
        "cribo.evaluation.discovery.config.DiscoverySettings",
        "cribo.evaluation.discovery.protocol.Discovery",
        "object discovery: find an object in each image by LOST and TokenCut",
        metrics={"corloc": "CorLoc"},
    ),
    "correspondence": BuiltIn(
        "cribo.evaluation.correspondence.config.CorrespondenceSettings",
        "cribo.evaluation.correspondence.protocol.Correspondence",
        "semantic correspondence: find the keypoints of one image in another",
        metrics={"pck_image": "PCK per image", "pck_point": "PCK per point"},
        sets={"spair": "SPair-71k"},
    ),
    "depth": BuiltIn(
        "cribo.evaluation.depth.config.DepthSettings",
        "cribo.evaluation.depth.protocol.Depth",
        "depth estimation: by the most similar patches of other images, and by a linear probe",
        metrics={"delta1": "δ1", "rmse": "RMSE", "abs_rel": "AbsRel"},
        metres=("rmse",),
        sets={"nyu": "NYU-Depth v2"},
    ),
    "video": BuiltIn(
        "cribo.evaluation.video.config.VideoPropagationSettings",
        "cribo.evaluation.video.protocol.VideoPropagation",
        "video label propagation: follow the objects of the first frame through a video",
        metrics={
            "j_and_f": "J&F",
            "j_mean": "J mean",
            "j_recall": "J recall",
            "f_mean": "F mean",
            "f_recall": "F recall",
        },
        sets={"davis2017": "DAVIS 2017"},
    ),
}
"""The built-in protocols by their names on the command line, in the order of help texts and cards."""

TrainerPrecision = Literal["32-true", "bf16-mixed", "16-mixed"]

Schedule = Literal["paper", "short"]
"""Training schedule: the paper's, for GPUs, or a short one for small data sets and CPUs."""


@dataclass
class EvaluationRuntime:
    """Devices, memory and cache; results do not depend on them beyond rounding.

    Attributes:
        devices: comma-separated devices that share the search, such as cuda:0,cuda:1 or cpu. [all GPUs, else the CPU]
        batch_size: number of images of equal size to encode at once. Lower it if the device runs out of memory.
        workers: number of worker processes that read images. [half of the cores]
        memory_gib: memory limit of the search on each device, in GiB. With less memory the search is slower, with
            the same result. [half of the free memory]
        cache: folder in which features are cached for further evaluations of the backbone; none keeps them in memory.
    """

    devices: tuple[str, ...] | None = None
    batch_size: Annotated[int, at_least(1)] = 16
    workers: Annotated[int, at_least(0)] | None = None
    memory_gib: Annotated[float, above(0)] | None = None
    cache: str = "~/.cache/cribo/features"

    def __post_init__(self) -> None:
        check_bounds(self, "runtime.")


@dataclass
class TrainingRuntime:
    """Devices, precision and logging; results do not depend on devices beyond rounding.

    Attributes:
        accelerator: accelerator of the Lightning Trainer: auto, cpu, gpu, ...
        devices: number of devices per machine, or auto for all GPUs (one process on a CPU).
        num_nodes: number of machines.
        precision: 32-true, or on GPUs bf16-mixed (16-mixed on older GPUs), about twice as fast with half the memory.
        workers: number of worker processes that read images, per device. [half of the cores]
        threads: number of CPU threads of torch. [torch's default]
        logger: where numbers are logged: tensorboard, wandb, mlflow, trackio, or several of them, such as
            tensorboard,wandb (docs/logging.md).
        log_every: number of steps between two logged entries.
        checkpoint_every: number of steps between two checkpoints; one is also written at the end.
        evaluate_every: number of steps between two validations; 0 validates only at the end.
    """

    accelerator: str = "auto"
    devices: int | str = "auto"
    num_nodes: Annotated[int, at_least(1)] = 1
    precision: TrainerPrecision = "32-true"
    workers: Annotated[int, at_least(0)] | None = None
    threads: Annotated[int, at_least(1)] | None = None
    logger: tuple[str, ...] = (TENSORBOARD,)
    log_every: Annotated[int, at_least(1)] = 50
    checkpoint_every: Annotated[int, at_least(1)] = 1000
    evaluate_every: Annotated[int, at_least(0)] = 0

    def __post_init__(self) -> None:
        check_bounds(self, "runtime.")
        require_known(self.logger)
        if not (self.devices == "auto" or (str(self.devices).isdecimal() and int(self.devices) > 0)):
            raise ConfigError(f"runtime.devices must be auto or a number >= 1, got {self.devices!r}")

    @property
    def on_gpu(self) -> bool:
        """Whether training runs on NVIDIA or AMD GPUs."""
        import torch

        return self.accelerator in ("gpu", "cuda") or (self.accelerator == "auto" and torch.cuda.is_available())


if TYPE_CHECKING:
    _T = TypeVar("_T")
    Decided = Annotated[_T, "None until set by `prepare`"]
else:
    Decided = Optional


Side = Annotated[int, at_least(1)]
"""Side of images in pixels."""

QUICK_SIDE = 224
"""Side of square images for `cribo benchmark --quick`, in pixels."""

UNDECIDED: Any = None
"""Default of a setting whose value depends on the variant or the schedule."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Base class of the settings of a protocol, which are the fields of a frozen dataclass.

    The fields become options of `cribo evaluate`, with the `Attributes:` section of the docstring as their help. A
    protocol that publications implement differently has a setting `variant`, whose type is a `Literal` of the names of
    these implementations, the default first. It is stored in results, and published values are only compared with
    results of the same variant.

    Attributes:
        name: name of the protocol on the command line.
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

    Raises:
        InputError: unknown variant, or a value out of range.
    """

    name: ClassVar[str]
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

    def __post_init__(self) -> None:
        check_bounds(self)
        if (variants := self.variants()) and (variant := vars(self)["variant"]) not in variants:
            raise InputError(f"{self.name}: variant must be one of {', '.join(variants)}, got {variant!r}")

    @classmethod
    def variants(cls) -> tuple[str, ...]:
        """Return the names of the variants, the default first; empty for a protocol without variants."""
        has_variants = any(setting.name == "variant" for setting in fields(cls))
        return get_args(get_type_hints(cls)["variant"]) if has_variants else ()

    def is_decided(self, name: str) -> bool:
        """Whether a setting is not None."""
        return getattr(self, name) is not None

    def decided(self, defaults: Mapping[str, Any]) -> Self:
        """Return a copy in which `defaults` replace settings that are None."""
        return replace(self, **{name: value for name, value in defaults.items() if getattr(self, name) is None})

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


def square(side: int, patch_size: int) -> tuple[int, int]:
    """Return the (height, width) of square images, `side` rounded down to a multiple of the patch size."""
    side = max(1, side // patch_size) * patch_size
    return side, side


def require_whole_patches(size: tuple[int, int], patch_size: int) -> None:
    """Check that height and width of images are multiples of the patch size.

    Raises:
        InputError: a side is not a positive multiple of the patch size.
    """
    height, width = size
    if height % patch_size or width % patch_size or min(height, width) < 1:
        raise InputError(f"size must be a multiple of the patch size {patch_size}, got {height}x{width}")
