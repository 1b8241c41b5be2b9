"""Encoding of images into grids of patch features, as a whole or in overlapping windows."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor

from cribo.base.errors import InputError, MissingBlocks
from cribo.features.config import ProbeSettings
from cribo.features.encoder import Encoder, map_by_size
from cribo.features.grid import window_starts
from cribo.features.probes.fitting import block_sets
from cribo.features.windows import hann_weights
from cribo.models import Backbone


def probe_encoder(backbone: Backbone, blocks: Sequence[int] | None = None) -> Encoder:
    """Create an encoder of these blocks and the last one.

    By default, these are all blocks that probes may use (`block_sets`).

    An adapted vision transformer ends at its best block, with a whitening as readout. Its last four blocks are encoded,
    without the readout, which is meant for nearest neighbours in large memories: with two to eight examples, ridge
    regression on these blocks was 2 to 4 points better.

    Args:
        backbone: the backbone, on the device where it runs.
        blocks: numbers from 1 to the backbone's depth.

    Raises:
        MissingBlocks: the backbone does not have these blocks.
    """
    depth = backbone.depth
    if depth == 1:
        if blocks is not None and set(blocks) != {1}:
            raise MissingBlocks(f"{backbone.name} only provides features of its last block: omit blocks")
        return Encoder(backbone)
    if backbone.readout is not None:
        blocks = blocks or range(max(1, depth - 3), depth + 1)
    if blocks is None:
        return Encoder(backbone, blocks=[block for chosen in block_sets(depth) for block in chosen])
    if max(blocks) > depth:
        raise MissingBlocks(f"blocks must be at most {depth}, the depth of {backbone.name}, got {max(blocks)}")
    return Encoder(backbone, blocks=[*blocks, depth])


@torch.no_grad()
def encode_grids(
    encoder: Encoder,
    images: Sequence[UInt8[Tensor, "c h w"]],
    settings: ProbeSettings,
    *,
    batch_size: int,
    blocks: Sequence[int] | None = None,
) -> list[Float[Tensor, "rows columns l d"]]:
    """Compute the features of images of any sizes, of unit length in each block, on the encoder's device.

    Args:
        encoder: the encoder.
        images: RGB images; those of equal size are encoded as batches.
        settings: settings for resizing and windows.
        batch_size: number of images or windows to encode at once.
        blocks: numbers of the L blocks to return; by default all blocks of the encoder.

    Raises:
        ValueError: window or stride is not a multiple of the patch size, or the encoder's features are not finite or do
            not match the number of patches.
    """
    settings.check(encoder.patch_size)
    chosen = [encoder.blocks.index(block) for block in blocks or encoder.blocks]

    def unit(pixels: UInt8[Tensor, "b c h w"]) -> Float[Tensor, "b rows columns l d"]:
        features = encoder.grids(pixels)
        if not features.isfinite().all():
            raise InputError("the encoder's features are not finite: check its weights, or use float32")
        return unit_blocks(features, len(encoder.blocks), chosen)

    def encode(batch: list[Tensor]) -> Tensor:
        scales = [settings.factor(*image.shape[1:]) for image in batch]
        resized = [encoder.resized(image, scale=scale) for image, scale in zip(batch, scales, strict=True)]
        return _in_windows(unit, torch.stack(resized), settings, encoder.patch_size, batch_size)

    def size(image: Tensor) -> tuple[int, int]:
        height, width = image.shape[1:]
        return encoder.size(height, width, scale=settings.factor(height, width))

    return map_by_size(encode, images, size, lambda _: batch_size)


def unit_blocks(features: Float[Tensor, "*n ld"], blocks: int, chosen: Sequence[int]) -> Float[Tensor, "*n l_chosen d"]:
    """Return the features of some blocks, each of unit length.

    Args:
        features: features of L blocks, concatenated.
        blocks: L.
        chosen: indices of the blocks to return.
    """
    return F.normalize(features.unflatten(-1, (blocks, -1))[..., list(chosen), :], dim=-1)


def _in_windows(
    unit: Callable[[UInt8[Tensor, "b c h w"]], Float[Tensor, "b rows columns l d"]],
    pixels: UInt8[Tensor, "b c h w"],
    settings: ProbeSettings,
    patch: int,
    batch_size: int,
) -> Float[Tensor, "b rows columns l d"]:
    """Encode images of equal size as a whole, or in windows whose features are averaged by Hann weights."""
    rows, columns = pixels.shape[2] // patch, pixels.shape[3] // patch
    windows = settings.steps(patch)
    if windows is None or (rows <= windows[0] and columns <= windows[0]):
        return unit(pixels)
    side, step = windows
    places = [(top, left) for top in window_starts(rows, side, step) for left in window_starts(columns, side, step)]
    crops = [(image, top, left) for image in range(len(pixels)) for top, left in places]
    height, width = min(side, rows), min(side, columns)
    weight = hann_weights(height, width)[..., None]
    total = torch.zeros(0)
    for start in range(0, len(crops), batch_size):
        part = crops[start : start + batch_size]
        cut = [
            pixels[image, :, top * patch : (top + height) * patch, left * patch : (left + width) * patch]
            for image, top, left in part
        ]
        features = unit(torch.stack(cut))
        features = features * weight.to(features.device)
        if not total.numel():
            total = features.new_zeros(len(pixels), rows, columns, *features.shape[3:])
        for (image, top, left), own in zip(part, features, strict=True):
            total[image, top : top + height, left : left + width] += own
    return F.normalize(total, dim=-1)
