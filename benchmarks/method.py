"""Time and memory of the method's parts against plain versions of the same formulas, in one run.

    uv run python -m benchmarks.method                  # on the CPU, about two minutes on two idle cores
    uv run python -m benchmarks.method --device cuda

Both versions of a part run in turn in one process, so that a busy machine slows both; times are medians, and
the ratio is the median of the rounds' own ratios. Peak memory is what a call needs beyond its inputs: on the CPU the
growth of the resident set in a fresh process per version, on a GPU the allocator's own figure.
"""

import argparse
import ctypes
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from benchmarks import literal
from rich.console import Console
from rich.table import Table
from torch import Tensor

from cribo.method import (
    Photometric,
    SelfDistillation,
    ViewRecipe,
    apply_photometric,
    cluster_tokens,
    normalise,
    prototype_loss,
    sample_photometric,
)
from cribo.method.matching import inverse_norms, nearest_rows

MIB = 2**20


@dataclass(frozen=True)
class Pair:
    """The package's version of a part and the plain one, ready to be called, and how far their results agree."""

    ours: Callable[[], object]
    plain: Callable[[], object]
    agreement: Callable[[], str]


def clustering(device: str, *, num_objects: int) -> Pair:
    """B = 8 images, N = 196 tokens a view, D = 384."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(8, 392, 384, generator=generator).to(device)
    coordinates = (224 * torch.rand(8, 392, 2, generator=generator)).to(device)
    initial = torch.stack([torch.randperm(392, generator=generator)[:num_objects] for _ in range(8)]).to(device)

    def ours() -> Tensor:
        return cluster_tokens(tokens, coordinates, num_objects=num_objects, position_weight=1.0, initial_tokens=initial)

    def plain() -> Tensor:
        return literal.cluster(tokens, coordinates, initial, position_weight=1.0)

    return Pair(ours, plain, lambda: f"{(ours() == plain()).float().mean():.2%} of labels")


def search(device: str) -> Pair:
    """512 objects in a bank of 25,000 images with 8 objects each, D = 384."""
    generator = torch.Generator().manual_seed(0)
    bank = torch.empty(200_000, 384)
    for part in bank.split(10_000):  # in place, so that making the inputs leaves no peak of its own
        part.copy_(F.normalize(torch.randn(part.shape, generator=generator), dim=-1))
    bank = bank.to(device)
    queries = F.normalize(torch.randn(512, 384, generator=generator), dim=-1).to(device)
    norms = inverse_norms(bank)

    def ours() -> Tensor:
        return nearest_rows(queries, [bank], [norms])

    def plain() -> Tensor:
        return literal.search(queries, bank)

    return Pair(ours, plain, lambda: f"{(ours() == plain()).float().mean():.2%} of rows")


def loss(device: str) -> Pair:
    """512 rows, E = 256, L = 65,536, forward and backward, with gradients of embeddings and prototypes."""
    generator = torch.Generator().manual_seed(0)

    def rows(count: int) -> Tensor:
        return F.normalize(torch.randn(count, 256, generator=generator), dim=-1).to(device)

    student, teacher = rows(512).requires_grad_(), rows(512)
    student_prototypes, teacher_prototypes = rows(65_536).requires_grad_(), rows(65_536)
    centre = torch.zeros(65_536, device=device)

    def gradients(value: Tensor) -> tuple[Tensor, ...]:
        return value.detach(), *torch.autograd.grad(value, (student, student_prototypes))

    def ours() -> tuple[Tensor, ...]:
        level = SelfDistillation(student_prototypes, teacher_prototypes, centre, 0.1, 0.04)
        return gradients(prototype_loss(student, teacher, level))

    def plain() -> tuple[Tensor, ...]:
        return gradients(
            literal.prototype_loss(student, teacher, student_prototypes, teacher_prototypes, centre, 0.1, 0.04)
        )

    def agreement() -> str:
        worst = max(float((a - b).norm() / b.norm()) for a, b in zip(ours(), plain(), strict=True))
        return f"to {worst:.0e} relative"

    return Pair(ours, plain, agreement)


def photometric(device: str) -> Pair:
    """32 views of 224 px, 8-bit in, normalised out; the plain version is torchvision, one view at a time."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(32, 3, 14, 14, generator=generator)
    views = (255 * F.interpolate(coarse, (224, 224), mode="bilinear")).to(torch.uint8).to(device)
    parameters = Photometric.cat([sample_photometric(ViewRecipe(), generator=generator) for _ in range(16)])

    def ours() -> Tensor:
        return apply_photometric(views, parameters)

    def plain() -> Tensor:
        return normalise(torch.stack([literal.photometric(view, parameters, row) for row, view in enumerate(views)]))

    return Pair(ours, plain, lambda: f"to {(ours() - plain()).abs().median():.0e}")


CASES: dict[str, Callable[[str], Pair]] = {
    "clustering, K = 32": lambda device: clustering(device, num_objects=32),
    "clustering, K = 64": lambda device: clustering(device, num_objects=64),
    "search": search,
    "prototype loss": loss,
    "photometric": photometric,
}


def timed(call: Callable[[], object], device: str) -> float:
    """Seconds of one call."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter() - start


def times(pair: Pair, device: str, rounds: int) -> tuple[float, float, float]:
    """Median seconds of ours and of the plain version, and the median ratio, the two taking turns."""
    pair.ours()
    # A call of milliseconds is at the mercy of whatever else runs: several of them make a round.
    repeats = 9 if timed(pair.ours, device) < 0.2 else 1
    ours, plain = [], []
    for _ in range(rounds):
        ours.append(statistics.median(timed(pair.ours, device) for _ in range(repeats)))
        plain.append(timed(pair.plain, device))
    ratios = [slow / fast for slow, fast in zip(plain, ours, strict=True)]
    return statistics.median(ours), statistics.median(plain), statistics.median(ratios)


def resident(field: str) -> int:
    """Bytes of a field of the process's status: VmRSS now, VmHWM the most since it was last reset."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def peak_memory(call: Callable[[], object], device: str) -> int:
    """Bytes that a call needs beyond what is there before it; on the CPU, for a fresh process on Linux."""
    if device.startswith("cuda"):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        return torch.cuda.max_memory_allocated() - before
    # Libraries set themselves up at first use; freed pages go back, or the call would use them unseen.
    small = torch.randn(4, 64, 64, requires_grad=True)
    (small @ small).softmax(dim=-1).sum().backward()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    call()
    return max(0, resident("VmHWM") - before)


def peak_memory_apart(name: str, version: str, device: str) -> int | None:
    """`peak_memory` in a process of its own; None where the system does not tell (no Linux)."""
    if not sys.platform.startswith("linux"):
        return None
    command = [sys.executable, "-m", "benchmarks.method", "--device", device, "--memory-of", name, version]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ})
    return json.loads(done.stdout)


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=7, help="how often each pair is timed")
    parser.add_argument("--only", choices=CASES, help="one of the parts")
    parser.add_argument("--memory-of", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory_of:
        name, version = arguments.memory_of
        print(json.dumps(peak_memory(getattr(CASES[name](arguments.device), version), arguments.device)))
        return

    device = arguments.device
    where = torch.cuda.get_device_name() if device.startswith("cuda") else f"CPU, {torch.get_num_threads()} threads"
    table = Table(title=f"cribo.method against plain formulas, {where}, PyTorch {torch.__version__}")
    for column in ("part", "ours", "plain", "times faster", "memory, ours", "memory, plain", "agreement"):
        table.add_column(column, justify="left" if column in ("part", "agreement") else "right")
    for name in [arguments.only] if arguments.only else CASES:
        pair = CASES[name](device)
        ours, plain, ratio = times(pair, device, arguments.rounds)
        agreement = pair.agreement()
        if device.startswith("cuda"):
            memory = [peak_memory(call, device) for call in (pair.ours, pair.plain)]
        else:
            del pair
            memory = [peak_memory_apart(name, version, device) for version in ("ours", "plain")]
        table.add_row(
            name,
            f"{1000 * ours:.1f} ms",
            f"{1000 * plain:.1f} ms",
            f"{ratio:.1f}",
            *("?" if size is None else f"{size / MIB:.0f} MiB" for size in memory),
            agreement,
        )
    Console(width=None if sys.stdout.isatty() else 140).print(table)


if __name__ == "__main__":
    main()
