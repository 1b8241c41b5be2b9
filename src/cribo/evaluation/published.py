"""Published values of papers, for comparison with results of the same setting."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from cribo.base.wording import grouped
from cribo.evaluation.results import NONE, EvaluationResult, setting_title, setting_value

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


@dataclass(frozen=True)
class PublishedRow:
    """A row of a published table: its values for one data set, and the results that they can be compared with.

    `published.json` has one entry per table: its rows with values in per cent as printed; the data set, the metric and
    the value of the varied setting (`at`; None for the best) of each column; and the conditions of comparable results,
    which are those of a data set and one of several combinations of settings.

    Attributes:
        source: paper and table number.
        evaluation: name of the protocol.
        data: name of the data set.
        conditions: required `EvaluationResult.conditions` of comparable results.
        points: metrics in 0-1 by name, by value of the varied setting (None for the best).
        method: pretraining method of the backbone.
        backbone: architecture, such as `ViT-S/16`.
        parameters, pretraining, epochs: as printed; a dash if not given in the table.
        reproduced: whether the backbone was trained by the authors of the table instead of those of the method.
        taken_from: original source of values that the authors of the table quote.
        silent: settings that affect the values but are not specified in the paper.
        remark: note printed with the values.
        sweep: whether the rows of the table differ in hyperparameters of the pretraining.
    """

    source: str
    evaluation: str
    data: str
    conditions: Mapping[str, Any]
    points: Mapping[Any, Mapping[str, float]]
    method: str
    backbone: str
    parameters: str = NONE
    pretraining: str = NONE
    epochs: str = NONE
    reproduced: bool = False
    taken_from: str | None = None
    silent: Sequence[str] = ()
    remark: str = ""
    sweep: bool = False

    @property
    def variant(self) -> str | None:
        """Variant of the protocol, None if it has no variants."""
        return self.conditions.get("settings.variant")

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
        training = "" if self.pretraining == NONE else f", {self.training}"
        return f"{self.method} {self.backbone}{training} (published)"

    def obstacles(self, result: EvaluationResult) -> list[tuple[str, str, str]]:
        """Return the conditions that a result does not meet: dotted name, value, published value."""
        has = result.conditions
        return [
            (name, setting_value(has[name]) if name in has else "not known", setting_value(wanted))
            for name, wanted in self.conditions.items()
            if name not in has or not _same(has[name], wanted)
        ]


def _same(value: Any, wanted: Any) -> bool:
    """Whether a setting has the required value; lists are compared in any order."""
    return sorted(value) == sorted(wanted) if isinstance(value, list) and isinstance(wanted, list) else value == wanted


@cache
def published_rows() -> tuple[PublishedRow, ...]:
    """Return the rows of all known tables, once for each data set and each combination of settings."""
    content = json.loads((resources.files("cribo.evaluation") / "published.json").read_text(encoding="utf-8"))
    return tuple(
        PublishedRow(
            source=table.get("source") or f"{content['source']}, Table {table['number']}",
            evaluation=table["evaluation"],
            data=data,
            conditions={**comparable["settings"], **conditions},
            points=_points(table["columns"], row["values"], data),
            silent=table.get("silent", ()),
            remark=comparable.get("remark", ""),
            sweep=table.get("sweep", False),
            **{name: value for name, value in row.items() if name != "values"},
        )
        for table in content["tables"]
        for row in table["rows"]
        for data, conditions in table["data"].items()
        for comparable in table["comparable"]
    )


def _points(columns: Sequence[Mapping[str, Any]], values: Sequence[float | None], data: str) -> dict[Any, Any]:
    points: dict[Any, dict[str, float]] = {}
    for column, value in zip(columns, values, strict=True):
        if column["data"] == data and value is not None:
            points.setdefault(column["at"], {})[column["metric"]] = value / 100
    return points


def published_beside(result: EvaluationResult, *, sweeps: bool = False) -> tuple[list[PublishedRow], list[str]]:
    """Return the published values of the same protocol, variant, data and architecture as a result.

    Args:
        result: result of an evaluation.
        sweeps: also return values of tables whose rows differ in hyperparameters of the pretraining.

    Returns:
        The values, and the reasons why none match if the protocol is published on this data.
    """
    known = [
        row
        for row in published_rows()
        if (row.evaluation, row.data) == (result.evaluation, result.data["name"]) and (sweeps or not row.sweep)
    ]
    candidates = [row for row in known if row.variant == result.variant]
    if not candidates:
        variants = ", ".join(dict.fromkeys(str(row.variant) for row in known))
        return [], [f"variant is {result.variant or 'not known'}, published with {variants}"] if known else []
    obstacles = [row.obstacles(result) for row in candidates]
    if all(obstacles):
        return [], _reasons(obstacles)
    architecture = architecture_name(result.backbone)
    comparable = [row for row, unmet in zip(candidates, obstacles, strict=True) if not unmet]
    found = [row for row in comparable if row.backbone == architecture]
    none = f"none are of {architecture or result.backbone.get('architecture') or 'such a backbone'}"
    return found, [] if found else [none]


def _reasons(obstacles: Sequence[Sequence[tuple[str, str, str]]]) -> list[str]:
    """Return the differing settings of the closest rows as text."""
    fewest = min(map(len, obstacles))
    wanted = grouped(
        ((setting, value), other) for row in obstacles if len(row) == fewest for setting, value, other in row
    )
    return [
        f"{setting_title(setting).removeprefix('data ')} is {value}, published with {' or '.join(values)}"
        for (setting, value), values in wanted.items()
    ]


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
