"""Distances to normal patches equal those computed directly."""

import pytest
import torch
import torch.nn.functional as F

from cribo.base.errors import ConfigError, InputError, MissingBlocks
from cribo.data.labelled.inputs import DecodedImage
from cribo.features.anomaly import MOST_LEFT_OUT, NormalPatches, PatchEncoder, has_data, image_score, pixel_distances
from cribo.features.config import AnomalySettings
from cribo.features.encoder import mean_colour_backbone


def grids(*sizes: tuple[int, int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [F.normalize(torch.randn(*size, 8, generator=generator), dim=-1) for size in sizes]


def expected(grid: torch.Tensor, others: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([1 - (grid @ other.flatten(0, 1).T) for other in others], dim=-2).flatten(2).amin(dim=2)


def test_distances_are_those_to_the_nearest_normal_patch() -> None:
    first, second, query = grids((3, 4), (3, 4), (2, 5))
    torch.testing.assert_close(NormalPatches([first, second]).distances(query), expected(query, [first, second]))


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_left_out_image_is_compared_with_the_others(index: int) -> None:
    images = grids((3, 4), (2, 2), (4, 3))
    others = [image.flatten(0, 1) for place, image in enumerate(images) if place != index]
    normal = NormalPatches(images)
    found = expected(images[index], [torch.cat(others)[None]])
    torch.testing.assert_close(normal.left_out(index), found)
    assert normal.left_out_scores()[index] == pytest.approx(float(found.max()))


def test_a_single_normal_image_has_no_left_out_score() -> None:
    normal = NormalPatches(grids((2, 2)))
    assert normal.left_out_scores() == {}
    assert normal.left_out(0).max() < 1e-6


def test_of_many_images_some_are_left_out() -> None:
    scores = NormalPatches(grids(*[(1, 1)] * (3 * MOST_LEFT_OUT))).left_out_scores()
    assert len(scores) == MOST_LEFT_OUT
    assert max(scores) > 2 * MOST_LEFT_OUT


def test_the_score_is_the_mean_of_the_largest_hundredth() -> None:
    values = torch.zeros(30, 10)
    values[:1, :4] = torch.tensor([0.9, 0.6, 0.3, 0.1])
    assert image_score(values) == pytest.approx(0.6)
    assert image_score(torch.tensor([0.1, 0.7])) == pytest.approx(0.7)


def test_distances_of_pixels_are_interpolated() -> None:
    found = pixel_distances(torch.tensor([[0.0, 1.0]]), (3, 8))
    assert found.shape == (3, 8)
    torch.testing.assert_close(found[1], torch.tensor([0, 0, 0.125, 0.375, 0.625, 0.875, 1, 1]))


def test_patches_without_data_have_no_distance_and_are_not_normal() -> None:
    first, second, query = grids((3, 4), (2, 2), (2, 5))
    lost = first.clone()
    lost[0], query[1, 2] = torch.nan, torch.nan
    normal = NormalPatches([lost, second])
    found, known = normal.distances(query), ~query.isnan().any(dim=-1)
    direct = expected(query[known][None], [torch.cat([first[1:].flatten(0, 1), second.flatten(0, 1)])[None]])[0]
    torch.testing.assert_close(found[known], direct)
    assert found[~known].isnan().all()
    left_out = normal.left_out(0)
    torch.testing.assert_close(left_out[1:], expected(first[1:], [second]))
    assert left_out[0].isnan().all()
    torch.testing.assert_close(normal.left_out(1), expected(second, [first[1:]]))
    assert image_score(found) == pytest.approx(float(direct.max()))


def test_distances_of_pixels_are_those_of_patches_with_data() -> None:
    found = pixel_distances(torch.tensor([[torch.nan, 0.5, torch.nan, torch.nan]]), (2, 16))
    torch.testing.assert_close(found[0, 3:9], torch.full((6,), 0.5))
    assert not found[0, 12:].any()


def test_a_patch_with_a_pixel_without_data_has_no_features() -> None:
    valid = torch.ones(48, 64, dtype=torch.bool)
    valid[15, 16:33] = False
    images = [DecodedImage(torch.randint(0, 256, (3, 48, 64), dtype=torch.uint8), mask) for mask in (valid, None)]
    found, whole = PatchEncoder(mean_colour_backbone(), AnomalySettings(scale=1), batch_size=2)(images)
    assert has_data(found).tolist() == [[True, False, False, True], [True] * 4, [True] * 4]
    assert has_data(whole).all()


@pytest.mark.parametrize("images", [[], [*grids((2, 2)), torch.full((2, 2, 8), torch.nan)]])
def test_no_normal_patches(images: list[torch.Tensor]) -> None:
    with pytest.raises(InputError, match="normal"):
        NormalPatches(images)


def test_features_have_unit_length() -> None:
    images = [torch.randint(0, 256, (3, *size), dtype=torch.uint8) for size in ((48, 64), (64, 48))]
    found = PatchEncoder(mean_colour_backbone(), AnomalySettings(scale=1), batch_size=2)([*map(DecodedImage, images)])
    assert [grid.shape for grid in found] == [(3, 4, 3), (4, 3, 3)]
    torch.testing.assert_close(found[0].float().norm(dim=-1), torch.ones(3, 4), atol=2e-3, rtol=0)


def test_invalid_settings() -> None:
    with pytest.raises(MissingBlocks):
        PatchEncoder(mean_colour_backbone(), AnomalySettings(blocks=(9,)), batch_size=1)
    with pytest.raises(InputError, match="scale"):
        AnomalySettings(size=64, scale=1)
    with pytest.raises(ConfigError, match="size"):
        AnomalySettings(size=0)
