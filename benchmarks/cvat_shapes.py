"""Shapes that CVAT gets for an image, with and without regions smaller than a patch.

    uv run python -m benchmarks.cvat_shapes --backbone WEIGHTS --data SET

SET is a folder with images/train, images/val, labels/train, labels/val and classes.txt. The examples are seven evenly
spread training images, and nine evenly spread validation images are labelled. The accuracy is the mean share of correct
pixels.
"""

import argparse
import statistics
from pathlib import Path

from benchmarks.segmentation import filled

from cribo.apps.adapt.labelled import open_labelled
from cribo.data import LabelledSubset
from cribo.data.config import spread
from cribo.data.labelled.regions import things, trace
from cribo.data.labelled.small_regions import merge_small_regions
from cribo.features.memory import SegmentationMemory
from cribo.models import load_backbone

EXAMPLES, QUERIES = 7, 9


def main() -> None:
    """Print the table as markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", required=True)
    parser.add_argument("--data", type=Path, required=True)
    arguments = parser.parse_args()
    known = open_labelled(arguments.data)
    train = LabelledSubset(known.memory, range(len(known.memory)))
    memory = SegmentationMemory(load_backbone(arguments.backbone).eval(), classes=known.memory.classes)
    filled(memory, train, list(spread(len(train), EXAMPLES)))
    counts: dict[str, list[int]] = {"kept": [], "labelled as the nearest larger region": []}
    correct: dict[str, list[float]] = {row: [] for row in counts}
    for index in spread(len(known.queries), QUERIES):
        truth, labels = known.queries.labels(index), memory.segment(known.queries.load(index)).labels
        patch_area = memory.settings.patch_area(memory.encoder.patch_size, *labels.shape)
        for row, found in zip(counts, (labels, merge_small_regions(labels, patch_area)), strict=True):
            counts[row].append(len(trace(found.numpy(), things(memory.classes))))
            labelled = truth != known.queries.ignore_index
            correct[row].append(float((found == truth)[labelled].float().mean()))
    print("| regions smaller than a patch | shapes of an image | accuracy |\n|---|---|---|")
    for row, each in counts.items():
        shapes = f"{min(each)} to {max(each)}, mean {statistics.fmean(each):.0f}"
        print(f"| {row} | {shapes} | {100 * statistics.fmean(correct[row]):.1f} % |")


if __name__ == "__main__":
    main()
