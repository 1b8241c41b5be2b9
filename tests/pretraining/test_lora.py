"""Runs that train only adapters, and export a plain backbone."""

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch

from cribo.base.errors import ConfigError
from cribo.models import load_backbone
from cribo.models.lora import plain_copy
from cribo.objectives import Setting, make_objective
from cribo.objectives.alignment import Alignment
from cribo.objectives.base import move_towards
from cribo.pretraining import PretrainConfig
from cribo.pretraining.parameters import parameter_groups

Tiny = Callable[..., PretrainConfig]
Train = Callable[..., Any]


class Stop(L.Callback):
    """Fails after a step."""

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        if trainer.global_step == 6:
            raise RuntimeError("stopped")


@pytest.mark.parametrize("objective", ["cribo", "alignment"])
def test_a_run_changes_only_adapted_layers_and_exports_a_plain_backbone(
    objective: str, tiny: Tiny, train: Train, resumed: Train
) -> None:
    config = tiny({
        "objective.name": objective,
        "backbone.drop_path": 0.0,
        "backbone.lora": 2,
        "backbone.train_blocks": 1,
        "optim.epochs": 2,
        "runtime.checkpoint_every": 6,
    })  # fmt: skip
    whole = train(config, "whole")
    before = Setting(tiny({"backbone.drop_path": 0.0}), 36, 4).build_backbone().state_dict()
    after = load_backbone(whole.run.folder).state_dict()
    assert after.keys() == before.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    layers = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
    assert changed == {f"model.blocks.1.{layer}.weight" for layer in layers}
    checkpoint = whole.run.folder / "checkpoints" / "step=00000008.ckpt"
    teacher = load_backbone(checkpoint)
    assert all(torch.equal(value, after[name]) for name, value in teacher.state_dict().items())
    with pytest.raises(ValueError, match="use the teacher"):
        load_backbone(checkpoint, network="student")
    if objective == "cribo":
        head = [name for name in whole.weights if name.startswith("student.head.") and name.endswith("weight")]
        assert head
        first = make_objective("cribo", {}, Setting(config, 36, 4)).state_dict()
        assert not any(torch.equal(whole.weights[name], first[name]) for name in head)

    with pytest.raises(RuntimeError, match="stopped"):
        train(config, "stopped", callbacks=[Stop()])
    again = resumed("stopped")
    assert again.rows == whole.rows
    assert again.weights.keys() == whole.weights.keys()
    for name, value in whole.weights.items():
        assert torch.equal(value, again.weights[name]), name


def test_the_teacher_follows_the_merged_weights(tiny: Tiny) -> None:
    objective = Alignment(Setting(tiny({"backbone.lora": 2}), 36, 4))
    with torch.no_grad():
        for parameter in objective.student.parameters():
            if parameter.requires_grad:
                parameter.normal_()
    before = [parameter.clone() for parameter in objective.teacher.parameters()]
    move_towards(objective.teacher, objective.student, 0.75)
    merged = plain_copy(objective.student).parameters()
    for old, own, new in zip(before, merged, objective.teacher.parameters(), strict=True):
        torch.testing.assert_close(new, 0.75 * old + 0.25 * own)


def test_adapters_have_weight_decay_and_the_rate_of_their_block(tiny: Tiny) -> None:
    student = Alignment(Setting(tiny({"backbone.lora": 2}), 36, 4)).student
    names = {parameter: name for name, parameter in student.named_parameters()}
    groups: Any = parameter_groups(student, 0.5)
    scales = {names[value]: (group["lr_scale"], group["decay"]) for group in groups for value in group["params"]}
    assert scales.keys() == {name for name, value in student.named_parameters() if value.requires_grad}
    for name, found in scales.items():
        assert ".lora_" in name
        assert found == (0.5 if ".blocks.1." in name else 0.25, 1.0)


MAE = {
    "objective.name": "mae",
    "objective.args": {"decoder_dim": 16, "decoder_depth": 1, "decoder_heads": 2},
    "backbone.drop_path": 0.0,
}
RESNET = {"backbone.name": "resnet18", "backbone.args": {"channels": (8, 8, 8, 8)}, "backbone.drop_path": 0.0}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({**MAE, "backbone.lora": 2}, "an objective that exports a teacher"),
        ({"backbone.lora": 33}, "got 33"),
        ({**RESNET, "backbone.lora": 2}, "resnet18"),
    ],
    ids=["no teacher", "rank above the width", "no linear layers"],
)
def test_adapters_that_cannot_be_trained_are_refused(tiny: Tiny, changes: dict[str, Any], named: str) -> None:
    config = tiny(changes)
    with pytest.raises(ConfigError, match=rf"backbone\.lora.*{named}"):
        make_objective(config.objective.name, config.objective.args, Setting(config, 36, 4))
