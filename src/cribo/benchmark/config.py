"""Options of `cribo benchmark`, shared by the command line and Python. Nothing here needs torch."""

from dataclasses import dataclass, field

from cribo.arguments import ConfigError
from cribo.evaluation.protocol import find_protocol
from cribo.evaluation.runtime import EvaluationRuntime, Schedule, TrainingRuntime, require_least
from cribo.retrieval.source import BackboneSource


@dataclass
class BenchmarkData:
    """Sets to measure on.

    Attributes:
        root: a folder that contains sets, or one set. The layouts are those of `cribo evaluate`.
        sets: names of the folders to use. [all]
    """

    root: str
    sets: tuple[str, ...] | None = None


@dataclass
class BenchmarkConfig:
    """Measurement of a backbone by every protocol on every set.

    Attributes:
        backbone: the network to measure.
        data: the sets.
        only: protocols, as named by `cribo evaluate`, or import paths of your own. [all]
        quick: a first look, in minutes on a CPU: few and small images of each set, one draw, and no
            protocol that trains.
        schedule: of protocols that train: short, for small machines, or paper, for GPUs and comparison with published
            values.
        pictures: number of images to draw in each row.
        runtime: of protocols that do not train.
        training: of protocols that train; in one process.

    Raises:
        ConfigError: a value out of range, or no such protocol.
    """

    backbone: BackboneSource
    data: BenchmarkData
    only: tuple[str, ...] | None = None
    quick: bool = False
    schedule: Schedule = "short"
    pictures: int = 2
    runtime: EvaluationRuntime = field(default_factory=EvaluationRuntime)
    training: TrainingRuntime = field(default_factory=lambda: TrainingRuntime(devices=1))

    def __post_init__(self) -> None:
        require_least(self, {"pictures": 0})
        for name in self.only or ():
            find_protocol(name)
        if str(self.training.devices) != "1" or self.training.num_nodes != 1:
            raise ConfigError(
                f"training.devices and training.num_nodes must be 1, got {self.training.devices} and "
                f"{self.training.num_nodes}: train on several devices with cribo evaluate, whose results in the "
                "folder --rows are used"
            )
