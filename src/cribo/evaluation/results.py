"""Results of evaluations: common format of all protocols, JSON file and tables."""

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, get_origin, get_type_hints

import numpy as np
from rich.console import RenderableType
from rich.table import Table as Grid
from rich.text import Text

from cribo.base.console import duration
from cribo.base.errors import DataError, FolderError, InputError, MissingData, ResultError
from cribo.base.files import read_json, write_text
from cribo.base.job import flat
from cribo.base.tables import Table, numbers, texts
from cribo.data import SEGMENTATION_SETS
from cribo.evaluation.config import PROTOCOLS

RESULTS = "results.json"
"""File name of a result."""

OUT = Path("evaluations")
"""Parent folder of evaluations without --out."""

RESULTS_FORMAT = 1

NONE = "-"
"""Placeholder of missing values in tables."""

_METRICS = {metric: title for row in PROTOCOLS.values() for metric, title in row.metrics.items()}
_METRES = {metric for row in PROTOCOLS.values() for metric in row.metres}  # all other metrics are fractions
_BEST_OF = "learning_rate"  # of results that vary this setting, only the best row is compared
_SETS = {name: title for row in PROTOCOLS.values() for name, title in row.sets.items()}
_ALL_CLASSES = 40  # maximum number of classes printed in full; otherwise only the best and the worst
_EXTREME_CLASSES = 10


@dataclass(frozen=True)
class EvaluationResult:
    """Scores of a backbone on a data set with one protocol, and all settings that they depend on.

    Values are converted to JSON types: sequences, arrays and tensors to lists, paths to strings, and non-finite numbers
    to None. A result read from its file therefore equals the one written.

    Args:
        evaluation: name of the protocol, such as `dense-nn`.
        settings: all settings, flat or nested.
        backbone: `name` (for tables), `source`, `architecture`, and further identification of the backbone.
        data: `name` of the data set, splits, numbers of images, and whether only a part of the data set is used.
        classes: class names; empty for protocols without classes.
        metrics: names of the metrics of each row, the headline first; fractions in 0-1, depth errors in metres.
        varies: setting that varies between rows, such as `ratio`.
        results: rows with the value of the varied setting, the metrics, and optionally `<metric>_std`, `per_class`
            (IoU, AP or accuracy by class, None for absent classes), `confusion` (labels in rows, predictions in
            columns) and `draws`.
        seconds: duration of the evaluation.
        versions: versions of the software, and the hardware.
        command: command line that reproduces the evaluation.
        evaluation_title: title of the protocol in headings; its name if empty.
        class_metric: metric of `per_class` in headings.

    Raises:
        ValueError: a field has the wrong type, a row lacks a metric, or backbone or data lack a name.
        TypeError: a value is not JSON serialisable.
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
    evaluation_title: str = ""
    class_metric: str = "IoU"

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self)).items():
            kind = get_origin(hint) or hint
            value = plain(getattr(self, name))
            if not isinstance(value, (int, float) if kind is float else kind):
                raise InputError(f"{name!r} must be a {kind.__name__}, got {value!r:.60}")
            object.__setattr__(self, name, value)
        for name in ("backbone", "data"):
            if not isinstance(getattr(self, name).get("name"), str):
                raise InputError(f"{name} must have a name, got {sorted(getattr(self, name))}")
        if not self.metrics or not self.results:
            raise InputError(f"a result must have a metric and a row, got {self.metrics} and {len(self.results)} rows")
        for number, row in enumerate(self.results):
            missing = [name for name in (self.varies, *self.metrics) if name not in row]
            if missing:
                raise InputError(f"row {number} of the results lacks {', '.join(missing)}: it has {', '.join(row)}")

    @property
    def headline(self) -> str:
        """Name of the headline metric."""
        return self.metrics[0]

    @property
    def best(self) -> dict[str, Any]:
        """Row with the highest headline metric, the first on ties."""
        return self.results[best_place([row[self.headline] for row in self.results])]

    @property
    def points(self) -> dict[Any, dict[str, Any]]:
        """Maps values of the varied setting to rows; for learning rates, None to the best row."""
        return {None: self.best} if self.varies == _BEST_OF else {row[self.varies]: row for row in self.results}

    @property
    def variant(self) -> str | None:
        """Variant of the protocol, None if it has no variants."""
        return self.settings.get("variant")

    @property
    def conditions(self) -> dict[str, Any]:
        """Settings and description of the data, by dotted names that start with `settings.` or `data.`."""
        return flat({"settings": self.settings, "data": self.data})

    @property
    def title(self) -> str:
        """Protocol, variant and data, for headings."""
        return result_title([self])

    def write(self, folder: Path) -> Path:
        """Write `results.json` atomically, and return its path.

        Raises:
            FolderError: the file already exists.
            OSError: the file cannot be written.
        """
        path = Path(folder) / RESULTS
        if path.exists():
            raise FolderError(f"{path} already exists: choose another folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"format": RESULTS_FORMAT, **vars(self)}, indent=2, ensure_ascii=False, allow_nan=False)
        # Numbers of a list, such as a row of a confusion matrix, on a single line.
        text = re.sub(r"\[\n\s+([^][{}\"]+?)\n\s+\]", lambda found: f"[{' '.join(found[1].split())}]", text)
        write_text(path, text + "\n")
        return path


def read_result(path: str | os.PathLike[str]) -> EvaluationResult:
    """Read a result from the folder of an evaluation, or from its `results.json`.

    Raises:
        ResultError: the file does not exist, is corrupt, or was written by a newer version.
    """
    path = Path(path).expanduser()
    file = path / RESULTS if path.is_dir() else path
    try:
        content = read_json(file)
    except MissingData as error:
        raise ResultError(f"{file} does not exist: give the output folder of a finished evaluation") from error
    except DataError as error:
        raise ResultError(f"{error}, or repeat the evaluation") from error
    if not isinstance(content, dict) or not isinstance(content.get("format"), int):
        raise ResultError(f"{file} is not a result of an evaluation: it has no 'format'")
    if content["format"] > RESULTS_FORMAT:
        raise ResultError(
            f"{file} has format {content['format']}, this version of cribo reads up to {RESULTS_FORMAT}: update cribo"
        )
    if content.get("kind") == "card":
        raise ResultError(f"{file} is a card of several evaluations: give the folders of its rows, listed in the file")
    try:
        known = [field for field in fields(EvaluationResult) if field.name in content or field.default is MISSING]
        return EvaluationResult(**{field.name: content[field.name] for field in known})
    except KeyError as error:
        raise ResultError(f"{file} is corrupt: it has no {error}; repeat the evaluation") from error
    except (ValueError, TypeError) as error:
        raise ResultError(f"{file} is corrupt: {error}; repeat the evaluation") from error


def best_place(values: Sequence[float | None]) -> int:
    """Return the index of the highest value, the first on ties; None is lower than any number.

    Example:
        >>> best_place([None, 0.1, 0.3, 0.3])
        2
    """
    return max(range(len(values)), key=lambda place: -math.inf if (value := values[place]) is None else value)


# ----------------------------------------------------------------------- words


def result_title(results: Sequence[EvaluationResult]) -> str:
    """Return the title of results of one protocol on one data set: protocol, variants and data."""
    title = results[0].evaluation_title or results[0].evaluation
    variants = ", ".join(dict.fromkeys(result.variant for result in results if result.variant is not None))
    named = f"{title} ({variants})" if variants else title
    return f"{named} on {data_title(results[0].data)}"


def data_title(data: Mapping[str, Any]) -> str:
    """Return the name of a data set as used in papers, or the folder name of your own data."""
    name = data["name"]
    if name == "folder" and data.get("root"):
        return Path(data["root"]).name or str(data["root"])
    return SEGMENTATION_SETS[name].title if name in SEGMENTATION_SETS else _SETS.get(name, name)


def metric_title(metric: str) -> str:
    """Return the title of a metric.

    Example:
        >>> metric_title("miou"), metric_title("ap50"), metric_title("ap_small")
        ('mIoU', 'AP50', 'AP small')
    """
    return f"AP{metric[2:].replace('_', ' ')}" if metric.startswith("ap") else _METRICS.get(metric, metric)


def metric_heading(metric: str) -> str:
    """Return the title of a metric with its unit in tables.

    Example:
        >>> metric_heading("miou"), metric_heading("rmse")
        ('mIoU [%]', 'RMSE [m]')
    """
    return f"{metric_title(metric)} [{'m' if metric in _METRES else '%'}]"


def metric_value(metric: str, value: float | None, std: float | None = None) -> str:
    """Return the value of a metric as text in the unit of its heading.

    Example:
        >>> metric_value("miou", 0.4412, 0.0031), metric_value("rmse", 0.4412)
        ('44.1 ± 0.3', '0.441')
    """
    return percent(value, std) if metric not in _METRES else NONE if value is None else f"{value:.3f}"


def score(metric: str, row: Mapping[str, Any]) -> str:
    """Return the metric of a row of results, with its standard deviation if there is one, as text.

    Example:
        >>> score("miou", {"ratio": 8, "miou": 0.4412, "miou_std": 0.0031}), score("miou", {})
        ('44.1 ± 0.3', '-')
    """
    return metric_value(metric, row.get(metric), row.get(f"{metric}_std"))


def varied_title(varies: str) -> str:
    """Return the title of the varied setting."""
    return "memory share" if varies == "ratio" else varies.replace("_", " ")


def varied_value(varies: str, value: Any) -> str:
    """Return a value of the varied setting as text; a ratio as a fraction.

    Example:
        >>> varied_value("ratio", 8), varied_value("learning_rate", 0.0003)
        ('1/8', '0.0003')
    """
    return f"1/{value}" if varies == "ratio" else setting_value(value)


def varied_setting(varies: str, value: Any) -> str:
    """Return the varied setting with its value, None for the best, as text.

    Example:
        >>> varied_setting("ratio", 8), varied_setting("learning_rate", None)
        ('memory share 1/8', 'best learning rate')
    """
    title = varied_title(varies)
    return f"best {title}" if value is None else f"{title} {varied_value(varies, value)}"


def setting_title(name: str) -> str:
    """Return the title of a setting or of a fact about the data, from its dotted name.

    Example:
        >>> setting_title("settings.patch_labels"), setting_title("data.memory")
        ('patch labels', 'data memory')
    """
    return name.removeprefix("settings.").replace("_", " ").replace(".", " ")


def setting_value(value: Any) -> str:
    """Return the value of a setting as text.

    Example:
        >>> setting_value([512, 512]), setting_value(None), setting_value(True)
        ('512, 512', 'none', 'yes')
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(setting_value, value)) or "none"
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def percent(value: float | None, std: float | None = None) -> str:
    """Return a fraction in per cent, with its standard deviation if there is one.

    Example:
        >>> percent(0.4412), percent(0.4412, 0.0031), percent(None)
        ('44.1', '44.1 ± 0.3', '-')
    """
    return NONE if value is None else f"{100 * value:.1f}" + ("" if std is None else f" ± {100 * std:.1f}")


# ---------------------------------------------------------------------- tables


def result_tables(result: EvaluationResult) -> list[RenderableType]:
    """Return the tables of a result for a terminal: metrics, classes and settings.

    With more than 40 classes, only the ten best and the ten worst of the first row are shown.
    """
    known = {result.varies, *result.metrics, *(f"{metric}_std" for metric in result.metrics)}
    others = dict.fromkeys(
        name
        for row in result.results
        for name, value in row.items()
        if isinstance(value, int | float) and name not in known
    )
    headings = (metric_heading(metric) for metric in result.metrics)
    columns = numbers(varied_title(result.varies), *headings, *(name.replace("_", " ") for name in others))
    rows = [
        [
            varied_value(result.varies, row[result.varies]),
            *(score(metric, row) for metric in result.metrics),
            *(_number(row.get(name)) for name in others),
        ]
        for row in result.results
    ]
    classes = [_classes(result)] if any(row.get("per_class") for row in result.results) else []
    return [Table(columns, [rows], result.title), *classes, _settings(result)]


def _number(value: float | None) -> str:
    if value is None:
        return NONE
    return f"{value:,.0f}" if float(value).is_integer() or abs(value) >= 100 else f"{value:.3f}"


def _classes(result: EvaluationResult) -> Table:
    metric = result.class_metric
    title = f"{metric[0].upper()}{metric[1:]} of each class [%], by {varied_title(result.varies)}"
    groups = [result.classes]
    if len(result.classes) > _ALL_CLASSES:
        title += f"; best and worst of {len(result.classes)} classes, see {RESULTS} for all"
        first = next(row["per_class"] for row in result.results if row.get("per_class"))
        ranked = sorted((name for name in result.classes if first.get(name) is not None), key=lambda name: -first[name])
        groups = [ranked[:_EXTREME_CLASSES], ranked[_EXTREME_CLASSES:][-_EXTREME_CLASSES:]]
    blocks = [
        [[name, *(percent((row.get("per_class") or {}).get(name)) for row in result.results)] for name in group]
        for group in groups
    ]
    values = (varied_value(result.varies, row[result.varies]) for row in result.results)
    return Table([*texts("class"), *numbers(*values)], blocks, title)


def _settings(result: EvaluationResult) -> Grid:
    backbone = result.backbone
    about = dict.fromkeys(str(backbone[name]) for name in ("architecture", "source") if backbone.get(name))
    about.pop(backbone["name"], None)
    table = Grid.grid(padding=(0, 2))
    for name, value in (
        ("backbone", f"{backbone['name']} ({', '.join(about)})" if about else backbone["name"]),
        ("data", _listed({name: value for name, value in result.data.items() if value is not None})),
        ("settings", _listed(result.settings)),
        ("took", f"{duration(result.seconds)} on {result.versions.get('hardware', 'unknown hardware')}"),
    ):
        table.add_row(name, Text(value))
    return table


def _listed(settings: Mapping[str, Any]) -> str:
    unset = {"size": "each image's own"}
    return " · ".join(
        f"{name.replace('_', ' ')} {unset.get(name, 'none') if value is None else setting_value(value)}"
        for name, value in flat(settings).items()
    )


# ----------------------------------------------------------------------- JSON


def plain(value: Any) -> Any:
    """Convert a value to JSON types: arrays and tensors to lists, paths to strings, non-finite numbers to None.

    Raises:
        TypeError: the value is not JSON serialisable.
    """
    return json.loads(json.dumps(value, default=_builtin), parse_constant=lambda constant: None)


def _builtin(value: Any) -> Any:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    import torch  # results read from files do not get here

    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"results must be JSON serialisable, got {value!r}")
