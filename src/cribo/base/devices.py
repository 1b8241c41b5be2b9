"""Default devices, their free memory, numbers of workers, and bfloat16 support of the CPU."""

import platform
import sys
from collections.abc import Sequence
from typing import Any

import psutil
import torch
from torch import Tensor

from cribo.base.errors import ConfigError
from cribo.base.machine import available_cores, free_memory_of_groups, keep_freed_memory

_MAX_WORKERS = 16
_THREADS_PER_WORKER = 2  # one core for the worker, one for the network


def resolve_devices(names: Sequence[str] | None, option: str = "runtime.devices") -> tuple[str, ...]:
    """Return the named devices; by default all GPUs, or the CPU without a GPU.

    Args:
        names: such as `cuda:0`; None selects the default.
        option: name of the option, for error messages.

    Raises:
        ConfigError: a device is unavailable, the devices are of different types, or `names` is empty.
    """
    if names is None:
        return tuple(f"cuda:{number}" for number in range(torch.cuda.device_count())) or ("cpu",)
    for name in names:
        try:
            torch.empty(1, device=name)
        except Exception as error:  # the type depends on the backend
            reason = str(error).partition("\n")[0]
            raise ConfigError(f"{option}: {name!r} cannot be used ({reason}): use cpu") from error
    if len({torch.device(name).type for name in names}) != 1:
        raise ConfigError(f"{option} must be one or more devices of the same type, got {','.join(names)!r}")
    return tuple(names)


def resolve_device(name: str | None) -> str:
    """Return the device of an option `device`: by default the first GPU, else the CPU, with its freed memory kept.

    Raises:
        ConfigError: the device is unavailable.
    """
    device = resolve_devices(None if name is None else (name,), "device")[0]
    if device == "cpu":
        keep_freed_memory()
    return device


def resolve_workers(number: int | None) -> int:
    """Return the number of data loading workers: `number`, by default half of the cores and at most 16."""
    if number is not None:
        return number
    return min(_MAX_WORKERS, available_cores() // _THREADS_PER_WORKER)


def resolve_threads(number: int | None) -> int:
    """Return the number of threads that read images: `number`, by default half of the cores of this process."""
    if number is None:
        number = resolve_workers(None)
        if "ray" in sys.modules:  # a worker of Ray has fewer cores than the machine, and torch as many threads
            number = min(number, torch.get_num_threads())
    return max(1, number)


def multiplies_bfloat16() -> bool:
    """Whether the processor has instructions for bfloat16 matrix products (AVX512-BF16, AMX or Arm's BF16).

    Without them, PyTorch emulates these products, several times slower than float32 products.

    Example:
        >>> multiplies_bfloat16() in (True, False)
        True
    """
    if platform.machine().lower() in ("x86_64", "amd64"):
        checks = [getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")]
    else:
        checks = [getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)]
    return any(check() for check in checks if check is not None)


def available_memory(device: torch.device | str) -> int:
    """Return the free memory of a device in bytes.

    On the CPU, this respects the limits of control groups, which containers and SLURM set.
    """
    device = torch.device(device)
    if device.type == "cuda":
        # Include memory that PyTorch has reserved but does not use.
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    return min((psutil.virtual_memory().available, *free_memory_of_groups()))


class HostCopy:
    """Copy of a small tensor on the host, which a GPU makes when it gets there; only `read` waits for it.

    Work that is launched between creating and reading the copy keeps the GPU busy meanwhile.

    Example:
        >>> HostCopy(torch.tensor([3, 1])).read()
        [3, 1]
    """

    def __init__(self, tensor: Tensor) -> None:
        self._copy = tensor.detach().to("cpu", non_blocking=True)
        self._copied: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(tensor.device))

    def read(self) -> list[Any]:
        """Return the numbers, waiting for the copy."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._copy.tolist()
