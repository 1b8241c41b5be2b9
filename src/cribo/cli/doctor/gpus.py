"""GPUs, their driver, and whether the installed torch can use them."""

import os
import re
import shutil
import subprocess
import warnings

from cribo.cli.doctor.findings import Section, described, gib
from cribo.cli.doctor.software import build

_GET_TORCH = "see pytorch.org/get-started"
_SECONDS = 20.0  # nvidia-smi hangs on some machines with a broken driver


def examine_devices(section: Section) -> None:
    """Add the GPUs, with advice if torch cannot use them."""
    installed = _listed_by_driver(section)
    import torch

    with warnings.catch_warnings():  # torch warns about drivers; the reason is found below
        warnings.simplefilter("ignore")
        usable = torch.cuda.device_count() if torch.cuda.is_available() else 0
        for number in range(usable):
            section.note(f"cuda:{number}", lambda number=number: _described(number))
            section.check(lambda number=number: _unsupported(number))
        if not usable:
            section.note("GPU", lambda: installed[0] if installed else "none")
            section.check(lambda: _unusable(installed))
    if torch.backends.mps.is_available():
        section.facts["mps"] = "Apple GPU; used only with --device mps or --runtime.accelerator mps"
    if usable > 1:
        section.facts["several GPUs"] = f"pretrain uses one unless --runtime.devices {usable}"
    if not usable and not installed and torch.version.cuda:
        section.facts["advice"] = f"on machines without a GPU, the CPU build of torch saves gigabytes ({_GET_TORCH})"
    section.facts["default"] = "cuda:0" if usable else "cpu"


def _listed_by_driver(section: Section) -> list[str]:
    """Return the names of the GPUs that the NVIDIA driver lists, and add its version."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, "--query-gpu=driver_version,name,memory.total", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=_SECONDS, check=True).stdout
        rows = [[cell.strip() for cell in line.split(",")] for line in answer.splitlines() if line.count(",") == 2]
    except (OSError, subprocess.SubprocessError) as error:
        section.facts["driver"] = f"nvidia-smi fails ({described(error)})"
        section.problems.append("the NVIDIA driver does not work (nvidia-smi fails): reinstall it or restart")
        return []
    if rows:
        section.facts["driver"] = rows[0][0]
    return [f"{name}, {memory}" for _, name, memory in rows]


def _described(number: int) -> str:
    import torch

    about = torch.cuda.get_device_properties(number)
    free, total = torch.cuda.mem_get_info(number)
    has_bfloat16 = about.major >= 8 or bool(torch.version.hip)
    return (
        f"{about.name}, {gib(total)} ({gib(free)} free), compute capability {about.major}.{about.minor}, "
        f"bfloat16 {'yes' if has_bfloat16 else 'no: use --runtime.precision 16-mixed'}"
    )


def _unsupported(number: int) -> str | None:
    """Return the problem of a GPU for which the installed torch has no kernels."""
    import torch

    about = torch.cuda.get_device_properties(number)
    if torch.version.hip or supports(torch.cuda.get_arch_list(), about.major, about.minor):
        return None
    return (
        f"torch ({build()}) has no kernels for {about.name}, compute capability {about.major}.{about.minor}: install a "
        f"build of torch that supports it ({_GET_TORCH})"
    )


def supports(architectures: list[str], major: int, minor: int) -> bool:
    """Whether a build of torch has kernels for a compute capability, or code that the driver can compile for it.

    Example:
        >>> built = ["sm_80", "sm_90", "compute_90"]
        >>> supports(built, 8, 6), supports(built, 7, 5), supports(built, 12, 0), supports(built[:2], 12, 0)
        (True, False, True, False)
    """
    for architecture in architectures:
        kind, _, digits = architecture.partition("_")
        if found := re.match(r"(\d+)(\d)", digits):
            built = int(found[1]), int(found[2])
            if built <= (major, minor) and (kind == "compute" or built[0] == major):
                return True
    return False


def _unusable(installed: list[str]) -> str | None:
    """Return why torch does not use the GPUs that the driver lists."""
    if not installed:
        return None
    import torch

    name = installed[0].partition(",")[0]
    if not torch.version.cuda:
        return (
            f"torch is a {build()}, so {name} is not used: install a CUDA build of torch and torchvision ({_GET_TORCH})"
        )
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return f"CUDA_VISIBLE_DEVICES={visible!r} hides {name}: unset it to use the GPU"
    try:
        torch.cuda.init()
    except Exception as error:
        return (
            f"torch cannot use {name} ({described(error)}): update its driver, or install a build of torch for "
            f"an older CUDA ({_GET_TORCH})"
        )
    return None
