"""Planning of a benchmark: the data sets of a folder and their protocols. Torch is imported on use only."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from cribo.base.errors import ConfigError, DataError, MissingPackage
from cribo.base.files import require
from cribo.base.wording import grouped
from cribo.evaluation.benchmark.config import BenchmarkConfig
from cribo.evaluation.config import PROTOCOLS
from cribo.evaluation.protocol import Protocol, find_protocol

_CONTAINERS = frozenset({"VOCdevkit"})
"""Names of folders whose subfolders are data sets."""


@dataclass(frozen=True)
class PlannedRow:
    """A protocol and a data set to evaluate it on.

    Attributes:
        protocol: class of the protocol.
        set: folder name of the data set.
        data: instance of the protocol's `data_type`.
    """

    protocol: type[Protocol]
    set: str
    data: Any

    @property
    def name(self) -> str:
        """Name of protocol and data set, for messages and folders."""
        return f"{self.protocol.name}-{self.set}"


@dataclass(frozen=True)
class Plan:
    """Planned and excluded evaluations of a benchmark.

    Attributes:
        rows: planned evaluations in order.
        left_out: reason why a protocol is excluded, by name of the protocol.
    """

    rows: list[PlannedRow]
    left_out: dict[str, str]

    def table(self) -> Table:
        """Return a table of the protocols with their data sets, or the reason of their exclusion."""
        table = Table("evaluation", "sets")
        for name, names in grouped((row.protocol.name, row.set) for row in self.rows).items():
            table.add_row(Text(name), Text(", ".join(names)))
        for reason, names in grouped((reason, name) for name, reason in self.left_out.items()).items():
            table.add_row(Text(", ".join(names)), Text(f"not measured: {reason}"), style="dim")
        return table


def make_plan(config: BenchmarkConfig) -> Plan:
    """Find the data sets in the folder, and the protocols that support them.

    Raises:
        MissingData: the folder does not exist.
        DataError: the folder has no known data set, or lacks one of `data.sets`.
        ConfigError: a protocol does not exist, or one of `only` does not support the backbone or `quick`.
    """
    protocols = [find_protocol(name) for name in dict.fromkeys(PROTOCOLS if config.only is None else config.only)]
    left_out = {protocol.name: reason for protocol in protocols if (reason := _obstacle(protocol, config))}
    if config.only is not None and left_out:
        name, reason = next(iter(left_out.items()))
        raise ConfigError(f"{name} cannot be evaluated: {reason}; remove it from --only")
    root = Path(config.data.root).expanduser()
    require(root)
    used = [protocol for protocol in protocols if protocol.name not in left_out]
    found = _sets(root, used, config.data.sets)
    rows = [
        PlannedRow(protocol, name, _limited(protocol, data, quick=config.quick))
        for name, pairs in found.items()
        for protocol, data in pairs
    ]
    if not rows:
        layouts = "; ".join(dict.fromkeys(filter(None, map(_layout, used))))
        raise DataError(f"no known set in {root} or its folders: looked for {layouts} (docs/evaluation/data.md)")
    without = {protocol for protocol in used if not any(row.protocol is protocol for row in rows)}
    left_out |= {
        protocol.name: f"no set; looked for {_layout(protocol) or 'folders that it opens'}"
        for protocol in used
        if protocol in without
    }
    return Plan(rows, left_out)


def _layout(protocol: type[Protocol]) -> str:
    return getattr(protocol.data_type, "layout", "")


def _obstacle(protocol: type[Protocol], config: BenchmarkConfig) -> str:
    """Return the reason why a protocol does not support this backbone or schedule; empty if it does."""
    if config.quick and protocol.trains():
        return "--quick excludes protocols that train"
    try:
        protocol().check_packages()
        protocol().check_backbone(config.backbone)
    except (ConfigError, MissingPackage) as error:
        return str(error)
    return ""


def _sets(
    root: Path, protocols: Sequence[type[Protocol]], names: Sequence[str] | None
) -> dict[str, list[tuple[type[Protocol], Any]]]:
    """Return protocols and data by data set: the folder itself if it is a data set, else its subfolders."""
    pairs = {folder: _takers(folder, protocols) for folder in (root, *_folders(root))}
    found = {folder.resolve().name: takers for folder, takers in pairs.items() if takers}
    if pairs[root]:
        found = {root.resolve().name: pairs[root]}
    if names is None:
        return found
    if unknown := [name for name in names if name not in found]:
        there = ", ".join(found) or "none"
        raise DataError(f"data.sets: no known set {unknown[0]!r} in {root}; available sets: {there}")
    return {name: found[name] for name in names}


def _takers(folder: Path, protocols: Sequence[type[Protocol]]) -> list[tuple[type[Protocol], Any]]:
    return [(protocol, data) for protocol in protocols if (data := protocol.data_in(folder)) is not None]


def _folders(root: Path) -> list[Path]:
    inner = sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    return [folder for path in inner for folder in (_folders(path) if path.name in _CONTAINERS else [path])]


def _limited(protocol: type[Protocol], data: Any, *, quick: bool) -> Any:
    can_limit = any(setting.name == "limit" for setting in fields(data))
    return replace(data, limit=protocol.quick_limit) if quick and can_limit else data
