"""Which devices and how many worker processes to use by default, and what a processor can do."""

import os
import platform
from collections.abc import Sequence

import torch

from cribo.arguments import ConfigError

_MAX_WORKERS = 16
_THREADS_PER_WORKER = 2  # a worker keeps a core busy; others are needed for the network


def resolve_devices(names: Sequence[str] | None, option: str = "runtime.devices") -> tuple[str, ...]:
    """The devices to use: those named, or all GPUs, or the CPU where there is none.

    Args:
        names: such as `cuda:0`; None leaves it open.
        option: what the user calls them, for messages.

    Raises:
        ConfigError: one of them is not there, they are of several kinds, or there are none.
    """
    if names is None:
        return tuple(f"cuda:{number}" for number in range(torch.cuda.device_count())) or ("cpu",)
    for name in names:
        try:
            torch.empty(1, device=name)
        except Exception as error:  # each backend has its own for a device that is not there
            reason = str(error).partition("\n")[0]
            raise ConfigError(f"{option}: {name!r} cannot be used ({reason}): use cpu") from error
    if len({torch.device(name).type for name in names}) != 1:
        raise ConfigError(f"{option} must be of one kind, at least one, got {','.join(names)!r}")
    return tuple(names)


def resolve_workers(number: int | None) -> int:
    """The number of processes that read images: the one given, or half of the cores, and 16 at most."""
    if number is not None:
        return number
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(_MAX_WORKERS, cores // _THREADS_PER_WORKER)


def multiplies_bfloat16() -> bool:
    """Whether this machine's processor has instructions for products of bfloat16 (AVX512-BF16, AMX, Arm's BF16).

    Without them such products are emulated, several times slower than those of float32.

    Example:
        >>> multiplies_bfloat16() in (True, False)
        True
    """
    if platform.machine().lower() in ("x86_64", "amd64"):
        checks = [getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")]
    else:
        checks = [getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)]
    return any(check() for check in checks if check is not None)
