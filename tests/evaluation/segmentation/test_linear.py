"""Linear heads on frozen tokens: trained independently of each other, without the backbone."""

import copy

import pytest
import torch

from cribo.data.labelled.crops import Crops, MMSegPreparation, WholeImages
from cribo.evaluation.segmentation.linear import LinearSegmentation, linear_head
from cribo.models import build_backbone

from .squares import Squares, score, tiny_vit, train

pytestmark = pytest.mark.filterwarnings("ignore:You are trying to `self.log")

RATES = (8e-4, 3e-4, 1e-4, 8e-5)


def test_heads_trained_together_equal_those_trained_alone() -> None:
    crops = Crops(Squares(), MMSegPreparation(48, None), seed=0)
    backbone = tiny_vit()
    together = LinearSegmentation(backbone, classes=4, layers=2, learning_rates=RATES, steps=5)
    train(together, crops, steps=5, batch_size=3)
    for head, rate in zip(together.heads, RATES, strict=True):
        alone = LinearSegmentation(backbone, classes=4, layers=2, learning_rates=(rate,), steps=5)
        train(alone, crops, steps=5, batch_size=3)
        for own, other in zip(head.parameters(), alone.heads[0].parameters(), strict=True):
            assert torch.equal(own, other)
    weights = [next(head.parameters()) for head in together.heads]
    assert not any(torch.equal(weights[0], other) for other in weights[1:])


@pytest.mark.parametrize("layers", [1, 2])
def test_a_head_overfits_its_training_images(layers: int) -> None:
    images = Squares(4)
    module = LinearSegmentation(tiny_vit(), classes=4, layers=layers, learning_rates=(0.1, 1e-5), steps=100)
    train(module, Crops(images, MMSegPreparation(64, None), seed=0), steps=100, batch_size=4)
    good, bad = score(module, WholeImages(images, MMSegPreparation(64, None)))
    accuracy = module.confusions[0].diagonal().sum() / module.confusions[0].sum()
    assert accuracy > 0.95
    assert good > 0.9
    assert bad < 0.5  # learns too slowly


def test_the_backbone_is_unchanged() -> None:
    backbone = build_backbone("resnet10t", args={"channels": (8, 8, 8, 8)}, image_size=64)
    before = copy.deepcopy(backbone.state_dict())
    module = LinearSegmentation(backbone, classes=4, learning_rates=(0.1,), steps=2)
    train(module, Crops(Squares(), MMSegPreparation(64, None), seed=0), steps=2, batch_size=2)
    assert module.training
    assert not backbone.training
    for name, value in backbone.state_dict().items():  # batch norms included
        assert torch.equal(value, before[name])
    assert all(parameter.grad is None for parameter in backbone.parameters())


def test_checkpoints_contain_only_the_heads() -> None:
    module = LinearSegmentation(tiny_vit(), classes=4, learning_rates=RATES, steps=1)
    checkpoint = {"state_dict": module.state_dict()}
    module.on_save_checkpoint(checkpoint)
    assert sorted(checkpoint["state_dict"]) == sorted(
        f"heads.{number}.{name}" for number in range(4) for name in ("weight", "bias")
    )
    other = LinearSegmentation(tiny_vit(seed=1), classes=4, learning_rates=RATES, steps=1, seed=1)
    own = copy.deepcopy(other.backbone.state_dict())
    other.on_load_checkpoint(checkpoint)
    other.load_state_dict(checkpoint["state_dict"])
    assert torch.equal(other.state_dict()["heads.0.weight"], module.state_dict()["heads.0.weight"])
    for name, value in other.backbone.state_dict().items():
        assert torch.equal(value, own[name])


def test_initial_heads_are_equal_and_depend_on_the_seed() -> None:
    first, again, other = linear_head(384, 21, 0), linear_head(384, 21, 0), linear_head(384, 21, 1)
    assert torch.equal(first.weight, again.weight)
    assert not torch.equal(first.weight, other.weight)
    assert first.weight.std().item() == pytest.approx(0.01, rel=0.05)
    assert (first.bias == 0).all()


def test_tokens_keep_their_positions() -> None:
    module = LinearSegmentation(tiny_vit(), classes=4, learning_rates=(1e-3,), steps=1)
    images = torch.randn(2, 3, 32, 64, generator=torch.Generator().manual_seed(0))
    tokens = module.backbone.encode(images).tokens
    found = module.logits(images)
    assert found.shape == (1, 2, 4, 2, 4)
    assert torch.allclose(found[0, 1, :, 1, 2], module.heads[0](tokens[1, 1 * 4 + 2]), atol=1e-6)
