"""The processor: instructions that cribo uses, cores, threads and other programs."""

import os
import platform
from contextlib import suppress

from cribo.base.machine import available_cores, core_limit
from cribo.base.versions import processor_name
from cribo.cli.doctor.findings import Section

_INSTRUCTIONS = {
    "AVX2": "_is_avx2_supported",
    "AVX512": "_is_avx512_supported",
    "AVX512-BF16": "_is_avx512_bf16_supported",
    "AMX": "_is_amx_tile_supported",
}
"""Instructions of x86 processors, and the functions of `torch.cpu` that detect them."""

_BUSY = 0.25  # share of the processor in use by other programs from which it is a problem
_SECONDS = 0.5  # over which this share is measured


def examine_processor(section: Section) -> None:
    """Add the model, the instructions and what they are used for, cores, threads and other programs."""
    section.note("model", processor_name)
    section.note("cores", _cores)
    section.note("other programs", lambda: _other_programs(section))
    section.note("instructions", lambda: ", ".join(name for name, has in _instructions().items() if has) or "basic")
    section.note("bfloat16", _bfloat16)
    section.note("threads", _threads)
    section.check(_without_avx2)
    section.check(_too_many_threads)
    section.check(_too_few_threads)


def usable_cores() -> float:
    """Return the number of cores that this process may use, by its affinity and its control groups."""
    return min(available_cores(), core_limit() or float("inf"))


def _other_programs(section: Section) -> str:
    """Measure the share of the processor that other programs use; this process sleeps meanwhile."""
    import psutil

    share = psutil.cpu_percent(interval=_SECONDS) / 100
    if share >= _BUSY:
        section.problems.append(
            f"other programs use {share:.0%} of the processor, so commands are slower than on an idle machine: end "
            "them, or expect longer durations"
        )
    return f"use {share:.0%} of the processor now"


def _cores() -> str:
    limit = core_limit()
    by_group = "" if limit is None else f", control group limits them to {limit:g}"
    return f"{available_cores()} of {os.cpu_count()} for this process{by_group}"


def _instructions() -> dict[str, bool]:
    import torch

    if platform.machine().lower() not in ("x86_64", "amd64"):
        return {torch.backends.cpu.get_cpu_capability(): True}
    found = {}
    for name, check in _INSTRUCTIONS.items():
        with suppress(AttributeError):  # torch does not promise these functions
            found[name] = bool(getattr(torch.cpu, check)())
    return found


def _bfloat16() -> str:
    from cribo.base.devices import multiplies_bfloat16

    if multiplies_bfloat16():
        return "native: used by adapt and exact search"
    return "not native: adapt trains in float32; bf16-mixed would be slower than 32-true"


def _threads() -> str:
    import torch

    return f"{torch.get_num_threads()} of torch"


def _without_avx2() -> str | None:
    if _instructions().get("AVX2", True):
        return None
    return "the processor has no AVX2, or a virtual machine hides it: training takes several times as long; use another"


def _too_many_threads() -> str | None:
    import torch

    threads, cores = torch.get_num_threads(), usable_cores()
    if threads <= max(1, round(cores)):
        return None
    return (
        f"torch uses {threads} threads, but may use {cores:g} cores, so that threads compete for cores: set "
        f"OMP_NUM_THREADS={max(1, int(cores))}"
    )


def _too_few_threads() -> str | None:
    import torch

    threads, cores = torch.get_num_threads(), int(usable_cores())
    if torch.cuda.is_available() or 2 * threads > cores or "OMP_NUM_THREADS" not in os.environ:
        return None
    return (
        f"OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']} limits torch to {threads} of {cores} cores: unset it, or set "
        f"it to {cores}"
    )
