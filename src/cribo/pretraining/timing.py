"""Timing of the parts of a training step, on the device."""

import time
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function


class StepTimer:
    """Timer of the parts of training steps; no-op until started.

    A call ends a part: the time since the last call belongs to it. On a GPU a call records an event in the stream,
    without synchronising until the times are read.

    Example:
        >>> timer = StepTimer()
        >>> timer.start(torch.device("cpu"))
        >>> for _ in range(3):
        ...     timer("clustering")
        ...     timer.end_step()
        >>> [sorted(step) for step in timer.read()]
        [['clustering'], ['clustering'], ['clustering']]
    """

    def __init__(self) -> None:
        self._device: torch.device | None = None
        self._steps: list[list[tuple[str, Any]]] = []  # parts and their end times, by step
        self._open: list[str] = []  # parts of the methods that are running, outermost first

    def start(self, device: torch.device) -> None:
        """Start timing the steps on a device."""
        self._device = device
        self._steps = [[("", self._now())]]

    def __call__(self, part: str) -> None:
        """Assign the time since the last call to `part`; marked by this name in torch.profiler traces."""
        if self._device is not None:
            self._steps[-1].append((part, self._now()))
            with record_function(part):
                pass

    def at_gradient(self, tensor: Tensor, part: str) -> None:
        """Call the timer with `part` when the backward pass reaches a tensor."""
        if self._device is not None and tensor.requires_grad:
            tensor.register_hook(lambda _: self(part))

    def wrap(self, owner: Any, method: str, part: str | Callable[..., str]) -> None:
        """Wrap a method of an object so that its calls are timed as a part, excluding nested parts.

        Args:
            owner: the object.
            method: name of the method.
            part: name of the part, or a function of the method's arguments that returns it.
        """
        inner = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._open:
                self(self._open[-1])
            self._open.append(part if isinstance(part, str) else part(*args, **kwargs))
            try:
                return inner(*args, **kwargs)
            finally:
                self(self._open.pop())

        setattr(owner, method, timed)

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
            for (_, begin), (part, end) in pairwise(marks):
                seconds[part] += end - begin if isinstance(end, float) else begin.elapsed_time(end) / 1000
            steps.append(dict(seconds))
        return steps

    def _now(self) -> Any:
        """Return the host's clock, or an event on the GPU."""
        assert self._device is not None
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
