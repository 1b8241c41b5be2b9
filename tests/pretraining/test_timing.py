import time

import pytest
import torch

from cribo.pretraining.timing import StepTimer


def test_times_of_a_part_are_summed_within_each_step():
    timer = StepTimer()
    timer("before the start: not counted")
    timer.start(torch.device("cpu"))
    for pause in (0.02, 0.05):
        time.sleep(pause)
        timer("slow")
        timer("quick")
        time.sleep(pause)
        timer("slow")
        timer.end_step()
    timer("of a step that never ended")
    first, second = timer.read()
    assert set(first) == set(second) == {"slow", "quick"}
    assert first["slow"] >= 0.04
    assert second["slow"] >= 0.1
    assert first["quick"] < 0.02


def test_a_gradient_ends_the_part_before_it_in_the_backward_pass():
    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, *gradients):
            time.sleep(0.05)
            return gradients[0]

    timer = StepTimer()
    x = torch.ones(3, requires_grad=True)
    timer.start(torch.device("cpu"))
    middle = x * 2
    timer.at_gradient(middle, "head")
    timer.at_gradient(middle.detach(), "never")
    loss = Slow.apply(middle).sum()
    timer("forward")
    loss.backward()
    timer("body")
    timer.end_step()
    (step,) = timer.read()
    assert list(step) == ["forward", "head", "body"]
    assert step["head"] >= 0.05 > step["body"]
    assert x.grad is not None
    assert x.grad.tolist() == pytest.approx([2.0] * 3)
