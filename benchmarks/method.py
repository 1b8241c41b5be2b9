"""Clustering, search and losses against `cribo.method.reference` and against bare matrix products.

    uv run python -m benchmarks.method                  # on the CPU, about five minutes on two idle cores
    uv run python -m benchmarks.method --device cuda

Versions are interleaved in one process, so that other load affects all of them. Times are medians; a ratio is the
median of the ratios within rounds, followed by minimum and maximum. Memory is that of a call without its inputs,
including gradients: on the CPU the growth of the resident set, on a GPU the allocator's value.
"""

import argparse
import statistics
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from benchmarks.measuring import MIB, peak_memory, timed
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from cribo.method import SelfDistillation, cluster_tokens, cross_view_loss, reference
from cribo.method.blocks import rows_per_block
from cribo.method.matching import Rows, nearest_rows

PROTOTYPES, CHANNELS = 65_536, 256

Versions = dict[str, Callable[[], Tensor | None]]
"""Functions by name; "ours" is first, and "reference" returns the same result."""


def clustering(batch: int, num_tokens: int, num_objects: int, device: str) -> Versions:
    """Cluster tokens of 384 channels."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(batch, num_tokens, 384, generator=generator).to(device)
    coordinates = (224 * torch.rand(batch, num_tokens, 2, generator=generator)).to(device)
    initial = torch.stack([torch.randperm(num_tokens, generator=generator)[:num_objects] for _ in range(batch)])
    initial = initial.to(device)
    options = {"num_objects": num_objects, "position_weight": 1.0, "initial_tokens": initial}

    def literally() -> Tensor:
        images = zip(tokens, coordinates, initial, strict=True)
        return torch.stack([reference.cluster(*image, position_weight=1.0) for image in images])

    return {"ours": lambda: cluster_tokens(tokens, coordinates, **options), "reference": literally}


def search(queries: int, rows: int, device: str) -> Versions:
    """Find the nearest bank row to each query, D = 384, 20 objects per image."""
    generator = torch.Generator().manual_seed(0)
    query, bank = (torch.randn(count, 384, generator=generator).to(device) for count in (queries, rows))
    bank = F.normalize(bank, dim=1).to(torch.float16 if device.startswith("cuda") else torch.float32)
    query_images, row_images = (torch.arange(count, device=device) // 20 for count in (queries, rows))
    allowed = query_images[:, None] != row_images
    stored = Rows(bank.expand(2, -1, -1), [slice(0, rows)], row_images)
    return {
        "ours": lambda: nearest_rows(query, stored, 0, query_images),
        "bare product": lambda: query.to(bank.dtype) @ bank.T,
        "reference": lambda: reference.nearest(query, bank.float(), allowed),
    }


def loss(rows: int, device: str) -> Versions:
    """Compute a cross-view loss of `rows` rows in total, forward and backward."""

    def unit(*shape: int) -> Tensor:
        return F.normalize(torch.randn(*shape, generator=generator), dim=-1).to(device)

    generator = torch.Generator().manual_seed(0)
    student, teacher = unit(2, rows // 2, CHANNELS).requires_grad_(), unit(2, rows // 2, CHANNELS)
    prototypes, centre = (unit(PROTOTYPES, CHANNELS) for _ in range(2)), torch.zeros(PROTOTYPES, device=device)
    ours, theirs = prototypes
    ours.requires_grad_()

    def gradients(value: Tensor) -> Tensor:
        return torch.cat([part.flatten() for part in torch.autograd.grad(value, (student, ours))])

    def literally() -> Tensor:
        logits = [(teacher[i] @ theirs.T, student[1 - i] @ ours.T) for i in (0, 1)]
        return gradients(torch.stack([reference.cross_entropy(*pair, centre, 0.04) for pair in logits]).mean())

    def of_block(s: Tensor, t: Tensor) -> Tensor:
        p_teacher = ((t @ theirs.T - centre) / 0.04).softmax(dim=1)
        return -(p_teacher * (s @ ours.T / 0.1).log_softmax(dim=1)).sum()

    def checkpointed() -> Tensor:
        size = rows_per_block(PROTOTYPES, ours.device)
        blocks = zip(student.flatten(0, 1).split(size), teacher.flip(0).flatten(0, 1).split(size), strict=True)
        losses = [checkpoint(of_block, *block, use_reentrant=False) for block in blocks]
        return gradients(torch.stack(losses).sum() / rows)

    @torch.no_grad()
    def products() -> None:
        total, size = torch.zeros_like(ours), rows_per_block(PROTOTYPES, ours.device)
        for s, t in zip(student.flatten(0, 1).split(size), teacher.flatten(0, 1).split(size), strict=True):
            _, logits = t @ theirs.T, s @ ours.T
            _ = logits @ ours
            total.addmm_(logits.T, s)

    return {
        "ours": lambda: gradients(cross_view_loss(student, teacher, SelfDistillation(ours, theirs, centre, 0.1, 0.04))),
        "checkpointed blocks": checkpointed,
        "bare products": products,
        "reference": literally,
    }


CASES: dict[str, list[tuple[str, Callable[[str], Versions]]]] = {
    "clustering": [
        (f"B = {b}, T = {t}, K = {k}", lambda device, size=(b, t, k): clustering(*size, device))
        for b, t, k in ((8, 392, 32), (64, 392, 32), (8, 392, 64), (64, 392, 64), (2, 1568, 64))
    ],
    "search": [
        (f"R = {queries}, M = {rows:,}", lambda device, size=(queries, rows): search(*size, device))
        for queries, rows in ((512, 20_000), (512, 200_000))
    ],
    "loss": [(f"R = {rows}", lambda device, rows=rows: loss(rows, device)) for rows in (512, 2048)],
}


def measure(name: str, device: str, rounds: int) -> Table:
    """Measure all cases and versions of a part."""
    table = Table(title=name)
    for column in ("case", "version", "time", "time / ours", "memory", "agreement with ours"):
        table.add_column(column, justify="left" if column in ("case", "version") else "right")
    for case, make in CASES[name]:
        versions = make(device)
        memory = {version: peak_memory(call, device) for version, call in versions.items()}
        turns = [{version: timed(call, device) for version, call in versions.items()} for _ in range(rounds)]
        for version in versions:
            ratios = [turn[version] / turn["ours"] for turn in turns]
            spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            milliseconds = 1000 * statistics.median(turn[version] for turn in turns)
            table.add_row(
                case,
                version,
                f"{milliseconds:.1f} ms",
                "" if version == "ours" else spread,
                f"{memory[version] / MIB:.0f} MiB",
                agreement(versions["ours"](), versions["reference"]()) if version == "reference" else "",
            )
    return table


def agreement(ours: Tensor | None, other: Tensor | None) -> str:
    """Format the fraction of equal integers, or the relative difference of floats."""
    assert ours is not None
    assert other is not None
    if ours.is_floating_point():
        return f"to {float((ours - other).norm() / other.norm()):.0e}"
    return f"{(ours == other).float().mean():.2%}"


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=5, help="number of measurements of each version")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="PART")
    arguments = parser.parse_args()
    device = arguments.device
    console = Console(width=None if sys.stdout.isatty() else 130)
    where = torch.cuda.get_device_name() if device.startswith("cuda") else f"CPU, {torch.get_num_threads()} threads"
    console.print(f"{where}, PyTorch {torch.__version__}, L = {PROTOTYPES:,}, E = {CHANNELS}")
    for name in arguments.only:
        console.print(measure(name, device, arguments.rounds))


if __name__ == "__main__":
    main()
