"""Photometric operations of views: drawn for each image, applied to a batch on its device.

All draws come from a generator passed by the caller. Source: docs/method.md, "Views".

Images of other than three channels have neither hue nor saturation, and no greyscale: brightness, contrast, blur and
solarisation are those of RGB, with the mean over the channels as grey level. The draws are the same.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from cribo.method.blocks import rows_per_block
from cribo.method.config import ViewRecipe
from cribo.method.precision import tf32_under_autocast

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


class _Operations(NamedTuple):
    """Operations of n views, as numbers for their pixels.

    Attributes:
        matrices: (n, 5, 3, 3) products with the colours: the jitter's operations in the view's order, then greyscale;
            (n, 5, 1, 1) factors of all channels if they are not RGB.
        contrast: (n, 4) share of the view's mean grey level that each operation of the jitter adds.
        turns: (n, 4) shift of the hue after each of them, in turns.
        sigma: (n,) standard deviation of the blur in pixels, 0 for none.
        solarise: (n,) whether the view is solarised.
    """

    matrices: Float[Tensor, "n 5 k k"]
    contrast: Float[Tensor, "n 4"]
    turns: Float[Tensor, "n 4"]
    sigma: Float[Tensor, " n"]
    solarise: Bool[Tensor, " n"]


@torch.no_grad()
@tf32_under_autocast
def apply_photometric(
    views: UInt8[Tensor, "n c h w"], photometric: Photometric, *, solarise_threshold: float = 128
) -> Float[Tensor, "n c h w"]:
    """Jitter, greyscale, blur and solarise a batch of views on its device.

    Views do not depend on the other views of the batch, apart from rounding.

    Args:
        views: (n, C, H, W) in 0-255; RGB if C is 3.
        photometric: parameters of each view.
        solarise_threshold: threshold of solarisation in grey levels, 0 to 255.

    Returns:
        (n, C, H, W) float32 in 0-1, not normalised.

    Example:
        >>> recipe, generator = ViewRecipe(size=32), torch.Generator().manual_seed(0)
        >>> views = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
        >>> apply_photometric(views, sample_photometric(recipe, generator=generator)).shape
        torch.Size([2, 3, 32, 32])
    """
    operations, threshold = _operations(photometric, is_rgb=views.shape[1] == 3), solarise_threshold / 255
    with torch.autocast(views.device.type, enabled=False):
        if _compiled is not None:
            return _compiled(views, _Operations(*(_on_device(each, views) for each in operations)), threshold)
        size = rows_per_block(8 * views[0].numel(), views.device)  # up to eight tensors of this size are in use
        blocks = []
        for start, block in zip(range(0, len(views), size), views.split(size), strict=True):
            blocks.append(_augment(block, _Operations(*(part[start : start + size] for part in operations)), threshold))
    return torch.cat(blocks)


_compiled: Callable[..., Tensor] | None = None


def compile_photometric(on: bool = True) -> None:
    """Compile the operations for all later calls in this process, or stop using the compiled ones.

    A whole batch then takes a few kernels, while a GPU otherwise waits for the launches of hundreds. Every operation is
    computed for all views, so that on a CPU this is slower.
    """
    global _compiled
    _compiled = torch.compile(_augment) if on else None


def _on_device(tensor: Tensor, like: Tensor) -> Tensor:
    return tensor.to(like.device, non_blocking=True)


def _operations(photometric: Photometric, *, is_rgb: bool) -> _Operations:
    """Return the operations of views, on the host: selecting the views of one does not synchronise with the device."""
    n, order, dtype = len(photometric.order), photometric.order, photometric.saturation.dtype
    size = 3 if is_rgb else 1  # factors serve any number of channels
    identity = torch.eye(size, dtype=dtype).expand(n, size, size)
    to_grey = torch.tensor(_LUMA, dtype=dtype).expand(3, 3) if is_rgb else identity
    brightness = photometric.brightness[:, None, None] * identity
    contrast = photometric.contrast[:, None, None] * identity
    saturation = torch.lerp(to_grey, identity, photometric.saturation[:, None, None])
    choices = torch.stack((brightness, contrast, saturation, identity), dim=1)  # hue is not a matrix
    ordered = choices[torch.arange(n)[:, None], order]
    greyscale = to_grey.where(photometric.greyscale[:, None, None], identity)
    return _Operations(
        matrices=torch.cat((ordered, greyscale[:, None]), dim=1),
        contrast=(1 - photometric.contrast[:, None]).where(order == _CONTRAST, 0.0),
        turns=photometric.hue[:, None].where((order == _HUE) & is_rgb, 0.0),
        sigma=photometric.sigma,
        solarise=photometric.solarise,
    )


def _augment(views: UInt8[Tensor, "n c h w"], operations: _Operations, threshold: float) -> Float[Tensor, "n c h w"]:
    """Apply all operations, with parameters on the host, or on the device in compiled code."""
    x = _jitter((views.contiguous().float() / 255).flatten(2), operations).unflatten(2, views.shape[2:])
    x = _where(operations.sigma > 0, x, _blur, operations.sigma)
    return _where(operations.solarise, x, lambda bright: torch.where(bright >= threshold, 1 - bright, bright))


def _where(
    chosen: Bool[Tensor, " n"], x: Float[Tensor, "n c *size"], operation: Callable[..., Tensor], *parameters: Tensor
) -> Float[Tensor, "n c *size"]:
    """Apply an operation to some of the views, in place; compiled, to all of them, to keep those of the chosen."""
    if torch.compiler.is_compiling():
        return operation(x, *parameters).where(chosen.view(-1, *[1] * (x.ndim - 1)), x)
    if (rows := chosen.nonzero().flatten()).numel():
        on_device = _on_device(rows, x)
        parts = [_on_device(each[rows], x) for each in parameters]
        x.index_copy_(0, on_device, operation(x.index_select(0, on_device), *parts))
    return x


def _jitter(pixels: Float[Tensor, "n c p"], operations: _Operations) -> Float[Tensor, "n c p"]:
    """Apply the four operations of the jitter, in each view's own order, then greyscale.

    Brightness, contrast and saturation are affine in a pixel's colour: each of them is a 3 x 3 matrix, or a factor,
    and an offset, so one batched product applies the n-th operation of every view. Values are clipped after every
    operation.
    """
    matrices, contrast = _on_device(operations.matrices, pixels), _on_device(operations.contrast, pixels)
    for place in range(4):
        # Contrast interpolates with the view's mean grey level; the other operations have no offset.
        grey = _grey(pixels.mean(dim=2))
        pixels = _product(matrices[:, place], pixels).add_((contrast[:, place] * grey)[:, None, None]).clamp_(0, 1)
        turns = operations.turns[:, place]
        pixels = _where(turns != 0, pixels, _shift_hue, turns)
    return _product(matrices[:, 4], pixels)


def _grey(colours: Float[Tensor, "n c"]) -> Float[Tensor, " n"]:
    if colours.shape[1] != 3:
        return colours.mean(dim=1)
    red, green, blue = colours.unbind(dim=1)
    return _LUMA[0] * red + _LUMA[1] * green + _LUMA[2] * blue


def _product(matrices: Float[Tensor, "n k k"], pixels: Float[Tensor, "n c p"]) -> Float[Tensor, "n c p"]:
    if matrices.shape[-1] == 1:
        return matrices * pixels
    if torch.compiler.is_compiling():  # part of a kernel, unlike a product of matrices
        return (matrices[..., None] * pixels[:, None]).sum(dim=2)
    return matrices @ pixels


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


def _blur(x: Float[Tensor, "n c h w"], sigma: Float[Tensor, " n"]) -> Float[Tensor, "n c h w"]:
    """Blur with a Gaussian and mirrored borders, as a matrix product along each side."""
    height, width = x.shape[2:]
    down = _blur_matrix(height, sigma)
    along = down if width == height else _blur_matrix(width, sigma)
    return down[:, None] @ x @ along[:, None].mT


def _blur_matrix(length: int, sigma: Float[Tensor, " n"]) -> Float[Tensor, "n l l"]:
    """Return blur matrices; row i contains the weights of a line's pixels in blurred pixel i. No blur if sigma is 0."""
    deviation = sigma.clamp_min(torch.finfo(sigma.dtype).tiny)[:, None]
    last = length - 1
    reach = (3 * deviation).ceil().clamp_max(last)  # a line is mirrored only once
    distance = torch.arange(2 * length, device=sigma.device)
    kernel = torch.exp(-0.5 * (distance / deviation) ** 2).where(distance <= reach, 0.0)
    row, pixel = distance[:length, None], distance[:length]
    matrix = kernel[:, (pixel - row).abs()]
    # Beyond both ends the line is mirrored, without repeating its outermost pixel.
    matrix[:, :, 1:] += kernel[:, pixel[1:] + row]
    matrix[:, :, :last] += kernel[:, 2 * last - pixel[:last] - row]
    return matrix / matrix.sum(dim=2, keepdim=True)
