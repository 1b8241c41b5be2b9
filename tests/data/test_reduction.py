import pytest
import torch

from cribo.data.reduction import largest_reduction, reduced_crops
from cribo.method import ViewRecipe, sample_crops


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


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
