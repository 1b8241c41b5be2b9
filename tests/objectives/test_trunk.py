"""Frozen first blocks in each objective."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.objectives.conftest import batch_of

from cribo.models import Backbone, load_backbone
from cribo.objectives import Setting, Step, make_objective
from cribo.pretraining import PretrainConfig, pretrain

Tiny = Callable[..., PretrainConfig]
STEP = Step(6, steps_per_epoch=4, total_steps=12)
ARGS: dict[str, dict[str, Any]] = {
    "alignment": {},
    "contextual": {},
    "cribo": {},
    "croc": {"k_start": 6, "object_prototypes": 16},
    "dino": {"local_crops": 2, "local_size": 16},
    "mae": {"decoder_dim": 16, "decoder_depth": 1, "decoder_heads": 2},
    "slotcon": {"batch_norm": False},
}
DISTILLED = ("alignment", "contextual", "cribo", "croc", "dino", "slotcon")
DEEPER = {"patch_size": 8, "depth": 3, "embed_dim": 32, "num_heads": 2}


def frozen(name: str) -> bool:
    return any(part in name for part in ("blocks.0.", "patch_embed", "pos_embed", "cls_token"))


@pytest.mark.parametrize("name", DISTILLED)
def test_a_shared_trunk_changes_no_loss_and_no_gradient(tiny: Tiny, name: str) -> None:
    changes = {"backbone.drop_path": 0.0, "backbone.args": DEEPER}
    whole, shared = (
        make_objective(name, ARGS[name], Setting(tiny(changes | more), 36, 4))
        for more in ({}, {"backbone.train_blocks": 2})
    )
    shared.load_state_dict(whole.state_dict())
    batch = batch_of(whole)
    outputs = [objective(batch, STEP) for objective in (whole, shared)]
    for loss, other in zip(outputs[0].losses.values(), outputs[1].losses.values(), strict=True):
        torch.testing.assert_close(loss, other)
    for output in outputs:
        sum(output.losses.values(), torch.zeros(())).backward()
    first, second = (dict(objective.trainable().named_parameters()) for objective in (whole, shared))
    for parameter in second:
        if frozen(parameter):
            assert second[parameter].grad is None
        elif first[parameter].grad is not None:
            torch.testing.assert_close(first[parameter].grad, second[parameter].grad)


@pytest.mark.parametrize("name", DISTILLED)
def test_frozen_blocks_run_once_for_student_and_teacher(tiny: Tiny, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"backbone.drop_path": 0.0, "backbone.train_blocks": 1}
    objective = make_objective(name, ARGS[name], Setting(tiny(changes), 36, 4))
    views: list[int] = []
    encode_trunk = Backbone.encode_trunk

    def counted(backbone: Backbone, images: torch.Tensor, blocks: int, **mask: Any) -> Any:
        views.append(len(images))
        return encode_trunk(backbone, images, blocks, **mask)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the whole network was run")

    monkeypatch.setattr(Backbone, "encode_trunk", counted)
    monkeypatch.setattr(Backbone, "encode", refuse)
    objective(batch_of(objective), STEP)
    assert views == ([8, 8] if name == "dino" else [8])  # global and local crops, or two views, of 4 images


@pytest.mark.parametrize("name", ARGS)
def test_training_changes_only_the_last_blocks(tiny: Tiny, tmp_path: Any, name: str) -> None:
    changes = {"backbone.train_blocks": 1, "backbone.drop_path": 0.0, "optim.epochs": 1, "optim.warmup_epochs": 0}
    config = tiny({**changes, "objective.name": name, "objective.args": ARGS[name]})
    before = make_objective(name, ARGS[name], Setting(config, 36, 4)).exported().state_dict()
    run = pretrain(config, out=tmp_path)
    after = load_backbone(run.folder).state_dict()
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert any("blocks.1." in key for key in changed)
    assert all("blocks.1." in key or ".norm." in key for key in changed)
