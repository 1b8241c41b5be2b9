"""Image-level nearest-neighbour classification by a vote of the most similar training images.

Uses global tokens and votes weighted by cosine similarity, as in DINO (Caron et al. 2021) and in "Unsupervised feature
learning via non-parametric instance discrimination" (Wu et al. 2018). Nothing is trained.
"""

import dataclasses
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from cribo.base.colours import rgb
from cribo.base.console import Phases, Progress, no_progress
from cribo.base.drawing import frame, line_handle
from cribo.base.errors import ConfigError, InputError
from cribo.data.config import spread
from cribo.data.labelled.classification import ClassifiedFiles
from cribo.evaluation.image_neighbours.config import PUBLISHED, ImageNNSettings
from cribo.evaluation.pictures import RIGHT, WRONG, Overlay, Page, Picture, Row, write_pages
from cribo.evaluation.protocol import Outcome, Protocol
from cribo.evaluation.results import EvaluationResult
from cribo.evaluation.run import Run
from cribo.features.cache import Machine
from cribo.features.encoder import Encoder, encoders_on
from cribo.features.image_features import SquareCrop, extract_global
from cribo.features.scores import accuracy, count_confusion
from cribo.features.search import Neighbours
from cribo.models import Backbone

_SHOWN_PAIRS = 10
_NEIGHBOURS = 5  # maximum number of neighbours drawn per image
_CAPTION = 0.32  # height of a caption of two lines in inches
_LETTERS = 20  # maximum characters per line of a caption
_VOTES_AT_ONCE = 2**24  # maximum number of images times classes
_PAIRS = 50  # number of confused pairs of classes to report
_CONFUSION_CLASSES = 256  # maximum number of classes for a confusion matrix in results


@dataclass(frozen=True, kw_only=True)
class ImageNN(ImageNNSettings, Protocol):
    """Image-level nearest-neighbour classification, as in DINO's `eval_knn.py`."""

    def _check_crop(self, backbone: Backbone) -> None:
        """Raise ConfigError if the network does not support images of this size."""
        patch_size, name = backbone.patch_size, backbone.name
        if self.crop % patch_size:
            near = max(patch_size, round(self.crop / patch_size) * patch_size)
            raise ConfigError(
                f"crop must be a multiple of {patch_size}, the patch size of {name}, got {self.crop}: use {near}"
            )
        if not backbone.takes_any_size and self.crop != backbone.image_size:
            raise ConfigError(f"crop must be {backbone.image_size}, the fixed input size of {name}, got {self.crop}")

    def prepare(self, run: Run) -> Self:
        """Set the numbers of neighbours."""
        return self.for_data(len(run.data.train), leave_one_out=run.data.val is None)

    def used(self, run: Run) -> dict[str, Any]:
        """Return the settings, and whether images are classified leave-one-out."""
        return {**dataclasses.asdict(self), "leave_one_out": run.data.val is None}

    def measure(self, run: Run) -> Outcome:
        """Classify the images of val, or each training image by the others."""
        train, val = run.data.train, run.data.val
        queries = train if val is None else val
        self._check_crop(run.backbone)
        encoders = encoders_on(run.backbone, run.devices)
        machine = run.machine(encoders[0].global_identity)
        with Phases(run.console) as progress:
            found = image_nn(encoders, train, val, self, machine=machine, progress=progress)
        chosen = chosen_images(found.predictions[found.shown], run.num_pictures)
        page = partial(neighbours_page, found=found, train=train, queries=queries)
        return Outcome(
            rows=found.rows,
            classes=train.classes,
            write=lambda result, folder: write_pages(folder, "neighbours", chosen, page),
        )

    def report(self, result: EvaluationResult) -> list[Any]:
        """Return a table of the most frequently confused classes."""
        from cribo.base.tables import Table, numbers, texts

        row = next((row for row in result.results if row["neighbours"] == PUBLISHED), result.results[0])
        if not row["confused"]:
            return []
        shown = row["confused"][:_SHOWN_PAIRS]
        rows = [[pair["label"], pair["prediction"], f"{pair['images']:,}"] for pair in shown]
        title = f"Most frequently confused classes, neighbours {row['neighbours']}"
        return [Table([*texts("class", "classified as"), *numbers("images")], [rows], title)]


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


def chosen_images(found: Predictions, number: int) -> list[int]:
    """Choose evenly spaced images to draw, half of them misclassified if there are enough.

    Example:
        >>> found = Predictions(torch.zeros(6).long(), torch.tensor([0, 0, 0, 0, 1, 0]), torch.ones(6))
        >>> chosen_images(found, 4)
        [0, 1, 3, 4]
    """
    right, wrong = (found.place == 0).nonzero()[:, 0].tolist(), (found.place > 0).nonzero()[:, 0].tolist()
    of_wrong = min(len(wrong), max(number // 2, number - len(right)))
    chosen = [right[place] for place in spread(len(right), number - of_wrong)]
    return sorted(chosen + [wrong[place] for place in spread(len(wrong), of_wrong)])


def neighbours_page(
    indices: Sequence[int], found: ImageRetrieval, train: ClassifiedFiles, queries: ClassifiedFiles
) -> Page:
    """Return a page of images with their nearest training images.

    Args:
        indices: indices of the images, at least one.
        found: result of `image_nn`.
        train: training images.
        queries: classified images.
    """
    prepare = SquareCrop(found.settings.resize, found.settings.crop)
    predictions, shown = found.predictions[found.shown], min(found.shown, _NEIGHBOURS)

    def row_of(index: int) -> Row:
        label, predicted = (queries.classes[int(classes[index])] for classes in (queries.labels, predictions.classes))
        verdict = "correct" if label == predicted else f"classified as {predicted}"
        near, similarities = found.nearest.rows[index, :shown], found.nearest.similarity[index, :shown]
        shares = vote_weights(similarities[None], found.settings.temperature)[0] / predictions.votes[index]
        pictures = [Picture(prepare(queries.load(index)), [_caption(_shortened(label), weight="bold")])]
        for row, similarity, share in zip(near.tolist(), similarities.tolist(), shares.tolist(), strict=True):
            name = train.classes[int(train.labels[row])]
            text = f"{_shortened(name)}\n{similarity:.2f}, {100 * share:.0f} %"
            framed = partial(frame, colour=RIGHT if name == label else WRONG, dashed=name != label)
            pictures.append(Picture(prepare(train.load(row)), [_caption(text), framed]))
        return Row(queries.name(index), f"{label}, {verdict}", pictures)

    return Page(
        ("image", *(f"neighbour {place}" for place in range(1, shown + 1))),
        list(map(row_of, indices)),
        [line_handle("same class", rgb(RIGHT)), line_handle("another class", rgb(WRONG), dashed=True)],
        title="Images, up to half of them misclassified, and their nearest training images.\nNumbers below them: "
        f"cosine similarity, and share of the votes of {found.shown} neighbours",
        text=_CAPTION,
    )


def _caption(text: str, **style: Any) -> Overlay:
    return lambda axes: axes.set_xlabel(text, fontsize=8, **style)


def _shortened(name: str) -> str:
    return textwrap.shorten(name, _LETTERS, placeholder="…") if " " in name else name[:_LETTERS]
