import pytest
import torch

from cribo.models.formats.inverse import write_as
from cribo.models.formats.naming import State
from cribo.models.formats.table import NAMINGS

_DINOV2 = next(dialect for dialect in NAMINGS if dialect.name == "Hugging Face DINOv2")


def own_tensors(dim: int = 4, registers: int = 2) -> State:
    """One block under the keys of transformers, with distinct values."""
    layer = "encoder.layer.0"
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.cls_token": (1, 1, dim),
        "embeddings.register_tokens": (1, registers, dim),
        "embeddings.position_embeddings": (1, 5, dim),
        "embeddings.patch_embeddings.projection.weight": (dim, 3, 2, 2),
        **{
            f"{layer}.attention.{part}_proj.{kind}": (dim, dim)[: 2 - (kind == "bias")]
            for part in "kvq"
            for kind in ("weight", "bias")
        },
        f"{layer}.mlp.fc1.weight": (2 * dim, dim),
        f"{layer}.layer_scale1.lambda1": (dim,),
        "layernorm.bias": (dim,),
    }
    generator = torch.Generator().manual_seed(0)
    return {key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}


def test_weights_round_trip_under_their_own_keys() -> None:
    own = own_tensors()
    own["embeddings.position_embeddings"][:, 0] = 0
    state = _DINOV2.rename(own)
    assert "blocks.0.attn.qkv.weight" in state
    shapes = {key: value.shape for key, value in own.items()}
    written = write_as(_DINOV2, state, shapes, zero=("embeddings.position_embeddings",))
    assert written.keys() == own.keys()
    for key, value in own.items():
        assert torch.equal(written[key], value), key


def test_a_position_added_to_a_token_is_written_as_zero() -> None:
    own = own_tensors(registers=0)
    state = _DINOV2.rename(own)
    shapes = {key: value.shape for key, value in own.items()}
    written = write_as(_DINOV2, state, shapes, zero=("embeddings.position_embeddings",))
    again = _DINOV2.rename(written)
    assert not torch.equal(written["embeddings.cls_token"], own["embeddings.cls_token"])
    for key, value in state.items():
        assert torch.equal(again[key], value), key


def test_weights_with_other_parts_are_refused() -> None:
    own = own_tensors()
    state, shapes = _DINOV2.rename(own), {key: value.shape for key, value in own.items()}
    with pytest.raises(
        ValueError, match=r"no network of Hugging Face DINOv2 has these weights: norm_pre.weight missing"
    ):
        write_as(_DINOV2, {**state, "norm_pre.weight": torch.ones(4)}, shapes)
    with pytest.raises(ValueError, match=r"blocks.0.mlp.fc1.weight"):
        write_as(_DINOV2, {**state, "blocks.0.mlp.fc1.weight": torch.ones(4, 4)}, shapes)
    with pytest.raises(ValueError, match="rows have 5 values"):
        write_as(_DINOV2, {**state, "blocks.0.mlp.fc1.weight": torch.ones(8, 5)}, shapes)
