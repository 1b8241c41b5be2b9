"""From the votes of patches to the labels of pixels: upsampling, and edges that follow those of the image."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor

from cribo.retrieval.patches import resize_image
from cribo.segmentation.settings import Refine

_BUDGET = 2**28  # bytes of the maps, and of a filter's own, that are alive at once
_GUIDED_BYTES, _GUIDED_CLASS_BYTES = 4 * 64, 4 * 32  # of a pixel: covariances of the image; of it with a class
_FITS_PER_RADIUS = 4


class PixelLabels(NamedTuple):
    """What the pixels of an image are.

    Attributes:
        labels: class of each pixel.
        confidence: score of this class, 0 to 1.
    """

    labels: UInt8[Tensor, "h w"]
    confidence: Float[Tensor, "h w"]


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
    """Label each pixel by the votes of the patches around it; of equal ones the smaller class wins.

    Votes are interpolated bilinearly. A refinement works at the size at which the image was encoded, or at its own
    where that is smaller, so that its cost does not grow with detail that no patch has seen. Classes are taken a
    few at a time, and a filter goes over the image in strips: memory is bounded whatever the number of classes.

    Args:
        votes: score of each class at each patch, 0 to 1; on the device where this shall be computed.
        image: at its own size.
        patch_size: pixels, at the size at which the image was encoded.
        refine: the filter, or `none`.
        reach: its radius, in patches.
        contrast: difference in colour (0 to 1) from which on an edge counts as one.

    Returns:
        labels and confidence on the host, at the image's own size.
    """
    height, width = image.shape[1:]
    present = (votes.amax(dim=(0, 1)) > 0).nonzero()[:, 0]  # the others win nowhere
    best = torch.full((height, width), -1.0, device=votes.device)
    labels = torch.zeros((height, width), dtype=torch.uint8, device=votes.device)
    working = min(height, votes.shape[0] * patch_size), min(width, votes.shape[1] * patch_size)
    sharpen = None
    if refine != "none":
        guide = resize_image(image, working, "bicubic").to(votes.device).float().div_(255)[None]
        sharpen = _FILTERS[refine](guide, radius(reach, votes.shape[0], votes.shape[1], working), contrast)
    for classes in present.split(max(1, _BUDGET // (8 * height * width))):
        maps = votes[..., classes].permute(2, 0, 1)[None]
        if sharpen is not None:
            maps = sharpen(_resized(maps, working)).clamp_(0, 1)
        values, winners = _resized(maps, (height, width))[0].max(dim=0)
        better = values > best
        best[better] = values[better]
        labels[better] = classes[winners[better]].to(torch.uint8)
    return PixelLabels(labels.cpu(), best.clamp_(0, 1).cpu())


def radius(reach: float, rows: int, columns: int, size: tuple[int, int]) -> int:
    """Pixels that a reach in patches is in an image of some (height, width); 1 at least, and within the image."""
    pixels = max(1, round(reach * min(size[0] / rows, size[1] / columns)))
    return min(pixels, min(size) - 1)


def _resized(maps: Float[Tensor, "1 c h w"], size: tuple[int, int]) -> Float[Tensor, "1 c new_h new_w"]:
    if maps.shape[2:] == size:
        return maps
    return F.interpolate(maps, size=size, mode="bilinear")


def _guided(guide: Tensor, radius: int, contrast: float) -> Callable[[Tensor], Tensor]:
    """Locally linear in the image's colours (He et al. 2013), fitted over squares of the radius.

    The fits are computed on every so-many-th pixel and interpolated, since they hardly differ from one to the next
    ("Fast guided filter", He and Sun 2015).
    """
    from kornia.filters import guided_blur

    height, width = guide.shape[2:]
    step = max(1, radius // _FITS_PER_RADIUS)
    radius -= radius % step
    # With whole steps, strips are taken apart at the same pixels as the image is.
    margin = (0, -width % step, 0, -height % step)
    guide = F.pad(guide, margin, mode="replicate")

    def blur(part: Tensor, image: Tensor) -> Tensor:
        return guided_blur(image, part, 2 * radius + 1, contrast**2, subsample=step, separable=True)

    def sharpen(maps: Tensor) -> Tensor:
        row_bytes = guide.shape[3] * (_GUIDED_BYTES + _GUIDED_CLASS_BYTES * maps.shape[1] // step**2)
        # The output is a mean over squares of fits over squares, and interpolated.
        halo = 2 * radius + 2 * step
        padded = F.pad(maps, margin, mode="replicate")
        blurred = _in_strips(blur, padded, guide, halo=halo, rows=_BUDGET // row_bytes, step=step)
        return blurred[:, :, :height, :width]

    return sharpen


def _bilateral(guide: Tensor, radius: int, contrast: float) -> Callable[[Tensor], Tensor]:
    """Means over pixels that are near in place and alike in colour."""
    from kornia.filters import joint_bilateral_blur

    side, space = 2 * radius + 1, max(1.0, radius / 2)

    def blur(part: Tensor, image: Tensor) -> Tensor:
        return joint_bilateral_blur(part, image, side, contrast, (space, space))

    def sharpen(maps: Tensor) -> Tensor:
        row_bytes = guide.shape[3] * 4 * side**2 * (maps.shape[1] + guide.shape[1] + 2)
        return _in_strips(blur, maps, guide, halo=radius, rows=_BUDGET // row_bytes, step=1)

    return sharpen


_FILTERS = {"guided": _guided, "bilateral": _bilateral}


def _in_strips(
    blur: Callable[[Tensor, Tensor], Tensor], maps: Tensor, guide: Tensor, *, halo: int, rows: int, step: int
) -> Float[Tensor, "1 c h w"]:
    """A filter over strips of about so many rows, each with what it sees of its neighbours; as over the whole.

    Strips begin at multiples of `step`.
    """
    height = maps.shape[2]
    # Strips that are lower than their halo would be computed more often than they are used.
    rows = -(-max(rows, halo) // step) * step
    parts = []
    for top in range(0, height, rows):
        bottom = min(height, top + rows)
        first, last = max(0, top - halo), min(height, bottom + halo)
        blurred = blur(maps[:, :, first:last], guide[:, :, first:last])
        parts.append(blurred[:, :, top - first : bottom - first])
    return torch.cat(parts, dim=2)
