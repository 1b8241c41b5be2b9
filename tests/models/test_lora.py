"""Adapters, against their definition: a low-rank addition to linear layers that can be merged."""

import sys

import pytest
import torch
from torch import nn

from cribo.models import Backbone, build_backbone
from cribo.models.lora import add_adapters, has_adapters, merged_parameters, plain_copy

TINY = {"embed_dim": 64, "depth": 3, "num_heads": 2}
NETWORKS = {
    "vit": ("vit_small_patch16_224", TINY),
    "gated": ("vit_giant_patch14_dinov2", {**TINY, "embed_dim": 24}),
    "dinov3": ("vit_small_patch16_dinov3_qkvb", TINY),
    "beit": ("beit_base_patch16_224", TINY),
    "swin": ("swin_tiny_patch4_window7_224", {"depths": (1, 1), "embed_dim": 24, "num_heads": (1, 1)}),
    "convnext": ("convnext_tiny", {"depths": (1, 1, 1, 2), "dims": (8, 16, 32, 64)}),
}


def make(kind: str = "vit") -> Backbone:
    name, args = NETWORKS[kind]
    backbone = build_backbone(name, args=args, image_size=56 if kind == "gated" else 64).eval()
    with torch.no_grad():
        for key, parameter in backbone.model.named_parameters():
            if "gamma" in key:  # layer scales, initially near 0
                parameter.fill_(1)
    return backbone


def images(backbone: Backbone) -> torch.Tensor:
    return torch.randn(2, 3, backbone.image_size, backbone.image_size, generator=torch.Generator().manual_seed(1))


def randomise(backbone: Backbone) -> None:
    """Randomise adapters, which are initially no-ops."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in backbone.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.1, generator=generator)


@pytest.mark.parametrize("kind", NETWORKS)
def test_adapters_are_initially_no_ops_and_can_be_merged(kind: str) -> None:
    backbone = make(kind)
    plain = plain_copy(backbone)
    batch = images(backbone)
    add_adapters(backbone, 4)
    torch.testing.assert_close(backbone.encode(batch).tokens, plain.encode(batch).tokens)

    randomise(backbone)
    features = backbone.encode(batch)
    assert (features.tokens - plain.encode(batch).tokens).abs().max() > 1e-3
    features.tokens.square().sum().backward()
    trained = {name: value for name, value in backbone.named_parameters() if value.requires_grad}
    assert trained
    assert all(".lora_" in name and value.grad is not None and value.grad.any() for name, value in trained.items())

    merged = plain_copy(backbone)
    assert has_adapters(backbone)
    assert not has_adapters(merged)
    assert list(merged.state_dict()) == list(plain.state_dict())
    torch.testing.assert_close(merged.encode(batch).tokens, features.tokens, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(merged_parameters(backbone), [*merged.parameters()])


def test_layers_that_are_not_called_get_no_adapters() -> None:
    """BEiT adds the bias of qkv in parts, so an adapter there would have no effect."""
    backbone = make("beit")
    add_adapters(backbone, 2)
    adapted = {name.partition(".lora_A")[0] for name, _ in backbone.named_parameters() if ".lora_A." in name}
    assert adapted == {
        f"model.blocks.{block}.{layer}" for block in range(3) for layer in ("attn.proj", "mlp.fc1", "mlp.fc2")
    }


def test_the_first_blocks_get_no_adapters() -> None:
    backbone = make()
    add_adapters(backbone, 2, first_block=2)
    adapted = [name for name, value in backbone.named_parameters() if value.requires_grad]
    assert len(adapted) == 8
    assert all("blocks.2." in name for name in adapted)


def test_adapters_depend_on_the_seed() -> None:
    def drawn(seed: int, noise: int) -> list[torch.Tensor]:
        torch.manual_seed(noise)
        backbone = make()
        add_adapters(backbone, 2, seed=seed)
        return [value for value in backbone.parameters() if value.requires_grad]

    assert all(map(torch.equal, drawn(0, noise=0), drawn(0, noise=1)))
    assert not all(map(torch.equal, drawn(0, noise=0), drawn(1, noise=0)))


def test_a_layer_after_the_features_gets_no_adapter() -> None:
    backbone = make()
    backbone.set_readout(torch.randn(5, 64), torch.zeros(5))
    add_adapters(backbone, 2)
    assert isinstance(backbone.readout, nn.Linear)
    assert not backbone.readout.weight.requires_grad


@pytest.mark.parametrize(("name", "args"), [("resnet18", {"channels": (8, 8, 8, 8)}), ("efficientnet_lite0", {})])
def test_a_network_without_linear_layers_is_refused(name: str, args: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"LoRA requires linear layers, {name} has none in its blocks"):
        add_adapters(build_backbone(name, args=args), 4)


@pytest.mark.parametrize("rank", [0, 65])
def test_the_rank_has_a_range(rank: int) -> None:
    with pytest.raises(ValueError, match=f"the rank must be 1 to 64, the width of vit_small_patch16_224, got {rank}"):
        add_adapters(make(), rank)


def test_without_peft_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ImportError, match=r"LoRA requires peft .*pip install .*\[lora\]"):
        add_adapters(make(), 4)
