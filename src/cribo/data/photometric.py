"""Photometric operations of views: drawn for each image, applied to a batch on its device.

All draws come from a generator passed by the caller. Source: docs/method.md, "Views".
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from cribo.method.blocks import rows_per_block
from cribo.method.config import ViewRecipe

_LUMA = (0.299, 0.587, 0.114)  # ITU-R 601, as in PIL and torchvision
_CONTRAST, _HUE = 1, 3  # numbers of operations in `Photometric.order`


class Photometric(NamedTuple):
    """Photometric parameters of views, one entry per view; shapes (2,) for one image, (n,) for n views.

    They stay on the host: selecting the views of an operation does not synchronise with the device.

    Attributes:
        brightness, contrast, saturation: factors, 1 without jitter.
        hue: shift in turns, 0 without jitter.
        order: (n, 4) order of the jitter's operations: 0 brightness, 1 contrast, 2 saturation, 3 hue.
        greyscale: whether the view is converted to greyscale.
        sigma: standard deviation of the Gaussian blur in pixels, 0 for no blur.
        solarise: whether values above the threshold are inverted.
    """

    brightness: Float[Tensor, "*n"]
    contrast: Float[Tensor, "*n"]
    saturation: Float[Tensor, "*n"]
    hue: Float[Tensor, "*n"]
    order: Int[Tensor, "*n 4"]
    greyscale: Bool[Tensor, "*n"]
    sigma: Float[Tensor, "*n"]
    solarise: Bool[Tensor, "*n"]

    @staticmethod
    def cat(parts: "Sequence[Photometric]") -> "Photometric":
        """Concatenate the parameters of several sets of views."""
        return Photometric(*(torch.cat(values) for values in zip(*parts, strict=True)))

    def select(self, rows: Int[Tensor, " m"] | slice) -> "Photometric":
        """Return the parameters of the views `rows`."""
        return Photometric(*(values[rows] for values in self))

    def flatten(self) -> "Photometric":
        """Flatten parameters (B, V) of a batch to those of B * V views, image after image."""
        return Photometric(*(values.flatten(0, 1) for values in self))


def sample_photometric(recipe: ViewRecipe, *, generator: torch.Generator) -> Photometric:
    """Draw the photometric parameters of the two views of one image.

    Example:
        >>> sample_photometric(ViewRecipe(), generator=torch.Generator().manual_seed(0)).sigma.shape
        torch.Size([2])
    """
    # Python numbers: arithmetic on tensors of two elements is several times slower.
    u = torch.rand((10, 2), dtype=torch.float64, generator=generator).tolist()
    order = torch.stack([torch.randperm(4, generator=generator) for _ in range(2)])
    jitter = [draw < recipe.jitter for draw in u[0]]

    def drawn(draws: list[float], strength: float, neutral: float) -> Tensor:
        pairs = zip(draws, jitter, strict=True)
        return torch.tensor([neutral + strength * (2 * draw - 1) if on else neutral for draw, on in pairs])

    low, high = recipe.blur_sigma
    blur = [draw < probability for draw, probability in zip(u[6], recipe.blur, strict=True)]
    return Photometric(
        brightness=drawn(u[1], recipe.brightness, 1.0),
        contrast=drawn(u[2], recipe.contrast, 1.0),
        saturation=drawn(u[3], recipe.saturation, 1.0),
        hue=drawn(u[4], recipe.hue, 0.0),
        order=order,
        greyscale=torch.tensor([draw < recipe.greyscale for draw in u[5]]),
        sigma=torch.tensor([low + x * (high - low) if on else 0.0 for x, on in zip(u[7], blur, strict=True)]),
        solarise=torch.tensor([draw < probability for draw, probability in zip(u[8], recipe.solarise, strict=True)]),
    )


@torch.no_grad()
def apply_photometric(
    views: UInt8[Tensor, "n 3 h w"], photometric: Photometric, *, solarise_threshold: float = 128
) -> Float[Tensor, "n 3 h w"]:
    """Jitter, greyscale, blur and solarise a batch of views on its device.

    Views do not depend on the other views of the batch, apart from rounding.

    Args:
        views: (n, 3, H, W) in 0-255.
        photometric: parameters of each view.
        solarise_threshold: threshold of solarisation in grey levels, 0 to 255.

    Returns:
        (n, 3, H, W) float32 in 0-1, not normalised.

    Example:
        >>> recipe, generator = ViewRecipe(size=32), torch.Generator().manual_seed(0)
        >>> views = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
        >>> apply_photometric(views, sample_photometric(recipe, generator=generator)).shape
        torch.Size([2, 3, 32, 32])
    """
    size = rows_per_block(8 * views[0].numel(), views.device)  # up to eight tensors of this size are in use
    with torch.autocast(views.device.type, enabled=False):
        blocks = [
            _augment(block, photometric.select(slice(start, start + size)), solarise_threshold / 255)
            for start, block in zip(range(0, len(views), size), views.split(size), strict=True)
        ]
    return torch.cat(blocks)


def _on_device(tensor: Tensor, like: Tensor) -> Tensor:
    dtype = like.dtype if tensor.is_floating_point() else tensor.dtype
    return tensor.to(like.device, dtype, non_blocking=True)


def _augment(views: UInt8[Tensor, "n 3 h w"], photometric: Photometric, threshold: float) -> Float[Tensor, "n 3 h w"]:
    """Apply all operations; the host selects the views of each, so nothing synchronises with the device."""
    x = _jitter((views.contiguous().float() / 255).flatten(2), photometric).unflatten(2, views.shape[2:])
    if (blurred := photometric.sigma.nonzero().flatten()).numel():
        rows = _on_device(blurred, x)
        x.index_copy_(0, rows, _blur(x.index_select(0, rows), photometric.sigma[blurred]))
    if (solarised := photometric.solarise.nonzero().flatten()).numel():
        rows = _on_device(solarised, x)
        bright = x.index_select(0, rows)
        x.index_copy_(0, rows, torch.where(bright >= threshold, 1 - bright, bright))
    return x


def _jitter(pixels: Float[Tensor, "n 3 p"], photometric: Photometric) -> Float[Tensor, "n 3 p"]:
    """Apply the four operations of the jitter, in each view's own order, then greyscale.

    Brightness, contrast and saturation are affine in a pixel's colour: each of them is a 3 x 3 matrix and an
    offset, so one batched product applies the n-th operation of every view. Values are clipped after every operation.
    """
    matrices, contrast = (_on_device(tensor, pixels) for tensor in _jitter_matrices(photometric))
    luma = _on_device(torch.tensor(_LUMA), pixels)
    for place in range(4):
        # Contrast interpolates with the view's mean grey level; the other operations have no offset.
        offset = contrast[:, place] * (pixels.mean(dim=2) * luma).sum(dim=1)
        pixels = (matrices[:, place] @ pixels).add_(offset[:, None, None]).clamp_(0, 1)
        turned = ((photometric.order[:, place] == _HUE) & (photometric.hue != 0)).nonzero().flatten()
        if turned.numel():
            rows, turns = _on_device(turned, pixels), _on_device(photometric.hue[turned], pixels)
            pixels.index_copy_(0, rows, _shift_hue(pixels.index_select(0, rows), turns))
    return matrices[:, 4] @ pixels


def _jitter_matrices(photometric: Photometric) -> tuple[Float[Tensor, "n 5 3 3"], Float[Tensor, "n 4"]]:
    """Return the matrices of each view's four operations, in its order, and of greyscale; and the contrast offsets."""
    n = len(photometric.order)
    identity = torch.eye(3).to(photometric.saturation).expand(n, 3, 3)
    to_grey = torch.tensor(_LUMA).to(identity).expand(3, 3)
    brightness = photometric.brightness[:, None, None] * identity
    contrast = photometric.contrast[:, None, None] * identity
    saturation = torch.lerp(to_grey, identity, photometric.saturation[:, None, None])
    choices = torch.stack((brightness, contrast, saturation, identity), dim=1)  # hue is not a matrix
    ordered = choices[torch.arange(n)[:, None], photometric.order]
    greyscale = to_grey.where(photometric.greyscale[:, None, None], identity)
    offsets = (1 - photometric.contrast[:, None]).where(photometric.order == _CONTRAST, 0.0)
    return torch.cat((ordered, greyscale[:, None]), dim=1), offsets


def _shift_hue(pixels: Float[Tensor, "n 3 p"], turns: Float[Tensor, " n"]) -> Float[Tensor, "n 3 p"]:
    """Rotate the hue of the HSV model, keeping saturation and value.

    With the hue h in turns from red, 6 |h| = 1 + (green + blue - red - lowest) / chroma whichever channel is the
    highest, and h has the sign of green - blue: one formula without cases.
    """
    red, green, blue = pixels.unbind(dim=1)
    lowest = torch.minimum(red, green).minimum(blue)
    chroma = torch.maximum(red, green).maximum(blue) - lowest
    hue = (1 + (green + blue - red - lowest) / chroma.clamp_min(1e-8)).div_(6).copysign_(green - blue)
    # A channel is at its maximum within 1/6 turn of its own hue, at its minimum beyond 1/3, and linear in between.
    own_hues = torch.arange(3, dtype=pixels.dtype, device=pixels.device)[:, None] / 3
    distance = hue[:, None] + turns[:, None, None] - own_hues
    distance.sub_(distance.round()).abs_()
    height = torch.rsub(distance, 2, alpha=6).clamp_(0, 1)
    return torch.addcmul(lowest[:, None], chroma[:, None], height)


def _blur(x: Float[Tensor, "n 3 h w"], sigma: Float[Tensor, " n"]) -> Float[Tensor, "n 3 h w"]:
    """Blur with a Gaussian and mirrored borders, as a matrix product along each side; sigma is on the host."""
    height, width = x.shape[2:]
    return _blur_matrix(height, sigma, x)[:, None] @ x @ _blur_matrix(width, sigma, x)[:, None].mT


def _blur_matrix(length: int, sigma: Float[Tensor, " n"], like: Tensor) -> Float[Tensor, "n l l"]:
    """Return blur matrices; row i contains the weights of a line's pixels in blurred pixel i."""
    reach = (3 * sigma).ceil().clamp_max(length - 1)  # a line is mirrored only once
    shifts = torch.arange(-int(reach.max()), int(reach.max()) + 1)
    # In float64: the number of shifts, and so the rounding, depends on the other views, but is lost in float32.
    kernels = torch.exp(-0.5 * (shifts / sigma.double()[:, None]) ** 2).masked_fill_(shifts.abs() > reach[:, None], 0)
    kernels /= kernels.sum(dim=1, keepdim=True)
    # Beyond both ends the line is mirrored, without repeating its outermost pixel.
    last = length - 1
    sources = last - (last - (torch.arange(length)[:, None] + shifts).abs()).abs()
    shape = (len(sigma), length, len(shifts))
    kernels, sources = _on_device(kernels, like), _on_device(sources, like)
    matrix = like.new_zeros(len(sigma), length, length)
    return matrix.scatter_add_(2, sources.expand(shape), kernels[:, None].expand(shape))
