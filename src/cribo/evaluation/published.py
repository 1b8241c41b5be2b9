"""Published values of papers, for comparison with results of the same setting."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

from cribo.evaluation.results import NONE, EvaluationResult, flat, setting_value

# The name in papers, embed_dim and depth.
_VITS = {
    "tiny": ("ViT-Ti", 192, 12),
    "small": ("ViT-S", 384, 12),
    "base": ("ViT-B", 768, 12),
    "large": ("ViT-L", 1024, 24),
    "giant": ("ViT-G", 1536, 40),
}
# Names such as vit_small_patch16_18x2_224 have other depths.
_VIT_NAME = re.compile(r"vit_(tiny|small|base|large|giant)_patch\d+_(?!\d+x\d)")
_ANY = "any of"  # key of requirements with several accepted values


@dataclass(frozen=True)
class PublishedRow:
    """One row of a published table.

    Attributes:
        method: pretraining method of the backbone.
        backbone: architecture, such as `ViT-S/16`.
        values: values in per cent as printed, one per column; None for a dash.
        variant: variant of the protocol.
        parameters, pretraining, epochs: as printed; a dash if not given in the table.
        reproduced: whether the backbone was trained by the authors of the table instead of those of the method.
        taken_from: original source of values that the authors of the table quote.
    """

    method: str
    backbone: str
    values: list[float | None]
    variant: str
    parameters: str = NONE
    pretraining: str = NONE
    epochs: str = NONE
    reproduced: bool = False
    taken_from: str | None = None

    @property
    def training(self) -> str:
        """Data and epochs of the pretraining, as far as printed."""
        return self.pretraining if self.epochs == NONE else f"{self.pretraining} ({self.epochs})"

    @property
    def marked(self) -> str:
        """Method with the marks of reproduced (†) and quoted (*) values, for tables."""
        return f"{self.method}{'†' * self.reproduced}{'*' * (self.taken_from is not None)} (published)"

    @property
    def title(self) -> str:
        """Method, backbone and pretraining, for a legend."""
        return f"{self.method} {self.backbone}" + ("" if self.pretraining == NONE else f", {self.training}")


@dataclass(frozen=True)
class PublishedFigures:
    """Values of a table row for one data set.

    Attributes:
        row: row of the table.
        source: paper and table number.
        points: metrics in 0-1 by name, by value of the varied setting (None for the best).
        silent: settings that affect the values but are not specified in the paper.
        remark: note printed with the values.
    """

    row: PublishedRow
    source: str
    points: Mapping[Any, Mapping[str, float]]
    silent: tuple[str, ...]
    remark: str = ""


@dataclass(frozen=True)
class PublishedTable:
    """A table of a paper.

    Attributes:
        source: paper and table number.
        title: title of the table.
        evaluation: name of the protocol.
        variants: required settings of comparable results, by variant (dotted names if nested, `{"any of": [...]}` for
            one of several values); the first is that of rows without a variant. Protocols without variants use the
            single name `paper`.
        data: required description of the data of comparable results, by name of the data set.
        columns: the `data` and `metric` of each column, and the value of the varied setting, `at`; None for the best.
        rows: rows of the table.
        schedules: further required settings, by name of the data set.
        silent: settings that affect the values but are not specified in the paper.
        remark: note printed with the values.
        label: LaTeX label of the table in CrIBo's paper.
        sweep: whether rows differ in hyperparameters of the pretraining.
        beside: variants whose results are also compared with rows of the first variant, with the note printed in that
            case.
    """

    source: str
    title: str
    evaluation: str
    variants: dict[str, dict[str, Any]]
    data: dict[str, dict[str, Any]]
    columns: list[dict[str, Any]]
    rows: list[PublishedRow]
    schedules: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    silent: tuple[str, ...] = ()
    remark: str = ""
    label: str = ""
    sweep: bool = False
    beside: Mapping[str, str] = field(default_factory=dict)

    def obstacles(self, result: EvaluationResult, variant: str) -> list[tuple[str, str, str]]:
        """Return the settings that differ from those of a variant: dotted name, value, published value."""
        name = result.data["name"]
        settings = {**self.variants[variant], **self.schedules.get(name, {})}
        return [
            (setting, setting_value(has[setting]) if setting in has else "not known", _wanted_value(wanted))
            for wants, has in ((settings, dict(flat(result.settings))), (self.data[name], dict(flat(result.data))))
            for setting, wanted in wants.items()
            if setting not in has or not _same(has[setting], wanted)
        ]

    def rows_of(self, variant: str) -> list[PublishedRow]:
        """Return the rows to compare with results of a variant."""
        shown = next(iter(self.variants)) if variant in self.beside else variant
        return [row for row in self.rows if row.variant == shown]

    def figures(self, row: PublishedRow, data: str, variant: str = "") -> PublishedFigures:
        """Return the values of a row for a data set, to compare with results of a variant."""
        points: dict[Any, dict[str, float]] = {}
        for column, value in zip(self.columns, row.values, strict=True):
            if column["data"] == data and value is not None:
                points.setdefault(column["at"], {})[column["metric"]] = value / 100
        return PublishedFigures(row, self.source, points, self.silent, self.beside.get(variant, self.remark))


@cache
def published_tables() -> tuple[PublishedTable, ...]:
    """Return all known tables."""
    content = json.loads((resources.files("cribo.evaluation") / "published.json").read_text(encoding="utf-8"))
    return tuple(
        PublishedTable(
            source=table.pop("source", None) or f"{content['source']}, Table {table.pop('number')}",
            rows=[PublishedRow(**{"variant": next(iter(table["variants"])), **row}) for row in table.pop("rows")],
            silent=tuple(table.pop("silent", ())),
            **table,
        )
        for table in content["tables"]
    )


def published_beside(result: EvaluationResult, *, sweeps: bool = False) -> tuple[list[PublishedFigures], list[str]]:
    """Return the published values of the same protocol, variant, data and architecture as a result.

    Args:
        result: result of an evaluation.
        sweeps: also return values of tables whose rows differ in hyperparameters of the pretraining.

    Returns:
        The values, and the reasons why none match if the protocol is published on this data.
    """
    name = result.data["name"]
    tables = [table for table in published_tables() if table.evaluation == result.evaluation and name in table.data]
    known = dict.fromkeys(variant for table in tables for variant in table.variants)
    variant = result.variant or "paper"
    candidates = [table for table in tables if variant in table.variants and (sweeps or not table.sweep)]
    if not candidates:
        return [], [f"variant is {variant}, published with {', '.join(known)}"] if tables else []
    obstacles = [table.obstacles(result, variant) for table in candidates]
    if all(obstacles):
        return [], _reasons(obstacles)
    architecture = architecture_name(result.backbone)
    found = [
        table.figures(row, name, variant)
        for table, reasons in zip(candidates, obstacles, strict=True)
        for row in table.rows_of(variant)
        if not reasons and row.backbone == architecture
    ]
    none = f"none are of {architecture or result.backbone.get('architecture') or 'such a backbone'}"
    return found, [] if found else [none]


def _reasons(obstacles: Sequence[Sequence[tuple[str, str, str]]]) -> list[str]:
    """Return the differing settings of the closest tables as text."""
    fewest = min(map(len, obstacles))
    wanted: dict[tuple[str, str], dict[str, None]] = {}
    for setting, value, published in (one for table in obstacles if len(table) == fewest for one in table):
        wanted.setdefault((setting, value), {})[published] = None
    return [
        f"{setting.replace('_', ' ').replace('.', ' ')} is {value}, published with {' or '.join(values)}"
        for (setting, value), values in wanted.items()
    ]


def _wanted_value(wanted: Any) -> str:
    return " or ".join(map(setting_value, wanted[_ANY])) if isinstance(wanted, Mapping) else setting_value(wanted)


def _same(value: Any, wanted: Any) -> bool:
    """Whether a setting has the required value or one of several; lists are compared in any order."""
    if isinstance(wanted, Mapping):
        return any(_same(value, one) for one in wanted[_ANY])
    return sorted(value) == sorted(wanted) if isinstance(value, list) and isinstance(wanted, list) else value == wanted


def architecture_name(backbone: Mapping[str, Any]) -> str | None:
    """Return the name of an architecture as used in papers, None if unknown.

    Args:
        backbone: description with the timm name as `architecture`, `args`, `embed_dim` and `patch_size`.

    Example:
        >>> architecture_name({"architecture": "vit_small_patch16_224.dino", "embed_dim": 384, "patch_size": 8})
        'ViT-S/8'
    """
    name = str(backbone.get("architecture"))
    if re.fullmatch(r"resnet50(\..*)?", name):
        return "ResNet-50"
    match = _VIT_NAME.match(name)
    if match is None:
        return None
    title, dim, depth = _VITS[match[1]]
    args = backbone.get("args") or {}
    if backbone.get("embed_dim") != dim or args.get("depth", depth) != depth:
        return None
    return f"{title}/{backbone.get('patch_size')}"
