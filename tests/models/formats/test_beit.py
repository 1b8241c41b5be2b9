"""BEiT and SimMIM's ViT in the files of each project, against the project's own network."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
import transformers
from scipy.interpolate import make_interp_spline
from torch import Tensor, nn

from cribo.models import Backbone, load_backbone, save_backbone

State = dict[str, Tensor]
ARGS: dict[str, Any] = {"embed_dim": 64, "depth": 2, "num_heads": 4, "img_size": 48}


def randomise(module: nn.Module, seed: int = 0) -> None:
    """With the zeros and ones of an initialisation, a wrong name can be right by chance."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, value in sorted(module.state_dict().items()):
            if value.is_floating_point():
                scale = 1.0 if "relative_position" in key else 0.1
                value.add_(scale * torch.randn(value.shape, generator=generator))


def images(height: int, width: int | None = None) -> Tensor:
    return torch.randn(2, 3, height, width or height, generator=torch.Generator().manual_seed(1))


def assert_agrees(backbone: Backbone, batch: Tensor, tokens: Tensor, global_token: Tensor) -> None:
    found = backbone.eval().encode(batch)
    torch.testing.assert_close(found.tokens, tokens, rtol=0, atol=1e-5)
    torch.testing.assert_close(found.global_token, global_token, rtol=0, atol=1e-5)


class Bias(nn.Module):
    def __init__(self, side: int, heads: int) -> None:
        super().__init__()
        self.side = side
        self.relative_position_bias_table = nn.Parameter(torch.zeros((2 * side - 1) ** 2 + 3, heads))
        self.register_buffer("relative_position_index", torch.zeros(side**2 + 1, side**2 + 1, dtype=torch.long))

    def forward(self) -> Tensor:
        """Entry by entry, from the places of two patches; the last three rows are [CLS]'s."""
        places = [None, *((row, column) for row in range(self.side) for column in range(self.side))]
        rows: list[int] = []
        for one in places:
            for other in places:
                if one is None or other is None:
                    rows.append(-1 if one is other else -3 if one is None else -2)
                else:
                    down, across = (a - b + self.side - 1 for a, b in zip(one, other, strict=True))
                    rows.append(down * (2 * self.side - 1) + across)
        return self.relative_position_bias_table[rows].unflatten(0, (len(places),) * 2).permute(2, 0, 1)


class Beit(nn.Module):
    """The original, and SimMIM's: biases of each block or one for all, [CLS]'s norm or that of the mean."""

    def __init__(self, side: int = 3, *, shared: bool, mean_pooling: bool, absolute: bool = False) -> None:
        super().__init__()
        dim, self.heads = 64, 4
        self.patch_embed: Any = nn.Module()
        self.patch_embed.proj = nn.Conv2d(3, dim, 16, 16)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.zeros(1, side**2 + 1, dim)) if absolute else None
        self.rel_pos_bias = Bias(side, self.heads) if shared else None
        self.blocks: Any = nn.ModuleList(self.block(dim, None if shared else side) for _ in range(2))
        self.norm = nn.Identity() if mean_pooling else nn.LayerNorm(dim, eps=1e-6)
        self.fc_norm = nn.LayerNorm(dim, eps=1e-6) if mean_pooling else None

    def block(self, dim: int, side: int | None) -> Any:
        block: Any = nn.Module()
        block.norm1, block.norm2 = nn.LayerNorm(dim, eps=1e-6), nn.LayerNorm(dim, eps=1e-6)
        block.gamma_1, block.gamma_2 = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.ones(dim))
        block.attn = nn.Module() if side is None else Bias(side, self.heads)
        block.attn.qkv, block.attn.proj = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim)
        block.attn.q_bias, block.attn.v_bias = nn.Parameter(torch.zeros(dim)), nn.Parameter(torch.zeros(dim))
        block.mlp = nn.Module()
        block.mlp.fc1, block.mlp.fc2 = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        return block

    @torch.no_grad()
    def forward(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        x = self.patch_embed.proj(batch).flatten(2).mT
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1)
        x = x if self.pos_embed is None else x + self.pos_embed
        for block in self.blocks:
            bias = block.attn() if self.rel_pos_bias is None else self.rel_pos_bias()
            q, k, v = block.attn.qkv(block.norm1(x)).chunk(3, dim=-1)
            q, v = q + block.attn.q_bias, v + block.attn.v_bias
            q, k, v = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (q, k, v))
            weights = (q @ k.mT / q.shape[-1] ** 0.5 + bias).softmax(-1)
            x = x + block.gamma_1 * block.attn.proj((weights @ v).transpose(1, 2).flatten(2))
            x = x + block.gamma_2 * block.mlp.fc2(F.gelu(block.mlp.fc1(block.norm2(x))))
        x = self.norm(x)
        if self.fc_norm is not None:  # the original gives the norm of the mean; each token gets the same norm
            return self.fc_norm(x[:, 1:]), self.fc_norm(x[:, 1:].mean(dim=1))
        return x[:, 1:], x[:, 0]


def resize_as_the_original(table: Tensor, old: int, new: int) -> Tensor:
    """A cubic spline along each axis, over distances whose steps grow by a constant factor."""
    old_side, new_side = 2 * old - 1, 2 * new - 1
    low, high, middle = 1.01, 1.5, 0.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        reach = sum(middle**power for power in range(old_side // 2))
        low, high = (low, middle) if reach > new_side // 2 else (middle, high)
    half = torch.cumsum(middle ** torch.arange(old_side // 2, dtype=torch.float64), 0)
    known = torch.cat([-half.flip(0), torch.zeros(1), half]).numpy()
    wanted = (torch.arange(new_side) - new_side // 2).clamp(known[0], known[-1]).numpy()
    values = table[:-3].unflatten(0, (old_side, old_side)).double().numpy()
    values = make_interp_spline(known, values, k=3, axis=0)(wanted)
    values = make_interp_spline(known, values, k=3, axis=1)(wanted)
    return torch.cat([torch.from_numpy(values).float().flatten(0, 1), table[-3:]])


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("mean_pooling", [False, True])
@pytest.mark.parametrize("absolute", [False, True])
def test_beit(tmp_path: Path, shared: bool, mean_pooling: bool, absolute: bool):
    model = Beit(4, shared=shared, mean_pooling=mean_pooling, absolute=absolute).eval()
    randomise(model)
    head = {"head.weight": torch.ones(2, 64)} if mean_pooling else {"lm_head.weight": torch.ones(8, 64)}
    torch.save({"model": {**model.state_dict(), "mask_token": torch.ones(1, 1, 64), **head}}, tmp_path / "beit.pth")
    backbone = load_backbone(tmp_path / "beit.pth")
    assert_agrees(backbone, images(64), *model(images(64)))
    assert backbone.mean == (0.5, 0.5, 0.5)
    assert backbone.loaded is not None
    assert backbone.loaded.format == "BEiT"
    assert "BEiT v2 and the fine-tuned networks of SimMIM have ImageNet's" in str(backbone.loaded)
    for size in ((96, 96), (64, 96)):
        with pytest.raises(ValueError, match="was built for 64x64 images and takes no other"):
            backbone.encode(images(*size))
    # For another size, its fine-tuning resizes both kinds of positions.
    larger = Beit(6, shared=shared, mean_pooling=mean_pooling, absolute=absolute).eval()
    state = model.state_dict()
    for key, value in state.items():
        if key.endswith("bias_table"):
            state[key] = resize_as_the_original(value, 4, 6)
        elif key.endswith("position_index"):
            state[key] = larger.state_dict()[key]
    if absolute:
        grid = state["pos_embed"][:, 1:].mT.unflatten(2, (4, 4))
        grid = F.interpolate(grid, size=(6, 6), mode="bicubic", align_corners=False)
        state["pos_embed"] = torch.cat([state["pos_embed"][:, :1], grid.flatten(2).mT], dim=1)
    larger.load_state_dict(state)
    assert_agrees(load_backbone(tmp_path / "beit.pth", image_size=96), images(96), *larger(images(96)))


def test_simmim(tmp_path: Path):
    model = Beit(shared=True, mean_pooling=False).eval()
    randomise(model)
    state = {f"encoder.{key}": value for key, value in model.state_dict().items()}
    state |= {"encoder.mask_token": torch.ones(1, 1, 64), "decoder.0.weight": torch.ones(8, 64, 1, 1)}
    torch.save({"model": state, "optimizer": {}, "max_accuracy": 0.0, "epoch": 1}, tmp_path / "simmim.pth")
    backbone = load_backbone(tmp_path / "simmim.pth")
    assert_agrees(backbone, images(48), *model(images(48)))
    assert backbone.mean == (0.485, 0.456, 0.406)
    assert backbone.loaded is not None
    assert backbone.loaded.format == "SimMIM"
    assert set(backbone.loaded.dropped) == {"mask token", "buffer", "decoder"}
    assert "took a mean" not in str(backbone.loaded)


@pytest.mark.parametrize("is_bare", [False, True])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("size", [(48, 48), (80, 80), (32, 64), (96, 48)], ids=str)
def test_beit_of_hugging_face(tmp_path: Path, size: tuple[int, int], shared: bool, is_bare: bool):
    config = transformers.BeitConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=48,
        use_relative_position_bias=not shared,
        use_shared_relative_position_bias=shared,
    )
    model: Any = transformers.BeitModel(config).eval()
    randomise(model)
    if is_bare:  # with the names that transformers 5 has in memory
        torch.save({f"beit.{key}": value for key, value in model.state_dict().items()}, tmp_path / "weights.pth")
    else:
        model.save_pretrained(tmp_path)
    backbone = load_backbone(tmp_path / "weights.pth" if is_bare else tmp_path)
    with torch.no_grad():
        output = model(images(*size))
        tokens = model.pooler.layernorm(output.last_hidden_state[:, 1:])
    assert_agrees(backbone, images(*size), tokens, output.pooler_output)
    assert (backbone.mean, backbone.numerics.norm_eps, backbone.image_size) == ((0.5, 0.5, 0.5), 1e-12, 48)
    # Saved and loaded again, it is the same.
    save_backbone(backbone, tmp_path / "saved")
    assert_agrees(load_backbone(tmp_path / "saved"), images(*size), tokens, output.pooler_output)


def test_beit_of_hugging_face_with_absolute_positions(tmp_path: Path):
    config = transformers.BeitConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=48,
        use_relative_position_bias=True,
        use_absolute_position_embeddings=True,
        use_mean_pooling=False,
    )
    model: Any = transformers.BeitModel(config).eval()
    randomise(model)
    model.save_pretrained(tmp_path)
    backbone = load_backbone(tmp_path)
    with torch.no_grad():
        output = model(images(48))
    assert_agrees(backbone, images(48), output.last_hidden_state[:, 1:], output.pooler_output)
    with pytest.raises(ValueError, match="was built for 48x48 images and takes no other"):
        backbone.encode(images(80))


@pytest.mark.parametrize("is_bare", [False, True])
@pytest.mark.parametrize("size", [(48, 48), (80, 80), (32, 64)], ids=str)
def test_beit_of_hugging_face_for_masked_patches(tmp_path: Path, size: tuple[int, int], is_bare: bool):
    config = transformers.BeitConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=48,
        use_shared_relative_position_bias=True,
        use_mask_token=True,
        vocab_size=16,
    )
    model: Any = transformers.BeitForMaskedImageModeling(config).eval()
    randomise(model)
    if is_bare:
        torch.save(model.state_dict(), tmp_path / "weights.pth")
    else:
        model.save_pretrained(tmp_path)
    backbone = load_backbone(tmp_path / "weights.pth" if is_bare else tmp_path)
    with torch.no_grad():
        normed = model.layernorm(model.beit(images(*size)).last_hidden_state)
    assert_agrees(backbone, images(*size), normed[:, 1:], normed[:, 0])
    assert backbone.loaded is not None
    assert set(backbone.loaded.dropped) == {"mask token", "head"}


@pytest.mark.parametrize("name", ["beit_base_patch16_224", "beitv2_large_patch16_224"])
def test_beit_of_timm_without_a_name(tmp_path: Path, name: str):
    model: Any = timm.create_model(name, **ARGS).eval()
    randomise(model)
    torch.save(model.state_dict(), tmp_path / "weights.pth")
    with torch.no_grad():
        tokens = model.forward_features(images(48))
        pooled = model.forward_head(tokens, pre_logits=True)
    backbone = load_backbone(tmp_path / "weights.pth")
    assert_agrees(backbone, images(48), model.fc_norm(tokens[:, 1:]).detach(), pooled)
