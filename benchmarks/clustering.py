"""Clustering and pooling: against the literal formula, in growing batches, and against autograd's scatter.

    uv run python -m benchmarks.clustering                  # on the CPU, a few minutes on two idle cores
    uv run python -m benchmarks.clustering --device cuda    # the fused kernels, against the plain version there

T = 392 tokens of both views and D = 384 unless said; the literal formula takes as many images at a time as its (B, T,
T, K) tensor allows. Versions run in turn in one process, so that a busy machine slows
both; times are medians, and the ratio is the median of the rounds' own ratios. "Tokens read 10 times" is ten sums of
all tokens by PyTorch: the five rounds need them twice each, whatever else they do.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Callable

import torch
from benchmarks import literal
from benchmarks.measuring import timed, times
from rich.console import Console
from rich.table import Table
from torch import Tensor

from cribo.method import cluster_tokens
from cribo.method.clustering import transport_labels
from cribo.method.objects import kept_clusters, pool_kept_objects

OPTIONS = {"position_weight": 1.0, "marginals": "adaptive", "iterations": 5, "sinkhorn_iterations": 5}
LITERAL_NUMBERS = 2**28  # in the (B, T, T, K) tensor of the literal formula, which takes the images in turns beyond


def inputs(batch: int, num_tokens: int, dim: int, num_objects: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Random tokens, coordinates and initial tokens."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(batch, num_tokens, dim, generator=generator)
    coordinates = 224 * torch.rand(batch, num_tokens, 2, generator=generator)
    initial = torch.stack([torch.randperm(num_tokens, generator=generator)[:num_objects] for _ in range(batch)])
    return tokens.to(device), coordinates.to(device), initial.to(device)


def seconds(calls: list[Callable[[], object]], device: str, rounds: int) -> list[float]:
    """Median seconds of each call, all taking turns."""
    for call in calls:
        call()
    turns = [[timed(call, device) for call in calls] for _ in range(rounds)]
    return [statistics.median(turn[place] for turn in turns) for place in range(len(calls))]


def clusterings(device: str, rounds: int, sizes: list[tuple[int, int, int, int]]) -> Table:
    """Ours against the literal formula, against the plain version on a GPU, and against reading the tokens."""
    found = Table(title="clustering")
    columns = ("B", "T", "D", "K", "ours", "literal", "times faster", "plain", "tokens read 10 times", "agreement")
    for column in columns:
        found.add_column(column, justify="right")
    for size in sizes:
        tokens, coordinates, initial = inputs(*size, device)
        images = max(1, LITERAL_NUMBERS // (size[1] ** 2 * size[3]))

        def ours(given=(tokens, coordinates), initial=initial) -> Tensor:
            return cluster_tokens(*given, num_objects=initial.shape[1], position_weight=1.0, initial_tokens=initial)

        def plain(given=(tokens, coordinates, initial)) -> Tensor:
            return transport_labels(*given, sharpness=20.0, **OPTIONS)

        def by_formula(given=(tokens, coordinates, initial), images=images) -> Tensor:
            parts = zip(*(part.split(images) for part in given), strict=True)
            return torch.cat([literal.cluster(*part, position_weight=1.0) for part in parts])

        def read(tokens=tokens) -> list[Tensor]:
            return [tokens.sum() for _ in range(10)]

        fused = device.startswith("cuda")
        _, reading, *unfused = seconds([ours, read, plain] if fused else [ours, read], device, 3 * rounds)
        mine, slow, ratio = times(ours, by_formula, device, rounds)
        found.add_row(
            *(str(number) for number in size),
            *(f"{1000 * mine:.2f} ms", f"{1000 * slow:.0f} ms", f"{ratio:.0f}"),
            *([f"{1000 * unfused[0]:.2f} ms"] if unfused else ["the same"]),
            *(f"{1000 * reading:.2f} ms", f"{(ours() == by_formula()).float().mean().item():.2%}"),
        )
    return found


def growth(device: str, rounds: int, batches: list[int]) -> Table:
    """Time against B, and the exponent of a power law through it."""
    found = Table(title="clustering, K = 32, in growing batches")
    for column in ("B", "ours", "an image"):
        found.add_column(column, justify="right")
    calls: list[Callable[[], object]] = []
    for batch in batches:
        tokens, coordinates, initial = inputs(batch, 392, 384, 32, device)
        calls.append(
            lambda t=tokens, c=coordinates, i=initial: cluster_tokens(
                t, c, num_objects=32, position_weight=1.0, initial_tokens=i
            )
        )
    durations = seconds(calls, device, rounds)
    for batch, duration in zip(batches, durations, strict=True):
        found.add_row(str(batch), f"{1000 * duration:.2f} ms", f"{1000 * duration / batch:.3f} ms")
    exponent = statistics.linear_regression([math.log(b) for b in batches], [math.log(d) for d in durations]).slope
    found.caption = f"time grows as B to the power of {exponent:.2f}"
    return found


def scatter(tokens: Tensor, labels: Tensor, num_objects: int, rows: Tensor, clusters: Tensor) -> Tensor:
    """Pooling as autograd would differentiate it: a scatter of a float32 copy, then the kept rows."""
    labels = labels[..., None].expand_as(tokens)
    sums = tokens.new_zeros((*tokens.shape[:2], num_objects, tokens.shape[3]), dtype=torch.float32)
    sums = sums.scatter_add(2, labels, tokens.float())
    sizes = torch.zeros_like(sums[..., 0]).scatter_add(
        2, labels[..., 0], torch.ones_like(sums[:, :, :1, 0]).expand(labels.shape[:3])
    )
    return (sums / sizes.clamp_min(1)[..., None])[rows, :, clusters].transpose(0, 1)


def poolings(device: str, rounds: int, sizes: list[tuple[int, int, int, torch.dtype]]) -> Table:
    """Pooling of the kept objects, forward and backward."""
    found = Table(title="pooling of the kept objects, N = 196, forward and backward")
    for column in ("B", "D", "K", "tokens", "kept", "ours", "scatter", "times faster", "agreement of gradients"):
        found.add_column(column, justify="right")
    for batch, dim, num_objects, dtype in sizes:
        tokens, coordinates, initial = inputs(batch, 392, dim, num_objects, device)
        labels = cluster_tokens(
            tokens, coordinates, num_objects=num_objects, position_weight=1.0, initial_tokens=initial
        ).view(batch, 2, 196)
        rows, clusters = kept_clusters(labels, num_objects).nonzero(as_tuple=True)
        leaf = tokens.view(batch, 2, 196, dim).to(dtype).requires_grad_()
        weights = torch.randn(2, len(rows), dim, device=device)

        def ours(t=leaf, w=weights, named=(labels, num_objects, rows, clusters)) -> Tensor:
            return torch.autograd.grad(pool_kept_objects(t, *named), t, w)[0]

        def plain(t=leaf, w=weights, named=(labels, num_objects, rows, clusters)) -> Tensor:
            return torch.autograd.grad(scatter(t, *named), t, w)[0]

        fast, slow, ratio = times(ours, plain, device, rounds)
        difference = ((ours() - plain()).float().norm() / plain().float().norm()).item()
        found.add_row(
            *(str(batch), str(dim), str(num_objects), str(dtype).removeprefix("torch."), str(len(rows))),
            *(f"{1000 * fast:.2f} ms", f"{1000 * slow:.2f} ms", f"{ratio:.1f}", f"to {difference:.0e} relative"),
        )
    return found


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=5, help="how often each version is timed")
    parser.add_argument("--only", choices=("clustering", "growth", "pooling", "least"), help="least: a quick check")
    arguments = parser.parse_args()
    device, only, rounds = arguments.device, arguments.only, arguments.rounds
    gpu = device.startswith("cuda")
    where = torch.cuda.get_device_name() if gpu else f"CPU, {torch.get_num_threads()} threads"
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(f"{where}, PyTorch {torch.__version__}")
    if only in (None, "clustering"):
        cases = [(batch, 392, 384, k) for k in (32, 64) for batch in (8, 64)]
        cases += [(128, 392, 768, 32), (128, 1568, 384, 64)] if gpu else [(2, 1568, 384, 64)]
        console.print(clusterings(device, rounds, cases))
    if only in (None, "growth"):
        console.print(growth(device, rounds, [8, 32, 128, 512] if gpu else [1, 4, 16, 64]))
    if only in (None, "pooling"):
        cases = [(batch, 384, 32, dtype) for batch in (8, 64) for dtype in (torch.float32, torch.bfloat16)]
        cases += [(128, 768, 32, torch.bfloat16)] if gpu else []
        console.print(poolings(device, rounds, cases))
    if only == "least":
        console.print(clusterings(device, 1, [(1, 40, 8, 4)]), growth(device, 1, [1, 2]))
        console.print(poolings(device, 1, [(1, 8, 4, torch.float32)]))


if __name__ == "__main__":
    main()
