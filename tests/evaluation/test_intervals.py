"""Intervals of differences: their coverage, and the counts that they are computed from."""

import pytest
import torch

from cribo.evaluation.intervals import (
    counts_miou,
    image_counts,
    miou_difference,
    read_counts,
    seed_difference,
    write_counts,
)
from cribo.features.scores import mean_iou


def test_counts_of_images_give_the_mean_iou_of_their_sum() -> None:
    generator = torch.Generator().manual_seed(0)
    confusion = torch.randint(5, (6, 4, 5), generator=generator)  # the last column counts predictions of no class
    confusion[:, 2] = confusion[:, :, 2] = 0  # an absent class
    found = counts_miou(image_counts(confusion).sum(dim=0).double())
    torch.testing.assert_close(float(found), mean_iou(confusion.sum(dim=0)))


def test_counts_are_written_by_the_value_of_the_varied_setting(tmp_path) -> None:
    counts = {1: torch.randint(9, (1, 6, 3, 4)), 8: torch.randint(9, (5, 6, 3, 4))}
    assert read_counts(tmp_path, 1) is None
    write_counts(tmp_path, counts)
    for value, expected in counts.items():
        found = read_counts(tmp_path, value)
        assert found is not None
        assert torch.equal(found.long(), expected)
    assert read_counts(tmp_path, 64) is None


@pytest.mark.parametrize(("seeds", "comparisons"), [(3, 1), (5, 1), (3, 8)])
def test_intervals_over_a_few_seeds_hold_together_as_often_as_they_should(seeds: int, comparisons: int) -> None:
    """Without a correction, some of eight intervals would miss in 34 % of the cases."""
    generator, missed = torch.Generator().manual_seed(0), 0
    for _ in range(400):
        pairs = torch.randn(comparisons, 2, seeds, generator=generator)
        found = [seed_difference(*pair, comparisons=comparisons) for pair in pairs]
        bounds = [(one.low or 0.0, one.high or 0.0) for one in found]
        missed += any(not low < 0 < high for low, high in bounds)
    assert 0.02 < missed / 400 < 0.08


def test_two_seeds_have_no_interval() -> None:
    counts = torch.randint(9, (2, 2, 1, 6, 3, 4))
    for found in (miou_difference(*counts), seed_difference(*torch.rand(2, 2))):
        assert (found.low, found.high, found.detectable) == (None, None, None)


def test_an_interval_over_images_and_seeds_covers_both() -> None:
    """With noise of the seeds alone it is that of the seeds, with noise of the images alone that of the images."""
    generator = torch.Generator().manual_seed(0)
    hits = torch.randint(40, 60, (3, 1, 50, 1), generator=generator).float()

    def counts(right: torch.Tensor) -> torch.Tensor:
        right = right.round().long()
        confusion = torch.stack([torch.cat((right, 100 - right), -1), torch.cat((100 - right, right), -1)], dim=-2)
        return image_counts(confusion)

    of_seeds = torch.tensor([0.0, 2.0, 4.0]).view(3, 1, 1, 1)
    of_images = torch.randint(0, 40, (1, 1, 50, 1), generator=generator)
    widths = {}
    for name, change in {
        "none": 0 * of_seeds,
        "seeds": of_seeds,
        "images": of_images,
        "both": of_seeds + of_images,
    }.items():
        found = miou_difference(counts(hits), counts(hits + change))
        assert found.low is not None
        assert found.high is not None
        widths[name] = found.high - found.low
    assert widths["none"] == 0
    assert min(widths["seeds"], widths["images"]) > 0
    assert widths["both"] > max(widths["seeds"], widths["images"])
    alone = seed_difference(torch.zeros(3), torch.tensor([0.0, 2.0, 4.0]))
    assert alone.detectable == pytest.approx(2 / 3**0.5 * 4.303, rel=1e-3)


def test_many_comparisons_have_the_tails_of_students_t() -> None:
    """Without differences between images, the interval is that over seeds, however many comparisons there are."""
    right = torch.tensor([50, 52, 56]).view(3, 1, 1, 1).expand(3, 1, 50, 1)

    def counts(hits: torch.Tensor) -> torch.Tensor:
        confusion = torch.stack([torch.cat((hits, 100 - hits), -1), torch.cat((100 - hits, hits), -1)], dim=-2)
        return image_counts(confusion)

    before, after = counts(torch.full_like(right, 50)), counts(right)
    of_seeds = [counts_miou(each[:, 0].sum(dim=1).double()) for each in (before, after)]
    found = miou_difference(before, after, comparisons=100)
    assert found.detectable == pytest.approx(seed_difference(*of_seeds, comparisons=100).detectable)
