"""What papers report, to lay beside results of the same setting, and beside no others."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

from cribo.evaluation.results import EvaluationResult, flat, setting_value

# What papers call them, embed_dim and depth.
_VITS = {
    "tiny": ("ViT-Ti", 192, 12),
    "small": ("ViT-S", 384, 12),
    "base": ("ViT-B", 768, 12),
    "large": ("ViT-L", 1024, 24),
}
# Names such as vit_small_patch16_18x2_224 are of other depths.
_VIT_NAME = re.compile(r"vit_(tiny|small|base|large)_patch\d+_(?!\d+x\d)")


@dataclass(frozen=True)
class PublishedRow:
    """One row of a table.

    Attributes:
        method: that pretrained the backbone.
        backbone: `ViT-S/16`, say.
        parameters, pretraining, epochs: as printed.
        values: in per cent as printed, one for each column, None where there is a dash.
        protocol: by which the values were obtained, where a table mixes several.
        reproduced: the backbone was trained by the authors of the table, not by those of the method.
        taken_from: where the authors of the table have the values from, if they are not their own.
    """

    method: str
    backbone: str
    parameters: str
    pretraining: str
    epochs: str
    values: list[float | None]
    protocol: str = "paper"
    reproduced: bool = False
    taken_from: str | None = None


class Obstacle(NamedTuple):
    """A setting that keeps a result from standing beside published figures.

    Attributes:
        setting: its dotted name.
        value: in the result, as it is printed.
        wanted: with which the figures were obtained.
    """

    setting: str
    value: str
    wanted: str


@dataclass(frozen=True)
class PublishedTable:
    """A table of a paper.

    Attributes:
        source: the paper, and the number of the table in it.
        label: of the table in the paper's LaTeX.
        title: of the table.
        evaluation: of which it has figures.
        protocols: by name, the settings that a result of that protocol must have to be comparable, with dotted names
            where they are nested.
        data: by name of the set, what a result must say of its data to be comparable.
        columns: of each column, the `data`, the `metric`, and `at` which value of the setting in which rows of a
            result differ; None for the best one.
        rows: of the table.
        schedules: by name of the set, further settings that a result on it must have.
        silent: settings on which figures depend and of which the paper says nothing.
        remark: what else one must know to read them.
    """

    source: str
    label: str
    title: str
    evaluation: str
    protocols: dict[str, dict[str, Any]]
    data: dict[str, dict[str, Any]]
    columns: list[dict[str, Any]]
    rows: list[PublishedRow]
    schedules: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    silent: tuple[str, ...] = ()
    remark: str = ""

    def obstacles(self, result: EvaluationResult, protocol: str) -> "list[Obstacle]":
        """Why a result cannot be compared with the rows of a protocol; empty if it can."""
        name = result.data["name"]
        requirements = (
            ({**self.protocols[protocol], **self.schedules.get(name, {})}, dict(flat(result.settings))),
            (self.data[name], dict(flat(result.data))),
        )
        return [
            Obstacle(setting, setting_value(has[setting]) if setting in has else "not known", setting_value(wanted))
            for wants, has in requirements
            for setting, wanted in wants.items()
            if setting not in has or not _same(has[setting], wanted)
        ]

    def figures(self, row: PublishedRow, data: str) -> "PublishedFigures":
        """The figures of a row on a data set."""
        points: dict[Any, dict[str, float]] = {}
        for column, value in zip(self.columns, row.values, strict=True):
            if column["data"] == data and value is not None:
                points.setdefault(column["at"], {})[column["metric"]] = value / 100
        return PublishedFigures(row, self.source, points, self.silent, self.remark)


@dataclass(frozen=True)
class PublishedFigures:
    """What a row of a table says of one data set.

    Attributes:
        row: of the table.
        source: the paper, and the number of the table in it.
        points: metrics in 0-1 by name, by the value of the setting in which rows of a result differ (None for the
            best one).
        silent: settings on which they depend and of which the paper says nothing.
        remark: what else one must know to read them.
    """

    row: PublishedRow
    source: str
    points: Mapping[Any, Mapping[str, float]]
    silent: tuple[str, ...]
    remark: str = ""


@cache
def published_tables() -> tuple[PublishedTable, ...]:
    """All tables that are known."""
    content = json.loads((resources.files("cribo.evaluation") / "published.json").read_text(encoding="utf-8"))
    return tuple(
        PublishedTable(
            source=f"{content['source']}, Table {table.pop('number')}",
            rows=[PublishedRow(**row) for row in table.pop("rows")],
            silent=tuple(table.pop("silent", ())),
            **table,
        )
        for table in content["tables"]
    )


def published_beside(result: EvaluationResult) -> tuple[list[PublishedFigures], list[str]]:
    """The published figures that a result can be compared with: same evaluation, protocol, data and architecture.

    Returns:
        the figures, and, if there are none although the evaluation is published on this data, the reasons.
    """
    name = result.data["name"]
    tables = [table for table in published_tables() if table.evaluation == result.evaluation and name in table.data]
    known = list(dict.fromkeys(protocol for table in tables for protocol in table.protocols))
    # Where there is one, it does not matter what a result calls its own: its settings tell.
    protocol = known[0] if len(known) == 1 else result.settings.get("protocol", "not known")
    candidates = [table for table in tables if protocol in table.protocols]
    if not candidates:
        return [], [f"protocol is {protocol}, published with {' and '.join(known)}"] if tables else []
    obstacles = [table.obstacles(result, protocol) for table in candidates]
    if all(obstacles):
        return [], _reasons(obstacles)
    architecture = architecture_name(result.backbone)
    found = [
        table.figures(row, name)
        for table, reasons in zip(candidates, obstacles, strict=True)
        if not reasons
        for row in table.rows
        if row.protocol == protocol and row.backbone == architecture
    ]
    if not found:
        return [], [f"none are of {architecture or result.backbone.get('architecture') or 'such a backbone'}"]
    return found, []


def _reasons(obstacles: Sequence[Sequence[Obstacle]]) -> list[str]:
    """What stands between a result and those tables that it comes closest to, in words."""
    fewest = min(map(len, obstacles))
    wanted: dict[tuple[str, str], dict[str, None]] = {}
    for table in obstacles:
        if len(table) == fewest:
            for obstacle in table:
                wanted.setdefault((obstacle.setting, obstacle.value), {})[obstacle.wanted] = None
    return [
        f"{setting.replace('_', ' ').replace('.', ' ')} is {value}, published with {' or '.join(values)}"
        for (setting, value), values in wanted.items()
    ]


def _same(value: Any, wanted: Any) -> bool:
    """Whether settings are the same; several values may stand in any order."""
    if isinstance(value, list) and isinstance(wanted, list):
        return sorted(value) == sorted(wanted)
    return value == wanted


def architecture_name(backbone: Mapping[str, Any]) -> str | None:
    """What papers call an architecture, None if it is none that has such a name.

    Args:
        backbone: with the timm name as `architecture`, its `args`, `embed_dim` and `patch_size`.

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
