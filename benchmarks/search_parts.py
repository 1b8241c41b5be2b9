"""Exact search without each of its parts: the maxima of groups of keys, and the candidates by bfloat16 products.

    uv run python -m benchmarks.search_parts
    uv run python -m benchmarks.search_parts --backbone ../shared/weights/vits14_dinov2_descendant.safetensors

All versions are interleaved in one process, and return the same neighbours. bfloat16 is measured on processors with
instructions for it; others do not use it. Times are medians of CPU seconds.
"""

import argparse
import statistics
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from benchmarks.search import PER_IMAGE, Data, camvid_data, random_data, timed
from torch import Tensor

from cribo.base.devices import multiplies_bfloat16
from cribo.features import search
from cribo.features.search import Neighbours, TensorKeys, nearest


def merge_all(best: Neighbours, similarity: Tensor, rows: Tensor) -> None:
    """Merge neighbours with the k nearest of all further keys, found by one top-k."""
    k = best.rows.shape[1]
    places = search._largest(similarity, min(k, similarity.shape[1]))
    merged = torch.cat((best.similarity, similarity.gather(1, places)), dim=1)
    nearest, order = merged.sort(dim=1, descending=True, stable=True)
    best.similarity.copy_(nearest[:, :k])
    best.rows.copy_(torch.cat((best.rows, rows[places]), dim=1).gather(1, order[:, :k]))


VERSIONS: dict[str, Mapping[str, Any]] = {"complete": {}, "without groups": {"_keep": merge_all}}
if multiplies_bfloat16():
    VERSIONS["without bfloat16"] = {"_filters": lambda device, dim: False}


def measure(data: Data, k: int, rounds: int) -> dict[str, float]:
    """Measure the CPU seconds of all versions, and check that their neighbours agree."""
    seconds: dict[str, list[float]] = {name: [] for name in VERSIONS}
    nearest(data.queries[:64], TensorKeys(data.keys), k)  # initialise libraries
    for _ in range(rounds):
        found: list[Neighbours] = []
        for name, parts in VERSIONS.items():
            with ExitStack() as stack:
                for part, replacement in parts.items():
                    stack.enter_context(mock.patch.object(search, part, replacement))
                result, (_, cpu) = timed(lambda: nearest(data.queries, TensorKeys(data.keys), k))
            seconds[name].append(cpu)
            found.append(result)
        torch.testing.assert_close(*(each.similarity for each in (found[0], found[-1])), rtol=0, atol=1e-6)
    return {name: statistics.median(each) for name, each in seconds.items()}


def main() -> None:
    """Print a line for each case: the CPU seconds of all versions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", help="backbone whose features of CamVid are searched, too")
    parser.add_argument("--images", type=int, default=4, help="number of CamVid's validation images to label")
    parser.add_argument("--neighbours", type=int, default=50)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--least", action="store_true", help="run a single small case")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    sizes = [(50_000, 384), (200_000, 384), (400_000, 384), (281_856, 3)]
    cases: dict[str, Callable[[], Data]] = {
        f"random, {keys:,} keys, D = {dim}": lambda keys=keys, dim=dim: random_data(keys, 2 * PER_IMAGE, dim)
        for keys, dim in ([(2_000, 16)] if arguments.least else sizes)
    }
    if arguments.backbone:
        cases["CamVid"] = lambda: camvid_data(arguments.backbone, arguments.images)
    for name, load in cases.items():
        data = load()
        seconds = measure(data, arguments.neighbours, arguments.rounds)
        parts = (f"{part} {each:.2f} s ({each / seconds['complete']:.2f})" for part, each in seconds.items())
        print(f"{name}, {len(data.queries):,} queries: {', '.join(parts)}", flush=True)


if __name__ == "__main__":
    main()
