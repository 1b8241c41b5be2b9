"""What an evaluation found: one format for all of them, its file and its tables."""

import dataclasses
import importlib.metadata
import json
import math
import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_origin, get_type_hints

import numpy as np
import torch
from jaxtyping import Float, Float64, Int
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text
from torch import Tensor

from cribo.console import duration
from cribo.data import SEGMENTATION_SETS
from cribo.files import FolderError, write_text

RESULTS = "results.json"
"""The file of an evaluation's result."""

OUT = Path("evaluations")
"""Parent of the folders of evaluations without --out."""

RESULTS_FORMAT = 1

NONE = "-"
"""What tables show where there is no figure."""

_PACKAGES = {
    "cribo": "cribo-ssl",
    "torch": "torch",
    "torchvision": "torchvision",
    "timm": "timm",
    "numpy": "numpy",
}
_EVALUATIONS = {
    "dense-nn": "Dense nearest-neighbour retrieval",
    "linear": "Linear segmentation",
    "segmenter": "Finetuning with Segmenter",
    "detection": "Object detection",
    "image-nn": "Image nearest-neighbour classification",
}
_METRICS = {
    "miou": "mIoU",
    "top1": "top-1",
    "top5": "top-5",
    "ap": "AP",
    "ap50": "AP50",
    "ap75": "AP75",
    "ap_small": "AP small",
    "ap_medium": "AP medium",
    "ap_large": "AP large",
}
_SETS = {"coco": "COCO", "imagenet": "ImageNet-1k"}
_CLASS_METRICS = {"detection": "AP", "image-nn": "accuracy"}
_VARIED = {"ratio": "memory share"}
_NOT_SET = {"size": "each image's own"}
_ALL_CLASSES = 40  # that are printed; of more, only the best and the worst
_EXTREME_CLASSES = 10


class ResultError(ValueError):
    """A result that cannot be read or used, with what is wrong."""


@dataclass(frozen=True)
class EvaluationResult:
    """Figures of one evaluation of one backbone on one data set, and all that they depend on.

    Whatever is given is kept as JSON has it: sequences, arrays and tensors as lists, paths as text, and numbers that
    are not finite as None. What is read back from a file is therefore equal to what was written.

    Args:
        evaluation: `dense-nn`, say.
        settings: every setting that was used, flat or nested.
        backbone: `name` (for tables), `source`, `architecture`, and what else identifies it.
        data: `name` of the set, its splits, their numbers of images, and whether it is only a part.
        classes: names of the classes, none where there are none.
        metrics: names of the figures in each row, the headline first; fractions in 0-1.
        varies: the setting in which the rows differ, such as `ratio`.
        results: rows, each with the value of that setting, its figures, and what belongs to them:
            `<metric>_std`, `per_class` (IoU, AP or accuracy by class, None where a class does not occur),
            `confusion` (rows are labels, columns predictions), `draws`.
        seconds: it took.
        versions: of the software, and the hardware.
        command: by which it can be repeated.

    Raises:
        ValueError: a row lacks its figures, or backbone or data their name.
        TypeError: a value that JSON cannot hold.
    """

    evaluation: str
    settings: dict[str, Any]
    backbone: dict[str, Any]
    data: dict[str, Any]
    classes: list[str]
    metrics: list[str]
    varies: str
    results: list[dict[str, Any]]
    seconds: float
    versions: dict[str, str]
    command: str

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, _plain(getattr(self, field.name), field.name))
        for name in ("backbone", "data"):
            if not isinstance(getattr(self, name).get("name"), str):
                raise ValueError(f"{name} must have a name, got {sorted(getattr(self, name))}")
        if not self.metrics or not self.results:
            raise ValueError(f"a result needs a metric and a row, got {self.metrics} and {len(self.results)} rows")
        for number, row in enumerate(self.results):
            missing = [name for name in (self.varies, *self.metrics) if name not in row]
            if missing:
                raise ValueError(f"row {number} of the results lacks {', '.join(missing)}: it has {', '.join(row)}")

    @property
    def headline(self) -> str:
        """The metric that matters most."""
        return self.metrics[0]

    @property
    def title(self) -> str:
        """What was evaluated, on what."""
        return f"{evaluation_title(self.evaluation)} on {data_title(self.data)}"

    def write(self, folder: Path) -> Path:
        """Write `results.json`, whole or not at all, and return its path.

        Raises:
            FolderError: the folder has one already.
            OSError: it cannot be written.
        """
        path = Path(folder) / RESULTS
        if path.exists():
            raise FolderError(f"{path} exists already: choose another folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, _json({"format": RESULTS_FORMAT, **vars(self)}) + "\n")
        return path


def read_result(path: str | os.PathLike[str]) -> EvaluationResult:
    """Read the result of an evaluation from its folder, or from its `results.json`.

    Raises:
        ResultError: there is none, it is damaged, or it was written by a newer version.
    """
    path = Path(path).expanduser()
    file = path / RESULTS if path.is_dir() else path
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        where = f"{path} holds no {RESULTS}" if path.is_dir() else f"{path} is not there"
        raise ResultError(f"{where}: give the folder that an evaluation has written") from error
    except OSError as error:
        raise ResultError(f"{file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ResultError(f"{file} is damaged, it is no JSON ({error}): run the evaluation again") from error
    if not isinstance(content, dict) or not isinstance(content.get("format"), int):
        raise ResultError(f"{file} is no result of an evaluation: it does not say its format")
    if content["format"] > RESULTS_FORMAT:
        raise ResultError(
            f"{file} has format {content['format']}, this version of cribo reads up to {RESULTS_FORMAT}: update cribo"
        )
    for name, hint in get_type_hints(EvaluationResult).items():
        kind = get_origin(hint) or hint
        if name not in content:
            raise ResultError(f"{file} is damaged: it has no {name!r}; run the evaluation again")
        if not isinstance(content[name], (int, float) if kind is float else kind):
            raise ResultError(f"{file} is damaged: {name!r} must be a {kind.__name__}, got {content[name]!r:.60}")
    try:
        return EvaluationResult(**{field.name: content[field.name] for field in dataclasses.fields(EvaluationResult)})
    except (ValueError, TypeError) as error:
        raise ResultError(f"{file} is damaged: {error}") from error


def iou(confusion: Int[Tensor, "c p"]) -> Float64[Tensor, " c"]:
    """Intersection over union of every class, NaN where it occurs neither in labels nor in predictions.

    Args:
        confusion: counts, rows are labels, columns predictions; columns after the classes' own count predictions
            of no class, which are wrong wherever they are.

    Raises:
        ValueError: fewer columns than rows.

    Example:
        >>> iou(torch.tensor([[3, 1, 0], [0, 0, 0], [0, 0, 2]])).tolist()
        [0.75, 0.0, 1.0]
    """
    classes, columns = confusion.shape
    if columns < classes:
        raise ValueError(f"confusion must have a column for each of its {classes} rows, got {columns}")
    counts = confusion.long()
    hits = counts.diagonal()
    union = counts.sum(dim=1) + counts[:, :classes].sum(dim=0) - hits
    return torch.where(union > 0, hits.double() / union, torch.nan)


def calibration_error(confidence: Float[Tensor, " n"], right: Float[Tensor, " n"], bins: int = 10) -> float:
    """Expected calibration error (Guo et al. 2017): the mean gap of confidence and accuracy over bins of equal width.

    Args:
        confidence: of each prediction, in 0-1.
        right: 1 for correct predictions, 0 for others.
        bins: number of bins.

    Example:
        >>> calibration_error(torch.tensor([0.9, 0.9]), torch.tensor([1.0, 0.0]))  # half are right, not nine of ten
        0.4
    """
    place = (confidence * bins).long().clamp(max=bins - 1)
    gaps = torch.zeros(bins, dtype=torch.double).index_add_(0, place, confidence.double() - right.double())
    return round(float(gaps.abs().sum() / len(confidence)), 6)


def versions(device: torch.device | str = "cpu") -> dict[str, str]:
    """The software that results depend on, by name, and the `hardware` in a line.

    Args:
        device: on which the evaluation ran.
    """
    packages = {name: importlib.metadata.version(package) for name, package in _PACKAGES.items()}
    return {**packages, "python": platform.python_version(), "hardware": _hardware(torch.device(device))}


def _hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    machine = f"{_processor()}, {cores} cores"
    return machine if device.type == "cpu" else f"{device.type}, {machine}"


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


# --------------------------------------------------------------- how it is said


def evaluation_title(evaluation: str) -> str:
    """What an evaluation is called in headings."""
    return _EVALUATIONS.get(evaluation, evaluation)


def data_title(data: Mapping[str, Any]) -> str:
    """What a data set is called in headings: its title in papers, or the folder's name."""
    name = data["name"]
    if name == "folder" and data.get("root"):
        return Path(data["root"]).name or str(data["root"])
    return SEGMENTATION_SETS[name].title if name in SEGMENTATION_SETS else _SETS.get(name, name)


def metric_title(metric: str) -> str:
    """What a metric is called in headings."""
    return _METRICS.get(metric, metric)


def class_metric_title(evaluation: str) -> str:
    """What the figure of each class is called in headings."""
    return _CLASS_METRICS.get(evaluation, "IoU")


def varied_title(varies: str) -> str:
    """What the setting in which rows differ is called in headings."""
    return _VARIED.get(varies, varies.replace("_", " "))


def varied_value(varies: str, value: Any) -> str:
    """A value of the setting in which rows differ; a ratio is said as a share.

    Example:
        >>> varied_value("ratio", 8), varied_value("learning_rate", 0.0003)
        ('1/8', '0.0003')
    """
    return f"1/{value}" if varies == "ratio" else setting_value(value)


def setting_value(value: Any) -> str:
    """The value of a setting as it is printed.

    Example:
        >>> setting_value([512, 512]), setting_value(None), setting_value(True)
        ('512, 512', 'none', 'yes')
    """
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list):
        return ", ".join(map(setting_value, value)) or "none"
    return str(value)


def percent(value: float | None, std: float | None = None) -> str:
    """A fraction in per cent, with its standard deviation if there is one.

    Example:
        >>> percent(0.4412), percent(0.4412, 0.0031), percent(None)
        ('44.1', '44.1 ± 0.3', '-')
    """
    if value is None:
        return NONE
    return f"{100 * value:.1f}" + ("" if std is None else f" ± {100 * std:.1f}")


def flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested settings one by one, with dotted names.

    Example:
        >>> dict(flat({"k": 50, "optim": {"lr": 0.1}}))
        {'k': 50, 'optim.lr': 0.1}
    """
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def result_tables(result: EvaluationResult) -> list[RenderableType]:
    """The result for a terminal: its figures, its classes, and every setting that was used.

    Of more than 40 classes, the ten best and the ten worst of the first row are shown.
    """
    # Headings stand by themselves: a table breaks a title that is wider than it is.
    tables: list[RenderableType] = [Text(result.title, style="bold"), _overall(result)]
    if any(row.get("per_class") for row in result.results):
        figure = class_metric_title(result.evaluation)
        heading = f"{figure[0].upper()}{figure[1:]} of each class [%], by {varied_title(result.varies)}"
        if len(result.classes) > _ALL_CLASSES:
            heading += f"; the best and the worst of {len(result.classes)}, {RESULTS} has all"
        tables += [Text(heading, style="bold"), _per_class(result)]
    return [*tables, _settings(result)]


def _overall(result: EvaluationResult) -> Table:
    table = Table()
    table.add_column(varied_title(result.varies), justify="right")
    for metric in result.metrics:
        table.add_column(f"{metric_title(metric)} [%]", justify="right")
    numbers = _further_numbers(result)
    for name in numbers:
        table.add_column(name.replace("_", " "), justify="right")
    for row in result.results:
        table.add_row(
            varied_value(result.varies, row[result.varies]),
            *(percent(row[metric], row.get(f"{metric}_std")) for metric in result.metrics),
            *(_number(row.get(name)) for name in numbers),
        )
    return table


def _further_numbers(result: EvaluationResult) -> list[str]:
    """What rows tell beside the figures, in the order in which it is met."""
    told = {result.varies, *result.metrics, *(f"{metric}_std" for metric in result.metrics)}
    names = dict.fromkeys(
        name for row in result.results for name, value in row.items() if isinstance(value, int | float)
    )
    return [name for name in names if name not in told]


def _number(value: float | None) -> str:
    if value is None:
        return NONE
    return f"{value:,.0f}" if float(value).is_integer() or abs(value) >= 100 else f"{value:.3f}"


def _per_class(result: EvaluationResult) -> Table:
    table = Table()
    table.add_column("class", overflow="fold")
    for row in result.results:
        table.add_column(varied_value(result.varies, row[result.varies]), justify="right")

    def add(name: str) -> None:
        table.add_row(Text(name), *(percent((row.get("per_class") or {}).get(name)) for row in result.results))

    if len(result.classes) <= _ALL_CLASSES:
        for name in result.classes:
            add(name)
        return table
    first = next(row["per_class"] for row in result.results if row.get("per_class"))
    ranked = sorted((name for name in result.classes if first.get(name) is not None), key=lambda name: -first[name])
    for part in (ranked[:_EXTREME_CLASSES], ranked[_EXTREME_CLASSES:][-_EXTREME_CLASSES:]):
        table.add_section()
        for name in part:
            add(name)
    return table


def _settings(result: EvaluationResult) -> Table:
    backbone = result.backbone
    about = dict.fromkeys(str(backbone[name]) for name in ("architecture", "source") if backbone.get(name))
    about.pop(backbone["name"], None)
    table = Table.grid(padding=(0, 2))
    for name, value in (
        ("backbone", f"{backbone['name']} ({', '.join(about)})" if about else backbone["name"]),
        ("data", _said({name: value for name, value in result.data.items() if value is not None})),
        ("settings", _said(result.settings)),
        ("took", f"{duration(result.seconds)} on {result.versions.get('hardware', 'unknown hardware')}"),
    ):
        table.add_row(name, Text(value))
    return table


def _said(settings: Mapping[str, Any]) -> str:
    return " · ".join(
        f"{name.replace('_', ' ')} {_NOT_SET.get(name, 'none') if value is None else setting_value(value)}"
        for name, value in flat(settings)
    )


# ----------------------------------------------------------------------- JSON


def _plain(value: Any, name: str) -> Any:
    """A value as JSON holds it. Raises TypeError for what it cannot."""
    if isinstance(value, Tensor | np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(part, f"{name}.{key}") for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part, name) for part in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    raise TypeError(f"{name} must be something that JSON can hold, got {type(value).__name__}")


def _json(value: Any, depth: int = 0) -> str:
    """Indented JSON, in which a list of plain values, such as a row of the confusion, takes one line."""
    if isinstance(value, dict) and value:
        parts = [f"{json.dumps(key, ensure_ascii=False)}: {_json(part, depth + 1)}" for key, part in value.items()]
        opening, closing = "{", "}"
    elif isinstance(value, list) and any(isinstance(part, dict | list) for part in value):
        parts = [_json(part, depth + 1) for part in value]
        opening, closing = "[", "]"
    else:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    space = "  " * depth
    return f"{opening}\n" + ",\n".join(f"{space}  {part}" for part in parts) + f"\n{space}{closing}"
