"""Choice of features and head by left-out images; all heads are fitted in closed form.

Candidates are sets of blocks, with and without partial whitening, and heads: k nearest neighbours, ridge regression, or
the mean of both.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import normalize

from cribo.adaptation.whitening import Moments, partial_whitening
from cribo.evaluation.results import calibration_error, iou
from cribo.retrieval.search import TensorKeys, nearest
from cribo.segmentation.settings import Head

POWER = 0.6
"""Of the partial whitening (docs/adapting.md)."""

PENALTIES = (1e-3, 1e-2)
"""Of the ridge regression, to choose from."""

_FEW = 4  # fewer examples than this cannot tell candidates apart
_MARGIN = 0.12  # of mIoU, for one example; falls with the square root of their number
_SAMPLED = (2048, 8192)  # patches that candidates are compared on: at least, at most
_SAMPLED_PER_EXAMPLE = 128
_MOST_FOLDS = 10
_SHARPNESS = torch.logspace(-2, 3, 26, base=2.0)
_PER_CHANNEL = 4  # labelled patches that whitening needs for each channel
_LEAST_SCORE = 1e-3
_AT_ONCE = 4096  # queries whose votes are gathered at once


@dataclass(frozen=True)
class Reading:
    """Features and head that label patches.

    Attributes:
        blocks: their features are concatenated, each of unit length; numbered from 1.
        whiten: whether each block is partially whitened before.
        head: k nearest neighbours, ridge regression on the classes' shares, or the mean of both.
        penalty: of the ridge regression, relative to the features' mean square times the square root of their number.
    """

    blocks: tuple[int, ...]
    whiten: bool
    head: Head
    penalty: float = PENALTIES[0]

    def __str__(self) -> str:
        blocks = f"block{'s' * (len(self.blocks) > 1)} {', '.join(map(str, self.blocks))}"
        heads = {"knn": "nearest neighbours", "ridge": "ridge regression", "both": "ridge and nearest neighbours"}
        return f"{blocks}{', whitened,' * self.whiten} with {heads[self.head]}"


@dataclass(frozen=True)
class Choice:
    """A reading and its scores on left-out patches.

    Attributes:
        reading: the chosen one.
        sharpness: exponent of the scores that makes them probabilities (see `probabilities`).
        expected: mean IoU on left-out patches, in 0-1, of the classes in `per_class`; None if nothing can be left out.
        last_block: the same for nearest neighbours on the last block as it is.
        per_class: IoU by the index of the class, in 0-1, on left-out patches; without classes of a single fold, of
            which nothing is left when it is left out.
        left_out: such as "one image at a time"; empty if nothing can be left out.
    """

    reading: Reading
    sharpness: float
    expected: float | None
    last_block: float | None
    per_class: Mapping[int, float]
    left_out: str

    def as_json(self) -> dict[str, Any]:
        """Convert to a dictionary for JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Choice":
        """Restore a choice from the dictionary of `as_json`, also after a round trip through JSON."""
        reading = Reading(**{**values["reading"], "blocks": tuple(values["reading"]["blocks"])})
        per_class = {int(label): score for label, score in values["per_class"].items()}
        return cls(**{**values, "reading": reading, "per_class": per_class})


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
_BLOCK_SETS = ((12,), (10,), (9,), (8,), _MIDDLE, (8, 10, 12), (9, 10, 11, 12))  # of a network of 12 blocks


def block_sets(depth: int) -> list[tuple[int, ...]]:
    """Sets of blocks to choose from, in the upper half of a network; the last block comes first.

    Example:
        >>> block_sets(12)
        [(12,), (10,), (9,), (8,), (6, 8, 9, 10), (8, 10, 12), (9, 10, 11, 12)]
        >>> block_sets(1)
        [(1,)]
    """
    return list(dict.fromkeys(_scaled(blocks, depth) for blocks in _BLOCK_SETS))


def middle_blocks(depth: int) -> tuple[int, ...]:
    """Four blocks from the middle of a network on; fewer in shallow networks.

    Example:
        >>> middle_blocks(12), middle_blocks(2)
        ((6, 8, 9, 10), (1, 2))
    """
    return _scaled(_MIDDLE, depth)


def _scaled(blocks: Sequence[int], depth: int) -> tuple[int, ...]:
    return tuple(sorted({max(1, round(depth * block / 12)) for block in blocks}))


def candidate_readings(
    available: Sequence[int], *, blocks: tuple[int, ...] | None, whiten: bool | None, head: Head | None
) -> list[Reading]:
    """All readings of the available blocks that the fixed values allow; None leaves a value open."""
    sets = [chosen for chosen in block_sets(max(available)) if set(chosen) <= set(available)]
    if not any(len(chosen) > 1 for chosen in sets):
        sets = list(dict.fromkeys((*sets, tuple(available))))
    if blocks is not None:
        sets = [blocks]
    heads: Sequence[Head] = ("knn", "ridge", "both") if head is None else (head,)
    return [
        Reading(chosen, whitened, kind, penalty)
        for chosen in sets
        for whitened in ((False, True) if whiten is None else (whiten,))
        for kind in heads
        for penalty in (PENALTIES if kind != "knn" else PENALTIES[:1])
    ]


def default_reading(candidates: Sequence[Reading], available: Sequence[int], examples: int) -> Reading:
    """Return the default candidate: the best on average in trials (docs/segmentation.md).

    It reads four blocks from the middle on: with few examples by ridge regression, with more by both heads after
    whitening. Networks of which one block is available are read by both heads, without whitening. If some of this is
    fixed otherwise, the rest stays.
    """
    several = len(available) > 1
    head: Head = "ridge" if several and examples < _FEW else "both"
    whiten, blocks = several and examples >= _FEW, middle_blocks(max(available))

    def likeness(reading: Reading) -> tuple[bool, ...]:
        return (
            reading.head == head,
            reading.whiten == whiten,
            reading.blocks == blocks,
            reading.penalty == PENALTIES[0],
        )

    return max(candidates, key=likeness)


def choose(
    examples: Sequence[LabelledPatches],
    candidates: Sequence[Reading],
    blocks: Sequence[int],
    *,
    neighbours: int,
    temperature: float,
) -> Choice:
    """Choose a reading by its mean IoU on patches whose image was left out.

    With more than ten examples, a tenth of them is left out at a time; with one, each half of the image. The default
    (`default_reading`) stays unless another candidate is ahead by 12 points divided by the square root of the number of
    examples: the fewer there are, the more a difference is chance. Whitening is a candidate from four labelled patches
    per channel on.

    Args:
        examples: with patches in random order; candidates are compared on at most 8,192 patches.
        candidates: to choose from.
        blocks: numbers of the L blocks in the features.
        neighbours: k.
        temperature: of the neighbours' weights.
    """
    count = len(examples)
    least, most = _SAMPLED
    parts = thinned(examples, min(max(least, _SAMPLED_PER_EXAMPLE * count), most))
    features = torch.cat([part.features.float() for part in parts])
    shares = torch.cat([part.shares for part in parts])
    if sum(len(part.shares) for part in examples) < _PER_CHANNEL * features.shape[2]:
        # Too few patches tell the covariance: directions of noise would be amplified.
        candidates = [reading for reading in candidates if not reading.whiten] or candidates
    if count > 1:
        folds = torch.cat([torch.full((len(part.shares),), number % _MOST_FOLDS) for number, part in enumerate(parts)])
        left_out = "one image at a time" if count <= _MOST_FOLDS else "a tenth of the images at a time"
    else:
        folds, left_out = parts[0].halves, "each half of the image"
    default = default_reading(candidates, blocks, count)
    if len(folds.unique()) < 2:
        return Choice(default, 1.0, None, None, {}, left_out="")

    truth = shares.argmax(dim=1)
    measured = [label for label in truth.unique().tolist() if len(folds[truth == label].unique()) > 1]
    measured = measured or truth.unique().tolist()
    scored = torch.isin(truth, torch.tensor(measured))
    whitening = None
    if any(reading.whiten for reading in candidates):
        whitening = Whitening.fit(torch.cat([part.features.float() for part in examples]))
    baseline = Reading((max(blocks),), whiten=False, head="knn")
    quality: dict[Reading, float] = {}

    def left_out_scores(readings: Sequence[Reading], folds: Tensor) -> dict[Reading, Tensor]:
        """Scores of readings of the same features."""
        first = readings[0]
        places = [list(blocks).index(block) for block in first.blocks]
        rows = read(features, places, whitening if first.whiten else None)
        votes = None
        if any(reading.head != "ridge" for reading in readings):
            votes = left_out_votes(rows, shares, folds, neighbours, temperature)
        penalties = {reading.penalty for reading in readings if reading.head != "knn"}
        solved = {penalty: left_out_ridge(rows, shares, folds, penalty) for penalty in penalties}
        return {reading: combined(reading.head, votes, solved.get(reading.penalty)) for reading in readings}

    alike: dict[tuple[tuple[int, ...], bool], list[Reading]] = {}
    for reading in dict.fromkeys((*candidates, baseline)):
        alike.setdefault((reading.blocks, reading.whiten), []).append(reading)
    for readings in alike.values():
        for reading, scores in left_out_scores(readings, folds).items():
            quality[reading] = float(_ious(scores[scored], truth[scored])[measured].mean())
    best = max(candidates, key=lambda reading: quality[reading])
    if quality[best] < quality[default] + _MARGIN / math.sqrt(count):
        best = default
    per_class = _ious(left_out_scores([best], folds)[best][scored], truth[scored])
    # Without a whole image of few, heads are far less certain than with all of them: calibrate on halves.
    halves = 2 * folds + torch.cat([part.halves for part in parts])
    return Choice(
        best,
        _fit_sharpness(left_out_scores([best], halves)[best], truth),
        quality[best],
        quality[baseline],
        {label: float(per_class[label]) for label in measured},
        left_out,
    )


def thinned(examples: Sequence[LabelledPatches], most: int) -> list[LabelledPatches]:
    """Take at most `most` patches, equally many of each example as far as it has them."""
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
    """A linear layer for each block.

    Attributes:
        layers: weight (E, D) and bias (E,) of each.
    """

    layers: list[tuple[Tensor, Tensor]]

    @classmethod
    def fit(cls, features: Float[Tensor, "n l d"]) -> "Whitening":
        """Fit partial whitening of each block; blocks without variance are left as they are."""
        layers = []
        for block in features.unbind(dim=1):
            moments = Moments(block.shape[1])
            moments.update(block)
            if float(moments.covariance.diagonal().sum()) > 0:
                layers.append(partial_whitening(moments, power=POWER))
            else:
                layers.append((torch.eye(block.shape[1]), torch.zeros(block.shape[1])))
        return cls(layers)


def read(features: Float[Tensor, "n l d"], places: Sequence[int], whitening: Whitening | None) -> Float[Tensor, "n e"]:
    """Concatenate blocks, each of unit length, to rows of unit length.

    Args:
        features: of all blocks.
        places: of the blocks to read among them.
        whitening: of all blocks; None to leave features as they are.
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
    rows: Float[Tensor, "n e"],
    shares: Float[Tensor, "n c"],
    folds: Int[Tensor, " n"],
    neighbours: int,
    temperature: float,
) -> Float[Tensor, "n c"]:
    """Votes of the nearest patches outside of a patch's own fold."""
    votes = torch.empty_like(shares)
    for fold in folds.unique():
        own = folds == fold
        similarity = (rows[own] @ rows.T).masked_fill_(own, -2.0)
        found = similarity.topk(min(neighbours, int((~own).sum())), dim=1)
        votes[own] = _weighted(found.values, found.indices, shares, temperature)
    return votes


def vote(
    rows: Float[Tensor, "q e"],
    keys: TensorKeys,
    shares: Float[Tensor, "n c"],
    neighbours: int,
    temperature: float,
    device: torch.device | str = "cpu",
) -> Float[Tensor, "q c"]:
    """Share of the vote that each class gets from the nearest keys, weighted by the softmax of cosine / temperature."""
    found = nearest(rows, keys, min(neighbours, len(keys)), devices=(device,))
    return _weighted(found.similarity, found.rows, shares, temperature)


def _weighted(
    similarity: Float[Tensor, "q k"], rows: Int[Tensor, "q k"], shares: Float[Tensor, "n c"], temperature: float
) -> Float[Tensor, "q c"]:
    weights = (similarity / temperature).softmax(dim=1)
    parts = zip(weights.split(_AT_ONCE), rows.split(_AT_ONCE), strict=True)
    return torch.cat([torch.einsum("qk,qkc->qc", part, shares[own]) for part, own in parts])


def left_out_ridge(
    rows: Float[Tensor, "n e"], shares: Float[Tensor, "n c"], folds: Int[Tensor, " n"], penalty: float
) -> Float[Tensor, "n c"]:
    """Predictions of ridge regressions that were fitted without a patch's own fold.

    One factorisation serves all folds: with H = X (X'X + R)^-1 X', the prediction without the rows i is
    Y_i - (I - H_ii)^-1 (Y_i - (H Y)_i).
    """
    design = _with_constant(rows)
    solved = torch.cholesky_solve(design.T, _factor(design, penalty))  # (E + 1, N)
    fitted = design @ (solved @ shares)
    predicted = torch.empty_like(shares)
    for fold in folds.unique():
        own = (folds == fold).nonzero()[:, 0]
        inner = torch.eye(len(own)) - design[own] @ solved[:, own]
        predicted[own] = shares[own] - torch.linalg.solve(inner, shares[own] - fitted[own])
    return predicted


def ridge(rows: Float[Tensor, "n e"], shares: Float[Tensor, "n c"], penalty: float) -> Float[Tensor, "e_plus_1 c"]:
    """Weights of a ridge regression from features to the shares of classes; the last row is the constant."""
    design = _with_constant(rows)
    return torch.cholesky_solve(design.T @ shares, _factor(design, penalty))


def _with_constant(rows: Float[Tensor, "n e"]) -> Float[Tensor, "n e_plus_1"]:
    return torch.cat((rows, rows.new_ones(len(rows), 1)), dim=1)


def _factor(design: Float[Tensor, "n e"], penalty: float) -> Float[Tensor, "e e"]:
    """Cholesky factor of X'X + R. R grows with the square root of the number of rows; the constant is not penalised."""
    gram = design.T @ design
    # Features may all be zero: then only the constant is fitted.
    amount = penalty * max(float(gram.diagonal()[:-1].sum()), 1e-6 * len(design)) / math.sqrt(len(design))
    added = gram.new_full((len(gram),), amount)
    added[-1] = 1e-3 * amount
    return torch.linalg.cholesky(gram + torch.diag(added))


def combined(head: Head, votes: Tensor | None, predicted: Tensor | None) -> Float[Tensor, "n c"]:
    """The scores of a head, 0 to 1."""
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
    """Scores to the power of the sharpness, normalised over the classes."""
    powers = scores.clamp(min=_LEAST_SCORE).pow(sharpness)
    powers = powers * (scores > 0)  # a class without any score keeps a probability of 0
    return powers / powers.sum(dim=1, keepdim=True).clamp(min=torch.finfo(powers.dtype).tiny)


def _fit_sharpness(scores: Float[Tensor, "n c"], truth: Int[Tensor, " n"]) -> float:
    """The exponent with the least calibration error: of pixels with confidence .9, nine of ten should be right."""
    right = (scores.argmax(dim=1) == truth).float()
    errors = [calibration_error(probabilities(scores, float(each)).amax(dim=1), right) for each in _SHARPNESS]
    return float(_SHARPNESS[errors.index(min(errors))])


def _ious(scores: Float[Tensor, "n c"], truth: Int[Tensor, " n"]) -> Float[Tensor, " c"]:
    classes = scores.shape[1]
    pairs = truth * classes + scores.argmax(dim=1)
    return iou(torch.bincount(pairs, minlength=classes**2).view(classes, classes))


class Labeller:
    """Labels patches with the features and head of a choice.

    Args:
        examples: labelled patches.
        choice: the reading and its sharpness.
        blocks: numbers of the L blocks in the features.
        neighbours: k.
        temperature: of the neighbours' weights.
        device: where neighbours are searched; everything else is computed on the host.
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
        reading = choice.reading
        self._examples = examples
        self._places = [list(blocks).index(block) for block in reading.blocks]
        features = torch.cat([part.features[:, self._places] for part in examples])
        shares = torch.cat([part.shares for part in examples])
        self._whitening = Whitening.fit(features.float()) if reading.whiten else None
        rows = self.rows(features)
        self._weights = None if reading.head == "knn" else ridge(rows, shares, reading.penalty)
        self._vote = None
        if reading.head != "ridge":
            keys = TensorKeys(rows)
            self._vote = partial(
                vote, keys=keys, shares=shares, neighbours=neighbours, temperature=temperature, device=device
            )

    def rows(self, features: Float[Tensor, "n r d"]) -> Float[Tensor, "n e"]:
        """Convert features of the blocks of the reading to what heads see: rows of unit length."""
        return read(features, range(len(self._places)), self._whitening)

    def __call__(self, rows: Float[Tensor, "n e"]) -> Float[Tensor, "n c"]:
        """Compute the probability of each class from `rows`."""
        votes = None if self._vote is None else self._vote(rows)
        predicted = None if self._weights is None else _with_constant(rows) @ self._weights
        return probabilities(combined(self.choice.reading.head, votes, predicted), self.choice.sharpness)

    def known_rows(self, most: int) -> Float[Tensor, "n e"]:
        """Rows of at most so many labelled patches, equally many of each example as far as it has them."""
        return self.rows(torch.cat([part.features[:, self._places] for part in thinned(self._examples, most)]))

    def select(self, features: Float[Tensor, "*n l d"]) -> Float[Tensor, "*n r d"]:
        """Select the blocks of the reading from all blocks."""
        return features[..., self._places, :]
