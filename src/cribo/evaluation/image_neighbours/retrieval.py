"""Image-level nearest neighbours: an image takes the class that its most similar training images vote for.

Global tokens, cosine similarity, and votes that grow with it, as in DINO (Caron et al. 2021) and, before, in
"Unsupervised feature learning via non-parametric instance discrimination" (Wu et al. 2018). Nothing is trained.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from cribo.console import Progress
from cribo.data.classification import ClassifiedFiles
from cribo.evaluation.cache import DTYPES
from cribo.evaluation.image_neighbours.features import ImageFeatures, SquareCrop, extract_global
from cribo.evaluation.image_neighbours.settings import ImageNNSettings, check_neighbours
from cribo.evaluation.machine import Machine
from cribo.retrieval.encoders import ImageEncoder
from cribo.retrieval.search import Neighbours, available_memory, nearest, plan_search

PUBLISHED = 20
"""The k that DINO recommends, and that papers report."""

_NEAREST = 8  # that are told of each image
_VOTES_AT_ONCE = 2**24  # images times classes


@dataclass(frozen=True)
class NeighbourScore:
    """The score with one number of neighbours.

    Attributes:
        neighbours: k.
        predicted: the class of each image that gets most votes, the first of several.
        place: that its own class has among all classes by votes, 0 for the first; C where no neighbour is of it.
        votes: all together, as multiples of the nearest neighbour's.
    """

    neighbours: int
    predicted: Int64[Tensor, " q"]
    place: Int64[Tensor, " q"]
    votes: Float[Tensor, " q"]

    def top(self, number: int) -> float:
        """The share of images whose class is among so many with the most votes, in 0-1."""
        return float((self.place < number).double().mean())

    def per_class(self, labels: Int64[Tensor, " q"], classes: int) -> Float[Tensor, " c"]:
        """The share of each class's images that is classified right, NaN for a class without images."""
        right = torch.bincount(labels[self.place == 0], minlength=classes)
        return right.double() / torch.bincount(labels, minlength=classes)


@dataclass(frozen=True)
class ImageRetrieval:
    """What `image_nn` finds.

    Attributes:
        settings: that were used.
        scores: one for each k.
        nearest: the training images that are most like each image, up to eight of them.
    """

    settings: ImageNNSettings
    scores: tuple[NeighbourScore, ...]
    nearest: Neighbours


@torch.no_grad()
def image_nn(
    encoders: Sequence[ImageEncoder],
    train: ClassifiedFiles,
    val: ClassifiedFiles | None,
    settings: ImageNNSettings | None = None,
    *,
    machine: Machine | None = None,
    progress: Progress | None = None,
) -> ImageRetrieval:
    """Classify images by their nearest training images.

    Args:
        encoders: one for each device of the machine, on that device.
        train: images whose classes are known.
        val: images to classify, of the same classes; None to classify each training image by all the others.
        settings: of the classifier.
        machine: where it is computed.
        progress: is told how far it is.

    Raises:
        ConfigError: more neighbours than there are training images.
        ValueError: other classes in the two sets, or features that cannot be used or kept.
        UnreadableImage: an image that cannot be used.

    Example:
        >>> scores = image_nn([image_encoder(backbone)], train, val).scores  # doctest: +SKIP
        >>> {score.neighbours: score.top(1) for score in scores}  # doctest: +SKIP
    """
    machine = machine or Machine()
    settings = settings or ImageNNSettings()
    asked = train if val is None else val
    if asked.classes != train.classes:
        raise ValueError(f"train and val must have the same classes, got {train.classes} and {asked.classes}")
    check_neighbours(settings.neighbours, len(train), leave_one_out=val is None)
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
    election = _Election(train, asked, settings, machine.devices[0])
    for neighbours in _neighbours(queries, keys, settings, machine, leave_one_out=val is None, progress=progress):
        election.hold(neighbours)
    return election.result()


def _neighbours(
    queries: ImageFeatures,
    keys: ImageFeatures,
    settings: ImageNNSettings,
    machine: Machine,
    *,
    leave_one_out: bool,
    progress: Progress | None,
) -> Iterator[Neighbours]:
    """The nearest keys of all queries in order, of as many queries at once as there is memory for."""
    count = settings.neighbours[-1] + leave_one_out
    plan = plan_search(
        len(queries),
        len(keys),
        keys.dim,
        count,
        key_bytes=DTYPES[settings.precision].itemsize,
        budget=machine.budget,
        device=machine.devices[0],
    )
    # Features and neighbours are on the host, too, and each is copied once on the way.
    limit = available_memory("cpu") // 4 // (8 * keys.dim + 24 * count)
    done = 0

    def report(images: int, compared: int) -> None:
        if progress is not None:
            progress("search [%]", 100 * (done * len(keys) + images * compared) // (len(queries) * len(keys)), 100)

    for chunk in queries.blocks(max(1, min(plan.query_chunk, limit))):
        found = nearest(chunk, keys, count, devices=machine.devices, plan=plan, progress=partial(report, len(chunk)))
        yield _without_themselves(found, done) if leave_one_out else found
        done += len(chunk)


def _without_themselves(found: Neighbours, first: int) -> Neighbours:
    """The neighbours of images that are among the keys, of which they begin with the row `first`."""
    own = torch.arange(first, first + len(found.rows))[:, None]
    # An image whose own row is not there has as many doubles before it; then the last one goes.
    order = (found.rows == own).byte().argsort(dim=1, stable=True)[:, :-1]
    return Neighbours(found.similarity.gather(1, order), found.rows.gather(1, order))


class _Election:
    """Has neighbours vote on the class of each image.

    Args:
        train: who votes.
        asked: on whom they vote.
        settings: with what weight.
        device: where votes are counted.
    """

    def __init__(self, train: ClassifiedFiles, asked: ClassifiedFiles, settings: ImageNNSettings, device: str) -> None:
        self.settings = settings
        self.classes = len(train.classes)
        self._voters = torch.from_numpy(train.labels).to(device)
        self._own = torch.from_numpy(asked.labels)
        self._scores = [
            NeighbourScore(k, torch.empty_like(self._own), torch.empty_like(self._own), torch.empty(len(asked)))
            for k in settings.neighbours
        ]
        self._nearest: list[Neighbours] = []
        self._done = 0

    def hold(self, neighbours: Neighbours) -> None:
        """Vote on the images that come next."""
        self._nearest.append(Neighbours(*(part[:, :_NEAREST].clone() for part in neighbours)))
        at_once = max(1, _VOTES_AT_ONCE // self.classes)
        for similarity, rows in zip(neighbours.similarity.split(at_once), neighbours.rows.split(at_once), strict=True):
            self._vote(similarity.to(self._voters.device), rows.to(self._voters.device))
            self._done += len(rows)

    def _vote(self, similarity: Float[Tensor, "q k"], rows: Int64[Tensor, "q k"]) -> None:
        span = slice(self._done, self._done + len(rows))
        classes, own = self._voters[rows], self._own[span].to(rows.device)
        weights = vote_weights(similarity, self.settings.temperature)
        votes = weights.new_zeros(len(rows), self.classes)
        before = 0
        for score in self._scores:  # k ascends: who votes among 10 does so among 20
            votes.scatter_add_(1, classes[:, before : score.neighbours], weights[:, before : score.neighbours])
            score.predicted[span] = votes.argmax(dim=1).cpu()
            score.place[span] = places(votes, own).cpu()
            score.votes[span] = votes.sum(dim=1).cpu()
            before = score.neighbours

    def result(self) -> ImageRetrieval:
        """What has come out."""
        nearest = Neighbours(*(torch.cat(parts) for parts in zip(*self._nearest, strict=True)))
        return ImageRetrieval(self.settings, tuple(self._scores), nearest)


def vote_weights(similarity: Float[Tensor, "q k"], temperature: float) -> Float[Tensor, "q k"]:
    """The votes of neighbours, exp(cosine / temperature), as shares of that of the nearest one.

    The ranking of the classes is the same, and no temperature is so small that numbers overflow.
    """
    return ((similarity - similarity[:, :1]) / temperature).exp()


def places(votes: Float[Tensor, "q c"], labels: Int64[Tensor, " q"]) -> Int64[Tensor, " q"]:
    """The place of one class among all by their votes: 0 for the first, C for one without votes.

    Of classes with as many votes, the one with the smaller index comes first.

    Example:
        >>> places(torch.tensor([[2.0, 0.0, 2.0]]).expand(3, 3), torch.tensor([0, 1, 2])).tolist()
        [0, 3, 1]
    """
    own = votes.gather(1, labels[:, None])
    before = torch.arange(votes.shape[1], device=votes.device) < labels[:, None]
    place = ((votes > own) | ((votes == own) & before)).sum(dim=1)
    return torch.where(own[:, 0] > 0, place, votes.shape[1])
