"""Profile the parts of a configuration's training step on this machine (paper table "High-level profiling").

Runs a few real steps, with a full bank and all losses, including those that start later in a run.
"""

import dataclasses
import gc
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import lightning as L
import torch
from jaxtyping import Float, Int
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from cribo.base.bounds import at_least, between
from cribo.base.errors import ConfigError
from cribo.base.machine import give_freed_memory_back
from cribo.data.samples import Batch
from cribo.method import NO_MATCH, Matches, MemoryBank
from cribo.objectives.banks import RunBank
from cribo.objectives.base import Objective
from cribo.objectives.cribo import CrIBo
from cribo.pretraining.config import PretrainConfig
from cribo.pretraining.footprint import peak_bytes, reset_peak
from cribo.pretraining.module import PretrainingModule
from cribo.pretraining.session import Forever, Session
from cribo.training.lightning import interruptible, quiet_lightning
from cribo.training.timing import StepTimer

TABLE = {
    "Input": ("waiting for data", "photometric"),
    "Forward pass": (
        "frozen blocks",
        "teacher backbone",
        "student backbone",
        "image projections",
        "image loss",
        "patch losses",
        "rest of the forward pass",
    ),
    "Clustering": ("clustering", "pooling", "pooling, backward"),
    "NN retrieval": ("retrieval", "bank update"),
    "Object projections": ("object projections", "object projections, backward"),
    "Object losses": ("object losses", "object losses, backward"),
    "Update": (
        "image loss, backward",
        "image projections, backward",
        "backbone, backward",
        "optimiser",
        "centres",
        "moving average",
    ),
}
"""Rows of the paper's table, and the parts of a step (`cribo.training.timing`) in each row."""

OF_OBJECTS = ("Clustering", "NN retrieval", "Object projections", "Object losses")
"""Rows that are computed only for objects."""

OTHER = "Other"
"""Row of the parts that a custom objective names."""

_LOADER_SECONDS = 5.0
_TRACE_STEPS = 2  # the first one includes the profiler's start-up
_BANK_NOISE = 0.5  # standard deviation of synthetic objects, relative to the real objects' spread
_BANK_CHUNK = 16_384


def rows_of(parts: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return `TABLE`, with a row `OTHER` if some parts are not in it."""
    others = tuple(dict.fromkeys(part for part in parts if all(part not in row for row in TABLE.values())))
    return {**TABLE, OTHER: others} if others else TABLE


@dataclass(frozen=True)
class StepProfile:
    """Cost of a step for one number of objects.

    Attributes:
        fixed_objects: number of objects assigned to every image; None for those found by the clustering.
        objects_per_image: mean number of objects.
        bootstrapping_ratio: share of the objects with a valid match.
        step: median seconds of a step.
        step_range: seconds of the fastest and of the slowest step.
        rows: median seconds of each row of `rows_of`.
        parts: median seconds of each part.
        object_share: share of the rows `OF_OBJECTS`.
        images_per_second: images per second in the median step.
        peak: peak bytes, of the tensors on a GPU, or of the process on a CPU.
        held: bytes allocated between steps: weights, gradients, the optimiser's state and the bank.
    """

    fixed_objects: int | None
    objects_per_image: float
    bootstrapping_ratio: float
    step: float
    step_range: tuple[float, float]
    rows: dict[str, float]
    parts: dict[str, float]
    object_share: float
    images_per_second: float
    peak: int
    held: int


@dataclass(frozen=True)
class Profile:
    """Cost of a configuration's steps.

    Attributes:
        config: configuration of one device.
        bank_images: S, number of images in the bank; 0 without a bank.
        machine: device, threads, workers and version of PyTorch.
        loader_images_per_second: images per second of the loader only.
        steps: one profile per number of objects.
    """

    config: PretrainConfig
    bank_images: int
    machine: dict[str, Any]
    loader_images_per_second: float
    steps: list[StepProfile]


def profile(
    config: PretrainConfig,
    *,
    kept: Sequence[int] = (),
    bootstrapping_ratio: float = 0.5,
    steps: int = 10,
    warmup: int = 3,
    trace: Path | None = None,
    loader_seconds: float = _LOADER_SECONDS,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Profile:
    """Profile the training step of a configuration on this machine, as on one of the run's devices.

    Args:
        config: configuration of a run; its total batch is divided by its devices. All losses are on, and all layers are
            trained.
        kept: numbers of objects per image to profile, one after the other, for CrIBo; if empty, the objects found by
            an untrained network.
        bootstrapping_ratio: share of CrIBo's objects with a valid match; each adds a pair to the losses.
        steps: number of steps to time.
        warmup: number of steps before them.
        trace: file for a torch.profiler trace of further steps, with the last number of objects.
        loader_seconds: time to measure the loader only.
        progress: called with the phase, the number of steps done and their total.

    Raises:
        ValueError: the configuration, the data or the backbone cannot be used, or a number is out of range.

    Source: paper appendix "High-level profiling".
    """
    at_least(1).check(steps=steps)
    at_least(2).check(warmup=warmup)
    between(0, 1).check(bootstrapping_ratio=bootstrapping_ratio)
    session = Session(_on_one_device(config))
    config, objective = session.config, session.module.objective
    _check_kept(kept, config, objective)
    if trace is not None:
        if trace.is_dir():
            raise ConfigError(f"--trace must name a file, got the folder {trace}: use {trace / 'trace.json'}")
        trace.parent.mkdir(parents=True, exist_ok=True)
    # Profiled steps have their own modules; this one must not count towards their memory.
    session.module = session.module.to("meta")
    with quiet_lightning():
        trainer = session.trainer(None, [], 1)
    device = trainer.strategy.root_device
    progress("loader only", 0, 1)
    loader_rate = _loader_rate(session, trainer, loader_seconds)
    progress("loader only", 1, 1)
    measured = []
    for number, objects in enumerate(kept or (None,), start=1):
        report = partial(progress, "steps" if objects is None else f"{objects} objects an image")
        measurement = _Measurement(warmup, warmup + steps, trace if number >= len(kept) else None, report)
        measured.append(measurement.take(session, objects, bootstrapping_ratio))
        # Trainer and module are a reference cycle; the bank must be freed before the next one is created.
        del measurement
        gc.collect()
        give_freed_memory_back()
    machine = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "threads": torch.get_num_threads(),
        "workers": session.workers,
        "torch": torch.__version__,
    }
    bank_images = objective.bank_images if isinstance(objective, CrIBo) and config.needs_bank else 0
    return Profile(config, bank_images, machine, loader_rate, measured)


def _on_one_device(config: PretrainConfig) -> PretrainConfig:
    """Return the configuration of one device's share, in the middle of a run."""
    runtime, optim = config.runtime, config.optim
    if not str(runtime.devices).isdecimal() or int(runtime.devices) < 1:
        raise ConfigError(
            f"runtime.devices {runtime.devices} does not set how many devices share the batch: give their number, such "
            "as --runtime.devices 8, to profile one device's part, or --runtime.devices 1"
        )
    devices = runtime.num_nodes * int(runtime.devices)
    if optim.batch_size % devices:
        raise ConfigError(f"optim.batch_size must be a multiple of the {devices} devices, got {optim.batch_size}")
    return dataclasses.replace(
        config,
        losses=dataclasses.replace(config.losses, cross_image_from_epoch=0),
        optim=dataclasses.replace(
            optim, batch_size=optim.batch_size // devices, freeze_last_layers_epochs=0, freeze_backbone_epochs=0
        ),
        score=dataclasses.replace(config.score, root=None),
        runtime=dataclasses.replace(runtime, devices=1, num_nodes=1),
    )


def _check_kept(kept: Sequence[int], config: PretrainConfig, objective: Objective) -> None:
    """Check that images can have these numbers of objects."""
    if not kept:
        return
    if not isinstance(objective, CrIBo):
        raise ConfigError(f"--kept is for the objective cribo, got {config.objective.name}: remove it")
    if not config.needs_objects:
        raise ConfigError("losses.cross_view and losses.cross_image are off: there are no objects to count")
    patches = objective.grid[0] * objective.grid[1]
    most = min(config.objects.num_objects, patches)
    for number in kept:
        if not 1 <= number <= most:
            raise ConfigError(
                f"--kept must be between 1 and {most} (objects.num_objects {config.objects.num_objects}, "
                f"{patches} patches a view), got {number}"
            )


def _loader_rate(session: Session, trainer: L.Trainer, seconds: float) -> float:
    """Return the images per second of the loader only, after its workers have started."""
    with closing(session.loader(trainer)) as loader:
        batches = iter(Forever(loader))
        next(batches)
        begun, images = time.perf_counter(), 0
        while not images or time.perf_counter() - begun < seconds:
            images += len(next(batches))
        return images / (time.perf_counter() - begun)


class _Measurement(Callback):
    """Callback that measures the steps after the first `warmup`, up to step `last`."""

    def __init__(self, warmup: int, last: int, trace: Path | None, progress: Callable[[int, int], None]) -> None:
        self.warmup, self.last = warmup, last
        self.trace, self.progress = trace, progress
        self.profiler = torch.profiler.profile()
        self.timer = StepTimer()

    def take(self, session: Session, objects: int | None, ratio: float) -> StepProfile:
        """Train with a number of objects per image (None: as clustered) and a share of valid matches."""
        module = session.make_module()
        objective = module.objective
        if isinstance(objective, CrIBo):
            if objects is not None:
                objective.label_tokens = partial(_fixed_objects, objective.label_tokens, objects)
            objective.match = partial(_fixed_ratio, objective.match, ratio)
        with quiet_lightning():
            trainer = session.trainer(None, [self], self.last + (_TRACE_STEPS if self.trace else 0))
            with self.timer, interruptible(trainer), closing(session.loader(trainer)) as loader:
                trainer.fit(module, Forever(loader))
        table = rows_of(part for step in self.seconds for part in step)
        parts = {part: median(step.get(part, 0.0) for step in self.seconds) for row in table.values() for part in row}
        rows = {row: sum(parts[part] for part in table[row]) for row in table}
        steps = [sum(step.values()) for step in self.seconds]
        return StepProfile(
            fixed_objects=objects,
            objects_per_image=self.metrics.get("objects_per_image", 0.0),
            bootstrapping_ratio=self.metrics.get("bootstrapping_ratio", 0.0),
            step=median(steps),
            step_range=(min(steps), max(steps)),
            rows=rows,
            parts=parts,
            object_share=sum(rows[row] for row in OF_OBJECTS) / sum(rows.values()),
            images_per_second=session.config.optim.batch_size / median(steps),
            peak=self.peak,
            held=self.held,
        )

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for optimizer in trainer.optimizers:
            optimizer.register_step_post_hook(lambda *_: self.timer.mark("optimiser"))

    def on_train_batch_start(self, *_: Any, **__: Any) -> None:
        self.timer.mark("waiting for data")

    def on_before_backward(self, *_: Any, **__: Any) -> None:
        self.timer.mark("rest of the forward pass")

    def on_after_backward(self, *_: Any, **__: Any) -> None:
        self.timer.mark("backbone, backward")

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, PretrainingModule)
        timer, device, done = self.timer, pl_module.device, trainer.global_step
        timer.end_step()
        if done == 1 and isinstance(pl_module.objective, CrIBo):
            _fill_bank(pl_module.objective)
        if done == self.warmup:
            pl_module.read_metrics()
            reset_peak(device)
            timer.start(device)
        if done == self.last:
            self.seconds, self.peak = timer.read(), peak_bytes(device)
            self.held = _held_bytes(pl_module.objective, trainer.optimizers)
            self.metrics = pl_module.read_metrics()
            if self.trace is not None:
                self.profiler.start()
        if done == trainer.max_steps and self.trace is not None:
            self.profiler.stop()
            self.profiler.export_chrome_trace(str(self.trace))
        self.progress(done, trainer.max_steps)


def _fixed_objects(
    label_tokens: Callable[..., Int[Tensor, "b 2 n"]], objects: int, tokens: Float[Tensor, "b 2 n d"], batch: Batch
) -> Int[Tensor, "b 2 n"]:
    """Run the clustering, which is timed, and replace its result by stripes: equally many objects in each image."""
    labels = label_tokens(tokens, batch)
    stripes = torch.arange(labels.shape[2], device=labels.device) * objects // labels.shape[2]
    return stripes.expand_as(labels).contiguous()


def _fixed_ratio(match: Callable[..., Matches], ratio: float, *args: Any, **kwargs: Any) -> Matches:
    """Run the matching, which is timed, and mark a fixed share of the matches as valid."""
    nearest = match(*args, **kwargs).nearest
    places = torch.arange(nearest.shape[1], device=nearest.device)
    chosen = ((places + 1) * ratio).floor() > (places * ratio).floor()
    return Matches(nearest, (nearest != NO_MATCH) & chosen)


def _fill_bank(objective: CrIBo) -> None:
    found = objective.last_result.objects if objective.last_result is not None else None
    if objective.bank is not None and found is not None:
        fill_bank(objective.bank, found.teacher, per_image=max(1, round(len(found.rows) / len(found.counts))))


@torch.no_grad()
def fill_bank(bank: MemoryBank, objects: Float[Tensor, "2 r d"], *, per_image: int) -> None:
    """Fill a bank with synthetic objects near real ones, so that a search costs as much as later in a run.

    Each row is a real object plus Gaussian noise of half the objects' spread.
    """
    rows = objects.shape[1]
    if rows == 0:
        return
    generator = torch.Generator(objects.device).manual_seed(0)
    spread = _BANK_NOISE * objects.float().std(dim=1, keepdim=True, correction=0)
    while bank.images_held < bank.num_images:
        images = min(bank.num_images - bank.images_held, max(1, _BANK_CHUNK // per_image))
        choice = torch.randint(rows, (images * per_image,), generator=generator, device=objects.device)
        noise = torch.randn(2, len(choice), objects.shape[2], generator=generator, device=objects.device)
        made_up = torch.full_like(choice, -1)  # an id that no image has
        bank.push(objects[:, choice].float() + spread * noise, made_up, [per_image] * images)


def _held_bytes(objective: Objective, optimizers: Sequence[torch.optim.Optimizer]) -> int:
    weights = list(objective.parameters())
    state = [value for optimizer in optimizers for entry in optimizer.state.values() for value in entry.values()]
    tensors = [*weights, *(weight.grad for weight in weights), *state]
    held = sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))
    banks = [each.bank for each in vars(objective).values() if isinstance(each, RunBank)]
    return held + sum(bank.nbytes for bank in banks if bank is not None)
