"""Two views of an image, with the place of every patch in the source image (METHOD section 1).

Geometry happens per image where it is decoded; photometric work happens per batch on the device. Every draw
comes from a generator that the caller gives, so that a view depends on nothing but its key.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as TF

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

_LUMA = (0.299, 0.587, 0.114)  # ITU-R 601, as in PIL and torchvision
_HUE = 3  # the operation of the jitter that is not affine in the pixel's colour
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
    views = []
    for (top, left, height, width), flip in zip(crops.boxes.tolist(), crops.flips.tolist(), strict=True):
        view = TF.resized_crop(
            image,
            top,
            left,
            height,
            width,
            [size, size],
            interpolation=InterpolationMode.BICUBIC,
            antialias=True,
        )
        views.append(view.flip(-1) if flip else view)
    return torch.stack(views)


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
    u = torch.rand((10, 2), dtype=torch.float64, generator=generator)
    order = torch.stack([torch.randperm(4, generator=generator) for _ in range(2)])
    jitter = u[0] < recipe.jitter

    def factor(draw: Tensor, strength: float) -> Tensor:
        return torch.where(jitter, 1 + strength * (2 * draw - 1), 1.0).float()

    low, high = recipe.blur_sigma
    return Photometric(
        brightness=factor(u[1], recipe.brightness),
        contrast=factor(u[2], recipe.contrast),
        saturation=factor(u[3], recipe.saturation),
        hue=torch.where(jitter, recipe.hue * (2 * u[4] - 1), 0.0).float(),
        order=order,
        greyscale=u[5] < recipe.greyscale,
        sigma=torch.where(u[6] < torch.tensor(recipe.blur), low + u[7] * (high - low), 0.0).float(),
        solarise=u[8] < torch.tensor(recipe.solarise),
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

    Example:
        >>> recipe, generator = ViewRecipe(size=32), torch.Generator().manual_seed(0)
        >>> views = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
        >>> apply_photometric(views, sample_photometric(recipe, generator=generator)).shape
        torch.Size([2, 3, 32, 32])
    """
    device = views.device
    with torch.autocast(device.type, enabled=False):
        x = views.float().div_(255)
        x = _jitter(x, photometric)
        if (blurred := photometric.sigma.nonzero().flatten()).numel():
            x[blurred.to(device)] = _gaussian_blur(x[blurred.to(device)], photometric.sigma[blurred])
        if (solarised := photometric.solarise.nonzero().flatten().to(device)).numel():
            bright = x[solarised]
            x[solarised] = torch.where(bright >= solarise_threshold / 255, 1 - bright, bright)
    return normalise(x, mean=mean, std=std)


def normalise(
    images: Float[Tensor, "n 3 h w"],
    *,
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
) -> Float[Tensor, "n 3 h w"]:
    """Subtract the channels' mean and divide by their standard deviation; images in 0-1."""
    return (images - images.new_tensor(mean)[:, None, None]) / images.new_tensor(std)[:, None, None]


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


def _jitter(x: Float[Tensor, "n 3 h w"], photometric: Photometric) -> Float[Tensor, "n 3 h w"]:
    """The four operations of the jitter in each view's own order, then greyscale.

    Brightness, contrast and saturation are affine in a pixel's colour, so whichever a view has in a place of
    its order is one 3 x 3 matrix: one product serves the batch. Values are clipped after every operation.
    """
    n, _, height, width = x.shape
    device = x.device
    luma = torch.tensor(_LUMA)
    identity = torch.eye(3).expand(n, 3, 3)
    to_grey = luma.expand(3, 3)
    brightness = photometric.brightness[:, None, None] * identity
    contrast = photometric.contrast[:, None, None] * identity
    saturation = photometric.saturation[:, None, None] * (identity - to_grey) + to_grey
    choices = torch.stack((brightness, contrast, saturation, identity), dim=1)
    grey_matrix = torch.where(photometric.greyscale[:, None, None], to_grey, identity).to(device)
    luma_device = luma.to(device)
    pixels = x.flatten(2)
    for place in range(4):
        operation = photometric.order[:, place]
        matrix = choices[torch.arange(n), operation].to(device)
        # Contrast moves towards the mean grey level of the view; the other operations add nothing.
        share = torch.where(operation == 1, 1 - photometric.contrast, 0.0).to(device)
        offset = share * (pixels.mean(dim=2) @ luma_device)
        pixels = torch.baddbmm(offset[:, None, None], matrix, pixels).clamp_(0, 1)
        turned = ((operation == _HUE) & (photometric.hue != 0)).nonzero().flatten()
        if turned.numel():
            rows = turned.to(device)
            pixels[rows] = _shift_hue(pixels[rows], photometric.hue[turned].to(device))
    return torch.bmm(grey_matrix, pixels).view(n, 3, height, width)


def _shift_hue(pixels: Float[Tensor, "n 3 p"], turns: Float[Tensor, " n"]) -> Float[Tensor, "n 3 p"]:
    """Rotate the hue of the HSV model, keeping saturation and value."""
    value = pixels.amax(dim=1)
    chroma = value - pixels.amin(dim=1)
    red, green, blue = pixels.unbind(dim=1)
    scale = chroma.clamp_min(1e-8).reciprocal_()
    sector = torch.where(
        value == red,
        (green - blue) * scale,
        torch.where(value == green, (blue - red) * scale + 2, (red - green) * scale + 4),
    )
    sector += 6 * turns[:, None]
    offsets = torch.tensor((5.0, 3.0, 1.0), device=pixels.device)[:, None]
    distance = (sector[:, None] + offsets).remainder_(6)
    ramp = torch.minimum(distance, 4 - distance).clamp_(0, 1)
    return value[:, None] - chroma[:, None] * ramp


def _gaussian_blur(x: Float[Tensor, "n 3 h w"], sigma: Float[Tensor, " n"]) -> Float[Tensor, "n 3 h w"]:
    """Separable blur as two batched matrix products, with mirrored borders inside the matrices."""
    n, _, height, width = x.shape
    along_width = _blur_matrix(width, sigma).to(x.device)
    along_height = along_width if height == width else _blur_matrix(height, sigma).to(x.device)
    x = torch.bmm(x.reshape(n, 3 * height, width), along_width.mT).view(n, 3, height, width)
    return torch.matmul(along_height[:, None], x)


def _blur_matrix(length: int, sigma: Float[Tensor, " n"]) -> Float[Tensor, "n l l"]:
    """Row i holds the weights with which the pixels of a line make up its blurred pixel i."""
    radius = min(math.ceil(3 * float(sigma.max())), length - 1)
    steps = torch.arange(-radius, radius + 1)
    weights = torch.exp(-0.5 * (steps / sigma[:, None]) ** 2)
    # Each view's own reach: the largest of the batch must not lengthen another view's kernel.
    weights = weights.masked_fill(steps.abs() > (3 * sigma[:, None]).ceil(), 0)
    weights = weights / weights.sum(dim=1, keepdim=True)
    source = torch.arange(length)[:, None] + steps
    source = torch.where(source < 0, -source, source)
    source = torch.where(source >= length, 2 * (length - 1) - source, source)
    matrix = torch.zeros(sigma.shape[0], length, length)
    index = source.expand(sigma.shape[0], -1, -1)
    return matrix.scatter_add_(2, index, weights[:, None].expand(-1, length, -1).contiguous())
