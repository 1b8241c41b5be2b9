"""The search in a memory bank against the bare matrix product, and against a plain blockwise search, in one run.

    uv run python -m benchmarks.bank                          # on the CPU, about five minutes on two idle cores
    uv run python -m benchmarks.bank --device cuda            # 128 x 32 queries, 25,000 x 32 rows
    uv run python -m benchmarks.bank --checkpoint runs/x/checkpoints/last.ckpt    # also the rows of a run's own bank

All versions take turns in one process, so that a busy machine slows all; times are medians of the rounds with their
spread, and ratios are medians of the rounds' own ratios. Everything is for both views. A bare product multiplies
queries and rows block by block and keeps nothing: by the faster of PyTorch's own library and oneDNN in float32, and at
the precision of the first pass (bfloat16 on a CPU, float16 on a GPU). The plain search is `nearest_rows`: float32, a
block of similarities at a time. Rows: `random` directions are far from all queries and from each other; `clustered`
ones share a mean direction, one of 27 classes and their image's own direction (cosine to the nearest about 0.95).
`collapsed` ones are one vector and a little noise (cosines of 0.99999), `in places` five such vectors, `half` are
collapsed and random ones in turn, and `copies` are fifty rows, each many times.
Memory is what a call needs beyond its inputs; the bank's own size is in the title.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from benchmarks.measuring import MIB, peak_memory, timed
from rich.console import Console
from rich.table import Table
from torch import Tensor

from cribo.method import MemoryBank
from cribo.method.matching import nearest_rows
from cribo.method.products import product
from cribo.method.rings import Ring
from cribo.method.search import _first_tiles, _Search, nearest_in_rings

BLOCK = 4096
KINDS = ("random", "clustered", "collapsed", "in places", "half", "copies")


@dataclass(frozen=True)
class Sizes:
    """Images and objects of each in the bank, queries, channels."""

    images: int
    objects: int
    queries: int
    dim: int


@dataclass(frozen=True)
class Case:
    """A bank and what is searched in it."""

    bank: MemoryBank
    queries: Tensor
    images: Tensor


def directions(kind: str, sizes: Sizes, count: int, generator: torch.Generator) -> Tensor:
    """Rows (2, count, D), the views of an object resembling each other."""
    shared = torch.Generator().manual_seed(7)
    if kind == "copies":
        few = torch.randn(2, 50, sizes.dim, generator=shared)
        return few[:, torch.randint(50, (count,), generator=generator)]
    noise = torch.randn(2, count, sizes.dim, generator=generator)
    if kind == "random":
        return noise
    middle = torch.randn(sizes.dim, generator=shared)
    if kind in ("collapsed", "half"):
        rows = middle + 0.003 * noise
        return torch.where(torch.arange(count)[:, None] % 2 == 0, noise, rows) if kind == "half" else rows
    if kind == "in places":
        places = torch.randn(5, sizes.dim, generator=shared)
        return noise.mul_(0.003).add_(places[torch.randint(5, (count,), generator=generator)])
    classes = 2 * torch.randn(27, sizes.dim, generator=shared)
    own = torch.randn(-(-count // sizes.objects), sizes.dim, generator=generator).repeat_interleave(sizes.objects, 0)
    label = torch.randint(27, (count,), generator=generator)
    return noise.mul_(0.3).add_(middle + classes[label] + 0.5 * own[:count])


def make(kind: str, sizes: Sizes, device: str) -> Case:
    """A full bank of made-up rows, filled in parts so that it leaves no peak of its own."""
    generator = torch.Generator().manual_seed(0)
    bank = MemoryBank(num_images=sizes.images, num_objects=sizes.objects, dim=sizes.dim, **_kept(device))
    for part in torch.arange(sizes.images).split(1000):
        rows = directions(kind, sizes, len(part) * sizes.objects, generator)
        bank.push(rows.to(device), part.repeat_interleave(sizes.objects).to(device), [sizes.objects] * len(part))
    queries = directions(kind, sizes, sizes.queries, generator).to(device)
    images = sizes.images + torch.arange(sizes.queries, device=device) // sizes.objects
    return Case(bank, queries, images)


def read(path: str, queries: int, device: str) -> Case:
    """The bank of a run; its newest rows, which are in it too, are the queries."""
    state = torch.load(path, map_location="cpu", weights_only=True)["cribo"]["bank"]
    counts, rows = state["counts"], state["rows"]
    largest = max(1, int(counts.max()))
    bank = MemoryBank(num_images=len(counts), num_objects=largest, dim=rows.shape[2], **_kept(device))
    bank.load_state_dict(state)
    return Case(bank, rows[:, -queries:].to(device), state["images"][-queries:].to(device))


def _kept(device: str) -> dict:
    return {"device": device, "dtype": torch.float16 if device.startswith("cuda") else torch.float32}


def ours(case: Case) -> Tensor:
    """The bank's search."""
    rings = case.bank._ring(0), case.bank._ring(1)
    return nearest_in_rings(case.queries, case.images, rings, case.bank._first_pass)


def plain(case: Case) -> Tensor:
    """The reference, in blocks with a running maximum."""
    return torch.stack([_compare_all(case.queries[view], case.bank._ring(view), case.images) for view in (0, 1)])


def _compare_all(queries: Tensor, ring: Ring, images: Tensor) -> Tensor:
    live = ring.live()
    return nearest_rows(
        queries,
        [ring.rows[part] for part in live],
        [ring.inverse_norms[part] for part in live],
        query_images=images,
        segment_images=[ring.images[part] for part in live],
    )


def multiply(multiplied: Callable[[Tensor, Tensor], Tensor], rows: Tensor, queries: Tensor) -> None:
    """Products of both views, one block after the other."""
    for view in (0, 1):
        for block in rows[view].split(BLOCK if rows.device.type == "cpu" else 8 * BLOCK):
            multiplied(block, queries[view])


def by_pytorch(rows: Tensor, queries: Tensor) -> Tensor:
    """PyTorch's own choice of library."""
    return rows @ queries.T


VERSIONS = ("ours", "plain search", "product, float32", "product, half precision")


def calls(case: Case) -> dict[str, Callable[[], object]]:
    """All versions, by the names in `VERSIONS`."""
    half = torch.bfloat16 if case.queries.device.type == "cpu" else torch.float16
    rows = case.bank._rows
    exact = min((product, by_pytorch), key=lambda function: _seconds(function, rows.float(), case.queries))
    halved, queries = rows.to(half), case.queries.to(half)
    return {
        "ours": partial(ours, case),
        "plain search": partial(plain, case),
        "product, float32": partial(multiply, exact, rows.float(), case.queries),
        "product, half precision": partial(multiply, by_pytorch, halved, queries),
    }


def _seconds(function: Callable[[Tensor, Tensor], Tensor], rows: Tensor, queries: Tensor) -> float:
    few, device = rows[:, : 8 * BLOCK], str(queries.device)
    return min(timed(partial(multiply, function, few, queries), device) for _ in range(3))


def compared(case: Case) -> str:
    """How much is left to the second pass, in words."""
    pairs = crowded = tiles = 0
    for view in (0, 1):
        queries = F.normalize(case.queries[view], dim=-1)
        ring = case.bank._ring(view)
        tiled = _first_tiles(queries, case.images, ring, case.bank._first_pass, view)
        search = _Search(queries, case.images, ring, tiled)
        left, many = (int(count) for count in search.left())
        pairs, crowded, tiles = pairs + left + case.queries.shape[1], crowded + many, len(search.slots)
    total = 2 * case.queries.shape[1]
    return (
        f"{pairs / total:.1f} of {tiles:,} tiles a query compared exactly, {crowded} of {total} queries need a second "
        "pass"
    )


def measure(name: str, case: Case, rounds: int, memory: dict[str, int | None]) -> Table:
    """A row for each version."""
    device = str(case.queries.device)
    versions = calls(case)
    turns: dict[str, list[float]] = {version: [] for version in versions}
    for call in versions.values():
        call()
    for _ in range(rounds):
        for version, call in versions.items():
            turns[version].append(timed(call, device))
    rows, dim = len(case.bank), case.queries.shape[2]
    same = float((ours(case) == plain(case)).double().mean())
    table = Table(
        title=f"{name}: {case.queries.shape[1]:,} queries, {rows:,} rows, D = {dim}, both views "
        f"({case.bank.nbytes / MIB:,.0f} MiB)",
        caption=f"{same:.3%} of neighbours as in the plain search; {compared(case)}",
    )
    references = VERSIONS[2:]
    for column in ("version", "time", "spread", *(f"times {r}" for r in references), "GFLOP/s", "memory"):
        table.add_column(column, justify="left" if column == "version" else "right")
    for version, seconds in turns.items():
        ratios = [
            statistics.median(mine / bare for mine, bare in zip(seconds, turns[reference], strict=True))
            for reference in references
        ]
        size = memory.get(version)
        table.add_row(
            version,
            f"{1000 * statistics.median(seconds):.1f} ms",
            f"{1000 * min(seconds):.1f} - {1000 * max(seconds):.1f}",
            *(f"{ratio:.2f}" for ratio in ratios),
            f"{4 * case.queries.shape[1] * rows * dim / statistics.median(seconds) / 1e9:,.0f}",
            "" if size is None else f"{size / MIB:.0f} MiB",
        )
    return table


def memory_of(kind: str, sizes: Sizes, device: str) -> dict[str, int | None]:
    """Peak of ours and of the plain search: on the CPU each in a process of its own, which Linux tells."""
    versions: dict[str, Callable[[Case], object]] = {"ours": ours, "plain search": plain}
    if device.startswith("cuda"):
        case = make(kind, sizes, device)
        return {name: peak_memory(partial(version, case), device) for name, version in versions.items()}
    if not sys.platform.startswith("linux"):
        return {}
    numbers = [f"--{name}={value}" for name, value in vars(sizes).items()]
    found: dict[str, int | None] = {}
    for name in versions:
        command = [sys.executable, "-m", "benchmarks.bank", *numbers, "--memory-of", kind, name]
        found[name] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--images", type=int, default=25_000, help="images in the bank")
    parser.add_argument("--objects", type=int, help="objects of each; 8 on a CPU, 32 on a GPU when not given")
    parser.add_argument("--queries", type=int, help="of each view; 512 on a CPU, 4096 on a GPU when not given")
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--rounds", type=int, default=7, help="how often each version is timed")
    parser.add_argument("--only", choices=KINDS, help="one kind of made-up rows")
    parser.add_argument("--checkpoint", help="of a run: its bank's own rows too")
    parser.add_argument("--memory-of", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    device = arguments.device
    on_gpu = device.startswith("cuda")
    sizes = Sizes(
        arguments.images,
        arguments.objects or (32 if on_gpu else 8),
        arguments.queries or (4096 if on_gpu else 512),
        arguments.dim,
    )
    if arguments.memory_of:
        kind, version = arguments.memory_of
        call = partial({"ours": ours, "plain search": plain}[version], make(kind, sizes, device))
        print(json.dumps(peak_memory(call, device)))
        return

    where = torch.cuda.get_device_name() if on_gpu else f"CPU, {torch.get_num_threads()} threads"
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(f"search in the memory bank, {where}, PyTorch {torch.__version__}")
    for kind in [arguments.only] if arguments.only else KINDS:
        memory = memory_of(kind, sizes, device)
        console.print(measure(kind, make(kind, sizes, device), arguments.rounds, memory))
    if arguments.checkpoint:
        case = read(arguments.checkpoint, sizes.queries, device)
        console.print(measure("a run's bank", case, arguments.rounds, {}))


if __name__ == "__main__":
    main()
