"""The evaluation `step` of a study: time and memory of the steps of a row's training, instead of a trained network."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from rich.console import Console

from cribo.apps.studies.config import Column
from cribo.apps.studies.metrics import STEP_METRICS, Reading
from cribo.base.arguments import Parser
from cribo.base.bounds import at_least, between, check_bounds
from cribo.base.console import Phases
from cribo.base.errors import ConfigError
from cribo.base.files import read_json, write_json
from cribo.base.job import Job
from cribo.base.wording import nearest
from cribo.pretraining.config import PretrainConfig
from cribo.pretraining.profile_report import PROFILE, write_profile
from cribo.pretraining.profiling import OF_OBJECTS, TABLE, profile
from cribo.pretraining.session import open_source

OBJECTS = "Objects"
"""Part of a step: all rows of `OF_OBJECTS`."""


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """How steps are timed.

    Attributes:
        kept: number of objects per image, for CrIBo; those that an untrained network finds if None.
        bootstrapping_ratio: share of CrIBo's objects with a valid match.
        steps: number of timed steps.
        warmup: number of steps before them.
        images: number of images of an epoch; those of the row's data if None.
    """

    kept: Annotated[int, at_least(1)] | None = None
    bootstrapping_ratio: Annotated[float, between(0, 1)] = 0.5
    steps: Annotated[int, at_least(1)] = 10
    warmup: Annotated[int, at_least(2)] = 3
    images: Annotated[int, at_least(1)] | None = None

    def __post_init__(self) -> None:
        check_bounds(self)


@dataclass(frozen=True)
class StepScore:
    """Timing of the steps of every row of a study, by the named parts of a step (`cribo profile`).

    Attributes:
        name: name in the study.
        settings: how steps are timed.
    """

    name: str
    settings: StepSettings

    metrics: ClassVar[Sequence[str]] = STEP_METRICS
    missing: ClassVar[None] = None

    def check(self, *_: object) -> None:
        """No-op: steps of every network can be timed."""

    def is_finished(self, folder: Path) -> bool:
        """Whether a folder contains the finished profile of a cell."""
        return (folder / PROFILE).is_file()

    def measure(self, config: PretrainConfig, folder: Path, console: Console) -> None:
        """Profile steps of a configuration, and write the profile to a folder.

        Raises:
            ValueError: see `profile`.
        """
        settings, num_images = self.settings, len(open_source(config))
        with Phases(console) as progress:
            measured = profile(
                config,
                kept=() if settings.kept is None else (settings.kept,),
                bootstrapping_ratio=settings.bootstrapping_ratio,
                steps=settings.steps,
                warmup=settings.warmup,
                loader_seconds=0.0,
                progress=progress,
            )

        def write(part: Path) -> None:
            write_profile(measured, part, command="")
            of_run = {"batch_size": config.optim.batch_size, "num_images": num_images}
            write_json(part / PROFILE, {**read_json(part / PROFILE), **of_run})

        Job(folder, "profile").create(write)

    def read(self, folder: Path, column: Column, part: str | None) -> Reading | None:
        """Read a column from the folder of a finished profile; None for a part that the step does not have.

        Args:
            folder: the folder.
            column: the column.
            part: part of the step of the row; None for that of the column, or for the whole step.
        """
        content = read_json(folder / PROFILE)
        (step,) = content["steps"]
        part = part or column.part
        rows = step["rows"]
        of_part = OF_OBJECTS if part == OBJECTS else rows if part is None else (part,)
        seconds = sum(rows.get(row, 0.0) for row in of_part)
        images = self.settings.images or content["num_images"]
        metric = column.metric or self.metrics[0]
        values = {
            "time": seconds,
            "share": seconds / sum(rows.values()),
            "memory": step["peak"],
            "epoch": seconds * (images // content["batch_size"]),
        }
        if part is not None and seconds == 0:
            return None
        return Reading(values[metric], {**vars(self.settings), "machine": content["machine"]})


def require_part(part: str) -> None:
    """Raise ConfigError if a step has no such part."""
    if part not in (known := [*TABLE, OBJECTS]):
        raise ConfigError(f"part must be one of {', '.join(known)}, got {part!r}: {nearest(part, known)}")


def open_steps(name: str, given: Mapping[str, Any]) -> StepScore:
    """Create the evaluation from its options.

    Raises:
        ConfigError: an option does not exist, or a value is out of range.
    """
    parser = Parser()
    parser.add_class_arguments(StepSettings)
    parsed = parser.parse_args([f"--{option}={value}" for option, value in given.items()])
    return StepScore(name, parser.build(StepSettings, parsed))
