"""Regions of ORL, against the released code and their definitions."""

import re
import sys
from pathlib import Path

import pytest
import torch
from tests.objectives.golden import cases, load
from torch import Tensor
from torchvision.ops import box_iou

from cribo.base.errors import DataError, MissingPackage
from cribo.base.packages import install_command
from cribo.data.scenes import Scenes
from cribo.objectives.rivals.region_pairs import nearest_images
from cribo.objectives.rivals.regions import jitter_box, pair_regions, select_regions, selective_search


def swapped(boxes: Tensor) -> Tensor:
    """Exchange (x, y, w, h) and (y, x, h, w)."""
    return boxes[:, [1, 0, 3, 2]]


def jittered(box: Tensor, height: int, width: int, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.stack([jitter_box(box, height, width, generator=generator) for _ in range(count)])


@pytest.mark.parametrize("path", cases("orl_proposals"), ids=lambda path: path.stem)
def test_golden_regions_and_pairs(path: Path) -> None:
    case = load(path)
    boxes = swapped(case["boxes"])
    assert torch.equal(swapped(select_regions(boxes, min_side=96, most=100)), case["kept"])
    assert torch.equal(swapped(select_regions(boxes, min_side=96, most=5)), case["kept_top5"])
    assert not len(select_regions(swapped(case["fallback"]), min_side=96, most=100))
    for key in (name for name in case if name.startswith("key_features")):
        pairs = pair_regions(case["query_features"], case[key])
        assert torch.equal(pairs, case[key.replace("key_features", "pairs")])


@pytest.mark.parametrize("path", cases("orl_proposals"), ids=lambda path: path.stem)
def test_golden_distribution_of_jittered_boxes(path: Path) -> None:
    case = load(path)
    box, found = torch.tensor([150, 200, 120, 160]), swapped(case["jittered"])
    own = jittered(box, 480, 640, 3000)
    first, second = (torch.cat((each[:, :2], each[:, :2] + each[:, 2:]), dim=1) for each in (own, box[None]))
    assert (box_iou(first, second) > 0.5).all()
    assert (own[:, :2] >= 0).all()
    assert (own[:, :2] + own[:, 2:] <= torch.tensor([480, 640])).all()
    quantiles = torch.tensor([0.05, 0.25, 0.5, 0.75, 0.95], dtype=torch.float64)
    for of, tolerance in (
        (lambda b: b[:, 2] * b[:, 3] / (120 * 160), 0.05),  # area
        (lambda b: b[:, 3] / b[:, 2], 0.06),  # aspect
        (lambda b: (b[:, 0] + b[:, 2] / 2 - 210) / 120, 0.03),  # centre
        (lambda b: (b[:, 1] + b[:, 3] / 2 - 280) / 160, 0.03),
    ):
        expected, measured = (of(boxes.double()).quantile(quantiles) for boxes in (found, own))
        torch.testing.assert_close(measured, expected, rtol=0, atol=tolerance)


def test_a_box_without_room_often_stays_unchanged() -> None:
    whole = torch.tensor([0, 0, 120, 160])
    unchanged = (jittered(whole, 120, 160, 1000) == whole).all(dim=1).double().mean()
    assert unchanged == pytest.approx(0.37, abs=0.05)  # of the released code


def test_regions_are_large_compact_and_distinct() -> None:
    boxes = torch.tensor(
        [[0, 0, 9, 40], [0, 0, 10, 31], [0, 0, 10, 30], [0, 0, 10, 30], [0, 14, 10, 30], [0, 16, 11, 30]]
    )
    # too low, too long, kept, equal, IoU of 16 / 44 with the third, IoU of 280 / 350 with the fifth
    assert select_regions(boxes, min_side=10, most=9).tolist() == [boxes[2].tolist(), boxes[4].tolist()]


def test_selective_search_depends_only_on_image_and_generator() -> None:
    scene = Scenes(1, size=96).load(0)

    def search(seed: int, image: Tensor = scene) -> list[list[int]]:
        return selective_search(image, generator=torch.Generator().manual_seed(seed), side=96).tolist()

    first = search(0)
    assert first == search(0)
    assert first != search(1)
    assert sorted(first) == sorted(search(1))
    assert len(first) > 20
    assert [0, 0, 96, 96] in first
    enlarged = scene.repeat_interleave(4, dim=1).repeat_interleave(4, dim=2)[..., :380]
    large = torch.tensor(search(0, enlarged))
    assert (large[:, :2] + large[:, 2:]).amax(dim=0).tolist() == [384, 380]
    assert search(0, torch.full((3, 2, 7), 9, dtype=torch.uint8)) == [[0, 0, 2, 7]]


def test_regions_of_a_reduced_image_lie_inside_it() -> None:
    image = Scenes(1, size=96).load(0)[:, :61, :91]
    boxes = selective_search(image, generator=torch.Generator().manual_seed(0), side=48)
    assert (boxes[:, :2] >= 0).all()
    assert (boxes[:, :2] + boxes[:, 2:]).amax(dim=0).tolist() == [61, 91]


def test_an_image_without_opencv_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cv2", None)
    with pytest.raises(MissingPackage, match=re.escape(install_command("regions"))):
        selective_search(torch.zeros(3, 8, 8, dtype=torch.uint8), generator=torch.Generator())


def test_neighbours_are_readable_and_not_the_image_itself() -> None:
    directions = torch.eye(6)[[0, 0, 0, 1, 2, 0]] + torch.tensor([0.0, 0.0, 0.0, 0.5, 0.1, 0.4])[:, None]
    readable = torch.tensor([True, True, True, False, True, True])
    found = nearest_images(directions, readable, 2)
    assert found[:3].tolist() == [[1, 2], [0, 2], [0, 1]]  # they are equal
    assert found[4].tolist() == [5, 0]
    assert 3 not in found
    with pytest.raises(DataError, match=r"5 neighbours require at least 6 readable images, found 5: add images, or"):
        nearest_images(directions, readable, 5)
