"""Object database at scale: writers in several processes, one commit, the vector index, and searches with it.

    uv run python -m benchmarks.database --folder /some/disk              # a million objects; 4 GB of disk
    uv run python -m benchmarks.database --objects 20000 --queries 20     # a quick test

Objects are synthetic: unit vectors in clusters of unequal frequency whose members vary mostly along a few directions,
as features of networks do, and masks of random patches. Each writer process generates its images and writes their
objects to files; this process adds all of them in one commit. Queries are further samples of the same distribution,
which are not in the database, one at a time, with warm caches. *Recall* is the share of the 10 nearest objects that
are found. The memory of a writer is that of its whole process; that of building the index is the additional one.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import numpy as np
from benchmarks.measuring import MIB, peak_memory, resident
from faster_coco_eval.core import mask as coco_mask
from jaxtyping import Float
from rich.console import Console
from rich.table import Table

import cribo.apps.search.database as implementation
from cribo.apps.search import DatabaseInfo, IndexedImage, ObjectDatabase, ObjectSettings, ObjectWriter, index_vectors
from cribo.apps.search.database import new_entry
from cribo.features.objects import GridMask, ImageObject

DIM = 384
K = 10
PER_IMAGE = 16
BLOCK = 25_000  # objects of a fragment
CLUSTERS, VARIED = 5000, 32  # clusters, and directions in which the members of one vary
GRID, IMAGE = (14, 14), (224, 224)
EXACT = 7  # queries whose latency is measured without the index


def clustered(number: int, seed: int, *, noise: float) -> Float[np.ndarray, "n d"]:
    """Sample unit vectors: a centre, a variation in the cluster's own directions, and noise in all directions."""
    fixed = np.random.default_rng(0)
    centres = fixed.standard_normal((CLUSTERS, DIM), dtype=np.float32)
    directions = fixed.standard_normal((8 * VARIED, DIM), dtype=np.float32)
    scales = np.float32(1.5) / np.sqrt(np.arange(1, VARIED + 1, dtype=np.float32))
    generator = np.random.default_rng(seed)
    chosen = (CLUSTERS * generator.random(number) ** 2).astype(np.int64)
    found = noise * generator.standard_normal((number, DIM), dtype=np.float32)
    along = scales * generator.standard_normal((number, VARIED), dtype=np.float32) / np.float32(2)
    for group in range(8):
        own = chosen % 8 == group
        found[own] += along[own] @ directions[group * VARIED : (group + 1) * VARIED]
    found += centres[chosen]
    return found / np.linalg.norm(found, axis=1, keepdims=True)


def images_of(block: int, objects: int, noise: float) -> Iterator[tuple[IndexedImage, list[ImageObject]]]:
    """Generate the images of a block with their objects."""
    vectors = clustered(objects, 1 + block, noise=noise)
    generator = np.random.default_rng(1 + block)
    for start in range(0, objects, PER_IMAGE):
        own = vectors[start : start + PER_IMAGE]
        found = []
        for number, vector in enumerate(own):
            y, x = generator.integers(0, GRID[0] - 4, 2).tolist()
            height, width = generator.integers(2, 5, 2).tolist()
            mask = np.zeros(GRID, dtype=bool)
            mask[y : y + height, x : x + width] = generator.random((height, width)) < 0.8
            mask[y, x] = True
            box = (16 * x, 16 * y, 16 * (x + width), 16 * (y + height))
            counts = coco_mask.encode(np.asfortranarray(mask, dtype=np.uint8))["counts"]
            found.append(ImageObject(number, vector, GridMask(GRID, counts, IMAGE), box, 256 * int(mask.sum())))
        path = f"folder/{block:06d}/{start // PER_IMAGE:08d}.jpg"
        yield IndexedImage(path, new_entry(), 1, 1, "0" * 64, *IMAGE, len(own), ""), found


class Part(NamedTuple):
    """What a writer wrote, and the peak memory of its process in bytes."""

    images: list[IndexedImage]
    fragments: list[str]
    peak: int


def write(writer: ObjectWriter, block: int, objects: int, noise: float) -> Part:
    """Write a block, in a process of its own."""
    images = list(images_of(block, objects, noise))
    return Part([image for image, _ in images], writer.write(images), resident("VmHWM"))


class Measured(NamedTuple):
    """Recall, and latencies in milliseconds: median and 95th percentile."""

    recall: float
    median: float
    late: float


def measure(
    search: Callable[[np.ndarray], list[float]],
    queries: Float[np.ndarray, "q d"],
    least: Float[np.ndarray, " q"],
) -> Measured:
    """Search one query at a time."""
    search(queries[0])
    seconds, hits = [], []
    for query, worst in zip(queries, least, strict=True):
        begun = time.perf_counter()
        found = search(query)
        seconds.append(time.perf_counter() - begun)
        hits.append(sum(similarity >= worst - 1e-6 for similarity in found) / K)
    late = float(np.percentile(seconds, 95))
    return Measured(statistics.mean(hits), 1000 * statistics.median(seconds), 1000 * late)


def size_of(folder: Path) -> int:
    """Return the size of the files in a folder in bytes."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def created(place: Path, objects: int, writers: int, noise: float, table: Table) -> ObjectDatabase:
    """Write a database in several processes, with one commit."""
    settings = ObjectSettings()
    info = DatabaseInfo("benchmark", {"name": "benchmark"}, {"source": "benchmark"}, DIM, settings, str(place))
    database = ObjectDatabase.create(place, info)
    begun = time.perf_counter()
    sizes = [min(BLOCK, objects - start) for start in range(0, objects, BLOCK)]
    with ProcessPoolExecutor(writers, mp_context=get_context("spawn")) as pool:
        blocks = range(len(sizes))
        parts = list(pool.map(write, [database.writer()] * len(sizes), blocks, sizes, [noise] * len(sizes)))
    written = time.perf_counter()
    images = [image for part in parts for image in part.images]
    database.commit([fragment for part in parts for fragment in part.fragments], images)
    committed = time.perf_counter()
    table.add_row(f"generate and write, {writers} processes", f"{written - begun:.1f} s")
    table.add_row("peak memory of a writer", f"{max(part.peak for part in parts) / MIB:.0f} MiB")
    table.add_row(f"one commit of {len(sizes)} fragments and {len(images):,} images", f"{committed - written:.2f} s")
    table.add_row("compaction and scalar indices", f"{timed(lambda: database.compact(drop_versions=True)):.1f} s")
    assert len(database) == database.num_rows == objects
    return database


def timed(call: Callable[[], object]) -> float:
    """Measure the seconds of one call."""
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def searches(database: ObjectDatabase, settings: list[tuple[int, int]], queries: int, noise: float) -> Table:
    """Measure the searches with the index for each number of probes and refine factor, and the exact one."""
    table = Table(title=f"one query, {K} nearest of {database.num_rows:,}, D = {DIM}")
    for column in ("search", "recall@10", "median", "95 %"):
        table.add_column(column, justify="left" if column == "search" else "right")
    vectors = clustered(queries, 0, noise=noise)  # blocks have other seeds
    least = database.kth_similarities(vectors, K, exclude=[-1] * queries)

    def search(query: Float[np.ndarray, " d"], *, exact: bool = False) -> list[float]:
        return [one.similarity for one in database.search(query[None], K, exact=exact)[0]]

    def add(name: str, measured: Measured) -> None:
        row = (name, f"{measured.recall:.1%}", f"{measured.median:.1f} ms", f"{measured.late:.1f} ms")
        print(*row, file=sys.stderr, flush=True)
        table.add_row(*row)

    chosen = implementation._PROBES, implementation._REFINE
    for probes, refine in [chosen, *(each for each in settings if each != chosen)]:
        implementation._PROBES, implementation._REFINE = probes, refine
        default = "default: " if (probes, refine) == chosen else ""
        add(f"{default}{probes} probes, refine factor {refine}", measure(search, vectors, least))
    implementation._PROBES, implementation._REFINE = chosen
    add("exact", measure(lambda query: search(query, exact=True), vectors[:EXACT], least[:EXACT]))
    return table


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--objects", type=int, default=1_000_000)
    parser.add_argument("--writers", type=int, default=4, help="number of processes that write")
    parser.add_argument("--queries", type=int, default=200)
    parser.add_argument(
        "--probes", type=int, nargs="+", default=[20, 40, 80, 160], help="numbers of partitions to search"
    )
    parser.add_argument("--refine", type=int, nargs="+", default=[1, 5, 10], help="factors of re-ranked objects")
    parser.add_argument("--noise", type=float, default=0.3, help="noise in all directions; centres have unit variance")
    parser.add_argument("--folder", type=Path, help="existing folder for temporary files")
    arguments = parser.parse_args()
    console = Console(width=110)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        place = Path(folder) / "objects.db"
        table = Table("what", "value", title=f"{arguments.objects:,} objects")
        database = created(place, arguments.objects, arguments.writers, arguments.noise, table)
        indices = place / "objects.lance" / "_indices"
        table.add_row("size of the objects on disk", f"{size_of(place / 'objects.lance' / 'data') / 1e6:.0f} MB")
        before = size_of(indices)
        begun = time.perf_counter()
        peak = peak_memory(database.build_index, "cpu")
        table.add_row("time to build the vector index", f"{time.perf_counter() - begun:.1f} s")
        table.add_row("additional peak memory while building", f"{peak / MIB:.0f} MiB")
        bytes_used = size_of(indices) - before
        table.add_row("size of the vector index on disk", f"{bytes_used / 1e6:.1f} MB")
        table.add_row("bits per dimension of the index", f"{8 * bytes_used / arguments.objects / DIM:.2f}")
        console.print(table)
        settings = [(probes, refine) for probes in arguments.probes for refine in arguments.refine]
        console.print(searches(database, settings, arguments.queries, arguments.noise))
        quality = index_vectors(database, least=1)
        assert quality is not None
        console.print(
            f"index_vectors: recall@{quality.k} {quality.recall:.1%} of {quality.queries} stored objects, "
            f"{quality.milliseconds:.1f} ms; exact {quality.exact_milliseconds:.0f} ms",
        )


if __name__ == "__main__":
    main()
