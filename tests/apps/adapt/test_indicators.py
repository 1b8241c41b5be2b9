"""Neighbour agreement across views, and the choice of the closed form."""

import pytest
import torch

from cribo.apps.adapt.closed_form import choose_closed_form
from cribo.apps.adapt.indicators import measure_indicators, neighbour_agreement
from cribo.data.scenes import Scenes
from cribo.method import ViewRecipe
from cribo.models import Backbone, build_backbone
from cribo.models.building import first_blocks

RECIPE = ViewRecipe(size=32, area=(0.4, 0.8))


def nothing(*args: object) -> None:
    """Ignore progress."""


def test_agreement_is_the_fraction_of_common_neighbours_in_other_images() -> None:
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(12, 2, 4, 16, generator=generator)
    near = []
    for view in (0, 1):
        similar = torch.nn.functional.cosine_similarity(
            points[:, view].reshape(48, 1, 16), points[:, 1].reshape(1, 48, 16), dim=2
        )
        for row in range(48):
            similar[row, row // 4 * 4 : row // 4 * 4 + 4] = -9
        near.append([set(similar[row].argsort(descending=True)[:20].tolist()) for row in range(48)])
    expected = sum(len(first & second) for first, second in zip(*near, strict=True)) / (48 * 20)
    assert abs(neighbour_agreement(points) - expected) < 1e-6


def test_agreement_falls_with_noise_between_views() -> None:
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(12, 1, 4, 16, generator=generator).expand(-1, 2, -1, -1)
    noise = torch.randn(12, 2, 4, 16, generator=generator)
    agreements = [neighbour_agreement(base + amount * noise) for amount in (0.0, 0.3, 1.0)]
    assert agreements[0] == 1.0
    assert agreements[0] > agreements[1] > agreements[2]


def test_positional_features_are_explained_by_position() -> None:
    images = Scenes(8, size=64, seed=0)
    backbone = build_backbone("vit_tiny_patch16_224", args={"depth": 2, "embed_dim": 32, "num_heads": 2}, image_size=32)
    plain = measure_indicators(backbone, images, RECIPE)
    with torch.no_grad():
        backbone.model.patch_embed.proj.weight.zero_()  # features without image content
        backbone.model.pos_embed.mul_(20)
    blind = measure_indicators(backbone, images, RECIPE)
    assert blind.position > 2 * plain.position
    assert 1 < blind.rank < 33


def test_the_closed_form_follows_the_options_or_the_highest_agreement() -> None:
    images = Scenes(12, size=64, seed=0)
    backbone = build_backbone(
        "vit_tiny_patch16_224", args={"depth": 4, "embed_dim": 32, "num_heads": 2, "patch_size": 8}, image_size=32
    )
    start, choice = choose_closed_form(backbone, images, RECIPE, blocks=2, power=0.5, dims=7, progress=nothing)
    assert (start.depth, start.embed_dim, choice.blocks, choice.power) == (2, 7, 2, 0.5)
    start, choice = choose_closed_form(backbone, images, RECIPE, progress=nothing)
    assert choice.blocks == start.depth >= 2
    plain = measure_indicators(first_blocks(backbone, start.depth), images, RECIPE).agreement
    whitened = [
        choose_closed_form(backbone, images, RECIPE, blocks=choice.blocks, power=power, progress=nothing)[1].agreement
        for power in (0.3, 0.6, 0.8, 1.0)
    ]
    assert choice.agreement == max(plain, *whitened)
    assert (start.readout is None) == (plain > max(whitened))
    assert measure_indicators(start, images, RECIPE).agreement == choice.agreement
    assert backbone.readout is None  # the network itself is unchanged


@pytest.fixture
def convolutional() -> Backbone:
    """Build a small random network whose low-variance directions contain noise."""
    torch.manual_seed(0)
    return build_backbone("resnet18", args={"layers": [1, 1, 0, 0], "channels": [8, 8, 8, 8]}, image_size=32)


def test_features_degraded_by_whitening_are_not_whitened(convolutional: Backbone) -> None:
    images = Scenes(12, size=64, seed=0)
    start, choice = choose_closed_form(convolutional, images, RECIPE, progress=nothing)
    assert (choice.power, choice.agreement) == (None, choice.before)
    assert start.readout is None
    _, forced = choose_closed_form(convolutional, images, RECIPE, power=1.0, progress=nothing)
    assert forced.agreement < choice.agreement


def test_an_existing_readout_is_replaced(convolutional: Backbone) -> None:
    images = Scenes(12, size=64, seed=0)
    start, choice = choose_closed_form(convolutional, images, RECIPE, power=0.6, dims=4, progress=nothing)
    again, second = choose_closed_form(start, images, RECIPE, power=0.6, dims=4, progress=nothing)
    assert second.before == pytest.approx(choice.agreement, abs=0.01)
    image = torch.rand(1, 3, 32, 32)
    torch.testing.assert_close(again.encode(image).tokens, start.encode(image).tokens)


def test_a_network_of_fixed_size_gets_views_of_that_size() -> None:
    args = {"depth": 1, "embed_dim": 32, "num_heads": 2}
    backbone = build_backbone("beit_base_patch16_224", args=args, image_size=48)
    found = measure_indicators(backbone, Scenes(6, size=64), RECIPE)
    assert 0 <= found.agreement <= 1
