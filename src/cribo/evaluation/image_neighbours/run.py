"""Image-level nearest neighbours from beginning to end: backbone, data, score, results and pictures in a folder."""

import dataclasses
import time
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int64
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text
from torch import Tensor

from cribo.console import Phases
from cribo.data.classification import ClassificationSplits, ClassifiedFiles
from cribo.devices import resolve_devices
from cribo.evaluation.data import whole_path
from cribo.evaluation.image_neighbours.config import ImageNNConfig, image_nn_settings, open_image_splits
from cribo.evaluation.image_neighbours.pictures import shown_score, write_image_pictures
from cribo.evaluation.image_neighbours.retrieval import PUBLISHED, NeighbourScore, image_nn
from cribo.evaluation.machine import make_machine
from cribo.evaluation.results import OUT, EvaluationResult, versions
from cribo.folders import ResultFolder
from cribo.retrieval.encoders import open_image_encoders

_SHOWN_PAIRS = 10
_PAIRS = 50  # of classes that are confused most
_CONFUSION_CLASSES = 256  # up to which their confusion is kept whole


def evaluate_image_nn(
    config: ImageNNConfig,
    *,
    out: Path | None = None,
    overwrite: bool = False,
    pictures: int = 6,
    command: str = "",
    console: Console | None = None,
) -> tuple[EvaluationResult, Path]:
    """Score a backbone's global tokens by image-level nearest neighbours, and write results and pictures.

    Args:
        config: what is asked for.
        out: the folder; `evaluations/image-nn-<data>-<backbone>`, numbered, when not given.
        overwrite: replace results that stand in `out`.
        pictures: of how many images the nearest ones are drawn.
        command: by which it can be repeated, for the record.
        console: shows how far it is.

    Returns:
        the result, and the folder it was written to.

    Raises:
        ValueError: backbone, data, settings or folder cannot be used; said before anything is computed, as far as
            it can be known then.
        FileNotFoundError: a file of the backbone or the data is not there.
        ConnectionError: timm's weights cannot be fetched.
        UnreadableImage: an image is broken.
    """
    if pictures < 0:
        raise ValueError(f"pictures must be >= 0, got {pictures}")
    console = console or Console(quiet=True)
    started = time.perf_counter()
    splits = open_image_splits(config.data)
    settings = image_nn_settings(config, splits)
    devices = resolve_devices(config.runtime.devices)
    encoders, about_backbone = open_image_encoders(config.backbone, devices, image_size=settings.crop)
    machine = make_machine(config.runtime, devices, encoders[0], about_backbone)
    folder = ResultFolder(
        out or OUT / f"image-nn-{config.data.name}-{about_backbone['name']}",
        "evaluation",
        numbered=out is None,
        overwrite=overwrite,
        inputs=(config.backbone.source, config.data.root),
    )
    with Phases(console) as progress:
        found = image_nn(encoders, splits.train, splits.val, settings, machine=machine, progress=progress)
    asked = splits.train if splits.val is None else splits.val
    result = EvaluationResult(
        evaluation="image-nn",
        settings={**dataclasses.asdict(settings), "leave_one_out": splits.val is None},
        backbone=about_backbone,
        data=_about_data(config, splits),
        classes=splits.train.classes,
        metrics=["top1", "top5"],
        varies="neighbours",
        results=[_row(score, asked, whole=score is shown_score(found.scores)) for score in found.scores],
        seconds=time.perf_counter() - started,
        versions=versions(devices[0]),
        command=command,
    )

    def write(part: Path) -> None:
        result.write(part)
        write_image_pictures(result, found, splits.train, asked, part, pictures=pictures)

    return result, folder.create(write)


def _about_data(config: ImageNNConfig, splits: ClassificationSplits) -> dict[str, Any]:
    return {
        **dataclasses.asdict(config.data),
        "root": whole_path(config.data.root),
        "train": splits.train_name,
        "val": splits.val_name,
        "train_images": len(splits.train),
        "val_images": None if splits.val is None else len(splits.val),
    }


def _row(score: NeighbourScore, asked: ClassifiedFiles, *, whole: bool) -> dict[str, Any]:
    """What is told of a score; the confusion of all classes of one score only, and of no more classes than fit."""
    labels = torch.from_numpy(asked.labels)
    classes = len(asked.classes)
    row = {
        "neighbours": score.neighbours,
        "top1": score.top(1),
        "top5": score.top(5),
        "per_class": dict(zip(asked.classes, score.per_class(labels, classes).tolist(), strict=True)),
        "confused": most_confused(labels, score.predicted, asked.classes),
    }
    if whole and classes <= _CONFUSION_CLASSES:
        counts = torch.bincount(labels * classes + score.predicted, minlength=classes**2)
        row["confusion"] = counts.view(classes, classes).tolist()
    return row


def most_confused(
    labels: Int64[Tensor, " q"], predicted: Int64[Tensor, " q"], classes: list[str], most: int = _PAIRS
) -> list[dict[str, Any]]:
    """The pairs of classes of which one is most often taken for the other: label, prediction and how often.

    Example:
        >>> most_confused(torch.tensor([0, 0, 1]), torch.tensor([1, 1, 1]), ["cat", "dog"])
        [{'label': 'cat', 'prediction': 'dog', 'images': 2}]
    """
    wrong = labels != predicted
    pairs, counts = (labels[wrong] * len(classes) + predicted[wrong]).unique(return_counts=True)
    order = counts.argsort(descending=True, stable=True)[:most]
    return [
        {"label": classes[pair // len(classes)], "prediction": classes[pair % len(classes)], "images": count}
        for pair, count in zip(pairs[order].tolist(), counts[order].tolist(), strict=True)
    ]


def confused_table(result: EvaluationResult) -> list[RenderableType]:
    """For a terminal, the classes that are confused most with the k of the pictures; empty if none are."""
    row = next((row for row in result.results if row["neighbours"] == PUBLISHED), result.results[0])
    if not row["confused"]:
        return []
    table = Table()
    for name in ("class", "taken for"):
        table.add_column(name, overflow="fold")
    table.add_column("images", justify="right")
    for pair in row["confused"][:_SHOWN_PAIRS]:
        table.add_row(Text(pair["label"]), Text(pair["prediction"]), f"{pair['images']:,}")
    return [Text(f"Confused most, neighbours {row['neighbours']}", style="bold"), table]
