"""Object search: speed of indexing, latency and recall of searches, and precision by class.

    uv run python -m benchmarks.object_search --camvid ../shared/data/camvid --backbone runs/camvid
    uv run python -m benchmarks.object_search --small       # all parts on small data, in a minute
    uv run python -m benchmarks.object_search --only latency

`indexing` adds images to a database and measures each part. `latency` searches among synthetic objects,
clustered like real ones: Lance by exhaustive search and by its index, and two searches with all vectors in
memory, faiss's flat index and our exact search. `quality` takes each object of CamVid's validation images, labelled
by the majority class of its pixels, and counts how many of its five nearest training objects have the same class: for a
trained backbone, for the same network with random weights, and for the mean colour, each with its own objects
and with those of the trained backbone. CamVid's images are frames of a few videos, so some of them are similar.
"""

import argparse
import dataclasses
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import faiss
import numpy as np
import torch
from benchmarks.measuring import MIB, peak_memory
from jaxtyping import Float, Int
from rich.console import Console
from rich.table import Table

from cribo.apps.search import DatabaseInfo, IndexedImage, ObjectDatabase, ObjectSettings, index_images, index_lock
from cribo.base.machine import keep_freed_memory
from cribo.data import LabelledImages, open_images, open_segmentation
from cribo.data.reading import read_image
from cribo.features import BackboneSource, Encoder, mean_colour_encoder, nearest
from cribo.features.object_extraction import extract_objects, extract_prepared, prepare_image
from cribo.features.objects import ImageObject
from cribo.features.search import TensorKeys
from cribo.models import build_backbone, load_backbone

DIM = 384
PER_IMAGE = 16
K = 10
QUALITY_K = 5
SIZES = (100_000, 1_000_000)
SMALL_SIZES = (2_000,)
NO_CLASS = 255


# ------------------------------------------------------------------ indexing


def indexing(encoder: Encoder, folder: Path | None, number: int) -> Table:
    """Measure the throughput of indexing, and the time of each part with a single reading thread."""
    with tempfile.TemporaryDirectory() as place:
        folder = folder or synthetic_images(Path(place) / "images", number)
        files = open_images(folder)
        settings = ObjectSettings()
        database_place = str(Path(place) / "objects.db")
        with index_lock(database_place):
            database = ObjectDatabase.create(database_place, info(encoder, settings, folder))
            summary = index_images(database, encoder, files)
            again = timed(lambda: index_images(database, encoder, files))
        parts = parts_of(encoder, [files.path(index) for index in range(min(len(files), number))], settings)
        table = Table(title=f"indexing {len(files)} images, {torch.get_num_threads()} threads")
        table.add_column("what")
        table.add_column("value", justify="right")
        table.add_row("images/s in total", f"{summary.images_per_second:.1f}")
        for name, seconds in parts.items():
            table.add_row(f"ms per image: {name}", f"{1000 * seconds:.1f}")
        table.add_row("objects per image", f"{summary.objects / len(files):.1f}")
        table.add_row("bytes on disk per object", f"{(database.size_bytes() or 0) / max(1, len(database)):.0f}")
        table.add_row("seconds without new images", f"{again:.2f}")
        return table


def parts_of(encoder: Encoder, paths: Sequence[str], settings: ObjectSettings) -> dict[str, float]:
    """Measure the seconds per image of each part separately."""
    begun = time.perf_counter()
    images = [read_image(path) for path in paths]
    read = time.perf_counter()
    prepared = [prepare_image(image, encoder, settings) for image in images]
    resized = time.perf_counter()
    for image in prepared:
        encoder.tokens(image.pixels[None].float().div_(255))
    encoded = time.perf_counter()
    extract_prepared(encoder, prepared, settings)
    ended = time.perf_counter()
    network = encoded - resized
    seconds = {
        "read and decode": read - begun,
        "resize": resized - read,
        "network": network,
        "clustering and masks": max(0.0, ended - encoded - network),
    }
    return {name: value / len(paths) for name, value in seconds.items()}


def synthetic_images(folder: Path, number: int) -> Path:
    """Write synthetic scenes as files."""
    from torchvision.io import write_png

    from cribo.data.scenes import Scenes

    folder.mkdir(parents=True)
    scenes = Scenes(number, size=256)
    for index in range(number):
        write_png(scenes.load(index), str(folder / f"{index}.png"))
    return folder


def info(encoder: Encoder, settings: ObjectSettings, folder: Path, dim: int | None = None) -> DatabaseInfo:
    """Return the metadata of a database for a measurement."""
    width = dim or encoder.tokens(torch.zeros(1, 3, 2 * encoder.patch_size, 2 * encoder.patch_size)).shape[2]
    config = dataclasses.asdict(BackboneSource("benchmark"))
    return DatabaseInfo(encoder.identity or "benchmark", {"name": "benchmark"}, config, width, settings, str(folder))


# ------------------------------------------------------------------ latency


class Measured(NamedTuple):
    """Latency of a query in milliseconds (median and 95th percentile), recall, and memory in MiB."""

    median: float
    late: float
    recall: float
    mib: float


def clustered(number: int, seed: int) -> Float[np.ndarray, "n d"]:
    """Sample unit vectors around 5,000 centres with unequal frequencies."""
    centres = np.random.default_rng(0).standard_normal((5000, DIM), dtype=np.float32)
    generator = np.random.default_rng(seed)
    found = np.empty((number, DIM), dtype=np.float32)
    for start in range(0, number, 50_000):
        part = found[start : start + 50_000]
        chosen = (5000 * generator.random(len(part)) ** 2).astype(np.int64)
        part[:] = centres[chosen] + 0.8 * generator.standard_normal(part.shape, dtype=np.float32)
        part /= np.linalg.norm(part, axis=1, keepdims=True)
    return found


def latency(sizes: Sequence[int], queries: int) -> Table:
    """Measure the latency for each number of objects and search method."""
    table = Table(title=f"one query, {K} nearest of D = {DIM}, {torch.get_num_threads()} threads")
    columns = ("objects", "search", "median", "95 %", "recall@10", "memory", "build", "on disk")
    for column in columns:
        table.add_column(column, justify="left" if column == "search" else "right")
    for size in sizes:
        vectors, query = clustered(size, 1), clustered(queries, 2)
        truth = nearest(torch.from_numpy(query), TensorKeys(torch.from_numpy(vectors)), K)
        worst = truth.similarity[:, -1].numpy()
        with tempfile.TemporaryDirectory() as place:
            database, written = filled(Path(place) / "objects.db", vectors)
            plain = database.size_bytes() or 0

            by_all, by_index = (partial(in_database, database, exact) for exact in (True, False))
            add(table, size, "Lance, every object", measure(by_all, query, worst), written, plain)
            built = timed(database.build_index)
            # The index stores its own copy of the vectors.
            own = (database.size_bytes() or 0) - plain
            add(table, size, "Lance, index", measure(by_index, query, worst), built, own)
        held = vectors.nbytes / MIB
        in_memory = partial(by_ours, TensorKeys(torch.from_numpy(vectors)))
        add(table, size, "cribo.features, exact", measure(in_memory, query, worst, held), None, None)
        flat = faiss.IndexFlatIP(DIM)
        faiss.omp_set_num_threads(torch.get_num_threads())
        flat.add(vectors)
        add(table, size, "faiss, flat", measure(partial(by_faiss, flat), query, worst, held), None, None)
        table.add_section()
    return table


def in_database(database: ObjectDatabase, exact: bool, query: Float[np.ndarray, " d"]) -> list[float]:
    """Return the similarities of the nearest objects."""
    return [each.similarity for each in database.search(query[None], K, exact=exact)[0]]


def by_ours(keys: TensorKeys, query: Float[np.ndarray, " d"]) -> list[float]:
    """Return the similarities of the nearest objects."""
    return nearest(torch.from_numpy(query[None]), keys, K).similarity[0].tolist()


def by_faiss(index: Any, query: Float[np.ndarray, " d"]) -> list[float]:
    """Return the similarities of the nearest objects."""
    return index.search(query[None], K)[0][0].tolist()


def filled(place: Path, vectors: Float[np.ndarray, "n d"]) -> tuple[ObjectDatabase, float]:
    """Write a database of synthetic objects; return it and the seconds for writing."""
    import pyarrow as pa

    encoder = mean_colour_encoder(16)
    place.mkdir()
    database = ObjectDatabase.create(place, info(encoder, ObjectSettings(), place, DIM))
    begun = time.perf_counter()
    schema = database._objects.schema
    for start in range(0, len(vectors), 50_000):
        part = vectors[start : start + 50_000]
        rows = np.arange(start, start + len(part))
        columns: dict[str, Any] = {name: np.full(len(part), 30) for name in schema.names}
        columns["entry"] = rows // PER_IMAGE
        columns["image"] = [f"folder/{row // PER_IMAGE:08d}.jpg" for row in rows]
        columns["number"] = rows % PER_IMAGE
        columns["vector"] = pa.FixedSizeListArray.from_arrays(pa.array(part.ravel()), DIM)
        columns["mask"] = [bytes(60)] * len(part)
        database._objects.add(pa.table(columns, schema=schema))
    images = range(-(-len(vectors) // PER_IMAGE))
    sha256 = "0" * 64
    for start in range(0, len(images), 50_000):
        several = images[start : start + 50_000]
        path = "folder/{:08d}.jpg"
        rows = (IndexedImage(path.format(n), n, 1, 1, sha256, 360, 480, PER_IMAGE, "") for n in several)
        database.put([(row, ()) for row in rows])
    database.compact(drop_versions=True)
    return database, time.perf_counter() - begun


def measure(
    search: Callable[[np.ndarray], Sequence[float]],
    queries: Float[np.ndarray, "q d"],
    worst: Float[np.ndarray, " q"],
    held: float = 0.0,
) -> Measured:
    """Measure queries one by one; peak memory is that of the first few queries, plus `held` MiB."""
    peak = peak_memory(lambda: [search(query) for query in queries[:3]], "cpu")
    seconds, hits = [], []
    for query, least in zip(queries, worst, strict=True):
        begun = time.perf_counter()
        found = search(query)
        seconds.append(time.perf_counter() - begun)
        hits.append(sum(similarity >= least - 1e-5 for similarity in found) / K)
    late = float(np.percentile(seconds, 95))
    return Measured(1000 * statistics.median(seconds), 1000 * late, statistics.mean(hits), held + peak / MIB)


def add(table: Table, size: int, name: str, measured: Measured, build: float | None, disk: int | None) -> None:
    """Add a row to the table, and print it immediately."""
    print(f"{size:,} {name}: {measured}", file=sys.stderr, flush=True)
    table.add_row(
        f"{size:,}",
        name,
        f"{measured.median:.1f} ms",
        f"{measured.late:.1f} ms",
        f"{measured.recall:.1%}",
        f"{measured.mib:.0f} MiB",
        "" if build is None else f"{build:.1f} s",
        "" if disk is None else f"{disk / 1e6:.0f} MB",
    )


# ------------------------------------------------------------------ quality


class Labelled(NamedTuple):
    """Objects with their majority class and its share of the labelled pixels."""

    vectors: Float[np.ndarray, "n d"]
    classes: Int[np.ndarray, " n"]
    purity: Float[np.ndarray, " n"]


def labelled_objects(
    encoders: dict[str, Encoder], images: LabelledImages, every: int
) -> tuple[dict[str, Labelled], dict[str, Labelled]]:
    """Extract the objects of every `every`-th image by each encoder, and encode those of the first with each encoder.

    Objects with more than half of their pixels ignored are dropped.
    """
    own: dict[str, list[tuple[np.ndarray, int, float]]] = {name: [] for name in encoders}
    common: dict[str, list[tuple[np.ndarray, int, float]]] = {name: [] for name in encoders}
    for index in range(0, len(images), every):
        labels, image = images.labels(index).numpy(), images.load(index)
        found = {name: extract_objects(encoder, [image])[0] for name, encoder in encoders.items()}
        regions = next(iter(found.values())).objects
        for name, objects in found.items():
            own[name] += [(each.vector, *majority(each, labels)) for each in objects.objects]
            for each in regions:
                vector = objects.tokens[torch.from_numpy(each.mask.patches().flatten())].mean(dim=0)
                vector = torch.nn.functional.normalize(vector, dim=0).numpy()
                common[name].append((vector, *majority(each, labels)))
    return gathered(own), gathered(common)


def majority(each: ImageObject, labels: Int[np.ndarray, "h w"]) -> tuple[int, float]:
    """Return the majority class of an object's labelled pixels and its share; -1 if most pixels are ignored."""
    inside = labels[each.mask.pixels()]
    counts = np.bincount(inside[inside != NO_CLASS], minlength=1)
    if 2 * counts.sum() < len(inside):
        return -1, 0.0
    return int(counts.argmax()), float(counts.max() / counts.sum())


def gathered(objects: dict[str, list[tuple[np.ndarray, int, float]]]) -> dict[str, Labelled]:
    """Convert the objects with a class to arrays."""
    result = {}
    for name, several in objects.items():
        vectors, classes, purity = zip(*(one for one in several if one[1] >= 0), strict=True)
        result[name] = Labelled(np.stack(vectors), np.array(classes), np.array(purity))
    return result


def precision(keys: Labelled, queries: Labelled) -> tuple[float, float]:
    """Compute the precision of the nearest keys, over all queries and as the mean over classes."""
    found = nearest(torch.from_numpy(queries.vectors), TensorKeys(torch.from_numpy(keys.vectors)), QUALITY_K)
    right = (keys.classes[found.rows.numpy()] == queries.classes[:, None]).mean(axis=1)
    return float(right.mean()), float(np.mean([right[queries.classes == each].mean() for each in set(queries.classes)]))


def quality(encoders: dict[str, Encoder], camvid: Path, every: int) -> Table:
    """Measure each encoder with its own objects, and with those of the first encoder."""
    train, val = (open_segmentation("camvid", camvid, split) for split in ("train", "val"))
    (keys, same_keys), (queries, same) = (labelled_objects(encoders, images, every) for images in (train, val))
    first = next(iter(encoders))
    table = Table(title=f"precision of the {QUALITY_K} nearest training objects, CamVid")
    columns = ("features", "objects", "queries", "precision", "mean of classes", "by chance", "purity")
    common = (f"objects of {first}: precision", "mean of classes")
    for column in (*columns, *common):
        table.add_column(column, justify="left" if column == "features" else "right")
    for name in encoders:
        frequency = np.bincount(keys[name].classes, minlength=256) / len(keys[name].classes)
        shares = (
            *precision(keys[name], queries[name]),
            float(frequency[queries[name].classes].mean()),
            float(queries[name].purity.mean()),
            *precision(same_keys[name], same[name]),
        )
        counts = (len(keys[name].classes), len(queries[name].classes))
        table.add_row(name, *(f"{count:,}" for count in counts), *(f"{share:.1%}" for share in shares))
    return table


# ------------------------------------------------------------------ command


def timed(call: Callable[[], object]) -> float:
    """Measure the seconds of one call."""
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def encoders_of(source: str | None) -> dict[str, Encoder]:
    """Return encoders of a trained backbone, the same network untrained, and the mean colour; by default small ones."""
    if source is None:
        args = {"depth": 2, "embed_dim": 64, "num_heads": 2}
        untrained = build_backbone("vit_tiny_patch16_224", args=args, image_size=224).eval()
        return {"untrained": Encoder(untrained), "mean colour": mean_colour_encoder(16)}
    trained = load_backbone(source).eval()
    untrained = build_backbone(trained.name, args=trained.args, image_size=trained.image_size, seed=0).eval()
    return {
        "trained": Encoder(trained),
        "untrained": Encoder(untrained),
        "mean colour": mean_colour_encoder(trained.patch_size),
    }


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--camvid", type=Path, default=Path("../shared/data/camvid"), help="folder of CamVid")
    parser.add_argument("--backbone", help="a trained backbone, such as runs/camvid")
    parser.add_argument("--only", choices=("indexing", "latency", "quality"))
    parser.add_argument("--small", action="store_true", help="a quick test of all parts; results are not meaningful")
    parser.add_argument("--every", type=int, default=1, help="quality: use only every n-th image")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="latency: numbers of objects")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    console = Console(width=140)
    encoders = encoders_of(arguments.backbone)
    images = arguments.camvid / "images" / "train"
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()  # as `cribo index` does
    if arguments.only in (None, "indexing"):
        folder = images if images.is_dir() and not arguments.small else None
        console.print(indexing(next(iter(encoders.values())), folder, 12 if arguments.small else 50))
    if arguments.only in (None, "quality") and images.is_dir():
        console.print(quality(encoders, arguments.camvid, 40 if arguments.small else arguments.every))
    if arguments.only in (None, "latency"):
        sizes = SMALL_SIZES if arguments.small else tuple(arguments.sizes)
        console.print(latency(sizes, 20 if arguments.small else 40))


if __name__ == "__main__":
    main()
