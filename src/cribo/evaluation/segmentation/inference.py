"""Segmentation of images of any size, whole or with sliding windows."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from jaxtyping import Float, Integer, UInt8
from torch import Tensor

from cribo.base.bounds import at_least, check_bounds
from cribo.base.errors import InputError
from cribo.evaluation.segmentation.rules import InferenceMode
from cribo.features.grid import window_starts
from cribo.features.memory.pixels import PixelLabels
from cribo.models import Backbone, normalise

Logits = Callable[[Float[Tensor, "b chans h w"]], Float[Tensor, "heads b c rows columns"]]
"""Returns the logits of each class on the grid of patches, for one or more heads, of normalised images."""

_BUDGET = 2**28  # maximum bytes of upsampled logits, in addition to those of the image


@dataclass(frozen=True)
class Inference:
    """Inference settings, equivalent to MMSegmentation's test modes.

    Attributes:
        mode: `whole` for whole images, or `slide` for windows whose logits are averaged where they overlap; the last
            windows are aligned with the edges of the image.
        window: side of a window in pixels.
        stride: stride of the windows in pixels.
        batch_size: number of windows per forward pass.
        stretch: whether the logits of a padded window are stretched to the window, as in MMSegmentation; otherwise
            the logits of the padding are cropped, which keeps all logits at their position.

    Raises:
        ValueError: window, stride or batch size is below 1, or the stride is larger than the window.
    """

    mode: InferenceMode = "whole"
    window: Annotated[int, at_least(1)] = 512
    stride: Annotated[int, at_least(1)] = 480
    batch_size: Annotated[int, at_least(1)] = 4
    stretch: bool = False

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.stride > self.window:
            raise InputError(f"stride must be at most the window ({self.window}), got {self.stride}")

    def windows(self, height: int, width: int) -> list[tuple[slice, slice]]:
        """Return rows and columns of each window of an image; windows are clipped to the image size."""
        if self.mode == "whole":
            return [(slice(0, height), slice(0, width))]
        rows, columns = (
            [slice(start, start + min(self.window, side)) for start in window_starts(side, self.window, self.stride)]
            for side in (height, width)
        )
        return [(down, across) for down in rows for across in columns]


def segment_pixels(
    pixels: UInt8[Tensor, "chans h w"], backbone: Backbone, logits: Logits, size: tuple[int, int], inference: Inference
) -> UInt8[Tensor, "heads label_h label_w"]:
    """Normalise an RGB image for a backbone, and segment it with `segment_image`.

    Args:
        pixels: RGB image, resized to the scale of the data set, on the device of the backbone.
        backbone: backbone of the network.
        logits: function that returns the logits of the network.
        size: (height, width) of the result.
        inference: inference settings.
    """
    image, divisor = _input_of(pixels, backbone)
    return segment_image(image, logits, size, inference, divisor=divisor)


def segment_with_softmax(
    pixels: UInt8[Tensor, "chans h w"], backbone: Backbone, logits: Logits, size: tuple[int, int], inference: Inference
) -> PixelLabels:
    """Return the classes of the first head as `segment_pixels` does, with the softmax of the averaged logits.

    Arguments are those of `segment_pixels`.
    """
    image, divisor = _input_of(pixels, backbone)
    coarse, windows, full = _coarse_logits(image, logits, inference, divisor)
    found, best = _classes(coarse[0], windows, full, image, size)
    total = image.new_full(size, -torch.inf)
    for _, values in _upsampled(coarse[0], windows, full, image, size):
        total = total.logaddexp(values.logsumexp(dim=0))
    return PixelLabels(found, (best - total).exp().clamp(0, 1))


@torch.no_grad()
def segment_image(
    image: Float[Tensor, "chans h w"], logits: Logits, size: tuple[int, int], inference: Inference, *, divisor: int
) -> UInt8[Tensor, "heads label_h label_w"]:
    """Return the class of each pixel of an image at a given size, for each head.

    Windows whose sides are not multiples of `divisor` are padded with 0, the mean colour, at the right and bottom, as
    in MMSegmentation. Logits are upsampled to the window (`Inference.stretch`), averaged over windows, and upsampled
    to the size of the labels, both bilinearly (`align_corners=False`). Ties are resolved in favour of the smaller
    class. Heads and large numbers of classes are upsampled in chunks to save memory.

    Args:
        image: normalised image on the network's device.
        logits: function that returns the logits of the network.
        size: (height, width) of the labels.
        inference: inference settings.
        divisor: divisor of the height and width of network inputs.

    Returns:
        Classes, on the device of the image.
    """
    coarse, windows, full = _coarse_logits(image, logits, inference, divisor)
    return torch.stack([_classes(head, windows, full, image, size)[0] for head in coarse])


def _input_of(pixels: UInt8[Tensor, "chans h w"], backbone: Backbone) -> tuple[Float[Tensor, "chans h w"], int]:
    """Return the normalised image, and the divisor of the sides of the network's inputs."""
    image = normalise(pixels[None].float().div_(255), mean=backbone.mean, std=backbone.std)[0]
    return image, backbone.patch_size if backbone.takes_any_size else backbone.image_size


def _coarse_logits(
    image: Float[Tensor, "chans h w"], logits: Logits, inference: Inference, divisor: int
) -> tuple[Float[Tensor, "heads windows c rows columns"], list[tuple[slice, slice]], tuple[int, int]]:
    """Return the logits of all windows, the windows, and the size to which the logits of one are upsampled."""
    windows = inference.windows(image.shape[1], image.shape[2])
    height, width = (side.stop - side.start for side in windows[0])  # all windows have the same size
    padded = math.ceil(height / divisor) * divisor, math.ceil(width / divisor) * divisor
    coarse = []
    for start in range(0, len(windows), inference.batch_size):
        parts = torch.stack([image[:, *window] for window in windows[start : start + inference.batch_size]])
        coarse.append(logits(F.pad(parts, (0, padded[1] - width, 0, padded[0] - height))).float())
    # Logits of all windows fit in memory on the grid of patches.
    full = (height, width) if inference.stretch else padded
    return torch.cat(coarse, dim=1), windows, full


def _classes(
    coarse: Float[Tensor, "windows c rows columns"],
    windows: list[tuple[slice, slice]],
    full: tuple[int, int],
    image: Float[Tensor, "chans h w"],
    size: tuple[int, int],
) -> tuple[UInt8[Tensor, "label_h label_w"], Float[Tensor, "label_h label_w"]]:
    """Return the class of each pixel for one head, and its logit."""
    best = image.new_full(size, -torch.inf)
    found = torch.zeros(size, dtype=torch.uint8, device=image.device)
    for classes, logits in _upsampled(coarse, windows, full, image, size):
        values, winners = logits.max(dim=0)
        better = values > best
        best = torch.where(better, values, best)
        found = torch.where(better, classes[winners].to(torch.uint8), found)
    return found, best


def _upsampled(
    coarse: Float[Tensor, "windows c rows columns"],
    windows: list[tuple[slice, slice]],
    full: tuple[int, int],
    image: Float[Tensor, "chans h w"],
    size: tuple[int, int],
) -> Iterator[tuple[Integer[Tensor, " part"], Float[Tensor, "part label_h label_w"]]]:
    """Yield chunks of the classes with their logits for each pixel."""
    count = image.new_zeros(image.shape[1:])
    for window in windows:
        count[window] += 1
    largest = max(size[0] * size[1], full[0] * full[1], count.numel())
    for classes in torch.arange(coarse.shape[1], device=image.device).split(max(1, _BUDGET // (8 * largest))):
        yield classes, _resized(_averaged(coarse[:, classes], windows, full, count), size)


def _averaged(
    coarse: Float[Tensor, "windows c rows columns"],
    windows: list[tuple[slice, slice]],
    full: tuple[int, int],
    count: Float[Tensor, "h w"],
) -> Float[Tensor, "chans h w"]:
    """Return the averaged logits of pixels; those of a window are upsampled to `full` and cropped to the window."""
    total = count.new_zeros(coarse.shape[1], *count.shape)
    for (rows, columns), part in zip(windows, coarse, strict=True):
        height, width = rows.stop - rows.start, columns.stop - columns.start
        total[:, rows, columns] += _resized(part, full)[:, :height, :width]
    return total.div_(count)


def _resized(maps: Float[Tensor, "chans h w"], size: tuple[int, int]) -> Float[Tensor, "chans new_h new_w"]:
    if maps.shape[1:] == size:
        return maps
    return F.interpolate(maps[None], size=size, mode="bilinear")[0]
