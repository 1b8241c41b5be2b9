"""Frozen first blocks of a backbone, shared by student and teacher (`backbone.train_blocks`)."""

import torch
from jaxtyping import Float
from timm.models import VisionTransformer
from torch import Tensor

from cribo.data.samples import Batch
from cribo.models import Backbone
from cribo.models.backbone import RGB, Features, Trunk
from cribo.models.masking import Mask
from cribo.objectives.config import BackboneConfig, ObjectiveOptions
from cribo.objectives.views import normalised_views
from cribo.training.timing import part

Inputs = Float[Tensor, "b c h w"] | Trunk
"""Views, or their tokens after the shared blocks."""


def shared_blocks(backbone: Backbone, config: BackboneConfig) -> int:
    """Return the number of frozen blocks shared by student and teacher.

    0 if the network cannot be split, or if images have other than three channels: then the first layer is trained.
    """
    is_split = isinstance(backbone.model, VisionTransformer) and backbone.in_chans == RGB
    return config.frozen_blocks(backbone.depth) if is_split else 0


@torch.no_grad()
def encode_frozen(
    backbone: Backbone, views: Float[Tensor, "b c h w"], config: BackboneConfig, *, mask: Mask | None = None
) -> Inputs:
    """Run the frozen blocks shared by student and teacher; return the views unchanged if there are none."""
    blocks = shared_blocks(backbone, config)
    if not blocks:
        return views
    with part("frozen blocks"):
        return backbone.encode_trunk(views, blocks, mask=mask)


@part("photometric")
def inputs_of(batch: Batch, backbone: Backbone, options: ObjectiveOptions) -> Inputs:
    """Return the views of a batch of view pairs, or their tokens after the shared blocks, computed or cached."""
    if "trunk" in batch.samples:
        side = options.views.size // backbone.patch_size
        tokens = batch["trunk"].flatten(0, 1).to(next(backbone.parameters()).dtype)
        return Trunk(tokens, (side, side), shared_blocks(backbone, options.backbone))
    return encode_frozen(backbone, normalised_views(batch, options.views, backbone), options.backbone)


def encode_with_keys(backbone: Backbone, inputs: Inputs) -> tuple[Features, Float[Tensor, "b heads t d"]]:
    """Encode views, or their tokens after the shared blocks, and return also the last block's keys, [CLS] first."""
    blocks = backbone.depth - 1
    continues = isinstance(inputs, Trunk)
    trunk = backbone.continue_trunk(inputs, blocks) if continues else backbone.encode_trunk(inputs, blocks)
    return backbone.encode_rest(trunk), backbone.head_keys(trunk)


def split_inputs(inputs: Inputs) -> list[Inputs]:
    """Return the inputs of both views of pairs, so that each view can have its own statistics in batch norms."""
    if isinstance(inputs, Trunk):
        return [inputs._replace(tokens=inputs.tokens[view::2]) for view in range(2)]
    return [inputs[view::2] for view in range(2)]


def encode(
    backbone: Backbone,
    inputs: Inputs,
    *,
    drop_path_noise: Float[Tensor, "b sites"] | None = None,
    mask: Mask | None = None,
) -> Features:
    """Encode views with the whole network, or continue from the tokens of the shared blocks.

    `mask` applies to views only; tokens are masked in `encode_frozen`.
    """
    if isinstance(inputs, Trunk):
        return backbone.encode_rest(inputs, drop_path_noise=drop_path_noise)
    return backbone(inputs, drop_path_noise=drop_path_noise, mask=mask)
