"""Whether a run is compiled, and where its compiled code is kept."""

import logging
import os
import shutil
from importlib.util import find_spec

import torch

from cribo.base.machine import keep_compiled_code
from cribo.data.photometric import compile_photometric
from cribo.models.config import CompileMode
from cribo.objectives import Objective
from cribo.pretraining.config import RuntimeConfig

log = logging.getLogger("cribo")

STEPS = 5000
"""Fewest steps of a run for which compiling takes less time than it saves: two minutes, at a fifth of 120 ms a step."""

_CAPABILITY = (7, 0)  # of the oldest GPUs that Triton supports


def compile_objective(objective: Objective, runtime: RuntimeConfig, device: torch.device, *, steps: int) -> None:
    """Compile the parts of a training step that the options ask for.

    Args:
        objective: the objective, on its device.
        runtime: options of the run.
        device: device of this process.
        steps: number of steps that are left.
    """
    mode = compile_mode(runtime, device, steps=steps)
    compile_photometric(mode is not None and device.type == "cuda")
    if mode is not None:
        keep_compiled_code()
        objective.compile_parts(mode)


def compile_mode(runtime: RuntimeConfig, device: torch.device, *, steps: int) -> CompileMode | None:
    """Return the mode of torch.compile, None for no compilation; arguments as in `compile_objective`."""
    if runtime.compile == "auto":
        if device.type != "cuda" or steps < STEPS or runtime.devices not in (1, "1") or runtime.num_nodes > 1:
            return None
        if (missing := _missing(device)) is not None:
            log.info("the training is not compiled, because %s", missing)
            return None
        log.info("compiling for %d steps: the first ones take a minute or two (off: --runtime.compile none)", steps)
        return "default"
    return None if isinstance(runtime.compile, bool) or runtime.compile == "none" else runtime.compile


def _missing(device: torch.device) -> str | None:
    """Return what compiling for a GPU lacks; None if nothing."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    if torch.cuda.get_device_capability(device) < _CAPABILITY:
        return "the GPU is too old for Triton"
    compilers = (os.environ.get("CC"), "gcc", "clang", "cc")
    if not any(name and shutil.which(name) for name in compilers):
        return "there is no C compiler: install gcc"
    return None
