"""The training step under Lightning: objective, backward, update, moving average, banks and centres."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor

from cribo.data.pairs import ViewPairs
from cribo.data.randomness import keyed_generator
from cribo.errors import Stopped
from cribo.method import NO_MATCH, Centre, MemoryBank, ShardedMemoryBank
from cribo.method.transfer import OnItsWay, send
from cribo.models import build_backbone, describe
from cribo.pretraining.config import PretrainConfig, resolve_bank_images
from cribo.pretraining.laps import Laps
from cribo.pretraining.network import Network
from cribo.pretraining.objective import LOSSES, Objective, Objects, Result, prototype_entropy
from cribo.pretraining.parameters import clip_each, drop_gradients, parameter_groups
from cribo.pretraining.schedules import Schedules, StepValues

# Rows that the collapse watch looks at: enough for a mean, few against the batch.
_WATCHED_ROWS = 256


class PretrainingModule(L.LightningModule):
    """Student and teacher, banks and centres, and what happens to them in one optimiser step.

    One call of `training_step` is one optimiser step, whatever the number of micro-batches: everything that is
    updated (banks, centres, teacher) is updated once, at its end.

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
        self._sums: Tensor | None = None
        self._first_bad = torch.empty(0)
        self._last: Result | None = None
        self.laps = Laps()

    # ------------------------------------------------------------------------------------------------- set-up

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW over the parameter groups; the schedules set its rates at every step."""
        # The fused kernel refuses the loss scaling of 16-bit floats together with clipping between the two.
        fused = self.device.type in ("cpu", "cuda") and self.config.runtime.precision != "16-mixed"
        return torch.optim.AdamW(parameter_groups(self.student, self.config.optim), lr=0.0, fused=fused)

    def on_fit_start(self) -> None:
        """Allocate the banks on the device, and fill them if a checkpoint was loaded."""
        if self.config.losses.cross_image:
            in_shares = self.config.runtime.bank == "sharded" and self.trainer.world_size > 1
            self.bank = (ShardedMemoryBank if in_shares else MemoryBank)(
                num_images=self.bank_images,
                num_objects=self.config.objects.num_objects,
                dim=self.student.backbone.embed_dim,
                dtype=torch.float16 if self.device.type == "cuda" else self.image_centre.value.dtype,
                device=self.device,
            )
            if self._restored_bank is not None:
                self.bank.load_state_dict(self._restored_bank)
                self._restored_bank = None
        if self._sums is not None:
            self._sums, self._first_bad = self._sums.to(self.device), self._first_bad.to(self.device)
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
        results: list[Result] = []
        objects: _GatheredObjects | None = None
        for part in batch.split(optim.micro_batches):
            result = self.objective(
                part,
                epoch=epoch,
                teacher_temperature=values.teacher_temperature,
                train_backbone=epoch >= optim.freeze_backbone_epochs,
            )
            results.append(result)
            is_last = len(results) == optim.micro_batches
            if is_last and self.bank is not None:
                objects = _GatheredObjects(batch.images, [r.objects for r in results if r.objects], self._gather)
            total = result.losses["image"] + result.losses["cross_view"] + result.losses["cross_image"]
            with nullcontext() if is_last else self._gradients_kept_here():
                self.manual_backward(total / optim.micro_batches)
            self.laps("backbone, backward")
            result.losses = {name: loss.detach() for name, loss in result.losses.items()}
        optimizer.step()
        self.laps("optimiser")
        # Inside a step the centres, the banks and the teacher stay as they were at its start.
        self._update_centres(results)
        self.laps("centres")
        self.teacher.move_towards(self.student, values.momentum)
        self.laps("moving average")
        if self.bank is not None and objects is not None:
            self.bank.push(*objects.take())
        self.laps("bank update")
        self._note(batch, results)
        self.laps("bookkeeping")
        self.laps.end_step()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Clip, then freeze; gradients are unscaled here whatever the precision."""
        optim = self.config.optim
        if optim.clip is not None:
            clip_each(self.student.parameters(), optim.clip)
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
            # Filled on the device: a number that is copied there would wait for all that is under way.
            count = embeddings.new_full((1,), embeddings.shape[0], dtype=torch.float32)
            sums.append(torch.cat((embeddings.sum(dim=0), count)))
        centres = (
            (self.image_centre, self.teacher.image_prototypes),
            (self.object_centre, self.teacher.object_prototypes),
        )
        for (centre, layer), total in zip(centres, self._gather(torch.stack(sums)).sum(dim=0), strict=True):
            centre.update(total[:-1], total[-1], layer.weight)

    # ------------------------------------------------------------------------------------------- several devices

    def _gradients_kept_here(self) -> AbstractContextManager[None]:
        """Gradients are added up over micro-batches first, and over devices once, with the last of them."""
        strategy = self.trainer.strategy
        return strategy.block_backward_sync() if isinstance(strategy, ParallelStrategy) else nullcontext()

    def _gather(self, tensor: Tensor) -> Tensor:
        """The tensors that all devices call this with, in their order, stacked: (devices, ...)."""
        if self.trainer.world_size == 1:
            return tensor[None]
        gathered = self.all_gather(tensor)
        assert isinstance(gathered, Tensor)
        return gathered

    # ------------------------------------------------------------------------------------------------ numbers

    def _note(self, batch: ViewPairs, results: list[Result]) -> None:
        """Add a step to the running sums. They stay on the device until somebody reads them."""
        losses = torch.stack([torch.stack([r.losses[name] for r in results]).mean() for name in LOSSES])
        valid = sum((r.matches.valid.sum() for r in results if r.matches is not None), start=losses.new_zeros(()))
        kept = sum(sum(r.objects.counts) for r in results if r.objects is not None)
        if self._sums is None:
            self._sums = losses.new_zeros(len(LOSSES) + 4)
            self._first_bad = torch.full_like(losses, -1)
        share = 1 / self.trainer.world_size
        extra = torch.stack((valid, *(losses.new_full((), value) for value in (kept, len(batch), share))))
        self._sums += torch.cat((share * losses, extra))
        new = ~losses.isfinite() & (self._first_bad < 0)
        self._first_bad = torch.where(new, float(self.step - 1), self._first_bad)
        self._last = results[-1]

    def _over_devices(self) -> tuple[Tensor, Tensor]:
        """The running sums, added up, and the step at which each loss was first seen not to be finite on any device.

        Devices that decide by them decide together: one that stops alone leaves the others waiting for it.
        """
        assert self._sums is not None
        parts = self._gather(torch.cat((self._sums, self._first_bad)))
        sums, first_bad = parts.split((len(self._sums), len(LOSSES)), dim=1)
        first_bad = first_bad.where(first_bad >= 0, torch.inf).amin(dim=0)
        return sums.sum(dim=0), first_bad.where(first_bad.isfinite(), -1)

    def check_finite(self) -> None:
        """Refuse to go on from a loss that is not finite on any device. Reads the device; to be called on all.

        Raises:
            NonFiniteLoss: naming the loss and the first step at which it was seen.
        """
        if self._sums is not None:
            _refuse(self._over_devices()[1])

    def check_weights(self) -> None:
        """Refuse weights that are not finite: the last step broke them, whatever its losses were.

        Reads the device; to be called on all.

        Raises:
            NonFiniteLoss: naming the step.
        """
        finite = torch.stack([p.detach().isfinite().all() for p in self.student.parameters()]).all()
        if not self._gather(finite.float()).all():
            raise NonFiniteLoss(None, self.step - 1)

    def read_metrics(self) -> dict[str, float]:
        """Means over the steps since the last reading, the schedules' values, and the collapse watch.

        Reads the device: call it now and then, on all devices. The watch sees the last micro-batch of this one.

        Raises:
            NonFiniteLoss: as `check_finite`.
        """
        sums, first_bad = self._over_devices()
        _refuse(first_bad)
        *losses, valid, kept, images, steps = sums.tolist()
        means = {f"loss_{name}": loss / steps for name, loss in zip(LOSSES, losses, strict=True)}
        values = self.schedules.at(self.step - 1)
        metrics = {
            "loss": sum(means.values()),
            **means,
            "bootstrapping_ratio": valid / (2 * kept) if kept else 0.0,
            "objects_per_image": kept / images,
            "lr": values.lr,
            "weight_decay": values.weight_decay,
            "momentum": values.momentum,
            "teacher_temperature": values.teacher_temperature,
            **self._watch(values),
        }
        self._sums = None
        return metrics

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
        sums, first_bad = (None, self._first_bad) if self._sums is None else self._over_devices()
        checkpoint["cribo"] = {
            "bank": self.bank.state_dict() if self.bank is not None else None,
            "sums": sums,
            "first_bad": first_bad,
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
        self._restored_bank = state["bank"]
        self._sums, self._first_bad = state["sums"], state["first_bad"]
        if self._sums is not None and self.trainer.global_rank > 0:
            self._sums = torch.zeros_like(self._sums)  # they are those of all devices, and will be added up again


class _GatheredObjects:
    """The objects that all devices found in a step, in the order of the whole batch: every bank is given the same.

    How many there are is sent first, before the backward pass: nobody waits for it when the objects follow.

    Args:
        images: (B,) of this device's batch.
        found: its objects, of each micro-batch.
        gather: (...) on every device -> (devices, ...).
    """

    def __init__(self, images: Tensor, found: list[Objects], gather: Callable[[Tensor], Tensor]) -> None:
        self._objects = torch.cat([part.teacher for part in found], dim=1)
        self._gather = gather
        counts = send(torch.tensor([count for part in found for count in part.counts]), images.device)
        self._counts_and_images = OnItsWay(gather(torch.stack((counts, images))))

    def take(self) -> tuple[Tensor, Tensor, list[int]]:
        """(2, R, D) objects, (R,) the image of each, and how many each image of the whole batch has."""
        counts, images = self._counts_and_images.read().unbind(dim=1)
        rows = counts.sum(dim=1).tolist()
        missing = max(rows) - self._objects.shape[1]
        parts = self._gather(F.pad(self._objects, (0, 0, 0, missing))) if max(rows) else self._objects[None]
        objects = torch.cat([part[:, :length] for part, length in zip(parts, rows, strict=False)], dim=1)
        image_of_each = images.flatten().repeat_interleave(counts.flatten())
        return objects, send(image_of_each, objects.device), counts.flatten().tolist()


def _refuse(first_bad: Tensor) -> None:
    for name, step in zip(LOSSES, first_bad.tolist(), strict=True):
        if step >= 0:
            raise NonFiniteLoss(name, int(step))


class NonFiniteLoss(Stopped):
    """A loss became infinite or not a number, or the weights did (`loss` is None)."""

    everywhere = True

    def __init__(self, loss: str | None, step: int) -> None:
        what = "the student's weights were" if loss is None else f"the loss {loss} was"
        super().__init__(
            f"{what} not finite at step {step}: nothing was saved since. Start a new run with a "
            "lower optim.lr, a longer optim.warmup_epochs or optim.clip 0.3; or, if runtime.precision is 16-mixed, go "
            "on from the last checkpoint with --resume and --runtime.precision bf16-mixed"
        )
        self.loss = loss
        self.step = step
