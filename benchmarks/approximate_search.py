"""Approximate search of dense retrieval, from features to votes, against exact search and the toolkit's ScaNN.

    uv run --with scann python -m benchmarks.approximate_search --backbone SOURCE --data camvid FOLDER --data ...

Keys are the patches of the training images of all datasets, queries those of the validation images of the first. The
time includes building the index. The Hummingbird toolkit's ScaNN has its default settings: 512 leaves of which 32 are
searched, trained on all keys; blocks of 4 dimensions; 120 candidates are compared exactly. It is left out if the
package is not installed.

Versions are interleaved in one process with the same number of threads. *Recall* is the share of the exact neighbours
that are found; *same class* is the share of queries with the class of the exact search.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from benchmarks.search import PER_IMAGE, TEMPERATURE, Data, encoded, timed
from rich.console import Console
from rich.table import Table
from torch import Tensor

from cribo.data import open_segmentation
from cribo.features.search import ApproximateIndex, Neighbours, TensorKeys, nearest, recall
from cribo.features.voting import Voters, label_shares

K = 30

Search = Callable[[Data], Neighbours]


def exact(data: Data) -> Neighbours:
    """Search as `--search exact`."""
    return nearest(data.queries, TensorKeys(data.keys), K)


def by_index(probes: int) -> Search:
    """Search as `--search faiss`."""
    return lambda data: ApproximateIndex(TensorKeys(data.keys), probes=probes).search(data.queries, K)


def by_scann(data: Data) -> Neighbours:
    """Search as the toolkit, four images at a time."""
    import scann  # pyright: ignore[reportMissingImports]

    builder = scann.scann_ops_pybind.builder(data.keys.numpy(), K, "dot_product")
    builder = builder.tree(num_leaves=512, num_leaves_to_search=32, training_sample_size=len(data.keys))
    index = builder.score_ah(4, anisotropic_quantization_threshold=0.2).reorder(120).build()
    found = [index.search_batched(part.numpy()) for part in data.queries.split(4 * PER_IMAGE)]
    rows, similarity = (torch.from_numpy(np.concatenate(parts)) for parts in zip(*found, strict=True))
    return Neighbours(similarity, rows.long())


def load(backbone: str, datasets: list[tuple[str, str]], images: int, cache: Path | None) -> Data:
    """Encode the datasets, or read their features from the file that an earlier call wrote."""
    if cache is not None and cache.exists():
        return Data(*torch.load(cache))
    opened = [[open_segmentation(name, folder, split=split) for split in ("train", "val")] for name, folder in datasets]
    val = opened[0][1]
    chosen = [number * len(val) // images for number in range(min(images, len(val)))]
    parts = [encoded(backbone, train) for train, _ in opened]
    shares = torch.block_diag(*(part for _, part in parts))  # datasets do not share classes
    data = Data(torch.cat([features for features, _ in parts]), shares, encoded(backbone, val, chosen)[0])
    if cache is not None:
        torch.save(tuple(data), cache)
    return data


def measure(data: Data, versions: dict[str, Search], rounds: int) -> Table:
    """Measure all versions on the same data."""
    voters = Voters([label_shares(part, "soft") for part in data.shares.split(PER_IMAGE)], data.shares.shape[1])

    def run(search: Search) -> tuple[Neighbours, Tensor]:
        found = search(data)
        return found, voters.vote(found, "attention", TEMPERATURE).argmax(dim=1)

    turns = [{name: timed(partial(run, search)) for name, search in versions.items()} for _ in range(rounds)]
    true, classes = turns[0]["exact"][0]
    table = Table(title=f"{len(data.keys):,} keys, {len(data.queries):,} queries, D = {data.keys.shape[1]}, k = {K}")
    for column in ("search", "wall-clock", "CPU", "ScaNN's wall-clock / this", "CPU", "recall", "same class"):
        table.add_column(column, justify="left" if column == "search" else "right")
    for name in versions:
        seconds = [statistics.median(turn[name][1][kind] for turn in turns) for kind in (0, 1)]
        ratios = [
            f"{statistics.median(turn['ScaNN'][1][kind] / turn[name][1][kind] for turn in turns):.2f}"
            if "ScaNN" in versions
            else ""
            for kind in (0, 1)
        ]
        found, own = turns[0][name][0]
        same = (own == classes).double().mean()
        table.add_row(
            name, *(f"{each:.1f} s" for each in seconds), *ratios, f"{recall(found, true):.3f}", f"{same:.2%}"
        )
    return table


def main() -> None:
    """Measure, and print a table for each number of keys."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", required=True, help="backbone whose features are searched")
    parser.add_argument(
        "--data", nargs=2, action="append", required=True, metavar=("LAYOUT", "FOLDER"), help="such as folder IMAGES"
    )
    parser.add_argument("--keys", type=int, nargs="+", help="numbers of keys, the first of all; by default, all")
    parser.add_argument("--probes", type=int, nargs="+", default=[8, 16, 32], help="numbers of lists to search")
    parser.add_argument("--images", type=int, default=35, help="number of validation images to label")
    parser.add_argument("--cache", type=Path, help="file that keeps the features for further calls")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=1, help="number of measurements of each version")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    data = load(arguments.backbone, arguments.data, arguments.images, arguments.cache)
    versions: dict[str, Search] = {"exact": exact}
    versions |= {f"faiss, {probes} lists": by_index(probes) for probes in arguments.probes}
    versions |= {"ScaNN": by_scann} if find_spec("scann") else {}
    console = Console(width=None if sys.stdout.isatty() else 130)
    console.print(f"CPU, {arguments.threads} threads, PyTorch {torch.__version__}")
    for keys in arguments.keys or [len(data.keys)]:
        part = Data(data.keys[:keys], data.shares[:keys], data.queries)
        console.print(measure(part, versions, arguments.rounds))


if __name__ == "__main__":
    main()
