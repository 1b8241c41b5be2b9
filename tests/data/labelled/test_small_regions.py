"""Merging of small regions of label maps."""

from typing import Any

import numpy as np
import pytest
import torch
from scipy import ndimage
from torch import Tensor

from cribo.data.labelled.regions import trace
from cribo.data.labelled.small_regions import merge_small_regions


def merged(rows: list[str], min_area: float) -> list[str]:
    """Merge the regions of rows of digits; a dot is a pixel without a class."""
    values = [[255 if each == "." else int(each) for each in row] for row in rows]
    found = merge_small_regions(torch.tensor(values, dtype=torch.uint8), min_area)
    return ["".join("." if each == 255 else str(each) for each in row) for row in found.tolist()]


def areas(labels: Tensor) -> list[int]:
    return [int(each.mask.sum()) for each in trace(labels.numpy(), range(255))]


@pytest.mark.parametrize(
    ("rows", "min_area", "expected"),
    [
        (["000000", "110000", "000222"], 3, ["000000", "000000", "000222"]),
        (["000000", "110000", "000222"], 2, ["000000", "110000", "000222"]),  # of exactly this area
        (["000111222"], 3, ["000111222"]),
        (["00003114555"], 3, ["00000055555"]),  # small regions side by side: each pixel has its own nearest
        (["0000", "0010", "0001"], 2, ["0000", "0000", "0000"]),  # regions that touch at a corner are separate
    ],
)
def test_small_regions_become_part_of_the_nearest_larger_one(
    rows: list[str], min_area: float, expected: list[str]
) -> None:
    assert merged(rows, min_area) == expected


@pytest.mark.parametrize("rows", [["0123", "3210"], ["....", "...."], ["0.0.", ".0.0"]])
def test_labels_without_large_regions_stay(rows: list[str]) -> None:
    assert merged(rows, 5) == rows


def test_pixels_without_a_class_neither_change_nor_spread() -> None:
    # A small hole of them stays, a large area of them takes nothing, and a region that they surround stays.
    assert merged(["00000", "0.001", "00000"], 3) == ["00000", "0.000", "00000"]
    assert merged(["0001....", "000.....", "000..22."], 3) == ["0000....", "000.....", "000..22."]
    # The nearest region within the labelled pixels, not the one across the gap.
    assert merged(["111.3222", "111....2", "111....2"], 3) == ["111.2222", "111....2", "111....2"]


def test_min_area_0_changes_nothing_and_the_input_is_kept() -> None:
    labels = torch.tensor([[0, 0, 1, 0, 0]], dtype=torch.uint8)
    assert torch.equal(merge_small_regions(labels, 0), labels)
    assert torch.equal(merge_small_regions(labels, 2), torch.zeros_like(labels))
    assert labels[0, 2] == 1


@pytest.mark.parametrize("seed", range(3))
def test_no_small_region_is_left(seed: int) -> None:
    smooth: Any = ndimage.gaussian_filter(np.random.default_rng(seed).normal(size=(4, 90, 120)), (0, 2, 2))
    labels = torch.from_numpy(smooth.argmax(0).astype(np.uint8))
    found = merge_small_regions(labels, 60)
    assert min(areas(labels)) < 60 <= min(areas(found))
    for region in trace(labels.numpy(), range(4)):
        if region.mask.sum() >= 60:
            height, width = region.mask.shape
            own = found.numpy()[region.top : region.top + height, region.left : region.left + width]
            assert (own[region.mask] == region.label).all()
