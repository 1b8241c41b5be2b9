"""Labels of pixels from votes of patches: upsampling, refinement at image edges, and writing."""

from collections.abc import Callable
from pathlib import Path
from typing import IO, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor

from cribo.features.memory.settings import Refine
from cribo.features.patches import resize_image

_BUDGET = 2**28  # maximum size of the maps computed at once, in bytes
_STEPS = 2  # samples of the filter on each side of a pixel
_DEVIATION = 0.75  # standard deviation of the spatial weights, relative to the radius


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
    image: UInt8[Tensor, "3 h w"],
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
        contrast: sum of the differences of the three channels (0 to 1 each) at which the weight of a pixel falls to
            e^-1/2.
    """
    height, width = image.shape[1:]
    present = (votes.amax(dim=(0, 1)) > 0).nonzero()[:, 0]  # skip classes without votes
    best = torch.full((height, width), -1.0, device=votes.device)
    labels = torch.zeros((height, width), dtype=torch.uint8, device=votes.device)
    working = min(height, votes.shape[0] * patch_size), min(width, votes.shape[1] * patch_size)
    sharpen = None
    if refine == "bilateral":
        guide = resize_image(image, working, "bicubic").to(votes.device).float().div_(255)
        sharpen = _bilateral(guide, radius(reach, votes.shape[0], votes.shape[1], working), contrast)
    for classes in present.split(max(1, _BUDGET // (16 * height * width))):
        maps = votes[..., classes].permute(2, 0, 1)[None]
        if sharpen is not None:
            maps = sharpen(_resized(maps, working)[0])[None]
        values, winners = _resized(maps, (height, width))[0].max(dim=0)
        better = values > best
        best[better] = values[better]
        labels[better] = classes[winners[better]].to(torch.uint8)
    return PixelLabels(labels.cpu(), best.clamp_(0, 1).cpu())


def radius(reach: float, rows: int, columns: int, size: tuple[int, int]) -> int:
    """Convert a radius from patches to pixels of an image of (height, width) `size`; at least 1."""
    return max(1, round(reach * min(size[0] / rows, size[1] / columns)))


def _resized(maps: Float[Tensor, "1 c h w"], size: tuple[int, int]) -> Float[Tensor, "1 c new_h new_w"]:
    if maps.shape[2:] == size:
        return maps
    return F.interpolate(maps, size=size, mode="bilinear")


def _bilateral(
    guide: Float[Tensor, "3 h w"], radius: int, contrast: float
) -> Callable[[Float[Tensor, "c h w"]], Float[Tensor, "c h w"]]:
    """Return a joint bilateral filter (Petschnigg et al. 2004).

    It averages nearby pixels of similar colour. The maps are smooth, so 5 x 5 pixels, evenly spaced over the square
    window, are sufficient.
    """
    height, width = guide.shape[1:]
    step = max(1, round(radius / _STEPS))
    pad, deviation = _STEPS * step, _DEVIATION * _STEPS * step
    places = range(0, 2 * pad + 1, step)

    def shifted(padded: Tensor, y: int, x: int) -> Tensor:
        return padded[:, y : y + height, x : x + width]

    def widened(maps: Tensor) -> Tensor:
        return F.pad(maps[None], (pad, pad, pad, pad), mode="replicate")[0]

    guides = widened(guide)

    def filtered(maps: Tensor) -> Tensor:
        padded, total = widened(maps), torch.zeros_like(maps)
        weights = maps.new_zeros(height, width)
        for y in places:
            for x in places:
                distance = ((y - pad) ** 2 + (x - pad) ** 2) / (2 * deviation**2)
                colour = (shifted(guides, y, x) - guide).abs_().sum(dim=0)
                weight = colour.square_().div_(-2 * contrast**2).sub_(distance).exp_()
                total.addcmul_(shifted(padded, y, x), weight)
                weights += weight
        return total.div_(weights)

    return filtered
