"""Training, result rows and pictures of the segmentation protocols."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from cribo.base.console import Phases
from cribo.base.machine import is_first_process
from cribo.data.config import spread
from cribo.data.labelled.crops import Crops, MMSegPreparation, Preparation, SquarePreparation, WholeImages
from cribo.evaluation.pictures import panel_of
from cribo.evaluation.protocol import Outcome
from cribo.evaluation.results import best_place
from cribo.evaluation.run import Run
from cribo.evaluation.segmentation.module import SegmentationModule
from cribo.evaluation.segmentation.settings import SegmentationTrainingSettings, scale_of
from cribo.evaluation.training import fit
from cribo.features.scores import iou


def preparation(settings: SegmentationTrainingSettings, run: Run) -> Preparation:
    """Return the preparation of images for training and scoring."""
    rules, name, crop = settings.rules, run.data.about["name"], settings.crop
    if rules.mask_size is not None:
        return SquarePreparation(crop, rules.mask_size)
    size = settings.stride if name in rules.narrow_crops else crop
    return MMSegPreparation(size, scale_of(name), pad_to=crop, black_padding=name in rules.black_padding)


def train(
    module: SegmentationModule,
    settings: SegmentationTrainingSettings,
    run: Run,
    *,
    sites: int,
    folder: Path,
    label: str,
) -> torch.device:
    """Train and score a module, or resume its training; return its device.

    Args:
        module: trained in place.
        settings: settings of the protocol.
        run: the evaluation.
        sites: number of drop path sites of the network.
        folder: folder of the checkpoints and TensorBoard logs.
        label: label of the progress bar.
    """
    prepared = preparation(settings, run)
    trainer = fit(
        module,
        train=Crops(run.data.train, prepared, settings.seed, sites),
        validation=WholeImages(run.data.val, prepared),
        batch_size=settings.batch_size,
        steps=settings.iterations,
        seed=settings.seed,
        folder=folder,
        label=label,
        runtime=run.runtime,
        console=run.console,
    )
    return trainer.strategy.root_device


def rows_of(confusions: Mapping[float, Int[Tensor, "c c"]], run: Run) -> tuple[list[dict[str, Any]], int]:
    """Return the row of each learning rate and the index of the best one, which has the confusion matrix.

    Args:
        confusions: confusion matrices (labels in rows), by learning rate.
        run: the evaluation.
    """
    rows = []
    for rate, confusion in confusions.items():
        per_class = iou(confusion)
        rows.append(
            {
                "learning_rate": rate,
                "miou": float(per_class.nanmean()),
                "pixel_accuracy": float(confusion.diagonal().sum() / confusion.sum().clamp(min=1)),
                "per_class": dict(zip(run.data.train.classes, per_class.tolist(), strict=True)),
            }
        )
    best = best_place([row["miou"] for row in rows])
    rows[best]["confusion"] = list(confusions.values())[best].tolist()
    return rows, best


def outcome(
    rows: list[dict[str, Any]], segment: Callable[[int], UInt8[Tensor, "h w"]], run: Run, **more: Any
) -> Outcome:
    """Return the outcome of a protocol, with predictions for evenly spaced images of val.

    Args:
        rows: rows of the result.
        segment: returns the class of each pixel of an image of val, given its index; called on rank 0.
        run: the evaluation.
        more: further fields of the outcome.
    """
    panels, val = [], run.data.val
    shown = spread(len(val), run.num_pictures) if is_first_process() else []
    with Phases(run.console) as progress:
        for number, index in enumerate(shown, start=1):
            panels.append(panel_of(val, index, segment(index)))
            progress("pictures", number, len(shown))
    return Outcome(rows, run.data.train.classes, panels, val.palette, **more)
