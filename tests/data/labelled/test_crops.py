"""Position, padding and colour distortion of training crops; square images with small label maps."""

import colorsys
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from cribo.data import colour_map
from cribo.data.labelled.crops import (
    HUE,
    Crops,
    MMSegPreparation,
    SquarePreparation,
    WholeImages,
    _saturate,
    distort,
    fitted_size,
    is_varied,
    resize,
)
from cribo.data.randomness import keyed_generator


@dataclass
class Mapped:
    """Labelled images whose pixel values are row and column, with given labels."""

    maps: list[torch.Tensor]
    ignore_index: int = 255

    @property
    def classes(self) -> list[str]:
        return [str(c) for c in range(9)]

    @property
    def palette(self) -> list[tuple[int, int, int]]:
        return colour_map(9)

    def __len__(self) -> int:
        return len(self.maps)

    def name(self, index: int) -> str:
        return str(index)

    def load(self, index: int) -> torch.Tensor:
        height, width = self.maps[index].shape
        rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        return torch.stack((rows, columns, torch.full_like(rows, 100))).to(torch.uint8)

    def labels(self, index: int) -> torch.Tensor:
        return self.maps[index]


def halves(height: int, width: int) -> torch.Tensor:
    """Return labels that are 0 in the left half and 1 in the right half."""
    return (torch.arange(width) >= width // 2).to(torch.uint8).expand(height, width)


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable colour distortion."""
    monkeypatch.setattr("cribo.data.labelled.crops.distort", lambda image, generator: image)


@pytest.mark.usefixtures("plain")
def test_image_and_labels_are_cropped_consistently() -> None:
    crops = Crops(Mapped([halves(120, 200)]), MMSegPreparation(64, None), seed=3)
    flips = set()
    for epoch in range(40):
        crop = crops[epoch, 0]
        height, width = crop.extent.tolist()
        rows, columns = crop.pixels[0, :height, :width].float(), crop.pixels[1, :height, :width].float()
        down, across = rows.diff(dim=0).mean().item(), columns.diff(dim=1).mean().item()
        assert 0.45 < down < 2.1  # from twice to half the size
        assert abs(abs(across) - down) < 0.1 * down
        flips.add(across < 0)
        expected = columns >= 100
        near = (columns - 99.5).abs() <= 1  # pixels on the border between the halves may have either label
        assert torch.equal(expected[~near], crop.labels[:height, :width][~near].bool())
    assert flips == {False, True}


@pytest.mark.usefixtures("plain")
def test_scales_range_from_half_to_twice() -> None:
    crops = Crops(Mapped([halves(100, 100)]), MMSegPreparation(400, (80, 40)), seed=0)
    sides = [int(crops[epoch, 0].extent[0]) for epoch in range(200)]
    assert min(sides) in range(20, 24)
    assert max(sides) in range(77, 81)
    assert 45 < np.mean(sides) < 55


@pytest.mark.parametrize(
    ("scale", "expected"),
    [((2048, 512), (512, 683)), ((512, 2048), (512, 683)), ((520, 520), (390, 520)), (None, (375, 500))],
)
def test_fitted_size(scale: tuple[int, int] | None, expected: tuple[int, int]) -> None:
    assert fitted_size(375, 500, scale) == expected
    assert fitted_size(500, 375, scale) == expected[::-1]


def test_long_images_are_limited_by_their_long_side() -> None:
    assert fitted_size(100, 1000, (2048, 512)) == (205, 2048)
    assert fitted_size(375, 500, (2048, 512), 1.499) == (767, 1023)  # 512 * 1.499 = 767.5, rounded down
    assert fitted_size(1, 1000, (100, 100)) == (1, 100)


@pytest.mark.usefixtures("plain")
def test_small_images_are_padded_at_right_and_bottom() -> None:
    crop = Crops(Mapped([halves(20, 30)]), MMSegPreparation(96, None), seed=0)[0, 0]
    height, width = crop.extent.tolist()
    assert height < 96
    assert width < 96
    assert (crop.labels[:height, :width] != 255).all()
    assert (crop.pixels[2, :height, :width] == 100).all()
    for beyond in (slice(height, None), slice(None)), (slice(None), slice(width, None)):
        assert (crop.labels[beyond] == 255).all()
        assert (crop.pixels[:, *beyond] == 0).all()


@pytest.mark.usefixtures("plain")
def test_crops_avoid_a_category_that_covers_three_quarters(monkeypatch: pytest.MonkeyPatch) -> None:
    labels = torch.zeros(200, 200, dtype=torch.uint8)
    labels[:, 150:] = 1
    labels[:, :50] = 255

    def varied() -> float:
        crops = Crops(Mapped([labels]), MMSegPreparation(50, None), seed=0)
        return float(np.mean([is_varied(crops[epoch, 0].labels, 255) for epoch in range(100)]))

    of_ten = varied()
    monkeypatch.setattr("cribo.data.labelled.crops._ATTEMPTS", 0)
    at_random = varied()
    assert at_random < 0.25
    assert abs(of_ten - (1 - (1 - at_random) ** 11)) < 0.2


def test_is_varied() -> None:
    def labels(*values: int) -> torch.Tensor:
        return torch.tensor([values], dtype=torch.uint8)

    assert is_varied(labels(0, 0, 1), 255)
    assert not is_varied(labels(0, 0, 0, 1), 255)
    assert not is_varied(labels(3, 3), 255)
    assert not is_varied(labels(3, 3, 255, 255, 255), 255)
    assert not is_varied(labels(255, 255), 255)
    assert is_varied(labels(0, 1, 255, 255, 255, 255), 255)


def test_an_image_of_one_category_is_still_cropped() -> None:
    images = Mapped([torch.full((80, 80), 255, dtype=torch.uint8)])
    assert (Crops(images, MMSegPreparation(32, None), seed=0)[0, 0].labels == 255).all()


def test_crops_depend_on_their_key_only() -> None:
    crops = Crops(Mapped([halves(90, 90), halves(90, 90)]), MMSegPreparation(64, None), seed=0)
    torch.manual_seed(1)
    first = crops[2, 0]
    torch.manual_seed(2)
    for again, part in zip(crops[2, 0], first, strict=True):
        assert torch.equal(again, part)
    others = [crops[3, 0], crops[2, 1], Crops(crops.images, MMSegPreparation(64, None), seed=1)[2, 0]]
    assert not any(torch.equal(other.pixels, first.pixels) for other in others)


def test_whole_images_are_resized_without_their_labels() -> None:
    whole = WholeImages(Mapped([halves(100, 150)]), MMSegPreparation(64, (60, 40)))[0]
    assert whole.pixels.shape == (3, 40, 60)
    assert torch.equal(whole.labels, halves(100, 150))


def test_resizing_is_not_antialiased() -> None:
    image = torch.zeros(3, 8, 8, dtype=torch.uint8)
    image[:, :, 1::4] = image[:, :, 2::4] = 200
    # At a quarter of the size, bilinear weights cover only the two central columns of each four.
    assert (resize(image, (2, 2)) == 200).all()


def distort_pixelwise(image: torch.Tensor, generator: torch.Generator) -> np.ndarray:
    """Compute `distort` pixel by pixel with the standard library's HSV."""
    chances = torch.rand(5, generator=generator).tolist()
    amounts = torch.rand(3, generator=generator).tolist()
    turn = int(torch.randint(-HUE, HUE, (), generator=generator))
    result = image.permute(1, 2, 0).double().numpy() / 255
    for row in result:
        for pixel in row:
            if chances[0] < 0.5:
                pixel[:] = np.clip(pixel + 32 / 255 * (2 * amounts[0] - 1), 0, 1)
            if chances[1] < 0.5 and chances[2] < 0.5:
                pixel[:] = np.clip(pixel * (0.5 + amounts[1]), 0, 1)
            hue, saturation, value = colorsys.rgb_to_hsv(*pixel)
            if chances[3] < 0.5:
                saturation = min(1.0, saturation * (0.5 + amounts[2]))
            if chances[4] < 0.5:
                hue = (hue + turn * 2 / 360) % 1
            pixel[:] = colorsys.hsv_to_rgb(hue, saturation, value)
            if chances[1] < 0.5 and not chances[2] < 0.5:
                pixel[:] = np.clip(pixel * (0.5 + amounts[1]), 0, 1)
    return result * 255


def test_distort_agrees_with_the_reference() -> None:
    image = torch.randint(0, 256, (3, 6, 7), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    image[:, 0, 0], image[:, 0, 1], image[:, 0, 2] = 0, 255, 90  # neither hue nor saturation
    changed = set()
    for key in range(64):
        found = distort(image, keyed_generator(key)).permute(1, 2, 0).numpy()
        expected = distort_pixelwise(image, keyed_generator(key))
        assert np.abs(found - expected).max() < 0.51
        changed.add(not np.array_equal(found, image.permute(1, 2, 0).numpy()))
    assert changed == {False, True}  # one draw in sixteen changes nothing


def test_saturation_is_clipped() -> None:
    values = torch.tensor([0.8, 0.2, 0.5]).view(3, 1, 1)
    more = _saturate(values, 1.5).flatten()  # from 0.75 to 1, which is the maximum
    assert torch.allclose(more, torch.tensor([0.8, 0.0, 0.4]), atol=1e-6)
    assert torch.allclose(_saturate(values, 0.0).flatten(), torch.full((3,), 0.8))


# ---------------------------------------------------------------------------- squares


def test_squares_and_their_labels_are_cropped_consistently() -> None:
    crops = Crops(Mapped([halves(120, 150)]), SquarePreparation(64, 16), seed=0)
    flips, widths = set(), set()
    for epoch in range(12):
        crop = crops[epoch, 0]
        assert crop.pixels.shape == (3, 64, 64)
        assert crop.labels.shape == (16, 16)
        assert crop.extent.tolist() == [64, 64]
        columns = crop.pixels[1, 32].float()
        flipped = bool(columns[0] > columns[-1])
        flips.add(flipped)
        widths.add(round(float(columns.max() - columns.min())))
        # Label 1 starts at column 75 of the image.
        right = (columns[0::4] >= 75).to(torch.uint8)
        assert (crop.labels[8] != right).sum() <= 1
    assert flips == {False, True}
    assert len(widths) > 6
    assert min(widths) > 95  # 0.8 of the area at an aspect of 3/4 is 104 columns wide


def test_square_crops_depend_on_seed_and_key_only() -> None:
    first, again = (Crops(Mapped([halves(90, 90)]), SquarePreparation(32, 8), seed=3) for _ in range(2))
    assert torch.equal(first[4, 0].pixels, again[4, 0].pixels)
    other = Crops(Mapped([halves(90, 90)]), SquarePreparation(32, 8), seed=4)
    assert not torch.equal(first[4, 0].pixels, other[4, 0].pixels)


def test_images_and_labels_are_resized_to_squares() -> None:
    image = WholeImages(Mapped([halves(60, 200)]), SquarePreparation(40, 10))[0]
    assert image.pixels.shape == (3, 40, 40)
    assert image.labels.shape == (10, 10)
    assert torch.equal(image.labels, halves(10, 10))
    # Every fourth pixel of the square, starting with the first.
    ramp = (torch.arange(40) * 6).to(torch.uint8).expand(40, 40)
    assert WholeImages(Mapped([ramp]), SquarePreparation(40, 10))[0].labels[0].tolist() == list(range(0, 240, 24))
