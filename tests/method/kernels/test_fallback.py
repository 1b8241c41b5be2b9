import logging

import pytest
import torch

from cribo.method.kernels import Accelerated

HOST = torch.device("cpu")


def plain(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def agrees(fused, device: torch.device) -> None:
    x = torch.randn(8, 8, device=device)
    torch.testing.assert_close(fused(x) @ x, plain(x) @ x, rtol=1e-6, atol=1e-6)


def choice(fused, trial=agrees):
    return Accelerated("doubling", plain=plain, fused=lambda: fused, trial=trial)._choose(HOST)


def fails(x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("no such instruction\nand much more")


@pytest.mark.parametrize(("fused", "reason"), [(fails, "no such instruction"), (lambda x: 3 * x, "not close")])
def test_a_fused_version_that_fails_or_disagrees_gives_way_with_one_line(fused, reason, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("cribo"), "propagate", True)
    with caplog.at_level(logging.WARNING, logger="cribo"):
        assert choice(fused) is plain
    (line,) = set(caplog.messages)  # the log may reach the fixture twice
    assert "doubling" in line
    assert reason in line
    assert "\n" not in line


def test_a_fused_version_that_agrees_is_taken_under_autocast_too():
    def fused(x: torch.Tensor) -> torch.Tensor:
        return x + x

    def precise(fused, device: torch.device) -> None:
        x = torch.randn(64, 64)
        torch.testing.assert_close((x @ x).double(), x.double() @ x.double(), rtol=1e-3, atol=1e-4)
        agrees(fused, device)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert choice(fused, precise) is fused


def test_without_a_gpu_the_plain_version_serves_and_nothing_is_tried():
    def never(*_: object) -> None:
        raise AssertionError

    assert Accelerated("doubling", plain=plain, fused=lambda: fails, trial=never).on(HOST) is plain
