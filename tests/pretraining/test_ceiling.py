import pytest
import torch

from cribo.models import build_backbone
from cribo.pretraining.ceiling import model_flops, product_ceiling

VIT = {"embed_dim": 64, "depth": 2, "num_heads": 2, "patch_size": 8}


@pytest.mark.parametrize("size", [32, (32, 48)])
def test_flops_of_a_transformer_are_those_of_its_products(size: int | tuple[int, int]) -> None:
    backbone = build_backbone("vit_tiny_patch16_224", args=VIT, image_size=32)
    height, width = (size, size) if isinstance(size, int) else size
    patches = height * width // 64
    tokens, width = patches + 1, 64
    # QKV, projection and an MLP of four times the width; scores, and their products with the values.
    block = 2 * tokens * width * width * (3 + 1 + 4 + 4) + 2 * 2 * tokens * tokens * width
    assert model_flops(backbone, size) == 2 * patches * 3 * 64 * width + 2 * block


@pytest.mark.parametrize(
    ("name", "args", "size"),
    [
        ("resnet50", {"layers": (1, 1, 1, 1), "channels": (8, 16, 24, 32)}, 64),
        ("convnext_tiny", {"depths": (1, 1, 1, 1), "dims": (8, 16, 32, 64)}, 64),
        ("swin_tiny_patch4_window7_224", {"depths": (1, 1, 1, 1), "embed_dim": 24, "num_heads": (1, 1, 1, 1)}, 224),
        ("eva02_tiny_patch14_224", {"depth": 1, "embed_dim": 48, "num_heads": 2}, 56),
        ("vit_small_patch16_dinov3", {"depth": 1}, 64),
    ],
)
def test_every_kind_of_network_is_counted_and_left_as_it_was(name: str, args: dict[str, object], size: int) -> None:
    backbone = build_backbone(name, args=args, image_size=size)
    before = backbone.fingerprint()
    assert model_flops(backbone, size) > 1e5
    assert backbone.training
    assert backbone.fingerprint() == before
    assert {parameter.device.type for parameter in backbone.parameters()} == {"cpu"}


def test_the_whole_map_of_a_convolutional_network_is_four_times_that_of_half_the_side() -> None:
    backbone = build_backbone("resnet50", args={"layers": (1, 1, 1, 1), "channels": (8, 16, 24, 32)}, image_size=64)
    assert model_flops(backbone, 128) == 4 * model_flops(backbone, 64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_ceiling_is_a_rate_of_this_machine(dtype: torch.dtype) -> None:
    rate = product_ceiling("cpu", dtype)
    assert 1e8 < rate < 1e15
