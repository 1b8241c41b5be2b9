"""Memory of student and teacher for the backward pass, and the teacher's moving average."""

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from cribo.models import build_backbone
from cribo.objectives.base import move_towards
from cribo.objectives.config import HeadConfig
from cribo.objectives.cribo import CrIBo
from cribo.objectives.self_distillation import Network
from cribo.pretraining import PretrainConfig, PretrainingModule

Tiny = Callable[..., PretrainConfig]
Train = Callable[..., Any]


class Kept(L.Callback):
    """Counts the values that parts of student and teacher save for the backward pass."""

    def __init__(self) -> None:
        self.numbers = {"student": 0, "teacher": 0}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, PretrainingModule)
        objective = pl_module.objective
        assert isinstance(objective, CrIBo)
        for name, network in (("student", objective.student), ("teacher", objective.teacher)):
            for part in (network.backbone, network.head):
                self._count(part, name)

    def _count(self, part: nn.Module, name: str) -> None:
        def pack(tensor: torch.Tensor) -> torch.Tensor:
            self.numbers[name] += tensor.numel()
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        part.register_forward_pre_hook(lambda *_: hooks.__enter__())
        part.register_forward_hook(lambda *_: hooks.__exit__(None, None, None), always_call=True)


def test_the_teacher_saves_nothing_and_a_checkpointed_student_little(tiny: Tiny, train: Train) -> None:
    kept, losses = {}, {}
    for mode in ("none", "blocks"):
        callback = Kept()
        trained = train(tiny({"optim.epochs": 1, "backbone.checkpointing": mode}), mode, callbacks=[callback])
        kept[mode] = callback.numbers
        losses[mode] = [float(row["loss"]) for row in trained.rows]
    assert kept["none"]["teacher"] == kept["blocks"]["teacher"] == 0
    assert 0 < kept["blocks"]["student"] < kept["none"]["student"] / 2
    assert losses["blocks"] == pytest.approx(losses["none"], rel=1e-5)


def network(*names: str, seed: int = 0) -> Network:
    backbone = build_backbone("vit_tiny_patch16_224", args={"depth": 1, "embed_dim": 32, "num_heads": 2}, image_size=32)
    levels = dict.fromkeys(names, 32)
    return Network(backbone, HeadConfig(hidden_dim=32, bottleneck_dim=16), levels=levels, seed=seed)


def test_the_moving_average() -> None:
    student = network("image", "object")
    teacher = student.make_teacher()
    before = [value.clone() for value in teacher.parameters()]
    with torch.no_grad():
        for parameter in student.parameters():
            parameter += torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    move_towards(teacher, student, 0.9)
    for own, other, old in zip(teacher.parameters(), student.parameters(), before, strict=True):
        torch.testing.assert_close(own, 0.9 * old + 0.1 * other.detach())
        assert not own.requires_grad


def test_each_level_has_a_separate_last_layer() -> None:
    one, two = network("patch"), network("patch", "image")
    assert [layer.shape for layer in one.last_layers] == [layer.shape for layer in one.prototypes("patch").parameters()]
    assert len(two.last_layers) == 2 * len(one.last_layers)
    assert two.prototypes("image") is not two.prototypes("patch")
    assert not torch.equal(two.prototypes("image").weight, two.prototypes("patch").weight)
    assert {"patch_prototypes.direction", "patch_prototypes.gain"} <= one.state_dict().keys()


def test_random_weights_of_the_head_depend_on_the_seed_only() -> None:
    torch.manual_seed(1)
    first = network("image", "object").head.state_dict()
    torch.manual_seed(2)
    again, other = network("image", "object").head.state_dict(), network("image", "object", seed=1).head.state_dict()
    assert all(torch.equal(value, again[name]) for name, value in first.items())
    assert not torch.equal(first["mlp.0.weight"], other["mlp.0.weight"])
