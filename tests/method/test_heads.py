from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from cribo.method import ProjectionHead, PrototypeLayer


def linears(head: ProjectionHead) -> list[nn.Linear]:
    return [layer for layer in head.mlp if isinstance(layer, nn.Linear)]


@pytest.mark.parametrize("autocast", [False, True])
def test_embeddings_are_float32_of_unit_length(autocast: bool) -> None:
    head = ProjectionHead(12, hidden_dim=32, bottleneck_dim=8)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        embeddings = head(10 * torch.randn(4, 5, 12))
    assert embeddings.dtype == torch.float32
    torch.testing.assert_close(embeddings.norm(dim=-1), torch.ones(4, 5))
    assert head(torch.zeros(0, 12)).shape == (0, 8)


def test_layers_and_initial_weights_of_the_paper() -> None:
    torch.manual_seed(0)
    head = ProjectionHead(384)
    assert [type(layer) for layer in head.mlp] == [nn.Linear, nn.GELU, nn.Linear, nn.GELU, nn.Linear]
    sizes = [(layer.in_features, layer.out_features) for layer in linears(head)]
    assert sizes == [(384, 2048), (2048, 2048), (2048, 256)]
    for layer in linears(head):
        assert layer.weight.std().item() == pytest.approx(0.02, rel=0.02)
        assert layer.weight.mean().abs().item() < 1e-3
        assert (layer.bias == 0).all()


@pytest.mark.parametrize("num_layers", [1, 2, 4])
def test_number_of_layers(num_layers: int) -> None:
    head = ProjectionHead(6, hidden_dim=7, bottleneck_dim=5, num_layers=num_layers)
    assert len(linears(head)) == num_layers
    assert head(torch.randn(3, 6)).shape == (3, 5)


def test_prototypes_match_torch_weight_norm() -> None:
    layer = PrototypeLayer(8, 30)
    reference = weight_norm(nn.Linear(8, 30, bias=False))
    gain, direction = dict(reference.named_parameters()).values()
    with torch.no_grad():
        layer.gain.uniform_(0.5, 2)
        gain.copy_(layer.gain)
        direction.copy_(layer.direction)
    embeddings, weights = torch.randn(5, 8), torch.randn(5, 30)
    torch.testing.assert_close(layer(embeddings), reference(embeddings))
    for module in (layer, reference):
        (module(embeddings) * weights).sum().backward()
    torch.testing.assert_close(layer.gain.grad, gain.grad)
    torch.testing.assert_close(layer.direction.grad, direction.grad)


def test_prototypes_stay_float32_under_autocast() -> None:
    layer = PrototypeLayer(8, 30)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        weight = layer.weight
    assert torch.equal(weight, layer.weight)


def test_prototypes_keep_no_second_weight_for_backward() -> None:
    """Of size (L, E), only the directions, which exist anyway, are saved; else one norm per prototype."""
    layer = PrototypeLayer(8, 30)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: (kept.append(tensor), tensor)[1], lambda t: t):
        layer.weight.sum()
    others = [tensor for tensor in kept if tensor.data_ptr() != layer.direction.data_ptr()]
    assert sum(tensor.numel() for tensor in others) <= 2 * 30


def test_prototypes_start_as_a_linear_layer_of_gain_one() -> None:
    torch.manual_seed(0)
    layer = PrototypeLayer(64, 5000)
    assert (layer.gain == 1).all()
    torch.testing.assert_close(layer.weight.norm(dim=-1), torch.ones(5000))
    default = nn.Linear(64, 5000, bias=False).weight
    assert layer.direction.abs().max() <= 1 / 8
    assert layer.direction.std().item() == pytest.approx(default.std().item(), rel=0.02)


@pytest.mark.parametrize("train_gain", [True, False])
def test_the_gain_is_trained_or_frozen(train_gain: bool) -> None:
    layer = PrototypeLayer(8, 30, train_gain=train_gain)
    assert layer.gain.requires_grad == train_gain
    layer(torch.randn(5, 8)).sum().backward()
    assert (layer.gain.grad is not None) == train_gain
    assert layer.direction.grad is not None
    assert set(layer.state_dict()) == {"gain", "direction"}  # a frozen gain is saved, too


@pytest.mark.parametrize("name", ["dim", "hidden_dim", "bottleneck_dim", "num_layers"])
def test_head_sizes_below_one(name: str) -> None:
    sizes: dict[str, Any] = {"dim": 4, "hidden_dim": 4, "bottleneck_dim": 4, "num_layers": 3, name: 0}
    with pytest.raises(ValueError, match=f"{name} must be >= 1, got 0"):
        ProjectionHead(**sizes)


@pytest.mark.parametrize("name", ["bottleneck_dim", "num_prototypes"])
def test_prototype_sizes_below_one(name: str) -> None:
    sizes: dict[str, Any] = {"bottleneck_dim": 4, "num_prototypes": 8, name: -1}
    with pytest.raises(ValueError, match=f"{name} must be >= 1, got -1"):
        PrototypeLayer(**sizes)


def test_a_head_without_biases_starts_at_its_own_scale() -> None:
    head = ProjectionHead(64, hidden_dim=128, bottleneck_dim=32, bias=False, init_std=0.1)
    assert all(parameter.ndim == 2 for parameter in head.parameters())
    spread = torch.cat([parameter.detach().flatten() for parameter in head.parameters()]).std()
    # A normal distribution truncated at 2 keeps its spread; truncated at 2 standard deviations, it would not.
    assert abs(float(spread) - 0.1) < 0.005
    kaiming = ProjectionHead(2048, hidden_dim=256, bottleneck_dim=2048, num_layers=2, init_std="kaiming")
    spreads = [float(layer.weight.detach().std()) for layer in kaiming.mlp if isinstance(layer, nn.Linear)]
    assert spreads == pytest.approx([(2 / 2048) ** 0.5, (2 / 256) ** 0.5], rel=0.02)
    lecun = ProjectionHead(2048, num_layers=1, init_std="lecun").state_dict()
    assert float(lecun["mlp.0.weight"].std()) == pytest.approx(2048**-0.5, rel=0.02)
    assert not lecun["mlp.0.bias"].any()
    pytorch = ProjectionHead(2048, num_layers=1, init_std="pytorch").state_dict()
    assert float(pytorch["mlp.0.weight"].abs().max()) == pytest.approx(2048**-0.5, rel=0.02)
    assert pytorch["mlp.0.bias"].any()
    with pytest.raises(ValueError, match="init_std must be > 0, got 0"):
        ProjectionHead(4, init_std=0)
