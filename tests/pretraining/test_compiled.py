"""The compiled step, which is meant for GPUs, on a CPU."""

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cribo.pretraining import PretrainConfig

Tiny = Callable[..., PretrainConfig]
Train = Callable[..., Any]


@pytest.mark.slow
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
    compiled = train(tiny({**common, "runtime.compile": "default"}), "compiled")
    torch.compiler.reset()
    for row, other in zip(plain.rows, compiled.rows, strict=True):
        assert float(other["objects_per_image"]) == float(row["objects_per_image"])  # a different number in each step
        for name in ("loss_image", "loss_cross_view", "loss_cross_image"):
            assert float(other[name]) == pytest.approx(float(row[name]), rel=1e-6)
    for name, value in plain.weights.items():
        torch.testing.assert_close(compiled.weights[name], value, rtol=0, atol=1e-6)
