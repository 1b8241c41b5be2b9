"""Probes of frozen features, chosen by cross-validation and fitted in closed form.

A probe is a set of blocks, with or without partial whitening, and a head: k-nearest neighbours, ridge regression, or
the mean of both.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import normalize

from cribo.base.console import Progress, no_progress
from cribo.features.config import Head, ProbeSettings
from cribo.features.scores import calibration_error, iou
from cribo.features.search import Neighbours, TensorKeys, nearest
from cribo.features.voting import Voters, label_shares
from cribo.features.whitening import Moments, partial_whitening

POWER = 0.6
"""Exponent of the partial whitening (docs/adapting.md)."""

PENALTY = 1e-3
"""Penalty of the ridge regression for one patch; it grows with the square root of the number of patches."""

MOST_PATCHES = 16_384
"""Limit on the number of labelled patches that a probe is fitted to (see `thinned`)."""

_MARGIN = 0.12  # mIoU, divided by the square root of the number of examples
_SAMPLED = (2048, 4096)  # minimum and maximum number of patches for comparing candidates
_SAMPLED_PER_EXAMPLE = 128
_MOST_FOLDS = 10
_SHARPNESS = torch.logspace(-2, 3, 26, base=2.0)
_PER_CHANNEL = 4  # labelled patches that whitening needs for each channel
_LEAST_SCORE = 1e-3
_CHOOSING = "choosing blocks and head"


@dataclass(frozen=True)
class Probe:
    """The features and the head that predict the class of a patch.

    Attributes:
        blocks: numbers, from 1, of the blocks whose normalised features are concatenated.
        whiten: whether each block is partially whitened first.
        head: k-nearest neighbours, ridge regression, or the mean of both.
    """

    blocks: tuple[int, ...]
    whiten: bool
    head: Head

    def __str__(self) -> str:
        blocks = f"block{'s' * (len(self.blocks) > 1)} {', '.join(map(str, self.blocks))}"
        heads = {"knn": "nearest neighbours", "ridge": "ridge regression", "both": "ridge and nearest neighbours"}
        return f"{blocks}{', whitened,' * self.whiten} with {heads[self.head]}"


@dataclass(frozen=True)
class Choice:
    """A chosen probe and its cross-validation scores.

    Attributes:
        probe: the chosen probe.
        sharpness: exponent that calibrates the scores (see `probabilities`).
        expected: mean IoU on left-out patches, in 0-1, of the classes in `per_class`; None if nothing can be left out.
        last_block: mean IoU of the baseline, nearest neighbours on the last block without whitening.
        per_class: IoU of each class index, in 0-1, on left-out patches. Classes that occur in a single fold are
            missing: no training patch remains when that fold is left out.
        left_out: description of the folds, such as "one image at a time"; empty if nothing can be left out.
    """

    probe: Probe
    sharpness: float
    expected: float | None
    last_block: float | None
    per_class: Mapping[int, float]
    left_out: str

    def coverage(self, classes: int) -> str:
        """Return the number of classes of which `expected` is the mean, such as " over 3 of 21 classes"; "" for all."""
        return "" if len(self.per_class) == classes else f" over {len(self.per_class)} of {classes} classes"

    def as_json(self) -> dict[str, Any]:
        """Convert to a JSON-serialisable dictionary that a round trip through JSON preserves."""
        # Keys are strings: sorted for a checksum, 10 comes after 9 as a number and before it as a string.
        return {**asdict(self), "per_class": {str(label): score for label, score in self.per_class.items()}}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Choice":
        """Create a choice from the output of `as_json`."""
        probe = Probe(**{**values["probe"], "blocks": tuple(values["probe"]["blocks"])})
        per_class = {int(label): score for label, score in values["per_class"].items()}
        return cls(**{**values, "probe": probe, "per_class": per_class})


class LabelledPatches(NamedTuple):
    """Patches of one example, in random order.

    Attributes:
        features: (N, L, D) of L blocks, each of unit length.
        shares: (N, C) share of each class in the labelled pixels of a patch; rows sum to 1.
        halves: (N,) 0 for patches in the left half of the image, 1 for the others.
    """

    features: Float[Tensor, "n l d"]
    shares: Float[Tensor, "n c"]
    halves: Int[Tensor, " n"]


_MIDDLE = (6, 8, 9, 10)
_BLOCK_SETS = ((12,), (9,), _MIDDLE, (9, 10, 11, 12))  # of a network of 12 blocks


def block_sets(depth: int) -> list[tuple[int, ...]]:
    """Sets of blocks to choose from, in the upper half of a network; the last block comes first.

    Example:
        >>> block_sets(12)
        [(12,), (9,), (6, 8, 9, 10), (9, 10, 11, 12)]
        >>> block_sets(1)
        [(1,)]
    """
    return list(dict.fromkeys(_scaled(blocks, depth) for blocks in _BLOCK_SETS))


def default_blocks(available: Sequence[int]) -> tuple[int, ...]:
    """Return four blocks of the upper half of a network, or all available ones if one is missing.

    Example:
        >>> default_blocks(range(1, 13)), default_blocks([7, 8, 9, 10])
        ((6, 8, 9, 10), (7, 8, 9, 10))
    """
    middle = _scaled(_MIDDLE, max(available))
    return middle if set(middle) <= set(available) else tuple(available)


def _scaled(blocks: Sequence[int], depth: int) -> tuple[int, ...]:
    return tuple(sorted({max(1, round(depth * block / 12)) for block in blocks}))


def candidate_probes(
    available: Sequence[int], *, blocks: tuple[int, ...] | None, whiten: bool | None, head: Head | None
) -> list[Probe]:
    """List the candidate probes; `blocks`, `whiten` and `head` are fixed unless None."""
    sets = [chosen for chosen in block_sets(max(available)) if set(chosen) <= set(available)]
    sets = list(dict.fromkeys((*sets, default_blocks(available)))) if blocks is None else [blocks]
    heads: Sequence[Head] = ("knn", "ridge", "both") if head is None else (head,)
    return [
        Probe(chosen, whitened, kind)
        for chosen in sets
        for whitened in ((False, True) if whiten is None else (whiten,))
        for kind in heads
    ]


def default_probe(candidates: Sequence[Probe], available: Sequence[int]) -> Probe:
    """Return the default candidate, the best on average in trials (docs/segmentation.md).

    It uses ridge regression on `default_blocks`, or both heads if only one block is available, without whitening.
    Values that no candidate has are ignored.
    """
    head: Head = "ridge" if len(available) > 1 else "both"
    blocks = default_blocks(available)

    def likeness(probe: Probe) -> tuple[bool, ...]:
        return probe.head == head, not probe.whiten, probe.blocks == blocks

    return max(candidates, key=likeness)


class CrossValidation:
    """Cross-validation of probes over examples.

    The folds are single images, tenths of the images if there are more than ten, or the halves of a single image.

    Args:
        examples: examples with patches in random order; at most 4,096 patches are used.
        blocks: numbers of the L blocks in the features.
        neighbours: k, the number of nearest neighbours.
        temperature: temperature of the neighbours' weights.

    Attributes:
        left_out: description of the folds, such as "one image at a time"; empty if nothing can be left out, or if all
            patches have the same class, for which any prediction is right.
    """

    def __init__(
        self, examples: Sequence[LabelledPatches], blocks: Sequence[int], *, neighbours: int, temperature: float
    ) -> None:
        count = len(examples)
        least, most = _SAMPLED
        parts = thinned(examples, min(max(least, _SAMPLED_PER_EXAMPLE * count), most))
        self._examples = examples
        self._features = torch.cat([part.features.float() for part in parts])
        self._shares = torch.cat([part.shares for part in parts])
        self._halves = torch.cat([part.halves for part in parts])
        self._image = torch.cat([torch.full((len(part.shares),), number) for number, part in enumerate(parts)])
        self._blocks = list(blocks)
        self._neighbours, self._temperature = neighbours, temperature
        self._whitening: Whitening | None = None
        if count > 1:
            folds = self._image % _MOST_FOLDS
            self.left_out = "one image at a time" if count <= _MOST_FOLDS else "a tenth of the images at a time"
        else:
            folds, self.left_out = self._halves, "each half of the image"
        self._folds = folds
        truth = self._shares.argmax(dim=1)
        if min(len(folds.unique()), len(truth.unique())) < 2:
            self.left_out = ""
        measured = [label for label in truth.unique().tolist() if len(folds[truth == label].unique()) > 1]
        self._truth, self._measured = truth, torch.tensor(measured or truth.unique().tolist())

    def confusions(
        self, probes: Sequence[Probe], progress: Progress = no_progress
    ) -> dict[Probe, Int[Tensor, "n c c"]]:
        """Count pairs of class (row) and prediction (column) of the left-out patches of each example.

        Classes that occur in a single fold are missing: no training patch remains when that fold is left out.
        """
        images, classes = len(self._examples), self._shares.shape[1]
        scored = torch.isin(self._truth, self._measured)
        alike: dict[tuple[tuple[int, ...], bool], list[Probe]] = {}
        for probe in dict.fromkeys(probes):
            alike.setdefault((probe.blocks, probe.whiten), []).append(probe)
        found = {}
        for number, group in enumerate(alike.values()):
            progress(_CHOOSING, number, len(alike))
            for probe, scores in self._scores(group, self._folds).items():
                cells = (self._image * classes + self._truth) * classes + scores.argmax(dim=1)
                counts = torch.bincount(cells[scored], minlength=images * classes**2)
                found[probe] = counts.view(images, classes, classes)
        progress(_CHOOSING, len(alike), len(alike))
        return found

    def sharpness(self, probe: Probe) -> float:
        """Find the exponent that calibrates a probe (see `probabilities`)."""
        # Leave out halves of images: with few examples, leaving out a whole image underestimates the scores in use.
        halves = 2 * self._folds + self._halves
        return _fit_sharpness(self._scores([probe], halves)[probe], self._truth)

    def _scores(self, probes: Sequence[Probe], folds: Int[Tensor, " n"]) -> dict[Probe, Float[Tensor, "n c"]]:
        """Left-out scores of probes that share blocks and whitening."""
        first = probes[0]
        if first.whiten and self._whitening is None:
            self._whitening = Whitening.fit(torch.cat([part.features.float() for part in self._examples]))
        places = [self._blocks.index(block) for block in first.blocks]
        rows = concatenate(self._features, places, self._whitening if first.whiten else None)
        similarity = rows @ rows.T
        votes = predicted = None
        if any(probe.head != "ridge" for probe in probes):
            votes = left_out_votes(similarity, self._shares, folds, self._neighbours, self._temperature)
        if any(probe.head != "knn" for probe in probes):
            predicted = left_out_ridge(similarity, self._shares, folds)
        return {probe: combined(probe.head, votes, predicted) for probe in probes}


def choose(
    examples: Sequence[LabelledPatches],
    candidates: Sequence[Probe],
    blocks: Sequence[int],
    *,
    neighbours: int,
    temperature: float,
    progress: Progress = no_progress,
) -> Choice:
    """Choose a probe by cross-validation over images (see `CrossValidation`).

    The criterion is the mean IoU on left-out patches. A candidate replaces the default (`default_probe`) only if it
    leads by 12 points divided by the square root of the number of examples, since with few examples most differences
    are noise. With a single example the default is kept: scores between the two halves of an image do not predict those
    on other images. Whitening requires four labelled patches per channel.

    Args:
        examples: examples with patches in random order.
        candidates: probes to choose from.
        blocks: numbers of the L blocks in the features.
        neighbours: k, the number of nearest neighbours.
        temperature: temperature of the neighbours' weights.
        progress: called after each set of blocks.
    """
    if sum(len(part.shares) for part in examples) < _PER_CHANNEL * examples[0].features.shape[2]:
        # The covariance of so few patches is unreliable: whitening would amplify noise.
        candidates = [probe for probe in candidates if not probe.whiten] or candidates
    default = default_probe(candidates, blocks)
    validation = CrossValidation(examples, blocks, neighbours=neighbours, temperature=temperature)
    if not validation.left_out:
        return Choice(default, 1.0, None, None, {}, left_out="")
    baseline = Probe((max(blocks),), whiten=False, head="knn")
    ious = {
        probe: class_ious(counts) for probe, counts in validation.confusions([*candidates, baseline], progress).items()
    }
    quality = {probe: statistics.fmean(own.values()) for probe, own in ious.items()}
    best = max(candidates, key=lambda probe: quality[probe])
    if len(examples) == 1 or quality[best] < quality[default] + _MARGIN / math.sqrt(len(examples)):
        best = default
    return Choice(best, validation.sharpness(best), quality[best], quality[baseline], ious[best], validation.left_out)


def fit_probe(
    examples: Sequence[LabelledPatches],
    blocks: Sequence[int],
    settings: ProbeSettings,
    *,
    progress: Progress = no_progress,
) -> Choice:
    """Choose the blocks, whitening and head that are None in the settings; arguments as in `choose`."""
    candidates = candidate_probes(blocks, blocks=settings.blocks, whiten=settings.whiten, head=settings.head)
    return choose(examples, candidates, blocks, **settings.voting, progress=progress)


def left_out_confusions(
    examples: Sequence[LabelledPatches], probe: Probe, blocks: Sequence[int], settings: ProbeSettings
) -> Int[Tensor, "n c c"]:
    """Compute the confusion matrix (rows are labels) of each example's left-out patches."""
    return CrossValidation(examples, blocks, **settings.voting).confusions([probe])[probe]


def thinned(examples: Sequence[LabelledPatches], most: int) -> list[LabelledPatches]:
    """Limit the total number of patches to `most`, with equal shares for all large examples."""
    lengths = sorted(len(part.shares) for part in examples)
    each, left = lengths[-1], most
    for place, length in enumerate(lengths):
        share = left // (len(lengths) - place)
        if length > share:
            each = share
            break
        left -= length
    return [LabelledPatches(*(values[: max(1, each)] for values in part)) for part in examples]


class Whitening(NamedTuple):
    """Partial whitening of each block by a linear layer.

    Attributes:
        layers: weight (E, D) and bias (E,) of each block.
    """

    layers: list[tuple[Tensor, Tensor]]

    @classmethod
    def fit(cls, features: Float[Tensor, "n l d"]) -> "Whitening":
        """Fit a partial whitening for each block; the identity for constant features."""
        layers = []
        for block in features.unbind(dim=1):
            moments = Moments(block.shape[1])
            moments.update(block)
            if float(moments.covariance.diagonal().sum()) > 0:
                layers.append(partial_whitening(moments, power=POWER))
            else:
                layers.append((torch.eye(block.shape[1]), torch.zeros(block.shape[1])))
        return cls(layers)

    def to(self, device: torch.device) -> "Whitening":
        """Return the same whitening on a device."""
        return Whitening([(weight.to(device), bias.to(device)) for weight, bias in self.layers])


def concatenate(
    features: Float[Tensor, "n l d"], places: Sequence[int], whitening: Whitening | None
) -> Float[Tensor, "n e"]:
    """Concatenate the normalised features of several blocks into rows of unit length.

    Args:
        features: features of all blocks.
        places: indices of the blocks to concatenate.
        whitening: whitening of all blocks; None for no whitening.
    """
    parts = []
    for place in places:
        part = features[:, place].float()
        if whitening is not None:
            weight, bias = whitening.layers[place]
            part = part @ weight.T.to(part) + bias.to(part)
        parts.append(normalize(part, dim=-1))
    return torch.cat(parts, dim=1) / math.sqrt(len(parts))


def left_out_votes(
    similarity: Float[Tensor, "n n"],
    shares: Float[Tensor, "n c"],
    folds: Int[Tensor, " n"],
    neighbours: int,
    temperature: float,
) -> Float[Tensor, "n c"]:
    """Class votes of the nearest patches in other folds."""
    voters, votes = Voters([label_shares(shares, "soft")], shares.shape[1]), torch.empty_like(shares)
    for fold in folds.unique():
        own = folds == fold
        others = similarity[own].masked_fill_(own, -2.0)
        found = Neighbours(*others.topk(min(neighbours, int((~own).sum())), dim=1))
        votes[own] = voters.vote(found, "attention", temperature)
    return votes


def left_out_ridge(
    similarity: Float[Tensor, "n n"], shares: Float[Tensor, "n c"], folds: Int[Tensor, " n"]
) -> Float[Tensor, "n c"]:
    """Predictions of ridge regressions (`ridge`) that were fitted to the other folds.

    One factorisation serves all folds: with A = (K + aI)^-1, where K is the Gram matrix of the rows and a the penalty,
    the left-out prediction of rows i is Y_i - (A_ii)^-1 (A Y)_i. Weights and penalty are computed from all rows.
    """
    scale = row_weights(shares).sqrt()[:, None]
    kernel = scale * (similarity + 1.0) * scale.T  # + 1.0 for the intercept
    kernel.diagonal().add_(_penalty(len(kernel)))
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(kernel))
    targets = scale * shares
    solved = inverse @ targets
    predicted = torch.empty_like(shares)
    for fold in folds.unique():
        own = (folds == fold).nonzero()[:, 0]
        residuals = torch.linalg.solve(inverse[own[:, None], own], solved[own])
        predicted[own] = shares[own] - residuals / scale[own]
    return predicted


def ridge(rows: Float[Tensor, "n e"], shares: Float[Tensor, "n c"]) -> Float[Tensor, "e_plus_1 c"]:
    """Fit a weighted ridge regression from features to class shares; the last row is the intercept."""
    design, weights = _with_constant(rows), row_weights(shares)[:, None]
    gram = design.T @ (weights * design)
    gram.diagonal().add_(_penalty(len(rows)))
    return torch.cholesky_solve(design.T @ (weights * shares), torch.linalg.cholesky(gram))


def row_weights(shares: Float[Tensor, "n c"]) -> Float[Tensor, " n"]:
    """Weight patches by the square root of the inverse frequency of their class; the mean is 1.

    Without these weights, the ridge regression lost 1 to 8 points of mIoU on street scenes, mostly in rare classes.
    """
    weights = shares @ shares.mean(dim=0).clamp(min=1 / len(shares)).rsqrt()
    return weights / weights.mean()


def _with_constant(rows: Float[Tensor, "n e"]) -> Float[Tensor, "n e_plus_1"]:
    return torch.cat((rows, rows.new_ones(len(rows), 1)), dim=1)


def _penalty(rows: int) -> float:
    return PENALTY * math.sqrt(rows)


def combined(head: Head, votes: Tensor | None, predicted: Tensor | None) -> Float[Tensor, "n c"]:
    """Combine votes and predictions into the scores of a head, in 0-1."""
    if head == "knn":
        assert votes is not None
        return votes
    assert predicted is not None
    scores = predicted.clamp(0, 1)
    if head == "ridge":
        return scores
    assert votes is not None
    return (scores + votes) / 2


def probabilities(scores: Float[Tensor, "n c"], sharpness: float) -> Float[Tensor, "n c"]:
    """Raise scores to the power of `sharpness` and normalise them over the classes."""
    powers = scores.clamp(min=_LEAST_SCORE).pow(sharpness)
    powers = powers * (scores > 0)  # a class without any score keeps a probability of 0
    return powers / powers.sum(dim=1, keepdim=True).clamp(min=torch.finfo(powers.dtype).tiny)


def _fit_sharpness(scores: Float[Tensor, "n c"], truth: Int[Tensor, " n"]) -> float:
    """Find the exponent with the smallest expected calibration error."""
    right = (scores.argmax(dim=1) == truth).float()
    errors = [calibration_error(probabilities(scores, float(each)).amax(dim=1), right) for each in _SHARPNESS]
    return float(_SHARPNESS[errors.index(min(errors))])


def class_ious(confusions: Int[Tensor, "n c c"]) -> dict[int, float]:
    """Compute the IoU, in 0-1, of each class in the rows of the summed confusion matrices."""
    confusion = confusions.sum(dim=0)
    scores = iou(confusion)
    return {label: float(scores[label]) for label in confusion.sum(dim=1).nonzero()[:, 0].tolist()}


class FittedProbe:
    """Predicts the classes of patches with a fitted probe.

    Args:
        examples: labelled patches.
        choice: the probe and its calibration.
        blocks: numbers of the L blocks in the features.
        neighbours: k, the number of nearest neighbours.
        temperature: temperature of the neighbours' weights.
        device: device of the predictions; the probe is fitted on the CPU.
    """

    def __init__(
        self,
        examples: Sequence[LabelledPatches],
        choice: Choice,
        blocks: Sequence[int],
        *,
        neighbours: int,
        temperature: float,
        device: torch.device,
    ) -> None:
        self.choice = choice
        probe = choice.probe
        self._examples = examples
        self._places = [list(blocks).index(block) for block in probe.blocks]
        features = torch.cat([part.features[:, self._places] for part in examples])
        shares = torch.cat([part.shares for part in examples])
        whitening = Whitening.fit(features.float()) if probe.whiten else None
        rows = concatenate(features, range(len(self._places)), whitening)
        self._whitening = None if whitening is None else whitening.to(device)
        self._weights = None if probe.head == "knn" else ridge(rows, shares).to(device)
        self._keys = None if probe.head == "ridge" else TensorKeys(rows.to(device))
        self._voters = Voters([label_shares(shares, "soft")], shares.shape[1], device)
        self._neighbours, self._temperature, self._device = neighbours, temperature, device

    def rows(self, features: Float[Tensor, "n r d"]) -> Float[Tensor, "n e"]:
        """Convert features of the probe's R blocks to the input rows of the heads, of unit length, on its device."""
        return concatenate(features.to(self._device), range(len(self._places)), self._whitening)

    def __call__(self, rows: Float[Tensor, "n e"]) -> Float[Tensor, "n c"]:
        """Predict the probability of each class from rows as returned by `rows`, on its device."""
        rows, votes = rows.to(self._device), None
        if self._keys is not None:
            found = nearest(rows, self._keys, min(self._neighbours, len(self._keys)), devices=(self._device,))
            votes = self._voters.vote(found, "attention", self._temperature)
        predicted = None if self._weights is None else _with_constant(rows) @ self._weights
        return probabilities(combined(self.choice.probe.head, votes, predicted), self.choice.sharpness)

    def known_rows(self, most: int) -> Float[Tensor, "n e"]:
        """Rows of the labelled patches, limited to `most` (see `thinned`), on its device."""
        return self.rows(torch.cat([part.features[:, self._places] for part in thinned(self._examples, most)]))
