"""Segmentation from a few strokes, beside napari-convpaint with the same strokes and the same backbone.

    uv run --with napari-convpaint python -m benchmarks.strokes --backbone WEIGHTS --data SET [SET ...] --save FILE

SET is a folder with images/train, images/val, labels/train, labels/val and classes.txt. Each seed draws `--examples`
training images, and in each of them up to `--strokes` straight strokes for each class, `WIDTH` pixels wide and at most
`LENGTH` long, in random directions inside the regions of the class. Everything else is unlabelled. Validation images
are labelled at their own size, and the mIoU is that of the classes in their labels.

Convpaint gets the backbone as a feature extractor, with the features that its own extractor of DINOv2 reads (the last
block) and with those that `SegmentationMemory` reads by default (four blocks, each of unit length). Its other settings
are its defaults for DINOv2. Printed are the mean over the seeds and the difference between the first row and each
other row, paired by seed, with intervals corrected for the number of comparisons (Bonferroni).
"""

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.segmentation import draw_of, mean_iou, remembering
from jaxtyping import Bool, Float, UInt8
from torch import Tensor

from cribo.apps.adapt.labelled import open_labelled
from cribo.data import LabelledSubset
from cribo.data.config import spread
from cribo.data.labelled.label_maps import IGNORE_INDEX
from cribo.evaluation.intervals import seed_difference
from cribo.features import Encoder
from cribo.features.memory import Example, SegmentationMemory, SegmentationSettings
from cribo.features.probes.encoding import unit_blocks
from cribo.features.probes.fitting import default_blocks
from cribo.models import load_backbone

WIDTH, LENGTH = 3, 60
"""Width and greatest length of a stroke in pixels."""

_DIRECTIONS = 16

Predict = Callable[[UInt8[Tensor, "3 h w"]], UInt8[Tensor, "h w"]]
"""Predicts the class of each pixel."""


def stroke(region: Bool[np.ndarray, "h w"], generator: np.random.Generator) -> Bool[np.ndarray, "h w"]:
    """Draw a straight stroke from a random pixel of a region, in the direction in which it is longest."""
    rows, columns = region.nonzero()
    start = generator.integers(len(rows))
    row, column, best = int(rows[start]), int(columns[start]), []
    for turn in generator.permutation(_DIRECTIONS):
        down, right = math.sin(2 * math.pi * turn / _DIRECTIONS), math.cos(2 * math.pi * turn / _DIRECTIONS)
        line = []
        for step in range(LENGTH):
            place = round(row + step * down), round(column + step * right)
            if not (0 <= place[0] < region.shape[0] and 0 <= place[1] < region.shape[1] and region[place]):
                break
            line.append(place)
        best = max(best, line, key=len)
    drawn, half = np.zeros_like(region), WIDTH // 2
    for row, column in best:
        drawn[max(0, row - half) : row + half + 1, max(0, column - half) : column + half + 1] = True
    return drawn & region


def strokes(labels: UInt8[np.ndarray, "h w"], count: int, generator: np.random.Generator) -> UInt8[np.ndarray, "h w"]:
    """Return a label map of `count` strokes for each class; 255 elsewhere."""
    drawn = np.full_like(labels, IGNORE_INDEX)
    for label in np.unique(labels[labels != IGNORE_INDEX]):
        for _ in range(count):
            drawn[stroke(labels == label, generator)] = label
    return drawn


def draw(images: LabelledSubset, examples: int, count: int, seed: int) -> list[tuple[Tensor, np.ndarray]]:
    """Draw images and their strokes."""
    chosen, generator = draw_of(examples, len(images), seed), np.random.default_rng(seed)
    return [(images.load(index), strokes(images.labels(index).numpy(), count, generator)) for index in chosen]


def ours(
    encoder: Encoder, classes: Sequence[str], settings: SegmentationSettings, drawn: Sequence[tuple[Tensor, np.ndarray]]
) -> Predict:
    memory = SegmentationMemory(encoder, classes=classes, settings=settings)
    memory.extend([Example(image, labels) for image, labels in drawn])
    return lambda image: memory.segment(image).labels


def convpaint_extractor(encoder: Encoder, name: str, blocks: Sequence[int], *, unit: bool) -> type:
    """Create a feature extractor of convpaint that returns the features of some blocks, and register it."""
    base: Any = import_module("napari_convpaint.feature_extractor").FeatureExtractor
    model: Any = import_module("napari_convpaint.convpaint_model").ConvpaintModel
    places = [encoder.blocks.index(block) for block in blocks]

    class Extractor(base):
        def __init__(self, model_name: str = name, **options: object) -> None:
            super().__init__(model_name=model_name)
            self.patch_size = encoder.patch_size
            self.num_input_channels = [3]
            self.rgb_input = self.has_global_context = True
            self.proposed_scalings = [[1]]

        def get_default_params(self, param: Any = None) -> Any:
            """Return the defaults of convpaint's extractor of DINOv2."""
            param = super().get_default_params(param=param)
            param.tile_image = param.tile_annotations = False
            param.normalize = 1  # none: the encoder normalises values from 0 to 1 itself
            return param

        def extract_features_from_stack(
            self, image: Float[np.ndarray, "3 z h w"], **options: object
        ) -> list[Float[np.ndarray, "f z rows columns"]]:
            planes = torch.from_numpy(np.ascontiguousarray(np.moveaxis(image, 1, 0))).float() / 255
            with torch.no_grad():
                tokens = encoder.tokens(planes.to(encoder.device))
            parts = tokens.unflatten(-1, (len(encoder.blocks), -1))[..., places, :]
            found = unit_blocks(tokens, len(encoder.blocks), places) if unit else parts
            grid = image.shape[2] // encoder.patch_size, image.shape[3] // encoder.patch_size
            rows = found.flatten(2).unflatten(1, grid)
            return [rows.permute(3, 0, 1, 2).cpu().numpy()]

    if not model.FE_MODELS_TYPES_DICT:
        model._init_fe_models_dict()
    model.FE_MODELS_TYPES_DICT[name] = Extractor
    return Extractor


def convpaint(extractor: str, *, forest: bool, drawn: Sequence[tuple[Tensor, np.ndarray]]) -> Predict:
    """Train convpaint's classifier on the strokes."""
    model = import_module("napari_convpaint.convpaint_model").ConvpaintModel(fe_name=extractor, channel_mode="rgb")
    images = [image.numpy() for image, _ in drawn]
    annotations = [np.where(labels == IGNORE_INDEX, 0, labels.astype(np.int32) + 1) for _, labels in drawn]
    model.train(images, annotations, use_rf=forest, fe_use_device="cpu", clf_use_device="cpu")
    return lambda image: torch.from_numpy(model.segment(image.numpy(), fe_use_device="cpu").astype(np.uint8) - 1)


def miou(predict: Predict, queries: LabelledSubset) -> float:
    """Return the mIoU in % over the classes that occur."""

    def predictions() -> Iterator[tuple[Tensor, Tensor]]:
        for index in range(len(queries)):
            truth, found = queries.labels(index), predict(queries.load(index))
            known = truth != queries.ignore_index
            yield truth[known], found[known]

    return mean_iou(predictions(), len(queries.classes))


def report(scores: Mapping[str, Mapping[str, Mapping[str, float]]]) -> None:
    """Print the mean of each row, and the difference between the first row and that row."""
    rows = [row for row in next(iter(scores.values())) if row != OURS]
    for data, found in scores.items():
        seeds = [seed for seed in found[OURS] if all(seed in found[row] for row in rows)]
        print(f"\n{data}, {len(seeds)} seeds\n\n| | mIoU | of each seed | first row minus it |\n|---|---|---|---|")
        values = {row: torch.tensor([found[row][seed] for seed in seeds]) for row in (OURS, *rows)}
        for row, own in values.items():
            each = ", ".join(f"{value:.1f}" for value in own.tolist())
            cell = ""
            if row != OURS:
                gain = seed_difference(own, values[OURS], comparisons=len(rows) * len(scores))
                interval = "" if gain.low is None else f" [{gain.low:+.1f}, {gain.high:+.1f}]"
                cell = f"{gain.mean:+.1f}{interval}"
            print(f"| {row} | {statistics.fmean(own.tolist()):.1f} | {each} | {cell} |")


OURS = "cribo"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", required=True, help="a vision transformer, as for `cribo segment`")
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--examples", type=int, default=4, help="number of images with strokes")
    parser.add_argument("--strokes", type=int, default=2, help="number of strokes for each class of an image")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--queries", type=int, default=30, help="number of validation images to segment")
    parser.add_argument("--save", type=Path, required=True, help="JSON file of the scores; finished ones are kept")
    options = parser.parse_args()
    if find_spec("napari_convpaint") is None:
        sys.exit("napari-convpaint is not installed: run with `uv run --with napari-convpaint`")
    warnings.filterwarnings("ignore", module="napari_convpaint")
    save = options.save.resolve()
    scores: dict[str, dict[str, dict[str, float]]] = json.loads(save.read_text()) if save.exists() else {}
    encoder = remembering(load_backbone(options.backbone).eval())
    last, four = (max(encoder.blocks),), default_blocks(encoder.blocks)
    convpaint_extractor(encoder, "last", last, unit=False)
    convpaint_extractor(encoder, "four", four, unit=True)
    folders = [folder.resolve() for folder in options.data]
    os.chdir(tempfile.mkdtemp())  # CatBoost writes logs into the current folder
    for seed in options.seeds:
        for folder in folders:
            known = open_labelled(folder)
            train = LabelledSubset(known.memory, range(len(known.memory)))
            queries = LabelledSubset(known.queries, spread(len(known.queries), options.queries))
            drawn = draw(train, options.examples, options.strokes, seed)
            rows: dict[str, Callable[[], Predict]] = {
                OURS: lambda drawn=drawn, train=train: ours(encoder, train.classes, SegmentationSettings(), drawn),
                "cribo, images at their own size": lambda drawn=drawn, train=train: ours(
                    encoder, train.classes, SegmentationSettings(scale=1.0), drawn
                ),
            }
            for name, extractor in (("last block", "last"), ("four blocks", "four")):
                for classifier in ("CatBoost", "random forest"):
                    rows[f"convpaint, {name}, {classifier}"] = lambda drawn=drawn, e=extractor, c=classifier: convpaint(
                        e, forest=c != "CatBoost", drawn=drawn
                    )
            for name, fit in rows.items():
                own = scores.setdefault(folder.name, {}).setdefault(name, {})
                if str(seed) in own:
                    continue
                begun = time.process_time()
                predict = fit()
                fitted = time.process_time() - begun
                own[str(seed)] = miou(predict, queries)
                total = time.process_time() - begun
                cost = f"{fitted:.0f} + {total - fitted:.0f} CPU s"
                print(f"{folder.name}, seed {seed}, {name}: {own[str(seed)]:.1f} ({cost})", flush=True)
                save.write_text(json.dumps(scores, indent=1))
    report(scores)


if __name__ == "__main__":
    main()
