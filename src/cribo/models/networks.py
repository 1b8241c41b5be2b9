"""Networks of other projects that timm does not have; `load_backbone` builds them for files of their weights."""

from itertools import pairwise
from typing import Any

import timm
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from cribo.base.errors import InputError


def resnet_with_stem(name: str, stem_channels: int, in_chans: int = 3, **args: Any) -> nn.Module:
    """Build a timm ResNet with other than 64 channels in its stem, such as the wide ResNets of SwAV (RN50w2).

    Source: github.com/facebookresearch/swav, `src/resnet50.py`.
    """
    _require_timm(name)
    model: Any = timm.create_model(name, num_classes=0, **args)
    model.conv1 = nn.Conv2d(in_chans, stem_channels, kernel_size=7, stride=2, padding=3, bias=False)
    model.bn1 = nn.BatchNorm2d(stem_channels)
    first: Any = model.layer1[0]
    for owner, key in ((first, "conv1"), *(((first.downsample, "0"),) if first.downsample is not None else ())):
        old = getattr(owner, key)
        new = nn.Conv2d(stem_channels, old.out_channels, old.kernel_size, old.stride, old.padding, bias=False)
        setattr(owner, key, new)
    return model


class ConvolutionalStem(nn.Module):
    """Patch embedding of four convolutions of stride 2, each with a batch norm, and a projection (MoCo v3).

    Source: github.com/facebookresearch/moco-v3, `vits.py`; arXiv:2106.14881.
    """

    def __init__(self, img_size: int, patch_size: int, in_chans: int, embed_dim: int, **_: Any) -> None:
        super().__init__()
        self.patch_size = (patch_size, patch_size)
        self.grid_size = (img_size // patch_size,) * 2
        self.num_patches = self.grid_size[0] * self.grid_size[1]
        widths = [in_chans, *(embed_dim // divisor for divisor in (8, 4, 2, 1))]
        layers: list[nn.Module] = []
        for width, wider in pairwise(widths):
            layers += [nn.Conv2d(width, wider, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(wider), nn.ReLU()]
        self.proj = nn.Sequential(*layers, nn.Conv2d(embed_dim, embed_dim, 1))

    def forward(self, images: Float[Tensor, "b c y x"]) -> Float[Tensor, "b h w d"]:
        """Embed patches of 16 x 16 pixels."""
        return self.proj(images).permute(0, 2, 3, 1)


def vit_with_convolutional_stem(name: str, size: int, **args: Any) -> nn.Module:
    """Build a timm vision transformer, of patches of 16 pixels, with MoCo v3's convolutional stem."""
    _require_timm(name)
    options = {"img_size": size, "dynamic_img_size": True, "num_classes": 0, "embed_layer": ConvolutionalStem}
    return timm.create_model(name, **{**args, **options})


def _require_timm(name: str) -> None:
    """Require the name of a network of timm, which could also read others from a folder or the hub."""
    if not timm.is_model(name):
        raise InputError(f"{name} is not a network of timm")


class Capi(nn.Module):
    """CAPI's encoder: registers, a learned rotary embedding of all tokens, no biases, and a last norm without weights.

    The predictor is not included; the global token is the mean of the patch tokens.

    Args:
        dim: D, channels of a token.
        depth: number of blocks.
        heads: number of attention heads.
        patch_size: side of a patch in pixels.
        registers: number of registers, a multiple of 4; they are positioned along the edges of the image.
        in_chans: number of channels of an image.

    Source: github.com/facebookresearch/capi, `model.py`.
    """

    def __init__(
        self, dim: int, depth: int, heads: int, patch_size: int = 14, registers: int = 16, in_chans: int = 3
    ) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.registers = nn.Parameter(torch.zeros(1, registers, dim))
        self.patch_embed = nn.Conv2d(in_chans, dim, patch_size, patch_size)
        self.encoder = nn.ModuleDict({"blocks": nn.ModuleList(_CapiBlock(dim, heads) for _ in range(depth))})

    def forward_features(self, images: Float[Tensor, "b c y x"]) -> Float[Tensor, "b d h w"]:
        """Return the patch tokens as a map."""
        patches = self.patch_embed(images)
        grid = patches.shape[2:]
        tokens = torch.cat([self.registers.expand(len(images), -1, -1), patches.flatten(2).mT], dim=1)
        down, across = (torch.linspace(0, 1, size, device=images.device, dtype=images.dtype) for size in grid)
        places = torch.cartesian_prod(down, across)
        # A linspace of one position is 0, so registers are scaled to the range of the positions.
        edge = self._edge(places) * (places.amax(dim=0) - places.amin(dim=0)) + places.amin(dim=0)
        places = torch.cat([edge, places])
        for block in self.encoder["blocks"]:  # pyright: ignore[reportGeneralTypeIssues]
            tokens = block(tokens, places)
        tokens = F.rms_norm(tokens, tokens.shape[-1:], eps=1e-5)
        return tokens[:, self.registers.shape[1] :].mT.unflatten(2, grid)

    def _edge(self, like: Tensor) -> Float[Tensor, "r 2"]:
        """Return positions along the four edges of the unit square, one edge after the other."""
        side = self.registers.shape[1] // 4
        along = torch.arange(side, device=like.device, dtype=like.dtype) / side
        zeros, ones = torch.zeros_like(along), torch.ones_like(along)
        edges = ((along, zeros), (ones, along), (1 - along, ones), (zeros, 1 - along))
        return torch.cat([torch.stack(edge, dim=1) for edge in edges])


class _CapiBlock(nn.Module):
    """Residual block of attention and MLP, each after a norm; named as in CAPI."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        attention: dict[str, nn.Module] = {
            name: nn.Linear(dim, dim, bias=False) for name in ("q_proj", "k_proj", "v_proj", "proj")
        }
        attention["rope"] = nn.ParameterDict({"freqs": torch.zeros(2, dim // heads)})
        mlp = {"fc1": nn.Linear(dim, 4 * dim, bias=False), "fc2": nn.Linear(4 * dim, dim, bias=False)}
        self.residual1: Any = nn.ModuleDict({"norm": nn.RMSNorm(dim, eps=1e-5), "fn": nn.ModuleDict(attention)})
        self.residual2: Any = nn.ModuleDict({"norm": nn.RMSNorm(dim, eps=1e-5), "fn": nn.ModuleDict(mlp)})

    def forward(self, tokens: Float[Tensor, "b n d"], places: Float[Tensor, "n 2"]) -> Float[Tensor, "b n d"]:
        attention, mlp = self.residual1["fn"], self.residual2["fn"]
        normed = self.residual1["norm"](tokens)
        angles = places @ attention["rope"]["freqs"]
        query, key, value = (
            attention[name](normed).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        mixed = F.scaled_dot_product_attention(_rotate(query, angles), _rotate(key, angles), value)
        tokens = tokens + attention["proj"](mixed.transpose(1, 2).flatten(2))
        return tokens + mlp["fc2"](F.gelu(mlp["fc1"](self.residual2["norm"](tokens))))


def _rotate(channels: Float[Tensor, "b h n c"], angles: Float[Tensor, "n c"]) -> Float[Tensor, "b h n c"]:
    first, second = channels.chunk(2, dim=-1)
    return channels * angles.cos() + torch.cat([-second, first], dim=-1) * angles.sin()
