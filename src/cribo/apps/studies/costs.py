"""GPU hours of trainings and evaluations, estimated from steps that were profiled on a GPU.

The rates are measurements of benchmarks/RESULTS.md ("On a GPU"). They hold for one NVIDIA H100 in bf16 that does not
wait for data; other networks and image sizes are scaled by the floating-point operations of a forward pass.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from cribo.apps.studies.scores import Score
from cribo.evaluation.published import published_rows
from cribo.models.loading import build_backbone
from cribo.objectives.base import CONTROLS
from cribo.pretraining.config import PretrainConfig

DEVICE = "NVIDIA H100"
"""The GPU of the rates."""

IMAGES: Mapping[str, int] = {"coco": 118_287, "imagenet": 1_281_167}
"""Images of the collections that the studies of the package train on, by `data.root`; for costs without the data."""

# "A step of every objective": seconds per image with ViT-S/16 at 224 px.
_NETWORK, _SIZE, _BATCH = "vit_small_patch16_224", 224, 128
_STEP_MS: Mapping[str, float] = {
    "mae": 44,
    "byol": 86,
    "croc": 104,
    "contextual": 104,
    "slotcon": 115,
    "orl": 116,
    "timet": 120,
    "cribo": 121,
    "dino": 146,
    "ibot": 158,
    "loca": 163,
    "neco": 658,
}
# "A training step": ViT-B/16, 32 objects, on an H200.
_LARGE_STEP_MS: Mapping[tuple[str, str], float] = {("cribo", "vit_base_patch16_224"): 202}
# "Backbone": ViT-B/16, 256 views of 224 px, forward and a whole step.
_FORWARD_MS, _TRAINING_MS, _VIEWS, _LARGE = 31, 140, 256, "vit_base_patch16_224"

_OF_SCHEDULES = "iterations", "epochs"  # settings without which a training's cost is not known
_IMAGE_SIDE = 512  # of images that are encoded at their own size
_DETECTION_AREA = 0.64 * 4 / 3  # shorter sides of 0.6 to 1 times the size, at an aspect ratio of 4 to 3


class Passes(NamedTuple):
    """Images that an evaluation encodes.

    Attributes:
        images: their number, with repetitions.
        side: side of a square of their area, in pixels.
        trains: whether the network is trained.
    """

    images: int
    side: int
    trains: bool = False


def training_seconds(config: PretrainConfig, steps: int) -> float | None:
    """Return the estimated GPU seconds of a training; None if its objective was not profiled.

    Args:
        config: configuration of the training.
        steps: number of optimiser steps.
    """
    objective = "cribo" if config.objective.name in CONTROLS else config.objective.name
    network, images = config.backbone.name, steps * config.optim.batch_size
    if (milliseconds := _LARGE_STEP_MS.get((objective, network))) is not None and config.views.size == _SIZE:
        return images * milliseconds / 1000 / _BATCH
    if objective not in _STEP_MS or config.backbone.args:
        return None
    scale = _operations(network, config.views.size) / _operations(_NETWORK, _SIZE)
    return images * scale * _STEP_MS[objective] / 1000 / _BATCH


def evaluation_seconds(score: Score, network: str) -> float | None:
    """Return the estimated GPU seconds of an evaluation; None if its cost is not known.

    Args:
        score: the evaluation; its data may be missing if they are a published set.
        network: timm name of the network.
    """
    passes = _passes(score)
    if passes is None:
        return None
    reference = _operations(_LARGE, _SIZE)
    return sum(
        each.images
        * (_operations(network, each.side) / reference)
        * (_TRAINING_MS if each.trains else _FORWARD_MS)
        / 1000
        / _VIEWS
        for each in passes
    )


@cache
def _operations(network: str, side: int) -> int:
    """Return the floating-point operations of a forward pass of an image."""
    patch_size = build_backbone(network, initialise=False).patch_size
    side -= side % patch_size
    backbone = build_backbone(network, initialise=False, image_size=side).to("meta")
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        backbone(torch.empty(1, 3, side, side, device="meta"))
    return counter.get_total_flops()


def _passes(score: Score) -> list[Passes] | None:
    """Return what an evaluation encodes, with the published settings where its own are not decided."""
    protocol: Any = score.protocol
    known = _published(score)

    def setting(name: str) -> Any:
        return getattr(protocol, name) if protocol.is_decided(name) else known[f"settings.{name}"]

    def count(*names: str) -> int:
        return sum(known.get(f"data.{name}_images") or 0 for name in names)

    if score.splits is not None:
        train, val = len(score.splits.train), len(score.splits.val or ())
    else:
        train, val = count("train", "memory"), count("val", "queries", "query")
    if not train or (not known and any(getattr(protocol, name, 0) is None for name in _OF_SCHEDULES)):
        return None
    match protocol.name:
        case "dense-nn":
            return [Passes(train + val, _IMAGE_SIDE)]
        case "image-nn":
            return [Passes(train + val, protocol.crop)]
        case "linear" | "segmenter":
            crops = setting("iterations") * setting("batch_size")
            tunes = protocol.name == "segmenter"
            runs = len(setting("learning_rates")) if tunes else 1
            return [Passes(runs * crops, setting("crop"), tunes), Passes(runs * val, _IMAGE_SIDE)]
        case "detection":
            side = round((_DETECTION_AREA**0.5) * setting("size"))
            return [Passes(setting("epochs") * train, side, trains=True), Passes(val, side)]
    return None


def _published(score: Score) -> Mapping[str, Any]:
    """Return the conditions of published values of the same evaluation and data."""
    name = getattr(score.data, "name", "coco")
    rows = (row for row in published_rows() if (row.evaluation, row.data) == (score.protocol.name, name))
    return next((row.conditions for row in rows), {})
