"""All channels of a made-up microscopy set against three of them and against grey, by eight examples.

    uv run python -m benchmarks.channels --backbone WEIGHTS
    uv run python -m benchmarks.channels --backbone WEIGHTS --bccd BCCD

Each seed makes a set of `tests/microscopy.py`. With `--bccd`, it draws eight images of BCCD (see `instances`) instead,
of which copies with 12 bits, with 16 bits, and with five channels are made, two of them noise. mIoU in % over
validation images, and the difference of the last row to each with an interval over seeds. The best of the choices of
three channels is the one with the highest mean.
"""

import argparse
import statistics
import tempfile
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import numpy as np
import tifffile
import torch
from benchmarks.instances import read
from benchmarks.segmentation import draw_of, scored
from PIL import Image
from tests.microscopy import CHANNELS, write

from cribo.apps.adapt.labelled import open_labelled
from cribo.base.machine import keep_freed_memory
from cribo.data import LabelledSubset
from cribo.data.config import Reading, spread
from cribo.data.sources.collection import open_collection
from cribo.data.survey import surveyed
from cribo.evaluation.intervals import seed_difference
from cribo.features.memory import SegmentationMemory, SegmentationSettings
from cribo.models import Backbone, load_backbone

EXAMPLES, QUERIES = 8, 24


def score(folder: Path, reading: Reading, backbone: Backbone) -> float:
    """Return the mIoU of validation images labelled from all training images, whose range of values is used."""
    reading = surveyed(open_collection(folder / "images" / "train", reading=reading))
    known = open_labelled(folder, reading=reading)
    memory = SegmentationMemory(backbone, classes=known.memory.classes, settings=SegmentationSettings(**reading.given))
    for index in range(len(known.memory)):
        memory.add(known.memory.load(index), known.memory.labels(index), name=known.memory.name(index))
    return scored(memory, LabelledSubset(known.queries, range(len(known.queries))))[0]


def copied(source: Path, folder: Path, change: Callable[[np.ndarray], np.ndarray], seed: int) -> Path:
    """Copy BCCD with changed pixels, (H, W, 3) to (H, W, C), as TIFF: a draw of training images, and validation images.

    Labels are ellipses in the boxes.
    """
    for split, most in (("train", EXAMPLES), ("val", QUERIES)):
        images, labels = folder / "images" / split, folder / "labels" / split
        for each in (images, labels):
            each.mkdir(parents=True)
        classes, annotated = read(source, split)
        annotated = [image for image in annotated if image.cells]
        chosen = draw_of(most, len(annotated), seed) if split == "train" else spread(len(annotated), most)
        for image in (annotated[index] for index in chosen):
            pixels = change(image.image.permute(1, 2, 0).numpy())
            photometric = "rgb" if pixels.shape[2] == 3 else "minisblack"
            tifffile.imwrite(images / f"{image.path.stem}.tif", pixels, photometric=photometric, planarconfig="contig")
            Image.fromarray(image.labels().numpy()).save(labels / f"{image.path.stem}.png")
        (folder / "classes.txt").write_text("\n".join(["background", *classes]) + "\n")
    return folder


def microscopy(seed: int, folder: Path) -> dict[str, tuple[Path, Reading]]:
    """Return the rows of the made-up set: folder and reading of each."""
    colour, grey = write(folder / "channels", seed=seed), folder / "grey"
    for split in ("train", "val"):
        (grey / "images" / split).mkdir(parents=True)
        for file in sorted((colour / "images" / split).iterdir()):
            mean = tifffile.imread(file).mean(axis=0).round().astype(np.uint16)
            tifffile.imwrite(grey / "images" / split / file.name, mean, photometric="minisblack")
    (grey / "labels").symlink_to(colour / "labels")
    (grey / "classes.txt").symlink_to(colour / "classes.txt")
    rows = {"grey, the mean of all": (grey, Reading())}
    for chosen in combinations(range(len(CHANNELS)), 3):
        rows[", ".join(CHANNELS[channel] for channel in chosen)] = colour, Reading(channels=chosen)
    return rows | {"all": (colour, Reading(channels=tuple(range(len(CHANNELS)))))}


def deep_copies(source: Path, seed: int, folder: Path) -> dict[str, tuple[Path, Reading]]:
    """Return the rows of copies of BCCD."""
    generator = np.random.default_rng(seed)

    def with_noise(pixels: np.ndarray) -> np.ndarray:
        noise = generator.integers(0, 256, (*pixels.shape[:2], 2), dtype=np.uint8)
        return np.concatenate([pixels, noise], axis=2).astype(np.uint16) * 16

    eight, sixteen = copied(source, folder / "8", lambda x: x, seed), folder / "16"
    twelve = copied(source, folder / "12", lambda x: x.astype(np.uint16) * 16, seed)
    copied(source, sixteen, lambda x: x.astype(np.uint16) * 257, seed)
    five = copied(source, folder / "5", with_noise, seed)
    return {
        "12 bits": (twelve, Reading(range=(0, 4080))),
        "12 bits, range of the collection": (twelve, Reading()),
        "16 bits": (sixteen, Reading(range=(0, 65535))),
        "16 bits, range of the collection": (sixteen, Reading()),
        "five channels, three chosen": (five, Reading(channels=(0, 1, 2), range=(0, 4080))),
        "five channels, all": (five, Reading(channels=(0, 1, 2, 3, 4), range=(0, 4080))),
        "originals": (eight, Reading()),
    }


def main() -> None:
    """Print the tables as markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", required=True)
    parser.add_argument("--bccd", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    keep_freed_memory()
    backbone = load_backbone(arguments.backbone).eval()
    found: dict[str, list[float]] = {}
    for seed in range(arguments.seeds):
        with tempfile.TemporaryDirectory() as temporary:
            place = Path(temporary)
            rows = microscopy(seed, place) if arguments.bccd is None else deep_copies(arguments.bccd, seed, place)
            for name, (folder, reading) in rows.items():
                found.setdefault(name, []).append(score(folder, reading, backbone))
                print(f"seed {seed}, {name}: {found[name][-1]:.1f}", flush=True)
    (last, of_last), rows = [*found.items()][-1], [*found][:-1]
    best = max(
        (name for name in rows if name.count(",") == 2), key=lambda name: statistics.fmean(found[name]), default=""
    )
    print(f"\n| | mIoU | {last} against it |\n|---|---|---|")
    for name, own in found.items():
        difference = seed_difference(torch.tensor(own), torch.tensor(of_last), comparisons=len(rows))
        interval = "" if difference.low is None or name == last else f" [{difference.low:+.1f}, {difference.high:+.1f}]"
        mark = "**" * (name in (best, last))
        print(f"| {mark}{name}{mark} | {statistics.fmean(own):.1f} | {difference.mean:+.1f}{interval} |")


if __name__ == "__main__":
    main()
