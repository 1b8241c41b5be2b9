"""Object discovery in data sets, scored by CorLoc."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Float64, UInt8
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.ops import box_iou

from cribo.base.console import Progress, no_progress
from cribo.base.errors import InputError
from cribo.data.batches import Batches
from cribo.evaluation.discovery.methods import FoundObject, lost, tokencut
from cribo.evaluation.discovery.settings import DiscoverySettings
from cribo.features.patches import resize_image
from cribo.models import Backbone, evaluation_mode, normalise

FOUND = 0.5
"""Minimum IoU of a correctly found object."""

_PARTS = ("queries", "keys", "values")
_MAX_PATCHES = 10_000  # per image, since similarities and eigenvectors take gigabytes


@dataclass(frozen=True)
class Discovered:
    """Objects found by a method.

    Attributes:
        boxes: (n, 4) left, top, right and bottom in pixels of each image.
        right: (n,) whether the IoU with any annotated object is at least 0.5.
        objects: objects on the grid of patches.
        patches: (n, 2) height and width of a patch in pixels of each image.
    """

    boxes: Float64[Tensor, "n 4"]
    right: Bool[Tensor, " n"]
    objects: list[FoundObject]
    patches: Float64[Tensor, "n 2"]

    @property
    def corloc(self) -> float:
        """Fraction of images with a correctly found object."""
        return float(self.right.double().mean())

    @property
    def whole(self) -> int:
        """Number of images whose object is the whole image."""
        return sum(bool(part.mask.all()) for part in self.objects)


@torch.no_grad()
def discover(
    backbone: Backbone, images: Any, settings: DiscoverySettings, *, workers: int = 0, progress: Progress = no_progress
) -> Mapping[str, Discovered]:
    """Find one object in each image with each method.

    Args:
        backbone: the network, on its device.
        images: an ImageSource with `boxes(index)`; each image must have an object that is not a crowd.
        settings: settings of the protocol after `prepare`.
        workers: number of worker processes that read images.
        progress: progress callback.

    Returns:
        Found objects, by method.

    Raises:
        InputError: an image has too many patches, or features are not finite.
        UnreadableImage: an image is corrupt.
    """
    methods = {
        "lost": partial(lost, candidates=settings.candidates),
        "tokencut": partial(tokencut, threshold=settings.threshold),
    }
    found: dict[str, list[FoundObject]] = {method: [] for method in settings.methods}
    boxes: dict[str, list[Tensor]] = {method: [] for method in settings.methods}
    patches: list[tuple[float, ...]] = []
    loader = Batches(_Resized(images, settings.size, backbone), itemgetter(0), workers=workers)
    for index, (pixels, size) in enumerate(loader):
        features, grid = _features(backbone, torch.from_numpy(pixels), settings.features, images.name(index))
        patches.append(tuple(backbone.patch_size * own / new for own, new in zip(size, pixels.shape[1:], strict=True)))
        for method in settings.methods:
            part = methods[method](features, grid)
            found[method].append(part)
            boxes[method].append(_corners(part, patches[-1], size))
        progress("objects", index + 1, len(images))
    return {
        method: Discovered(
            torch.stack(boxes[method]),
            torch.tensor([_is_found(box, images.boxes(index)) for index, box in enumerate(boxes[method])]),
            found[method],
            torch.tensor(patches, dtype=torch.float64),
        )
        for method in settings.methods
    }


def _features(
    backbone: Backbone, pixels: UInt8[Tensor, "3 h w"], kind: str, name: str
) -> tuple[Float[Tensor, "n d"], tuple[int, int]]:
    """Return the patch features of an image, padded to whole patches with the mean colour, and their grid."""
    patch = backbone.patch_size
    height, width = (math.ceil(side / patch) for side in pixels.shape[1:])
    if height * width > _MAX_PATCHES:
        raise InputError(
            f"{name} must have at most {_MAX_PATCHES:,} patches, got {height} x {width}: reduce --size to "
            f"{int(patch * _MAX_PATCHES**0.5)}"
        )
    device = next(backbone.parameters()).device
    image = normalise(pixels.to(device).float()[None] / 255, mean=backbone.mean, std=backbone.std)
    image = F.pad(image, (0, width * patch - image.shape[3], 0, height * patch - image.shape[2]))
    with evaluation_mode(backbone):
        if kind == "tokens":
            features = backbone.encode(image).tokens[0]
        else:
            parts = backbone.attention_inputs(backbone.encode_trunk(image, backbone.depth - 1))
            features = parts[_PARTS.index(kind)][0, backbone.model.num_prefix_tokens :]
    if not features.isfinite().all():
        raise InputError(f"the features of the backbone for {name} are not finite")
    return features.float(), (height, width)


def _corners(part: FoundObject, patch: tuple[float, ...], size: tuple[int, int]) -> Float64[Tensor, " 4"]:
    """Return the box of an object in pixels of its image, clipped to exclude the padding."""
    left, top, right, bottom = part.box
    corners = left * patch[1], top * patch[0], min(right * patch[1], size[1]), min(bottom * patch[0], size[0])
    return torch.tensor(corners, dtype=torch.float64)


def _is_found(box: Float64[Tensor, " 4"], boxes: Any) -> bool:
    return bool((box_iou(box[None], boxes.corners[~boxes.crowd]) >= FOUND).any())


class _Resized(Dataset[Any]):
    """Images resized to a longer side or the fixed input size of a network, with their original sizes."""

    def __init__(self, images: Any, size: int | None, backbone: Backbone) -> None:
        self.images, self.size = images, size
        self.only = None if backbone.takes_any_size else backbone.image_size

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[UInt8[np.ndarray, "3 h w"], tuple[int, int]]:
        image = self.images.load(index)
        height, width = image.shape[1:]
        target = height, width
        if self.only is not None:
            target = self.only, self.only
        elif self.size is not None:
            scale = self.size / max(height, width)
            target = max(1, round(height * scale)), max(1, round(width * scale))
        if target != (height, width):
            image = resize_image(image, target, "bilinear")
        return image.numpy(), (height, width)
