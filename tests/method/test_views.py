import math

import pytest
import torch
from torch import Tensor
from torchvision.transforms import functional as classic

from cribo.method import (
    Crops,
    Photometric,
    ViewRecipe,
    apply_photometric,
    cut_views,
    patch_coordinates,
    sample_crops,
    sample_photometric,
)
from cribo.method.views import largest_reduction, reduced_crops


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
@pytest.mark.parametrize("seed", range(6))
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


@pytest.mark.parametrize("reduction", [1, 2, 4, 8])
def test_reduced_crops_are_the_whole_pixels_inside(reduction: int) -> None:
    stream = generator(0)
    for _ in range(50):
        crops = sample_crops(1111, 1503, ViewRecipe(), generator=stream)
        reduced = reduced_crops(crops, reduction)
        top_left, end = crops.boxes[:, :2], crops.boxes[:, :2] + crops.boxes[:, 2:]
        first, last = reduced.boxes[:, :2] * reduction, (reduced.boxes[:, :2] + reduced.boxes[:, 2:]) * reduction
        assert (first >= top_left).all()
        assert (first < top_left + reduction).all()
        assert (last <= end).all()
        assert (last > end - reduction).all()
        assert torch.equal(reduced.flips, crops.flips)


def test_the_largest_reduction_leaves_both_crops_enough_pixels() -> None:
    for recipe, height, width in ((ViewRecipe(), 1536, 2048), (ViewRecipe(size=48), 480, 640)):
        stream, found = generator(0), set()
        for _ in range(60):
            crops = sample_crops(height, width, recipe, generator=stream)
            reduction = largest_reduction(crops, recipe.size)
            found.add(reduction)
            sides = {by: reduced_crops(crops, by).boxes[:, 2:].min() for by in (1, 2, 4, 8)}
            assert reduction == 1 or sides[reduction] >= recipe.size
            assert reduction == 8 or sides[2 * reduction] < recipe.size
        assert len(found) > 1


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
    light = sample_photometric(ViewRecipe(), generator=generator(1))
    torch.rand(3)
    again = sample_crops(480, 640, ViewRecipe(), generator=generator(1))
    other = sample_crops(480, 640, ViewRecipe(), generator=generator(2))
    assert torch.equal(first.boxes, again.boxes)
    assert torch.equal(first.flips, again.flips)
    assert not torch.equal(first.boxes, other.boxes)
    same = sample_photometric(ViewRecipe(), generator=generator(1))
    assert all(torch.equal(getattr(light, name), getattr(same, name)) for name in light._fields)
    torch.set_rng_state(before)


def drawn(count: int, recipe: ViewRecipe | None = None, *, seed: int = 0) -> Photometric:
    """Parameters of 2 * count views, alternating view 1 and view 2."""
    stream = generator(seed)
    return Photometric.cat([sample_photometric(recipe or ViewRecipe(), generator=stream) for _ in range(count)])


def test_probabilities_and_ranges() -> None:
    p = drawn(1000)
    jittered = p.brightness != 1
    assert torch.equal(jittered, p.hue != 0)
    assert torch.equal(jittered, p.saturation != 1)

    def share(mask: Tensor, expected: float) -> None:
        tolerance = 5 * math.sqrt(expected * (1 - expected) / len(mask)) + 1e-9
        assert abs(float(mask.float().mean()) - expected) <= tolerance

    share(jittered, 0.8)
    share(p.greyscale, 0.2)
    share(p.sigma[0::2] > 0, 1.0)
    share(p.sigma[1::2] > 0, 0.1)
    share(p.solarise[0::2], 0.0)
    share(p.solarise[1::2], 0.2)
    for values, centre, strength in (
        (p.brightness, 1, 0.4),
        (p.contrast, 1, 0.4),
        (p.saturation, 1, 0.2),
        (p.hue, 0, 0.1),
    ):
        distance = (values[jittered] - centre).abs()
        assert distance.max() <= strength + 1e-6
        assert distance.max() > 0.98 * strength
        assert distance.mean().item() == pytest.approx(strength / 2, rel=0.05)
    sigma = p.sigma[p.sigma > 0]
    assert 0.1 <= sigma.min() < 0.15
    assert 1.95 < sigma.max() <= 2
    orders = torch.unique(p.order, dim=0, return_counts=True)
    assert len(orders[0]) == 24
    assert orders[1].min() > 45  # of 83 expected


def test_a_seed_gives_the_same_draws_in_every_version() -> None:
    expected = {
        "brightness": [1.0, 1.336598, 1.046595, 1.070023],
        "contrast": [1.0, 1.232918, 1.145557, 1.196301],
        "saturation": [1.0, 0.940443, 0.891062, 1.123957],
        "hue": [0.0, -0.042353, 0.026118, -0.060822],
        "order": [[2, 1, 0, 3], [1, 2, 3, 0], [1, 2, 3, 0], [2, 0, 3, 1]],
        "greyscale": [False, True, True, False],
        "sigma": [1.015512, 0.0, 1.013576, 0.0],
        "solarise": [False, False, False, False],
    }
    p = drawn(2)
    assert set(expected) == set(p._fields)
    for name, values in expected.items():
        torch.testing.assert_close(getattr(p, name), torch.tensor(values), rtol=0, atol=1e-6)


def photographs(count: int, height: int = 24, width: int = 32, *, seed: int = 0) -> Tensor:
    """Smooth colours with some noise, including greys and extremes."""
    small = torch.rand(count, 3, 5, 5, generator=generator(seed))
    smooth = torch.nn.functional.interpolate(small, (height, width), mode="bicubic", align_corners=True)
    noise = 0.1 * torch.randn(count, 3, height, width, generator=generator(seed + 1))
    images = (255 * (1.4 * (smooth + noise) - 0.2)).clamp(0, 255).to(torch.uint8)
    images[:, :, :4, :4] = 0
    images[:, :, :4, 4:8] = 255
    images[:, :, :4, 8:12] = 90
    return images


def one_by_one(view: Tensor, parameters: Photometric, row: int) -> Tensor:
    """Apply torchvision's transforms one after the other to an 8-bit view (3, H, W)."""
    x = view.float() / 255
    operations = (
        lambda x: classic.adjust_brightness(x, float(parameters.brightness[row])),
        lambda x: classic.adjust_contrast(x, float(parameters.contrast[row])),
        lambda x: classic.adjust_saturation(x, float(parameters.saturation[row])),
        lambda x: classic.adjust_hue(x, float(parameters.hue[row])),
    )
    if float(parameters.brightness[row]) != 1:  # no jitter was drawn otherwise
        for operation in parameters.order[row].tolist():
            x = operations[operation](x)
    if parameters.greyscale[row]:
        x = classic.rgb_to_grayscale(x, num_output_channels=3)
    if (sigma := float(parameters.sigma[row])) > 0:
        x = classic.gaussian_blur(x, [2 * math.ceil(3 * sigma) + 1] * 2, [sigma, sigma])
    if parameters.solarise[row]:
        x = classic.solarize(x, 128 / 255)
    return x


def test_photometric_against_torchvision_transforms() -> None:
    recipe = ViewRecipe(blur=(0.6, 0.6), solarise=(0.0, 0.0), hue=0.5, saturation=1.0, brightness=0.8)
    p = drawn(40, recipe)
    views = photographs(80)
    actual = apply_photometric(views, p)
    expected = torch.stack([one_by_one(view, p, row) for row, view in enumerate(views)])
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-3)


def test_solarise_against_the_torchvision_transform() -> None:
    p = drawn(40, ViewRecipe(solarise=(0.5, 0.5)))
    views = photographs(80)
    actual = apply_photometric(views, p)
    expected = torch.stack([one_by_one(view, p, row) for row, view in enumerate(views)])
    difference = (actual - expected).abs()
    # Values at the threshold may round to either side, which changes them only from 128 to 127 / 255.
    assert difference.max() < 6e-3
    assert (difference > 1e-3).float().mean() < 5e-3


@pytest.mark.gpu
def test_a_gpu_is_not_synchronised() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    p, views = drawn(40), photographs(80)
    expected, views = apply_photometric(views, p), views.cuda()
    apply_photometric(views, p)  # libraries initialise at first use
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = apply_photometric(views, p)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    difference = (found.cpu() - expected).abs()
    assert (difference > 1e-3).float().mean() < 1e-3  # solarised values on the threshold


def test_nothing_drawn_changes_nothing() -> None:
    recipe = ViewRecipe(jitter=0, greyscale=0, blur=(0, 0), solarise=(0, 0))
    views = photographs(6)
    plain = apply_photometric(views, drawn(3, recipe))
    torch.testing.assert_close(plain, views / 255)


def test_views_do_not_depend_on_their_batch_mates() -> None:
    p, views = drawn(20), photographs(40)
    together = apply_photometric(views, p)
    for row in range(40):
        alone = apply_photometric(views[row : row + 1], p.select(slice(row, row + 1)))
        torch.testing.assert_close(alone[0], together[row], rtol=0, atol=2e-6)


def test_autocast_changes_nothing() -> None:
    p, views = drawn(20), photographs(40)
    expected = apply_photometric(views, p)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = apply_photometric(views, p)
    assert torch.equal(actual, expected)


def test_views_are_not_modified() -> None:
    views = photographs(10)
    copy = views.clone()
    apply_photometric(views, drawn(5))
    assert torch.equal(views, copy)


def test_blur_of_a_view_smaller_than_its_kernel() -> None:
    recipe = ViewRecipe(jitter=0, greyscale=0, blur=(1, 1), solarise=(0, 0), blur_sigma=(5.0, 5.0))
    views = torch.full((2, 3, 4, 4), 77, dtype=torch.uint8)
    blurred = apply_photometric(views, drawn(1, recipe))
    torch.testing.assert_close(blurred, torch.full((2, 3, 4, 4), 77 / 255))


def test_solarise_threshold() -> None:
    recipe = ViewRecipe(jitter=0, greyscale=0, blur=(0, 0), solarise=(1, 1))
    views = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(2, 3, -1, -1)
    for threshold in (0, 100, 255):
        actual = apply_photometric(views, drawn(1, recipe), solarise_threshold=threshold)
        grey = views.float()
        expected = torch.where(grey >= threshold, 255 - grey, grey) / 255
        torch.testing.assert_close(actual, expected)


def test_parameters_can_be_joined_and_selected() -> None:
    first, second = drawn(2, seed=1), drawn(3, seed=2)
    both = Photometric.cat([first, second])
    for name in both._fields:
        assert torch.equal(getattr(both.select(slice(4, 10)), name), getattr(second, name))
        assert torch.equal(getattr(both.select(torch.tensor([1, 0])), name), getattr(first, name)[[1, 0]])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": 0}, "size must be between 1 and 8192, got 0"),
        ({"flip": 1.5}, r"flip must be between 0 and 1, got 1\.5"),
        ({"jitter": -0.1}, r"jitter must be between 0 and 1, got -0\.1"),
        ({"brightness": 2.0}, r"brightness must be between 0 and 1, got 2\.0"),
        ({"contrast": -1.0}, "contrast must be between 0 and 1"),
        ({"saturation": 1.1}, "saturation must be between 0 and 1"),
        ({"hue": 0.6}, r"hue must be between 0 and 0\.5, got 0\.6"),
        ({"greyscale": math.nan}, "greyscale must be between 0 and 1, got nan"),
        ({"area": (0.0, 1.0)}, r"area must be between 0\.0001 and 1, got \(0\.0, 1\.0\)"),
        ({"area": (0.5, 1.2)}, "area must be between"),
        ({"area": (0.8, 0.3)}, r"area must be ordered \(low, high\), got \(0\.8, 0\.3\)"),
        ({"aspect": (2.0, 0.5)}, r"aspect must be ordered \(low, high\)"),
        ({"aspect": (0.0, 0.5)}, "aspect must be between"),
        ({"blur": (1.0, -0.1)}, r"blur must be between 0 and 1, got \(1\.0, -0\.1\)"),
        ({"blur_sigma": (0.0, 2.0)}, r"blur_sigma must be between 0\.01 and 100"),
        ({"blur_sigma": (3.0, 2.0)}, r"blur_sigma must be ordered \(low, high\)"),
        ({"solarise": (0.0, 1.2)}, "solarise must be between 0 and 1"),
        ({"solarise_threshold": 300.0}, "solarise_threshold must be between 0 and 255, got 300"),
    ],
)
def test_recipe_errors(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ViewRecipe(**change)
