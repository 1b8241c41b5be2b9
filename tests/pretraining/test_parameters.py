import pytest
import torch
from torch import nn

from cribo.models import build_backbone
from cribo.pretraining.config import HeadConfig, OptimConfig
from cribo.pretraining.network import Network
from cribo.pretraining.parameters import RunningStatistics, clip_each, drop_gradients, parameter_groups
from cribo.pretraining.shares import norms

SMALL = {"patch_size": 8, "depth": 3, "embed_dim": 32, "num_heads": 2}


def network(name: str = "vit_tiny_patch16_224", *, train_gain: bool = True) -> Network:
    args = SMALL if name.startswith("vit") else {}
    backbone = build_backbone(name, args=args, image_size=32)
    head = HeadConfig(hidden_dim=32, bottleneck_dim=16, prototypes=32, train_gain=train_gain)
    return Network(backbone, head, seed=0)


def by_name(student: Network, config: OptimConfig) -> dict[str, tuple[float, float]]:
    """(learning-rate scale, decay) of every parameter that is trained."""
    names = {parameter: name for name, parameter in student.named_parameters()}
    found: dict[str, tuple[float, float]] = {}
    for group in parameter_groups(student, config):
        for parameter in group["params"]:  # pyright: ignore[reportGeneralTypeIssues]
            name = names[parameter]
            assert name not in found
            found[name] = (group["lr_scale"], group["decay"])  # pyright: ignore[reportArgumentType]
    return found


def test_what_decays() -> None:
    groups = by_name(network(), OptimConfig())
    for name in ("backbone.model.cls_token", "backbone.model.pos_embed", "image_prototypes.gain", "head.mlp.0.weight"):
        assert groups[name] == (1.0, 1.0), name
    for name in ("backbone.model.blocks.0.norm1.weight", "backbone.model.norm.bias", "head.mlp.0.bias"):
        assert groups[name] == (1.0, 0.0), name


def test_every_trained_parameter_is_in_one_group_and_no_other() -> None:
    student = network(train_gain=False)
    trained = {name for name, parameter in student.named_parameters() if parameter.requires_grad}
    assert by_name(student, OptimConfig(layer_decay=0.5)).keys() == trained
    assert "image_prototypes.gain" not in trained


def test_layer_decay_falls_from_the_head_to_the_patch_embedding() -> None:
    scales = {name: scale for name, (scale, _) in by_name(network(), OptimConfig(layer_decay=0.5)).items()}
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
            [
                "stages.3.blocks.1",
                "stages.3.blocks.0",
                "stages.3.downsample",
                "stages.2.blocks.5",
                "stages.0.blocks.0",
                "stem.0",
            ],
        ),
        ("resnet10t", ["layer4.0", "layer3.0", "layer2.0", "layer1.0", "conv1"]),
    ],
)
def test_layer_decay_falls_through_the_stages_of_a_convolutional_network(name: str, top_to_bottom: list[str]) -> None:
    scales = {name: scale for name, (scale, _) in by_name(network(name), OptimConfig(layer_decay=0.9)).items()}
    rates = []
    for part in top_to_bottom:
        found = {scale for key, scale in scales.items() if key.startswith(f"backbone.model.{part}.")}
        assert len(found) == 1, part
        rates += found
    assert rates == sorted(rates, reverse=True)
    assert len(set(rates)) == len(rates)


def test_clipping_scales_each_tensor_by_its_own_norm() -> None:
    large, small = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(3))
    large.grad, small.grad = torch.full((2, 2), 3.0), torch.tensor([0.1, 0.0, 0.2])
    clip_each([large.grad, small.grad], norms([large.grad, small.grad]), 0.3)
    assert large.grad.norm() == pytest.approx(0.3, rel=1e-5)
    torch.testing.assert_close(large.grad, torch.full((2, 2), 0.15), rtol=1e-5, atol=0)
    assert small.grad.tolist() == pytest.approx([0.1, 0.0, 0.2])


def test_clipping_is_the_formula_for_every_tensor_of_a_network() -> None:
    student = network()
    generator = torch.Generator().manual_seed(0)
    gradients = [0.1 * torch.randn(parameter.shape, generator=generator) for parameter in student.parameters()]
    expected = [gradient * min(1.0, 0.3 / (float(gradient.norm()) + 1e-6)) for gradient in gradients]
    clip_each(gradients, norms(gradients), 0.3)
    for gradient, value in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, value, rtol=1e-5, atol=1e-8)


def test_dropped_gradients_leave_nothing_for_the_optimiser() -> None:
    kept, dropped = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))
    optimiser = torch.optim.AdamW([kept, dropped], lr=0.1, weight_decay=0.5)
    (kept.sum() + dropped.sum()).backward()
    drop_gradients([dropped])
    optimiser.step()
    assert torch.equal(dropped, torch.ones(2, 2))
    assert dropped not in optimiser.state
    assert kept in optimiser.state


def test_statistics_of_batch_norms_are_put_back_where_that_is_due() -> None:
    norm = nn.BatchNorm2d(3)
    statistics = RunningStatistics([nn.Sequential(nn.Conv2d(3, 3, 1), norm)])
    norm(torch.randn(4, 3, 2, 2))
    assert norm.running_mean is not None
    assert norm.running_var is not None
    mean, variance = norm.running_mean.clone(), norm.running_var.clone()
    for bad, images in ((False, torch.randn(4, 3, 2, 2)), (True, torch.full((4, 3, 2, 2), torch.nan))):
        statistics.keep()
        norm(images)
        statistics.put_back(torch.tensor(bad))
        assert torch.equal(norm.running_mean, mean) == bad
        assert torch.equal(norm.running_var, variance) == bad
        mean, variance = norm.running_mean.clone(), norm.running_var.clone()
