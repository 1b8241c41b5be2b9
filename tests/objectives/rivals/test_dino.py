"""DINO, against its definition."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from tests.objectives.conftest import batch_of
from tests.objectives.literal import MOMENTUM, assert_steps_are, follow, linear, unequal

from cribo.data.samples import Batch
from cribo.objectives import Setting, Step
from cribo.objectives.crops import augmented_crops
from cribo.objectives.rivals.dino import DINO, dino_loss
from cribo.pretraining import PretrainConfig, pretrain

Tiny = Callable[..., PretrainConfig]
STEP = Step(6, steps_per_epoch=4, total_steps=12)


def make(tiny: Tiny, changes: dict[str, Any] | None = None, **args: Any) -> DINO:
    return DINO(Setting(tiny(changes), 36, 4), **{"local_crops": 3, "local_size": 16, **args})


def test_the_loss_is_the_mean_over_pairs_of_different_crops() -> None:
    generator = torch.Generator().manual_seed(0)
    targets = torch.rand(2, 3, 5, generator=generator).softmax(dim=-1)
    logits = torch.rand(4, 3, 5, generator=generator)
    terms = []
    for teacher in range(2):
        for student in range(4):
            if student != teacher:
                for image in range(3):
                    terms.append(-(targets[teacher, image] * F.log_softmax(logits[student, image], dim=0)).sum())
    assert len(terms) == 3 * 2 * 3
    torch.testing.assert_close(dino_loss(targets, logits), torch.stack(terms).mean())


def test_forward_returns_this_loss_of_teacher_and_student(tiny: Tiny) -> None:
    objective = make(tiny, {"backbone.drop_path": 0.0})
    with torch.no_grad():
        objective.image_centre.value += torch.randn(32, generator=torch.Generator().manual_seed(1))
    batch = batch_of(objective)
    temperature = objective.schedules(STEP)["teacher_temperature"]
    output = objective(batch, STEP)
    crops = augmented_crops(batch, objective.options.views, objective.exported())
    assert [tuple(part.shape) for part in crops] == [(8, 3, 32, 32), (12, 3, 16, 16)]

    def logits(network: Any, views: torch.Tensor) -> torch.Tensor:
        return network.image_prototypes(network.head(network.backbone(views).global_token))

    targets = logits(objective.teacher, crops[0]).unflatten(0, (2, 4))
    targets = ((targets - objective.image_centre.value) / temperature).softmax(dim=-1)
    students = torch.cat([logits(objective.student, part) for part in crops]).unflatten(0, (5, 4))
    torch.testing.assert_close(output.losses["dino"], dino_loss(targets, students / 0.1))


def written_losses(objective: Any, batch: Batch, step: Step) -> dict[str, torch.Tensor]:
    """Compute the cross-entropy of teacher and student for each pair of different crops."""
    crops = [part.double() for part in augmented_crops(batch, objective.options.views, objective.student.backbone)]
    images = len(batch)

    def logits(network: Any, views: torch.Tensor) -> torch.Tensor:
        tokens = network.backbone(views).global_token
        return network.head(tokens) @ network.image_prototypes.weight.T

    with torch.no_grad():
        objective.seen = logits(objective.teacher, crops[0])
        centred = objective.seen - objective.image_centre.value
        targets = (centred / linear(0.04, 0.07, 3, step)).softmax(dim=-1).split(images)
    students = torch.cat([logits(objective.student, part) for part in crops]).split(images)
    terms = [
        -(target * (student / 0.1).log_softmax(dim=-1)).sum(dim=-1).mean()
        for first, target in enumerate(targets)
        for second, student in enumerate(students)
        if first != second
    ]
    return {"dino": torch.stack(terms).mean()}


def written_update(objective: Any, step: Step) -> None:
    centre = objective.image_centre.value
    centre.copy_(0.8 * centre + 0.2 * objective.seen.mean(dim=0))
    follow(objective, step)


def test_two_steps_are_those_written_out(tiny: Tiny) -> None:
    losses = {"losses.centre_momentum": 0.8, "losses.teacher_temperature": (0.04, 0.07)}
    changes = {"backbone.drop_path": 0.0, "optim.momentum": MOMENTUM, "losses.student_temperature": 0.1}
    objective = unequal(make(tiny, {**changes, **losses, "losses.teacher_temperature_epochs": 3}))
    objective.image_centre.value += torch.randn(32, generator=torch.Generator().manual_seed(1))
    batches = [batch_of(objective, 4, first) for first in (0, 4)]
    assert_steps_are(objective, batches, written_losses, written_update)


def test_a_step_updates_centre_and_teacher(tiny: Tiny) -> None:
    objective = make(tiny, {"losses.centre_momentum": 0.8})
    batch = batch_of(objective)
    for part in batch.split(2):
        objective(part, STEP)
    before = {name: value.clone() for name, value in objective.teacher.named_parameters()}
    views = augmented_crops(batch, objective.options.views, objective.exported())[0]
    embeddings = objective.teacher.head(objective.teacher.backbone(views).global_token)
    expected = 0.2 * (embeddings @ objective.teacher.prototypes("image").weight.T).mean(dim=0)
    with torch.no_grad():
        for parameter in objective.student.parameters():
            parameter += 0.1
    objective.after_step(STEP)
    torch.testing.assert_close(objective.image_centre.value, expected, rtol=1e-4, atol=1e-6)
    momentum = objective.schedules(STEP)["momentum"]
    for name, value in objective.teacher.named_parameters():
        torch.testing.assert_close(value, before[name] + (1 - momentum) * 0.1, rtol=1e-4, atol=1e-6)


def test_local_crops_are_small_and_keyed(tiny: Tiny) -> None:
    objective = make(tiny, {"views.area": (0.5, 1.0)}, local_area=(0.1, 0.2))
    first, again = batch_of(objective), batch_of(objective)
    assert first["global"].shape == (4, 2, 3, 32, 32)
    assert first["local"].shape == (4, 3, 3, 16, 16)
    assert first["photometric"].sigma.shape == (4, 5)
    assert torch.equal(first["local"], again["local"])
    assert not torch.equal(first["local"][0, 0], first["local"][0, 1])


def test_local_crops_are_blurred_half_as_often_and_never_solarised(tiny: Tiny) -> None:
    objective = make(tiny, {"views.blur": (1.0, 0.6), "views.solarise": (0.0, 1.0)}, local_crops=20)
    photometric = batch_of(objective, 8)["photometric"]
    blurred, solarised = photometric.sigma > 0, photometric.solarise
    assert blurred[:, 0].all()
    assert 0.4 < blurred[:, 2:].double().mean() < 0.6
    assert (solarised[:, 0].any(), solarised[:, 1].all(), solarised[:, 2:].any()) == (False, True, False)


def test_it_trains_with_sinkhorn_centring(tiny: Tiny, tmp_path: Any) -> None:
    changes = {"losses.centring": "sinkhorn", "optim.micro_batches": 2, "backbone.drop_path": 0.2}
    dino = {"objective.name": "dino", "objective.args": {"local_crops": 2, "local_size": 16}}
    run = pretrain(tiny({**changes, **dino, "optim.epochs": 1, "optim.warmup_epochs": 0}), out=tmp_path)
    assert 0 < run.summary["losses"]["dino"] < 10
    assert run.backbone().embed_dim == 32
