"""The compiled step, which is meant for GPUs, on a CPU."""

import shutil
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from cribo.pretraining import PretrainConfig

Tiny = Callable[..., PretrainConfig]
Train = Callable[..., Any]


class NothingCompiles(Callback):
    """From a step on, compiling again is an error."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        if trainer.global_step == self.step:
            torch.compiler.set_stance("fail_on_recompile")


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked_shapes")  # whose guards depend on the shapes
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize("centring", ["mean", pytest.param("sinkhorn", marks=pytest.mark.endurance)])
def test_a_compiled_run_matches_an_uncompiled_one(tiny: Tiny, train: Train, centring: str) -> None:
    common = {
        "backbone.args": {"patch_size": 8, "depth": 1, "embed_dim": 32, "num_heads": 2},
        "losses.centring": centring,
        "losses.cross_image_from_epoch": 0,
        "optim.lr": 1e-3,  # rounding must not grow
        "optim.epochs": 2,
        "runtime.precision": "64-true",
    }
    plain = train(tiny(common), "plain")
    torch.compiler.reset()
    try:
        # The first two steps have different numbers of objects and pairs; the others must need no other code.
        compiled = train(tiny({**common, "runtime.compile": "default"}), "compiled", [NothingCompiles(2)])
    finally:
        torch.compiler.set_stance("default")
        torch.compiler.reset()
    for row, other in zip(plain.rows, compiled.rows, strict=True):
        assert float(other["objects_per_image"]) == float(row["objects_per_image"])  # a different number in each step
        for name in ("loss_image", "loss_cross_view", "loss_cross_image"):
            assert float(other[name]) == pytest.approx(float(row[name]), rel=1e-6)
    for name, value in plain.weights.items():
        torch.testing.assert_close(compiled.weights[name], value, rtol=0, atol=1e-6)
