"""Encoding of images into grids of patch features, as a whole or in overlapping windows."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor

from cribo.base.errors import InputError, MissingBlocks
from cribo.features.config import ProbeSettings
from cribo.features.encoder import PatchEncoder, backbone_encoder, blocks_encoder, map_by_size
from cribo.features.grid import window_starts
from cribo.features.probes.fitting import block_sets
from cribo.models import Backbone


def probe_encoder(backbone: Backbone, blocks: Sequence[int] | None = None) -> PatchEncoder:
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
        return backbone_encoder(backbone)
    if backbone.readout is not None:
        blocks = blocks or range(max(1, depth - 3), depth + 1)
    if blocks is None:
        return blocks_encoder(backbone, [block for chosen in block_sets(depth) for block in chosen])
    if max(blocks) > depth:
        raise MissingBlocks(f"blocks must be at most {depth}, the depth of {backbone.name}, got {max(blocks)}")
    return blocks_encoder(backbone, [*blocks, depth])


class GridEncoder:
    """Encodes images into grids of patch features, normalised for each block.

    Args:
        encoder: the encoder, on `device`.
        settings: settings for resizing and windows.
        device: device of the encoder.
        batch_size: number of images or windows to encode at once.

    Raises:
        ValueError: window or stride is not a multiple of the patch size, or the batch size is below 1.
    """

    def __init__(
        self, encoder: PatchEncoder, settings: ProbeSettings, device: torch.device | str, batch_size: int
    ) -> None:
        if batch_size < 1:
            raise InputError(f"batch_size must be >= 1, got {batch_size}")
        settings.check(encoder.patch_size)
        self.encoder = encoder
        self.settings = settings
        self.device = torch.device(device)
        self.batch_size = batch_size

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Return the (height, width) in pixels of an encoded image, multiples of the patch size."""
        return self.encoder.size(height, width, scale=self.settings.factor(height, width))

    @torch.no_grad()
    def encode(
        self, images: Sequence[UInt8[Tensor, "3 h w"]], *, blocks: Sequence[int] | None = None
    ) -> list[Float[Tensor, "rows columns l d"]]:
        """Compute the features of images of any sizes, on the device, in batches of equal size.

        Args:
            images: RGB images.
            blocks: numbers of the L blocks to return; by default all blocks of the encoder.

        Raises:
            ValueError: the encoder's features are not finite or do not match the number of patches.
        """
        chosen = [self.encoder.blocks.index(block) for block in blocks or self.encoder.blocks]

        def encode(batch: list[Tensor]) -> Tensor:
            scales = [self.settings.factor(*image.shape[1:]) for image in batch]
            resized = [self.encoder.resized(image, scale=scale) for image, scale in zip(batch, scales, strict=True)]
            return self._of_one_size(torch.stack(resized), chosen)

        return map_by_size(encode, images, lambda image: self.size(*image.shape[1:]), lambda _: self.batch_size)

    def _of_one_size(self, pixels: UInt8[Tensor, "b 3 h w"], chosen: list[int]) -> Float[Tensor, "b rows columns l d"]:
        patch = self.encoder.patch_size
        rows, columns = pixels.shape[2] // patch, pixels.shape[3] // patch
        windows = self.settings.steps(patch)
        if windows is None or (rows <= windows[0] and columns <= windows[0]):
            return self._unit_features(pixels, chosen)
        side, step = windows
        places = [(top, left) for top in window_starts(rows, side, step) for left in window_starts(columns, side, step)]
        crops = [(image, top, left) for image in range(len(pixels)) for top, left in places]
        height, width = min(side, rows), min(side, columns)
        weight = _hann(height)[:, None, None, None] * _hann(width)[:, None, None]
        weight = weight.to(self.device)
        total = torch.zeros(0)
        for start in range(0, len(crops), self.batch_size):
            part = crops[start : start + self.batch_size]
            cut = [
                pixels[image, :, top * patch : (top + height) * patch, left * patch : (left + width) * patch]
                for image, top, left in part
            ]
            features = self._unit_features(torch.stack(cut), chosen) * weight
            if not total.numel():
                total = features.new_zeros(len(pixels), rows, columns, *features.shape[3:])
            for (image, top, left), own in zip(part, features, strict=True):
                total[image, top : top + height, left : left + width] += own
        return F.normalize(total, dim=-1)

    def _unit_features(
        self, pixels: UInt8[Tensor, "b 3 h w"], chosen: list[int]
    ) -> Float[Tensor, "b rows columns l d"]:
        features = self.encoder.grids(pixels, self.device)
        if not features.isfinite().all():
            raise InputError("the encoder's features are not finite: check its weights, or use float32")
        features = features.unflatten(-1, (len(self.encoder.blocks), -1))
        return F.normalize(features[..., chosen, :], dim=-1)


def _hann(length: int) -> Float[Tensor, " n"]:
    """Return non-zero Hann weights: patches near the border of a window have the least context."""
    return torch.hann_window(length + 2, periodic=False)[1:-1]
