"""The training step under Lightning: objective, backward, update, moving average, banks and centres."""

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor

from cribo.data.pairs import ViewPairs
from cribo.data.randomness import keyed_generator
from cribo.errors import Stopped
from cribo.method import NO_MATCH, Centre, MemoryBank
from cribo.models import build_backbone, describe
from cribo.pretraining.config import PretrainConfig, resolve_bank_images
from cribo.pretraining.laps import Laps
from cribo.pretraining.network import Network
from cribo.pretraining.objective import LOSSES, Objective, Objects, Result, prototype_entropy
from cribo.pretraining.parameters import RunningStatistics, clip_each, drop_gradients, parameter_groups
from cribo.pretraining.schedules import Schedules, StepValues
from cribo.pretraining.sharding import ShardedStrategy
from cribo.pretraining.shares import held, norms
from cribo.pretraining.sums import RunningSums
from cribo.training.module import ResumableModule

# Rows that the collapse watch looks at: enough for a mean, few against the batch.
_WATCHED_ROWS = 256


class PretrainingModule(ResumableModule):
    """Student and teacher, banks and centres, and what happens to them in one optimiser step.

    One call of `training_step` is one optimiser step, whatever the number of micro-batches: everything that is
    updated (banks, centres, teacher) is updated once, at its end. Where gradients are not finite, the optimiser leaves
    the update out, on the device and without anybody's waiting for it; centres, statistics and banks take up what is
    finite alone. So the state stays sound, and `sums` tells later what happened.

    Args:
        config: of the run.
        num_images: of the collection.
        steps_per_epoch: optimiser steps of one pass.
    """

    def __init__(self, config: PretrainConfig, *, num_images: int, steps_per_epoch: int) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.config = config
        self.schedules = Schedules(config, steps_per_epoch)
        backbone = build_backbone(
            config.backbone.name,
            args=config.backbone.args,
            pretrained=config.backbone.pretrained,
            image_size=config.views.size,
            drop_path=config.backbone.drop_path,
            seed=keyed_generator(config.seed, 0).initial_seed() % 2**31,
        )
        backbone.set_checkpointing(config.backbone.checkpointing)
        self.student = Network(backbone, config.head, seed=config.seed)
        self.teacher = self.student.make_teacher()
        self.image_centre = Centre(config.head.prototypes, momentum=config.losses.centre_momentum)
        self.object_centre = Centre(config.head.prototypes, momentum=config.losses.centre_momentum)
        self.bank_images = resolve_bank_images(config, num_images)
        self.bank: MemoryBank | None = None
        self._restored_bank: dict[str, Any] | None = None
        self._objective: Objective | None = None
        self.num_images = num_images
        self._sums: RunningSums | None = None
        self._restored_sums: dict[str, Any] | None = None
        self._left_out = torch.zeros((), dtype=torch.bool)  # whether the last update was
        self._last: Result | None = None
        self.laps = Laps()

    # ------------------------------------------------------------------------------------------------- set-up

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW over the parameter groups; the schedules set its rates at every step."""
        # The fused kernel alone can leave an update out by a flag on the device.
        return torch.optim.AdamW(parameter_groups(self.student, self.config.optim), lr=0.0, fused=True)

    def configure_model(self) -> None:
        """Leave this device its share of both networks, where the strategy shares them."""
        strategy = self.trainer.strategy
        if isinstance(strategy, ShardedStrategy):
            strategy.share(self, self.student, self.teacher)

    def whole_teacher(self) -> Network:
        """The teacher, or a copy where devices share it, with all its weights on this device. To be called on all."""
        strategy = self.trainer.strategy
        return strategy.whole_teacher(self.teacher) if isinstance(strategy, ShardedStrategy) else self.teacher

    def on_fit_start(self) -> None:
        """Allocate the banks on the device, and fill them if a checkpoint was loaded."""
        if self.config.losses.cross_image:
            self.bank = MemoryBank(
                num_images=self.bank_images,
                num_objects=self.config.objects.num_objects,
                dim=self.student.backbone.embed_dim,
                dtype=torch.float16 if self.device.type == "cuda" else self.image_centre.value.dtype,
                device=self.device,
            )
            if self._restored_bank is not None:
                self.bank.load_state_dict(self._restored_bank)
                self._restored_bank = None
        share = 1 / self.trainer.world_size
        self._sums = RunningSums(self.image_centre.value, share=share, gather=self._gather)
        if self._restored_sums is not None:
            self._sums.load_state_dict(self._restored_sums, is_first=self.trainer.is_global_zero)
            self._restored_sums = None
        self._statistics = RunningStatistics((self.student, self.teacher))
        mode = self.config.runtime.compile_mode
        if mode is not None:
            self.student.backbone.compile(mode)
            self.teacher.backbone.compile(mode)
        self._objective = Objective(
            self.config,
            student=self.student,
            teacher=self.teacher,
            image_centre=self.image_centre,
            object_centre=self.object_centre,
            bank=self.bank,
            laps=self.laps,
        )

    # --------------------------------------------------------------------------------------------------- step

    @property
    def step(self) -> int:
        """Optimiser steps done."""
        return self.global_step

    @property
    def objective(self) -> Objective:
        """What computes the losses; there is one while training."""
        assert self._objective is not None
        return self._objective

    @property
    def last_result(self) -> Result:
        """What the last batch gave."""
        assert self._last is not None
        return self._last

    @property
    def epoch(self) -> int:
        """The epoch, from 0, that the next step belongs to."""
        return self.step // self.schedules.steps_per_epoch

    def training_step(self, batch: ViewPairs, batch_idx: int) -> None:
        """One optimiser step."""
        optim = self.config.optim
        self.laps("waiting for data")
        step, epoch = self.step, self.epoch
        values = self.schedules.at(step)
        optimizer: Any = self.optimizers()
        for group in optimizer.param_groups:
            group["lr"] = values.lr * group["lr_scale"]
            group["weight_decay"] = values.weight_decay * group["decay"]

        optimizer.zero_grad()
        self._statistics.keep()
        results: list[Result] = []
        for part in batch.split(optim.micro_batches):
            result = self.objective(
                part,
                epoch=epoch,
                teacher_temperature=values.teacher_temperature,
                train_backbone=epoch >= optim.freeze_backbone_epochs,
            )
            results.append(result)
            is_last = len(results) == optim.micro_batches
            total = result.losses["image"] + result.losses["cross_view"] + result.losses["cross_image"]
            with nullcontext() if is_last else self._gradients_kept_here():
                self.manual_backward(total / optim.micro_batches)
            self.laps("backbone, backward")
            result.losses = {name: loss.detach() for name, loss in result.losses.items()}
        optimizer.step()
        self._statistics.put_back(self._left_out)
        self.laps("optimiser")
        # Inside a step the centres, the banks and the teacher stay as they were at its start.
        self._update_centres(results)
        self.laps("centres")
        self.teacher.move_towards(self.student, values.momentum)
        self.laps("moving average")
        if self.bank is not None:
            self.bank.push(*self._gather_objects(batch.images, [r.objects for r in results if r.objects]))
        self.laps("bank update")
        self._note(batch, results)
        self.laps("bookkeeping")
        self.laps.end_step()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Look whether all is finite, clip, then freeze; gradients are unscaled here whatever the precision."""
        optim = self.config.optim
        gradients = [p.grad for p in self.student.parameters() if p.grad is not None]
        lengths = norms(gradients)
        self._left_out = ~lengths.isfinite().all()
        fused: Any = optimizer  # whose documentation does not name it: torch.amp.GradScaler sets it in the same way
        fused.found_inf = self._left_out.float()
        if optim.clip is not None:
            clip_each(gradients, lengths, optim.clip)
        if self.epoch < optim.freeze_last_layers_epochs:
            drop_gradients(self.student.last_layers)
        if self.epoch < optim.freeze_backbone_epochs:
            drop_gradients(self.student.backbone.parameters())

    def _update_centres(self, results: list[Result]) -> None:
        if self.config.losses.centring != "mean":
            return
        sums = []
        for name in ("teacher_images", "teacher_objects"):
            embeddings = torch.cat([getattr(result, name) for result in results])
            finite = embeddings.isfinite().all(dim=1, keepdim=True)
            sums.append(torch.cat((embeddings.where(finite, 0).sum(dim=0), finite.sum(dim=0))))
        centres = (
            (self.image_centre, self.teacher.image_prototypes),
            (self.object_centre, self.teacher.object_prototypes),
        )
        for (centre, layer), total in zip(centres, self._gather(torch.stack(sums)).sum(dim=0), strict=True):
            centre.update(total[:-1], total[-1], layer.weight)

    # ------------------------------------------------------------------------------------------- several devices

    def _gradients_kept_here(self) -> AbstractContextManager[None]:
        """Where devices hold whole gradients, these are added up over micro-batches first, and over devices once."""
        strategy = self.trainer.strategy
        return strategy.block_backward_sync() if isinstance(strategy, ParallelStrategy) else nullcontext()

    def _gather(self, tensor: Tensor) -> Tensor:
        """The tensors that all devices call this with, in their order, stacked: (devices, ...)."""
        if self.trainer.world_size == 1:
            return tensor[None]
        gathered = self.all_gather(tensor)
        assert isinstance(gathered, Tensor)
        return gathered

    def _gather_objects(
        self, images: Int[Tensor, " b"], found: list[Objects]
    ) -> tuple[Float[Tensor, "2 r d"], Int[Tensor, " r"], list[int]]:
        """The objects of all ranks in the order of the whole batch, so that every bank is given the same.

        Returns:
            the objects, the image of each, and how many each image of the whole batch has.
        """
        objects = torch.cat([part.teacher for part in found], dim=1)
        counts = torch.tensor([count for part in found for count in part.counts], device=images.device)
        counts, images = self._gather(torch.stack((counts, images))).cpu().unbind(dim=1)  # (ranks, B) each
        rows: list[int] = counts.sum(dim=1).tolist()
        padded = F.pad(objects, (0, 0, 0, max(rows) - objects.shape[1]))
        parts = self._gather(padded) if max(rows) else padded[None]
        objects = torch.cat([part[:, :length] for part, length in zip(parts, rows, strict=False)], dim=1)
        counts = counts.flatten()
        return objects, images.flatten().repeat_interleave(counts).to(objects.device), counts.tolist()

    # ------------------------------------------------------------------------------------------------ numbers

    @property
    def sums(self) -> RunningSums:
        """What the steps gave since it was last read; there is something while training."""
        assert self._sums is not None
        return self._sums

    def _note(self, batch: ViewPairs, results: list[Result]) -> None:
        """Add a step to the running sums. They stay on the device until somebody reads them."""
        losses = torch.stack([torch.stack([r.losses[name] for r in results]).mean() for name in LOSSES])
        valid = sum((r.matches.valid.sum() for r in results if r.matches is not None), start=losses.new_zeros(()))
        kept = sum(sum(r.objects.counts) for r in results if r.objects is not None)
        # Losses that are scaled too much for 16 bits are how their scale is found.
        expected = self.config.runtime.precision == "16-mixed"
        self.sums.add(self.step - 1, losses, (valid, kept, len(batch)), left_out=self._left_out, expected=expected)
        self._last = results[-1]

    def check_weights(self) -> None:
        """Refuse weights that are not finite: the last step broke them, whatever its losses were.

        Reads the device; to be called on all.

        Raises:
            NonFiniteLoss: naming the step.
        """
        finite = torch.stack([held(p.detach()).isfinite().all() for p in self.student.parameters()]).all()
        if not self._gather(finite.float()).all():
            raise NonFiniteLoss("the student's weights", self.step - 1)

    def read_metrics(self) -> dict[str, float]:
        """Means over the steps since the last reading, the schedules' values, and the collapse watch.

        Reads the device: call it now and then, on all devices. The watch sees the last micro-batch of this one.
        Steps that were left out are counted and in no mean; if all were, there is none.
        """
        means, counts = self.sums.read()
        values = self.schedules.at(self.step - 1)
        metrics = {f"loss_{name}": loss for name, loss in means.items()}
        if means:
            metrics["loss"] = sum(means.values())
            first = self.step - round(counts["steps"] + counts["left_out"])
            if (
                self.bank is not None
                and first // self.schedules.steps_per_epoch >= self.config.losses.cross_image_from_epoch
            ):
                # Before that epoch the bank is filled but not searched.
                metrics["bootstrapping_ratio"] = counts["valid"] / (2 * counts["kept"]) if counts["kept"] else 0.0
            metrics["objects_per_image"] = counts["kept"] / counts["images"]
        return {
            **metrics,
            "steps_left_out": counts["left_out"],
            "lr": values.lr,
            "weight_decay": values.weight_decay,
            "momentum": values.momentum,
            "teacher_temperature": values.teacher_temperature,
            **{name: value for name, value in self._watch(values).items() if math.isfinite(value)},
        }

    @torch.no_grad()
    def _watch(self, values: StepValues) -> dict[str, float]:
        """Signs of collapse, on some rows of the last batch."""
        result = self.last_result
        watched: dict[str, float] = {}
        for name, embeddings, level in self.objective.watched_levels(result, values.teacher_temperature):
            of_mean, mean_of = prototype_entropy(embeddings[:_WATCHED_ROWS], level)
            watched[f"{name}_entropy_of_mean"] = float(of_mean)
            watched[f"{name}_mean_entropy"] = float(mean_of)
        tokens = F.normalize(result.tokens.flatten(0, 2).float(), dim=-1)
        # 1 where directions are spread evenly, 0 where all tokens are one.
        watched["feature_std"] = float(tokens.std(dim=0).mean() * tokens.shape[1] ** 0.5)
        if result.matches is not None:
            matched = result.matches.nearest[result.matches.nearest != NO_MATCH]
            if matched.numel():
                watched["distinct_neighbours"] = matched.unique().numel() / matched.numel()
        return watched

    # -------------------------------------------------------------------------------------------- checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the bank, which is no registered state, and what the run was."""
        checkpoint["cribo"] = {
            "bank": self.bank.state_dict() if self.bank is not None else None,
            "sums": self.sums.state_dict(),
            "config": asdict(self.config),
            "backbone": describe(self.teacher.backbone),  # for those who evaluate a run before it is finished
            "num_images": self.num_images,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the bank's state until there is a bank, and take up the sums of the row that was begun."""
        state = checkpoint["cribo"]
        if state["num_images"] != self.num_images:
            raise ValueError(
                f"the run was trained on {state['num_images']} images, data.root now has {self.num_images}: its "
                "schedules would change; restore the images, or start a new run"
            )
        self._restored_bank, self._restored_sums = state["bank"], state["sums"]

    def take_back(self, checkpoint: dict[str, Any]) -> None:
        """While training, take up a checkpoint's bank in place of this one, and forget what steps since have given."""
        if self.bank is not None:
            self.bank.load_state_dict(checkpoint["cribo"]["bank"])
        self.sums.forget_means()


def not_finite(what: str, step: int) -> str:
    """That a loss, or the gradients or weights, were so."""
    return f"{what} {'was' if what.startswith('the loss') else 'were'} not finite at step {step}"


class NonFiniteLoss(Stopped):
    """A loss, the gradients or the weights became infinite or not a number.

    Attributes:
        what: of these it was.
        step: at which that was first seen, from 0.
    """

    everywhere = True

    def __init__(self, what: str, step: int, more: str = "") -> None:
        super().__init__(
            f"{not_finite(what, step)}{more}. Checkpoints hold nothing of it: go on from the last one with --resume, "
            "where --on_nonfinite skip leaves a few such steps out, and --runtime.precision bf16-mixed helps if it is "
            "16-mixed; or start a new run with a lower optim.lr, a longer optim.warmup_epochs or optim.clip 0.3"
        )
        self.what = what
        self.step = step
