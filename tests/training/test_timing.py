import time

import pytest
import torch

from cribo.training.timing import StepTimer, backward_part, part


def test_times_of_a_part_are_summed_within_each_step():
    timer = StepTimer()
    timer.mark("before the start: not counted")
    timer.start(torch.device("cpu"))
    for pause in (0.02, 0.05):
        time.sleep(pause)
        timer.mark("slow")
        timer.mark("quick")
        time.sleep(pause)
        timer.mark("slow")
        timer.end_step()
    timer.mark("of a step that never ended")
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
    timer.mark_gradient(middle, "head")
    timer.mark_gradient(middle.detach(), "never")
    loss = Slow.apply(middle).sum()
    timer.mark("forward")
    loss.backward()
    timer.mark("body")
    timer.end_step()
    (step,) = timer.read()
    assert list(step) == ["forward", "head", "body"]
    assert step["head"] >= 0.05 > step["body"]
    assert x.grad is not None
    assert x.grad.tolist() == pytest.approx([2.0] * 3)


def test_a_part_excludes_the_parts_inside_it_also_after_an_error():
    @part("outer")
    def outer() -> None:
        time.sleep(0.02)
        with part("inner"):
            time.sleep(0.05)
            raise KeyError
        time.sleep(9)

    timer = StepTimer()
    timer.start(torch.device("cpu"))
    with timer, pytest.raises(KeyError):
        outer()
    timer.end_step()
    (step,) = timer.read()
    assert step["inner"] >= 0.05 > step["outer"] >= 0.02


def test_parts_are_ranges_of_the_profiler():
    with torch.profiler.profile() as profiler, part("outer"), part("inner"):
        torch.ones(3).sum()
    (outer,) = (event for event in profiler.events() or [] if event.name == "outer")
    assert "inner" in [child.name for child in outer.cpu_children]


def test_backward_parts_are_timed_only_in_use():
    x = torch.ones(3, requires_grad=True)
    middle = x * 2
    backward_part("nobody", until=middle)
    timer = StepTimer()
    timer.start(torch.device("cpu"))
    with timer:
        backward_part("head", until=middle)
        middle.sum().backward()
    timer.end_step()
    assert list(timer.read()[0]) == ["head"]


def test_parts_do_not_break_a_compiled_graph():
    timer = StepTimer()
    timer.start(torch.device("cpu"))

    def double(x: torch.Tensor) -> torch.Tensor:
        with part("double"):
            return 2 * x

    torch.compiler.reset()
    compiled = torch.compile(double, fullgraph=True, backend="eager")
    with timer:
        assert compiled(torch.ones(2)).tolist() == [2, 2]
    assert compiled(torch.ones(2)).tolist() == [2, 2]
    torch.compiler.reset()
