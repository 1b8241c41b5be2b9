"""Configuration of `cribo benchmark`. This module does not import torch."""

from dataclasses import dataclass, field
from typing import Annotated

from cribo.base.bounds import at_least, check_bounds
from cribo.base.errors import ConfigError
from cribo.data.config import DEFAULT_READING, Reading
from cribo.evaluation.config import EvaluationRuntime, Schedule, TrainingRuntime
from cribo.evaluation.protocol import find_settings
from cribo.features.config import BackboneSource


@dataclass
class BenchmarkData:
    """Data sets of a benchmark.

    Attributes:
        root: folder that contains data sets, or a single data set, in the layouts of `cribo evaluate`.
        sets: names of the folders to use. [all]
    """

    root: str
    sets: tuple[str, ...] | None = None


@dataclass
class BenchmarkConfig:
    """Benchmark of a backbone with all protocols on all data sets.

    Attributes:
        backbone: the network to evaluate.
        data: data sets.
        only: names of protocols of `cribo evaluate`, or import paths of your own protocols. [all]
        quick: quick benchmark in minutes on a CPU, with few and small images of each data set, one draw, and without
            protocols that train.
        schedule: schedule of protocols that train: short, for small machines, or paper, for GPUs and comparison with
            published values.
        pictures: number of images to draw per evaluation.
        reading: how images are read.
        runtime: runtime of protocols that do not train.
        training: runtime of protocols that train, with a single process.

    Raises:
        ConfigError: a value is out of range, or a protocol does not exist.
    """

    backbone: BackboneSource
    data: BenchmarkData
    only: tuple[str, ...] | None = None
    quick: bool = False
    schedule: Schedule = "short"
    pictures: Annotated[int, at_least(0)] = 2
    reading: Reading = DEFAULT_READING
    runtime: EvaluationRuntime = field(default_factory=EvaluationRuntime)
    training: TrainingRuntime = field(default_factory=lambda: TrainingRuntime(devices=1))

    def __post_init__(self) -> None:
        check_bounds(self)
        for name in self.only or ():
            find_settings(name)
        if str(self.training.devices) != "1" or self.training.num_nodes != 1:
            raise ConfigError(
                f"training.devices and training.num_nodes must be 1, got {self.training.devices} and "
                f"{self.training.num_nodes}: train on several devices with cribo evaluate, whose results in the "
                "folder --rows are used"
            )
