"""Segmenter: a backbone, and a transformer with one token per class as decoder (Strudel et al. 2021)."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from timm.layers.weight_init import trunc_normal_
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from cribo.base.bounds import at_least, below
from cribo.base.errors import InputError
from cribo.evaluation.segmentation.rules import InitialWeights
from cribo.models import Backbone
from cribo.models.backbone import DropPathNoise, replace_drop_path
from cribo.models.linear import use_onednn

HEAD_WIDTH = 64
"""Channels per attention head, in vision transformers of all sizes."""

_MLP_RATIO = 4
_STD = 0.02


class MaskTransformer(nn.Module):
    """Decoder that predicts masks of K classes from patch tokens (Segmenter, section 3.2).

    The tokens are projected to the decoder's width, and processed together with K learnable class tokens by a few
    transformer blocks. Patches and classes are then projected and normalised; a mask is the cosine similarity of each
    patch with its class, and a layer norm over the classes turns cosines into scores.

    Linear layers and class tokens are initialised from a truncated normal distribution with standard deviation 0.02,
    biases with 0. In the original, the last two projections have standard deviation D^-1/2; in MMSegmentation they are
    initialised like the others, and the joint weight of queries, keys and values is Xavier uniform.

    Args:
        in_channels: number of channels of the patch tokens.
        classes: K, at least 2, since the layer norm over a single class is always 0.
        width: D, number of channels; that of the patch tokens if None.
        layers: number of transformer blocks.
        heads: number of attention heads; one per 64 channels, at least one, if None.
        drop_path: drop path rate of the last block; the rates rise linearly from 0.
        initial_weights: initialisation of the original, `segmenter`, or of `mmsegmentation`.
        seed: seed of the initial weights.

    Raises:
        ValueError: a number is out of range, or the width is not a multiple of the heads.

    Example:
        >>> decoder = MaskTransformer(192, classes=21)
        >>> decoder(torch.zeros(2, 12, 192), (3, 4)).shape
        torch.Size([2, 21, 3, 4])
    """

    def __init__(
        self,
        in_channels: int,
        classes: int,
        *,
        width: int | None = None,
        layers: int = 2,
        heads: int | None = None,
        drop_path: float = 0.0,
        initial_weights: InitialWeights = "segmenter",
        seed: int = 0,
    ) -> None:
        super().__init__()
        width = in_channels if width is None else width
        if classes < 2:
            raise InputError(f"Segmenter requires at least 2 classes, got {classes}")
        at_least(1).check(width=width, layers=layers, heads=heads)
        (at_least(0) & below(1)).check(drop_path=drop_path)
        self.classes = classes
        self.width = width
        self.heads = _heads(width, heads)
        with torch.random.fork_rng(devices=[]):
            # torch.manual_seed would also reseed the GPU generators.
            torch.default_generator.manual_seed(seed)
            self.project_tokens = nn.Linear(in_channels, width)
            self.class_tokens = nn.Parameter(torch.empty(1, classes, width))
            self.blocks = nn.ModuleList(
                Block(width, self.heads, _MLP_RATIO, qkv_bias=True, drop_path=rate, norm_layer=nn.LayerNorm)
                for rate in torch.linspace(0, drop_path, layers).tolist()
            )
            self.norm = nn.LayerNorm(width)
            self.project_patches = nn.Linear(width, width, bias=False)
            self.project_classes = nn.Linear(width, width, bias=False)
            self.mask_norm = nn.LayerNorm(classes)
            self._initialise(initial_weights)
        self._noise = DropPathNoise()
        self.drop_path_rates = replace_drop_path(self.blocks, self._noise)
        use_onednn(self)

    @property
    def num_drop_path_sites(self) -> int:
        """Number of residual branches with a drop path rate above 0."""
        return len(self.drop_path_rates)

    def forward(
        self,
        tokens: Float[Tensor, "b n c"],
        grid: tuple[int, int],
        *,
        drop_path_noise: Float[Tensor, "b sites"] | None = None,
    ) -> Float[Tensor, "b k h w"]:
        """Return the scores of each class in each patch.

        Args:
            tokens: patch tokens, row by row.
            grid: (h, w), number of rows and columns of patches, N = h * w.
            drop_path_noise: (B, num_drop_path_sites) uniform random numbers, as in `Backbone.encode`.
        """
        x = torch.cat((self.project_tokens(tokens), self.class_tokens.expand(len(tokens), -1, -1)), dim=1)
        self._noise.value = drop_path_noise
        try:
            for block in self.blocks:
                x = block(x)
        finally:
            self._noise.value = None
        patches, classes = self.norm(x).split((tokens.shape[1], self.classes), dim=1)
        patches = F.normalize(self.project_patches(patches), dim=-1)
        classes = F.normalize(self.project_classes(classes), dim=-1)
        return self.mask_norm(patches @ classes.mT).mT.unflatten(2, grid)

    def _initialise(self, initial_weights: InitialWeights) -> None:
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.ndim > 1:  # norm weights stay 1
                trunc_normal_(parameter, std=_STD)
        if initial_weights == "segmenter":
            for projection in (self.project_patches, self.project_classes):
                nn.init.normal_(projection.weight, std=self.width**-0.5)
        else:
            for name, parameter in self.blocks.named_parameters():
                if name.endswith("qkv.weight"):
                    nn.init.xavier_uniform_(parameter)


def _heads(width: int, heads: int | None) -> int:
    if heads is None:
        heads = max(1, width // HEAD_WIDTH)
    if width % heads:
        below, above = width // heads * heads, (width // heads + 1) * heads
        near = f"{below} or {above}" if below else f"{above}"
        raise InputError(
            f"decoder.width {width} is not divisible by {heads} heads: choose decoder.heads among its divisors, or "
            f"decoder.width {near}"
        )
    return heads


class Segmenter(nn.Module):
    """Segmentation network: a backbone and a mask transformer on the tokens of its last block.

    Args:
        backbone: backbone of the tokens.
        decoder: mask transformer for tokens of the backbone's width.

    Example:
        >>> import torch
        >>> from cribo.models import build_backbone
        >>> backbone = build_backbone("resnet18", args={"channels": (8, 8, 8, 16)})
        >>> segmenter = Segmenter(backbone, MaskTransformer(backbone.embed_dim, classes=5))
        >>> segmenter(torch.zeros(1, 3, 64, 96)).shape
        torch.Size([1, 5, 2, 3])
    """

    def __init__(self, backbone: Backbone, decoder: MaskTransformer) -> None:
        super().__init__()
        self.backbone, self.decoder = backbone, decoder

    @property
    def num_drop_path_sites(self) -> int:
        """Number of residual branches with drop path, those of the backbone first."""
        return self.backbone.num_drop_path_sites + self.decoder.num_drop_path_sites

    def forward(
        self, images: Float[Tensor, "b c h w"], *, drop_path_noise: Float[Tensor, "b sites"] | None = None
    ) -> Float[Tensor, "b k rows columns"]:
        """Return the scores of each class in each patch.

        Args:
            images: images normalised with the backbone's `mean` and `std`; H and W are multiples of its `patch_size`.
            drop_path_noise: (B, num_drop_path_sites) uniform random numbers, as in `Backbone.encode`.
        """
        noise: tuple[Tensor | None, Tensor | None] = (None, None)
        if drop_path_noise is not None:
            of_backbone, of_decoder = drop_path_noise.tensor_split((self.backbone.num_drop_path_sites,), dim=1)
            noise = of_backbone, of_decoder
        features = self.backbone(images, drop_path_noise=noise[0])
        return self.decoder(features.tokens, features.grid, drop_path_noise=noise[1])
