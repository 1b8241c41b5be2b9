"""Training against `cribo.method.reference`: equal losses and weights, step by step."""

import copy
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch

from cribo.data import apply_photometric
from cribo.data.samples import Batch
from cribo.method.reference import Reference
from cribo.models import normalise
from cribo.objectives.cribo import CrIBo
from cribo.pretraining import PretrainConfig, PretrainingModule
from cribo.pretraining.parameters import parameter_groups

Tiny = Callable[..., PretrainConfig]
Train = Callable[..., Any]

STEPS = 12
CHANGES: dict[str, Any] = {
    "runtime.precision": "64-true",
    "backbone.drop_path": 0.0,
    "objects.group_size": 8,  # the batch
    "objects.bank_images": 20,  # expires images from the third step on
    "objects.num_objects": 8,
    "losses.cross_image_from_epoch": 1,
    "optim.freeze_last_layers_epochs": 0,
    "optim.warmup_epochs": 0,
}


class Record(L.Callback):
    """Records the initial networks, all batches, and the losses of every step."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.losses: list[dict[str, torch.Tensor]] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, PretrainingModule)
        assert isinstance(pl_module.objective, CrIBo)
        self.schedules, self.objective = pl_module.schedules, pl_module.objective
        self.student, self.teacher = copy.deepcopy(self.objective.student), copy.deepcopy(self.objective.teacher)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.batches.append(batch)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any, **__: Any) -> None:
        assert self.objective.last_result is not None
        self.losses.append(self.objective.last_result.losses)


@pytest.mark.parametrize("marginals", ["adaptive", "uniform"])
def test_training_matches_the_reference(tiny: Tiny, train: Train, marginals: str) -> None:
    config, record = tiny({**CHANGES, "objects.marginals": marginals}), Record()
    trained = train(config, callbacks=[record])

    student, backbone = record.student, record.student.backbone
    reference = Reference(
        student,
        record.teacher,
        num_objects=8,
        bank_images=20,
        position_weight=config.objects.position_weight,
        marginals=marginals,
    )
    optimizer = torch.optim.AdamW(parameter_groups(student), lr=0.0)
    assert len(record.losses) == STEPS
    assert record.losses[-1]["cross_image"] > 0
    for step, (batch, found) in enumerate(zip(record.batches, record.losses, strict=True)):
        values = record.schedules.at(step)
        for group in optimizer.param_groups:
            group["lr"], group["weight_decay"] = values["lr"], values["weight_decay"] * group["decay"]
        views = apply_photometric(batch["views"].flatten(0, 1), batch["photometric"].flatten())
        losses = reference.step(
            optimizer,
            values["momentum"],
            views=normalise(views, mean=backbone.mean, std=backbone.std).unflatten(0, (-1, 2)),
            coordinates=batch["coordinates"].double(),
            initial_tokens=batch["initial_tokens"],
            images=batch.images,
            teacher_temperature=values["teacher_temperature"],
            cross_image=step >= record.schedules.steps_per_epoch,
        )
        for name, loss in losses.items():
            torch.testing.assert_close(found[name], loss.detach(), rtol=1e-9, atol=0)
    for network, kind in ((reference.student, "student"), (reference.teacher, "teacher")):
        for name, value in network.state_dict().items():
            torch.testing.assert_close(trained.weights[f"{kind}.{name}"], value, rtol=0, atol=1e-9)
    torch.testing.assert_close(trained.weights["object_centre.value"], reference.object_centre, rtol=1e-9, atol=1e-12)
