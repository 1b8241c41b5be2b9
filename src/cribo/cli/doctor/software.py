"""Versions of the software, and the environment variables that change its behaviour."""

import importlib
import importlib.metadata
import os
import platform
import sys
import traceback
from importlib.resources import files

from cribo.base.packages import PACKAGE
from cribo.base.redaction import without_secrets
from cribo.cli.doctor.findings import Section, described, short

_LIBRARIES = ("torch", "torchvision", "timm", "lightning", "numpy")

_NEVER_BROKEN = {"cribo", *sys.stdlib_module_names}

_VARIABLES = (
    *("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_ENDPOINT", "TORCH_HOME", "XDG_CACHE_HOME"),
    *("CUDA_VISIBLE_DEVICES", "CUDA_HOME", "LD_LIBRARY_PATH", "PYTORCH_CUDA_ALLOC_CONF", "ATEN_CPU_CAPABILITY"),
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY", "RAY_ADDRESS", "SLURM_JOB_ID", "PYTHONPATH"),
)


def examine_software(section: Section) -> None:
    """Add the versions of this package, of Python and of the main libraries, which are imported."""
    section.note("cribo", lambda: f"{importlib.metadata.version(PACKAGE)}, {short(str(files('cribo')))}")
    section.note("python", lambda: f"{platform.python_version()}, {short(sys.executable)}")
    section.note("system", platform.platform)
    for name in _LIBRARIES:
        try:
            importlib.import_module(name)
            failed = None
        except Exception as error:  # such as a shared library that is missing, or built for another torch
            failed = described(error)
            section.problems.append(f"{name} cannot be imported ({failed}): {reinstall(error, name)}")
        section.note(name, lambda name=name, failed=failed: _version(name, failed))


def reinstall(error: Exception, imported: str) -> str:
    """Return advice to reinstall the package whose import failed, which may be a dependency of another one.

    Args:
        error: error of the import, with its traceback.
        imported: package that was imported.
    """
    modules = [str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(error.__traceback__)]
    if isinstance(error, ImportError) and error.name:
        modules.append(error.name)  # the module that is missing, or of which a part is
    names = [module.partition(".")[0] for module in modules]
    failed = next((name for name in reversed(names) if name not in _NEVER_BROKEN), imported)
    package = next(iter(importlib.metadata.packages_distributions().get(failed, ())), None)
    if package == PACKAGE:
        return "reinstall cribo from its clone or wheel"
    if package is None:  # not installed as a package: an index may have another one of this name
        return f"reinstall {failed}"
    what = "it" if failed == imported else package
    together = "torch torchvision" if package in ("torch", "torchvision") else package
    return f"reinstall {what}, pip install --force-reinstall {together}"


def _version(name: str, failed: str | None) -> str:
    version = importlib.metadata.version(name)
    if failed is not None:
        return f"{version}, cannot be imported"
    return f"{version}, {build()}" if name == "torch" else version


def build() -> str:
    """Return the kind of build of torch."""
    import torch

    if torch.version.hip:
        return f"ROCm {torch.version.hip} build"
    return f"CUDA {torch.version.cuda} build" if torch.version.cuda else "CPU build"


def examine_environment(section: Section) -> None:
    """Add the environment variables that are set, without credentials."""
    for name in _VARIABLES:
        if (value := os.environ.get(name)) is not None:
            section.facts[name] = without_secrets(":".join(short(part) for part in value.split(os.pathsep)))
    section.note("token of the Hub", lambda: "set" if _has_token() else "none: only public models can be loaded")
    section.check(_offline)


def _has_token() -> bool:
    from huggingface_hub import get_token

    return get_token() is not None


def _offline() -> str | None:
    from huggingface_hub import constants

    if not constants.HF_HUB_OFFLINE:
        return None
    return "HF_HUB_OFFLINE is set: models are loaded only if they are in the cache; unset it to download others"
