"""What an evaluation protocol is, and the table of those that exist. Nothing here needs torch."""

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Optional, Self, TypeVar, get_args, get_type_hints

from cribo.arguments import ConfigError, import_by_path
from cribo.errors import InputError, MissingPackage
from cribo.evaluation.data import SegmentationData
from cribo.evaluation.runtime import EvaluationRuntime, TrainingRuntime
from cribo.retrieval.source import BackboneSource

if TYPE_CHECKING:
    from cribo.evaluation.pictures import Panel
    from cribo.evaluation.results import EvaluationResult
    from cribo.evaluation.runner import Run

    _T = TypeVar("_T")
    Decided = Annotated[_T, "None until `prepare` has decided"]
else:

    class Decided:
        """The type of a setting that is None until `Protocol.prepare` has decided it."""

        def __class_getitem__(cls, kind: Any) -> Any:
            return Optional[kind]  # noqa: UP045 (the kind may be a Literal)


QUICK_SIDE = 224
"""Side of square images for `cribo benchmark --quick`, in pixels."""

UNDECIDED: Any = None
"""The default of a setting that the variant or the schedule decides."""

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
"""The class of each protocol, by its name on the command line."""


@dataclass
class Outcome:
    """What a protocol returns.

    Attributes:
        rows: one for each value of the setting that varies, with its metrics in 0-1 and, where they exist,
            `<metric>_std`, `per_class`, `confusion` and `draws` (`EvaluationResult`).
        classes: names of the classes.
        panels: images with labels and predictions, for the pictures.
        palette: a colour for each class.
        data: facts about the data that were found on the way, for `results.json`.
        packages: versions of further software that the result depends on.
        device: on which it ran, if not the first of the run.
        seconds: that the measurement took, if not the time since the start of the evaluation.
        write: writes further pictures and files into the folder; called with the result on rank 0.
    """

    rows: list[dict[str, Any]]
    classes: Sequence[str]
    panels: "Sequence[Panel]" = ()
    palette: Sequence[tuple[int, int, int]] = ()
    data: dict[str, Any] = field(default_factory=dict)
    packages: dict[str, str] = field(default_factory=dict)
    device: Any = None
    seconds: float | None = None
    write: "Callable[[EvaluationResult, Path], object] | None" = None


@dataclass(frozen=True, kw_only=True)
class Protocol(ABC):
    """A way to measure a backbone: the data it takes, what it does, and what it returns.

    A protocol is a frozen dataclass. Its fields are its settings, and become options of `cribo evaluate` with the help
    under `Attributes:` of its docstring; backbone, data and runtime are not part of it. Modules of protocols import
    torch inside functions, so that help and errors about options come at once.

    A protocol that several publications follow by different rules has a setting `variant`, whose type is a `Literal` of
    the names of these rules, the default first. Results carry it, and published values are shown only beside results of
    the same variant.

    Attributes:
        name: on the command line.
        title: in headings.
        metrics: that each row has, the headline first.
        varies: the setting in which the rows differ.
        class_metric: the metric of each class: IoU, accuracy or AP.
        data_type: the dataclass behind `--data`; its `open` returns `Splits`. For `cribo benchmark`, its `find` returns
            the data in a folder, and its `layout` names the files that are looked for.
        runtime_type: the dataclass behind `--runtime`, `EvaluationRuntime` or `TrainingRuntime`.
        runtime_defaults: values in place of its defaults.
        roles: other names of facts about the data in `results.json`, such as memory for train.
        description: the help of the command.
        aliases: short names of options, beside those that all protocols have.
        pictures: what --pictures counts.
        quick_limit: images of each split that `cribo benchmark --quick` uses.
        less_memory: advice if a device runs out of memory.

    Raises:
        InputError: the protocol does not have this variant.
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
        if (variants := self.variants()) and (variant := vars(self)["variant"]) not in variants:
            raise InputError(f"{self.name}: variant must be one of {', '.join(variants)}, got {variant!r}")

    @classmethod
    def variants(cls) -> tuple[str, ...]:
        """Return the values of the setting `variant`, the default first; none if there is no such setting."""
        has_variants = any(setting.name == "variant" for setting in fields(cls))
        return get_args(get_type_hints(cls)["variant"]) if has_variants else ()

    @classmethod
    def trains(cls) -> bool:
        """Whether the protocol trains: its folder then has checkpoints, and the evaluation can be resumed."""
        return issubclass(cls.runtime_type, TrainingRuntime)

    @classmethod
    def data_in(cls, folder: Path) -> Any | None:
        """Return the `data_type` that opens a folder, None if the folder has another layout.

        Part of a set counts: opening it raises the error that names what is missing. A `data_type` without `find` must
        take the folder as `root`, and have no other setting without default; a folder fits if it can be opened.
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
        """Return the protocol with the settings of `cribo benchmark --quick`, the defaults unless overridden.

        Args:
            patch_size: of the backbone, in pixels.
            image_size: side of the only images that the backbone takes; None if it takes any.
        """
        return cls()

    def check_backbone(self, source: BackboneSource) -> None:  # noqa: B027 (optional)
        """Check what is known of a backbone before it is opened.

        Raises:
            ConfigError: the protocol cannot measure it.
        """

    def prepare(self, run: "Run") -> Self:
        """Return this protocol with every setting decided, checked against backbone and data, before any work.

        Raises:
            ValueError: settings, backbone and data do not fit together.
        """
        return self

    def used(self, run: "Run") -> dict[str, Any]:
        """Return the settings that the metrics depend on, for `results.json`; called after `prepare`."""
        return asdict(self)

    @abstractmethod
    def measure(self, run: "Run") -> Outcome:
        """Measure the backbone of a run; called after `prepare`."""

    def report(self, result: "EvaluationResult") -> list[Any]:
        """Return further rich renderables to print below the tables of a result."""
        return []

    def places(self, folder: Path) -> dict[str, Any]:
        """Return further paths to print, by what they hold."""
        return {}

    def is_decided(self, name: str) -> bool:
        """Whether a setting has a value."""
        return getattr(self, name) is not None

    def decided(self, defaults: Mapping[str, Any]) -> Self:
        """Return a copy in which settings that are None have the values of `defaults`."""
        return replace(self, **{name: value for name, value in defaults.items() if getattr(self, name) is None})


def square(side: int, patch_size: int) -> tuple[int, int]:
    """Return the height and width of square images: the multiple of the patch size at or below `side`."""
    side = max(1, side // patch_size) * patch_size
    return side, side


def require_whole_patches(size: tuple[int, int], patch_size: int) -> None:
    """Check the height and width of images.

    Raises:
        InputError: a side is not a positive multiple of the patch size.
    """
    height, width = size
    if height % patch_size or width % patch_size or min(height, width) < 1:
        raise InputError(f"size must be a multiple of the patch size {patch_size}, got {height}x{width}")


def require_packages(purpose: str, *packages: str, otherwise: str = "") -> None:
    """Check that packages of the extra `evaluation` are installed.

    Args:
        purpose: what needs them.
        packages: their names.
        otherwise: what to do without them.

    Raises:
        MissingPackage: one of them is not installed.
    """
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        raise MissingPackage(f"{purpose} needs {' and '.join(missing)}: pip install 'cribo-ssl[evaluation]'{otherwise}")


def find_protocol(name: str) -> type[Protocol]:
    """Return the class of a protocol, by its name or the import path of one of your own.

    Raises:
        ConfigError: there is no such protocol, or the class does not have what a protocol needs.
    """
    found = import_by_path(PROTOCOLS.get(name, name), "evaluation", known=PROTOCOLS)
    if not (isinstance(found, type) and issubclass(found, Protocol)):
        raise ConfigError(f"{name} must be a subclass of cribo.evaluation.Protocol, see docs/extending.md")
    missing = [part for part in ("name", "title", "metrics", "varies") if not hasattr(found, part)]
    missing += sorted(found.__abstractmethods__)
    if missing:
        raise ConfigError(f"the protocol {name} has no {', '.join(missing)}: see docs/extending.md")
    return found
