import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cribo.evaluation.segmentation.segmenter import MaskTransformer


def varied(decoder: MaskTransformer) -> MaskTransformer:
    """Randomise all weights, so that a missing bias, scale or projection changes the result."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return decoder


def tokens_of(batch: int, grid: tuple[int, int], channels: int) -> Tensor:
    return torch.randn(batch, grid[0] * grid[1], channels, generator=torch.Generator().manual_seed(1))


def test_scores_equal_the_formulas_in_numpy() -> None:
    grid, classes, heads = (3, 5), 4, 2
    decoder = varied(MaskTransformer(24, classes, width=16, layers=2, heads=heads)).double()
    tokens = tokens_of(2, grid, 24).double()
    w = {name: value.numpy() for name, value in decoder.state_dict().items()}

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        centred = x - x.mean(-1, keepdims=True)
        return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * w[f"{name}.weight"] + w[f"{name}.bias"]

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return np.einsum("...i,oi->...o", x, w[f"{name}.weight"]) + w.get(f"{name}.bias", 0.0)

    def attention(x: np.ndarray, name: str) -> np.ndarray:
        qkv = linear(x, f"{name}.qkv").reshape(*x.shape[:2], 3, heads, -1)
        query, key, value = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
        weights = np.exp(np.einsum("bqhd,bkhd->bhqk", query, key) / math.sqrt(query.shape[-1]))
        weights /= weights.sum(-1, keepdims=True)
        return linear(np.einsum("bhqk,bkhd->bqhd", weights, value).reshape(x.shape), f"{name}.proj")

    def gelu(x: np.ndarray) -> np.ndarray:
        return x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2

    x = linear(tokens.numpy(), "project_tokens")
    x = np.concatenate((x, np.broadcast_to(w["class_tokens"], (2, classes, 16))), axis=1)
    for block in ("blocks.0", "blocks.1"):
        x = x + attention(norm(x, f"{block}.norm1"), f"{block}.attn")
        x = x + linear(gelu(linear(norm(x, f"{block}.norm2"), f"{block}.mlp.fc1")), f"{block}.mlp.fc2")
    x = norm(x, "norm")
    patches = linear(x[:, : grid[0] * grid[1]], "project_patches")
    tokens_of_classes = linear(x[:, grid[0] * grid[1] :], "project_classes")
    patches /= np.linalg.norm(patches, axis=-1, keepdims=True)
    tokens_of_classes /= np.linalg.norm(tokens_of_classes, axis=-1, keepdims=True)
    expected = norm(np.einsum("bnd,bkd->bnk", patches, tokens_of_classes), "mask_norm")

    scores = decoder(tokens, grid).detach().numpy()
    np.testing.assert_allclose(scores, expected.reshape(2, *grid, classes).transpose(0, 3, 1, 2), rtol=1e-10)


def test_blocks_equal_pre_norm_encoder_layers_of_pytorch() -> None:
    decoder = varied(MaskTransformer(32, 5, layers=2, heads=4))
    layers: list[nn.Module] = []
    for block in decoder.blocks:
        layer = nn.TransformerEncoderLayer(32, 4, 128, 0.0, "gelu", batch_first=True, norm_first=True)
        layer.load_state_dict({theirs: block.state_dict()[ours] for theirs, ours in _NAMES.items()})
        layers.append(layer)
    tokens = tokens_of(3, (4, 6), 32)
    scores = decoder(tokens, (4, 6))
    decoder.blocks = nn.ModuleList(layers)
    torch.testing.assert_close(decoder(tokens, (4, 6)), scores, rtol=1e-4, atol=1e-5)


_NAMES = {
    f"{theirs}.{kind}" if "in_proj" not in theirs else f"{theirs}_{kind}": f"{ours}.{kind}"
    for theirs, ours in {
        "self_attn.in_proj": "attn.qkv",
        "self_attn.out_proj": "attn.proj",
        "linear1": "mlp.fc1",
        "linear2": "mlp.fc2",
        "norm1": "norm1",
        "norm2": "norm2",
    }.items()
    for kind in ("weight", "bias")
}


@pytest.mark.parametrize("grid", [(1, 1), (3, 7), (5, 2)])
def test_one_score_per_class_and_patch(grid: tuple[int, int]) -> None:
    decoder = varied(MaskTransformer(16, 6))
    tokens = tokens_of(2, grid, 16)
    scores = decoder(tokens, grid)
    assert scores.shape == (2, 6, *grid)
    # Without positions, permuted patches have permuted scores.
    last_first = decoder(tokens.flip(1), grid)
    torch.testing.assert_close(last_first.flatten(2).flip(2).view_as(scores), scores, rtol=1e-4, atol=1e-5)


def test_scores_are_independent_of_the_norm_of_projected_patches() -> None:
    decoder = varied(MaskTransformer(16, 3))
    tokens = tokens_of(1, (2, 3), 16)
    before = decoder(tokens, (2, 3))
    with torch.no_grad():
        decoder.project_patches.weight.mul_(5)
        decoder.project_classes.weight.mul_(0.1)
    torch.testing.assert_close(decoder(tokens, (2, 3)), before, rtol=1e-4, atol=1e-5)


def test_gradients_reach_every_parameter_and_the_tokens() -> None:
    decoder = MaskTransformer(16, 3)
    tokens = tokens_of(2, (3, 3), 16).requires_grad_()
    nn.functional.cross_entropy(decoder(tokens, (3, 3)), torch.arange(18).view(2, 3, 3) % 3).backward()
    for name, parameter in (*decoder.named_parameters(), ("tokens", tokens)):
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def test_initial_weights_follow_segmenter() -> None:
    decoder = MaskTransformer(128, 150, seed=3)
    assert decoder.heads == 2
    for name, parameter in decoder.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "norm" in name:
            assert bool((parameter == 1).all()), name
        else:
            std = 128**-0.5 if name.startswith(("project_patches", "project_classes")) else 0.02
            assert parameter.std().item() == pytest.approx(std, rel=0.05), name
            assert abs(parameter.mean().item()) < std / 10, name


def test_initial_weights_depend_only_on_the_seed() -> None:
    before = torch.random.get_rng_state()
    first = MaskTransformer(16, 3, seed=1).state_dict()
    torch.rand(3)
    again, other = MaskTransformer(16, 3, seed=1).state_dict(), MaskTransformer(16, 3, seed=2).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["class_tokens"], other["class_tokens"])
    torch.random.set_rng_state(before)
    MaskTransformer(16, 3)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_branches_are_dropped_per_image_by_the_noise() -> None:
    decoder = varied(MaskTransformer(16, 3, layers=2, drop_path=0.5))
    assert decoder.drop_path_rates == (0.5, 0.5)  # attention and MLP of the last block
    tokens = tokens_of(2, (2, 2), 16)
    dropped = decoder(tokens, (2, 2), drop_path_noise=torch.tensor([[0.9, 0.9], [0.1, 0.1]]))
    without_last = varied(MaskTransformer(16, 3, layers=2))
    without_last.blocks = without_last.blocks[:1]
    torch.testing.assert_close(dropped[1:], without_last(tokens[1:], (2, 2)))
    assert not torch.allclose(dropped[:1], without_last(tokens[:1], (2, 2)), atol=1e-3)
    torch.testing.assert_close(decoder(tokens, (2, 2)), varied(MaskTransformer(16, 3))(tokens, (2, 2)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"classes": 1}, "at least 2 classes, got 1"),
        ({"layers": 0}, "layers must be >= 1, got 0"),
        ({"width": 0}, "width must be >= 1, got 0"),
        ({"heads": 0}, "heads must be >= 1, got 0"),
        ({"heads": 5}, "decoder.width 16 is not divisible by 5 heads.*decoder.width 15 or 20"),
        ({"width": 3, "heads": 5}, "is not divisible by 5 heads.*decoder.width 5$"),
        ({"width": 200}, "decoder.width 200 is not divisible by 3 heads"),
        ({"drop_path": 1.0}, "drop_path must be >= 0 and < 1, got 1.0"),
    ],
)
def test_invalid_decoders_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MaskTransformer(**{"in_channels": 16, "classes": 3, **changes})
