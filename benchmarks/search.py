"""Exact search and dense retrieval, from features to votes, against faiss and the method of the Hummingbird toolkit.

    uv run python -m benchmarks.search --threads 2
    uv run python -m benchmarks.search --backbone ../shared/weights/vits14_dinov2_descendant.safetensors   # also CamVid
    uv run python -m benchmarks.search --device cuda    # faiss still runs on the CPU

The toolkit searches, for each image, a flat inner-product index of faiss for k neighbours, gathers their features
and labels from dense tables, and weights the labels by the softmax of the cosines at temperature 0.02. Ours is
`nearest` for all images and `Voters.vote`. Both start from the same features and labels in memory; the index is built
beforehand.

Both are interleaved in one process with the same number of threads. The ratios are medians of the ratios within rounds,
of wall-clock time and of CPU time of the process, which is less sensitive to other load.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import faiss
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as TF

from cribo.data import LabelledImages, open_segmentation
from cribo.features import Encoder
from cribo.features.search import Neighbours, TensorKeys, nearest, recall
from cribo.features.voting import Voters, label_shares
from cribo.models import load_backbone

CAMVID = Path(__file__).parents[2] / "shared" / "data" / "camvid"
GRID = 32  # patches along each side of an image
PER_IMAGE = GRID * GRID
TEMPERATURE = 0.02


class Data(NamedTuple):
    """Features of unit length, and the class shares of the keys' patches."""

    keys: Tensor
    shares: Tensor
    queries: Tensor


def unit_rows(rows: int, dim: int, seed: int) -> Tensor:
    """Sample random unit vectors."""
    found = torch.empty(rows, dim)
    generator = torch.Generator().manual_seed(seed)
    for part in found.split(50_000):
        part.copy_(F.normalize(torch.randn(part.shape, generator=generator), dim=-1))
    return found


def random_data(keys: int, queries: int, dim: int) -> Data:
    """Sample random unit vectors with one class each."""
    classes = torch.randint(21, (keys,), generator=torch.Generator().manual_seed(2))
    return Data(unit_rows(keys, dim, 0), F.one_hot(classes, 21).float(), unit_rows(queries, dim, 1))


@torch.no_grad()
def encoded(backbone: str, images: LabelledImages, chosen: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
    """Encode images, by default all, as squares of 32 x 32 patches; return features and class shares of the patches."""
    encoder = Encoder(load_backbone(backbone).eval())
    side = GRID * encoder.patch_size
    features, shares = [], []
    for index in range(len(images)) if chosen is None else chosen:
        pixels = TF.resize(images.load(index), [side, side], antialias=True)
        features.append(encoder.grids(pixels[None]).float().flatten(0, 2))
        labels = TF.resize(images.labels(index)[None], [side, side], interpolation=InterpolationMode.NEAREST)[0].long()
        table = F.one_hot(labels.where(labels != images.ignore_index, len(images.classes)), len(images.classes) + 1)
        shares.append(F.avg_pool2d(table.permute(2, 0, 1).float()[None], encoder.patch_size)[0].flatten(1).mT)
    return F.normalize(torch.cat(features), dim=-1), torch.cat(shares)


def camvid_data(backbone: str, queries: int) -> Data:
    """Encode all training images and some validation images of CamVid."""
    memory, val = (open_segmentation("camvid", CAMVID, split=split) for split in ("train", "val"))
    chosen = [number * len(val) // queries for number in range(queries)]
    return Data(*encoded(backbone, memory), encoded(backbone, val, chosen)[0])


class Found(NamedTuple):
    """Neighbours and votes of a method, and its (wall-clock, CPU) seconds for the search and in total."""

    neighbours: Neighbours
    votes: Tensor
    search: tuple[float, float]
    whole: tuple[float, float]


def timed(call: Callable[[], Any]) -> tuple[Any, tuple[float, float]]:
    """Return the result of a call, which must be on the CPU, and its (wall-clock, CPU) seconds."""
    clock, cpu = time.perf_counter(), time.process_time()
    result = call()
    return result, (time.perf_counter() - clock, time.process_time() - cpu)


def toolkit(data: Data, index: faiss.Index, k: int) -> Found:
    """Search a flat index and vote with dense tables, image by image."""
    similarity, rows, votes = [], [], []
    search, whole = (0.0, 0.0), (0.0, 0.0)

    def vote(image: Tensor, rows: Tensor) -> Tensor:
        flat = rows.flatten()
        features = F.normalize(data.keys[flat].view(*rows.shape, -1), dim=-1)
        cosines = torch.einsum("qd,qkd->qk", F.normalize(image, dim=-1), features)
        weights = (cosines / TEMPERATURE).softmax(dim=-1)
        return torch.einsum("qk,qkc->qc", weights, data.shares[flat].view(*rows.shape, -1))

    for image in data.queries.split(PER_IMAGE):
        found, searched = timed(lambda image=image: index.search(image.numpy(), k))
        similarity.append(torch.from_numpy(found[0]))
        rows.append(torch.from_numpy(found[1]))
        part, voted = timed(lambda image=image: vote(image, rows[-1]))
        votes.append(part)
        search = (search[0] + searched[0], search[1] + searched[1])
        whole = (whole[0] + searched[0] + voted[0], whole[1] + searched[1] + voted[1])
    return Found(Neighbours(torch.cat(similarity), torch.cat(rows)), torch.cat(votes), search, whole)


def ours(data: Data, voters: Voters, k: int, device: str) -> Found:
    """Search and vote with the functions of `cribo evaluate dense-nn`."""
    neighbours, search = timed(lambda: nearest(data.queries, TensorKeys(data.keys), k, devices=(device,)))
    votes, voted = timed(lambda: voters.vote(neighbours, "attention", TEMPERATURE))
    return Found(neighbours, votes, search, (search[0] + voted[0], search[1] + voted[1]))


def add_row(table: Table, name: str, data: Data, k: int, threads: int, device: str, rounds: int) -> None:
    """Measure one case and add its row."""
    torch.set_num_threads(threads)
    faiss.omp_set_num_threads(threads)
    index = faiss.IndexFlatIP(data.keys.shape[1])
    index.add(data.keys.numpy())
    labels = [label_shares(part, "soft") for part in data.shares.split(PER_IMAGE)]
    voters = Voters(labels, data.shares.shape[1])
    nearest(data.queries[:64], TensorKeys(data.keys), k, devices=(device,))  # initialise libraries
    turns = [(ours(data, voters, k, device), toolkit(data, index, k)) for _ in range(rounds)]

    def ratio(part: str, kind: int) -> str:
        ratios = (getattr(theirs, part)[kind] / getattr(mine, part)[kind] for mine, theirs in turns)
        return f"{statistics.median(ratios):.2f}"

    mine, theirs = turns[0]
    seconds = (statistics.median(found.whole[0] for found in way) for way in zip(*turns, strict=True))
    same = (mine.votes.argmax(dim=1) == theirs.votes.argmax(dim=1)).double().mean()
    table.add_row(
        *(name, f"{len(data.keys):,}", f"{len(data.queries):,}", str(data.keys.shape[1]), str(k), str(threads)),
        *(f"{each:.2f} s" for each in seconds),
        *(ratio(part, kind) for part in ("whole", "search") for kind in (0, 1)),
        *(f"{recall(mine.neighbours, theirs.neighbours):.4%}", f"{same:.4%}"),
    )


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--backbone", help="backbone whose features of CamVid are searched; by default, only random features are"
    )
    parser.add_argument("--images", type=int, default=4, help="number of CamVid's validation images to label")
    parser.add_argument("--device", default="cpu", help="device of our search; faiss and all votes run on the CPU")
    parser.add_argument(
        "--threads",
        type=int,
        nargs="+",
        default=[torch.get_num_threads()],
        help="numbers of threads of both on the CPU",
    )
    parser.add_argument("--rounds", type=int, default=3, help="number of measurements of each case")
    parser.add_argument("--least", action="store_true", help="run a single small case")
    arguments = parser.parse_args()
    where = torch.cuda.get_device_name() if arguments.device.startswith("cuda") else "CPU"
    columns = ("memory", "keys", "queries", "D", "k", "threads", "ours", "toolkit", "wall-clock", "CPU")
    table = Table(title=f"speed-up over the toolkit, {where}, PyTorch {torch.__version__}, faiss {faiss.__version__}")
    for column in (*columns, "search: wall-clock", "CPU", "same neighbours", "same class"):
        table.add_column(column, justify="left" if column == "memory" else "right")
    cases: list[tuple[str, Callable[[], Data], int]] = [
        ("random, CamVid's size", lambda: random_data(281_856, 2 * PER_IMAGE, 384), 50),
        ("random, a million", lambda: random_data(1_000_000, 2 * PER_IMAGE, 384), 30),
        ("random, mean colour", lambda: random_data(281_856, 2 * PER_IMAGE, 3), 50),
    ]
    if arguments.backbone:
        cases.insert(0, ("CamVid", lambda: camvid_data(arguments.backbone, arguments.images), 30))
    if arguments.least:
        cases = [("least", lambda: random_data(2_000, 200, 16), 5)]
    for name, load, k in cases:
        data = load()
        for threads in arguments.threads:
            add_row(table, name, data, k, threads, arguments.device, arguments.rounds)
    Console(width=None if sys.stdout.isatty() else 180).print(table)


if __name__ == "__main__":
    main()
