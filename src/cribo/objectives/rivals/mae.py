"""MAE (He et al. 2022): a vision transformer encodes the visible patches, a small decoder predicts the others."""

from functools import partial
from typing import Annotated

import torch
from jaxtyping import Float, Int
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from cribo.base.bounds import at_least
from cribo.base.errors import ConfigError
from cribo.data.samples import Batch, Sample
from cribo.models import Backbone, normalise
from cribo.models.config import CompileMode
from cribo.objectives.base import Columns, Objective, Output, Setting, Step
from cribo.objectives.crops import CropSampler, CropSet
from cribo.objectives.mlp import seeded_weights
from cribo.objectives.rivals.dropping import accept_drops, gather_tokens


class MaskedView(CropSampler):
    """Transform of an image into one `view` without photometric operations, for any random numbers."""

    def photometric(self, generator: torch.Generator) -> Sample:
        """Draw nothing."""
        return {}


class Decoder(nn.Module):
    """Transformer that inserts a mask token for each masked patch and predicts the pixels of all patches.

    Args:
        embed_dim: D, channels of the encoder's tokens.
        grid: (h, w) patches of a view.
        pixels: P, values per patch.
        prefix: number of tokens before the patches: 1 for [CLS], or 0.
        dim, depth, heads: width, number of blocks and attention heads.
    """

    def __init__(
        self, embed_dim: int, grid: tuple[int, int], pixels: int, *, prefix: int, dim: int, depth: int, heads: int
    ) -> None:
        super().__init__()
        self.prefix = prefix
        self.embed = nn.Linear(embed_dim, dim)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, dim))
        nn.init.normal_(self.mask_token, std=0.02)
        self.register_buffer("positions", sincos_positions(grid, dim, prefix=prefix), persistent=False)
        self.blocks = nn.Sequential(*(Block(dim, heads, qkv_bias=True) for _ in range(depth)))
        self.norm = nn.LayerNorm(dim)
        for norm in (module for module in self.modules() if isinstance(module, nn.LayerNorm)):
            norm.eps = 1e-6
        self.predict = nn.Linear(dim, pixels)

    def forward(self, seen: Float[Tensor, "b s d"], order: Int[Tensor, "b n"]) -> Float[Tensor, "b n p"]:
        """Predict the pixels of all patches, in grid order.

        Args:
            seen: (B, s, D) the encoder's prefix tokens, and those of the first patches of `order`.
            order: (B, N) permutation of the patches.
        """
        prefix, patches = self.embed(seen).tensor_split([self.prefix], dim=1)
        masks = self.mask_token.to(patches.dtype).expand(len(patches), order.shape[1] - patches.shape[1], -1)
        patches = gather_tokens(torch.cat((patches, masks), dim=1), order.argsort(dim=1))
        tokens = torch.cat((prefix, patches), dim=1)
        positions = self.get_buffer("positions").to(tokens.dtype)
        return self.predict(self.norm(self.blocks(tokens + positions)))[:, self.prefix :]


class MAE(Objective):
    """Masked autoencoding of pixels. Reads `views` (area, aspect, flip, size), `backbone` and `optim`.

    Without pretrained weights, the encoder has fixed sine and cosine positions, as the decoder has.

    Args:
        setting: the run.
        mask_ratio: share of the patches that are masked.
        decoder_dim: width of the decoder.
        decoder_depth: number of blocks of the decoder.
        decoder_heads: attention heads of the decoder.
        normalise_patches: whether to normalise each patch's target pixels by their mean and variance.

    Raises:
        ConfigError: the backbone cannot drop patches, or a value out of range.
    """

    columns = Columns(labels={"mae": "MAE, masked patches"})

    def __init__(
        self,
        setting: Setting,
        *,
        mask_ratio: float = 0.75,
        decoder_dim: Annotated[int, at_least(1)] = 512,
        decoder_depth: int = 8,
        decoder_heads: Annotated[int, at_least(1)] = 16,
        normalise_patches: bool = True,
    ) -> None:
        super().__init__(setting)
        options = setting.options
        self.backbone = setting.build_backbone()
        self.keep = accept_drops(self.backbone, "MAE")
        side = options.views.size // self.backbone.patch_size
        self.patches, self.normalise_patches = side * side, normalise_patches
        self.seen = round(self.patches * (1 - mask_ratio))
        if not 0 < self.seen < self.patches:
            raise ConfigError(
                f"objective.args.mask_ratio must leave 1 to {self.patches - 1} of {self.patches} patches visible, got "
                f"{mask_ratio}"
            )
        if decoder_dim % 4 or decoder_dim % decoder_heads:
            raise ConfigError(
                f"objective.args.decoder_dim must be a multiple of 4 and of decoder_heads {decoder_heads}, got "
                f"{decoder_dim}"
            )
        if options.backbone.pretrained is None:
            _fix_positions(self.backbone, (side, side))
        with seeded_weights(options.seed):
            self.decoder = Decoder(
                self.backbone.embed_dim,
                (side, side),
                self.backbone.in_chans * self.backbone.patch_size**2,
                prefix=int(self.backbone.has_class_token),
                dim=decoder_dim,
                depth=decoder_depth,
                heads=decoder_heads,
            )

    def samples(self) -> MaskedView:
        """Return the transform to one view and a random `order` (B, N) of its patches, visible ones first."""
        order = partial(torch.randperm, self.patches)
        return MaskedView(CropSet("view", self.options.views, 1), drop_path_sites=0, numbers={"order": order})

    def exported(self) -> Backbone:
        """Return the encoder."""
        return self.backbone

    def compile_parts(self, mode: CompileMode) -> None:
        """Compile the decoder only: the encoder's visible patches change with every batch."""
        self.decoder.compile(mode=mode)

    def forward(self, batch: Batch, step: Step) -> Output:
        """Compute the mean squared error over the masked patches."""
        order: Int[Tensor, "b n"] = batch["order"]
        pixels = batch["view"][:, 0].float() / 255
        images = normalise(pixels, mean=self.backbone.mean, std=self.backbone.std)
        with self.keep.only(order[:, : self.seen]):
            features = self.backbone(images)
        seen = [features.global_token[:, None]] if self.backbone.has_class_token else []
        predicted = self.decoder(torch.cat([*seen, features.tokens], dim=1), order)
        targets = patchify(images.to(predicted.dtype), self.backbone.patch_size)
        if self.normalise_patches:
            variance, mean = torch.var_mean(targets, dim=-1, keepdim=True)
            targets = (targets - mean) / (variance + 1e-6).sqrt()
        return Output({"mae": masked_error(predicted, targets, order[:, self.seen :])})


def masked_error(
    predicted: Float[Tensor, "b n p"], targets: Float[Tensor, "b n p"], masked: Int[Tensor, "b m"]
) -> Float[Tensor, ""]:
    """Mean squared error over the pixels of the masked patches."""
    return (gather_tokens(predicted, masked) - gather_tokens(targets, masked)).float().square().mean()


def patchify(images: Float[Tensor, "b c h w"], size: int) -> Float[Tensor, "b n p"]:
    """Return the pixels of each patch in row-major order: (B, N, C * size * size), channels last."""
    patches = images.unflatten(3, (-1, size)).unflatten(2, (-1, size))  # (B, C, h, size, w, size)
    return patches.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)


def _fix_positions(backbone: Backbone, grid: tuple[int, int]) -> None:
    """Replace the position embedding of a vision transformer, if it has one, by fixed positions; [CLS] has 0."""
    positions = backbone.model.pos_embed
    if positions is None:
        return
    if positions.shape[2] % 4:
        raise ConfigError(f"MAE needs a width that is a multiple of 4 for its positions, got {positions.shape[2]}")
    prefix = positions.shape[1] - grid[0] * grid[1]
    with torch.no_grad():
        positions.copy_(sincos_positions(grid, positions.shape[2], prefix=prefix))
    positions.requires_grad_(False)


def sincos_positions(grid: tuple[int, int], dim: int, *, prefix: int = 0) -> Float[Tensor, "1 m d"]:
    """Fixed sine and cosine position embeddings: half of the channels for the row, half for the column.

    Args:
        grid: (h, w) patches.
        dim: channels, a multiple of 4.
        prefix: number of tokens before the patches, whose positions are 0.

    Source: MAE, appendix A.1, after Vaswani et al. 2017.
    """
    frequencies = 10_000.0 ** (-torch.arange(dim // 4) / (dim // 4))
    rows, columns = torch.meshgrid(torch.arange(grid[0]), torch.arange(grid[1]), indexing="ij")
    angles = [place.flatten()[:, None] * frequencies for place in (rows, columns)]
    positions = torch.cat([part for angle in angles for part in (angle.sin(), angle.cos())], dim=1)
    return torch.cat((positions.new_zeros(prefix, dim), positions))[None]
