"""Exact nearest-neighbour search against faiss's flat index, in one run, and how it scales.

    uv run python -m benchmarks.search --threads 2      # on the CPU, about ten minutes on two idle cores
    uv run python -m benchmarks.search --device cuda    # faiss stays on the CPU, where its wheels run

Ours and faiss take turns in one process with the same number of threads, so that a busy machine slows both; times are
medians, and the ratio is the median of the rounds' own ratios. Rows are random and of unit length, the worst case for
the index and no help to a running selection.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import faiss
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from cribo.retrieval.search import Neighbours, TensorKeys, nearest, recall


@dataclass(frozen=True)
class Case:
    """A search: how many of what."""

    name: str
    keys: int
    queries: int
    dim: int
    neighbours: int


CASES = (
    Case("CamVid, ViT-S", 240_000, 6_600, 384, 50),
    Case("CamVid, ViT-S", 240_000, 6_600, 384, 30),
    Case("CamVid, ViT-B", 240_000, 6_600, 768, 50),
    Case("CamVid, mean colour", 240_000, 6_600, 3, 50),
    Case("a million patches", 1_000_000, 2_000, 384, 50),
)
SCALING = tuple(Case("", keys, 2_000, dim, 50) for dim in (3, 384, 768) for keys in (50_000, 200_000, 1_000_000))
LEAST = Case("", 2_000, 200, 16, 5)


def unit_rows(rows: int, dim: int, seed: int) -> Tensor:
    """Random directions."""
    found = torch.empty(rows, dim)
    generator = torch.Generator().manual_seed(seed)
    for part in found.split(50_000):
        part.copy_(F.normalize(torch.randn(part.shape, generator=generator), dim=-1))
    return found


def timed(call: Callable[[], Neighbours]) -> tuple[float, Neighbours]:
    """Seconds of one call, and what it found: on the host, so a GPU has finished."""
    start = time.perf_counter()
    found = call()
    return time.perf_counter() - start, found


@dataclass(frozen=True)
class Measured:
    """Median seconds of ours and of faiss, the median ratio, and how far the neighbours agree."""

    ours: float
    flat: float
    ratio: float
    agreement: float


def measure(case: Case, device: str, rounds: int) -> Measured:
    """Ours and faiss in turn; `agreement` is the share of faiss's neighbours that ours found, ties included."""
    rows, queries = unit_rows(case.keys, case.dim, 0), unit_rows(case.queries, case.dim, 1)
    index = faiss.IndexFlatIP(case.dim)
    index.add(rows.numpy())
    keys = TensorKeys(rows)

    def flat() -> Neighbours:
        similarity, found = index.search(queries.numpy(), case.neighbours)
        return Neighbours(torch.from_numpy(similarity), torch.from_numpy(found))

    def ours() -> Neighbours:
        return nearest(queries, keys, case.neighbours, devices=(device,))

    nearest(queries[:64], keys, case.neighbours, devices=(device,))  # libraries set themselves up at first use
    turns = [(timed(ours), timed(flat)) for _ in range(rounds)]
    return Measured(
        ours=statistics.median(mine[0] for mine, _ in turns),
        flat=statistics.median(theirs[0] for _, theirs in turns),
        ratio=statistics.median(theirs[0] / mine[0] for mine, theirs in turns),
        agreement=recall(turns[0][0][1], turns[0][1][1]),
    )


def table(title: str, cases: tuple[Case, ...], threads: tuple[int, ...], device: str, rounds: int) -> Table:
    """A row for each case and number of threads."""
    found = Table(title=title)
    columns = ("case", "keys", "queries", "D", "k", "threads", "ours", "faiss", "times faster", "GFLOP/s", "agreement")
    for column in columns:
        found.add_column(column, justify="left" if column == "case" else "right")
    for case in cases:
        for number in threads:
            torch.set_num_threads(number)
            faiss.omp_set_num_threads(number)
            measured = measure(case, device, rounds)
            speed = 2 * case.keys * case.queries * case.dim / measured.ours / 1e9
            found.add_row(
                *(case.name, f"{case.keys:,}", f"{case.queries:,}", str(case.dim), str(case.neighbours), str(number)),
                *(f"{measured.ours:.2f} s", f"{measured.flat:.2f} s", f"{measured.ratio:.2f}"),
                *(f"{speed:.0f}", f"{measured.agreement:.4%}"),
            )
    return found


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of both, on the CPU")
    parser.add_argument("--rounds", type=int, default=5, help="how often each search is timed")
    parser.add_argument("--only", choices=("cases", "scaling", "least"), help="one of the tables; least: a quick check")
    arguments = parser.parse_args()
    where = torch.cuda.get_device_name() if arguments.device.startswith("cuda") else "CPU"
    versions = f"{where}, PyTorch {torch.__version__}, faiss {faiss.__version__}"
    console = Console(width=None if sys.stdout.isatty() else 140)
    both = tuple(sorted({1, arguments.threads}))
    if arguments.only in (None, "cases"):
        title = f"exact search against faiss's flat index, {versions}"
        console.print(table(title, CASES, (arguments.threads,), arguments.device, arguments.rounds))
    if arguments.only in (None, "scaling"):
        title = f"how it scales, {versions}"
        console.print(table(title, SCALING, both, arguments.device, max(1, arguments.rounds // 2)))
    if arguments.only == "least":
        console.print(table(versions, (LEAST,), (arguments.threads,), arguments.device, arguments.rounds))


if __name__ == "__main__":
    main()
