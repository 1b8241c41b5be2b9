"""Square images with small label maps, cropped consistently and without keeping the aspect."""

import pytest
import torch

from cribo.data.squares import SquareCrops, SquareImages

from .test_crops import Mapped, halves


def test_labels_and_pixels_are_cropped_consistently() -> None:
    crops = SquareCrops(Mapped([halves(120, 150)]), 64, 16, seed=0)
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


def test_crops_depend_on_seed_and_key_only() -> None:
    first, again = (SquareCrops(Mapped([halves(90, 90)]), 32, 8, seed=3) for _ in range(2))
    assert torch.equal(first[4, 0].pixels, again[4, 0].pixels)
    other = SquareCrops(Mapped([halves(90, 90)]), 32, 8, seed=4)
    assert not torch.equal(first[4, 0].pixels, other[4, 0].pixels)


def test_images_and_labels_are_resized_to_squares() -> None:
    image = SquareImages(Mapped([halves(60, 200)]), 40, 10)[0]
    assert image.pixels.shape == (3, 40, 40)
    assert image.labels.shape == (10, 10)
    assert torch.equal(image.labels, halves(10, 10))
    # Every fourth pixel of the square, starting with the first.
    ramp = (torch.arange(40) * 6).to(torch.uint8).expand(40, 40)
    assert SquareImages(Mapped([ramp]), 40, 10)[0].labels[0].tolist() == list(range(0, 240, 24))


def test_sizes_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="mask_size must be >= 1, got 0"):
        SquareCrops(Mapped([halves(8, 8)]), 8, 0, seed=0)
    with pytest.raises(ValueError, match="size must be >= 1, got 0"):
        SquareImages(Mapped([halves(8, 8)]), 0, 8)
