import math

import pytest
import torch
from torch import Tensor

from cribo.method import Crops, ViewRecipe, cut_views, patch_coordinates, sample_crops


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def own_coordinates(height: int, width: int) -> Tensor:
    """An image with each pixel's (x, y) in red and green."""
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return torch.stack((x, y, torch.zeros_like(x))).to(torch.uint8)


def seen_coordinates(view: Tensor, grid: tuple[int, int]) -> Tensor:
    """Mean (x, y) over each patch (N, 2) of a view of `own_coordinates`, plus 0.5 for pixel centres."""
    rows, columns = grid
    patches = view[:2].float().unflatten(2, (columns, -1)).unflatten(1, (rows, -1))
    return patches.mean(dim=(2, 4)).flatten(1).T + 0.5


@pytest.mark.parametrize("grid", [(4, 4), (14, 14), (7, 7)])
@pytest.mark.parametrize("seed", range(2))
def test_coordinates_against_brute_force(seed: int, grid: tuple[int, int]) -> None:
    recipe = ViewRecipe(size=112)
    image = own_coordinates(180, 250)
    crops = sample_crops(180, 250, recipe, generator=generator(seed))
    views = cut_views(image, crops, recipe.size)
    coordinates = patch_coordinates(crops.boxes, crops.flips, grid)
    for view in (0, 1):
        # At the crop's edge, the bicubic kernel is truncated, which shifts the outer pixels slightly inwards.
        torch.testing.assert_close(coordinates[view], seen_coordinates(views[view], grid), rtol=0, atol=0.75)


@pytest.mark.parametrize("flip", [False, True])
def test_coordinates_are_exact_without_a_resize(flip: bool) -> None:
    crops = Crops(torch.tensor([[13, 40, 64, 64], [0, 0, 64, 64]]), torch.tensor([flip, not flip]))
    views = cut_views(own_coordinates(100, 200), crops, 64)
    for grid in ((4, 4), (8, 2), (64, 64)):
        coordinates = patch_coordinates(crops.boxes, crops.flips, grid)
        for view in (0, 1):
            torch.testing.assert_close(coordinates[view], seen_coordinates(views[view], grid))


def test_coordinates_of_many_views_at_once() -> None:
    boxes = torch.randint(1, 100, (3, 2, 4))
    flips = torch.rand(3, 2) < 0.5
    together = patch_coordinates(boxes, flips, (3, 5))
    assert together.shape == (3, 2, 15, 2)
    for image in range(3):
        for view in (0, 1):
            alone = patch_coordinates(boxes[image, view], flips[image, view], (3, 5))
            assert torch.equal(together[image, view], alone)


def test_a_flipped_view_is_the_mirrored_view() -> None:
    image = torch.randint(0, 256, (3, 60, 80), dtype=torch.uint8)
    boxes = torch.tensor([[5, 6, 40, 50]] * 2)
    views = cut_views(image, Crops(boxes, torch.tensor([False, True])), 32)
    assert views.dtype == torch.uint8
    assert torch.equal(views[1], views[0].flip(-1))


def test_crops_are_resized_by_the_interpolation_asked_for() -> None:
    """An edge has overshoots with a bicubic kernel, and none with a bilinear one, which is never negative."""
    image = torch.full((3, 16, 16), 100, dtype=torch.uint8)
    image[:, :, 8:] = 200
    crops = Crops(torch.tensor([[0, 0, 16, 16]]), torch.tensor([False]))
    bicubic = cut_views(image, crops, 32)
    bilinear = cut_views(image, crops, 32, interpolation="bilinear")
    assert bicubic.min() < 100
    assert bicubic.max() > 200
    assert bilinear.unique()[[0, -1]].tolist() == [100, 200]


@pytest.mark.parametrize(("height", "width"), [(480, 640), (375, 500), (200, 200), (64, 48)])
def test_crops_lie_inside_and_follow_the_recipe(height: int, width: int) -> None:
    recipe, stream = ViewRecipe(), generator(0)
    crops = [sample_crops(height, width, recipe, generator=stream) for _ in range(400)]
    top, left, rows, columns = torch.cat([crop.boxes for crop in crops]).T
    assert (top >= 0).all()
    assert (left >= 0).all()
    assert (top + rows <= height).all()
    assert (left + columns <= width).all()
    rounding = 0.5 / torch.minimum(rows, columns)
    area, aspect = rows * columns / (height * width), columns / rows
    assert (area >= 0.25 * (1 - 2.1 * rounding)).all()
    assert (area <= 1).all()
    assert (aspect >= 3 / 4 * (1 - 2.1 * rounding)).all()
    assert (aspect <= 4 / 3 * (1 + 2.1 * rounding)).all()
    # Spread over the whole range, and over the whole image.
    assert area.min() < 0.3
    assert area.max() > 0.8
    assert aspect.log().mean().abs() < 0.1
    assert (top == 0).any()
    assert (top + rows == height).any()
    assert (left == 0).any()
    assert (left + columns == width).any()
    flips = torch.cat([crop.flips for crop in crops]).float().mean()
    assert abs(float(flips) - 0.5) < 0.09  # 5 standard deviations


@pytest.mark.parametrize(("height", "width"), [(10, 1000), (1000, 10), (2, 999), (1, 1), (2, 2)])
def test_crops_of_extreme_images(height: int, width: int) -> None:
    recipe, stream = ViewRecipe(size=16), generator(0)
    image = torch.randint(0, 256, (3, height, width), dtype=torch.uint8)
    for _ in range(30):
        crops = sample_crops(height, width, recipe, generator=stream)
        for top, left, rows, columns in crops.boxes.tolist():
            assert 0 <= top < top + rows <= height
            assert 0 <= left < left + columns <= width
        assert cut_views(image, crops, 16).shape == (2, 3, 16, 16)


def test_a_strip_that_fits_no_shape_is_cropped_at_its_centre() -> None:
    crops = sample_crops(10, 1000, ViewRecipe(), generator=generator(0))
    assert crops.boxes.tolist() == [[0, 493, 10, 13]] * 2  # aspect 4 / 3


def test_a_recipe_without_freedom() -> None:
    recipe = ViewRecipe(area=(1, 1), aspect=(1, 1), flip=1)
    crops = sample_crops(50, 50, recipe, generator=generator(0))
    assert crops.boxes.tolist() == [[0, 0, 50, 50]] * 2
    assert crops.flips.all()


def test_views_are_drawn_independently_of_each_other() -> None:
    stream = generator(0)
    boxes = torch.stack([sample_crops(480, 640, ViewRecipe(), generator=stream).boxes for _ in range(200)]).float()
    areas = boxes[..., 2] * boxes[..., 3]
    assert abs(float(torch.corrcoef(areas.T)[0, 1])) < 0.3


def test_draws_depend_on_the_generator_only() -> None:
    before = torch.get_rng_state()
    first = sample_crops(480, 640, ViewRecipe(), generator=generator(1))
    torch.rand(3)
    again = sample_crops(480, 640, ViewRecipe(), generator=generator(1))
    other = sample_crops(480, 640, ViewRecipe(), generator=generator(2))
    assert torch.equal(first.boxes, again.boxes)
    assert torch.equal(first.flips, again.flips)
    assert not torch.equal(first.boxes, other.boxes)
    torch.set_rng_state(before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": 0}, "size must be >= 1 and <= 8192, got 0"),
        ({"flip": 1.5}, r"flip must be >= 0 and <= 1"),
        ({"jitter": -0.1}, r"jitter must be >= 0 and <= 1"),
        ({"brightness": 2.0}, r"brightness must be >= 0 and <= 1"),
        ({"contrast": -1.0}, "contrast must be >= 0 and <= 1"),
        ({"saturation": 1.1}, "saturation must be >= 0 and <= 1"),
        ({"hue": 0.6}, r"hue must be >= 0 and <= 0\.5"),
        ({"greyscale": math.nan}, "greyscale must be >= 0 and <= 1, got nan"),
        ({"area": (0.0, 1.0)}, r"area must be >= 0\.0001 and <= 1, got \(0\.0, 1\.0\)"),
        ({"area": (0.5, 1.2)}, "area must be >="),
        ({"area": (0.8, 0.3)}, r"area must be ordered \(low, high\), got \(0\.8, 0\.3\)"),
        ({"aspect": (2.0, 0.5)}, r"aspect must be ordered \(low, high\)"),
        ({"aspect": (0.0, 0.5)}, "aspect must be >="),
        ({"blur": (1.0, -0.1)}, r"blur must be >= 0 and <= 1, got \(1\.0, -0\.1\)"),
        ({"blur_sigma": (0.0, 2.0)}, r"blur_sigma must be >= 0\.01 and <= 100"),
        ({"blur_sigma": (3.0, 2.0)}, r"blur_sigma must be ordered \(low, high\)"),
        ({"solarise": (0.0, 1.2)}, "solarise must be >= 0 and <= 1"),
        ({"solarise_threshold": 300.0}, "solarise_threshold must be >= 0 and <= 255, got 300"),
    ],
)
def test_recipe_errors(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ViewRecipe(**change)
