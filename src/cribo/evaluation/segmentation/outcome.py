"""Data sets, result rows and pictures of the segmentation protocols."""

from collections.abc import Mapping
from typing import Any

from jaxtyping import Int
from torch import Tensor

from cribo.console import Phases
from cribo.data.crops import LabelledCrops, WholeImages
from cribo.data.squares import SquareCrops, SquareImages
from cribo.evaluation.data import spread
from cribo.evaluation.pages import panel_of
from cribo.evaluation.protocol import Outcome
from cribo.evaluation.runner import Run
from cribo.evaluation.scores import best_place, iou
from cribo.evaluation.segmentation.module import NoisyCrops, SegmentationModule
from cribo.evaluation.segmentation.protocol import SegmentationTraining, scale_of
from cribo.processes import is_first_process


def training_crops(settings: SegmentationTraining, run: Run, sites: int) -> NoisyCrops:
    """Return crops of the training images, with noise for the drop path sites."""
    rules, name, crop = settings.rules, run.data.about["name"], settings.crop
    if rules.mask_size is not None:
        return NoisyCrops(SquareCrops(run.data.train, crop, rules.mask_size, seed=settings.seed), sites)
    crops = LabelledCrops(
        run.data.train,
        settings.stride if name in rules.narrow_crops else crop,
        scale_of(name),
        pad_to=crop,
        black_padding=name in rules.black_padding,
        seed=settings.seed,
    )
    return NoisyCrops(crops, sites)


def whole_images(settings: SegmentationTraining, run: Run) -> WholeImages | SquareImages:
    """Return the images to score."""
    if (mask_size := settings.rules.mask_size) is not None:
        return SquareImages(run.data.val, settings.crop, mask_size)
    return WholeImages(run.data.val, scale_of(run.data.about["name"]))


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
    settings: SegmentationTraining,
    rows: list[dict[str, Any]],
    module: SegmentationModule,
    head: int,
    run: Run,
    **more: Any,
) -> Outcome:
    """Return the outcome of a protocol, with predictions of a head for evenly spaced images of val.

    Args:
        settings: settings of the protocol.
        rows: rows of the result.
        module: trained module, on the device to use.
        head: index of the head.
        run: the evaluation.
        more: further fields of the outcome.
    """
    images, panels, val = whole_images(settings, run), [], run.data.val
    shown = spread(len(images), run.num_pictures) if is_first_process() else []
    module.eval()
    with Phases(run.console) as progress:
        for number, index in enumerate(shown, start=1):
            pixels, labels = images[index].pixels, val.labels(index)
            found = module.segment(pixels.to(module.device), (labels.shape[0], labels.shape[1]))[head].cpu()
            panels.append(panel_of(val, index, found, labels))
            progress("pictures", number, len(shown))
    return Outcome(rows, run.data.train.classes, panels, val.palette, **more)
