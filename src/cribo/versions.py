"""Versions of the software and the hardware that results depend on."""

import importlib.metadata
import os
import platform
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_PACKAGES = {"cribo": "cribo-ssl", **{name: name for name in ("torch", "torchvision", "timm", "numpy")}}


def versions(device: "torch.device | str" = "cpu") -> dict[str, str]:
    """Return the versions of the software that results depend on, and a description of the `hardware`.

    Args:
        device: device of the evaluation.
    """
    import torch

    packages = {name: importlib.metadata.version(package) for name, package in _PACKAGES.items()}
    device = torch.device(device)
    if device.type == "cuda":
        hardware = f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"
    else:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        hardware = f"{'' if device.type == 'cpu' else f'{device.type}, '}{_processor()}, {cores} cores"
    return {**packages, "python": platform.python_version(), "hardware": hardware}


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text(encoding="utf-8", errors="replace") if cpuinfo.is_file() else ""
    name = re.search(r"^model name\s*: (.+)", text, re.MULTILINE)
    return name[1] if name else platform.processor() or platform.machine()
