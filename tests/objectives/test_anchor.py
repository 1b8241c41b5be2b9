"""Losses that keep features close to those of the starting weights."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.objectives.conftest import batch_of

from cribo.objectives import Objective, Output, Setting, Step, make_objective
from cribo.objectives.terms import Anchor, StepFeatures
from cribo.objectives.views import normalised_views
from cribo.pretraining import PretrainConfig

Tiny = Callable[..., PretrainConfig]
STEP = Step(6, steps_per_epoch=4, total_steps=12)
BOTH = ("alignment", "cribo")


def make(tiny: Tiny, name: str, kind: str = "gram", **changes: Any) -> Objective:
    options = {"backbone.drop_path": 0.0, "losses.anchor": 0.5, "losses.anchor_kind": kind}
    return make_objective(name, {}, Setting(tiny(options | changes), 36, 4))


def anchor_loss(objective: Objective) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the loss, and the tokens of the student and of the starting weights."""
    batch = batch_of(objective)
    output = objective(batch, STEP)
    assert isinstance(output, Output)
    student: Any = objective.trainable().get_submodule("backbone")
    start: Any = objective.get_submodule("anchor.start")
    views = normalised_views(batch, objective.options.views, student)
    return output.losses["anchor"], student(views).tokens, start(views).tokens


def moved(objective: Objective) -> Objective:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in objective.trainable().parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return objective


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("blocks", [None, 1])
def test_the_distance_from_the_start_is_0_and_grows(tiny: Tiny, name: str, blocks: int | None) -> None:
    for kind in ("gram", "cosine"):
        objective = make(tiny, name, kind, **{"backbone.train_blocks": blocks})
        assert objective.weights["anchor"] == 0.5
        assert anchor_loss(objective)[0].detach() == pytest.approx(0, abs=1e-6)
        loss, student, start = anchor_loss(moved(objective))
        assert loss > 1e-3
        if kind == "cosine":
            torch.testing.assert_close(loss, 1 - F.cosine_similarity(student, start, dim=-1).mean())
        loss.backward()
        assert all(parameter.grad is None for parameter in objective.get_submodule("anchor").parameters())


def test_gram_distance_ignores_rotation_and_scale() -> None:
    tokens = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0))
    rotation = torch.linalg.qr(torch.randn(4, 4, generator=torch.Generator().manual_seed(1))).Q

    class Start(torch.nn.Module):
        def forward(self, views: torch.Tensor, **noise: Any) -> Any:
            return dataclasses.make_dataclass("Features", ["tokens"])(tokens)

    start: Any = Start()
    features = StepFeatures(tokens, 3 * tokens[:, None] @ rotation, {})
    gram, cosine = (Anchor(start, kind)(features, STEP) for kind in ("gram", "cosine"))
    assert gram == pytest.approx(0, abs=1e-6)
    assert cosine > 0.1


def test_batch_norm_statistics_of_the_starting_weights_do_not_change(tiny: Tiny) -> None:
    network = {"backbone.name": "resnet18", "backbone.args": {"layers": [1, 1, 0, 0], "channels": [8, 8, 8, 8]}}
    objective = make(tiny, "cribo", "cosine", **network).train()
    start = objective.get_submodule("anchor.start")
    before = {name: value.clone() for name, value in start.state_dict().items()}
    anchor_loss(objective)
    assert not any(module.training for module in start.modules())
    assert all(torch.equal(value, before[name]) for name, value in start.state_dict().items())


def test_a_resumed_run_keeps_its_starting_weights(tiny: Tiny, resumed_state: Callable[..., dict[str, Any]]) -> None:
    changes = {"losses.anchor": 1.0, "losses.object_neighbours": 1.0, "losses.patch_neighbours": 1.0}
    state = resumed_state(tiny({**changes, "losses.neighbours": 4, "runtime.checkpoint_every": 5}))
    assert len(state["_extra_state"]["patch_bank"]["images"])
