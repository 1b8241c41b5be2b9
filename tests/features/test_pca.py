import pytest
import torch

from cribo.features import PCAColours, pca_colours


def two_things(height: int, width: int, noise: float, seed: int) -> torch.Tensor:
    """Return features of 24 channels of an image with one object on the left and another on the right."""
    generator = torch.Generator().manual_seed(seed)
    things = torch.randn(2, 24, generator=torch.Generator().manual_seed(0))
    grid = things[(torch.arange(width) >= width // 2).long()].expand(height, width, 24)
    return grid + noise * torch.randn(height, width, 24, generator=generator)


def test_components_of_all_patches() -> None:
    grids = [torch.randn(5, 7, 12), torch.randn(4, 4, 12) + 0.5]
    directions = torch.cat([torch.nn.functional.normalize(grid.double(), dim=-1).flatten(0, 1) for grid in grids])
    _, _, axes = torch.linalg.svd(directions - directions.mean(dim=0), full_matrices=False)
    expected = (directions - directions.mean(dim=0)) @ axes[:3].T
    painted = torch.cat([colours.flatten(0, 1) for colours in pca_colours(grids)]).double()
    for channel in range(3):
        inside = (painted[:, channel] > 0) & (painted[:, channel] < 1)  # values that the quantiles do not clip
        pair = torch.stack([painted[inside, channel], expected[inside, channel]])
        assert torch.corrcoef(pair)[0, 1].abs() == pytest.approx(1, abs=1e-5)


def test_an_object_has_the_same_colour_in_all_images() -> None:
    first, second = pca_colours([two_things(6, 8, 0.05, 1), two_things(10, 4, 0.05, 2)])
    left, right = first[:, :4].mean(dim=(0, 1)), first[:, 4:].mean(dim=(0, 1))
    assert (left - second[:, :2].mean(dim=(0, 1)))[0].abs() < 0.1
    assert (left - right)[0].abs() > 0.8


def test_colours_are_deterministic_regardless_of_the_solvers_signs() -> None:
    grids = [two_things(6, 8, 0.3, 1), two_things(5, 5, 0.3, 2)]
    once, again = pca_colours(grids), pca_colours([grid.clone() for grid in grids])
    assert all(torch.equal(one, other) for one, other in zip(once, again, strict=True))
    # The order of the images changes rounding, but must not flip a component.
    for one, other in zip(once, reversed(pca_colours(grids[::-1])), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


def test_the_norm_of_features_is_ignored() -> None:
    grid = torch.randn(6, 6, 12)
    torch.testing.assert_close(pca_colours([grid])[0], pca_colours([grid * torch.rand(6, 6, 1).add(0.5)])[0])


def test_an_outlier_does_not_set_the_scale() -> None:
    grid = two_things(20, 20, 0.05, 1)
    grid[0, 0] = -5 * grid[0, 0]
    colours = pca_colours([grid])[0]
    assert (colours[1:, :10, 0].mean() - colours[1:, 10:, 0].mean()).abs() > 0.5


def test_further_images_get_the_same_colours_at_any_size() -> None:
    colours = PCAColours([two_things(6, 8, 0.05, 1)])
    later = two_things(6, 8, 0.05, 9)
    small, large = colours(later), colours(later, size=(60, 80))
    assert large.shape == (60, 80, 3)
    torch.testing.assert_close(large[5::10, 5::10].mean(), small.mean(), atol=0.02, rtol=0)
    assert (large[:, :20, 0].mean() - small[:, :2, 0].mean()).abs() < 0.05


def test_constant_components_are_grey() -> None:
    assert pca_colours([torch.ones(3, 3, 8)])[0].eq(0.5).all()
    two_channels = pca_colours([torch.randn(4, 4, 2)])[0]
    assert two_channels[..., 2].eq(0.5).all()
    assert two_channels[..., 0].std() > 0


def test_any_precision_and_gradients_are_accepted() -> None:
    grid = torch.randn(4, 4, 8)
    colours = PCAColours([grid.requires_grad_()])
    assert not colours(grid).requires_grad
    torch.testing.assert_close(colours(grid.bfloat16()), colours(grid), atol=0.1, rtol=0)


@pytest.mark.parametrize(
    ("grids", "named"),
    [
        ([], "got none"),
        ([torch.zeros(2, 2, 8), torch.zeros(2, 2, 4)], r"\(2, 2, 4\)"),
        ([torch.zeros(4, 8)], r"\(4, 8\)"),
        ([torch.full((2, 2, 8), torch.nan)], "finite"),
    ],
)
def test_invalid_features_are_refused(grids: list[torch.Tensor], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        pca_colours(grids)
