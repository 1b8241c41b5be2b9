"""Memory, shared memory, and the disks of the working folder and the caches."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from cribo.base.machine import memory_limit
from cribo.cli.doctor.findings import GIB, Section, gib, short

_SHARED = Path("/dev/shm")
_LEAST_MEMORY = 4 * GIB  # adaptation of a ViT-S/14 on a CPU, with the libraries and one worker
_LEAST_DISK = 2 * GIB
_PRESET = "coco_vits16"


def examine_storage(section: Section) -> None:
    """Add free memory and disk space, and the problems that they cause."""
    section.note("memory", _memory)
    section.check(_little_memory)
    if _SHARED.is_dir():
        section.note("/dev/shm", lambda: f"{_space(_SHARED)}, for the data of data loading workers")
        section.check(lambda: little_shared_memory(shutil.disk_usage(_SHARED).free, _needed_shared_memory()))
    section.note("this folder", lambda: f"{_space(Path())}, {short(Path().absolute())}")
    section.check(lambda: _disk_problem(Path(), "the current folder", "choose another folder with --out"))
    for name, (find, advice) in _CACHES.items():
        section.note(name, lambda find=find: f"{_space(find())}, {short(find())}")
        section.check(lambda find=find, name=name, advice=advice: _disk_problem(find(), name, advice))


def _memory() -> str:
    import psutil

    from cribo.base.devices import available_memory

    limit = memory_limit()
    by_group = "" if limit is None else f", control group limits it to {gib(limit)}"
    return f"{gib(available_memory('cpu'))} free of {gib(psutil.virtual_memory().total)}{by_group}"


def _little_memory() -> str | None:
    from cribo.base.devices import available_memory

    free = available_memory("cpu")
    if free >= _LEAST_MEMORY:
        return None
    return (
        f"only {gib(free)} of memory is free: training of a ViT-S needs about {gib(_LEAST_MEMORY)}; end other "
        "programs, raise the limit of the container, or use --optim.micro_batches and a smaller network"
    )


def _needed_shared_memory() -> int:
    """Return the bytes of shared memory that data loading workers use with a large preset."""
    from cribo.data.batches import PREFETCHED
    from cribo.pretraining.loading import load_config
    from cribo.pretraining.session import loading_workers

    config = load_config(_PRESET)
    batch = config.optim.batch_size * 2 * 3 * config.views.size**2  # two views of 8-bit pixels per image
    return (PREFETCHED * loading_workers(config) + 1) * batch


def little_shared_memory(free: int, needed: int) -> str | None:
    """Return the problem of too little shared memory.

    Args:
        free: free bytes.
        needed: bytes that workers use with a large preset.
    """
    if free >= needed:
        return None
    return (
        f"/dev/shm has {gib(free)} free, but the workers of pretrain --config {_PRESET} use {gib(needed)}: start the "
        f"container with more (docker run --shm-size {-(-needed // GIB)}g), or use fewer --data.workers"
    )


def _torch_cache() -> Path:
    import torch

    return Path(torch.hub.get_dir())


def _hub_cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _own_cache() -> Path:
    from cribo.pretraining.config import DataConfig

    return Path(DataConfig.cache_dir).expanduser()


_CACHES: dict[str, tuple[Callable[[], Path], str]] = {
    "cache of torch": (_torch_cache, "set TORCH_HOME to another folder"),
    "cache of the Hub": (_hub_cache, "set HF_HOME to another folder"),
    "cache of cribo": (_own_cache, "set --data.cache_dir to another folder"),
}
"""For each cache, its folder and how to change it."""


def _existing(path: Path) -> Path:
    """Return the path or its nearest parent that exists, in which the path would be created."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())


def _space(path: Path) -> str:
    return f"{gib(shutil.disk_usage(_existing(path)).free)} free"


def _disk_problem(path: Path, name: str, advice: str) -> str | None:
    folder = _existing(path)
    if not os.access(folder, os.W_OK):
        return f"{name} cannot be written ({short(path.absolute())}): change its permissions, or {advice}"
    free = shutil.disk_usage(folder).free
    if free < _LEAST_DISK:
        return f"{name} has only {gib(free)} free ({short(path.absolute())}): free some space, or {advice}"
    return None
