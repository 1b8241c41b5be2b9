"""Labels of pixels from votes of patches: upsampling, refinement at image edges, and writing."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, UInt8
from PIL import Image
from torch import Tensor

from cribo.features.memory.settings import Refine
from cribo.features.patches import resize_image

_BUDGET = 2**28  # maximum size of the maps computed at once, in bytes
STEPS = 2
"""Number of samples of the filter on each side of a pixel."""

_DEVIATION = 0.75  # standard deviation of the spatial weights, relative to the radius


Sharpen = Callable[[Float[Tensor, "chans h w"]], Float[Tensor, "chans h w"]]
"""A filter of maps of scores, guided by an image."""


class PixelLabels(NamedTuple):
    """Class of each pixel of an image, and its score, 0 to 1."""

    labels: UInt8[Tensor, "h w"]
    confidence: Float[Tensor, "h w"]


def write_confidence(confidence: Float[Tensor, "h w"], file: Path | IO[bytes]) -> None:
    """Write probabilities, 0 to 1, as a grey PNG of 0 to 255."""
    Image.fromarray((confidence * 255).round().byte().numpy()).save(file, "PNG")


@torch.no_grad()
def label_pixels(
    votes: Float[Tensor, "rows columns c"],
    image: UInt8[Tensor, "chans h w"],
    *,
    patch_size: int,
    refine: Refine = "none",
    reach: float = 1.0,
    contrast: float = 0.1,
) -> PixelLabels:
    """Label each pixel by bilinearly interpolated votes of patches; the results are on the CPU.

    Ties go to the smaller class. The filter runs at the size at which the image was encoded, or at the original size if
    that is smaller, because the votes contain no finer detail. Classes are processed in groups, so that memory is
    bounded for any number of classes.

    Args:
        votes: score of each class at each patch, 0 to 1; determines the device of the computation.
        image: the image at its original size.
        patch_size: patch size in pixels of the encoded image.
        refine: the filter, or `none`.
        reach: radius of the filter, in patches.
        contrast: three times the mean difference of the channels (0 to 1 each) at which the weight of a pixel falls to
            e^-1/2; with three channels, the sum of their differences.
    """
    height, width = image.shape[1:]
    present = (votes.amax(dim=(0, 1)) > 0).nonzero()[:, 0]  # skip classes without votes
    working = min(height, votes.shape[0] * patch_size), min(width, votes.shape[1] * patch_size)
    sharpen = None
    if refine == "bilateral":
        guide = resize_image(image, working, "bicubic").to(votes.device).float().div_(255)
        sharpen = bilateral(guide, spacing(radius(reach, votes.shape[0], votes.shape[1], working)), contrast)
    groups = present.split(max(1, _BUDGET // (16 * height * width)))
    found = strongest(votes, groups, (height, width), working, sharpen)
    return PixelLabels(found.labels.cpu(), found.confidence.cpu())


def strongest(
    votes: Float[Tensor, "rows columns c"],
    groups: Iterable[Int[Tensor, " k"]],
    size: tuple[int, int],
    working: tuple[int, int],
    sharpen: Sharpen | None,
) -> PixelLabels:
    """Label each pixel by the class with the largest vote, on the device of the votes; ties go to the smaller class.

    Args:
        votes: score of each class at each patch, 0 to 1.
        groups: classes to compare, ascending, in groups whose maps are computed at once.
        size: (height, width) of the result.
        working: (height, width) of the filter.
        sharpen: the filter; None for none.
    """
    best = torch.full(size, -1.0, device=votes.device)
    labels = torch.zeros(size, dtype=torch.uint8, device=votes.device)
    for classes in groups:
        maps = votes[..., classes].permute(2, 0, 1)
        if sharpen is not None:
            maps = sharpen(_resized(maps, working))
        values, winners = _resized(maps, size).max(dim=0)
        better = values > best
        best = torch.where(better, values, best)
        labels = torch.where(better, classes[winners].to(torch.uint8), labels)
    return PixelLabels(labels, best.clamp(0, 1))


def radius(reach: float, rows: int, columns: int, size: tuple[int, int]) -> int:
    """Convert a radius from patches to pixels of an image of (height, width) `size`; at least 1."""
    return max(1, round(reach * min(size[0] / rows, size[1] / columns)))


def spacing(radius: int) -> int:
    """Return the distance in pixels between the samples of a filter of this radius; at least 1."""
    return max(1, round(radius / STEPS))


def _resized(maps: Float[Tensor, "chans h w"], size: tuple[int, int]) -> Float[Tensor, "chans new_h new_w"]:
    # A comparison of sizes would fix those of a traced graph; maps of this size are not changed.
    return F.interpolate(maps[None], size=size, mode="bilinear")[0]


def bilateral(guide: Float[Tensor, "chans h w"], spacing: int, contrast: float) -> Sharpen:
    """Return a joint bilateral filter (Petschnigg et al. 2004).

    It averages nearby pixels of similar colour. The maps are smooth, so 5 x 5 pixels, evenly spaced over the square
    window, are sufficient.

    Args:
        guide: image in 0-1.
        spacing: distance between the samples in pixels.
        contrast: see `label_pixels`.
    """
    height, width = guide.shape[1:]
    pad, deviation = STEPS * spacing, _DEVIATION * STEPS
    per_channel = 3 / len(guide)
    places = range(-STEPS, STEPS + 1)

    def shifted(padded: Tensor, y: int, x: int) -> Tensor:
        top, left = pad + y * spacing, pad + x * spacing
        return padded[:, top : top + height, left : left + width]

    def widened(maps: Tensor) -> Tensor:
        return F.pad(maps[None], (pad, pad, pad, pad), mode="replicate")[0]

    guides = widened(guide)

    def filtered(maps: Tensor) -> Tensor:
        padded, total = widened(maps), torch.zeros_like(maps)
        weights = maps.new_zeros(height, width)
        for y in places:
            for x in places:
                distance = (y**2 + x**2) / (2 * deviation**2)
                colour = (shifted(guides, y, x) - guide).abs_().sum(dim=0)
                colour = colour if per_channel == 1 else colour.mul_(per_channel)
                weight = colour.square_().div_(-2 * contrast**2).sub_(distance).exp_()
                total.addcmul_(shifted(padded, y, x), weight)
                weights += weight
        return total.div_(weights)

    return filtered
