"""Labelled images for training and scoring segmentation. Every draw depends only on its key."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Integer, UInt8
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as TF

from cribo.data.labelled.segmentation import LabelledImages
from cribo.data.randomness import keyed_generator
from cribo.method.config import ViewRecipe
from cribo.method.views import sample_crops

Scale = tuple[int, int]
"""Maximum long and short side of a resized image, in any order."""

RATIOS = 0.5, 2.0
CATEGORY_LIMIT = 0.75
BRIGHTNESS = 32 / 255
CONTRAST = 0.5, 1.5
SATURATION = 0.5, 1.5
HUE = 18  # steps of 2 degrees

_NOISE = 0x64726F70  # key of these draws, distinct from other uses of the seed
_ATTEMPTS = 10
_HUE_STEPS = 180
_SQUARES = ViewRecipe(area=(0.8, 1.0), aspect=(3 / 4, 4 / 3), flip=0.5)


class Crop(NamedTuple):
    """A crop of a labelled image; all crops have the same size.

    Attributes:
        pixels: the image, 0 beyond it.
        labels: class of each pixel, `ignore_index` beyond the image.
        extent: height and width of the valid region, from the top left corner; outside it, network inputs are 0 after
            normalisation.
        drop_path_noise: a uniform random number for each drop path site.
    """

    pixels: UInt8[Tensor, "c size size"]
    labels: UInt8[Tensor, "mask mask"]
    extent: Int[Tensor, "2"]
    drop_path_noise: Float[Tensor, " sites"]


class WholeImage(NamedTuple):
    """A resized image with the labels to score, which may have another size."""

    pixels: UInt8[Tensor, "c h w"]
    labels: UInt8[Tensor, "label_h label_w"]


@dataclass(frozen=True)
class MMSegPreparation:
    """Preparation of images as in MMSegmentation's `configs/_base_/datasets`, which the paper uses.

    For training, an image is resized to fit its scale times a ratio of 0.5 to 2 (bilinear without antialiasing, as in
    OpenCV; labels by nearest neighbour), cropped, flipped horizontally with probability 0.5, and distorted in colour
    (`distort`). Up to ten random crops are tried until one has at least two categories, of which the largest covers
    less than 0.75 of the labelled pixels; otherwise, an eleventh is used. Smaller images are padded at the right and
    bottom. For scoring, images are resized, labels are not.

    Attributes:
        size: side of the crops in pixels.
        scale: scale to which images are resized (`fitted_size`); None for their own size.
        pad_to: side to which crops are padded; `size` if None.
        black_padding: pad network inputs with black pixels; otherwise with 0 after normalisation, the mean colour.
    """

    key: ClassVar[int] = 0x63726F70

    size: int
    scale: Scale | None
    pad_to: int | None = None
    black_padding: bool = False

    def crop(
        self, image: UInt8[Tensor, "c h w"], labels: UInt8[Tensor, "h w"], ignore_index: int, draws: torch.Generator
    ) -> tuple[UInt8[Tensor, "c size size"], UInt8[Tensor, "size size"], tuple[int, int]]:
        """Return pixels, labels and extent of a random `Crop`."""
        ratio, flip = torch.rand(2, generator=draws).tolist()
        places = torch.rand(_ATTEMPTS + 1, 2, generator=draws).tolist()
        size = fitted_size(image.shape[1], image.shape[2], self.scale, _between(RATIOS, ratio))
        labels = resize_labels(labels, size)
        top, left = self._place(labels, ignore_index, places)
        window = slice(top, top + self.size), slice(left, left + self.size)
        pixels, labels = resize(image, size)[:, *window], labels[window]
        if flip < 0.5:
            pixels, labels = pixels.flip(2), labels.flip(1)
        pixels, side = distort(pixels, draws), self.pad_to or self.size
        height, width = labels.shape
        padding = 0, side - width, 0, side - height
        extent = (side, side) if self.black_padding else (height, width)
        return F.pad(pixels, padding), F.pad(labels, padding, value=ignore_index), extent

    def whole(self, image: UInt8[Tensor, "c h w"], labels: UInt8[Tensor, "h w"]) -> WholeImage:
        """Return the resized image with its labels at their original size."""
        return WholeImage(resize(image, fitted_size(image.shape[1], image.shape[2], self.scale)), labels)

    def _place(self, labels: UInt8[Tensor, "h w"], ignore_index: int, places: list[list[float]]) -> tuple[int, int]:
        """Return the row and column of the top left corner of the crop."""
        rows, columns = (max(0, side - self.size) + 1 for side in labels.shape)
        top = left = 0
        for down, across in places:
            # float32 draws just below 1 may round up to 1.
            top, left = min(int(down * rows), rows - 1), min(int(across * columns), columns - 1)
            if is_varied(labels[top : top + self.size, left : left + self.size], ignore_index):
                break
        return top, left


@dataclass(frozen=True)
class SquarePreparation:
    """Preparation of images as squares with small label maps, as in Leopart's linear segmentation.

    Source: Ziegler and Asano 2022; NeCo (Pariza et al. 2025) uses the same evaluation code.

    For training, a crop covers 0.8 to 1 of the image's area at an aspect of 3/4 to 4/3, is resized to a square, and
    flipped horizontally with probability 0.5. Colours are not changed. For scoring, whole images are resized,
    regardless of their aspect.

    Attributes:
        size: side of the squares in pixels.
        mask_size: side of their label maps.
    """

    key: ClassVar[int] = 0x73717561

    size: int
    mask_size: int

    def crop(
        self, image: UInt8[Tensor, "c h w"], labels: UInt8[Tensor, "h w"], ignore_index: int, draws: torch.Generator
    ) -> tuple[UInt8[Tensor, "c size size"], UInt8[Tensor, "mask mask"], tuple[int, int]]:
        """Return pixels, labels and extent of a random `Crop`."""
        views = sample_crops(labels.shape[0], labels.shape[1], _SQUARES, generator=draws)
        top, left, height, width = views.boxes[0].tolist()
        window = slice(top, top + height), slice(left, left + width)
        pixels, labels = self.whole(image[:, *window], labels[window])
        if views.flips[0]:
            pixels, labels = pixels.flip(2), labels.flip(1)
        return pixels, labels, (self.size, self.size)

    def whole(self, image: UInt8[Tensor, "c h w"], labels: UInt8[Tensor, "h w"]) -> WholeImage:
        """Return the image, resized bilinearly with antialiasing, as PIL does, and its label map.

        The label map is resized by nearest pixels to the size of the image, then to that of the mask.
        """
        size = self.size, self.size
        square = resize_labels(labels, size)[None, None]
        mask = F.interpolate(square, size=(self.mask_size, self.mask_size), mode="nearest")[0, 0]
        return WholeImage(TF.resize(image, list(size)), mask)


Preparation = MMSegPreparation | SquarePreparation


@dataclass
class Crops(Dataset[Crop]):
    """Random crops of labelled images, indexed by (epoch, index); each key has its own crop.

    Attributes:
        images: labelled images.
        preparation: cropping and augmentation.
        seed: seed of all draws.
        sites: number of drop path sites.

    Raises:
        UnreadableImage, DataError: an image or label map is invalid.

    Example:
        >>> from cribo.data.scenes import Scenes
        >>> crops = Crops(Scenes(2), MMSegPreparation(64, None), seed=0)
        >>> crop = crops[0, 1]
        >>> crop.pixels.shape, crop.labels.shape, bool((crop.pixels == crops[0, 1].pixels).all())
        (torch.Size([3, 64, 64]), torch.Size([64, 64]), True)
    """

    images: LabelledImages
    preparation: Preparation
    seed: int
    sites: int = 0

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, key: tuple[int, int]) -> Crop:
        _, index = key
        pixels, labels, extent = self.preparation.crop(
            self.images.load(index),
            self.images.labels(index),
            self.images.ignore_index,
            keyed_generator(self.preparation.key, self.seed, *key),
        )
        noise = torch.rand(self.sites, generator=keyed_generator(_NOISE, self.seed, *key))
        return Crop(pixels, labels, torch.tensor(extent), noise)


@dataclass
class WholeImages(Dataset[WholeImage]):
    """Labelled images for scoring a segmentation."""

    images: LabelledImages
    preparation: Preparation

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> WholeImage:
        return self.preparation.whole(self.images.load(index), self.images.labels(index))


def fitted_size(height: int, width: int, scale: Scale | None, ratio: float = 1.0) -> tuple[int, int]:
    """Compute the (height, width) of an image resized to fit within `scale * ratio`, keeping its aspect ratio.

    The long and short sides are at most those of the scale, and at least one of them is equal.

    Args:
        height: of the image.
        width: of the image.
        scale: None for the image's own size.
        ratio: factor of the scale; its sides are rounded down.

    Example:
        >>> fitted_size(375, 500, (2048, 512)), fitted_size(375, 500, (520, 520)), fitted_size(375, 500, None, 2.0)
        ((512, 683), (390, 520), (750, 1000))
    """
    factor = ratio
    if scale is not None:
        long, short = (int(side * ratio) for side in sorted(scale, reverse=True))
        factor = min(long / max(height, width), short / min(height, width))
    return max(1, int(height * factor + 0.5)), max(1, int(width * factor + 0.5))


def resize(image: UInt8[Tensor, "c h w"], size: tuple[int, int]) -> UInt8[Tensor, "c new_h new_w"]:
    """Resize an image bilinearly without antialiasing, as OpenCV does."""
    return TF.resize(image, list(size), interpolation=InterpolationMode.BILINEAR, antialias=False)


def resize_labels(labels: Integer[Tensor, "h w"], size: tuple[int, int]) -> Integer[Tensor, "new_h new_w"]:
    """Resize a map of labels or cluster indices by nearest neighbour."""
    return TF.resize(labels[None], list(size), interpolation=InterpolationMode.NEAREST_EXACT)[0]


def is_varied(labels: UInt8[Tensor, "h w"], ignore_index: int) -> bool:
    """Whether a crop has at least two categories, each below three quarters of the labelled pixels.

    Example:
        >>> is_varied(torch.tensor([[0, 0], [1, 255]], dtype=torch.uint8), 255)
        True
    """
    counts = torch.bincount(labels.flatten(), minlength=ignore_index + 1)
    counts[ignore_index] = 0
    return bool((counts > 0).sum() > 1) and counts.max().item() < CATEGORY_LIMIT * counts.sum().item()


def distort(image: UInt8[Tensor, "c h w"], generator: torch.Generator) -> UInt8[Tensor, "c h w"]:
    """Distort brightness, contrast, saturation and hue, each with probability 0.5.

    Brightness adds or subtracts up to 32 (of 255). Contrast, a factor of 0.5 to 1.5 on all values, comes second or
    last with equal probability. Saturation, a factor of 0.5 to 1.5, and hue, rotated by up to 36 degrees, are changed
    in HSV. Values are clipped to 0-255 after each step, and rounded once at the end (MMSegmentation rounds down after
    each step). Images of other than three channels have neither saturation nor hue. Nine random numbers are drawn.
    """
    chances = torch.rand(5, generator=generator).tolist()
    amounts = torch.rand(3, generator=generator).tolist()
    turn = int(torch.randint(-HUE, HUE, (), generator=generator)) / _HUE_STEPS
    brighter, contrasted, contrast_first, saturated, turned = (chance < 0.5 for chance in chances)
    if len(image) != 3:
        saturated = turned = False
    if not (brighter or contrasted or saturated or turned):
        return image
    values = image.float() / 255
    if brighter:
        values = (values + BRIGHTNESS * (2 * amounts[0] - 1)).clamp_(0, 1)
    factor = _between(CONTRAST, amounts[1])
    if contrasted and contrast_first:
        values = (values * factor).clamp_(0, 1)
    if saturated:
        values = _saturate(values, _between(SATURATION, amounts[2]))
    if turned:
        values = TF.adjust_hue(values, turn)
    if contrasted and not contrast_first:
        values = (values * factor).clamp_(0, 1)
    return (values * 255).round_().to(torch.uint8)


def _between(bounds: tuple[float, float], share: float) -> float:
    return bounds[0] + share * (bounds[1] - bounds[0])


def _saturate(values: Float[Tensor, "3 h w"], factor: float) -> Float[Tensor, "3 h w"]:
    """Multiply the HSV saturation, clipped to 1; hue and value are unchanged."""
    highest, lowest = values.amax(dim=0), values.amin(dim=0)
    saturation = (highest - lowest) / highest.clamp(min=1e-8)
    # The differences from the highest channel are proportional to the saturation.
    return highest - (highest - values) * torch.minimum(torch.tensor(factor), 1 / saturation.clamp(min=1e-8))
