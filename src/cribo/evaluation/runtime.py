"""Where and how an evaluation runs, as a configuration says it. Nothing here needs torch until it is asked for."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from cribo.arguments import ConfigError

TrainerPrecision = Literal["32-true", "bf16-mixed", "16-mixed"]

Schedule = Literal["paper", "short"]
"""Whose settings a training has: the paper's, for GPUs, or short ones for small sets and CPUs."""


def require_least(settings: object, least: Mapping[str, int], prefix: str = "") -> None:
    """Check that settings are not too small; None is valid.

    Args:
        settings: an object with the settings as attributes.
        least: the smallest valid value of each.
        prefix: of the names in errors.

    Raises:
        ConfigError: a setting is smaller.
    """
    for name, bound in least.items():
        if (value := getattr(settings, name)) is not None and value < bound:
            raise ConfigError(f"{prefix}{name} must be >= {bound}, got {value}")


@dataclass
class EvaluationRuntime:
    """Devices, memory and cache; results do not depend on them beyond rounding.

    Attributes:
        devices: such as cuda:0,cuda:1 or cpu; they share the search. [all GPUs, or the CPU if there is none]
        batch_size: images of equal size that are encoded at once. Lower it if the device runs out of memory.
        workers: processes that read images. [half of the cores]
        memory_gib: memory limit of the search on each device. With less memory the keys are read more often, with the
            same result. [half of the free memory]
        cache: folder of the features, for further evaluations of this backbone; none keeps them in memory.
    """

    devices: tuple[str, ...] | None = None
    batch_size: int = 16
    workers: int | None = None
    memory_gib: float | None = None
    cache: str = "~/.cache/cribo/features"

    def __post_init__(self) -> None:
        require_least(self, {"batch_size": 1, "workers": 0}, "runtime.")
        if self.memory_gib is not None and self.memory_gib <= 0:
            raise ConfigError(f"runtime.memory_gib must be > 0, got {self.memory_gib}")


@dataclass
class TrainingRuntime:
    """Devices, precision and logging; results do not depend on devices beyond rounding.

    Attributes:
        accelerator: of the Lightning Trainer: auto, cpu, gpu, ...
        devices: number of devices of each machine, or auto for all GPUs (one process on a CPU).
        num_nodes: number of machines.
        precision: 32-true, or on GPUs bf16-mixed (16-mixed on old ones): about twice as fast for half the memory.
        workers: processes that read images, for each device. [half of the cores]
        threads: of torch on a CPU. [torch's default]
        log_every: steps between two points in TensorBoard.
        checkpoint_every: steps between two checkpoints; one is also written at the end.
        evaluate_every: steps between two scores during training; 0 for the final score only.
    """

    accelerator: str = "auto"
    devices: int | str = "auto"
    num_nodes: int = 1
    precision: TrainerPrecision = "32-true"
    workers: int | None = None
    threads: int | None = None
    log_every: int = 50
    checkpoint_every: int = 1000
    evaluate_every: int = 0

    def __post_init__(self) -> None:
        least = {"num_nodes": 1, "threads": 1, "log_every": 1, "checkpoint_every": 1, "workers": 0, "evaluate_every": 0}
        require_least(self, least, "runtime.")
        if not (self.devices == "auto" or (str(self.devices).isdecimal() and int(self.devices) > 0)):
            raise ConfigError(f"runtime.devices must be auto or a number >= 1, got {self.devices!r}")

    @property
    def on_gpu(self) -> bool:
        """Whether it is trained on GPUs of NVIDIA or AMD."""
        import torch

        return self.accelerator in ("gpu", "cuda") or (self.accelerator == "auto" and torch.cuda.is_available())
