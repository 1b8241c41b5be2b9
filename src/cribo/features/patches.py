"""Images and labels on the patch grid: sizes, class counts per patch, and the augmentation of memories."""

import math
from collections.abc import Callable

import torch
from jaxtyping import Int, UInt8
from torch import Tensor
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as TF

from cribo.base.errors import InputError
from cribo.data.labelled.crops import resize_labels
from cribo.data.randomness import keyed_generator
from cribo.features.config import Unlabelled
from cribo.features.grid import patch_of_pixel
from cribo.method.config import Interpolation

_AUGMENTATION = 0x617567  # key that separates these draws from others with the same seed
_CROP_ATTEMPTS = 10


def resize_image(
    image: UInt8[Tensor, "c h w"], size: tuple[int, int], interpolation: Interpolation
) -> UInt8[Tensor, "c new_h new_w"]:
    """Resize a uint8 image with antialiasing."""
    return TF.resize(image, list(size), interpolation=InterpolationMode(interpolation), antialias=True)


def class_counts(
    labels: Int[Tensor, "h w"], patch_size: int, num_classes: int, ignore_index: int
) -> Int[Tensor, "n c_plus_1"]:
    """Count the pixels of each class in each patch, row by row; the last column counts ignored pixels.

    Args:
        labels: height and width must be multiples of the patch size.
        patch_size: patch size in pixels.
        num_classes: C.
        ignore_index: label of ignored pixels.

    Raises:
        ValueError: a label is neither a class nor `ignore_index`.

    Example:
        >>> class_counts(torch.tensor([[0, 0, 1, 1], [0, 1, 1, 255]]), 2, 2, 255).tolist()
        [[3, 1, 0], [0, 3, 1]]
    """
    height, width = labels.shape
    return grid_counts(labels, (height // patch_size, width // patch_size), num_classes, ignore_index)


def grid_counts(
    labels: Int[Tensor, "h w"], grid: tuple[int, int], num_classes: int, ignore_index: int
) -> Int[Tensor, "n c_plus_1"]:
    """Count the pixels of each class in the cells of a grid, for label maps of any size (see `class_counts`).

    Args:
        labels: (H, W); each pixel belongs to the cell that contains its centre.
        grid: rows and columns, at most H and W.
        num_classes: C.
        ignore_index: label of ignored pixels.

    Raises:
        ValueError: a label is neither a class nor `ignore_index`.

    Example:
        >>> grid_counts(torch.tensor([[0, 0, 1], [0, 1, 255]]), (1, 2), 2, 255).tolist()
        [[2, 0, 0], [1, 2, 1]]
    """
    labelled = labels != ignore_index
    if (wrong := labels[labelled & (labels >= num_classes)]).numel():
        raise InputError(f"labels must be in 0..{num_classes - 1} or {ignore_index} (ignored), got {int(wrong[0])}")
    rows, across = (
        torch.from_numpy(patch_of_pixel(side, patches)).to(labels.device)
        for side, patches in zip(labels.shape, grid, strict=True)
    )
    columns = num_classes + 1
    label = torch.where(labelled, labels.long(), num_classes)
    patch = rows[:, None] * grid[1] + across
    patches = grid[0] * grid[1]
    flat = (patch * columns + label).flatten()
    return torch.bincount(flat, minlength=patches * columns).view(patches, columns)


def labels_in_memory(
    counts: Int[Tensor, "n c_plus_1"], unlabelled: Unlabelled
) -> tuple[Int[Tensor, "n c"], Int[Tensor, " n"]]:
    """Return the class counts of patches in a memory, and the indices of the patches to keep.

    Args:
        counts: result of `class_counts`.
        unlabelled: treatment of ignored pixels.
            `drop`: they take part in the majority vote; patches in which they win are dropped.
            `outvote`: they are not counted; patches without other pixels are dropped.
            `class`: they form an additional class, which scores count as wrong.
            `first`: they count as class 0, for data sets in which this is the background.

    Returns:
        pixels of each class of all patches, (n, C), or (n, C + 1) for `class`; and the indices of the kept patches.
    """
    classes, without = counts[:, :-1], counts[:, -1]
    if unlabelled == "class":
        return counts, torch.arange(len(counts), device=counts.device)
    if unlabelled == "first":
        classes = classes.clone()
        classes[:, 0] += without
        return classes, torch.arange(len(counts), device=counts.device)
    kept = classes.sum(dim=1) > 0 if unlabelled == "outvote" else classes.amax(dim=1) >= without.clamp(min=1)
    return classes, kept.nonzero()[:, 0]


def majority_label(counts: Int[Tensor, "n c_plus_1"], unlabelled: Unlabelled, ignore_index: int) -> Int[Tensor, " n"]:
    """Return the majority label of each patch for scoring; ties go to the smallest class index.

    Patches in which ignored pixels win, or with `outvote` those with ignored pixels only, get `ignore_index` and are
    not scored.
    """
    classes, without = counts[:, :-1], counts[:, -1]
    most = classes.amax(dim=1)
    beaten = most == 0 if unlabelled == "outvote" else (most < without) | (most == 0)
    return torch.where(beaten, ignore_index, classes.argmax(dim=1))


def rarest_patches(counts: Int[Tensor, "n c"], number: int, generator: torch.Generator) -> Int[Tensor, " m"]:
    """Sample patches of one image for a bounded memory, preferring rare classes.

    The score of a patch is the sum, over its classes, of the number of patches with this class, times a uniform
    random number; patches with the lowest scores are selected (Balazevic et al. 2023, appendix on memory sampling).

    Args:
        counts: pixels of each class in each patch.
        number: number of patches to select; all are selected if the image has fewer.
        generator: random generator.

    Returns:
        indices of the patches, ascending.
    """
    present = (counts > 0).double()
    score = present @ present.sum(dim=0)
    score *= torch.rand(len(counts), generator=generator, dtype=torch.double)
    if number >= len(counts):
        return torch.arange(len(counts))
    return score.argsort(stable=True)[:number].sort().values


def augment_image(
    image: UInt8[Tensor, "c h w"], size: tuple[int, int], interpolation: Interpolation, key: tuple[int, ...]
) -> UInt8[Tensor, "c new_h new_w"]:
    """Augment an image of a memory with colour jitter and a random resized crop.

    Brightness, contrast, saturation and hue are each jittered by up to 0.1 with probability 0.5; of images of other
    than three channels, only the brightness, and the contrast with the mean of all values as grey. The crop has
    0.5 to 2 times the area of the image (crops that do not fit are drawn again) and an aspect ratio of 3/4 to 4/3.

    Args:
        image: the original image.
        size: (height, width) of the result.
        interpolation: interpolation of the resized crop.
        key: key of the random draws: seed, image and index of the augmentation.
    """
    jitter, window = _draw_augmentation(image.shape[1], image.shape[2], key)
    for adjust, amount in zip(_ADJUSTMENTS if len(image) == 3 else _OF_ANY_CHANNELS, jitter, strict=False):
        if amount is not None:
            image = adjust(image, amount)
    return resize_image(image[:, *window], size, interpolation)


def augment_labels(
    labels: UInt8[Tensor, "h w"], size: tuple[int, int], key: tuple[int, ...]
) -> UInt8[Tensor, "new_h new_w"]:
    """Return the labels of the image that `augment_image` returns for the same key."""
    _, window = _draw_augmentation(labels.shape[0], labels.shape[1], key)
    return resize_labels(labels[window], size)


_ADJUSTMENTS: tuple[Callable[[Tensor, float], Tensor], ...] = (
    TF.adjust_brightness,
    TF.adjust_contrast,
    TF.adjust_saturation,
    TF.adjust_hue,
)


def _brighten(image: UInt8[Tensor, "c h w"], factor: float) -> UInt8[Tensor, "c h w"]:
    return _blend(image, 0.0, factor)


def _contrast(image: UInt8[Tensor, "c h w"], factor: float) -> UInt8[Tensor, "c h w"]:
    return _blend(image, image.float().mean().item(), factor)


def _blend(image: UInt8[Tensor, "c h w"], grey: float, factor: float) -> UInt8[Tensor, "c h w"]:
    return (image.float() * factor).add_((1 - factor) * grey).clamp_(0, 255).to(torch.uint8)


_OF_ANY_CHANNELS = _brighten, _contrast
_NEUTRAL = (1.0, 1.0, 1.0, 0.0)


def _draw_augmentation(height: int, width: int, key: tuple[int, ...]) -> tuple[list[float | None], tuple[slice, slice]]:
    """Draw the amount of each adjustment, None if it is not applied, and the rows and columns of the crop."""
    draws = torch.rand(8 + 3 * _CROP_ATTEMPTS, generator=keyed_generator(_AUGMENTATION, *key)).tolist()
    jitter = [
        neutral + 0.1 * (2 * amount - 1) if chance < 0.5 else None
        for neutral, chance, amount in zip(_NEUTRAL, draws[:4], draws[4:8], strict=True)
    ]
    top, left, crop_h, crop_w = _crop(height, width, draws[8:])
    return jitter, (slice(top, top + crop_h), slice(left, left + crop_w))


def _crop(height: int, width: int, draws: list[float]) -> tuple[int, int, int, int]:
    """Return (top, left, height, width) of a crop; if no draw fits, the largest centred crop of a valid aspect."""
    for attempt in range(_CROP_ATTEMPTS):
        area, aspect, place = draws[3 * attempt : 3 * attempt + 3]
        pixels = height * width * (0.5 + 1.5 * area)
        ratio = math.exp(math.log(3 / 4) + aspect * (math.log(4 / 3) - math.log(3 / 4)))
        crop_w, crop_h = round(math.sqrt(pixels * ratio)), round(math.sqrt(pixels / ratio))
        if 0 < crop_w <= width and 0 < crop_h <= height:
            # A single random number selects both row and column.
            rows, columns = height - crop_h + 1, width - crop_w + 1
            spot = min(int(place * rows * columns), rows * columns - 1)
            return spot // columns, spot % columns, crop_h, crop_w
    crop_w, crop_h = min(width, round(height * 4 / 3)), min(height, round(width * 4 / 3))
    return (height - crop_h) // 2, (width - crop_w) // 2, crop_h, crop_w
