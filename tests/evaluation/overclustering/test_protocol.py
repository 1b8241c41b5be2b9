"""Overclustering against NumPy and brute force, and on images with known clusters."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from tests.evaluation.coded import PERFECT, Coded, blocks, random_maps

from cribo.base.errors import InputError
from cribo.evaluation.overclustering.protocol import (
    Overclustering,
    match_clusters,
    overclustering,
    principal_components,
)
from cribo.features.extraction import EncodedView, PatchFeatures, Preparation, extract_patches
from cribo.features.scores import pairwise_iou

SIZE = (20, 24)


def features_of(images: Coded) -> PatchFeatures:
    views = [EncodedView(index) for index in range(len(images))]
    return extract_patches(PERFECT, images, views, Preparation(PERFECT.patch_size, SIZE))


def scored(images: Coded, **settings: Any) -> dict[str, Any]:
    """Return the row of one number of clusters; by default a mask has one pixel per patch."""
    made = Overclustering(draws=2, size=SIZE, patches_per_cluster=1000, **{"mask_size": 60, **settings})
    (row,), _ = overclustering(features_of(images), images, made)
    return row


def test_principal_components_equal_numpy() -> None:
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randn(60, 5, generator=generator) @ torch.randn(5, 8, generator=generator) + torch.arange(8.0)
    rows = torch.cat((mixed, torch.full((60, 1), 3.0)), dim=1)  # and a channel that is constant
    views = [EncodedView(index) for index in range(3)]
    held = dict(zip(views, rows.split(20), strict=True))
    found = principal_components(PatchFeatures(dim=9, held={**held}), views, 4)
    centred = (rows - rows.mean(dim=0)).double().numpy()
    standard = centred[:, :8] / centred[:, :8].std(axis=0)
    left, values, _ = np.linalg.svd(standard, full_matrices=False)
    expected = (left * values)[:, :4]
    signs = np.sign((found * expected).sum(axis=0))
    np.testing.assert_allclose(found * signs, expected, atol=1e-4)
    assert principal_components(PatchFeatures(dim=9, held={**held}), views, 50).shape == (60, 9)


def test_hungarian_matching_is_the_best_of_all_permutations() -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(10):
        counts = torch.randint(0, 30, (4, 4), generator=generator) ** 2
        matched = match_clusters(counts, "hungarian").numpy()
        labels, clusters = (part.repeat_interleave(counts.flatten()).numpy() for part in np_grid(4))
        sums = {}
        for order in itertools.permutations(range(4)):  # order[k] is the class of cluster k
            predicted = np.array(order)[clusters]
            ious = [
                np.logical_and(labels == c, predicted == c).sum() / np.logical_or(labels == c, predicted == c).sum()
                for c in range(4)
            ]
            sums[order] = sum(ious)
        assert sums[tuple(matched.tolist())] == pytest.approx(max(sums.values()))


def np_grid(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    return rows.flatten(), columns.flatten()


def test_a_cluster_takes_its_majority_class() -> None:
    counts = torch.tensor([[9, 0, 2, 0], [1, 4, 2, 0], [0, 5, 1, 0]])
    assert match_clusters(counts, "greedy").tolist() == [0, 2, 0, 0]
    assert pairwise_iou(counts)[2].tolist() == pytest.approx([0, 5 / 10, 1 / 10, 0])


def test_separated_classes_are_found() -> None:
    images = Coded(random_maps(6, 0, ignored=0.0))
    row = scored(images, clusters=(4,))
    assert (row["matching"], row["miou"], row["miou_std"]) == ("hungarian", 1.0, 0.0)
    assert row["confusion"].sum() == 2 * 6 * 60 * 60
    assert row["confusion"].diagonal().sum() == row["confusion"].sum()
    assert row["per_class"] == dict.fromkeys("abcd", 1.0)


def test_a_single_cluster_takes_the_most_frequent_class() -> None:
    """A quarter of the pixels is ignored, half of the others have class b; 15 patches of 4 x 4 pixels."""
    images = Coded([blocks(*[[1, 1, 1, 0, 2, 255, 255, 255]] * 5, side=4)[:, :24]] * 2)
    row = scored(images, clusters=(1,))
    assert row["matching"] == "greedy"
    assert row["per_class"]["b"] == pytest.approx(3 / 5)
    assert row["miou"] == pytest.approx((3 / 5 + 0 + 0) / 3)  # d occurs nowhere
    assert row["confusion"][:, 1].tolist() == row["confusion"].sum(dim=1).tolist()
    assert row["confusion"].sum() == 2 * 2 * 60 * 60 * 5 / 6


def test_more_clusters_than_classes_share_them() -> None:
    """Two of four classes are identical, so one of them gets no cluster."""
    images = Coded(random_maps(6, 2, ignored=0.1))
    labels = [labels.clone() for labels in images.maps]
    for image in images.maps:
        image[image == 1] = 0

    class Confused(Coded):
        def labels(self, index: int) -> torch.Tensor:
            return labels[index].to(torch.uint8)

    row = scored(Confused(images.maps), clusters=(3,))
    everything = torch.cat([part.flatten() for part in labels])
    first, second = ((everything == label).sum().item() for label in (0, 1))
    assert row["miou"] == pytest.approx((max(first, second) / (first + second) + 0 + 1 + 1) / 4)


def test_the_foreground_is_clustered_without_the_background() -> None:
    images = Coded(random_maps(6, 3, ignored=0.2), classes=("background", "b", "c", "d"))
    row = scored(images, clusters=(3,), foreground=True)
    assert (row["matching"], row["miou"]) == ("hungarian", 1.0)
    assert np.isnan(row["per_class"]["background"])
    pixels = sum(((labels > 0) & (labels < 255)).sum().item() for labels in images.maps)
    assert row["confusion"].sum() == 2 * pixels * (60 * 60) / (20 * 24)


def test_draws_differ_and_are_reproducible() -> None:
    generator = torch.Generator().manual_seed(0)
    images = Coded(random_maps(6, 4))
    found = features_of(images)
    found.held = {view: torch.randn(30, 16, generator=generator) for view in found.held}
    settings = Overclustering(draws=3, clusters=(8,), size=SIZE, restarts=1)
    row, again = (overclustering(found, images, settings)[0][0] for _ in range(2))
    assert len(set(row["draws"])) == 3
    assert row["draws"] == again["draws"]
    assert (row["miou"], row["miou_std"]) == pytest.approx((np.mean(row["draws"]), np.std(row["draws"], ddof=1)))
    later = overclustering(found, images, Overclustering(draws=1, seed=2, clusters=(8,), size=SIZE, restarts=1))
    assert later[0][0]["draws"] == row["draws"][2:]


def test_impossible_clusterings_are_refused() -> None:
    images = Coded(random_maps(2, 5))
    objects = Coded(images.maps, classes=("background", "b", "c", "d"))
    with pytest.raises(InputError, match="clusters must be at most the number of patches of the foreground"):
        scored(objects, clusters=(60,), foreground=True)
    with pytest.raises(InputError, match="no image can be scored"):
        scored(Coded([torch.full((20, 24), 255)]), clusters=(2,))
    found = features_of(images)
    found.held[EncodedView(1)] = torch.full((30, 16), torch.nan)
    with pytest.raises(InputError, match="features of the backbone are not finite"):
        overclustering(found, images, Overclustering(clusters=(2,), size=SIZE))
