"""Depth of patches, predictions and errors, against independent implementations in NumPy."""

import numpy as np
import pytest
import torch
from scipy.sparse import csr_array

from cribo.base.errors import InputError
from cribo.evaluation import Depth
from cribo.evaluation.depth.protocol import (
    DepthScore,
    patch_depths,
    predict_by_neighbours,
    predict_linearly,
    row,
    score_depth,
    upsample,
)
from cribo.features import Machine
from cribo.features.extraction import EncodedView, PatchFeatures

GRID = 4, 5
DIM = 6


def made_features(count: int, seed: int) -> PatchFeatures:
    """Return features of images of 4 x 5 patches of 8 pixels, of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    found = PatchFeatures(dim=DIM)
    for index in range(count):
        view = EncodedView(index)
        found.held[view] = torch.randn(20, DIM, generator=generator) * 3 + 1
        found.counts[view] = csr_array((20, 2), dtype=np.int32)
        found.sizes[view] = 32, 40
    return found


def made_depths(count: int, seed: int) -> dict[EncodedView, torch.Tensor]:
    """Return depths of the patches, some without a measurement."""
    generator = torch.Generator().manual_seed(seed)
    depths = {EncodedView(index): 1 + 8 * torch.rand(20, generator=generator) for index in range(count)}
    depths[EncodedView(0)][::3] = torch.nan
    return depths


def test_depths_of_patches_are_means_of_measured_pixels() -> None:
    generator = np.random.default_rng(0)
    depth = generator.uniform(0.5, 9, (24, 40)).astype(np.float32)
    depth[generator.random(depth.shape) < 0.3] = 0
    depth[:6, :8] = 0
    expected = np.full(GRID, np.nan)
    for place in np.ndindex(GRID):
        block = depth[6 * place[0] : 6 * place[0] + 6, 8 * place[1] : 8 * place[1] + 8]
        if (block > 0).any():
            expected[place] = block[block > 0].mean()
    found = patch_depths(torch.from_numpy(depth), GRID).view(GRID).numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert np.isnan(found[0, 0])


@pytest.mark.parametrize("vote", ["attention", "similarity", "majority"])
def test_neighbours_predict_their_weighted_mean_depth(vote: str) -> None:
    known, asked, depths = made_features(3, 0), made_features(2, 1), made_depths(3, 2)
    settings = Depth(neighbours=4, vote=vote, temperature=0.1)  # pyright: ignore[reportArgumentType]
    found = predict_by_neighbours(known, depths, asked, settings, machine=Machine(memory_gib=0.5))

    def unit(features: PatchFeatures) -> np.ndarray:
        rows = np.concatenate([features.features(view).double().numpy() for view in features.counts])
        return rows / np.linalg.norm(rows, axis=1, keepdims=True)

    values = torch.cat(list(depths.values())).double().numpy()
    keys, values = unit(known)[~np.isnan(values)], values[~np.isnan(values)]
    cosines = unit(asked) @ keys.T
    expected = []
    for line in cosines:
        nearest = np.argsort(-line)[:4]
        weights = {
            "attention": np.exp(line[nearest] / 0.1),
            "similarity": np.maximum(line[nearest], 1e-6),
            "majority": np.ones(4),
        }[vote]
        expected.append((weights * values[nearest]).sum() / weights.sum())
    predicted = torch.cat([part.flatten() for part in found.values()]).numpy()
    np.testing.assert_allclose(predicted, expected, rtol=1e-4)
    assert {part.shape for part in found.values()} == {torch.Size(GRID)}


def test_a_search_requires_as_many_measured_patches_as_neighbours() -> None:
    known, depths = made_features(1, 0), made_depths(1, 2)
    with pytest.raises(InputError, match="number of patches with a measurement, 13, got 14"):
        predict_by_neighbours(known, depths, known, Depth(neighbours=14), machine=Machine())


def test_ridge_regression_equals_numpy() -> None:
    """The penalty is written as further rows of a least-squares problem; a constant channel is ignored."""
    known, asked, depths = made_features(3, 0), made_features(2, 1), made_depths(3, 2)
    for view in known.held:
        known.features(view)[:, 2] = 5
    values = torch.cat(list(depths.values())).double().numpy()
    rows = np.concatenate([known.features(view).double().numpy() for view in known.counts])
    rows, values = rows[~np.isnan(values)], values[~np.isnan(values)]
    ridge, used = 0.2, [0, 1, 3, 4, 5]
    mean, scale = rows[:, used].mean(axis=0), rows[:, used].std(axis=0)
    penalised = np.concatenate(((rows[:, used] - mean) / scale, np.sqrt(ridge * len(rows)) * np.eye(5)))
    targets = np.concatenate((values - values.mean(), np.zeros(5)))
    weights = np.linalg.lstsq(penalised, targets, rcond=None)[0]
    found = predict_linearly(known, depths, asked, ridge)
    for view, part in found.items():
        expected = (asked.features(view).double().numpy()[:, used] - mean) / scale @ weights + values.mean()
        np.testing.assert_allclose(part.flatten().numpy(), expected, rtol=1e-5)


def test_linear_depth_is_recovered() -> None:
    """The depths form a plane, and two channels contain row and column."""
    known = made_features(2, 0)
    rows, columns = (part.flatten().float() for part in torch.meshgrid(torch.arange(4), torch.arange(5), indexing="ij"))
    plane = 2 + 0.5 * rows + 0.25 * columns
    for view in known.held:
        known.features(view)[:, 0], known.features(view)[:, 1] = rows, columns
    found = predict_linearly(known, dict.fromkeys(known.counts, plane), known, 1e-9)
    torch.testing.assert_close(found[EncodedView(1)].flatten(), plane, rtol=1e-4, atol=1e-4)


def test_an_impossible_fit_raises() -> None:
    known = made_features(1, 0)
    with pytest.raises(InputError, match="no patch of the training images has a depth"):
        predict_linearly(known, {EncodedView(0): torch.full((20,), torch.nan)}, known, 1e-3)
    known.features(EncodedView(0))[3, 3] = torch.inf
    with pytest.raises(InputError, match="features of the backbone are not finite"):
        predict_linearly(known, {EncodedView(0): torch.ones(20)}, known, 1e-3)


def test_errors_equal_numpy() -> None:
    generator = np.random.default_rng(0)
    depth, predicted = generator.uniform(0.5, 9, (2, 12, 16))
    depth[generator.random(depth.shape) < 0.3] = 0
    inside = np.zeros(depth.shape, dtype=bool)
    inside[2:10, 3:15] = True
    true, found = depth[inside & (depth > 0)], predicted[inside & (depth > 0)]
    score = score_depth(torch.from_numpy(predicted), torch.from_numpy(depth), (slice(2, 10), slice(3, 15)))
    assert score == pytest.approx(
        (
            np.mean(np.maximum(true / found, found / true) < 1.25),
            np.sqrt(np.mean((true - found) ** 2)),
            np.mean(np.abs(true - found) / true),
        )
    )


def test_predictions_are_upsampled_and_clamped() -> None:
    upsampled = upsample(torch.tensor([[2.0, 4.0], [-3.0, 40.0]]), (8, 8), 10.0)
    assert (upsampled[0, 0], upsampled[0, 7], upsampled[7, 0], upsampled[7, 7]) == (2, 4, torch.tensor(1e-3), 10)
    assert upsampled[0, 3] == pytest.approx(2 + 2 * (3.5 / 4 - 0.5))


def test_a_row_is_the_mean_over_images_with_measurements() -> None:
    scores = [DepthScore(1.0, 0.5, 0.1), None, DepthScore(0.5, 1.5, 0.3)]
    assert row("linear", scores) == {"method": "linear", "delta1": 0.75, "rmse": 1.0, "abs_rel": 0.2, "images": 2}
    assert score_depth(torch.ones(2, 2), torch.zeros(2, 2)) is None
    with pytest.raises(InputError, match="no pixel of the validation images can be scored"):
        row("linear", [None])
