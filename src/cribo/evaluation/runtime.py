"""Runtime configuration of evaluations: devices, precision, memory. Torch is imported on use only."""

from dataclasses import dataclass
from typing import Annotated, Literal

from cribo.base.bounds import above, at_least, check_bounds
from cribo.base.errors import ConfigError
from cribo.training.loggers import TENSORBOARD, require_known

TrainerPrecision = Literal["32-true", "bf16-mixed", "16-mixed"]

Schedule = Literal["paper", "short"]
"""Training schedule: the paper's, for GPUs, or a short one for small data sets and CPUs."""


@dataclass
class EvaluationRuntime:
    """Devices, memory and cache; results do not depend on them beyond rounding.

    Attributes:
        devices: comma-separated devices that share the search, such as cuda:0,cuda:1 or cpu. [all GPUs, else the CPU]
        batch_size: number of images of equal size to encode at once. Lower it if the device runs out of memory.
        workers: number of worker processes that read images. [half of the cores]
        memory_gib: memory limit of the search on each device, in GiB. With less memory the search is slower, with
            the same result. [half of the free memory]
        cache: folder in which features are cached for further evaluations of the backbone; none keeps them in memory.
    """

    devices: tuple[str, ...] | None = None
    batch_size: Annotated[int, at_least(1)] = 16
    workers: Annotated[int, at_least(0)] | None = None
    memory_gib: Annotated[float, above(0)] | None = None
    cache: str = "~/.cache/cribo/features"

    def __post_init__(self) -> None:
        check_bounds(self, "runtime.")


@dataclass
class TrainingRuntime:
    """Devices, precision and logging; results do not depend on devices beyond rounding.

    Attributes:
        accelerator: accelerator of the Lightning Trainer: auto, cpu, gpu, ...
        devices: number of devices per machine, or auto for all GPUs (one process on a CPU).
        num_nodes: number of machines.
        precision: 32-true, or on GPUs bf16-mixed (16-mixed on older GPUs), about twice as fast with half the memory.
        workers: number of worker processes that read images, per device. [half of the cores]
        threads: number of CPU threads of torch. [torch's default]
        logger: where numbers are logged: tensorboard, wandb, mlflow, trackio, or several of them, such as
            tensorboard,wandb (docs/logging.md).
        log_every: number of steps between two logged entries.
        checkpoint_every: number of steps between two checkpoints; one is also written at the end.
        evaluate_every: number of steps between two validations; 0 validates only at the end.
    """

    accelerator: str = "auto"
    devices: int | str = "auto"
    num_nodes: Annotated[int, at_least(1)] = 1
    precision: TrainerPrecision = "32-true"
    workers: Annotated[int, at_least(0)] | None = None
    threads: Annotated[int, at_least(1)] | None = None
    logger: tuple[str, ...] = (TENSORBOARD,)
    log_every: Annotated[int, at_least(1)] = 50
    checkpoint_every: Annotated[int, at_least(1)] = 1000
    evaluate_every: Annotated[int, at_least(0)] = 0

    def __post_init__(self) -> None:
        check_bounds(self, "runtime.")
        require_known(self.logger)
        if not (self.devices == "auto" or (str(self.devices).isdecimal() and int(self.devices) > 0)):
            raise ConfigError(f"runtime.devices must be auto or a number >= 1, got {self.devices!r}")

    @property
    def on_gpu(self) -> bool:
        """Whether training runs on NVIDIA or AMD GPUs."""
        import torch

        return self.accelerator in ("gpu", "cuda") or (self.accelerator == "auto" and torch.cuda.is_available())
