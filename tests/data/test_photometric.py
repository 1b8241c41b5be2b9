import math
import shutil

import pytest
import torch
from torch import Tensor
from torchvision.transforms import functional as classic

from cribo.data import Photometric, apply_photometric, sample_photometric
from cribo.data.photometric import compile_photometric
from cribo.method import ViewRecipe


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_draws_depend_on_the_generator_only() -> None:
    light = sample_photometric(ViewRecipe(), generator=generator(1))
    torch.rand(3)
    same = sample_photometric(ViewRecipe(), generator=generator(1))
    assert all(torch.equal(getattr(light, name), getattr(same, name)) for name in light._fields)


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


def without_colour(view: Tensor, parameters: Photometric, row: int) -> Tensor:
    """The operations of a view of C channels, literally."""
    x = view.double() / 255
    for operation in parameters.order[row].tolist():
        if operation == 0:
            x = (parameters.brightness[row].double() * x).clamp(0, 1)
        if operation == 1:
            factor = parameters.contrast[row].double()
            x = (factor * x + (1 - factor) * x.mean()).clamp(0, 1)
    if (sigma := float(parameters.sigma[row])) > 0:
        size = 2 * math.ceil(3 * sigma) + 1
        x = torch.cat([classic.gaussian_blur(channel[None], [size, size], [sigma, sigma]) for channel in x])
    return torch.where(x >= 128 / 255, 1 - x, x) if parameters.solarise[row] else x


@pytest.mark.parametrize("channels", [2, 5])
def test_views_of_c_channels_have_no_hue_saturation_or_greyscale(channels: int) -> None:
    photometric = drawn(20)
    views = torch.cat([photographs(40, seed=number) for number in (0, 1)], dim=1)[:, :channels]
    views = (views.float() * torch.linspace(0.3, 1, channels)[:, None, None]).byte()  # of different brightness
    found = apply_photometric(views, photometric)
    expected = torch.stack([without_colour(view, photometric, row) for row, view in enumerate(views)])
    assert {int(each) for each in photometric.greyscale} == {0, 1}
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)


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


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_compiled_operations_are_one_graph_and_equal() -> None:
    recipe, other = ViewRecipe(solarise=(0.5, 0.5)), ViewRecipe(blur=(0, 0), jitter=0, greyscale=0)
    views, draws = photographs(16), [drawn(8, recipe), drawn(8, other)]
    expected = [apply_photometric(views, p) for p in draws]
    torch.compiler.reset()
    compile_photometric()
    try:
        found = [apply_photometric(views, draws[0])]
        with torch.compiler.set_stance("fail_on_recompile"):
            found.append(apply_photometric(views, draws[1]))
    finally:
        compile_photometric(False)
        torch.compiler.reset()
    for ours, theirs in zip(found, expected, strict=True):
        difference = (ours - theirs).abs()
        assert difference.max() < 6e-3  # solarised values on the threshold
        assert (difference > 1e-4).float().mean() < 5e-3


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
