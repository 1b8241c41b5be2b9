from pathlib import Path

import pytest
import torch
from torch import Tensor

from cribo.data.labelled.detection import open_detection
from cribo.evaluation.detection.views import (
    Collate,
    DetectionView,
    Sample,
    Sizes,
    TrainingViews,
    WholeViews,
    training_view,
)

SIZES = Sizes(160)


def marked(height: int, width: int, box: list[int]) -> DetectionView:
    """Return a black image with a white box."""
    image = torch.zeros(3, height, width, dtype=torch.uint8)
    left, top, right, bottom = box
    image[:, top:bottom, left:right] = 255
    return DetectionView(image, torch.tensor([box], dtype=torch.float64), torch.tensor([1]))


def extent_of_white(image: Tensor) -> list[int]:
    rows, columns = (image[0] > 127).any(dim=1).nonzero(), (image[0] > 127).any(dim=0).nonzero()
    return [int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1]


def test_sizes_equal_those_of_yolos() -> None:
    sizes = Sizes()
    assert sizes.sides == tuple(range(480, 801, 16))
    assert (sizes.longest, sizes.before_crop, sizes.crop) == (1333, (400, 500, 600), (384, 600))
    assert sizes.positions == (512, 864)


def test_boxes_stay_on_their_objects() -> None:
    view = marked(120, 200, [60, 30, 130, 90])
    seen = set()
    for seed in range(60):
        found = training_view(view, SIZES, torch.Generator().manual_seed(seed))
        height, width = found.image.shape[1:]
        seen.add((height, width))
        if not len(found.labels):
            assert int((found.image > 127).sum()) == 0
            continue
        assert found.labels.tolist() == [1]
        corners = found.corners[0].tolist()
        assert corners == pytest.approx(extent_of_white(found.image), abs=1.5)
        assert min(corners) >= 0
        assert corners[2] <= width + 1e-3
        assert corners[3] <= height + 1e-3
        assert max(height, width) <= SIZES.longest
        assert min(height, width) in SIZES.sides or max(height, width) == SIZES.longest
    assert len(seen) > 20


def test_half_of_the_views_are_flipped_and_half_cropped() -> None:
    view = marked(120, 200, [0, 0, 20, 20])
    views = [training_view(view, SIZES, torch.Generator().manual_seed(seed)) for seed in range(400)]
    whole = [
        v for v in views if len(v.labels) and v.image.shape[2] / v.image.shape[1] == pytest.approx(5 / 3, abs=0.02)
    ]
    corner = [bool(v.corners[0, 0] < 1) for v in whole]
    assert 0.4 < sum(corner) / len(corner) < 0.6
    assert 0.4 < len(whole) / 400 < 0.65


def test_objects_outside_a_crop_are_removed() -> None:
    view = marked(120, 200, [0, 0, 4, 4])
    counts = [len(training_view(view, SIZES, torch.Generator().manual_seed(seed)).labels) for seed in range(60)]
    assert set(counts) == {0, 1}


def test_views_depend_only_on_seed_epoch_and_index(rectangles: Path) -> None:
    train = open_detection(rectangles).train
    first, again = TrainingViews(train, SIZES, 5), TrainingViews(train, SIZES, 5)
    torch.manual_seed(1)
    expected = [first[key].view for key in ((0, 0), (0, 3), (1, 0))]
    torch.manual_seed(2)
    for key, view in zip(((1, 0), (0, 3), (0, 0)), expected[::-1], strict=True):
        assert torch.equal(again[key].view.image, view.image)
        assert torch.equal(again[key].view.corners, view.corners)
    others = TrainingViews(train, SIZES, 6)[(0, 0)], first[(1, 0)]
    for other in others:
        same_size = other.view.image.shape == expected[0].image.shape
        assert not (same_size and torch.equal(other.view.image, expected[0].image))


def test_images_without_objects_are_used(rectangles: Path) -> None:
    sample = TrainingViews(open_detection(rectangles).train, SIZES, 0)[(0, 2)]
    assert sample.view.corners.shape == (0, 4)
    assert Collate(8, (0.5, 0.5, 0.5))([sample]).boxes[0].shape == (0, 4)


def test_canvases_contain_whole_patches_and_boxes_map_back_to_the_image() -> None:
    views = [marked(50, 33, [10, 20, 30, 44]), marked(41, 67, [5, 6, 50, 30])]
    originals = [(100, 66), (82, 134)]
    batch = Collate(16, (0.2, 0.4, 0.6))(
        [Sample(v, o, i) for i, (v, o) in enumerate(zip(views, originals, strict=True))]
    )
    assert batch.images.shape == (2, 3, 64, 80)
    assert torch.equal(batch.images[1, :, :41, :67], views[1].image)
    assert batch.images[0, :, 50:].unique(dim=1).flatten().tolist()[:1] == [51]
    assert batch.images[0, :, -1, -1].tolist() == [51, 102, 153]
    for place, view in enumerate(views):
        centre, size = batch.boxes[place][0, :2], batch.boxes[place][0, 2:]
        corners = torch.cat((centre - size / 2, centre + size / 2))
        in_original = corners * batch.extents[place].flip(0).repeat(2)
        torch.testing.assert_close(in_original, 2 * view.corners[0].float())
    assert batch.indices.tolist() == [0, 1]


def test_whole_views_have_the_size_unless_they_become_too_long(rectangles: Path) -> None:
    val = open_detection(rectangles).val
    sample = WholeViews(val, SIZES)[0]
    assert sample.view.image.shape == (3, 160, 213)
    assert sample.original == (48, 64)
    torch.testing.assert_close(sample.view.corners[0], val.boxes(0).corners[0] * torch.tensor([213 / 64, 160 / 48] * 2))
