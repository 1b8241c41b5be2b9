"""Dense retrieval from features to labels, against the way of the public Hummingbird toolkit, in one run.

    uv run python -m benchmarks.retrieval --backbone ../shared/weights/vits14_dinov2_descendant.safetensors
    uv run python -m benchmarks.retrieval --only random      # a million random keys; needs no data

The toolkit's way, in our own words: all features in a flat inner-product index of faiss, all labels as a dense table of
class shares; for each image, search for k = 30 neighbours, gather their features and labels, and weight the labels by
the softmax of the cosines at temperature 0.02. Ours is `nearest` and `Voters.vote`. Both start from the same features
and labels in memory and end with the votes of all query patches; both take turns, with the same number of threads. CPU
seconds are those of the process, which other programs on the machine change less than seconds on the clock.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import faiss
import torch
import torch.nn.functional as F
from benchmarks.search import unit_rows
from torch import Tensor
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as TF

from cribo.data import LabelledImages, LabelledSubset, open_segmentation
from cribo.models import load_backbone
from cribo.retrieval import backbone_encoder, nearest
from cribo.retrieval.search import TensorKeys
from cribo.retrieval.voting import Voters, label_shares

CAMVID = Path(__file__).parents[2] / "shared" / "data" / "camvid"
GRID, NEIGHBOURS, TEMPERATURE = 32, 30, 0.02
PER_IMAGE = GRID * GRID


class Data(NamedTuple):
    """Features of unit length, and the share of each class in the keys' patches."""

    keys: Tensor
    shares: Tensor
    queries: Tensor


def toolkit(data: Data) -> Tensor:
    """Votes by a flat index and dense tables, image by image."""
    index = faiss.IndexFlatIP(data.keys.shape[1])
    index.add(data.keys.numpy())
    votes = []
    for image in data.queries.split(PER_IMAGE):
        _, rows = index.search(image.numpy(), NEIGHBOURS)
        flat = torch.from_numpy(rows).flatten()
        features = F.normalize(data.keys[flat].view(*rows.shape, -1), dim=-1)
        cosines = torch.einsum("qd,qkd->qk", F.normalize(image, dim=-1), features)
        weights = (cosines / TEMPERATURE).softmax(dim=-1)
        votes.append(torch.einsum("qk,qkc->qc", weights, data.shares[flat].view(*rows.shape, -1)))
    return torch.cat(votes)


def ours(data: Data) -> Tensor:
    """Votes by the functions that `cribo evaluate dense-nn` calls."""
    labels = [label_shares(part, "soft") for part in data.shares.split(PER_IMAGE)]
    found = nearest(data.queries, TensorKeys(data.keys), NEIGHBOURS)
    return Voters(labels, data.shares.shape[1]).vote(found, "attention", TEMPERATURE)


def random_data(keys: int, queries: int) -> Data:
    """Random directions, which no bound can tell apart early, with one class each."""
    classes = torch.randint(21, (keys,), generator=torch.Generator().manual_seed(2))
    return Data(unit_rows(keys, 384, 0), F.one_hot(classes, 21).float(), unit_rows(queries, 384, 1))


@torch.no_grad()
def camvid_data(backbone: str, queries: int) -> Data:
    """All training images of CamVid, and some of the validation images, as 32 x 32 patches."""
    encoder = backbone_encoder(load_backbone(backbone).eval())
    side = GRID * encoder.patch_size

    def features(images: LabelledImages) -> Tensor:
        found = []
        for index in range(len(images)):
            pixels = TF.resize(images.load(index), [side, side], antialias=True)
            with torch.autocast("cpu", torch.bfloat16):
                found.append(encoder.grids(pixels[None], "cpu").float().flatten(0, 2))
        return F.normalize(torch.cat(found), dim=-1)

    memory, val = (open_segmentation("camvid", CAMVID, split) for split in ("train", "val"))
    asked = LabelledSubset(val, [number * len(val) // queries for number in range(queries)])
    shares = []
    for index in range(len(memory)):
        labels = TF.resize(memory.labels(index)[None], [side, side], interpolation=InterpolationMode.NEAREST)[0].long()
        table = F.one_hot(labels.where(labels != 255, len(memory.classes)), len(memory.classes) + 1)
        shares.append(F.avg_pool2d(table.permute(2, 0, 1).float()[None], encoder.patch_size)[0].flatten(1).mT)
    return Data(features(memory), torch.cat(shares), features(asked))


class Timed(NamedTuple):
    """Seconds of a call on the clock and of the process's CPU time, and its votes."""

    wall: float
    cpu: float
    votes: Tensor


def timed(call: Callable[[Data], Tensor], data: Data) -> Timed:
    """Time one call."""
    wall, cpu = time.perf_counter(), time.process_time()
    votes = call(data)
    return Timed(time.perf_counter() - wall, time.process_time() - cpu, votes)


def compare(name: str, data: Data, rounds: int) -> None:
    """Print medians of both ways and of the rounds' own ratios, and how far the predicted classes agree."""
    turns = [(timed(ours, data), timed(toolkit, data)) for _ in range(rounds)]
    times = (
        [(mine.wall, theirs.wall) for mine, theirs in turns],
        [(mine.cpu, theirs.cpu) for mine, theirs in turns],
    )
    fields = [
        f"{statistics.median(mine for mine, _ in pairs):.1f} s, toolkit "
        f"{statistics.median(theirs for _, theirs in pairs):.1f} s, "
        f"{statistics.median(theirs / mine for mine, theirs in pairs):.2f} times"
        for pairs in times
    ]
    same = (turns[0][0].votes.argmax(dim=1) == turns[0][1].votes.argmax(dim=1)).double().mean()
    print(f"{name}: {len(data.keys):,} keys, {len(data.queries):,} queries, D = {data.keys.shape[1]}")
    print(f"  clock: ours {fields[0]}\n  CPU:   ours {fields[1]}\n  same class: {same:.4%}", flush=True)


def main() -> None:
    """Time both ways on each set of features."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", help="whose features of CamVid are searched; without it, only random ones are")
    parser.add_argument("--queries", type=int, default=16, help="CamVid's validation images that are labelled")
    parser.add_argument("--only", choices=("camvid", "random"), help="one of the two cases")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of both")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is timed")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    faiss.omp_set_num_threads(arguments.threads)
    print(f"PyTorch {torch.__version__}, faiss {faiss.__version__}, {arguments.threads} threads")
    if arguments.backbone and arguments.only != "random":
        compare("CamVid", camvid_data(arguments.backbone, arguments.queries), arguments.rounds)
    if arguments.only != "camvid":
        compare("random", random_data(1_000_000, 2 * PER_IMAGE), arguments.rounds)


if __name__ == "__main__":
    main()
