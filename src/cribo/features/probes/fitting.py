"""Probes of frozen features, chosen by cross-validation and fitted in closed form.

A probe is a set of blocks, with or without partial whitening, and a head: k-nearest neighbours, ridge regression with
discriminant analysis, or the mean of both.
"""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import normalize

from cribo.base.console import Progress, no_progress
from cribo.features.config import Head, ProbeSettings
from cribo.features.probes.heads import (
    Discriminant,
    class_frequency,
    combined,
    fit_sharpness,
    left_out_ridge,
    left_out_votes,
    probabilities,
    residual_maker,
    reweighted,
    ridge,
    with_constant,
)
from cribo.features.scores import iou
from cribo.features.search import TensorKeys, nearest, nearest_at_once
from cribo.features.voting import Voters, label_shares
from cribo.features.whitening import Moments, partial_whitening

POWER = 0.6
"""Exponent of the partial whitening (docs/adapting.md)."""

PENALTIES = (1e-3, 3e-3, 1e-2)
"""Candidates of the penalty of the ridge regression (see `heads.ridge`)."""

PRIORS = (0.0, 0.25, 0.5, 1.0)
"""Candidates of the prior of classes, an exponent of their frequency."""

_PENALTY, _PRIOR = 1e-2, 0.25  # the defaults: best on average in trials

MOST_PATCHES = 16_384
"""Limit on the number of labelled patches that a probe is fitted to (see `thinned`)."""

_MARGIN = 0.12  # mIoU, divided by the square root of the number of examples
_SAMPLED = (2048, 4096)  # minimum and maximum number of patches for comparing candidates
_SAMPLED_PER_EXAMPLE = 128
_MOST_FOLDS = 10
_PER_CHANNEL = 4  # labelled patches that whitening needs for each channel
_CHOOSING = "choosing blocks and head"


@dataclass(frozen=True)
class Probe:
    """The features and the head that predict the class of a patch.

    Attributes:
        blocks: numbers, from 1, of the blocks whose normalised features are concatenated.
        whiten: whether each block is partially whitened first.
        head: k-nearest neighbours, ridge regression, or the mean of both.
        penalty: penalty of the ridge regression (see `heads.ridge`).
        prior: exponent of the classes' frequency in the examples: 1 if classes are as frequent in other images, 0 if
            all classes are equally likely.
    """

    blocks: tuple[int, ...]
    whiten: bool
    head: Head
    penalty: float = _PENALTY
    prior: float = _PRIOR

    def __str__(self) -> str:
        blocks = f"block{'s' * (len(self.blocks) > 1)} {', '.join(map(str, self.blocks))}"
        heads = {"knn": "nearest neighbours", "ridge": "ridge regression", "both": "ridge and nearest neighbours"}
        return f"{blocks}{', whitened,' * self.whiten} with {heads[self.head]}"

    @property
    def features(self) -> tuple[tuple[int, ...], bool]:
        """Blocks and whitening."""
        return self.blocks, self.whiten


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
    def from_json(cls, values: Mapping[str, Any]) -> "Choice | None":
        """Create a choice from the output of `as_json`; None if an earlier version chose among other probes."""
        if {field.name for field in fields(Probe)} != set(values["probe"]):
            return None
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
    available: Sequence[int],
    *,
    blocks: tuple[int, ...] | None = None,
    whiten: bool | None = None,
    head: Head | None = None,
    penalty: float | None = None,
    prior: float | None = None,
) -> list[Probe]:
    """List the candidate probes; values are fixed unless None."""
    sets = [chosen for chosen in block_sets(max(available)) if set(chosen) <= set(available)]
    sets = list(dict.fromkeys((*sets, default_blocks(available)))) if blocks is None else [blocks]
    heads: Sequence[Head] = ("knn", "ridge", "both") if head is None else (head,)
    return [
        Probe(*values)
        for values in itertools.product(
            sets,
            (False, True) if whiten is None else (whiten,),
            heads,
            PENALTIES if penalty is None else (penalty,),
            PRIORS if prior is None else (prior,),
        )
    ]


def default_probe(candidates: Sequence[Probe], available: Sequence[int]) -> Probe:
    """Return the default candidate, the best on average in trials (docs/segmentation.md).

    It uses ridge regression on `default_blocks`, or both heads if only one block is available, without whitening, with
    a penalty of 0.01 and a prior of 0.25. Values that no candidate has are ignored.
    """
    head: Head = "ridge" if len(available) > 1 else "both"
    blocks = default_blocks(available)

    def likeness(probe: Probe) -> tuple[bool, ...]:
        return (
            *(probe.head == head, not probe.whiten, probe.blocks == blocks),
            *(probe.penalty == _PENALTY, probe.prior == _PRIOR),
        )

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
        self._used: tuple[tuple[int, ...], bool] | None = None
        self._residual_makers: dict[float, Tensor] = {}
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
            alike.setdefault(probe.features, []).append(probe)
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
        return fit_sharpness(self._scores([probe], halves)[probe], self._truth)

    def _scores(self, probes: Sequence[Probe], folds: Int[Tensor, " n"]) -> dict[Probe, Float[Tensor, "n c"]]:
        """Left-out scores of probes that share blocks and whitening."""
        self._use(probes[0])
        votes: dict[float, Tensor] = {}
        likely: dict[tuple[float, float], Tensor] = {}
        if any(probe.head != "ridge" for probe in probes):
            frequency = class_frequency(self._shares)
            plain = left_out_votes(self._similarity, self._shares, folds, self._neighbours, self._temperature)
            votes = {prior: reweighted(plain, frequency, prior) for prior in {probe.prior for probe in probes}}
        wanted: dict[float, set[float]] = {}  # priors of each penalty
        for probe in probes:
            if probe.head != "knn":
                wanted.setdefault(probe.penalty, set()).add(probe.prior)
        for penalty, priors in wanted.items():
            likely |= {(penalty, prior): torch.empty_like(self._shares) for prior in priors}
            for left in left_out_ridge(self._residual_maker(penalty), self._shares, folds):
                discriminant = Discriminant.fit(left.fitted, self._shares[left.others])
                for prior in priors:
                    likely[penalty, prior][left.own] = discriminant(left.predicted, prior)
        return {
            probe: combined(probe.head, votes.get(probe.prior), likely.get((probe.penalty, probe.prior)))
            for probe in probes
        }

    def _use(self, probe: Probe) -> None:
        """Compute the features of a probe's blocks, unless they are those of the last call."""
        if probe.features == self._used:
            return
        if probe.whiten and self._whitening is None:
            self._whitening = Whitening.fit(torch.cat([part.features.float() for part in self._examples]))
        places = [self._blocks.index(block) for block in probe.blocks]
        self._rows = concatenate(self._features, places, self._whitening if probe.whiten else None)
        self._similarity = self._rows @ self._rows.T
        self._used, self._residual_makers = probe.features, {}

    def _residual_maker(self, penalty: float) -> Float[Tensor, "n n"]:
        """Return the residual maker of a penalty, which different folds share."""
        if penalty not in self._residual_makers:
            self._residual_makers[penalty] = residual_maker(self._rows, self._similarity, self._shares, penalty)
        return self._residual_makers[penalty]


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

    The criterion is the mean IoU on left-out patches. Blocks, whitening and head are chosen first, with the default
    penalty and prior, and then penalty and prior. In both steps, a candidate replaces the default (`default_probe`)
    only if it leads by 12 points divided by the square root of the number of examples, since with few examples most
    differences are noise. With a single example the default is kept: scores between the two halves of an image do not
    predict those on other images. Whitening requires four labelled patches per channel.

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
    if len(examples) == 1:
        candidates = [default]
    baseline = Probe((max(blocks),), whiten=False, head="knn", prior=1.0)
    ious: dict[Probe, dict[int, float]] = {}
    quality: dict[Probe, float] = {}

    def best_of(probes: Sequence[Probe], default: Probe) -> Probe:
        fresh = [probe for probe in probes if probe not in ious]
        for probe, counts in validation.confusions(fresh, progress).items():
            ious[probe] = class_ious(counts)
            quality[probe] = statistics.fmean(ious[probe].values())
        best = max((probe for probe in probes if probe in candidates), key=lambda probe: quality[probe])
        return best if quality[best] >= quality[default] + _MARGIN / math.sqrt(len(examples)) else default

    alike = [probe for probe in candidates if (probe.penalty, probe.prior) == (default.penalty, default.prior)]
    alike.sort(key=lambda probe: probe.features == default.features)  # last, so that its features are still there
    best = best_of([baseline, *alike], default)
    alike = [probe for probe in candidates if (probe.features, probe.head) == (best.features, best.head)]
    best = best_of(alike, best)
    return Choice(best, validation.sharpness(best), quality[best], quality[baseline], ious[best], validation.left_out)


def fit_probe(
    examples: Sequence[LabelledPatches],
    blocks: Sequence[int],
    settings: ProbeSettings,
    *,
    progress: Progress = no_progress,
) -> Choice:
    """Choose the values of a probe that are None in the settings; arguments as in `choose`."""
    candidates = candidate_probes(blocks, **settings.probe)
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
        self._weights = self._discriminant = None
        if probe.head != "knn":
            weights = ridge(rows, shares, probe.penalty)
            self._weights = weights.to(device)
            self._discriminant = Discriminant.fit(with_constant(rows) @ weights, shares).to(device)
        self._keys = None if probe.head == "ridge" else TensorKeys(rows.to(device))
        self._frequency = class_frequency(shares).to(device)
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
        return self._probabilities(rows, votes)

    def predict_at_once(self, rows: Float[Tensor, "n e"]) -> Float[Tensor, "n c"]:
        """Predict like `__call__` with a fixed sequence of tensor operations, for tracing."""
        votes = None
        if self._keys is not None:
            found = nearest_at_once(rows, self._keys.rows, min(self._neighbours, len(self._keys)))
            votes = self._voters.vote_at_once(found, "attention", self._temperature)
        return self._probabilities(rows, votes)

    def _probabilities(self, rows: Float[Tensor, "n e"], votes: Float[Tensor, "n c"] | None) -> Float[Tensor, "n c"]:
        """Return the probabilities of rows with these votes of their nearest patches; None for ridge regression."""
        likely, probe = None, self.choice.probe
        if votes is not None:
            votes = reweighted(votes, self._frequency, probe.prior)
        if self._weights is not None and self._discriminant is not None:
            likely = self._discriminant(with_constant(rows) @ self._weights, probe.prior)
        return probabilities(combined(probe.head, votes, likely), self.choice.sharpness)

    def known_rows(self, most: int) -> Float[Tensor, "n e"]:
        """Rows of the labelled patches, limited to `most` (see `thinned`), on its device."""
        return self.rows(torch.cat([part.features[:, self._places] for part in thinned(self._examples, most)]))
