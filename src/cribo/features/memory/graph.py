"""A memory as a traceable module, from the pixels of an image to its labels.

It calls the functions with which the memory labels images. Only the sizes, which the memory computes from numbers, are
computed from tensors here: the numbers of a traced graph are those of the traced image.
"""

from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from cribo.base.errors import InputError
from cribo.data.labelled.label_maps import IGNORE_INDEX
from cribo.features.config import ENLARGED, LARGEST, LEAST
from cribo.features.memory.memory import SegmentationMemory
from cribo.features.memory.pixels import STEPS, bilateral, strongest
from cribo.features.probes.encoding import unit_blocks

MOST_PIXELS = 2**15
"""Limit on the height and width of images, and on rows and columns of patches."""

_CLASSES = 16  # classes whose maps are computed at once


class Sizes(NamedTuple):
    """Sizes derived from the size of an image.

    Attributes:
        grid: rows and columns of patches.
        working: (height, width) of the filter.
        spacing: distance between the samples of the filter in pixels.
    """

    grid: tuple[int, int]
    working: tuple[int, int]
    spacing: int


class MemoryGraph(nn.Module):
    """Maps one image (height, width, 3) in uint8, of any size, to labels in uint8 and confidence in float32.

    Args:
        memory: a memory on the host; its present examples and settings are used.

    Raises:
        DataError: the memory is empty.
        InputError: the memory encodes images in windows, whose number depends on the image, or has an encoder from a
            function.
    """

    def __init__(self, memory: SegmentationMemory) -> None:
        super().__init__()
        if memory.settings.window is not None:
            raise InputError(
                f"the memory encodes images in windows of {memory.settings.window} pixels, whose number depends on the "
                "image: create a memory without --window for graphs, such as with --scale 1"
            )
        self.backbone = memory.encoder.backbone  # registers the parameters
        self._encoder, self._settings, self._probe = memory.encoder, memory.settings, memory.fitted()
        self._chosen = [memory.encoder.blocks.index(block) for block in self._probe.choice.probe.blocks]
        present = torch.tensor([label for label, count in enumerate(memory.holding) if count])
        self._groups = present.split(_CLASSES)

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        """Return labels and confidence of the pixels; 255 below the minimum confidence."""
        encoder, settings = self._encoder, self._settings
        size, pixels = image.shape[:2], image.permute(2, 0, 1)
        sizes = self.sizes(*size)
        rows, columns = sizes.grid
        resized = _resized(pixels, (rows * encoder.patch_size, columns * encoder.patch_size))
        features = unit_blocks(encoder.tokens(resized[None])[0].float(), len(encoder.blocks), self._chosen)
        votes = self._probe.predict_at_once(self._probe.rows(features)).unflatten(0, sizes.grid)
        sharpen = None
        if settings.refine == "bilateral":
            sharpen = bilateral(_resized(pixels, sizes.working), sizes.spacing, settings.contrast)
        labels, confidence = strongest(votes, self._groups, (size[0], size[1]), sizes.working, sharpen)
        return labels.masked_fill(confidence < settings.min_confidence, IGNORE_INDEX), confidence

    def sizes(self, height: int, width: int) -> Sizes:
        """Return the sizes for an image, by the rules of `encoding_size`, `label_pixels`, `radius` and `spacing`."""
        patch, settings, fixed = self._encoder.patch_size, self._settings, self._encoder.image_size
        image = torch.stack([torch.scalar_tensor(side, dtype=torch.float64) for side in (height, width)])
        if fixed is not None:
            grid = torch.full((2,), fixed // patch, dtype=torch.float64)
        else:
            grid = ((self._factor(image.min()) * image).round() / patch - 0.5).ceil().clamp(min=1)
        working = torch.minimum(image, grid * patch)
        radius = (settings.reach * (working / grid).min()).round().clamp(min=1)
        spacing = (radius / STEPS).round().clamp(min=1)
        rows, columns = (fixed // patch, fixed // patch) if fixed is not None else _numbers(grid)
        height, width = _numbers(working)
        return Sizes((rows, columns), (height, width), *_numbers(spacing[None]))

    def _factor(self, shorter: Float[Tensor, ""]) -> Float[Tensor, ""]:
        """Return the factor of `ProbeSettings.factor`."""
        if self._settings.size is not None:
            return self._settings.size / shorter
        if self._settings.scale is not None:
            return torch.full((), self._settings.scale, dtype=torch.float64)
        return torch.minimum((LEAST / shorter).clamp(1.0, ENLARGED), LARGEST / shorter)


def _numbers(sizes: Float[Tensor, " n"]) -> list[int]:
    """Convert sizes to integers that tracing keeps symbolic."""
    numbers = [cast(int, size.item()) for size in sizes.long().unbind()]
    for number in numbers:
        torch._check(number >= 1)
        torch._check(number <= MOST_PIXELS)
    return numbers


def _resized(pixels: UInt8[Tensor, "c h w"], size: tuple[int, int]) -> Float[Tensor, "c new_h new_w"]:
    """Resize in 8 bits, as `resize_image`; the result is in 0-1."""
    return F.interpolate(pixels[None], size=size, mode="bicubic", antialias=True)[0].float() / 255
