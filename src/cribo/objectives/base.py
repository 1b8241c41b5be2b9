"""The interface between an objective and the trainer; docs/extending.md shows how to write one."""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from jaxtyping import Float
from jsonargparse import ArgumentParser
from lightning.pytorch.callbacks import Callback
from timm.models import Beit, ConvNeXt, EfficientNet, Eva, ResNet, VisionTransformer
from torch import Tensor, nn

from cribo.base.bounds import find_bounds
from cribo.base.console import Progress
from cribo.base.errors import ConfigError, InputError
from cribo.base.trust import import_by_path
from cribo.data.config import DEFAULT_READING, Reading
from cribo.data.randomness import keyed_generator
from cribo.data.samples import Batch, SampleDataset, SampleTransform
from cribo.data.sources.images import ImageSource
from cribo.models import Backbone, build_backbone
from cribo.models.backbone import RGB
from cribo.models.channels import first_layer
from cribo.models.config import CompileMode, Resizing
from cribo.models.lora import add_adapters, has_adapters, merged_parameters
from cribo.objectives.config import BackboneConfig, ObjectiveOptions

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BUILT_IN = {
    "cribo": "cribo.objectives.cribo.CrIBo",
    "croc": "cribo.objectives.rivals.croc.CrOC",
    "slotcon": "cribo.objectives.rivals.slotcon.SlotCon",
    "orl": "cribo.objectives.rivals.orl.ORL",
    "byol": "cribo.objectives.rivals.byol.BYOL",
    "dino": "cribo.objectives.rivals.dino.DINO",
    "ibot": "cribo.objectives.rivals.ibot.IBOT",
    "mae": "cribo.objectives.rivals.mae.MAE",
    "loca": "cribo.objectives.rivals.loca.LOCA",
    "contextual": "cribo.objectives.rivals.contextual.Contextual",
    "neco": "cribo.objectives.rivals.neco.NeCo",
    "paka": "cribo.objectives.rivals.paka.PaKA",
    "timet": "cribo.objectives.rivals.timet.TimeT",
    "alignment": "cribo.objectives.alignment.Alignment",
    "distill": "cribo.objectives.distill.Distill",
}
"""Built-in objectives, by name."""

CONTROLS = ("cribo.objectives.controls.SupervisedCrIBo", "cribo.objectives.controls.RandomPairsCrIBo")
"""Objectives of controls in studies, by import path."""


@dataclass(frozen=True)
class Setting:
    """Run for which an objective is created.

    Attributes:
        options: the sections of the configuration that objectives read.
        num_images: number of images in the collection.
        steps_per_epoch: number of optimiser steps per epoch.
        reading: how the images are read, which decides the number of their channels.
    """

    options: ObjectiveOptions
    num_images: int
    steps_per_epoch: int
    reading: Reading = DEFAULT_READING

    def build_backbone(self) -> Backbone:
        """Build the network of the section `backbone`; random weights depend only on the seed.

        For images of other than three channels, the first layer of pretrained weights is inflated and always trained.
        """
        options = self.options
        backbone = build_backbone(
            options.backbone.name,
            args=_args_of(options.backbone, self.reading.in_chans),
            pretrained=options.backbone.pretrained,
            image_size=options.views.size,
            drop_path=options.backbone.drop_path,
            seed=keyed_generator(options.seed, 0).initial_seed() % 2**31,
        )
        backbone.pixels = self.reading.trained_with
        backbone.set_checkpointing(options.backbone.checkpointing)
        if options.backbone.positions is not None:
            _set_positions(backbone, options.backbone.positions)
        if options.backbone.train_blocks is not None:
            _freeze(backbone, options.backbone.train_blocks)
        if options.backbone.lora is not None:
            try:
                add_adapters(
                    backbone,
                    options.backbone.lora,
                    first_block=options.backbone.frozen_blocks(backbone.depth),
                    seed=keyed_generator(options.seed, 2).initial_seed(),
                )
            except ValueError as error:
                raise ConfigError(f"backbone.lora: {error}") from error
        if backbone.in_chans != RGB and (options.backbone.train_blocks or options.backbone.lora):
            if options.backbone.cache_trunk is not None:
                raise ConfigError(
                    f"backbone.cache_trunk needs a frozen first layer, which is trained for images of "
                    f"{backbone.in_chans} channels: remove it"
                )
            first_layer(backbone).requires_grad_(True)
        return backbone


def _args_of(config: BackboneConfig, in_chans: int) -> dict[str, Any]:
    """Return the arguments of the network for images of C channels."""
    own = config.args.get("in_chans", in_chans)
    if own != in_chans:
        raise ConfigError(
            f"backbone.args has in_chans {own}, and the images are read with {in_chans} channels: choose {own} of them "
            "with data.channels, or remove in_chans"
        )
    return config.args if in_chans == RGB else {**config.args, "in_chans": in_chans}


def _set_positions(backbone: Backbone, how: Resizing) -> None:
    """Set the resizing of the position embedding, which the exported network keeps."""
    if not isinstance(backbone.model, VisionTransformer) or backbone.model.pos_embed is None:
        raise ConfigError(
            f"backbone.positions is for timm's vision transformers with a position embedding, not {backbone.name}: "
            "remove it"
        )
    backbone.set_numerics(replace(backbone.numerics, positions=how))


def _freeze(backbone: Backbone, train_blocks: int) -> None:
    """Freeze all but the last `train_blocks` blocks (stages of a convolutional network) and the layers after them."""
    blocks = _blocks(backbone.model)
    if not blocks:
        raise ConfigError(
            f"backbone.train_blocks supports timm's vision transformers, ResNet, ConvNeXt and EfficientNet, not "
            f"{backbone.name}: remove it"
        )
    if not 1 <= train_blocks <= len(blocks):
        raise ConfigError(
            f"backbone.train_blocks must be 1 to {len(blocks)}, the blocks of {backbone.name}, got {train_blocks}"
        )
    first_trained = next(blocks[-train_blocks].parameters())
    for parameter in backbone.model.parameters():  # in the order of the layers
        if parameter is first_trained:
            break
        parameter.requires_grad_(False)


def _blocks(model: Any) -> list[nn.Module]:
    """Return the blocks of a vision transformer or the stages of a convolutional network; [] for other networks."""
    blocks: list[Any]
    if isinstance(model, VisionTransformer | Eva | Beit | EfficientNet):
        blocks = [*model.blocks]
    elif isinstance(model, ConvNeXt):
        blocks = [*model.stages]
    elif isinstance(model, ResNet):
        blocks = [model.layer1, model.layer2, model.layer3, model.layer4]
    else:
        blocks = []
    return [block for block in blocks if any(True for _ in block.parameters())]


def _gather_single_rank(tensor: Tensor) -> Tensor:
    return tensor[None]


@dataclass(frozen=True)
class Step:
    """One optimiser step.

    Attributes:
        number: number of the step, from 0.
        steps_per_epoch: number of steps per epoch.
        total_steps: number of steps of the run.
        gather: gathers a tensor of the same shape on every rank, as (ranks, ...); must be called on all ranks.
    """

    number: int
    steps_per_epoch: int
    total_steps: int
    gather: Callable[[Tensor], Tensor] = _gather_single_rank

    @property
    def epoch(self) -> int:
        """Number of the epoch, from 0."""
        return self.number // self.steps_per_epoch

    def cosine(self, start: float, end: float) -> float:
        """Return the value of a cosine schedule from `start` to `end` over the whole run."""
        return end + (start - end) * (1 + math.cos(math.pi * self.number / max(self.total_steps, 1))) / 2

    def linear(self, start: float, end: float, epochs: int) -> float:
        """Return the value of a linear schedule, constant within an epoch.

        It is `start` in epoch 0, and `end` from epoch `epochs` - 1 on; `start` in epoch 0 if `epochs` is 1.
        """
        return end if self.epoch >= epochs else start + (end - start) * self.epoch / max(epochs - 1, 1)


@dataclass
class Output:
    """Losses and metrics of a batch.

    Attributes:
        losses: scalars by name, means over the batch. The total is their sum weighted by `Objective.weights`.
        metrics: other numbers to record, by name: a scalar, which is averaged over steps and ranks, or a pair
            (numerator, denominator); the ratio of their sums is recorded.
    """

    losses: dict[str, Float[Tensor, ""]]
    metrics: dict[str, Tensor | tuple[Tensor | float, Tensor | float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Columns:
    """Display of an objective's losses and metrics.

    Attributes:
        labels: labels of losses and metrics in plots, by name; the name by default.
        progress: format strings of the metrics shown in the progress line after the losses, such as
            {"ratio": "{:.0%}"}.
    """

    labels: Mapping[str, str] = field(default_factory=dict)
    progress: Mapping[str, str] = field(default_factory=dict)


class Stages(Protocol):
    """Work of a run before its training, for objectives of several stages (`Objective.prepare`).

    Each stage writes its files to its own sub-folder of the run folder, and resumes from them.

    Attributes:
        seconds: duration of each completed stage by name, for the summary of the run.
    """

    seconds: dict[str, float]

    @property
    def folder(self) -> Path:
        """The run folder."""
        ...

    @property
    def source(self) -> ImageSource:
        """The images."""
        ...

    @property
    def workers(self) -> int:
        """Number of worker processes of a loader."""
        ...

    @property
    def rank(self) -> int:
        """Rank of this process."""
        ...

    @property
    def world_size(self) -> int:
        """Number of processes that share the stage's work."""
        ...

    def train(self, name: str, objective: str, args: Mapping[str, Any], *, epochs: int | None = None) -> "Objective":
        """Train another objective with the run's configuration, or resume its training, in a sub-folder.

        Must be called on all ranks. The stage computes no score. If it is finished, its weights are loaded.

        Args:
            name: name of the stage and of the sub-folder.
            objective: name of the objective.
            args: arguments of the objective.
            epochs: number of epochs, with which the epochs of schedules are scaled; those of the run by default.

        Returns:
            The trained objective, on the device of this rank.

        Raises:
            FolderError: the sub-folder contains a training with another configuration, or no weights.
        """
        ...

    def progress(self) -> AbstractContextManager[Progress]:
        """Show progress inside a `with` block, which must not train."""
        ...

    def on_rank_0(self, function: Callable[[], object]) -> None:
        """Run a function on rank 0, and wait for it on all ranks; its error is raised on all of them."""
        ...

    def wait(self) -> None:
        """Wait until all ranks have called this method, for any time."""
        ...


class Objective(nn.Module):
    """Base class of training objectives.

    A subclass takes a `Setting` and its own arguments, and defines `samples`, `forward` and `exported`; the other
    methods have defaults. State to be saved belongs in parameters, buffers, or `get_extra_state`.

    Before the training, the trainer calls `prepare`, then `samples`. In each step it calls `forward` for each
    micro-batch, computes the gradients of the weighted losses with respect to the parameters of `trainable`, updates
    them, and calls `after_step`.

    Attributes:
        columns: display of losses and metrics.
        weights: weight of each loss by name; 1 by default.
        images_per_group: micro-batches contain a multiple of this number of images, so that statistics of a group, such
            as a centre or the range of a cost, do not depend on micro-batches and devices.
        whole_batch: whether losses depend on all images of a device's batch together, such as negatives from the whole
            batch: micro-batches are then rejected.
        lr_factors: learning-rate factors of parameters by the prefix of their names in `trainable`; the default of
            `optim.lr_factors`.
        clip_frames: number of frames that a sample reads of a clip; the images are then the frames of videos, and the
            items of an epoch are clips. 0 if samples are of images.
        uses_all_parameters: whether every parameter gets a gradient in each step; DDP then does not search for unused
            ones.
    """

    columns = Columns()
    weights: Mapping[str, float] = {}
    images_per_group = 1
    whole_batch = False
    lr_factors: Mapping[str, float] = {}
    clip_frames = 0
    uses_all_parameters = False

    @classmethod
    def check_packages(cls) -> None:
        """Check that the optional packages of the objective are installed; called before anything is opened.

        Raises:
            MissingPackage: a package is not installed.
        """

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.setting = setting

    def samples(self) -> SampleTransform:
        """Return the transform of an image into a sample, which runs in the workers.

        Also called without `prepare`, to time steps for `--minutes`.
        """
        raise NotImplementedError

    def prepare(self, stages: Stages) -> None:
        """Do the work of a run before its training, such as earlier stages; called on all ranks.

        Also called when a run is resumed: completed work must be restored from the run folder.
        """

    def forward(self, batch: Batch, step: Step) -> Output:
        """Compute the losses of a micro-batch. Must not change state that the step's other micro-batches read."""
        raise NotImplementedError

    def exported(self) -> Backbone:
        """Return the backbone that is scored during training and exported."""
        raise NotImplementedError

    def image_groups(self, images: int) -> list[slice]:
        """Return the rows of each group of images in a batch of this many images.

        Raises:
            ValueError: the batch is not a whole number of groups.
        """
        size = self.images_per_group
        if images % size or not images:
            raise InputError(f"a batch must be a whole number of groups of {size} images, got {images}")
        return [slice(start, start + size) for start in range(0, images, size)]

    def trainable(self) -> nn.Module:
        """Return the module to optimise. `optim.layer_decay` applies to parameter names that begin with `backbone.`."""
        return self

    def frozen(self, step: Step) -> Iterable[nn.Parameter]:
        """Return the parameters that this step does not update."""
        return ()

    def after_step(self, step: Step) -> None:
        """Update state without gradients (a teacher, centres, a memory bank); called once per step."""

    def schedules(self, step: Step) -> dict[str, float]:
        """Return the values of the objective's own schedules at a step, for logs and plots."""
        return {}

    def watch(self, step: Step) -> dict[str, float]:
        """Compute further metrics, on all ranks and only in logged steps; may synchronise with the device."""
        return {}

    def advice(self, row: Mapping[str, float]) -> dict[str, str]:
        """Return advice for each problem in a row of metrics, by name; persistent problems are logged as warnings."""
        return {}

    def compile_parts(self, mode: CompileMode) -> None:
        """Compile the parts that benefit from it."""

    def figures(self, rows: Sequence[dict[str, float]], dataset: SampleDataset) -> dict[str, "Figure"]:
        """Return figures for the report of a finished run, by name."""
        return {}

    def callbacks(self, folder: Path, dataset: SampleDataset) -> Iterable[Callback]:
        """Return additional callbacks of the run, which may write to its folder."""
        return ()

    @cached_property
    def options(self) -> ObjectiveOptions:
        """Shorthand for `setting.options`."""
        return self.setting.options


def objective_class(name: str) -> type[Objective]:
    """Import an objective by its name or import path.

    Raises:
        ConfigError: the class does not exist, or is not an Objective.
    """
    kind = import_by_path(BUILT_IN.get(name, name), "objective.name", known=BUILT_IN)
    if not (inspect.isclass(kind) and issubclass(kind, Objective)):
        raise ConfigError(
            f"objective.name {name} is not a subclass of cribo.objectives.Objective: {kind!r}; see docs/extending.md"
        )
    return kind


def make_objective(name: str, args: Mapping[str, Any], setting: Setting) -> Objective:
    """Create an objective from its name or import path.

    Raises:
        ConfigError: the class does not exist, is not an Objective, or does not accept the arguments, or one is out of
            the bounds that the constructor declares.
    """
    kind = objective_class(name)
    parser = ArgumentParser(exit_on_error=False)
    added = parser.add_class_arguments(kind, skip={"setting"}, fail_untyped=False)
    try:
        unknown = sorted(set(args) - set(added))
        if unknown:
            takes = ", ".join(added) or "none"
            raise ConfigError(f"objective.args: {name} has no argument {', '.join(unknown)}; its arguments: {takes}")
        arguments = parser.parse_object(dict(args))
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"objective.args of {name}: {error}") from error
    values = vars(parser.instantiate(arguments))
    for action in parser._actions:
        if bounds := find_bounds(getattr(action, "_typehint", None)):
            bounds.check(**{f"objective.args.{action.dest}": values[action.dest]})
    objective = kind(setting, **values)
    if has_adapters(objective.exported()):
        raise ConfigError(
            f"backbone.lora requires an objective that exports a teacher; {name} exports the trained network: "
            "remove backbone.lora, or export cribo.models.lora.plain_copy of the network"
        )
    return objective


def check_output(output: Output, weights: Mapping[str, float]) -> None:
    """Check that an output can be recorded.

    Raises:
        ConfigError: there is no loss, a name is used twice, or a loss or metric is not a scalar.
    """
    if not output.losses:
        raise ConfigError("the objective's forward returned no loss: add at least one to Output.losses")
    for name in output.losses:
        if f"loss_{name}" in output.metrics or name == "":
            raise ConfigError(f"loss_{name} is the column of both a loss and a metric: rename one of them")
    reserved = {"step", "epoch", "seconds", "images_per_second", "loss", "lr", "weight_decay", "dense_nn"}
    for name in output.metrics:
        if name in reserved:
            raise ConfigError(f"the metric {name} conflicts with one of the trainer's columns: rename it")
    for name, loss in output.losses.items():
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            raise ConfigError(f"the loss {name} must be a scalar tensor, got {_described(loss)}")
    for name, value in output.metrics.items():
        parts = value if isinstance(value, tuple) and len(value) == 2 else (value,)
        if not all(isinstance(part, int | float) or (isinstance(part, Tensor) and part.numel() == 1) for part in parts):
            raise ConfigError(f"the metric {name} must be a number or a pair of numbers, got {_described(value)}")
    unknown = sorted(set(weights) - set(output.losses))
    if unknown:
        raise ConfigError(f"weights contains losses that forward does not return: {', '.join(unknown)}")


def _described(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)[:80]


def detached(value: Tensor | float, like: Tensor) -> Tensor:
    """Detach a number, as a scalar on the device of `like`, without synchronising."""
    if isinstance(value, Tensor):
        return value.detach().reshape(()).to(like.dtype)
    return like.new_full((), float(value))


@torch.no_grad()
def sum_over_ranks(rows: Float[Tensor, "r e"], step: Step) -> tuple[Float[Tensor, " e"], Tensor]:
    """Return the sum of the rows of all ranks, and their number; must be called on all ranks."""
    total = step.gather(torch.cat((rows.sum(dim=0), rows.new_full((1,), len(rows))))).sum(dim=0)
    return total[:-1], total[-1]


@torch.no_grad()
def move_towards(average: nn.Module, module: nn.Module, momentum: float) -> None:
    """Update an exponential moving average: average <- momentum * average + (1 - momentum) * module, LoRA merged."""
    from torch.optim.swa_utils import get_ema_multi_avg_fn

    get_ema_multi_avg_fn(momentum)(list(average.parameters()), merged_parameters(module), 0)
