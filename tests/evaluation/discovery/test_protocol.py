"""LOST and TokenCut against literal implementations in NumPy, and on known objects."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.linalg import eigh

from cribo.evaluation.discovery.protocol import FoundObject, lost, tokencut

GRID = (6, 8)


def scene(seed: int, noise: float = 0.1) -> torch.Tensor:
    """Return patches with an object of 2 x 3 patches at row 3, column 2, whose features oppose the others."""
    generator = torch.Generator().manual_seed(seed)
    inside = torch.zeros(GRID, dtype=torch.bool)
    inside[3:5, 2:5] = True
    axis = torch.randn(16, generator=generator)
    features = torch.where(inside.flatten()[:, None], -axis, axis)
    return features + noise * torch.randn(features.shape, generator=generator)


@pytest.mark.parametrize("method", [lost, tokencut])
def test_an_object_is_found(method: Callable[..., FoundObject]) -> None:
    found = method(scene(0), GRID)
    assert found.box == (2, 3, 5, 5)
    assert found.mask.sum() == 6
    assert found.mask[found.seed]


@pytest.mark.parametrize("seed", range(5))
def test_lost_equals_its_definition(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(48, 3, generator=generator) + 0.3
    rows = features.double().numpy()
    degrees = [sum(rows[p] @ rows[q] > 0 for q in range(48) if q != p) for p in range(48)]
    order = sorted(range(48), key=lambda p: degrees[p])
    near = [p for p in order[:10] if rows[order[0]] @ rows[p] > 0]
    belongs = np.array([sum(rows[p] @ rows[q] for p in near) > 0 for q in range(48)]).reshape(GRID)
    found = lost(features, GRID, candidates=10)
    assert found.seed == divmod(order[0], GRID[1])
    np.testing.assert_array_equal(found.mask, flooded(belongs, found.seed))


@pytest.mark.parametrize("seed", range(5))
def test_tokencut_solves_the_generalised_eigenproblem(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(48, 4, generator=generator)
    rows = features.double().numpy()
    rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    edges = np.where(rows @ rows.T > 0.2, 1.0, 1e-5)
    degrees = np.diag(edges.sum(axis=1))
    vector = eigh(degrees - edges, degrees)[1][:, 1]
    place = np.abs(vector).argmax()
    side = vector > vector.mean()
    side = side if side[place] else ~side
    found = tokencut(features, GRID)
    assert found.seed == divmod(int(place), GRID[1])
    np.testing.assert_array_equal(found.mask, flooded(side.reshape(GRID), found.seed))


def flooded(above: np.ndarray, seed: tuple[int, int]) -> np.ndarray:
    """Return the patches above the threshold that are connected to the seed by sides."""
    reached, border = np.zeros_like(above), [seed]
    while border:
        row, column = border.pop()
        if 0 <= row < above.shape[0] and 0 <= column < above.shape[1] and above[row, column] > reached[row, column]:
            reached[row, column] = True
            border += [(row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)]
    return reached


@pytest.mark.parametrize("features", [torch.ones(48, 4), torch.eye(48), torch.zeros(48, 4)])
def test_uniform_features_give_the_whole_image(features: torch.Tensor) -> None:
    assert tokencut(features, GRID).mask.all()
    assert lost(features, GRID).mask.any()


def test_a_single_patch_can_be_an_object() -> None:
    for method in (lost, tokencut):
        assert method(torch.randn(1, 4), (1, 1)).box == (0, 0, 1, 1)
