"""Segmentation by a few examples on CamVid: mIoU over pixels against the number of examples, and what an image costs.

    uv run python -m benchmarks.segmentation                        # cost alone, each part named
    uv run python -m benchmarks.segmentation --backbone runs/camvid # and the quality of a backbone

A backbone is set beside the mean colour of a patch, and beside the same network before training. Examples are drawn
uniformly among the training images, seeded; the validation images are labelled at their own size.
"""

import argparse
import dataclasses
import statistics
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from benchmarks.measuring import timed
from torch import Tensor

from cribo.allocator import keep_freed_memory
from cribo.data import LabelledImages, LabelledSubset, open_segmentation
from cribo.data.randomness import keyed_generator
from cribo.evaluation.results import iou
from cribo.models import Backbone, build_backbone, load_backbone
from cribo.segmentation import Example, SegmentationMemory, SegmentationSettings
from cribo.segmentation.memory import BackboneLike

CAMVID = Path(__file__).parents[2] / "shared" / "data" / "camvid"
DRAWS, FEW = 3, 20  # so few examples are drawn so often
_DRAW = 0x736567


def untrained(backbone: Backbone) -> Backbone:
    """The same network with random weights."""
    return build_backbone(backbone.name, args=backbone.args, image_size=backbone.image_size, seed=1).eval()


def filled(memory: SegmentationMemory, images: LabelledSubset, chosen: Sequence[int]) -> SegmentationMemory:
    for start in range(0, len(chosen), 8):
        part = chosen[start : start + 8]
        memory.extend([Example(images.load(index), images.labels(index), images.name(index)) for index in part])
    return memory


def chosen_examples(count: int, among: int, draw: int) -> list[int]:
    if count >= among:
        return list(range(among))
    return sorted(torch.randperm(among, generator=keyed_generator(_DRAW, count, draw))[:count].tolist())


def miou(memory: SegmentationMemory, queries: LabelledImages, features: Sequence[Tensor]) -> float:
    """Over all pixels of all images together, of the classes that occur."""
    classes = len(queries.classes)
    confusion = torch.zeros(classes, classes, dtype=torch.long)
    for start in range(0, len(queries), 8):
        part = range(start, min(start + 8, len(queries)))
        for index, votes in zip(part, memory.vote([features[i] for i in part]), strict=True):
            truth, found = queries.labels(index), memory.label(votes, queries.load(index)).labels
            known = truth != queries.ignore_index
            pairs = truth[known].long() * classes + found[known].long()
            confusion += torch.bincount(pairs, minlength=classes**2).view(classes, classes)
    return float(iou(confusion).nanmean())


def quality(name: str, backbone: BackboneLike, settings: SegmentationSettings, arguments: argparse.Namespace) -> None:
    """One row of mIoU."""
    train, val = opened(arguments)
    new = lambda: SegmentationMemory(  # noqa: E731
        backbone, classes=train.classes, settings=settings, device=arguments.device
    )
    features = [new().encode([val.load(index)])[0] for index in range(len(val))]
    cells = []
    for count in arguments.examples:
        draws = DRAWS if count <= FEW else 1
        scores = [
            100 * miou(filled(new(), train, chosen_examples(count, len(train), draw)), val, features)
            for draw in range(draws)
        ]
        cells.append(
            f"{scores[0]:.1f}" if draws == 1 else f"{statistics.fmean(scores):.1f} ± {statistics.stdev(scores):.1f}"
        )
    print(f"| {name} | {' | '.join(cells)} |", flush=True)


def cost(name: str, backbone: BackboneLike, settings: SegmentationSettings, arguments: argparse.Namespace) -> None:
    """Rows of milliseconds for each part of an image, and of what adding an example costs."""
    train, val = opened(arguments)
    image = val.load(0)
    for count in arguments.timed:
        memory = SegmentationMemory(backbone, classes=train.classes, settings=settings, device=arguments.device)
        begun = time.perf_counter()
        filled(memory, train, chosen_examples(count, len(train), 0))
        added = (time.perf_counter() - begun) / count
        features = memory.encode([image])
        votes = memory.vote(features)[0]
        settings_of = {refine: dataclasses.replace(settings, refine=refine) for refine in ("none", settings.refine)}
        parts = [
            partial(memory.encode, [image]),
            partial(memory.vote, features),
            *(partial(label, memory, votes, image, one) for one in settings_of.values()),
        ]
        medians = []
        for part in parts:
            part()
            medians.append(statistics.median(timed(part, arguments.device) for _ in range(arguments.rounds)))
        cells = " | ".join(f"{1000 * seconds:.0f}" for seconds in (*medians, added))
        print(f"| {name} | {count} | {memory.patches} | {cells} |", flush=True)


def label(memory: SegmentationMemory, votes: Tensor, image: Tensor, settings: SegmentationSettings) -> None:
    memory.settings = settings
    memory.label(votes, image)


def opened(arguments: argparse.Namespace) -> tuple[LabelledSubset, LabelledSubset]:
    if not arguments.camvid.is_dir():
        raise SystemExit(f"needs the CamVid data in {arguments.camvid}: give --camvid")
    train, val = (open_segmentation("camvid", arguments.camvid, split) for split in ("train", "val"))
    queries = min(arguments.queries, len(val))
    chosen = [number * len(val) // queries for number in range(queries)]
    return LabelledSubset(train, range(len(train))), LabelledSubset(val, chosen)


def main() -> None:
    """Print the tables as markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--backbone", help="a run folder, file or timm name; a random ViT-S/16 when not given")
    parser.add_argument("--camvid", type=Path, default=CAMVID, help="where CamVid lies")
    parser.add_argument("--examples", type=int, nargs="+", default=[1, 5, 20, 100, 367], help="for the quality")
    parser.add_argument("--timed", type=int, nargs="+", default=[5, 20], help="examples, for the cost")
    parser.add_argument("--queries", type=int, default=101, help="validation images that are labelled")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, help="of the images; the default of `cribo segment` when not given")
    parser.add_argument("--refine", choices=("guided", "bilateral"), default="guided")
    parser.add_argument("--only", choices=("quality", "cost"))
    arguments = parser.parse_args()
    if arguments.device == "cpu":
        keep_freed_memory()  # as `cribo segment` does
    settings = SegmentationSettings(scale=arguments.scale, refine=arguments.refine)
    trained = load_backbone(arguments.backbone) if arguments.backbone else None
    network = trained or build_backbone("vit_small_patch16_224").eval()
    named: dict[str, BackboneLike] = {"mean colour of a patch": "mean-colour"}
    if trained is not None:
        named |= {f"{trained.name}, untrained": untrained(trained), f"{trained.name}, {arguments.backbone}": trained}
    else:
        named[f"{network.name}, untrained"] = network
    if trained is not None and arguments.only != "cost":
        counts = " | ".join(str(count) for count in arguments.examples)
        print(f"mIoU [%] over the pixels of {arguments.queries} images, by the number of examples")
        print(f"\n| features | {counts} |\n|---|{'---|' * len(arguments.examples)}")
        for name, backbone in named.items():
            quality(name, backbone, settings, arguments)
    if arguments.only != "quality":
        print("\nMilliseconds of an image of 480 x 360 pixels, and of adding an example")
        print("\n| features | examples | patches | encode | search and vote | to pixels | refined | add |")
        print(f"|{'---|' * 8}")
        for name, backbone in named.items():
            cost(name, backbone, settings, arguments)


if __name__ == "__main__":
    main()
