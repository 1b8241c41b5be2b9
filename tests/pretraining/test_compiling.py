from typing import Any

import pytest
import torch

from cribo.pretraining.compiling import STEPS, compile_mode
from cribo.pretraining.config import RuntimeConfig


@pytest.mark.parametrize(
    ("device", "options", "steps"),
    [
        ("cpu", {}, 10 * STEPS),
        ("cuda", {}, STEPS - 1),
        ("cuda", {"devices": 2}, 10 * STEPS),
        ("cuda", {"num_nodes": 2}, 10 * STEPS),
        ("cuda", {"compile": "none"}, 10 * STEPS),
        ("cuda", {"compile": False}, 10 * STEPS),
    ],
)
def test_what_is_not_compiled(device: str, options: dict[str, Any], steps: int) -> None:
    assert compile_mode(RuntimeConfig(**options), torch.device(device), steps=steps) is None


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_mode_that_is_asked_for_does_not_depend_on_the_run(device: str) -> None:
    for runtime, mode in (
        (RuntimeConfig(compile=True), "default"),
        (RuntimeConfig(compile="max-autotune"), "max-autotune"),
    ):
        assert compile_mode(runtime, torch.device(device), steps=1) == mode


@pytest.mark.gpu
def test_a_long_run_on_one_gpu_is_compiled() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    assert compile_mode(RuntimeConfig(), torch.device("cuda:0"), steps=STEPS) == "default"
