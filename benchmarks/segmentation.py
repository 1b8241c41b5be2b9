"""Few-shot segmentation: scores of fixed and chosen probes, calibration, suggestions and run time.

    uv run python -m benchmarks.segmentation --backbone WEIGHTS --data SET [SET ...]
    uv run python -m benchmarks.segmentation --backbone WEIGHTS --data SET --only cost
    uv run python -m benchmarks.segmentation --backbone WEIGHTS --data SET --rows chosen --save scores.json
    uv run python -m benchmarks.segmentation --backbone WEIGHTS --data SET --only prompts --draws 3 --queries 50
    uv run python -m benchmarks.segmentation --compare before.json after.json

SET is a folder with images/train, images/val, labels/train, labels/val and classes.txt. Examples are drawn uniformly
from the training images; validation images are labelled at their own size. Each row is the mean over the draws:
mIoU and expected calibration error over pixels, both in %. `--compare` prints the paired differences over draws of two
files of `--save`, of two versions of the code, with intervals that hold together (Bonferroni).
"""

import argparse
import dataclasses
import hashlib
import json
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from benchmarks.measuring import timed
from torch import Tensor

from cribo.apps.adapt.labelled import open_labelled
from cribo.apps.segment.suggesting import suggest
from cribo.base.machine import keep_freed_memory
from cribo.data import LabelledSubset
from cribo.data.config import spread
from cribo.data.labelled.label_maps import IGNORE_INDEX, LabelledBox, LabelMap
from cribo.data.labelled.regions import trace
from cribo.data.randomness import keyed_generator
from cribo.evaluation.intervals import seed_difference
from cribo.features import Encoder
from cribo.features.memory import Example, SegmentationMemory, SegmentationSettings, probe_encoder
from cribo.features.probes.fitting import default_blocks
from cribo.features.scores import calibration_error, count_confusion, iou
from cribo.models import Backbone, build_backbone, load_backbone

FIGURES = ("mIoU", "calibration error", "CPU seconds of the choice")

LEAST_REGION = 0.01
"""Smallest region that is marked as an example, relative to the image."""

_DRAW = 0x736567
_EVERY = 7  # pixels for the calibration error


def remembering(backbone: Backbone) -> Encoder:
    """Return the encoder of all candidate blocks with a cache of features."""
    encoder = probe_encoder(backbone)
    known: dict[str, Tensor] = {}

    def encode(images: Tensor) -> Tensor:
        keys = [hashlib.sha256(image.numpy().tobytes()).hexdigest() for image in images]
        for key, image in zip(keys, images, strict=True):
            if key not in known:
                known[key] = encoder.tokens(image[None])[0].half()
        return torch.stack([known[key] for key in keys]).float()

    return encoder.through(encode)


def rows_of(blocks: Sequence[int]) -> dict[str, dict[str, object]]:
    """Return the settings of each row, for an encoder of these blocks."""
    depth, middle = max(blocks), default_blocks(blocks)
    last, third_quarter = (depth,), (round(depth * 0.75),)
    plain = {"head": "knn", "whiten": False, "prior": 1.0}
    rows: dict[str, dict[str, object]] = {
        "last block (before)": {"blocks": last, **plain, "neighbours": 5, "temperature": 0.02},
        "last block": {"blocks": last, **plain},
    }
    if len(blocks) > 1:
        rows["block at 3/4"] = {"blocks": third_quarter, **plain}
    return rows | {
        "four blocks, ridge": {"blocks": middle, "head": "ridge", "whiten": False},
        "four blocks, both": {"blocks": middle, "head": "both", "whiten": False},
        "four blocks, whitened, both": {"blocks": middle, "head": "both", "whiten": True},
        "chosen": {},
    }


def draw_of(count: int, among: int, draw: int) -> list[int]:
    """Draw the indices of the examples."""
    return sorted(torch.randperm(among, generator=keyed_generator(_DRAW, count, draw))[:count].tolist())


def filled(memory: SegmentationMemory, images: LabelledSubset, chosen: Sequence[int]) -> SegmentationMemory:
    for start in range(0, len(chosen), 8):
        part = chosen[start : start + 8]
        memory.extend([Example(images.load(index), images.labels(index), images.name(index)) for index in part])
    return memory


def scored(memory: SegmentationMemory, queries: LabelledSubset) -> tuple[float, float]:
    """Compute the mIoU over the classes that occur, and the calibration error, in % over pixels."""
    confidence, right = [], []

    def predictions() -> Iterator[tuple[Tensor, Tensor]]:
        for index in range(len(queries)):
            truth, found = queries.labels(index), memory.segment(queries.load(index))
            known = truth != queries.ignore_index
            confidence.append(found.confidence[known][::_EVERY])
            right.append((truth == found.labels)[known][::_EVERY].float())
            yield truth[known], found.labels[known]

    score = mean_iou(predictions(), len(queries.classes))
    return score, 100 * calibration_error(torch.cat(confidence), torch.cat(right))


def mean_iou(pairs: Iterable[tuple[Tensor, Tensor]], classes: int) -> float:
    """Compute the mIoU in % over the classes that occur, from labels and predictions of labelled pixels."""
    confusion = torch.zeros(classes, classes, dtype=torch.long)
    for labels, predicted in pairs:
        confusion += count_confusion(labels, predicted, classes)
    return 100 * float(iou(confusion)[confusion.sum(dim=1) > 0].mean())


def save(file: Path, key: str, draw: int, figures: Mapping[str, float]) -> None:
    """Add the figures of a draw to a JSON file."""
    saved = json.loads(file.read_text()) if file.exists() else {}
    saved.setdefault(key, {})[str(draw)] = figures
    file.write_text(json.dumps(saved, indent=1))


def compare(before: Path, after: Path) -> None:
    """Print the difference of each figure, paired over the draws that both files have."""
    both = [json.loads(file.read_text()) for file in (before, after)]
    keys = [key for key in both[0] if key in both[1]]
    print(f"| | draws | {' | '.join(FIGURES)} |\n|---|---|{'---|' * len(FIGURES)}")
    for key in keys:
        draws = [draw for draw in both[0][key] if draw in both[1][key]]
        cells = []
        for name in FIGURES:
            old, new = (torch.tensor([saved[key][draw][name] for draw in draws]) for saved in both)
            found = seed_difference(old, new, comparisons=len(keys))
            interval = "" if found.low is None else f" [{found.low:+.1f}, {found.high:+.1f}]"
            cells.append(f"{old.mean():.1f} → {new.mean():.1f}, {found.mean:+.1f}{interval}")
        print(f"| {key} | {len(draws)} | {' | '.join(cells)} |")


def quality(
    folder: Path, train: LabelledSubset, val: LabelledSubset, encoder: Encoder, arguments: argparse.Namespace
) -> None:
    """Print a table of mIoU and calibration error by the number of examples."""
    found: dict[str, list[str]] = {}
    for count in arguments.examples:
        scores: dict[str, list[tuple[float, float]]] = {}
        expected = []
        for draw in range(arguments.first, arguments.first + arguments.draws):
            for name, values in rows_of(encoder.blocks).items():
                if name not in (arguments.rows or (name,)):
                    continue
                memory = SegmentationMemory(encoder, classes=train.classes, settings=settings_of(values, arguments))
                filled(memory, train, draw_of(count, len(train), draw))
                begun = time.process_time()
                expectation = memory.fit().expected
                seconds = time.process_time() - begun
                scores.setdefault(name, []).append(scored(memory, val))
                if arguments.save:
                    network = Path(arguments.backbone or "random").stem
                    key = f"{folder.name}, {network}, {name}, {count} examples"
                    figures = (*scores[name][-1], seconds)
                    save(arguments.save, key, draw, dict(zip(FIGURES, figures, strict=True)))
                if name == "chosen":
                    expected.append(100 * (expectation or float("nan")))
        for name, own in scores.items():
            cell = f"{statistics.fmean(score for score, _ in own):.1f}"
            if name in ("chosen", "last block (before)"):
                cell += f" (error {statistics.fmean(error for _, error in own):.1f})"
            found.setdefault(name, []).append(cell)
        best = [max(scores[name][draw][0] for name in scores) for draw in range(arguments.draws)]
        found.setdefault("best row of each draw", []).append(f"{statistics.fmean(best):.1f}")
        if expected:
            found.setdefault("expected by the fit", []).append(f"{statistics.fmean(expected):.1f}")
    print(f"| | {' | '.join(map(str, arguments.examples))} |\n|---|{'---|' * len(arguments.examples)}")
    for name, cells in found.items():
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def suggestions(train: LabelledSubset, val: LabelledSubset, encoder: Encoder, arguments: argparse.Namespace) -> None:
    """Print the mIoU after labelling suggested or random images, starting from the same two examples."""
    pool = LabelledSubset(train, spread(len(train), arguments.pool))
    curves: dict[str, list[list[float]]] = {"suggested": [], "random": []}
    for draw in range(arguments.draws):
        first = draw_of(2, len(pool), draw)
        order = torch.randperm(len(pool), generator=keyed_generator(_DRAW, draw)).tolist()
        for name, curve in curves.items():
            memory = SegmentationMemory(encoder, classes=train.classes, settings=settings_of({}, arguments))
            filled(memory, pool, first)
            labelled, points = list(first), [scored(memory, val)[0]]
            for _ in range(3):
                left = [index for index in order if index not in labelled]
                chosen = left[:3]
                if name == "suggested":
                    chosen = [left[index] for index in suggest(memory, (pool.load(index) for index in left), 3)]
                labelled += chosen
                points.append(scored(filled(memory, pool, chosen), val)[0])
            curve.append(points)
    print("| next images | 2 | 5 | 8 | 11 |\n|---|---|---|---|---|")
    for name, curve in curves.items():
        print(f"| {name} | {' | '.join(f'{statistics.fmean(own):.1f}' for own in zip(*curve, strict=True))} |")


def region_of(labels: Tensor, label: int) -> Tensor | None:
    """Return the pixels of the largest connected region of a class, if it covers 1 % of the image or more."""
    largest = next(iter(trace(labels.numpy(), [label])), None)
    if largest is None or largest.mask.sum() < LEAST_REGION * labels.numel():
        return None
    height, width = largest.mask.shape
    region = torch.zeros_like(labels, dtype=torch.bool)
    region[largest.top : largest.top + height, largest.left : largest.left + width] = torch.from_numpy(largest.mask)
    return region


def marked(train: LabelledSubset, draw: int) -> dict[int, tuple[int, Tensor]]:
    """Draw an image and its region for each class except the background; each image serves one class."""
    order = torch.randperm(len(train), generator=keyed_generator(_DRAW, draw)).tolist()
    found: dict[int, tuple[int, Tensor]] = {}
    for label in range(train.classes[0] == "background", len(train.classes)):
        used = [index for index, _ in found.values()]
        for index in order:
            region = None if index in used else region_of(train.labels(index), label)
            if region is not None:
                found[label] = index, region
                break
    return found


def prompted(labels: Tensor, label: int, region: Tensor, kind: str, background: bool) -> LabelMap:
    """Return the labels of an image with one marked region: as a mask, as a box, or as a filled box.

    Without a class for the background, all other pixels have no class. With one, pixels outside the mask or box are
    background, except those of other objects, which have no class in all cases.
    """
    known = torch.full_like(labels, IGNORE_INDEX)
    if background:
        known[labels == 0] = 0
    rows, columns = (region.any(dim=side).nonzero()[:, 0] for side in (1, 0))
    left, top, right, bottom = int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1
    if kind == "mask":
        known[region] = label
        return LabelMap(known)
    known[top:bottom, left:right] = label if kind == "filled box" else IGNORE_INDEX
    box = LabelledBox(label, (left, top, right, bottom), rest=0 if background else IGNORE_INDEX)
    return LabelMap(known, boxes=() if kind == "filled box" else (box,))


def prompts(train: LabelledSubset, val: LabelledSubset, encoder: Encoder, arguments: argparse.Namespace) -> None:
    """Print the mIoU of one mask for each class, and the ratios to it of one box for each class."""
    scores: dict[str, list[float]] = {"mask": [], "box": [], "filled box": []}
    background = train.classes[0] == "background"
    for draw in range(arguments.first, arguments.first + arguments.draws):
        regions = marked(train, draw)
        for kind, own in scores.items():
            memory = SegmentationMemory(encoder, classes=train.classes, settings=settings_of({}, arguments))
            for label, (index, region) in regions.items():
                known = prompted(train.labels(index), label, region, kind, background)
                memory.add(train.load(index), known, name=train.name(index))
            own.append(scored(memory, val)[0])
            print(f"draw {draw}, {len(regions)} examples, {kind}: {own[-1]:.1f}", flush=True)
    print("\n| one for each class | mIoU | ratio to masks | of each draw |\n|---|---|---|---|")
    for kind, own in scores.items():
        ratios = [score / best for score, best in zip(own, scores["mask"], strict=True)]
        each = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        print(f"| {kind} | {statistics.fmean(own):.1f} | {statistics.fmean(ratios):.2f} | {each} |", flush=True)


def cost(train: LabelledSubset, val: LabelledSubset, backbone: Backbone, arguments: argparse.Namespace) -> None:
    """Print the seconds of each part with the current defaults and with the previous ones."""
    image = val.load(0)
    print("| seconds | encode the examples | fit | encode an image | label patches | segment an image |")
    print(f"|{'---|' * 6}")
    rows = rows_of(probe_encoder(backbone).blocks)
    for name in ("last block (before)", "chosen"):
        memory = SegmentationMemory(backbone, classes=train.classes, settings=settings_of(rows[name], arguments))
        begun = time.perf_counter()
        filled(memory, train, draw_of(8, len(train), 0))
        added = time.perf_counter() - begun
        begun = time.perf_counter()
        fitted = memory.fitted()
        choosing = time.perf_counter() - begun
        encode = partial(memory.encode, [image], fitted.choice.probe.blocks)
        patches = fitted.rows(encode()[0].flatten(0, 1))
        parts = [encode, partial(fitted, patches), partial(memory.segment, image)]
        medians = [statistics.median(timed(part, "cpu") for _ in range(arguments.rounds)) for part in parts]
        print(
            f"| {name} | {added:.2f} | {choosing:.2f} | {' | '.join(f'{each:.3f}' for each in medians)} |", flush=True
        )


def settings_of(values: Mapping[str, object], arguments: argparse.Namespace) -> SegmentationSettings:
    """Return the default settings with changed values."""
    return dataclasses.replace(SegmentationSettings(scale=arguments.scale), **values)


def main() -> None:
    """Print the tables as markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", help="backbone, as for `cribo segment`; by default a random ViT-S/16")
    parser.add_argument("--untrained", action="store_true", help="use random weights")
    parser.add_argument("--data", type=Path, nargs="+", default=[])
    parser.add_argument("--examples", type=int, nargs="+", default=[1, 2, 8, 32])
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--first", type=int, default=0, help="number of the first draw")
    parser.add_argument("--rows", nargs="+", help="names of the rows of quality; by default all")
    parser.add_argument("--save", type=Path, help="JSON file to which the scores of each draw are added")
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("BEFORE", "AFTER"), help="two files of --save")
    parser.add_argument("--queries", type=int, default=15, help="number of validation images to segment")
    parser.add_argument("--pool", type=int, default=100, help="number of images to suggest from")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, help="scale of the images; by default that of `cribo segment`")
    parser.add_argument("--only", choices=("quality", "suggestions", "prompts", "cost"))
    arguments = parser.parse_args()
    if arguments.compare:
        compare(*arguments.compare)
        return
    if not arguments.data:
        parser.error("--data is required")
    keep_freed_memory()  # as `cribo segment` does
    backbone = load_backbone(arguments.backbone) if arguments.backbone else build_backbone("vit_small_patch16_224")
    if arguments.untrained:
        backbone = build_backbone(backbone.name, args=backbone.args, image_size=backbone.image_size, seed=1)
    encoder = remembering(backbone.eval())
    for folder in arguments.data:
        known = open_labelled(folder)
        train = LabelledSubset(known.memory, range(len(known.memory)))
        val = LabelledSubset(known.queries, spread(len(known.queries), arguments.queries))
        parts = {
            "quality": partial(quality, folder, train, val, encoder, arguments),
            "suggestions": partial(suggestions, train, val, encoder, arguments),
            "prompts": partial(prompts, train, val, encoder, arguments),
            "cost": partial(cost, train, val, backbone, arguments),
        }
        for name, part in parts.items():
            if arguments.only in (None, name):
                print(f"\n{folder.name}, {backbone.name}: {name}\n")
                part()


if __name__ == "__main__":
    main()
