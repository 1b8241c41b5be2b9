"""The classes of all pixels of an image of any size, at once or through windows that overlap."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor

from cribo.evaluation.segmentation.modes import Inference

Logits = Callable[[Float[Tensor, "b 3 h w"]], Float[Tensor, "heads b c rows columns"]]
"""Gives the logits of each class on the grid of patches, by each of one or more heads, of normalised images."""

_BUDGET = 2**28  # bytes of upsampled logits that are alive beside those of the image


@torch.no_grad()
def segment_image(
    image: Float[Tensor, "3 h w"], logits: Logits, size: tuple[int, int], inference: Inference, *, divisor: int
) -> UInt8[Tensor, "heads label_h label_w"]:
    """The class of each pixel of an image at some size, by each head.

    A window whose sides are no multiples of `divisor` is filled with zeros, which is the mean colour, at its right
    and bottom, as MMSegmentation does it. Logits are upsampled to the window (the filled part is cut off), averaged
    over windows, and upsampled to the labels' size; both bilinearly (`align_corners` False). Of equal ones the
    smaller class wins. Heads, and where there are many, classes are upsampled one after the other.

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
    return torch.stack([_classes(head, windows, padded, image, size) for head in torch.cat(coarse, dim=1)])


def _classes(
    coarse: Float[Tensor, "windows c rows columns"],
    windows: list[tuple[slice, slice]],
    padded: tuple[int, int],
    image: Float[Tensor, "3 h w"],
    size: tuple[int, int],
) -> UInt8[Tensor, "label_h label_w"]:
    """The class of each pixel by one head; classes are upsampled some at a time."""
    count = image.new_zeros(image.shape[1:])
    for window in windows:
        count[window] += 1
    largest = max(size[0] * size[1], padded[0] * padded[1], count.numel())
    best = image.new_full(size, -torch.inf)
    found = torch.zeros(size, dtype=torch.uint8, device=image.device)
    for classes in torch.arange(coarse.shape[1], device=image.device).split(max(1, _BUDGET // (8 * largest))):
        values, winners = _resized(_averaged(coarse[:, classes], windows, padded, count), size).max(dim=0)
        better = values > best
        best = torch.where(better, values, best)
        found = torch.where(better, classes[winners].to(torch.uint8), found)
    return found


def _averaged(
    coarse: Float[Tensor, "windows c rows columns"],
    windows: list[tuple[slice, slice]],
    padded: tuple[int, int],
    count: Float[Tensor, "h w"],
) -> Float[Tensor, "c h w"]:
    """Logits of the pixels of the image that the network has seen."""
    total = count.new_zeros(coarse.shape[1], *count.shape)
    for (rows, columns), part in zip(windows, coarse, strict=True):
        height, width = rows.stop - rows.start, columns.stop - columns.start
        total[:, rows, columns] += _resized(part, padded)[:, :height, :width]
    return total.div_(count)


def _resized(maps: Float[Tensor, "c h w"], size: tuple[int, int]) -> Float[Tensor, "c new_h new_w"]:
    if maps.shape[1:] == size:
        return maps
    return F.interpolate(maps[None], size=size, mode="bilinear")[0]
