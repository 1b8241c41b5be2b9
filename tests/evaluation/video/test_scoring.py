"""Compare J and F with DAVIS's evaluation, stated literally in NumPy, and with known values for squares."""

import numpy as np
import pytest
import torch

from cribo.data.labelled.video import Video
from cribo.evaluation.video.protocol import (
    Segmented,
    boundary,
    boundary_accuracy,
    dilate,
    region_similarity,
    row,
    score_frame,
)


def blobs(seed: int, size: tuple[int, int] = (40, 56)) -> np.ndarray:
    """Return a region of smooth noise that touches the edges."""
    noise = np.random.default_rng(seed).normal(size=size)
    for axis in (0, 1):
        noise = np.sum([np.roll(noise, shift, axis) for shift in range(-4, 5)], axis=0)
    return noise > 0


def davis_boundary(region: np.ndarray) -> np.ndarray:
    """Return the boundary of DAVIS's evaluation, pixel by pixel; the last rows and columns compare along the edge."""
    height, width = region.shape
    found = np.zeros_like(region)
    for y in range(height):
        for x in range(width):
            right = region[y, x] != region[y, x + 1] if x + 1 < width else False
            below = region[y, x] != region[y + 1, x] if y + 1 < height else False
            diagonal = region[y, x] != region[y + 1, x + 1] if x + 1 < width and y + 1 < height else False
            found[y, x] = right or below or diagonal
    return found


def davis_f(found: np.ndarray, true: np.ndarray) -> float:
    """Return F from the distances of all pairs of boundary pixels."""
    radius = np.ceil(0.008 * np.linalg.norm(found.shape))
    ours, theirs = (np.argwhere(davis_boundary(part)) for part in (found, true))
    precision, recall = (
        np.mean([(np.square(others - pixel).sum(axis=1) <= radius**2).any() for pixel in pixels])
        for pixels, others in ((ours, theirs), (theirs, ours))
    )
    return float(2 * precision * recall / (precision + recall))


@pytest.mark.parametrize("size", [(40, 56), (120, 300)])
def test_regions_and_boundaries_equal_those_of_davis(size: tuple[int, int]) -> None:
    """At 120 x 300 pixels, the tolerance is three pixels, at 40 x 56 one."""
    first, second = blobs(0, size), blobs(1, size)
    second[: size[0] // 2] = first[: size[0] // 2]
    found, true = torch.from_numpy(first), torch.from_numpy(second)
    np.testing.assert_array_equal(boundary(found).numpy(), davis_boundary(first))
    assert boundary_accuracy(found, true) == pytest.approx(davis_f(first, second))
    assert region_similarity(found, true) == pytest.approx((first & second).sum() / (first | second).sum())
    assert 0.5 < boundary_accuracy(found, true) < 1


@pytest.mark.parametrize("radius", [1, 2, 8])
def test_dilation_uses_a_disk(radius: int) -> None:
    region = torch.zeros(20, 30, dtype=torch.bool)
    region[[0, 10, 19, 12], [3, 15, 29, 16]] = True
    rows, columns = torch.meshgrid(torch.arange(20), torch.arange(30), indexing="ij")
    expected = torch.zeros_like(region)
    for row_, column in region.nonzero().tolist():
        expected |= (rows - row_) ** 2 + (columns - column) ** 2 <= radius**2
    assert torch.equal(dilate(region[None], radius)[0], expected)


def square(left: int, top: int, side: int = 10) -> torch.Tensor:
    region = torch.zeros(60, 80, dtype=torch.bool)  # a diagonal of 100 pixels: the tolerance is 1
    region[top : top + side, left : left + side] = True
    return region


def test_squares() -> None:
    assert (region_similarity(square(5, 5), square(5, 5)), boundary_accuracy(square(5, 5), square(5, 5))) == (1, 1)
    assert region_similarity(square(5, 5), square(10, 5)) == pytest.approx(50 / 150)
    assert boundary_accuracy(square(5, 5), square(6, 5)) == 1  # within the tolerance
    assert (region_similarity(square(5, 5), square(40, 40)), boundary_accuracy(square(5, 5), square(40, 40))) == (0, 0)
    empty = torch.zeros(60, 80, dtype=torch.bool)
    assert (region_similarity(empty, empty), boundary_accuracy(empty, empty)) == (1, 1)
    assert (region_similarity(empty, square(5, 5)), boundary_accuracy(empty, square(5, 5))) == (0, 0)


def test_objects_are_scored_by_number() -> None:
    true = square(5, 5).byte() + 2 * square(40, 40).byte()
    found = 2 * square(5, 5).byte() + 2 * square(40, 40).byte()
    regions, boundaries = score_frame(found, true, 2)
    torch.testing.assert_close(regions, torch.tensor([0.0, 0.5], dtype=torch.float64))
    assert boundaries.tolist() == pytest.approx([0, 2 / 3])  # precision of a half, recall of 1


def test_means_over_all_objects_as_in_davis() -> None:
    """A video with two objects counts twice, a video with one object once."""
    regions = torch.tensor([[1.0, 0.5], [0.2, 0.6]]), torch.tensor([[0.0, 0.3, 0.3]])
    boundaries = torch.tensor([[1.0, 1.0], [0.0, 0.4]]), torch.tensor([[0.6, 0.9, 0.3]])
    videos = Video("a", range(4), 2), Video("b", range(5), 1)
    scored = [Segmented(video, [], *parts) for video, *parts in zip(videos, regions, boundaries, strict=True)]
    made = row(5, scored)
    assert made["j_mean"] == pytest.approx((0.75 + 0.4 + 0.2) / 3)
    assert made["f_mean"] == pytest.approx((1.0 + 0.2 + 0.6) / 3)
    assert made["j_and_f"] == pytest.approx((made["j_mean"] + made["f_mean"]) / 2)
    assert (made["j_recall"], made["f_recall"]) == pytest.approx(((0.5 + 0.5 + 0) / 3, (1 + 0 + 2 / 3) / 3))
    assert made["per_class"] == pytest.approx({"a": (0.75 + 0.4 + 1.0 + 0.2) / 4, "b": 0.4})
    assert made["per_object"]["a_2"] == pytest.approx({"j": 0.4, "f": 0.2})
    assert (made["objects"], list(made["per_object"])) == (3, ["a_1", "a_2", "b_1"])
