"""BYOL, against the released code of ORL and its definition."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.objectives.conftest import batch_of
from tests.objectives.golden import cases, load
from tests.objectives.literal import MOMENTUM, assert_steps_are, unequal
from torch import nn

from cribo.data.samples import Batch
from cribo.models import normalise
from cribo.objectives import Setting, Step
from cribo.objectives.rivals.byol import BYOL, byol_loss
from cribo.pretraining import PretrainConfig, pretrain

Tiny = Callable[..., PretrainConfig]
STEP = Step(6, steps_per_epoch=4, total_steps=12)
PLAIN = {"views.jitter": 0.0, "views.greyscale": 0.0, "views.blur": (0.0, 0.0), "views.solarise": (0.0, 0.0)}
SHARP = {"head.init_std": 0.2, "head.layers": 2, "backbone.drop_path": 0.0}
RESNET = {"backbone.name": "resnet18", "backbone.args": {"layers": [1, 1, 0, 0], "channels": [8, 16, 16, 16]}}


def make(tiny: Tiny, changes: dict[str, Any] | None = None, **args: Any) -> BYOL:
    return BYOL(Setting(tiny({**PLAIN, **SHARP, **(changes or {})}), 36, 4), **args)


@pytest.mark.parametrize("path", cases("orl_loss"), ids=lambda path: path.stem)
def test_golden_loss(path: Path) -> None:
    case = load(path)
    weights = {key.removeprefix("predictor."): value for key, value in case.items() if key.startswith("predictor.")}
    hidden, dim = weights["fc0.weight"].shape
    predictor = nn.Sequential()
    for name, layer in (
        ("fc0", nn.Linear(dim, hidden)),
        ("bn0", nn.BatchNorm1d(hidden)),
        ("relu", nn.ReLU()),
        ("fc1", nn.Linear(hidden, dim, bias=False)),
    ):
        predictor.add_module(name, layer)
    weights["bn0.num_batches_tracked"] = torch.tensor(weights["bn0.num_batches_tracked"])
    predictor.double().load_state_dict(weights)
    online = case["online"].requires_grad_()
    losses = [byol_loss(predictor(online[view]), case["target"][1 - view]).mean() for view in (0, 1)]
    total = torch.stack(losses).sum()
    for loss, name in zip((*losses, total), ("loss_1_2", "loss_2_1", "loss"), strict=True):
        assert loss.item() == pytest.approx(case[name], rel=1e-12), name
    total.backward()
    torch.testing.assert_close(online.grad, case["online_grad"], rtol=1e-9, atol=1e-12)


def written_losses(objective: Any, batch: Batch, step: Step) -> dict[str, torch.Tensor]:
    """Compute the squared distance between the prediction from one view and the projection of the other."""
    views = normalise(batch["views"].flatten(0, 1).float() / 255).double().unflatten(0, (-1, 2))
    student, teacher = (
        [network.projector(network.backbone(views[:, view]).global_token) for view in (0, 1)]
        for network in (objective.student, objective.teacher)
    )
    predicted = [objective.student.predictors["image"](rows) for rows in student]
    terms = [
        (F.normalize(predicted[view], dim=1) - F.normalize(teacher[1 - view].detach(), dim=1)).square().sum(dim=1)
        for view in (0, 1)
    ]
    return {"image": torch.stack(terms).sum(dim=0).mean()}


@pytest.mark.parametrize(("batch_norm", "network"), [(True, {}), (True, RESNET), (False, {})])
def test_two_steps_are_those_written_out(tiny: Tiny, batch_norm: bool, network: dict[str, Any]) -> None:
    objective = unequal(make(tiny, {"optim.momentum": MOMENTUM, **network}, batch_norm=batch_norm))
    batches = [batch_of(objective, 4, first) for first in (0, 4)]

    assert_steps_are(objective, batches, written_losses)


def test_the_mlps_are_those_of_the_released_code(tiny: Tiny) -> None:
    objective = make(tiny)
    for mlp in (objective.student.projector, objective.student.predictors["image"]):
        assert isinstance(mlp, nn.Sequential)
        assert [type(layer) for layer in mlp] == [nn.Linear, nn.BatchNorm1d, nn.ReLU, nn.Linear]
        assert [layer.bias is not None for layer in mlp if isinstance(layer, nn.Linear)] == [True, False]


def test_a_step_updates_the_teacher_and_reports_collapse(tiny: Tiny) -> None:
    objective = make(tiny)
    before = {name: value.clone() for name, value in objective.teacher.named_parameters()}
    assert not any(name.startswith("predictors") for name in before)
    with torch.no_grad():
        for parameter in objective.student.parameters():
            parameter += 0.1
    objective(batch_of(objective), STEP)
    assert 0.1 < objective.watch(STEP)["feature_std"] < 1.5
    objective.after_step(STEP)
    momentum = objective.schedules(STEP)["momentum"]
    assert momentum == pytest.approx(0.95)
    for name, value in objective.teacher.named_parameters():
        torch.testing.assert_close(value, before[name] + (1 - momentum) * 0.1, rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        for parameter in objective.teacher.parameters():
            parameter.zero_()
    objective(batch_of(objective), STEP)
    assert objective.watch(STEP)["feature_std"] == 0


def test_training_reduces_the_loss_without_collapse(tiny: Tiny, tmp_path: Path) -> None:
    optim = {"optim.name": "sgd", "optim.lr": 2.0, "optim.epochs": 8, "optim.warmup_epochs": 0}
    optim |= {"optim.momentum": (0.99, 1.0), "optim.batch_size": 16, "data.scenes.count": 64}
    run = pretrain(tiny({**RESNET, **SHARP, **optim, "objective.name": "byol"}), out=tmp_path)
    rows = [line.split(",") for line in (run.folder / "metrics.csv").read_text().splitlines()]
    losses = [float(row[rows[0].index("loss_image")]) for row in rows[1:]]
    assert sum(losses[-4:]) < 0.7 * sum(losses[:4])
    assert float(rows[-1][rows[0].index("feature_std")]) > 0.3
    assert run.backbone().embed_dim == 16
