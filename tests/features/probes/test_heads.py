"""Heads of probes against their definitions: left-out scores, discriminant analysis and priors."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize, one_hot

from cribo.features.probes.heads import (
    Discriminant,
    left_out_ridge,
    left_out_votes,
    residual_maker,
    reweighted,
    ridge,
    row_weights,
    with_constant,
)

PENALTY = 3e-3


def random_rows(count: int, width: int) -> Tensor:
    return normalize(torch.randn(count, width, generator=torch.Generator().manual_seed(0)), dim=-1)


@pytest.mark.parametrize("width", [7, 50], ids=["few channels", "many channels"])
def test_left_out_scores_are_those_of_a_regression_without_the_fold(width: int) -> None:
    rows = random_rows(60, width)
    shares = torch.rand(60, 3, generator=torch.Generator().manual_seed(1))
    folds = torch.arange(60) % 4
    design, weights = with_constant(rows).double(), row_weights(shares).double()[:, None]
    penalty = PENALTY * math.sqrt(60) * torch.eye(width + 1, dtype=torch.float64)
    seen = []
    for left in left_out_ridge(residual_maker(rows, rows @ rows.T, shares, PENALTY), shares, folds):
        kept, weighted = design[left.others], (weights * design)[left.others]
        solved = torch.linalg.solve(weighted.T @ kept + penalty, weighted.T @ shares[left.others].double())
        torch.testing.assert_close(left.predicted, (design[left.own] @ solved).float(), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(left.fitted, (kept @ solved).float(), atol=1e-4, rtol=1e-4)
        assert folds[left.own].unique().tolist() == [len(seen)]
        assert len(left.own) + len(left.others) == 60
        seen += [len(left.own)]
    assert seen == [15] * 4


def test_votes_come_from_the_nearest_patches_of_other_folds() -> None:
    rows, folds = random_rows(80, 16), torch.arange(80) % 3
    shares = one_hot(torch.arange(80) % 4, 4).float()
    votes = left_out_votes(rows @ rows.T, shares, folds, 2, 0.1)
    for query in (0, 1, 41):
        others = (folds != folds[query]).nonzero()[:, 0]
        similarity, order = (rows[others] @ rows[query]).sort(descending=True)
        weights = (similarity[:2] / 0.1).softmax(dim=0)
        torch.testing.assert_close(votes[query], weights @ shares[others[order[:2]]])


def rare_class() -> tuple[Tensor, Tensor]:
    """Return rows and shares of two overlapping classes, of which the second is rare."""
    generator = torch.Generator().manual_seed(0)
    labels = (torch.rand(2000, generator=generator) < 0.03).long()
    centres = torch.tensor([[1.0, 0.0, 0.5], [0.0, 1.0, 0.5]])
    rows = centres[labels] + 0.4 * torch.randn(2000, 3, generator=generator)
    return normalize(rows, dim=-1), one_hot(labels, 2).float()


def test_discriminant_analysis_of_the_scores_finds_a_rare_class() -> None:
    rows, shares = rare_class()
    scores = with_constant(rows) @ ridge(rows, shares, PENALTY)
    discriminant = Discriminant.fit(scores, shares)
    truth = shares.argmax(dim=1)

    def found(likely: Tensor) -> float:
        return float((likely.argmax(dim=1) == 1)[truth == 1].float().mean())

    recalls = [found(discriminant(scores, prior)) for prior in (0.0, 0.5, 1.0)]
    assert recalls == sorted(recalls, reverse=True)
    assert recalls[0] > max(0.9, found(scores) + 0.05)
    torch.testing.assert_close(discriminant(scores, 0.5).sum(dim=1), torch.ones(2000))


def test_a_class_without_patches_is_never_likely() -> None:
    rows, shares = rare_class()
    shares = torch.cat((shares, torch.zeros(2000, 1)), dim=1)
    scores = with_constant(rows) @ ridge(rows, shares, PENALTY)
    for prior in (0.0, 1.0):
        assert not Discriminant.fit(scores, shares)(scores, prior)[:, 2].any()


def test_equal_scores_get_the_prior() -> None:
    shares = one_hot(torch.tensor([0, 1, 1, 1]), 2).float()
    discriminant = Discriminant.fit(torch.full((4, 2), 0.3), shares)
    likely = discriminant(torch.full((1, 2), 0.3), 1.0)
    torch.testing.assert_close(likely, torch.tensor([[0.25, 0.75]]), atol=0.01, rtol=0)


def test_the_prior_of_votes_is_replaced() -> None:
    votes, frequency = torch.tensor([[0.8, 0.2, 0.0]]), torch.tensor([0.6, 0.1, 0.3])
    torch.testing.assert_close(reweighted(votes, frequency, 1.0), votes)
    expected = torch.tensor([[0.8 / 0.6, 0.2 / 0.1, 0.0]])
    torch.testing.assert_close(reweighted(votes, frequency, 0.0), expected / expected.sum())
