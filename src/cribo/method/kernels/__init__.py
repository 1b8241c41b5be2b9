"""Fused versions of the method's inner loops for GPUs, in Triton; each has a plain twin, which is the reference."""

import importlib.util
import logging
from collections.abc import Callable
from functools import wraps
from typing import Generic, ParamSpec, TypeVar

import torch

log = logging.getLogger("cribo")

P = ParamSpec("P")
R = TypeVar("R")


class Accelerated(Generic[P, R]):
    """A function with a plain version for any device and a fused one for CUDA.

    The fused version is tried on first use: on a small made-up input it has to give what the plain one gives. Where it
    fails to (another GPU, another compiler), the plain one serves from then on, and one warning says so. What fails
    later, at other sizes, is raised.

    Args:
        name: what the function is called in the warning.
        plain: the reference.
        fused: makes the fused version; called at first use, so that Triton is imported by those who need it.
        trial: given the fused version and a device, raises an error where it disagrees with the plain one.
    """

    def __init__(
        self,
        name: str,
        *,
        plain: Callable[P, R],
        fused: Callable[[], Callable[P, R]],
        trial: Callable[[Callable[P, R], torch.device], None],
    ) -> None:
        self.name = name
        self.plain = plain
        self._make_fused = fused
        self._trial = trial
        self._chosen: dict[torch.device, Callable[P, R]] = {}

    def on(self, device: torch.device) -> Callable[P, R]:
        """The version that serves on a device."""
        if device.type != "cuda":
            return self.plain
        if device not in self._chosen:
            self._chosen[device] = self._choose(device)
        return self._chosen[device]

    def _choose(self, device: torch.device) -> Callable[P, R]:
        if importlib.util.find_spec("triton") is None:
            return self.plain
        try:
            fused = _launched_on(device, self._make_fused())
            # The plain twin must not be rounded by the autocast that the first call may come from.
            with torch.no_grad(), torch.autocast(device.type, enabled=False):
                self._trial(fused, device)
        except Exception as error:  # a compiler fails in many ways, and none may stop a run that can go on
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            log.warning("the fused %s does not work on %s (%s): the plain one is used", self.name, device, reason)
            return self.plain
        return fused


def _launched_on(device: torch.device, function: Callable[P, R]) -> Callable[P, R]:
    """Triton launches on the current GPU, wherever the tensors lie."""
    if device.type != "cuda":
        return function

    @wraps(function)
    def launch(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.cuda.device(device):
            return function(*args, **kwargs)

    return launch
