"""Two views of an image, with the place of every patch in the source image (METHOD section 1).

Geometry happens per image where it is decoded; photometric work happens per batch on the device. Every draw
comes from a generator that the caller gives, so that a view depends on nothing but its key.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from cribo.method.transfer import send

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

_LUMA = (0.299, 0.587, 0.114)  # ITU-R 601, as in PIL and torchvision
# The operations of the jitter; all but the hue's are affine in a pixel's colour.
_BRIGHTNESS, _CONTRAST, _SATURATION, _HUE = range(4)
_CROP_ATTEMPTS = 10


@dataclass(frozen=True)
class ViewRecipe:
    """How views are drawn. Pairs of numbers are (view 1, view 2) or (low, high), as named.

    Attributes:
        size: side of a view in pixels.
        area: (low, high) share of the image that a crop covers.
        aspect: (low, high) width / height of a crop.
        flip: probability of a horizontal flip.
        jitter: probability of colour jitter.
        brightness: the factor is drawn from 1 - x to 1 + x.
        contrast: likewise.
        saturation: likewise.
        hue: shift drawn from -x to x, in turns.
        greyscale: probability.
        blur: (view 1, view 2) probability of Gaussian blur.
        blur_sigma: (low, high) standard deviation of the blur in pixels of the view.
        solarise: (view 1, view 2) probability.
        solarise_threshold: in grey levels, 0 to 255.

    Raises:
        ValueError: a value out of range, when made.
    """

    size: int = 224
    area: tuple[float, float] = (0.25, 1.0)
    aspect: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.5
    jitter: float = 0.8
    brightness: float = 0.4
    contrast: float = 0.4
    saturation: float = 0.2
    hue: float = 0.1
    greyscale: float = 0.2
    blur: tuple[float, float] = (1.0, 0.1)
    blur_sigma: tuple[float, float] = (0.1, 2.0)
    solarise: tuple[float, float] = (0.0, 0.2)
    solarise_threshold: float = 128

    def __post_init__(self) -> None:
        def check(name: str, low: float, high: float) -> None:
            value = getattr(self, name)
            numbers = value if isinstance(value, (tuple, list)) else (value,)
            if not all(low <= number <= high for number in numbers):
                raise ValueError(f"{name} must be between {low:g} and {high:g}, got {value}")

        check("size", 1, 8192)
        for name in (
            "flip",
            "jitter",
            "greyscale",
            "blur",
            "solarise",
            "brightness",
            "contrast",
            "saturation",
        ):
            check(name, 0, 1)
        check("area", 1e-4, 1)
        check("aspect", 0.01, 100)
        check("hue", 0, 0.5)
        check("blur_sigma", 0.01, 100)
        check("solarise_threshold", 0, 255)
        for name in ("area", "aspect", "blur_sigma"):
            low, high = getattr(self, name)
            if low > high:
                raise ValueError(f"{name} must go from low to high, got ({low}, {high})")


@dataclass(frozen=True)
class Crops:
    """The crop boxes and flips of the two views of one image.

    Attributes:
        boxes: (2, 4) top, left, height, width in whole pixels of the source image.
        flips: (2,) whether the view is mirrored left to right.
    """

    boxes: Int[Tensor, "2 4"]
    flips: Bool[Tensor, " 2"]


def sample_crops(height: int, width: int, recipe: ViewRecipe, *, generator: torch.Generator) -> Crops:
    """Draw the crops of both views of an image: random area and aspect, then a place, then a flip.

    Where no crop of the drawn shapes fits in ten attempts, the largest centred one of an allowed aspect.

    Example:
        >>> crops = sample_crops(480, 640, ViewRecipe(), generator=torch.Generator().manual_seed(0))
        >>> crops.boxes.shape
        torch.Size([2, 4])
    """
    boxes, flips = [], []
    for _ in range(2):
        draws = torch.rand(2 * _CROP_ATTEMPTS + 3, dtype=torch.float64, generator=generator).tolist()
        size = _crop_size(height, width, recipe, draws)
        if size is None:
            boxes.append(_central_crop(height, width, recipe))
        else:
            top, left = int(draws[-3] * (height - size[0] + 1)), int(draws[-2] * (width - size[1] + 1))
            boxes.append((top, left, *size))
        flips.append(draws[-1] < recipe.flip)
    return Crops(torch.tensor(boxes), torch.tensor(flips))


def cut_views(image: UInt8[Tensor, "3 h w"], crops: Crops, size: int) -> UInt8[Tensor, "2 3 s s"]:
    """Cut both views out of an image: crop, bicubic resize (antialiased), flip; 8 bits a channel."""
    # Imported here: it takes as long as PyTorch itself, and most who import the method cut no views.
    from torchvision.transforms.v2 import InterpolationMode
    from torchvision.transforms.v2 import functional as TF

    # A crop that keeps its image's strides has no layout that the resize knows: it would unpack it channel by channel.
    layout = torch.channels_last if image.stride(0) == 1 else torch.contiguous_format
    views = []
    for (top, left, height, width), flip in zip(crops.boxes.tolist(), crops.flips.tolist(), strict=True):
        crop = image[None, :, top : top + height, left : left + width].contiguous(memory_format=layout)
        view = TF.resize(crop, [size, size], interpolation=InterpolationMode.BICUBIC, antialias=True)
        views.append(view.flip(-1) if flip else view)
    return torch.cat(views)


REDUCTIONS = (8, 4, 2)
"""By how much a JPEG can be reduced while it is decoded; `largest_reduction` chooses."""


def largest_reduction(crops: Crops, size: int) -> int:
    """By how much an image may be reduced before its views are cut: 8, 4, 2, or 1 for not at all.

    The largest by which each crop still has at least `size` pixels along both sides, so that no view is
    enlarged from fewer pixels than it would have been.

    Example:
        >>> crops = Crops(torch.tensor([[0, 0, 900, 1000], [0, 0, 1500, 2000]]), torch.tensor([False, True]))
        >>> largest_reduction(crops, 224), largest_reduction(crops, 256)
        (4, 2)
    """
    for reduction in REDUCTIONS:
        if int(reduced_crops(crops, reduction).boxes[:, 2:].min()) >= size:
            return reduction
    return 1


def reduced_crops(crops: Crops, reduction: int) -> Crops:
    """The crops in pixels of the image reduced: of each, the reduced pixels that lie inside it whole.

    Their boxes times `reduction` are what is cut, exactly, in pixels of the source image: from these come the
    patches' coordinates. Each side moves inwards, by less than one reduced pixel.

    Example:
        >>> crops = Crops(torch.tensor([[3, 10, 902, 1000], [0, 0, 1500, 2000]]), torch.tensor([False, True]))
        >>> reduced_crops(crops, 4).boxes.tolist()
        [[1, 3, 225, 249], [0, 0, 375, 500]]
    """
    if reduction == 1:
        return crops
    top_left, height_width = crops.boxes.split(2, dim=-1)
    first = (top_left + reduction - 1) // reduction
    end = (top_left + height_width) // reduction
    return Crops(torch.cat((first, end - first), dim=-1), crops.flips)


def patch_coordinates(
    boxes: Int[Tensor, "*views 4"], flips: Bool[Tensor, "*views"], grid: tuple[int, int]
) -> Float[Tensor, "*views n 2"]:
    """Centres (x, y) of a view's patches in pixels of the source image, row by row.

    A closed formula of the crop box and the flip. Pixel i covers [i, i + 1), so its centre lies at i + 0.5.

    Args:
        boxes: (..., 4) top, left, height, width of the crops.
        flips: (...) whether the view is mirrored.
        grid: (h, w) patches of a view; N = h * w.

    Returns:
        (..., N, 2) float32.

    Example:
        >>> box, flip = torch.tensor([10, 20, 64, 64]), torch.tensor(False)
        >>> patch_coordinates(box, flip, (2, 2)).tolist()
        [[36.0, 26.0], [68.0, 26.0], [36.0, 58.0], [68.0, 58.0]]
    """
    rows, columns = grid
    top, left, height, width = boxes.float()[..., None].unbind(dim=-2)
    y = (torch.arange(rows, device=boxes.device) + 0.5) / rows
    x = (torch.arange(columns, device=boxes.device) + 0.5) / columns
    x = torch.where(flips[..., None], 1 - x, x)
    x, y = left + x * width, top + y * height
    x = x[..., None, :].expand(*x.shape[:-1], rows, columns)
    y = y[..., :, None].expand(*y.shape[:-1], rows, columns)
    return torch.stack((x, y), dim=-1).flatten(-3, -2)


@dataclass(frozen=True)
class Photometric:
    """Photometric parameters of views, one entry a view; shapes (2,) for one image, (n,) for a batch.

    They stay on the host: which views an operation concerns is read there, without a synchronisation.

    Attributes:
        brightness, contrast, saturation: factors, 1 where there is no jitter.
        hue: shift in turns, 0 where there is no jitter.
        order: (n, 4) order of the jitter's operations: 0 brightness, 1 contrast, 2 saturation, 3 hue.
        greyscale: whether the view loses its colours.
        sigma: of the Gaussian blur in pixels, 0 for none.
        solarise: whether values above the threshold are inverted.
    """

    brightness: Float[Tensor, " n"]
    contrast: Float[Tensor, " n"]
    saturation: Float[Tensor, " n"]
    hue: Float[Tensor, " n"]
    order: Int[Tensor, "n 4"]
    greyscale: Bool[Tensor, " n"]
    sigma: Float[Tensor, " n"]
    solarise: Bool[Tensor, " n"]

    @staticmethod
    def cat(parts: "Sequence[Photometric]") -> "Photometric":
        """Join the parameters of several sets of views."""
        return Photometric(
            **{f.name: torch.cat([getattr(part, f.name) for part in parts]) for f in fields(Photometric)}
        )

    def select(self, rows: Int[Tensor, " m"] | slice) -> "Photometric":
        """The parameters of some of the views."""
        return Photometric(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})


def sample_photometric(recipe: ViewRecipe, *, generator: torch.Generator) -> Photometric:
    """Draw the photometric parameters of the two views of one image.

    Example:
        >>> sample_photometric(ViewRecipe(), generator=torch.Generator().manual_seed(0)).sigma.shape
        torch.Size([2])
    """
    # Plain numbers: on tensors of two numbers the same arithmetic takes several times as long.
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
    views: UInt8[Tensor, "n 3 h w"],
    photometric: Photometric,
    *,
    solarise_threshold: float = 128,
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
) -> Float[Tensor, "n 3 h w"]:
    """Jitter, greyscale, blur, solarise and normalise a batch of views on its device.

    On the CPU one view at a time, which then stays in the cache, and with the operations that this view needs
    alone; elsewhere in batches, without waiting for the device. The two differ by rounding.

    Example:
        >>> recipe, generator = ViewRecipe(size=32), torch.Generator().manual_seed(0)
        >>> views = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
        >>> apply_photometric(views, sample_photometric(recipe, generator=generator)).shape
        torch.Size([2, 3, 32, 32])
    """
    threshold = solarise_threshold / 255
    with torch.autocast(views.device.type, enabled=False):
        if views.device.type == "cpu":
            x = _augment_one_by_one(views, photometric, threshold)
        else:
            x = _augment_together(views, photometric, threshold)
        return x.sub_(_channels(mean, x)).div_(_channels(std, x))


def normalise(
    images: Float[Tensor, "n 3 h w"],
    *,
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
) -> Float[Tensor, "n 3 h w"]:
    """Subtract the channels' mean and divide by their standard deviation; images in 0-1."""
    return (images - _channels(mean, images)) / _channels(std, images)


def _crop_size(height: int, width: int, recipe: ViewRecipe, draws: list[float]) -> tuple[int, int] | None:
    low, high = (math.log(ratio) for ratio in recipe.aspect)
    for attempt in range(_CROP_ATTEMPTS):
        area = height * width * (recipe.area[0] + draws[2 * attempt] * (recipe.area[1] - recipe.area[0]))
        aspect = math.exp(low + draws[2 * attempt + 1] * (high - low))
        crop_width, crop_height = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < crop_width <= width and 0 < crop_height <= height:
            return crop_height, crop_width
    return None


def _central_crop(height: int, width: int, recipe: ViewRecipe) -> tuple[int, int, int, int]:
    aspect = min(max(width / height, recipe.aspect[0]), recipe.aspect[1])
    crop_width = max(1, min(width, round(height * aspect)))
    crop_height = max(1, min(height, round(width / aspect)))
    return (height - crop_height) // 2, (width - crop_width) // 2, crop_height, crop_width


def _channels(values: Sequence[float], like: Tensor) -> Float[Tensor, "3 1 1"]:
    return send(torch.tensor(values, dtype=like.dtype), like.device)[:, None, None]


# ------------------------------------------------------------------------------------------- one view at a time


def _augment_one_by_one(
    views: UInt8[Tensor, "n 3 h w"], photometric: Photometric, threshold: float
) -> Float[Tensor, "n 3 h w"]:
    brightness, contrast, saturation = (
        values.tolist() for values in (photometric.brightness, photometric.contrast, photometric.saturation)
    )
    hue, order, sigma = photometric.hue.tolist(), photometric.order.tolist(), photometric.sigma.tolist()
    greyscale, solarise = photometric.greyscale.tolist(), photometric.solarise.tolist()
    augmented = torch.empty(views.shape, dtype=torch.float32)
    for row, x in enumerate(augmented):
        torch.div(views[row], 255, out=x)
        for operation in order[row]:
            if operation == _BRIGHTNESS and brightness[row] != 1:
                x.mul_(brightness[row]).clamp_(0, 1)
            elif operation == _CONTRAST and contrast[row] != 1:
                mean = sum(share * value for share, value in zip(_LUMA, x.mean(dim=(1, 2)).tolist(), strict=True))
                x.mul_(contrast[row]).add_((1 - contrast[row]) * mean).clamp_(0, 1)
            elif operation == _SATURATION and saturation[row] != 1:
                x.lerp_(_grey(x).expand_as(x), 1 - saturation[row]).clamp_(0, 1)
            elif operation == _HUE and hue[row] != 0:
                _shift_hue(x, hue[row])
        if greyscale[row]:
            x.copy_(_grey(x).expand_as(x))
        if sigma[row] > 0:
            _blur(x, sigma[row])
        if solarise[row]:
            torch.where(x >= threshold, 1 - x, x, out=x)
    return augmented


def _grey(x: Float[Tensor, "3 h w"]) -> Float[Tensor, "1 h w"]:
    return (_LUMA[0] * x[:1]).add_(x[1:2], alpha=_LUMA[1]).add_(x[2:], alpha=_LUMA[2])


def _blur(x: Float[Tensor, "3 h w"], sigma: float) -> None:
    """Gaussian blur in place, with mirrored borders: sums of shifted rows, then of shifted columns."""
    weights = _kernel(sigma)
    # The other side of a line of pixels is as far as a mirror shows.
    down, across = (min(len(weights), length) - 1 for length in x.shape[1:])
    padded = F.pad(x, (across, across, down, down), mode="reflect")
    rows = _sum_of_shifted(padded, weights[: down + 1], dim=1, length=x.shape[1])
    x.copy_(_sum_of_shifted(rows, weights[: across + 1], dim=2, length=x.shape[2]))


def _kernel(sigma: float) -> list[float]:
    """Weights of a Gaussian at distances 0, 1, ... up to three standard deviations, not normalised."""
    return [math.exp(-0.5 * (step / sigma) ** 2) for step in range(math.ceil(3 * sigma) + 1)]


def _sum_of_shifted(x: Tensor, weights: list[float], *, dim: int, length: int) -> Tensor:
    """Weighted mean of the parts of `length` along `dim`, the weights being those of the distance from its middle."""
    radius = len(weights) - 1
    total = weights[0] + 2 * sum(weights[1:])
    mean = x.narrow(dim, radius, length) * (weights[0] / total)
    for step in range(1, radius + 1):
        share = weights[step] / total
        mean.add_(x.narrow(dim, radius - step, length), alpha=share)
        mean.add_(x.narrow(dim, radius + step, length), alpha=share)
    return mean


# --------------------------------------------------------------------------------------------- all views at once


def _augment_together(
    views: UInt8[Tensor, "n 3 h w"], photometric: Photometric, threshold: float
) -> Float[Tensor, "n 3 h w"]:
    device = views.device
    x = views.contiguous() / 255  # in one piece: the jitter works in place on a flat view of it
    _jitter(x.flatten(2), photometric)
    if (blurred := photometric.sigma.nonzero().flatten()).numel():
        rows = send(blurred, device)
        x.index_copy_(0, rows, _blur_by_matrices(x.index_select(0, rows), send(photometric.sigma[blurred], device)))
    if (solarised := photometric.solarise.nonzero().flatten()).numel():
        rows = send(solarised, device)
        bright = x.index_select(0, rows)
        x.index_copy_(0, rows, torch.where(bright >= threshold, 1 - bright, bright))
    return x


def _jitter(pixels: Float[Tensor, "n 3 p"], photometric: Photometric) -> None:
    """The four operations of the jitter in place, in each view's own order, then greyscale.

    Brightness, contrast and saturation are affine in a pixel's colour, so whichever a view has in a place of
    its order is one 3 x 3 matrix: one product serves the batch. Values are clipped after every operation.
    """
    device = pixels.device
    matrices, shares, to_grey = (send(tensor, device) for tensor in _jitter_matrices(photometric))
    luma = send(torch.tensor(_LUMA), device)
    for place in range(4):
        # Contrast moves towards the mean grey level of the view; the other operations add nothing.
        offset = shares[:, place] * (pixels.mean(dim=2) @ luma)
        pixels.copy_(torch.baddbmm(offset[:, None, None], matrices[:, place], pixels).clamp_(0, 1))
        turned = ((photometric.order[:, place] == _HUE) & (photometric.hue != 0)).nonzero().flatten()
        if turned.numel():
            rows = send(turned, device)
            some = pixels.index_select(0, rows)
            _shift_hue(some[..., None], send(photometric.hue[turned], device)[:, None, None, None])
            pixels.index_copy_(0, rows, some)
    pixels.copy_(torch.bmm(to_grey, pixels))


def _jitter_matrices(
    photometric: Photometric,
) -> tuple[Float[Tensor, "n 4 3 3"], Float[Tensor, "n 4"], Float[Tensor, "n 3 3"]]:
    """For each place of a view's order its matrix and its share of the mean grey level; then the greyscale's matrix."""
    n = photometric.order.shape[0]
    identity = torch.eye(3).expand(n, 3, 3)
    to_grey = torch.tensor(_LUMA).expand(3, 3)
    brightness = photometric.brightness[:, None, None] * identity
    contrast = photometric.contrast[:, None, None] * identity
    saturation = photometric.saturation[:, None, None] * (identity - to_grey) + to_grey
    choices = torch.stack((brightness, contrast, saturation, identity), dim=1)
    matrices = choices[torch.arange(n)[:, None], photometric.order]
    shares = torch.where(photometric.order == _CONTRAST, 1 - photometric.contrast[:, None], 0.0)
    return matrices, shares, torch.where(photometric.greyscale[:, None, None], to_grey, identity)


def _blur_by_matrices(x: Float[Tensor, "n 3 h w"], sigma: Float[Tensor, " n"]) -> Float[Tensor, "n 3 h w"]:
    """Separable blur as two batched matrix products, with mirrored borders inside the matrices."""
    n, _, height, width = x.shape
    along_width = _blur_matrix(width, sigma)
    along_height = along_width if height == width else _blur_matrix(height, sigma)
    x = torch.bmm(x.reshape(n, 3 * height, width), along_width.mT).view(n, 3, height, width)
    return torch.matmul(along_height[:, None], x)


def _blur_matrix(length: int, sigma: Float[Tensor, " n"]) -> Float[Tensor, "n l l"]:
    """Row i holds the weights with which the pixels of a line make up its blurred pixel i."""
    place = torch.arange(length, device=sigma.device)
    sigma = sigma[:, None, None]
    # Each view's own reach, and no farther than a mirror shows.
    reach = (3 * sigma).ceil().clamp_max(length - 1)

    def weights(distance: Int[Tensor, "l l"]) -> Tensor:
        return (-0.5 * (distance / sigma) ** 2).exp_().masked_fill_(distance > reach, 0)

    matrix = weights((place[:, None] - place).abs())
    # The mirrored line on either side; the outermost pixels themselves are not seen twice.
    matrix[..., 1:] += weights(place[:, None] + place)[..., 1:]
    matrix[..., :-1] += weights(2 * (length - 1) - place[:, None] - place)[..., :-1]
    return matrix / matrix.sum(dim=2, keepdim=True)


# --------------------------------------------------------------------------------------------------------- both


def _shift_hue(x: Float[Tensor, "*n 3 h w"], turns: float | Float[Tensor, "n 1 1 1"]) -> None:
    """Rotate the hue of the HSV model in place, keeping saturation and value.

    With the hue h in turns from red, 6 |h| = 1 + (green + blue - red - lowest) / chroma, whichever channel is the
    highest, and h has the sign of green - blue. No case is told apart, so no memory is spent on choosing.
    """
    red, green, blue = x.unbind(dim=-3)
    # Pairs of channels at a time: along a short dimension amin and aminmax take several times as long.
    lowest = torch.minimum(red, green).minimum(blue)
    chroma = torch.maximum(red, green).maximum(blue).sub_(lowest)
    rest = (green + blue).sub_(red).sub_(lowest)
    sixth = torch.full((), 1 / 6, device=x.device)
    hue = torch.addcdiv(sixth, rest, chroma.clamp_min(1e-8), value=1 / 6).copysign_(green - blue)
    # A channel is high within a sixth of a turn of its own hue, low beyond a third, and falls in between.
    peaks = torch.arange(3, device=x.device)[:, None, None] / 3 - turns
    distance = hue.unsqueeze(-3) - peaks
    distance.sub_(distance.round()).abs_()
    height = torch.rsub(distance, 2, alpha=6).clamp_(0, 1)
    torch.addcmul(lowest.unsqueeze(-3), chroma.unsqueeze(-3), height, out=x)
