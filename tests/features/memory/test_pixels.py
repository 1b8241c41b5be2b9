import math

import pytest
import torch
import torch.nn.functional as F

import cribo.features.memory.pixels as pixels
from cribo.features.memory.pixels import label_pixels, radius
from cribo.features.memory.settings import Refine


def random_image(height: int, width: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    small = torch.rand(1, 3, 4, 5, generator=generator)
    return (F.interpolate(small, size=(height, width), mode="bilinear")[0] * 255).to(torch.uint8)


def random_votes(rows: int, columns: int, classes: int, seed: int = 0) -> torch.Tensor:
    return (torch.randn(rows, columns, classes, generator=torch.Generator().manual_seed(seed)) * 2).softmax(dim=-1)


def test_votes_are_interpolated_between_patch_centres() -> None:
    votes = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    found = label_pixels(votes, random_image(4, 8), patch_size=4)
    assert found.labels.tolist() == [[0, 0, 0, 0, 1, 1, 1, 1]] * 4
    torch.testing.assert_close(found.confidence[0], torch.tensor([1, 1, 0.875, 0.625, 0.625, 0.875, 1, 1]))


def test_ties_go_to_the_smaller_class() -> None:
    found = label_pixels(torch.full((2, 2, 5), 0.2), random_image(8, 8), patch_size=4)
    assert not found.labels.any()


@pytest.mark.parametrize("refine", ["none", "bilateral"])
@pytest.mark.parametrize(("size", "reach"), [((40, 56), 0.6), ((61, 33), 0.6), ((150, 70), 1.2)])
def test_little_memory_gives_equal_results(
    monkeypatch: pytest.MonkeyPatch, refine: Refine, size: tuple[int, int], reach: float
) -> None:
    """Classes in groups of one give the same result as all classes at once."""
    votes, image = random_votes(19, 9, 9), random_image(*size)
    votes[..., 4] = 0
    whole = label_pixels(votes, image, patch_size=8, refine=refine, reach=reach)
    monkeypatch.setattr(pixels, "_BUDGET", 1000)
    parts = label_pixels(votes, image, patch_size=8, refine=refine, reach=reach)
    torch.testing.assert_close(parts.confidence, whole.confidence, atol=1e-4, rtol=1e-4)
    assert (parts.labels != whole.labels).float().mean() < 0.002
    assert not (whole.labels == 4).any()


def test_refined_labels_follow_the_edge_of_the_image() -> None:
    """The border of labels moves from the side of a patch to an image edge inside it."""
    image = torch.zeros(3, 32, 32, dtype=torch.uint8)
    image[:, :, 19:] = 255
    votes = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.6, 0.4], [0.0, 1.0]]).expand(4, 4, 2)
    truth = (torch.arange(32) >= 19).expand(32, 32)
    plain = label_pixels(votes, image, patch_size=8)
    refined = label_pixels(votes, image, patch_size=8, refine="bilateral")
    assert (plain.labels.bool() != truth).float().mean() > 0.04
    assert (refined.labels.bool() != truth).float().mean() < 0.005


def test_the_filter_hardly_changes_images_without_edges() -> None:
    image = torch.full((3, 64, 64), 90, dtype=torch.uint8)
    votes = random_votes(2, 2, 2).round()
    plain = label_pixels(votes, image, patch_size=32)
    refined = label_pixels(votes, image, patch_size=32, refine="bilateral", reach=0.2)
    assert (plain.labels != refined.labels).float().mean() < 0.03


def test_the_filter_is_a_mean_weighted_by_distance_and_colour() -> None:
    """The filter equals its definition at one pixel near the image border, over 5 x 5 samples."""
    image, votes = random_image(24, 32), random_votes(6, 8, 3)
    found = label_pixels(votes, image, patch_size=4, refine="bilateral", reach=1.0, contrast=0.3)
    maps = F.interpolate(votes.permute(2, 0, 1)[None], size=(24, 32), mode="bilinear")[0]
    colours, mean, total = image.float() / 255, torch.zeros(3), 0.0
    for down in range(-2, 3):
        for right in range(-2, 3):
            y, x = min(23, max(0, 2 + 2 * down)), min(31, max(0, 20 + 2 * right))
            difference = float((colours[:, y, x] - colours[:, 2, 20]).abs().sum())
            weight = math.exp(-((difference / 0.3) ** 2) / 2 - (4 * down**2 + 4 * right**2) / (2 * 3.0**2))
            mean, total = mean + weight * maps[:, y, x], total + weight
    assert found.confidence[2, 20] == pytest.approx(float((mean / total).max()), abs=1e-5)
    assert int(found.labels[2, 20]) == int(mean.argmax())


def test_the_reach_is_measured_in_patches() -> None:
    assert radius(1.0, 10, 20, (160, 320)) == 16
    assert radius(1.0, 20, 40, (160, 320)) == 8
    assert radius(0.01, 10, 20, (160, 320)) == 1
