"""What a training step costs on the user's own configuration, part by part (paper table "High-level profiling").

A few steps of the real run are taken, with the losses that come later switched on, on a bank that is full.
"""

import dataclasses
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import lightning as L
import torch
from jaxtyping import Float, Int
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from cribo.allocator import give_freed_memory_back
from cribo.arguments import ConfigError
from cribo.data.samples import Batch
from cribo.method import NO_MATCH, Matches, MemoryBank
from cribo.objectives.cribo import CrIBo
from cribo.pretraining.ceiling import model_flops, product_ceiling
from cribo.pretraining.config import PretrainConfig
from cribo.pretraining.footprint import held_bytes, peak_bytes, reset_peak
from cribo.pretraining.module import PretrainingModule
from cribo.pretraining.session import Forever, Session
from cribo.training.lightning import interruptible, quiet_lightning

Row = Literal["Input", "Forward pass", "Clustering", "NN retrieval", "Object projections", "Object losses", "Update"]


@dataclass(frozen=True)
class Part:
    """Where a lap of the step belongs.

    Attributes:
        row: of the paper's table.
        of_objects: whether the operation exists for the sake of objects alone.
    """

    row: Row
    of_objects: bool = False


PARTS: dict[str, Part] = {
    "waiting for data": Part("Input"),
    "photometric": Part("Input"),
    "teacher backbone": Part("Forward pass"),
    "student backbone": Part("Forward pass"),
    "image projections": Part("Forward pass"),
    "image loss": Part("Forward pass"),
    "clustering": Part("Clustering", of_objects=True),
    "pooling": Part("Clustering", of_objects=True),
    "pooling, backward": Part("Clustering", of_objects=True),
    "retrieval": Part("NN retrieval", of_objects=True),
    "bank update": Part("NN retrieval", of_objects=True),
    "object projections": Part("Object projections", of_objects=True),
    "object projections, backward": Part("Object projections", of_objects=True),
    "object losses": Part("Object losses", of_objects=True),
    "object losses, backward": Part("Object losses", of_objects=True),
    "image loss, backward": Part("Update"),
    "image projections, backward": Part("Update"),
    "backbone, backward": Part("Update"),
    "optimiser": Part("Update"),
    "centres": Part("Update"),
    "moving average": Part("Update"),
    "bookkeeping": Part("Update"),
}
"""The laps of `PretrainingModule.training_step`, in the order of the table."""

_DTYPES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16, "32-true": torch.float32}
_LOADER_SECONDS = 5.0
# Bank rows are objects of the first batch, moved by this share of the objects' own spread.
_BANK_NOISE = 0.5
_BANK_CHUNK = 16_384


@dataclass(frozen=True)
class Spread:
    """Seconds over several steps."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(seconds: Sequence[float]) -> "Spread":
        """Median, least and most of some measurements."""
        return Spread(statistics.median(seconds), min(seconds), max(seconds))


@dataclass(frozen=True)
class StepProfile:
    """One way of taking steps.

    Attributes:
        fixed_objects: how many objects every image was given; None: as the clustering found them.
        objects_per_image: how many there were on average.
        bootstrapping_ratio: share of the objects with a valid match.
        step: seconds of a whole step.
        parts: seconds of each part (the names of `PARTS`).
        object_flops: matrix products of a step that the objects alone need: search, projections, logits and
            their gradients.
        memory: bytes by what holds them, at the end of a step and, for activations, before backward.
        peak: bytes at most: of the device's tensors, or on a CPU of the process.
    """

    fixed_objects: int | None
    objects_per_image: float
    bootstrapping_ratio: float
    step: Spread
    parts: dict[str, Spread]
    object_flops: float
    memory: dict[str, int]
    peak: int

    @property
    def object_seconds(self) -> float:
        """Seconds of the parts that exist for the objects alone."""
        return sum(spread.median for name, spread in self.parts.items() if PARTS[name].of_objects)

    @property
    def object_share(self) -> float:
        """Their share of the step."""
        return self.object_seconds / sum(spread.median for spread in self.parts.values())

    def row(self, row: Row) -> float:
        """Seconds of a row of the paper's table."""
        return sum(spread.median for name, spread in self.parts.items() if PARTS[name].row == row)


@dataclass(frozen=True)
class Profile:
    """What the steps of a configuration cost.

    Attributes:
        about: what was measured and on what.
        batch_size: images of a step of this device.
        flops: of the backbones in one step (student forward and backward, teacher forward).
        ceiling: the most floating-point operations a second that matrix products reached in the same run.
        loader_images_per_second: what the loader gives when nothing else is done.
        steps: one entry for each number of objects.
    """

    about: dict[str, Any]
    batch_size: int
    flops: float
    ceiling: float
    loader_images_per_second: float
    steps: list[StepProfile]

    def utilisation(self, step: StepProfile) -> float:
        """Model FLOPs utilisation: the backbones' operations over what the machine could do in the whole step."""
        return self.flops / step.step.median / self.ceiling

    def object_floor(self, step: StepProfile) -> float:
        """Seconds of the objects' matrix products alone, at the machine's ceiling."""
        return step.object_flops / self.ceiling


def profile(
    config: PretrainConfig,
    *,
    kept: Sequence[int] = (),
    bootstrapping_ratio: float = 0.5,
    steps: int = 10,
    warmup: int = 3,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Profile:
    """Measure the training step of a configuration on this machine, as one of its devices would take it.

    Args:
        config: of a run; its total batch is divided by its devices. What a run switches on later (L_ci^o, the last
            layers) is on.
        kept: numbers of objects that every image is given, one after the other: cost follows the objects that
            are kept (search with their square), of which a random network says nothing. As found when empty.
        bootstrapping_ratio: share of the objects that are given a valid match, of which a random network says
            nothing either: each has another pair in the losses.
        steps: that are timed.
        warmup: steps before them.
        progress: told what is under way.

    Raises:
        ValueError: the configuration, the data or the backbone cannot be used, or a number is out of range.

    Source: paper appendix "High-level profiling".
    """
    if steps < 1 or warmup < 2:
        raise ConfigError(f"a profile needs --steps >= 1 and --warmup >= 2, got {steps} and {warmup}")
    if not 0 <= bootstrapping_ratio <= 1:
        raise ConfigError(f"--bootstrapping_ratio must be between 0 and 1, got {bootstrapping_ratio}")
    session = Session(_steady(config))
    objective = session.module.objective
    if not isinstance(objective, CrIBo):
        raise ConfigError(f"cribo profile measures the objective cribo, got {config.objective.name}")
    if kept and not session.config.needs_objects:
        raise ConfigError("losses.cross_view and losses.cross_image are off: there are no objects to fix a number of")
    patches = objective.grid[0] * objective.grid[1]
    most = min(config.objects.num_objects, patches)
    for number in kept:
        if not 1 <= number <= most:
            raise ConfigError(
                f"--kept must be between 1 and {most} (objects.num_objects {config.objects.num_objects}, "
                f"{patches} patches a view), got {number}"
            )
    device = _device(session)
    ceiling = product_ceiling(device, _DTYPES[config.runtime.precision])
    flops = 8 * session.config.optim.batch_size * model_flops(objective.student.backbone, config.views.size)
    about = _about(session, device)
    # The steps are taken with modules of their own: this one must not count in their memory.
    session.module = session.module.to("meta")
    progress("loader alone", 0, 1)
    loader_rate = _loader_rate(session)
    progress("loader alone", 1, 1)
    measured = []
    for number in kept or (None,):
        what = "steps" if number is None else f"{number} objects an image"
        measurement = _Measurement(number, bootstrapping_ratio, steps, warmup, partial(progress, what))
        measured.append(measurement.take(session))
    return Profile(
        about=about,
        batch_size=session.config.optim.batch_size,
        flops=flops,
        ceiling=ceiling,
        loader_images_per_second=loader_rate,
        steps=measured,
    )


def _steady(config: PretrainConfig) -> PretrainConfig:
    """The configuration of one device in the midst of the run."""
    runtime, optim = config.runtime, config.optim
    if not str(runtime.devices).isdecimal() or int(runtime.devices) < 1:
        raise ConfigError(
            f"runtime.devices {runtime.devices} does not say how many devices share the batch: give their number, such "
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


def _device(session: Session) -> torch.device:
    with quiet_lightning():
        return session.trainer(None, [], 1).strategy.root_device


def _loader_rate(session: Session) -> float:
    """Images a second of the loader alone, after its workers have begun."""
    with quiet_lightning():
        trainer = session.trainer(None, [], 1)
    with closing(session.loader(trainer)) as loader:
        batches = iter(Forever(loader))
        next(batches)
        begun, images = time.perf_counter(), 0
        while time.perf_counter() - begun < _LOADER_SECONDS:
            images += len(next(batches))
        return images / (time.perf_counter() - begun)


class _Measurement(Callback):
    """Takes the measures of a run of `warmup + steps` steps."""

    def __init__(
        self, objects: int | None, ratio: float, steps: int, warmup: int, progress: Callable[[int, int], None]
    ) -> None:
        self.objects = objects
        self.ratio = ratio
        self.steps = steps
        self.warmup = warmup
        self.progress = progress
        self.result: StepProfile | None = None
        self._saved = _SavedTensors()

    def take(self, session: Session) -> StepProfile:
        """Run the steps of a session's training, from the start."""
        module = session.make_module()
        with quiet_lightning():
            trainer = session.trainer(None, [self], self.warmup + self.steps)
            with interruptible(trainer), closing(session.loader(trainer)) as loader:
                trainer.fit(module, Forever(loader))
        del trainer, module  # they hold each other, and a bank that must be gone before the next one comes
        gc.collect()
        give_freed_memory_back()
        assert self.result is not None
        return self.result

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        objective = _cribo(pl_module)
        if self.objects is not None:
            objective.label_tokens = _FixedObjects(objective.label_tokens, self.objects)
        objective.match = _FixedRatio(objective.match, self.ratio)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        # The second step has what the later ones have, and is not timed. A compiled network keeps its own counsel.
        config = _as_pretraining(pl_module).config
        # Nor does PyTorch show what selective checkpointing keeps.
        if (
            trainer.global_step == 1
            and not config.runtime.compile_mode
            and config.backbone.checkpointing != "selective"
        ):
            self._saved.begin()

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        self._saved.end()  # of several micro-batches the first: what it kept is free before the next one

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._saved.end()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        module, objective = _as_pretraining(pl_module), _cribo(pl_module)
        done, total = trainer.global_step, self.warmup + self.steps
        if done == 1 and objective.bank is not None:
            found = objective.last_result.objects if objective.last_result is not None else None
            assert found is not None
            fill_bank(objective.bank, found.teacher, per_image=max(1, round(found.rows.shape[0] / len(found.counts))))
        if done == self.warmup:
            module.read_metrics()
            reset_peak(module.device)
            module.laps.start(module.device)
        if done == total:
            self.result = self._conclude(module, batch)
        self.progress(done, total)

    def _conclude(self, module: PretrainingModule, batch: Batch) -> StepProfile:
        steps = module.laps.read()
        peak = peak_bytes(module.device)
        metrics = module.read_metrics()
        names = [name for name in PARTS if any(name in step for step in steps)]
        return StepProfile(
            fixed_objects=self.objects,
            objects_per_image=metrics.get("objects_per_image", 0.0),
            bootstrapping_ratio=metrics.get("bootstrapping_ratio", 0.0),
            step=Spread.of([sum(step.values()) for step in steps]),
            parts={name: Spread.of([step.get(name, 0.0) for step in steps]) for name in names},
            object_flops=_object_flops(_cribo(module), len(batch) * metrics.get("objects_per_image", 0.0), metrics),
            memory=self._memory(module, batch),
            peak=peak,
        )

    def _memory(self, module: PretrainingModule, batch: Batch) -> dict[str, int]:
        objective = _cribo(module)
        student, teacher = list(objective.student.parameters()), list(objective.teacher.parameters())
        optimizer: Any = module.optimizers()
        state = [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, Tensor)]
        held = {
            "student's weights": held_bytes(student),
            "teacher's weights": held_bytes(teacher),
            "gradients": held_bytes(parameter.grad for parameter in student),
            "optimiser's state": held_bytes(state),
            "banks": objective.bank.nbytes if objective.bank is not None else 0,
            "batch": held_bytes(value for value in batch.samples.values() if isinstance(value, Tensor)),
        }
        known = {tensor.untyped_storage().data_ptr() for tensor in (*student, *teacher)}
        activations = self._saved.bytes_without(known)
        return held | ({"kept for backward": activations} if activations else {})


class _FixedObjects:
    """Clusters as ever, for their cost, and then gives every image the same number of objects: stripes of patches."""

    def __init__(self, clustering: Callable[[Tensor, Batch], Tensor], objects: int) -> None:
        self.clustering = clustering
        self.objects = objects

    def __call__(self, tokens: Float[Tensor, "b 2 n d"], batch: Batch) -> Int[Tensor, "b 2 n"]:
        labels = self.clustering(tokens, batch)
        stripes = torch.arange(labels.shape[2], device=labels.device) * self.objects // labels.shape[2]
        return stripes.expand_as(labels).contiguous()


class _FixedRatio:
    """Matches as ever, for the cost, and then calls a fixed share of the matches valid."""

    def __init__(self, match: Callable[..., Matches], ratio: float) -> None:
        self.match = match
        self.ratio = ratio

    def __call__(self, *args: Any, **kwargs: Any) -> Matches:
        nearest = self.match(*args, **kwargs).nearest
        places = torch.arange(nearest.shape[1], device=nearest.device)
        chosen = ((places + 1) * self.ratio).floor() > (places * self.ratio).floor()
        return Matches(nearest, (nearest != NO_MATCH) & chosen)


class _SavedTensors:
    """Counts what autograd keeps for the backward pass, between `begin` and `end`."""

    def __init__(self) -> None:
        self._storages: dict[int, int] = {}
        self._stack = ExitStack()

    def begin(self) -> None:
        self._stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor))

    def end(self) -> None:
        self._stack.close()

    def bytes_without(self, known: set[int]) -> int:
        """Bytes of all that was kept, apart from storages at the addresses given."""
        return sum(size for address, size in self._storages.items() if address not in known)

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self._storages[storage.data_ptr()] = storage.nbytes()
        return tensor


@torch.no_grad()
def fill_bank(bank: MemoryBank, objects: Float[Tensor, "2 r d"], *, per_image: int) -> None:
    """Fill a bank with made-up objects near some real ones, so that it is searched as in the midst of a run.

    Each row is a real object moved by Gaussian noise of half the objects' own spread.
    """
    rows = objects.shape[1]
    if rows == 0:
        return
    generator = torch.Generator(objects.device).manual_seed(0)
    spread = _BANK_NOISE * objects.float().std(dim=1, keepdim=True, correction=0)
    missing = bank.num_images - bank.images_held
    while missing > 0:
        images = min(missing, max(1, _BANK_CHUNK // per_image))
        choice = torch.randint(rows, (images * per_image,), generator=generator, device=objects.device)
        noise = torch.randn(2, len(choice), objects.shape[2], generator=generator, device=objects.device)
        made_up = torch.full((len(choice),), -1, device=objects.device)  # the id of no image
        bank.push(objects[:, choice].float() + spread * noise, made_up, [per_image] * images)
        missing -= images


def _object_flops(objective: CrIBo, rows: float, metrics: dict[str, float]) -> float:
    """Matrix products of a step for R = `rows` objects: search of the banks, the head, logits and their gradients.

    With L_cv^o and L_ci^o on; the cycle's search inside a group and Sinkhorn centring are left out.
    """
    head, dim = objective.options.head, objective.student.backbone.embed_dim
    widths = [dim, *[head.hidden_dim] * (head.layers - 1), head.bottleneck_dim]
    mlp = sum(a * b for a, b in itertools.pairwise(widths))
    logits = head.prototypes * head.bottleneck_dim
    # Rows of both views; a student's row goes forward and, twice the work, backward.
    student, teacher = 2 * rows, 2 * rows
    neighbours = metrics.get("bootstrapping_ratio", 0.0) * 2 * rows
    searched = rows * 2 * len(objective.bank) * dim if objective.bank is not None else 0.0
    return 2 * (searched + (3 * student + teacher + neighbours) * (mlp + logits))


def _about(session: Session, device: torch.device) -> dict[str, Any]:
    config = session.config
    return {
        "backbone": config.backbone.name,
        "image size": config.views.size,
        "batch size": config.optim.batch_size,
        "group size": config.objects.group_size,
        "K": config.objects.num_objects,
        "S": _cribo(session.module).bank_images if config.losses.cross_image else 0,
        "prototypes": config.head.prototypes,
        "precision": config.runtime.precision,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "threads": torch.get_num_threads(),
        "workers": session.workers,
        "torch": torch.__version__,
    }


def _cribo(module: L.LightningModule) -> CrIBo:
    objective = _as_pretraining(module).objective
    assert isinstance(objective, CrIBo)
    return objective


def _as_pretraining(module: L.LightningModule) -> PretrainingModule:
    assert isinstance(module, PretrainingModule)
    return module
