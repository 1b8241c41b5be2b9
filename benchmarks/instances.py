"""Instances of blood cells: error of their number and average precision, split or as connected regions.

    uv run python -m benchmarks.instances --backbone WEIGHTS --data BCCD

BCCD has images/train, images/val, instances_train.json and instances_val.json with boxes of cells, which are drawn as
ellipses. Many of its images have cells without a box. Therefore, examples are drawn from the 40 training images whose
ellipses agree best with the pixels below Otsu's threshold of the green channel (IoU). The queries are the validation
images that agree best (complete), and evenly spaced ones (spread). Each row is the mean over the draws.
"""

import argparse
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from faster_coco_eval import COCO, COCOeval_faster
from PIL import Image
from torch import Tensor

from cribo.apps.segment.instances import Instance, Instances, split_instances
from cribo.base.files import read_json
from cribo.data.config import spread
from cribo.data.labelled.coco_writing import mask_annotation
from cribo.data.labelled.regions import ellipse, trace
from cribo.data.labelled.scaling import Scaling
from cribo.data.randomness import keyed_generator
from cribo.features.memory import Example, Segmentation, SegmentationMemory
from cribo.models import load_backbone

_DRAW = 0x636F756E
_PATCH = 14 * 14  # least area of an instance

Masks = list[tuple[int, np.ndarray]]
Rule = Callable[[Segmentation], Instances]


class Annotated(NamedTuple):
    """An image with its cells: class, and (left, top, width, height)."""

    path: Path
    cells: list[tuple[int, list[float]]]

    @property
    def image(self) -> Tensor:
        """The RGB image (3, H, W)."""
        return torch.from_numpy(np.array(Image.open(self.path).convert("RGB"))).permute(2, 0, 1)

    def masks(self) -> Masks:
        """Return the ellipse of each cell, the largest first."""
        with Image.open(self.path) as image:
            width, height = image.size
        scaling = Scaling.unscaled((height, width))
        ordered = sorted(self.cells, key=lambda cell: -cell[1][2] * cell[1][3])
        return [(label, ellipse(x + w / 2, y + h / 2, w / 2, h / 2)(scaling)) for label, (x, y, w, h) in ordered]

    def labels(self) -> Tensor:
        """Return the label map, with smaller cells on top."""
        masks = self.masks()
        labels = np.zeros(masks[0][1].shape, dtype=np.uint8)
        for label, mask in masks:
            labels[mask] = label
        return torch.from_numpy(labels)

    def completeness(self) -> float:
        """Return the IoU of the ellipses and of the dark pixels."""
        green = self.image[1].numpy()
        dark, inside = green <= _otsu(green), self.labels().numpy() > 0
        return float((dark & inside).sum() / (dark | inside).sum())


def _otsu(values: np.ndarray) -> int:
    counts = np.bincount(values.ravel(), minlength=256).astype(float)
    weight, total = counts.cumsum(), (counts * np.arange(256)).cumsum()
    with np.errstate(all="ignore"):
        return int(np.nanargmax((total[-1] * weight / weight[-1] - total) ** 2 / (weight * (weight[-1] - weight))))


def read(folder: Path, split: str) -> tuple[list[str], list[Annotated]]:
    """Read the classes and images of a split."""
    content = read_json(folder / f"instances_{split}.json", limit_bytes=None)
    categories = sorted(content["categories"], key=lambda each: each["id"])
    label = {each["id"]: number for number, each in enumerate(categories, start=1)}
    cells: dict[int, list[tuple[int, list[float]]]] = {each["id"]: [] for each in content["images"]}
    for each in content["annotations"]:
        cells[each["image_id"]].append((label[each["category_id"]], each["bbox"]))
    listed = sorted(content["images"], key=lambda each: each["file_name"])
    images = [Annotated(folder / "images" / split / Path(each["file_name"]).name, cells[each["id"]]) for each in listed]
    return [each["name"] for each in categories], images


def connected(least: int, classes: range) -> Rule:
    """Return connected regions as instances."""

    def rule(found: Segmentation) -> Instances:
        numbers, instances = torch.zeros(found.labels.shape, dtype=torch.int32), []
        for region in trace(found.labels.numpy(), classes):
            if (area := int(region.mask.sum())) >= least:
                h, w = region.mask.shape
                own, mask = (slice(region.top, region.top + h), slice(region.left, region.left + w)), region.mask
                sure = float(found.confidence[own][torch.from_numpy(mask)].mean())
                instances.append(Instance(region.label, area, sure, (region.left, region.top, w, h)))
                numbers[own][torch.from_numpy(mask)] = len(instances)
        return Instances(numbers, instances)

    return rule


def average_precision(truth: list[Masks], found: list[Instances], classes: list[str]) -> tuple[float, float]:
    """Compute AP and AP50 over masks, in %."""
    annotations = [
        {"id": 0, "image_id": number, "category_id": label, "iscrowd": 0, **mask_annotation(mask)}
        for number, masks in enumerate(truth, start=1)
        for label, mask in masks
    ]
    for number, each in enumerate(annotations, start=1):
        each["id"] = number
    images = [{"id": n, "height": m[0][1].shape[0], "width": m[0][1].shape[1]} for n, m in enumerate(truth, start=1)]
    categories = [{"id": number, "name": name} for number, name in enumerate(classes, start=1)]
    results = [
        {"image_id": number, "category_id": each.label, "score": each.confidence, **mask_annotation(mask.numpy())}
        for number, own in enumerate(found, start=1)
        for place, each in enumerate(own.found, start=1)
        for mask in [own.numbers == place]
    ]
    known = COCO({"images": images, "annotations": annotations, "categories": categories})
    silent: Any = lambda *_: None  # noqa: E731
    scores = COCOeval_faster(known, known.loadRes(results), "segm", print_function=silent)
    scores.run()
    return 100 * float(scores.stats[0]), 100 * float(scores.stats[1])


def scored(rule: Rule, segmented: list[Segmentation], queries: list[Annotated], classes: list[str]) -> list[float]:
    """Compute the mean count error per image, the bias of the count, AP and AP50, in %."""
    found, truth = [rule(each) for each in segmented], [query.masks() for query in queries]
    pairs = [(len(own.found), len(masks)) for own, masks in zip(found, truth, strict=True)]
    error = 100 * statistics.fmean(abs(count - true) / true for count, true in pairs)
    bias = 100 * (sum(count for count, _ in pairs) / sum(true for _, true in pairs) - 1)
    return [error, bias, *average_precision(truth, found, classes)]


def main() -> None:
    """Print the table as markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", required=True, help="backbone, as for `cribo segment`")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--number", type=int, default=12, help="number of validation images")
    parser.add_argument("--queries", choices=("complete", "spread"), nargs="+", default=["complete", "spread"])
    arguments = parser.parse_args()
    classes, train = read(arguments.data, "train")
    _, val = read(arguments.data, "val")
    pool = sorted(train, key=Annotated.completeness)[-40:]
    chosen = {
        "complete": sorted(val, key=Annotated.completeness)[-arguments.number :],
        "spread": [val[place] for place in spread(len(val), arguments.number)],
    }
    labels = range(1, len(classes) + 1)

    def split(found: Segmentation) -> Instances:
        return split_instances(found.labels, found.confidence, labels, min_area=_PATCH)

    rules: Mapping[str, Rule] = {
        "connected regions": connected(1, labels),
        "connected regions of at least a patch": connected(_PATCH, labels),
        "split at necks": split,
    }
    backbone = load_backbone(arguments.backbone).eval()
    figures: dict[tuple[str, str], list[list[float]]] = {}
    for draw in range(arguments.draws):
        memory = SegmentationMemory(backbone, classes=["background", *classes])
        for place in torch.randperm(len(pool), generator=keyed_generator(_DRAW, draw))[:8].tolist():
            memory.extend([Example(pool[place].image, pool[place].labels(), pool[place].path.name)])
        for which in arguments.queries:
            segmented = [memory.segment(query.image) for query in chosen[which]]
            for name, rule in rules.items():
                row = scored(rule, segmented, chosen[which], classes)
                figures.setdefault((which, name), []).append(row)
                print(draw, which, name, *(f"{figure:.1f}" for figure in row), flush=True)
    for which in arguments.queries:
        maps = [query.labels() for query in chosen[which]]
        true = [Segmentation(own, torch.ones(own.shape), {}) for own in maps]
        for name, rule in rules.items():
            figures[(which, f"{name}, of the true label maps")] = [scored(rule, true, chosen[which], classes)]
    print("\n| images | instances | count error per image | bias of the count | AP | AP50 |\n|---|---|---|---|---|---|")
    for (which, name), rows in figures.items():
        means = [statistics.fmean(column) for column in zip(*rows, strict=True)]
        print(f"| {which} | {name} | {means[0]:.1f} | {means[1]:+.1f} | {means[2]:.1f} | {means[3]:.1f} |")


if __name__ == "__main__":
    main()
