"""Named parts of a training step, and their times on the device."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Self

import torch
from torch import Tensor
from torch.profiler import record_function


class StepTimer:
    """Timer of the parts of training steps, inside a `with` block; no-op until started.

    A mark ends a part: the time since the last mark belongs to it. On a GPU a mark records an event in the stream,
    without synchronising until the times are read.

    Example:
        >>> timer = StepTimer()
        >>> timer.start(torch.device("cpu"))
        >>> with timer:
        ...     for _ in range(3):
        ...         with part("clustering"):
        ...             pass
        ...         timer.end_step()
        >>> [sorted(step) for step in timer.read()]
        [['clustering'], ['clustering'], ['clustering']]
    """

    def __init__(self) -> None:
        self._device: torch.device | None = None
        self._steps: list[list[tuple[str, Any]]] = []  # parts and their end times, by step
        self._open: list[str] = []  # parts that are running, outermost first

    def __enter__(self) -> Self:
        _timers.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _timers.remove(self)

    def start(self, device: torch.device) -> None:
        """Start timing the steps on a device."""
        self._device = device
        self._steps = [[("", self._now())]]

    def mark(self, name: str) -> None:
        """Assign the time since the last mark to a part; also a mark of this name in torch.profiler traces."""
        if self._device is not None:
            self._end(name)
            with record_function(name):
                pass

    def mark_gradient(self, tensor: Tensor, name: str) -> None:
        """Call `mark` when the backward pass reaches a tensor."""
        if self._device is not None and tensor.requires_grad:
            tensor.register_hook(lambda _: self.mark(name))

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time a part, without the parts inside it."""
        if self._open:
            self._end(self._open[-1])
        self._open.append(name)
        try:
            yield
        finally:
            self._end(self._open.pop())

    def end_step(self) -> None:
        """End the current step."""
        if self._device is not None:
            self._steps.append(self._steps[-1][-1:])

    def read(self) -> list[dict[str, float]]:
        """Return the seconds of each part in each finished step; synchronises with the device."""
        if self._device is not None and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        steps = []
        for marks in self._steps[:-1]:
            seconds: dict[str, float] = defaultdict(float)
            for (_, begin), (name, end) in pairwise(marks):
                seconds[name] += end - begin if isinstance(end, float) else begin.elapsed_time(end) / 1000
            steps.append(dict(seconds))
        return steps

    def _end(self, name: str) -> None:
        """Assign the time since the last mark to a part."""
        if self._device is not None:
            self._steps[-1].append((name, self._now()))

    def _now(self) -> Any:
        """Return the host's clock, or an event on the GPU."""
        assert self._device is not None
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


_timers: list[StepTimer] = []  # in use, outermost first


@contextmanager
def part(name: str) -> Iterator[None]:
    """Name a part of a training step, as a context or as a decorator: a range of torch.profiler and `cribo profile`.

    Parts can be nested. No-op in compiled code, where operations of several parts are fused.
    """
    if torch.compiler.is_compiling():
        yield
        return
    with record_function(name):
        if _timers:
            with _timers[-1].part(name):
                yield
        else:
            yield


def backward_part(name: str, *, until: Tensor) -> None:
    """Name the part of the backward pass that ends when it reaches a tensor; no-op unless steps are timed."""
    if _timers:
        _timers[-1].mark_gradient(until, name)
