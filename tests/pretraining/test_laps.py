import time

import pytest
import torch

from cribo.training.laps import Laps


def test_laps_of_a_part_are_summed_and_steps_kept_apart():
    laps = Laps()
    laps("before the start: not counted")
    laps.start(torch.device("cpu"))
    for pause in (0.02, 0.05):
        time.sleep(pause)
        laps("slow")
        laps("quick")
        time.sleep(pause)
        laps("slow")
        laps.end_step()
    laps("of a step that never ended")
    first, second = laps.read()
    assert set(first) == set(second) == {"slow", "quick"}
    assert first["slow"] >= 0.04
    assert second["slow"] >= 0.1
    assert first["quick"] < 0.02
    laps("after the end")
    assert laps.read() == []


def test_a_gradient_ends_the_lap_of_what_comes_before_it_in_the_backward_pass():
    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, *gradients):
            time.sleep(0.05)
            return gradients[0]

    laps = Laps()
    x = torch.ones(3, requires_grad=True)
    laps.start(torch.device("cpu"))
    middle = x * 2
    laps.at_gradient(middle, "head")
    laps.at_gradient(middle.detach(), "never")
    loss = Slow.apply(middle).sum()
    laps("forward")
    loss.backward()
    laps("body")
    laps.end_step()
    (step,) = laps.read()
    assert list(step) == ["forward", "head", "body"]
    assert step["head"] >= 0.05 > step["body"]
    assert x.grad is not None
    assert x.grad.tolist() == pytest.approx([2.0] * 3)
