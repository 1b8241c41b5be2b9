"""Dense retrieval and segmentation on labelled images, scored per image for confidence intervals of differences."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import normalize

from cribo.apps.adapt.encoding import encode
from cribo.base.errors import ConfigError
from cribo.data import LabelledImages, open_segmentation
from cribo.data.config import DEFAULT_READING, Reading, spread
from cribo.evaluation.intervals import resampled
from cribo.features.config import ProbeSettings
from cribo.features.patches import grid_counts, labels_in_memory, majority_label
from cribo.features.probes.encoding import encode_grids, probe_encoder
from cribo.features.probes.examples import content_hash, label_features
from cribo.features.probes.fitting import MOST_PATCHES, LabelledPatches, fit_probe, left_out_confusions, thinned
from cribo.features.scores import count_confusion, iou
from cribo.features.search import TensorKeys, nearest
from cribo.features.voting import Voters, label_shares
from cribo.models import Backbone

LEAST_IMAGES = 10
"""Minimum number of labelled images; with fewer, intervals are uninformative."""

_MOST_IMAGES = 150  # in the memory, and among the queries
_MOST_EXAMPLES = 24  # examples of a segmentation
_FOLDS = 5
_NEIGHBOURS = 20
_TEMPERATURE = 0.07


@dataclass(frozen=True)
class Labelled:
    """Labelled images, divided into memory and queries.

    Attributes:
        memory: images whose patches vote.
        queries: images to score.
        folds: pairs (indices of memory images, indices of queries); each query is in exactly one fold.
        name: name for messages.
    """

    memory: LabelledImages
    queries: LabelledImages
    folds: Sequence[tuple[Sequence[int], Sequence[int]]]
    name: str


def open_labelled(folder: str | Path, *, reading: Reading = DEFAULT_READING) -> Labelled:
    """Open a folder with `images/`, `labels/` and optionally `classes.txt`; the first two may have `train/` and `val/`.

    With `train` and `val`, patches of `val` are labelled by those of `train`; otherwise, by five-fold
    cross-validation. Up to 150 images of each split are used, evenly spaced.

    Raises:
        DataError: the folder has no images or labels.
        ConfigError: there are fewer than ten images to score.
    """
    root = Path(folder).expanduser()
    if all((root / "images" / split).is_dir() for split in ("train", "val")):
        memory, queries = (open_segmentation("folder", root, split, reading=reading) for split in ("train", "val"))
        folds = [(spread(len(memory), _MOST_IMAGES), spread(len(queries), _MOST_IMAGES))]
    else:
        memory = open_segmentation("folder", root, "", reading=reading)
        queries, used = memory, spread(len(memory), _MOST_IMAGES)
        folds = [
            ([image for place, image in enumerate(used) if place % _FOLDS != fold], used[fold::_FOLDS])
            for fold in range(_FOLDS)
        ]
    scored = sum(len(indices) for _, indices in folds)
    if scored < LEAST_IMAGES:
        raise ConfigError(
            f"{root} has {scored} labelled images to score, but the verdict needs at least {LEAST_IMAGES}: "
            "label more, or omit them for a verdict without labels"
        )
    return Labelled(memory, queries, folds, str(root))


def score_images(
    backbone: Backbone, labelled: Labelled, progress: Callable[[int, int], None] = lambda done, total: None
) -> Int[Tensor, "q c c"]:
    """Compute the confusion matrix (rows are labels) of each scored image, counting patches.

    The label of a patch is predicted by its 20 nearest patches by cosine similarity, weighted by a softmax at
    temperature 0.07.

    Args:
        backbone: the backbone, on its device.
        labelled: the images.
        progress: called with the number of encoded images and their total.
    """
    memory, queries = labelled.memory, labelled.queries
    classes, ignore = len(queries.classes), queries.ignore_index
    # Keys (is a query, index); with cross-validation, all images are queries.
    wanted = {(memory is queries, index) for voting, _ in labelled.folds for index in voting}
    wanted |= {(True, index) for _, scored in labelled.folds for index in scored}
    encoded: dict[tuple[bool, int], tuple[Tensor, Tensor]] = {}
    for done, (is_query, index) in enumerate(sorted(wanted), start=1):
        encoded[is_query, index] = _encoded(backbone, queries if is_query else memory, index)
        progress(done, len(wanted))
    tallies: list[Tensor] = []
    for voting, scored in labelled.folds:
        keys, shares = [], []
        for features, counts in (encoded[memory is queries, index] for index in voting):
            own, kept = labels_in_memory(counts, "drop")
            keys.append(features[kept])
            shares.append(label_shares(own[kept], "hard"))
        rows = TensorKeys(torch.cat(keys))
        features, counted = zip(*(encoded[True, index] for index in scored), strict=True)
        found = nearest(torch.cat(features), rows, min(_NEIGHBOURS, len(rows)))
        predicted = Voters(shares, len(memory.classes)).vote(found, "attention", _TEMPERATURE).argmax(dim=1)
        for counts, own in zip(counted, predicted.split(list(map(len, counted))), strict=True):
            labels = majority_label(counts, "drop", ignore)
            tallies.append(count_confusion(labels[labels != ignore], own[labels != ignore], classes))
    return torch.stack(tallies)


def _encoded(
    backbone: Backbone, images: LabelledImages, index: int
) -> tuple[Float[Tensor, "n d"], Int[Tensor, "n c_plus_1"]]:
    features = encode(backbone, images.load(index))
    counts = grid_counts(images.labels(index), features.grid, len(images.classes), images.ignore_index)
    return normalize(features.tokens[0].float().cpu(), dim=-1), counts


def mean_iou(tallies: Int[Tensor, "q c c"]) -> float:
    """Compute the mean IoU, in 0-1, over the classes that occur in the labels."""
    confusion = tallies.sum(dim=0)
    # Average over the classes in the ground truth, so that all networks are scored on the same classes.
    return float(iou(confusion)[confusion.sum(dim=1) > 0].mean())


@dataclass(frozen=True)
class Gain:
    """Difference of two mean IoUs, in 0-1, with a 95 % confidence interval.

    Attributes:
        before, after: the mean IoUs.
        low, high: bounds of the difference, from a paired bootstrap over the scored images.
    """

    before: float
    after: float
    low: float
    high: float

    @property
    def mean(self) -> float:
        """The difference, after minus before."""
        return self.after - self.before

    def __str__(self) -> str:
        difference = f"{100 * self.mean:+.1f} [{100 * self.low:+.1f}, {100 * self.high:+.1f}]"
        return f"{100 * self.before:.1f} -> {100 * self.after:.1f} % mIoU ({difference})"


def gain(before: Int[Tensor, "q c c"], after: Int[Tensor, "q c c"]) -> Gain:
    """Compute the gain of one network over another on the same images by a paired bootstrap of 1,000 resamples.

    Example:
        >>> right, wrong = torch.tensor([[[4, 0], [0, 4]]] * 10), torch.tensor([[[2, 2], [2, 2]]] * 10)
        >>> print(gain(wrong, right))
        33.3 -> 100.0 % mIoU (+66.7 [+66.7, +66.7])
    """
    times = resampled(len(before))
    scores = [
        torch.tensor([mean_iou(drawn[None]) for drawn in torch.einsum("rq,qcd->rcd", times, tallies.double())])
        for tallies in (before, after)
    ]
    low, high = (scores[1] - scores[0]).quantile(torch.tensor([0.025, 0.975])).tolist()
    return Gain(mean_iou(before), mean_iou(after), low, high)


@dataclass(frozen=True)
class Fit:
    """Result of `cribo segment` with labelled images as examples.

    Attributes:
        probe: description of the chosen blocks and head.
        tallies: (Q, C, C) confusion matrix (rows are labels) of the held-out patches of each example.
    """

    probe: str
    tallies: Int[Tensor, "q c c"]


def fit_segmentation(
    backbone: Backbone, labelled: Labelled, progress: Callable[[int, int], None] = lambda done, total: None
) -> Fit | None:
    """Fit `cribo segment` with its default options to up to 24 of the scored images.

    Args:
        backbone: the backbone, on its device.
        labelled: the images; those without labelled pixels are skipped.
        progress: called with the number of encoded images and their total.

    Returns:
        The fit; None if fewer than ten images have labels, too few for an interval, or all have the same class.
    """
    images, settings = labelled.queries, ProbeSettings()
    encoder = probe_encoder(backbone)
    examples: dict[str, LabelledPatches] = {}  # by content, because copies of a left-out image would reveal its labels
    chosen = spread(len(images), _MOST_EXAMPLES)
    for done, index in enumerate(chosen, start=1):
        labels = images.labels(index)
        if (labels != images.ignore_index).any():
            image = images.load(index)
            [features] = encode_grids(encoder, [image], settings, batch_size=1)
            example = label_features(features, labels, encoder.patch_size, settings.precision)
            examples[content_hash(image)] = example.patches(len(images.classes))
        progress(done, len(chosen))
    if len(examples) < LEAST_IMAGES:
        return None
    patches, blocks = thinned([*examples.values()], MOST_PATCHES), encoder.blocks
    choice = fit_probe(patches, blocks, settings)
    if choice.expected is None:
        return None
    return Fit(str(choice.probe), left_out_confusions(patches, choice.probe, blocks, settings))
