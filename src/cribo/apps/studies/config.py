"""A study: rows of changes to a configuration, seeds and evaluations. This module does not import torch."""

import itertools
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml

from cribo.base.arguments import Parser
from cribo.base.bounds import above, at_least, check_bounds
from cribo.base.errors import ConfigError
from cribo.base.wording import nearest
from cribo.pretraining.config import PretrainConfig
from cribo.pretraining.loading import DEFAULT_PRESET, load_config

STATISTICS: Mapping[str, Callable[[Sequence[float]], float]] = {
    "minimum": min,
    "maximum": max,
    "mean": statistics.fmean,
}
"""Statistics of the rows that are aggregated."""

STEP = "step"
"""Name of the evaluation that times training steps, instead of scoring a trained network."""

_UNCHANGED = "base"  # name of the row without changes, if axes are varied one at a time
_PRESET = "base"  # key of a row that names another preset than that of the study
_PART = "part"  # key of a row that reads another part of a step than the whole
_OF, _AT, _METRIC = "of", "at", "metric"  # keys of a score that select what is read from an evaluation
_OF_CHECKPOINT = ("checkpoint", "origin", "licence", "backbone")  # keys of a row without a training


@dataclass(frozen=True)
class Checkpoint:
    """Weights that a row evaluates instead of a trained network.

    Attributes:
        source: the weights, as for `cribo evaluate --backbone`; None if they are not public, and the row has
            published figures only.
        origin: where the file can be obtained, or why it cannot.
        licence: licence of the weights, or that none is stated. Names of timm and of the Hugging Face hub need none:
            theirs is recorded there.
        options: further options of the backbone, such as {network: student}.
    """

    source: str | None
    origin: str = ""
    licence: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        """The source, and where it comes from.

        Example:
            >>> print(Checkpoint("croc.pth", "https://github.com/stegmuel/CrOC", "mit"))
            croc.pth, from https://github.com/stegmuel/CrOC, licence mit
        """
        origin = f"from {self.origin}" if self.origin and self.source else self.origin
        return ", ".join(filter(None, (self.source, origin, f"licence {self.licence}" if self.licence else "")))


@dataclass(frozen=True)
class Column:
    """A column of a study's table: a metric of an evaluation.

    Attributes:
        name: its name.
        score: name of the score whose evaluation it reads.
        metric: the metric; None for the headline metric, or for the time of a step.
        at: value of the varied setting, such as the ratio; None for the first, or for the best learning rate.
        part: part of a step; None for the whole step, or for that of the row.
    """

    name: str
    score: str
    metric: str | None = None
    at: Any = None
    part: str | None = None


@dataclass
class Budget:
    """Length of the training of each cell; the length that the preset has if nothing is given.

    Attributes:
        epochs: number of epochs.
        steps: number of optimiser steps, rounded to whole epochs.
        images: number of images seen, rounded to whole epochs.
        cpu_seconds: CPU seconds of the training steps, by timing some steps of each row; rounded to whole epochs.
            Requires data.workers 0, because the time of other processes is not counted.
    """

    epochs: Annotated[int, at_least(1)] | None = None
    steps: Annotated[int, at_least(1)] | None = None
    images: Annotated[int, at_least(1)] | None = None
    cpu_seconds: Annotated[float, above(0)] | None = None

    def __post_init__(self) -> None:
        check_bounds(self, "budget.")
        if len(given := [part.name for part in fields(self) if getattr(self, part.name) is not None]) > 1:
            raise ConfigError(f"budget must be one number, got {' and '.join(given)}: remove one of them")


@dataclass
class StudyConfig:
    """A study of a pretraining.

    Attributes:
        title: title of tables and figures.
        base: preset or YAML file of `cribo pretrain` that all rows change.
        changes: changes of all rows to it, by dotted name, such as {optim.epochs: 20}.
        axes: values of options to try, by dotted name, such as {losses.cross_image: [0, 1]}.
        combine: `all` for a row for each combination of the axes' values; `one at a time` for the base and a row for
            each value of each axis.
        aggregate: axes over which the table also has the minimum, maximum and mean of the rows that differ only in
            them, such as [objects.num_objects]. `combine` must be `all`, and at least one axis not aggregated.
        rows: further rows, by name: changes by dotted name. The key `base` names another preset for a row. A row with
            the key `checkpoint` evaluates these weights instead of training: a source as for `cribo evaluate
            --backbone`, or null if they are not public; with `origin` and `licence`, which are printed if it is
            missing, and options of the backbone under `backbone`. The key `part` selects a part of the step.
        seeds: seeds of each trained row; differences are judged from three on.
        budget: length of each training.
        scores: evaluations of each network, by name: the options of `cribo evaluate`, and `evaluation`, its first
            word, if that is not the name. `metric` and `at` select another metric than the headline, and another
            value of the varied setting than the first. A score {of: NAME} reads a further column of the evaluation
            of another score. The evaluation `step` times steps of the row's training instead.
        compare: pairs (row, reference) of names of rows. [each row with the first] The more there are, the wider the
            interval of each.
        paper: published scores in %, by names of score and row or aggregate, such as "criterion cycle, minimum", to
            compare with.
        source: where these are published.

    Raises:
        ConfigError: an option is invalid.
    """

    title: str
    scores: dict[str, dict[str, Any]]
    base: str = DEFAULT_PRESET
    changes: dict[str, Any] = field(default_factory=dict)
    axes: dict[str, list[Any]] = field(default_factory=dict)
    combine: Literal["all", "one at a time"] = "all"
    aggregate: list[str] = field(default_factory=list)
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    seeds: tuple[int, ...] = (0, 1, 2)
    budget: Budget = field(default_factory=Budget)
    compare: list[tuple[str, str]] | None = None
    paper: dict[str, dict[str, float]] = field(default_factory=dict)
    source: str = ""

    def __post_init__(self) -> None:
        for name, values in self.axes.items():
            if len(values) < 2:
                raise ConfigError(f"axes.{name} must have at least two values, got {values}: put it into changes")
            if repeated := _repeated(values):
                raise ConfigError(f"axes.{name} has the value {repeated[0]} twice: remove one")
        if not self.seeds:
            raise ConfigError("seeds must have at least one seed, got none")
        if repeated := _repeated(self.seeds):
            raise ConfigError(f"seeds has the seed {repeated[0]} twice: remove one")
        if not self.scores:
            raise ConfigError("scores must have at least one evaluation, such as {dense-nn: {data: scenes}}")
        if quoted := [name for name in self.rows if isinstance(name, bool)]:
            raise ConfigError(f"rows has the name {quoted[0]}: YAML reads yes, no, on and off so; quote it")
        self.rows = {str(name): changes for name, changes in self.rows.items()}
        self.paper = {score: {str(row): value for row, value in rows.items()} for score, rows in self.paper.items()}
        if self.compare is not None:
            self.compare = [(str(row), str(reference)) for row, reference in self.compare]
        self._check_checkpoints()
        self._check_scores()
        for name in self.aggregate:
            if name not in self.axes:
                raise ConfigError(f"aggregate has {name}, which is not one of the axes: {nearest(name, self.axes)}")
        if self.aggregate and (self.combine != "all" or len(self.aggregate) == len(self.axes)):
            raise ConfigError(
                f"aggregate needs all combinations of the axes, and an axis that is not in it, got combine "
                f"{self.combine} and {len(self.aggregate)} of {len(self.axes)} axes: remove it, or change the axes"
            )
        made = self._rows_of_axes()
        if doubled := [name for name in self.rows if name in made]:
            raise ConfigError(f"rows.{doubled[0]} has the name of a row of the axes: choose another")
        length = "optim.epochs" if self.budget != Budget() else ""
        for changes in (self.changes, *(made | self.rows).values()):
            for option, place in (("seed", "seeds"), (length, "budget")):
                if option in changes:
                    raise ConfigError(f"{option} is set by {place}: remove it from changes, axes and rows")
            for option, value in changes.items():
                if isinstance(value, Mapping) and "." not in option and "checkpoint" not in changes:
                    raise ConfigError(
                        f"{option} must be an option, such as {option}.{next(iter(value), 'name')}: use dots"
                    )
        names = self.names
        if len(names) < 2:
            raise ConfigError(f"a study must have at least two rows, got {len(names)}: add axes or rows")
        for row, reference in self.compare or ():
            if row == reference:
                raise ConfigError(f"compare has the row {row!r} with itself: remove it")
        published = [*names, *aggregate_names(self.aggregates)]
        for wanted, known in (
            ([row for pair in self.compare or () for row in pair], names),
            ([row for rows in self.paper.values() for row in rows], published),
        ):
            for row in wanted:
                if row not in known:
                    raise ConfigError(f"there is no row {row!r}: {nearest(row, known)}")
        for score in self.paper:
            if score not in self.scores:
                raise ConfigError(f"paper.{score} is not one of the scores: {nearest(score, self.scores)}")

    def _check_checkpoints(self) -> None:
        for row, changes in self.rows.items():
            if "checkpoint" not in changes:
                if given := [key for key in _OF_CHECKPOINT if key in changes]:
                    raise ConfigError(f"rows.{row} has {given[0]}, but no checkpoint: remove it")
                continue
            if other := [key for key in changes if key not in _OF_CHECKPOINT]:
                raise ConfigError(
                    f"rows.{row} has a checkpoint, which is not trained, and {other[0]}: remove one of them"
                )
            if not isinstance(changes["checkpoint"], str | None):
                raise ConfigError(
                    f"rows.{row}.checkpoint must be a file or name of weights, or null, got {changes['checkpoint']}"
                )

    def _check_scores(self) -> None:
        of_steps = [name for name, options in self.evaluations.items() if options.get("evaluation", name) == STEP]
        if of_steps and (rows := [row for row, weights in self.checkpoints.items() if weights.source is not None]):
            raise ConfigError(f"scores.{of_steps[0]} times a training, and rows.{rows[0]} is a checkpoint: remove one")
        if self.parts and len(of_steps) < len(self.evaluations):
            raise ConfigError(f"rows.{next(iter(self.parts))}.{_PART} is for the evaluation {STEP} only: remove it")
        for name, options in self.scores.items():
            of = options.get(_OF)
            if of is None:
                continue
            if other := [key for key in options if key not in (_OF, _AT, _METRIC, _PART)]:
                raise ConfigError(
                    f"scores.{name} reads the evaluation of {of}, and cannot set {other[0]}: only {_METRIC}, {_AT} "
                    f"and {_PART}"
                )
            evaluated = [other for other, own in self.scores.items() if _OF not in own]
            if of not in evaluated:
                raise ConfigError(f"scores.{name}.{_OF}: there is no evaluation {of!r}: {nearest(str(of), evaluated)}")

    @property
    def names(self) -> list[str]:
        """Names of all rows, in the order of the table."""
        return list(self._rows_of_axes() | self.rows)

    @property
    def changes_of_rows(self) -> dict[str, dict[str, Any]]:
        """Changes of each row that is trained, including those of all rows, by name of the row."""
        rows = {name: own for name, own in (self._rows_of_axes() | self.rows).items() if "checkpoint" not in own}
        own = ({key: value for key, value in changes.items() if key != _PART} for changes in rows.values())
        return {name: {**self.changes, **changes} for name, changes in zip(rows, own, strict=True)}

    @property
    def checkpoints(self) -> dict[str, Checkpoint]:
        """The weights of each row that is not trained, by name of the row."""
        return {
            row: Checkpoint(
                changes["checkpoint"],
                str(changes.get("origin", "")),
                str(changes.get("licence", "")),
                changes.get("backbone", {}),
            )
            for row, changes in self.rows.items()
            if "checkpoint" in changes
        }

    @property
    def parts(self) -> dict[str, str]:
        """The part of a step of each row that has one, by name of the row."""
        return {row: changes[_PART] for row, changes in self.rows.items() if _PART in changes}

    @property
    def evaluations(self) -> dict[str, dict[str, Any]]:
        """Options of each evaluation, by the name of its first column."""
        selected = (_METRIC, _AT, _PART)
        return {
            name: {key: value for key, value in options.items() if key not in selected}
            for name, options in self.scores.items()
            if _OF not in options
        }

    @property
    def columns(self) -> list[Column]:
        """The columns of the table."""
        return [
            Column(name, options.get(_OF, name), options.get(_METRIC), options.get(_AT), options.get(_PART))
            for name, options in self.scores.items()
        ]

    @property
    def trains(self) -> bool:
        """Whether an evaluation needs trained networks; steps are timed without."""
        return any(options.get("evaluation", name) != STEP for name, options in self.evaluations.items())

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Pairs (row, reference) to compare."""
        first, *others = self.names
        return [(row, first) for row in others] if self.compare is None else list(self.compare)

    @property
    def aggregates(self) -> dict[str, list[str]]:
        """Rows that differ only in the axes of `aggregate`, by the values of the other axes."""
        groups: dict[str, list[str]] = {}
        if self.aggregate:
            for row, changes in self._rows_of_axes().items():
                kept = {name: value for name, value in changes.items() if name not in self.aggregate}
                groups.setdefault(self._row_name(kept), []).append(row)
        return groups

    def configuration(self, row: str, seed: int) -> PretrainConfig:
        """Return the configuration of a cell, before the budget is applied.

        Raises:
            ConfigError: an option is unknown or invalid; the message names the row.
        """
        changes = dict(self.changes_of_rows[row])
        base = changes.pop(_PRESET, self.base)
        try:
            return load_config(base, {**changes, "seed": seed})
        except ValueError as error:
            raise ConfigError(f"row {row!r}: {error}") from error

    def _rows_of_axes(self) -> dict[str, dict[str, Any]]:
        if not self.axes:
            return {}
        if self.combine == "all":
            changes = [dict(zip(self.axes, values, strict=True)) for values in itertools.product(*self.axes.values())]
        else:
            changes = [{}, *({name: value} for name, values in self.axes.items() for value in values)]
        return {self._row_name(change): change for change in changes}

    def _row_name(self, changes: Mapping[str, Any]) -> str:
        """Return the name of a row, or of an aggregate, with these values of axes."""
        short = _short_names(list(self.axes))
        return ", ".join(f"{short[name]} {_word(value)}" for name, value in changes.items()) or _UNCHANGED


def aggregate_names(groups: Iterable[str]) -> list[str]:
    """Return the names of the minimum, maximum and mean of each group of rows.

    Example:
        >>> aggregate_names(["criterion none"])
        ['criterion none, minimum', 'criterion none, maximum', 'criterion none, mean']
    """
    return [f"{group}, {statistic}" for group in groups for statistic in STATISTICS]


def study_names() -> list[str]:
    """Return the names of the studies that are part of the package."""
    folder = resources.files("cribo.apps.studies")
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def find_study(name: str | Path) -> Path:
    """Return the file of a study, by its path or the name of one that is part of the package.

    Raises:
        ConfigError: there is no such file or name.
    """
    if str(name) in study_names():
        return Path(str(resources.files("cribo.apps.studies") / f"{name}.yaml"))
    path = Path(name).expanduser()
    if path.is_file():
        return path
    raise ConfigError(f"no study or file named {name}: {nearest(str(name), study_names())}")


def load_study(name: str | Path) -> StudyConfig:
    """Load a study from a file, or a study of the package by its name.

    Raises:
        ConfigError: the file does not exist, or an option is unknown or invalid.

    Example:
        >>> list(load_study("table5_small").changes_of_rows)
        ['image', 'image + cross-view', 'all']
    """
    path = find_study(name)
    parser = Parser()
    parser.add_class_arguments(StudyConfig)
    keys = [part.name for part in fields(StudyConfig)]
    try:
        content = yaml.safe_load(parser.read_config(path))
        for key in content:
            if key == "seeds" and not isinstance(content[key], list):
                raise ConfigError(f"seeds must be a list, such as [0, 1, 2], got {content[key]}")
            if key not in keys:
                raise ConfigError(f"unknown key {key}: {nearest(str(key), keys)}")
        if isinstance(rows := content.get("rows"), dict):
            for row, changes in rows.items():
                if changes is None:
                    raise ConfigError(f"row {row} has no value: for a row without changes, write {row}: {{}}")
        return parser.build(StudyConfig, parser.parse_args(["--config", str(path)]))
    except ConfigError as error:
        names_file = str(error).startswith(f"{path}")
        raise ConfigError(str(error) if names_file else f"{path.name}: {error}") from error


def dump_study(study: StudyConfig) -> str:
    """Return a study as YAML, from which `load_study` restores it."""
    content = {name: value for name, value in asdict(study).items() if value is not None}
    content["seeds"] = list(study.seeds)
    content["compare"] = [list(pair) for pair in study.pairs]
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True)


def share_of(part: str) -> slice:
    """Return the slice of all cells that belongs to a part, such as "2/5" for the second of five.

    Raises:
        ConfigError: the part has another form or is out of range.

    Example:
        >>> list("abcdefg")[share_of("2/3")]
        ['b', 'e']
    """
    number, _, parts = part.partition("/")
    if not (number.isdecimal() and parts.isdecimal() and 1 <= int(number) <= int(parts)):
        raise ConfigError(f"--part must be i/n with i from 1 to n, such as 2/5, got {part}")
    return slice(int(number) - 1, None, int(parts))


def folder_names(names: Sequence[str]) -> dict[str, str]:
    """Return distinct names for the folders of rows or scores.

    Example:
        >>> list(folder_names(["image + cross-view", "lr -0.1", "lr 0.1"]).values())
        ['image-cross-view', 'lr-0.1', 'lr-0.1-2']
    """
    folders: dict[str, str] = {}
    for name in names:
        plain = re.sub(r"[^\w.]+", "-", name).strip("-.") or "row"
        folder, number = plain, 1
        while folder in folders.values():
            number += 1
            folder = f"{plain}-{number}"
        folders[name] = folder
    return folders


def _short_names(names: list[str]) -> dict[str, str]:
    """Return the last part of each dotted name, or the whole name if two share their last part."""
    last = {name: name.rpartition(".")[2] for name in names}
    return {name: short if list(last.values()).count(short) == 1 else name for name, short in last.items()}


def _word(value: Any) -> str:
    if isinstance(value, Mapping):
        return " ".join(f"{name}={_word(own)}" for name, own in value.items())
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


def _repeated(values: Any) -> list[Any]:
    seen: list[Any] = []
    return [value for value in values if value in seen or seen.append(value)]
