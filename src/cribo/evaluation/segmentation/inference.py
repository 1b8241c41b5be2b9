"""The classes of all pixels of an image of any size, at once or through overlapping windows."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor

from cribo.errors import InputError
from cribo.evaluation.runtime import require_least
from cribo.evaluation.segmentation.rules import InferenceMode
from cribo.models import Backbone, normalise
from cribo.retrieval.patches import window_starts

Logits = Callable[[Float[Tensor, "b 3 h w"]], Float[Tensor, "heads b c rows columns"]]
"""Gives the logits of each class on the grid of patches, by each of one or more heads, of normalised images."""

_BUDGET = 2**28  # bytes of upsampled logits that are alive beside those of the image


@dataclass(frozen=True)
class Inference:
    """How a resized image is looked at; MMSegmentation's two test modes.

    Attributes:
        mode: `whole`, or `slide`: in windows whose logits are averaged where they overlap, the last ones flush with
            the edges of the image.
        window: side of a window in pixels.
        stride: pixels from one window to the next.
        batch_size: windows in one pass.
        stretch: the logits of a padded window are stretched to the window, as in MMSegmentation; otherwise those of
            the padding are cut off, so that logits stay where they belong.

    Raises:
        ValueError: a window, stride or batch size below 1, a stride beyond the window.
    """

    mode: InferenceMode = "whole"
    window: int = 512
    stride: int = 480
    batch_size: int = 4
    stretch: bool = False

    def __post_init__(self) -> None:
        require_least(self, {"window": 1, "stride": 1, "batch_size": 1})
        if self.stride > self.window:
            raise InputError(f"stride must be at most the window ({self.window}), got {self.stride}")

    def windows(self, height: int, width: int) -> list[tuple[slice, slice]]:
        """Rows and columns of each window of an image; none is larger than the image."""
        if self.mode == "whole":
            return [(slice(0, height), slice(0, width))]
        rows, columns = (
            [slice(start, start + min(self.window, side)) for start in window_starts(side, self.window, self.stride)]
            for side in (height, width)
        )
        return [(down, across) for down in rows for across in columns]


def segment_pixels(
    pixels: UInt8[Tensor, "3 h w"], backbone: Backbone, logits: Logits, size: tuple[int, int], inference: Inference
) -> UInt8[Tensor, "heads label_h label_w"]:
    """Segment an image as files hold it: normalise it for a backbone, and call `segment_image`.

    Args:
        pixels: RGB, resized within the scale of the set, on the device of the backbone.
        backbone: of the network.
        logits: of the network.
        size: (height, width) of the result.
        inference: how the image is looked at.
    """
    image = normalise(pixels[None].float().div_(255), mean=backbone.mean, std=backbone.std)[0]
    divisor = backbone.patch_size if backbone.takes_any_size else backbone.image_size
    return segment_image(image, logits, size, inference, divisor=divisor)


@torch.no_grad()
def segment_image(
    image: Float[Tensor, "3 h w"], logits: Logits, size: tuple[int, int], inference: Inference, *, divisor: int
) -> UInt8[Tensor, "heads label_h label_w"]:
    """The class of each pixel of an image at some size, by each head.

    A window whose sides are not multiples of `divisor` is padded with zeros, which is the mean colour, at its right
    and bottom, as in MMSegmentation. Logits are upsampled to the window (`Inference.stretch`), averaged over windows,
    and upsampled to the labels' size; both bilinearly (`align_corners` False). Of equal ones the smaller class wins.
    Heads, and where there are many, classes are upsampled one after the other.

    Args:
        image: normalised, on the network's device.
        logits: of the network.
        size: (height, width) of the labels.
        inference: how the image is looked at.
        divisor: what the sides of the network's input are multiples of.

    Returns:
        classes, on the device of the image.
    """
    windows = inference.windows(image.shape[1], image.shape[2])
    height, width = (side.stop - side.start for side in windows[0])  # all are of one size
    padded = math.ceil(height / divisor) * divisor, math.ceil(width / divisor) * divisor
    coarse = []
    for start in range(0, len(windows), inference.batch_size):
        parts = torch.stack([image[:, *window] for window in windows[start : start + inference.batch_size]])
        coarse.append(logits(F.pad(parts, (0, padded[1] - width, 0, padded[0] - height))).float())
    # Of all windows at once: on the grid of patches they take little room.
    full = (height, width) if inference.stretch else padded
    return torch.stack([_classes(head, windows, full, image, size) for head in torch.cat(coarse, dim=1)])


def _classes(
    coarse: Float[Tensor, "windows c rows columns"],
    windows: list[tuple[slice, slice]],
    full: tuple[int, int],
    image: Float[Tensor, "3 h w"],
    size: tuple[int, int],
) -> UInt8[Tensor, "label_h label_w"]:
    """The class of each pixel by one head; classes are upsampled some at a time."""
    count = image.new_zeros(image.shape[1:])
    for window in windows:
        count[window] += 1
    largest = max(size[0] * size[1], full[0] * full[1], count.numel())
    best = image.new_full(size, -torch.inf)
    found = torch.zeros(size, dtype=torch.uint8, device=image.device)
    for classes in torch.arange(coarse.shape[1], device=image.device).split(max(1, _BUDGET // (8 * largest))):
        values, winners = _resized(_averaged(coarse[:, classes], windows, full, count), size).max(dim=0)
        better = values > best
        best = torch.where(better, values, best)
        found = torch.where(better, classes[winners].to(torch.uint8), found)
    return found


def _averaged(
    coarse: Float[Tensor, "windows c rows columns"],
    windows: list[tuple[slice, slice]],
    full: tuple[int, int],
    count: Float[Tensor, "h w"],
) -> Float[Tensor, "c h w"]:
    """Logits of the pixels of the image; those of a window are upsampled to `full` and cut to the window."""
    total = count.new_zeros(coarse.shape[1], *count.shape)
    for (rows, columns), part in zip(windows, coarse, strict=True):
        height, width = rows.stop - rows.start, columns.stop - columns.start
        total[:, rows, columns] += _resized(part, full)[:, :height, :width]
    return total.div_(count)


def _resized(maps: Float[Tensor, "c h w"], size: tuple[int, int]) -> Float[Tensor, "c new_h new_w"]:
    if maps.shape[1:] == size:
        return maps
    return F.interpolate(maps[None], size=size, mode="bilinear")[0]
