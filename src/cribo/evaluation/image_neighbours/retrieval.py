"""Image-level nearest-neighbour classification by a vote of the most similar training images.

Uses global tokens and votes weighted by cosine similarity, as in DINO (Caron et al. 2021) and in "Unsupervised feature
learning via non-parametric instance discrimination" (Wu et al. 2018). Nothing is trained.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from cribo.base.console import Progress, no_progress
from cribo.base.errors import InputError
from cribo.data.labelled.classification import ClassifiedFiles
from cribo.evaluation.image_neighbours.settings import PUBLISHED, ImageNNSettings
from cribo.features.cache import Machine
from cribo.features.encoder import Encoder
from cribo.features.image_features import SquareCrop, extract_global
from cribo.features.scores import accuracy, count_confusion
from cribo.features.search import Neighbours

_VOTES_AT_ONCE = 2**24  # maximum number of images times classes
_PAIRS = 50  # number of confused pairs of classes to report
_CONFUSION_CLASSES = 256  # maximum number of classes for a confusion matrix in results


class Predictions(NamedTuple):
    """Predictions with one number of neighbours.

    Attributes:
        classes: class with the most votes of each image, the first on ties.
        place: rank of the true class by votes, 0 for the first; C if no neighbour belongs to it.
        votes: sum of all votes, relative to the vote of the nearest neighbour.
    """

    classes: Int64[Tensor, " q"]
    place: Int64[Tensor, " q"]
    votes: Float[Tensor, " q"]


@dataclass(frozen=True)
class ImageRetrieval:
    """Result of `image_nn`.

    Attributes:
        settings: settings used, without None.
        rows: a row for each k, as in `EvaluationResult.results`: `neighbours`, `top1`, `top5`, `per_class` and
            `confused`, the most frequently confused classes; for `shown` also `confusion`.
        predictions: predictions by k.
        shown: k to show in detail: 20 if available, else the smallest.
        nearest: nearest training images of each image, as many as the largest k.
    """

    settings: ImageNNSettings
    rows: list[dict[str, Any]]
    predictions: dict[int, Predictions]
    shown: int
    nearest: Neighbours


@torch.no_grad()
def image_nn(
    encoders: Sequence[Encoder],
    train: ClassifiedFiles,
    val: ClassifiedFiles | None,
    settings: ImageNNSettings | None = None,
    *,
    machine: Machine | None = None,
    progress: Progress = no_progress,
) -> ImageRetrieval:
    """Classify images by their nearest training images.

    Args:
        encoders: one encoder per device of the machine, on that device.
        train: training images.
        val: images to classify, with the same classes; None to classify each training image by all others.
        settings: settings of the protocol.
        machine: resources of the search.
        progress: progress callback.

    Raises:
        ConfigError: more neighbours than training images.
        ValueError: train and val have different classes, or features are not finite or do not fit.
        UnreadableImage: an image is unreadable.

    Example:
        >>> rows = image_nn([Encoder(backbone)], train, val).rows  # doctest: +SKIP
        >>> {row["neighbours"]: row["top1"] for row in rows}  # doctest: +SKIP
    """
    machine = machine or Machine()
    classified = train if val is None else val
    if classified.classes != train.classes:
        raise InputError(f"train and val must have the same classes, got {train.classes} and {classified.classes}")
    settings = (settings or ImageNNSettings()).for_data(len(train), leave_one_out=val is None)
    encode = partial(
        extract_global,
        encoders,
        preparation=SquareCrop(settings.resize, settings.crop),
        machine=machine,
        precision=settings.precision,
        progress=progress,
    )
    keys = encode(train, what="features of the training images" if val is not None else "features")
    queries = keys if val is None else encode(val, what="features of the images to classify")
    nearest = machine.search(
        next(queries.blocks(len(queries))),
        keys,
        settings.neighbours[-1] + (val is None),
        progress=lambda compared: progress("search [%]", 100 * compared // len(keys), 100),
    )
    if val is None:
        nearest = _without_themselves(nearest)
    predictions = _predictions(nearest, train, classified, settings, machine.devices[0])
    shown = PUBLISHED if PUBLISHED in predictions else settings.neighbours[0]
    rows = [_row(k, found, classified, with_confusion=k == shown) for k, found in predictions.items()]
    return ImageRetrieval(settings, rows, predictions, shown, nearest)


def _row(k: int, found: Predictions, queries: ClassifiedFiles, *, with_confusion: bool) -> dict[str, Any]:
    """Return the row of a result, optionally with the confusion matrix of up to 256 classes."""
    confusion = count_confusion(torch.from_numpy(queries.labels), found.classes, len(queries.classes))
    row = {
        "neighbours": k,
        **{f"top{number}": float((found.place < number).double().mean()) for number in (1, 5)},
        "per_class": dict(zip(queries.classes, accuracy(confusion).tolist(), strict=True)),
        "confused": most_confused(confusion, queries.classes),
    }
    return {**row, "confusion": confusion} if with_confusion and len(queries.classes) <= _CONFUSION_CLASSES else row


def most_confused(confusion: Int64[Tensor, "c c"], classes: Sequence[str]) -> list[dict[str, Any]]:
    """Return the most frequently confused pairs of classes: label, prediction and number of images.

    Example:
        >>> most_confused(torch.tensor([[0, 2], [0, 1]]), ["cat", "dog"])
        [{'label': 'cat', 'prediction': 'dog', 'images': 2}]
    """
    wrong = (confusion - torch.diag(confusion.diagonal())).flatten()
    pairs = wrong.nonzero()[:, 0]
    order = pairs[wrong[pairs].argsort(descending=True, stable=True)[:_PAIRS]]
    return [
        {"label": classes[pair // len(classes)], "prediction": classes[pair % len(classes)], "images": count}
        for pair, count in zip(order.tolist(), wrong[order].tolist(), strict=True)
    ]


def _without_themselves(found: Neighbours) -> Neighbours:
    """Remove each image from its own neighbours; the images are the keys."""
    own = torch.arange(len(found.rows))[:, None]
    # If duplicates displace an image's own row, the last neighbour is removed instead.
    order = (found.rows == own).byte().argsort(dim=1, stable=True)[:, :-1]
    return Neighbours(found.similarity.gather(1, order), found.rows.gather(1, order))


def _predictions(
    nearest: Neighbours, train: ClassifiedFiles, queries: ClassifiedFiles, settings: ImageNNSettings, device: str
) -> dict[int, Predictions]:
    """Classify images by the votes of their nearest training images, with each k."""
    voters, labels = (torch.from_numpy(images.labels).to(device) for images in (train, queries))
    at_once = max(1, _VOTES_AT_ONCE // len(train.classes))
    found: list[list[tuple[Tensor, ...]]] = [[] for _ in settings.neighbours]
    for similarity, rows, own in zip(*(part.split(at_once) for part in (*nearest, labels)), strict=True):
        weights = vote_weights(similarity.to(device), settings.temperature)
        classes, votes, before = voters[rows.to(device)], weights.new_zeros(len(rows), len(train.classes)), 0
        for k, parts in zip(settings.neighbours, found, strict=True):  # k ascends, so votes accumulate
            votes.scatter_add_(1, classes[:, before:k], weights[:, before:k])
            parts.append((votes.argmax(dim=1).cpu(), places(votes, own).cpu(), votes.sum(dim=1).cpu()))
            before = k
    return {
        k: Predictions(*map(torch.cat, zip(*parts, strict=True)))
        for k, parts in zip(settings.neighbours, found, strict=True)
    }


def vote_weights(similarity: Float[Tensor, "q k"], temperature: float) -> Float[Tensor, "q k"]:
    """Return the votes exp(cosine / temperature), divided by that of the nearest neighbour to avoid overflow."""
    return ((similarity - similarity[:, :1]) / temperature).exp()


def places(votes: Float[Tensor, "q c"], labels: Int64[Tensor, " q"]) -> Int64[Tensor, " q"]:
    """Return the rank of a class by votes: 0 for the first, C without votes; ties are ordered by index.

    Example:
        >>> places(torch.tensor([[2.0, 0.0, 2.0]]).expand(3, 3), torch.tensor([0, 1, 2])).tolist()
        [0, 3, 1]
    """
    own = votes.gather(1, labels[:, None])
    before = torch.arange(votes.shape[1], device=votes.device) < labels[:, None]
    place = ((votes > own) | ((votes == own) & before)).sum(dim=1)
    return torch.where(own[:, 0] > 0, place, votes.shape[1])
