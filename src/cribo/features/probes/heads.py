"""Heads of probes: votes of nearest neighbours, ridge regression with discriminant analysis, and their calibration."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.linalg import cholesky, solve_triangular
from torch.nn.functional import pad

from cribo.features.config import Head
from cribo.features.scores import calibration_error
from cribo.features.search import Neighbours
from cribo.features.voting import Voters, label_shares

_EXPONENT = 0.5  # of the inverse frequency, in the weight of a class
_SHRINKAGE = 1.0  # mean variance within classes, added to the variances
_VARIANCE = 0.01  # of scores within classes, also added: few patches do not show how much scores vary
_SHARPNESS = torch.logspace(-2, 3, 26, base=2.0)
_LEAST_SCORE = 1e-3


def class_frequency(shares: Float[Tensor, "n c"]) -> Float[Tensor, " c"]:
    """Return the frequency of each class; that of one patch for classes without patches."""
    return shares.mean(dim=0).clamp(min=1 / len(shares))


def row_weights(shares: Float[Tensor, "n c"]) -> Float[Tensor, " n"]:
    """Weight patches by the square root of the inverse frequency of their class; the mean is 1.

    Without these weights, the ridge regression lost 1 to 8 points of mIoU on street scenes, mostly in rare classes.
    """
    weights = shares @ class_frequency(shares).pow(-_EXPONENT)
    return weights / weights.mean()


# ------------------------------------------------------------------------------------------------- nearest neighbours


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


def reweighted(votes: Float[Tensor, "n c"], frequency: Float[Tensor, " c"], prior: float) -> Float[Tensor, "n c"]:
    """Change the prior of votes from the classes' frequency to frequency^prior, by Bayes' rule.

    Example:
        >>> reweighted(torch.tensor([[0.9, 0.1]]), torch.tensor([0.9, 0.1]), 0.0).tolist()
        [[0.5, 0.5]]
    """
    weighted = votes * frequency.to(votes).pow(prior - 1)
    return weighted / weighted.sum(dim=1, keepdim=True)


# --------------------------------------------------------------------------------------------------- ridge regression


def ridge(rows: Float[Tensor, "n e"], shares: Float[Tensor, "n c"], penalty: float) -> Float[Tensor, "e_plus_1 c"]:
    """Fit a weighted ridge regression from features to class shares; the last row is the intercept.

    Args:
        rows: features of the patches.
        shares: share of each class in the pixels of a patch.
        penalty: penalty for one patch; it grows with the square root of the number of patches.
    """
    design, weights = with_constant(rows), row_weights(shares)[:, None]
    gram = design.T @ (weights * design)
    gram.diagonal().add_(penalty * math.sqrt(len(rows)))
    return torch.cholesky_solve(design.T @ (weights * shares), cholesky(gram))


def with_constant(rows: Float[Tensor, "n e"]) -> Float[Tensor, "n e_plus_1"]:
    """Append a column of ones, for the intercept."""
    return pad(rows, (0, 1), value=1.0)


def residual_maker(
    rows: Float[Tensor, "n e"], similarity: Float[Tensor, "n n"], shares: Float[Tensor, "n c"], penalty: float
) -> Float[Tensor, "n n"]:
    """Compute the matrix that maps the weighted targets of a ridge regression (`ridge`) to their residuals.

    It is I - X (X'X + aI)^-1 X' = a (XX' + aI)^-1 for weighted rows X and penalty a. The first form takes less time if
    there are few channels.

    Args:
        rows: features of the patches.
        similarity: products of all pairs of rows.
        shares: share of each class in the pixels of a patch.
        penalty: see `ridge`.
    """
    scale, total = row_weights(shares).sqrt()[:, None], penalty * math.sqrt(len(rows))
    if 2 * rows.shape[1] < len(rows):
        design = scale * with_constant(rows)
        gram = design.T @ design
        gram.diagonal().add_(total)
        half = solve_triangular(cholesky(gram), design.T, upper=False)
        residuals = -(half.T @ half)
        residuals.diagonal().add_(1.0)
        return residuals
    kernel = (similarity + 1.0).mul_(scale).mul_(scale.T)  # + 1.0 for the intercept
    kernel.diagonal().add_(total)
    return torch.cholesky_inverse(cholesky(kernel)).mul_(total)


class LeftOut(NamedTuple):
    """Scores of a ridge regression that was fitted without the patches of a fold.

    Attributes:
        own: indices of the left-out patches.
        others: indices of the other patches, to which the regression was fitted.
        predicted: scores of the left-out patches.
        fitted: scores of the other patches.
    """

    own: Int[Tensor, " m"]
    others: Int[Tensor, " k"]
    predicted: Float[Tensor, "m c"]
    fitted: Float[Tensor, "k c"]


def left_out_ridge(
    residual: Float[Tensor, "n n"], shares: Float[Tensor, "n c"], folds: Int[Tensor, " n"]
) -> Iterator[LeftOut]:
    """Yield the scores of ridge regressions (`ridge`) that were fitted to all folds but one, for each fold.

    One factorisation serves all folds: with R of `residual_maker` and residuals r = R y, the left-out residuals of rows
    i are (R_ii)^-1 r_i. The regression without them is the one in which they are replaced by their left-out
    predictions. Weights and penalty are computed from all rows.
    """
    scale = row_weights(shares).sqrt()[:, None]
    residuals = ((scale * shares).T @ residual).T  # the matrix is symmetric; this order is several times as fast
    for fold in folds.unique():
        own, others = (folds == fold).nonzero()[:, 0], (folds != fold).nonzero()[:, 0]
        rows = residual[own]
        missed = torch.linalg.solve(rows[:, own], residuals[own])
        changed = residuals - (missed.T @ rows).T
        yield LeftOut(own, others, shares[own] - missed / scale[own], shares[others] - changed[others] / scale[others])


class Discriminant(NamedTuple):
    """Linear discriminant analysis of the scores of a ridge regression.

    Regression to class shares followed by discriminant analysis of the fitted scores is penalised discriminant analysis
    of the features, by optimal scoring (Hastie, Buja and Tibshirani 1995). The score of a rare class is low even where
    it is the most likely one; a comparison with the mean scores of each class corrects this.

    Attributes:
        weight, bias: linear layer from scores to the log likelihood of each class.
        log_frequency: logarithm of the classes' frequency; minus infinity for classes without patches.
    """

    weight: Float[Tensor, "c c"]
    bias: Float[Tensor, " c"]
    log_frequency: Float[Tensor, " c"]

    @classmethod
    def fit(cls, scores: Float[Tensor, "n c"], shares: Float[Tensor, "n c"]) -> "Discriminant":
        """Fit to the scores of patches with these class shares; classes have the weights of `row_weights`."""
        members = shares * class_frequency(shares).pow(-_EXPONENT)
        members = members / members.sum()
        sizes = members.sum(dim=0)
        means = members.T @ scores / sizes.clamp(min=torch.finfo(sizes.dtype).tiny)[:, None]
        within = scores.T @ (members.sum(dim=1, keepdim=True) * scores) - means.T @ (sizes[:, None] * means)
        within.diagonal().add_(_SHRINKAGE * within.diagonal().mean().clamp(min=0) + _VARIANCE)
        weight = torch.linalg.solve(within, means.T)
        return cls(weight, -(means * weight.T).sum(dim=1) / 2, shares.mean(dim=0).log())

    def to(self, device: torch.device) -> "Discriminant":
        """Return the same discriminant on a device."""
        return Discriminant(*(values.to(device) for values in self))

    def __call__(self, scores: Float[Tensor, "n c"], prior: float) -> Float[Tensor, "n c"]:
        """Return the probability of each class if the prior is proportional to frequency^prior."""
        logits = scores @ self.weight + self.bias
        known = self.log_frequency.isfinite()
        return (logits + prior * self.log_frequency.where(known, 0)).masked_fill(~known, -math.inf).softmax(dim=1)


# -------------------------------------------------------------------------------------------------------- calibration


def combined(head: Head, votes: Tensor | None, likely: Tensor | None) -> Float[Tensor, "n c"]:
    """Combine votes and probabilities of the discriminant into the scores of a head, in 0-1."""
    if head == "knn":
        assert votes is not None
        return votes
    assert likely is not None
    if head == "ridge":
        return likely
    assert votes is not None
    return (likely + votes) / 2


def probabilities(scores: Float[Tensor, "n c"], sharpness: float) -> Float[Tensor, "n c"]:
    """Raise scores to the power of `sharpness` and normalise them over the classes."""
    powers = scores.clamp(min=_LEAST_SCORE).pow(sharpness)
    powers = powers * (scores > 0)  # a class without any score keeps a probability of 0
    return powers / powers.sum(dim=1, keepdim=True).clamp(min=torch.finfo(powers.dtype).tiny)


def fit_sharpness(scores: Float[Tensor, "n c"], truth: Int[Tensor, " n"]) -> float:
    """Find the exponent with the smallest expected calibration error."""
    right = (scores.argmax(dim=1) == truth).float()
    errors = [calibration_error(probabilities(scores, float(each)).amax(dim=1), right) for each in _SHARPNESS]
    return float(_SHARPNESS[errors.index(min(errors))])
