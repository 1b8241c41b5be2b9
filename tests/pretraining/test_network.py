"""What student and teacher keep for a backward pass, and how the teacher follows."""

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from cribo.models import build_backbone
from cribo.pretraining import PretrainConfig, PretrainingModule
from cribo.pretraining.config import HeadConfig
from cribo.pretraining.network import Network

Tiny = Callable[..., PretrainConfig]
Train = Callable[..., Any]


class Kept(L.Callback):
    """Counts the numbers that parts of the student and of the teacher keep for the backward pass."""

    def __init__(self) -> None:
        self.numbers = {"student": 0, "teacher": 0}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, PretrainingModule)
        for name, network in (("student", pl_module.student), ("teacher", pl_module.teacher)):
            for part in (network.backbone, network.head):
                self._count(part, name)

    def _count(self, part: nn.Module, name: str) -> None:
        def pack(tensor: torch.Tensor) -> torch.Tensor:
            self.numbers[name] += tensor.numel()
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        part.register_forward_pre_hook(lambda *_: hooks.__enter__())
        part.register_forward_hook(lambda *_: hooks.__exit__(None, None, None), always_call=True)


def test_the_teacher_keeps_nothing_and_a_checkpointed_student_little(tiny: Tiny, train: Train) -> None:
    kept, losses = {}, {}
    for mode in ("none", "blocks"):
        callback = Kept()
        trained = train(tiny({"optim.epochs": 1, "backbone.checkpointing": mode}), mode, callbacks=[callback])
        kept[mode] = callback.numbers
        losses[mode] = [float(row["loss"]) for row in trained.rows]
    assert kept["none"]["teacher"] == kept["blocks"]["teacher"] == 0
    assert 0 < kept["blocks"]["student"] < kept["none"]["student"] / 2
    assert losses["blocks"] == pytest.approx(losses["none"], rel=1e-5)


def test_the_moving_average() -> None:
    backbone = build_backbone("vit_tiny_patch16_224", args={"depth": 1, "embed_dim": 32, "num_heads": 2}, image_size=32)
    student = Network(backbone, HeadConfig(hidden_dim=32, bottleneck_dim=16, prototypes=32), seed=0)
    teacher = student.make_teacher()
    before = [value.clone() for value in teacher.parameters()]
    with torch.no_grad():
        for parameter in student.parameters():
            parameter += torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    teacher.move_towards(student, 0.9)
    for own, other, old in zip(teacher.parameters(), student.parameters(), before, strict=True):
        torch.testing.assert_close(own, 0.9 * old + 0.1 * other.detach())
        assert not own.requires_grad
