"""Matching and PCK against a literal implementation of DIFT's evaluation, and on known features."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cribo.data.labelled.correspondence import Pair, PairedImages
from cribo.evaluation.correspondence.protocol import are_correct, features_at, nearest_pixels, row, upsampled_norms

SIZES = (37, 50), (41, 33)


def pair(source: list[list[float]], target: list[list[float]], category: str = "cat") -> Pair:
    return Pair("it", category, 0, 1, torch.tensor(source), torch.tensor(target), (10.0, 5.0, 50.0, 25.0))


def test_matches_equal_those_of_upsampled_feature_maps() -> None:
    """The whole maps are upsampled, indexed at the points, and compared by cosine."""
    generator = torch.Generator().manual_seed(0)
    source, target = torch.randn(2, 70, 5, 6, generator=generator)
    columns, rows = (torch.randint(0, side, (20,), generator=generator) for side in (SIZES[0][1], SIZES[0][0]))
    whole = [
        F.normalize(nn.Upsample(size=size, mode="bilinear")(part[None])[0], dim=0)
        for part, size in zip((source, target), SIZES, strict=True)
    ]
    cosines = torch.einsum("dk,dhw->khw", whole[0][:, rows, columns], whole[1])
    best = cosines.flatten(1).argmax(dim=1)
    expected = torch.stack((best % SIZES[1][1], best // SIZES[1][1]), dim=1).float()
    points = features_at(source, torch.stack((columns, rows), dim=1).float(), SIZES[0])
    torch.testing.assert_close(points, whole[0][:, rows, columns].T)
    found = nearest_pixels(points, target, upsampled_norms(target, SIZES[1]))
    torch.testing.assert_close(found, expected)


def test_points_are_matched_to_equal_features() -> None:
    """Each patch of 10 pixels has its own feature; the target is the source, shifted by two patches."""
    source = torch.eye(24).view(24, 4, 6)
    target = source.roll(2, dims=2)
    points = torch.tensor([[15.0, 5.0], [35.4, 35.9], [30.0, 40.0]])  # the last one lies below the image
    found = nearest_pixels(features_at(source, points, (40, 60)), target, upsampled_norms(target, (40, 60)))
    assert found[:, 0].tolist() == [35, 55, 50]
    assert found[0, 1] == 5
    assert (found[1:, 1] >= 35).all()  # below the centres of the last patches, all rows are equal


def test_tolerance_is_a_share_of_the_box() -> None:
    """The longer side of the box is 40 pixels."""
    made = pair([[0.0, 0.0]] * 4, [[20.0, 20.0]] * 4)
    found = torch.tensor([[24.0, 20.0], [24.1, 20.0], [23.0, 23.0], [20.0, 20.0]])
    assert are_correct(made, found, 0.1).tolist() == [True, False, False, True]
    assert are_correct(made, found, 0.2).tolist() == [True] * 4


def test_pck_per_image_and_per_point() -> None:
    pairs = [
        pair([[0.0, 0.0]], [[20.0, 20.0]]),
        pair([[0.0, 0.0]] * 3, [[20.0, 20.0]] * 3),
        pair([[0.0, 0.0]] * 2, [[0.0, 0.0]] * 2, category="dog"),
    ]
    images = PairedImages(Path(), ["a", "b"], pairs)
    matches = [torch.full((len(each.source_points), 2), 20.0) for each in pairs]
    matches[1][0] = 0.0
    made = row(matches, images, 0.1)
    assert made["pck_image"] == pytest.approx((1 + 2 / 3 + 0) / 3)
    assert made["pck_point"] == pytest.approx(3 / 6)
    assert made["per_class"] == pytest.approx({"cat": 5 / 6, "dog": 0})
    assert made["per_class_point"] == pytest.approx({"cat": 3 / 4, "dog": 0})
