import math

import pytest
import torch
from tests.method.test_losses import DIM, PROTOTYPES, ROWS, LargestTensor, unit
from torch import Tensor

from cribo.method import blocks
from cribo.objectives.sinkhorn import sinkhorn_centre


def sinkhorn_probabilities(logits: Tensor, iterations: int) -> Tensor:
    """Sinkhorn-Knopp in the log domain on (R, L), columns first, so that rows are probabilities."""
    rows, columns = logits.shape
    plan = logits.double().log_softmax(dim=1)
    for _ in range(iterations):
        plan = plan - plan.logsumexp(dim=0, keepdim=True) + math.log(rows / columns)
        plan = plan - plan.logsumexp(dim=1, keepdim=True)
    return plan.exp()


@pytest.mark.parametrize("iterations", [1, 3, 8])
@pytest.mark.parametrize("block_rows", [1, 7, 1000])
def test_sinkhorn_centre_matches_sinkhorn_probabilities(
    iterations: int, block_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(blocks._NUMBERS, "cpu", block_rows * PROTOTYPES)
    embeddings, prototypes = unit(ROWS, DIM, seed=1), unit(PROTOTYPES, DIM, seed=2)
    centre = sinkhorn_centre(embeddings, prototypes, temperature=0.1, iterations=iterations)
    logits = embeddings @ prototypes.T
    probabilities = ((logits - centre) / 0.1).softmax(dim=-1)
    expected = sinkhorn_probabilities(logits / 0.1, iterations)
    torch.testing.assert_close(probabilities, expected.float(), rtol=1e-3, atol=1e-6)


def test_sinkhorn_centre_spreads_rows_evenly_over_prototypes() -> None:
    embeddings, prototypes = unit(300, DIM, seed=1) + 0.7, unit(PROTOTYPES, DIM, seed=2)
    logits = embeddings @ prototypes.T
    uneven = (logits / 0.1).softmax(dim=-1).mean(dim=0) * PROTOTYPES
    assert uneven.max() > 3
    centre = sinkhorn_centre(embeddings, prototypes, temperature=0.1, iterations=200)
    even = ((logits - centre) / 0.1).softmax(dim=-1).mean(dim=0) * PROTOTYPES
    torch.testing.assert_close(even, torch.ones(PROTOTYPES), rtol=1e-2, atol=0)


def test_sinkhorn_centre_without_rows_is_zero() -> None:
    centre = sinkhorn_centre(torch.zeros(0, DIM), unit(PROTOTYPES, DIM, seed=2), temperature=0.1)
    assert (centre == 0).all()


def test_sinkhorn_centre_out_of_range() -> None:
    rows, prototypes = unit(ROWS, DIM, seed=1), unit(PROTOTYPES, DIM, seed=2)
    with pytest.raises(ValueError, match=r"temperature must be > 0, got 0\.0"):
        sinkhorn_centre(rows, prototypes, temperature=0.0)
    with pytest.raises(ValueError, match="iterations must be >= 1, got 0"):
        sinkhorn_centre(rows, prototypes, temperature=0.1, iterations=0)


def test_no_more_logits_than_a_block_are_ever_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(blocks._NUMBERS, "cpu", 3000)
    with LargestTensor() as largest:
        sinkhorn_centre(unit(100, DIM, seed=6), unit(300, DIM, seed=0), temperature=0.1)
    assert largest.elements <= 3000
