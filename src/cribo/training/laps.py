"""How long each part of a training step takes: laps of a watch that runs on the device."""

import time
from collections import defaultdict

import torch
from torch import Tensor


class Laps:
    """A lap watch for training steps; it costs nothing until it is started.

    A step says after each of its parts what the time since the last lap was spent on. On a GPU a lap is an event in the
    stream, so that nothing waits for anything until the laps are read.

    Example:
        >>> laps = Laps()
        >>> laps.start(torch.device("cpu"))
        >>> for _ in range(3):
        ...     laps("clustering")
        ...     laps.end_step()
        >>> [sorted(step) for step in laps.read()]
        [['clustering'], ['clustering'], ['clustering']]
    """

    def __init__(self) -> None:
        self._device: torch.device | None = None
        self._last: float | torch.cuda.Event | None = None
        self._steps: list[list[tuple[str, float | torch.cuda.Event, float | torch.cuda.Event]]] = []

    def start(self, device: torch.device) -> None:
        """Begin to take laps on a device, from now on."""
        self._device = device
        self._steps = [[]]
        self._last = self._mark()

    def __call__(self, part: str) -> None:
        """The time since the last lap was spent on `part`."""
        if self._device is None:
            return
        now = self._mark()
        assert self._last is not None
        self._steps[-1].append((part, self._last, now))
        self._last = now

    def at_gradient(self, tensor: Tensor, part: str) -> None:
        """Take a lap when the backward pass arrives at a tensor: what came before it was spent on `part`."""
        if self._device is not None and tensor.requires_grad:
            tensor.register_hook(lambda _: self(part))

    def end_step(self) -> None:
        """Laps from now on belong to the next step."""
        if self._device is not None:
            self._steps.append([])

    def read(self) -> list[dict[str, float]]:
        """Seconds of each part, for each whole step, and stop. Waits for the device."""
        if self._device is not None and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        steps = []
        for laps in self._steps[:-1]:
            seconds: dict[str, float] = defaultdict(float)
            for part, begin, end in laps:
                seconds[part] += _between(begin, end)
            steps.append(dict(seconds))
        self._device, self._last, self._steps = None, None, []
        return steps

    def _mark(self) -> "float | torch.cuda.Event":
        assert self._device is not None
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _between(begin: "float | torch.cuda.Event", end: "float | torch.cuda.Event") -> float:
    if isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        return begin.elapsed_time(end) / 1000
    assert isinstance(begin, int | float)
    assert isinstance(end, int | float)
    return end - begin
