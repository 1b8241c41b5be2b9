"""Versions of the software and the hardware that results depend on."""

import importlib.metadata
import os
import platform
import re
from pathlib import Path
from typing import TYPE_CHECKING

from cribo.base.packages import PACKAGE

if TYPE_CHECKING:
    import torch

_PACKAGES = {"cribo": PACKAGE, **{name: name for name in ("torch", "torchvision", "timm", "numpy")}}


def project_url(label: str) -> str | None:
    """Return an address of the project, such as `Issues`, from the package's metadata; None if it has none."""
    for entry in importlib.metadata.metadata(PACKAGE).get_all("Project-URL") or ():
        name, _, address = entry.partition(",")
        if name.strip() == label:
            return address.strip()
    return None


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
        hardware = f"{'' if device.type == 'cpu' else f'{device.type}, '}{processor_name()}, {cores} cores"
    return {**packages, "python": platform.python_version(), "hardware": hardware}


def processor_name() -> str:
    """Return the model of the processor, or its architecture if the model is unknown."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text(encoding="utf-8", errors="replace") if cpuinfo.is_file() else ""
    name = re.search(r"^model name\s*: (.+)", text, re.MULTILINE)
    return name[1] if name else platform.processor() or platform.machine()
