"""Tar shards compared with single files: randomness of the order, and speed of reading.

    uv run python -m benchmarks.shards                       # only the order, a few seconds
    uv run python -m benchmarks.shards --folder IMAGES       # also reading, about a minute

The same images are read in the same order from the folder, from shards, and from shards through the cache, interleaved
in one process on one thread. Rates are images per second of CPU time, which excludes waiting for disks and networks and
is less sensitive to other load.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from cribo.data import ShardedImages, open_images, open_shards, write_shards
from cribo.data.samples import SampleDataset
from cribo.data.sources.images import ImageSource, PackedNames
from cribo.data.sources.storage import LocalShards
from cribo.data.sources.tars import ShardIndex
from cribo.method import ViewRecipe
from cribo.objectives.views import ViewPairs

BATCH = 1024
TURN = 64
# Number of shards, images per shard, bytes per shard.
COLLECTIONS = ((2200, 580, 64 * 2**20), (300, 600, 64 * 2**20), (1280, 1000, 2**30))


class _Nowhere(LocalShards):
    """Shards without files."""

    def __init__(self, shards: int, size: int) -> None:
        self.root = "nowhere"
        self.names, self.sizes = tuple(map(str, range(shards))), (size,) * shards


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="folder of images for reading")
    parser.add_argument("--images", type=int, default=768, help="number of images to read")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for collection in COLLECTIONS:
        measure_order(*collection)
    if arguments.folder is not None:
        measure_reading(arguments.folder, arguments.images)


def measure_order(shards: int, per_shard: int, size: int) -> None:
    store, total = _Nowhere(shards, size), shards * per_shard
    ends = np.arange(1, shards + 1) * per_shard
    index = ShardIndex(store.names, store.sizes, ends, np.full(total, 512), np.ones(total, np.int64), PackedNames([]))
    images = ShardedImages(store, index)
    started = time.perf_counter()
    ours = [images.epoch_order(0, 0), images.epoch_order(0, 1)]
    seconds = (time.perf_counter() - started) / 2
    any_order = [torch.randperm(total, generator=torch.Generator().manual_seed(epoch)) for epoch in (0, 1)]
    print(f"{shards} shards of {per_shard} images, {size / 2**20:.0f} MiB: window {images.window}, {seconds:.2f} s")
    for name, (first, second) in (("window", ours), ("random permutation", any_order)):
        rows = (first // per_shard)[: total // BATCH * BATCH].view(-1, BATCH)
        places = [order.argsort() for order in (first, second)]
        print(
            f"  {name:<16} same shard {100 * _same(rows[:200]):.2f} % of pairs "
            f"(first batch {100 * _same(rows[:1]):.2f}, last {100 * _same(rows[-1:]):.2f}); "
            f"again in the next epoch {100 * _again(first, *places):.3f} %; "
            f"displacement {float((places[0] - places[1]).abs().double().mean()) / total:.3f}; "
            f"at most {max(len(row.unique()) for row in rows[:200])} shards in a batch"
        )


def _same(rows: Int[Tensor, "batches size"]) -> float:
    """Compute the fraction of pairs in a batch that come from the same shard."""
    counts = [torch.bincount(row).double() for row in rows]
    return float(torch.stack([(count * (count - 1)).sum() for count in counts]).mean() / (BATCH * (BATCH - 1)))


def _again(order: Int[Tensor, " n"], place: Int[Tensor, " n"], next_place: Int[Tensor, " n"]) -> float:
    """Estimate the fraction of pairs in a batch that share a batch in the next epoch, from two million pairs."""
    generator = torch.Generator().manual_seed(0)
    full = len(order) // BATCH * BATCH
    left = torch.randint(0, full, (2_000_000,), generator=generator)
    right = left // BATCH * BATCH + torch.randint(0, BATCH, left.shape, generator=generator)
    left, right = order[left[left != right]], order[right[left != right]]
    return float((next_place[left] // BATCH == next_place[right] // BATCH).double().mean())


def measure_reading(folder: Path, count: int) -> None:
    files = open_images(folder)
    with tempfile.TemporaryDirectory() as temporary:
        size = sum(Path(files.path(index)).stat().st_size for index in range(len(files)))
        write_shards(files, Path(temporary, "shards"), shard_bytes=max(2**20, size // 50))
        shards = open_shards(Path(temporary, "shards"))
        cached = open_shards(f"file://{temporary}/shards", cache_dir=Path(temporary, "cache"))
        places = {name.rpartition(".")[0]: index for index, name in enumerate(files.names)}
        order = shards.epoch_order(0, 0)[: count // TURN * TURN].tolist()
        stems = [shards.name(index).partition("/")[2].rpartition(".")[0].replace("%2E", ".") for index in order]
        same = {"folder": [places[stem] for stem in stems], "shards": order, "through the cache": order}
        sources = {"folder": files, "shards": shards, "through the cache": cached}
        pairs = {name: _pairs(source) for name, source in sources.items()}
        _take_turns(
            "decoded whole", same, {name: lambda keys, s=s: [s.load(i) for i in keys] for name, s in sources.items()}
        )
        _take_turns("pairs of views", same, {name: lambda keys, p=p: p(keys) for name, p in pairs.items()})


def _pairs(source: ImageSource) -> Callable[[list[int]], object]:
    transform = ViewPairs(ViewRecipe(), grid=(14, 14), num_objects=32, drop_path_sites=12)
    dataset = SampleDataset(source, transform, seed=0)
    return lambda keys: dataset.__getitems__([(0, index) for index in keys])


def _take_turns(what: str, same: dict[str, list[int]], reads: dict[str, Callable[[list[int]], object]]) -> None:
    seconds = dict.fromkeys(reads, 0.0)
    total = len(same["folder"])
    for start in range(0, total, TURN):
        for name, read in reads.items():
            began = time.process_time()
            read(same[name][start : start + TURN])
            if start:  # the first round opens files and caches shards
                seconds[name] += time.process_time() - began
    rates = {name: (total - TURN) / taken for name, taken in seconds.items()}
    formatted = ", ".join(f"{name} {rate:.0f}/s ({rate / rates['folder']:.2f})" for name, rate in rates.items())
    print(f"{what}: {formatted}")


if __name__ == "__main__":
    main()
