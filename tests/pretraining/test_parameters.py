from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cribo.base.errors import ConfigError
from cribo.models import build_backbone
from cribo.objectives.config import HeadConfig, OptimConfig
from cribo.objectives.self_distillation import Network
from cribo.pretraining.parameters import block_names, clip_each, drop_gradients, make_optimiser, parameter_groups

SMALL: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": {"patch_size": 8, "depth": 3, "embed_dim": 32, "num_heads": 2},
    "resnet10t": {"channels": (8, 8, 16, 16)},
    "resnet18": {"channels": (8, 8, 16, 16)},
    "convnext_atto": {"dims": [8, 8, 16, 16], "depths": [2, 2, 2, 2]},
}


def network(name: str = "vit_tiny_patch16_224", *, train_gain: bool = True) -> Network:
    backbone = build_backbone(name, args=SMALL[name], image_size=32)
    head = HeadConfig(hidden_dim=32, bottleneck_dim=16, train_gain=train_gain)
    return Network(backbone, head, levels={"image": 32, "object": 32}, seed=0)


def by_name(
    student: nn.Module, layer_decay: float = 1.0, lr_factors: dict[str, float] | None = None
) -> dict[str, tuple[float, float]]:
    """Return (learning-rate scale, decay) of every trained parameter."""
    names = {parameter: name for name, parameter in student.named_parameters()}
    found: dict[str, tuple[float, float]] = {}
    for group in parameter_groups(student, layer_decay, lr_factors):
        for parameter in group["params"]:
            name = names[parameter]
            assert name not in found
            found[name] = (group["lr_scale"], group["decay"])
    return found


def test_weight_decay_by_parameter() -> None:
    groups = by_name(network())
    for name in ("backbone.model.cls_token", "backbone.model.pos_embed", "image_prototypes.gain", "head.mlp.0.weight"):
        assert groups[name] == (1.0, 1.0), name
    for name in ("backbone.model.blocks.0.norm1.weight", "backbone.model.norm.bias", "head.mlp.0.bias"):
        assert groups[name] == (1.0, 0.0), name


def test_every_trained_parameter_is_in_one_group_and_no_other() -> None:
    student = network(train_gain=False)
    trained = {name for name, parameter in student.named_parameters() if parameter.requires_grad}
    assert by_name(student, 0.5).keys() == trained
    assert "image_prototypes.gain" not in trained


def test_layer_decay_falls_from_the_head_to_the_patch_embedding() -> None:
    scales = {name: scale for name, (scale, _) in by_name(network(), 0.5).items()}
    assert scales["head.mlp.0.weight"] == scales["object_prototypes.direction"] == 1.0
    assert scales["backbone.model.norm.weight"] == 1.0
    assert [scales[f"backbone.model.blocks.{block}.attn.qkv.weight"] for block in (2, 1, 0)] == [0.5, 0.25, 0.125]
    for name in ("patch_embed.proj.weight", "cls_token", "pos_embed"):
        assert scales[f"backbone.model.{name}"] == 0.0625


@pytest.mark.parametrize(
    ("name", "top_to_bottom"),
    [
        (
            "convnext_atto",
            ["stages.3.blocks.1", "stages.3.blocks.0", "stages.3.downsample", "stages.2.blocks.1", "stem.0"],
        ),
        ("resnet10t", ["layer4.0", "layer3.0", "layer2.0", "layer1.0", "conv1"]),
    ],
)
def test_layer_decay_falls_through_the_stages_of_a_convolutional_network(name: str, top_to_bottom: list[str]) -> None:
    scales = {name: scale for name, (scale, _) in by_name(network(name), 0.9).items()}
    rates = []
    for part in top_to_bottom:
        found = {scale for key, scale in scales.items() if key.startswith(f"backbone.model.{part}.")}
        assert len(found) == 1, part
        rates += found
    assert rates == sorted(rates, reverse=True)
    assert len(set(rates)) == len(rates)


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        ("vit_tiny_patch16_224", ["model.blocks.0", "model.blocks.2"]),
        ("resnet18", ["model.layer1.0", "model.layer4.1"]),
        ("convnext_atto", ["model.stages.0.blocks.0", "model.stages.3.blocks.1"]),
    ],
)
def test_blocks_exist_in_the_network(name: str, blocks: list[str]) -> None:
    backbone = build_backbone(name, args=SMALL[name], image_size=64)
    found = block_names(name for name, _ in backbone.named_parameters())
    assert [found[0], found[-1]] == blocks
    assert set(found) <= {name for name, _ in backbone.named_modules()}


def test_parts_other_than_the_backbone_have_the_full_rate() -> None:
    """Whatever their names in a custom objective, including a backbone under another name."""
    own = nn.ModuleDict({"backbone": network().backbone, "decoder": nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))})
    scales = {name: scale for name, (scale, _) in by_name(own, 0.5).items()}
    assert scales["decoder.0.weight"] == scales["decoder.1.bias"] == scales["backbone.model.norm.weight"] == 1.0
    assert scales["backbone.model.blocks.0.attn.qkv.weight"] == 0.125
    assert {scale for scale, _ in by_name(nn.ModuleDict({"inner": own}), 0.5).values()} == {1.0}


def test_learning_rate_factors_multiply_the_rates_of_parts() -> None:
    factors = {"backbone.": 0.1, "backbone.model.norm.": 3.0, "head.": 2.0}
    scales = {name: scale for name, (scale, _) in by_name(network(), 0.5, factors).items()}
    assert scales["head.mlp.0.weight"] == 2.0
    assert scales["image_prototypes.direction"] == 1.0
    assert scales["backbone.model.norm.weight"] == 3.0  # the longest prefix
    assert scales["backbone.model.blocks.2.attn.qkv.weight"] == pytest.approx(0.05)


def test_an_unknown_prefix_of_learning_rate_factors_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"lr_factors 'encoder.' .*backbone"):
        parameter_groups(network(), lr_factors={"encoder.": 0.1})


def lars(weight: Tensor, gradients: list[Tensor], *, lr: float, decay: float, adapts: bool) -> Tensor:
    """LARS with the trust ratio of the decayed gradient and the coefficient .001 of the released codes."""
    buffer = torch.zeros_like(weight)
    for gradient in gradients:
        gradient = gradient + decay * weight
        rate = 0.001 * weight.norm() / gradient.norm() if adapts else 1.0
        buffer = 0.9 * buffer + rate * gradient
        weight = weight - lr * buffer
    return weight


@pytest.mark.parametrize("decay", [0.0, 1e-5, 0.3])
def test_lars_is_the_formula(decay: float) -> None:
    layer = nn.Linear(3, 4)
    generator = torch.Generator().manual_seed(0)
    gradients = [[torch.randn(value.shape, generator=generator) for value in layer.parameters()] for _ in range(3)]
    expected = [
        lars(value.detach(), [step[place] for step in gradients], lr=0.5, decay=own, adapts=adapts)
        for place, (value, own, adapts) in enumerate(
            zip((layer.weight, layer.bias), (decay, 0.0), (True, False), strict=True)
        )
    ]
    optimiser = make_optimiser(parameter_groups(layer), OptimConfig(name="lars"))
    for step in gradients:
        for value, gradient in zip(layer.parameters(), step, strict=True):
            value.grad = gradient.clone()
        for group in optimiser.param_groups:  # as the schedules set them
            group["lr"], group["weight_decay"] = 0.5 * group["lr_scale"], decay * group["decay"]
        optimiser.step()
    for value, other in zip(layer.parameters(), expected, strict=True):
        torch.testing.assert_close(value.detach(), other)


def test_clipping_matches_the_formula_for_every_tensor_of_a_network() -> None:
    student = network()
    generator = torch.Generator().manual_seed(0)
    gradients = [0.1 * torch.randn(parameter.shape, generator=generator) for parameter in student.parameters()]
    expected = [gradient * min(1.0, 0.3 / (float(gradient.norm()) + 1e-6)) for gradient in gradients]
    clip_each(gradients, 0.3)
    for gradient, value in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, value, rtol=1e-5, atol=1e-8)


def test_dropped_gradients_create_no_optimiser_state() -> None:
    kept, dropped = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))
    optimiser = torch.optim.AdamW([kept, dropped], lr=0.1, weight_decay=0.5)
    (kept.sum() + dropped.sum()).backward()
    drop_gradients([dropped])
    optimiser.step()
    assert torch.equal(dropped, torch.ones(2, 2))
    assert dropped not in optimiser.state
    assert kept in optimiser.state


def test_adamw_has_the_second_beta_of_the_configuration() -> None:
    optimiser = make_optimiser(parameter_groups(nn.Linear(3, 4)), OptimConfig(beta2=0.95))
    assert {group["betas"] for group in optimiser.param_groups} == {(0.9, 0.95)}
