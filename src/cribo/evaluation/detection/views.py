"""Inputs of a detector: augmented training images, resized validation images, and their batches."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torchvision.transforms.v2.functional as TF
from jaxtyping import Float, Int64, UInt8
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.ops import box_convert
from torchvision.tv_tensors import BoundingBoxes, BoundingBoxFormat

from cribo.data.labelled.detection import BoxedImages
from cribo.data.randomness import keyed_generator

_VIEWS = 0x59_4F_4C_4F  # key of these draws, distinct from other uses of the seed
# YOLOS's sizes for its small and base model (its `datasets/coco.py`), in pixels.
_SIZE, _LONGEST, _SMALLEST, _STEP = 800, 1333, 480, 16
_BEFORE_CROP, _CROP, _POSITIONS = (400, 500, 600), (384, 600), (512, 864)


@dataclass(frozen=True)
class Sizes:
    """Image sizes in pixels: those of YOLOS for a size of 800, scaled proportionally for others.

    Attributes:
        size: shorter side of validation images, and its maximum in training.
    """

    size: int = _SIZE

    @property
    def longest(self) -> int:
        """Maximum of the longer side; larger images are downscaled."""
        return self.size * _LONGEST // _SIZE

    @property
    def sides(self) -> tuple[int, ...]:
        """Shorter sides of training images."""
        (smallest,) = self._in_proportion(_SMALLEST)
        return tuple(range(self.size, smallest - 1, -_STEP))[::-1]

    @property
    def before_crop(self) -> tuple[int, ...]:
        """Shorter sides before cropping."""
        return self._in_proportion(*_BEFORE_CROP)

    @property
    def crop(self) -> tuple[int, ...]:
        """Minimum and maximum side of a crop."""
        return self._in_proportion(*_CROP)

    @property
    def positions(self) -> tuple[int, ...]:
        """Image height and width of the stored position embeddings."""
        return self._in_proportion(*_POSITIONS)

    def _in_proportion(self, *sides: int) -> tuple[int, ...]:
        return tuple(max(1, side * self.size // _SIZE) for side in sides)


class DetectionView(NamedTuple):
    """An image with its boxes, as input of the detector.

    Attributes:
        image: RGB image.
        corners: (n, 4) left, top, right and bottom of the boxes in pixels of the view.
        labels: (n,) classes of the boxes.
    """

    image: UInt8[Tensor, "c h w"]
    corners: Float[Tensor, "n 4"]
    labels: Int64[Tensor, " n"]


def training_view(view: DetectionView, sizes: Sizes, generator: torch.Generator) -> DetectionView:
    """Apply DETR's augmentation with the sizes of YOLOS.

    The image is flipped with probability 0.5. With probability 0.5 it is resized to a shorter side of
    `sizes.before_crop` and cropped, with sides between `sizes.crop`; boxes are clipped to the crop. Finally it is
    resized to a shorter side of `sizes.sides`.

    Args:
        view: the whole image with its boxes.
        sizes: sizes of the views.
        generator: random number generator.
    """

    def draw(least: int, most: int) -> int:
        return int(torch.randint(least, most + 1, (), generator=generator))

    # All numbers are drawn first, so that no draw depends on the others.
    flip, crop = draw(0, 1), draw(0, 1)
    first, last = sizes.before_crop[draw(0, 2)], sizes.sides[draw(0, len(sizes.sides) - 1)]
    where = torch.rand(4, generator=generator)
    boxes = _as_boxes(view)
    image = view.image
    if flip:
        image, boxes = TF.horizontal_flip(image), TF.horizontal_flip(boxes)
    if crop:
        image, boxes = TF.resize(image, [first]), TF.resize(boxes, [first])
        window = _window((image.shape[1], image.shape[2]), sizes.crop, where.tolist())
        image, boxes = TF.crop(image, *window), TF.clamp_bounding_boxes(TF.crop(boxes, *window))
    image = TF.resize(image, [last], max_size=sizes.longest)
    boxes = TF.resize(boxes, [last], max_size=sizes.longest)
    inside = (boxes[:, 2:] > boxes[:, :2]).all(dim=1)
    return DetectionView(image, boxes.as_subclass(Tensor)[inside], view.labels[inside])


def _as_boxes(view: DetectionView) -> BoundingBoxes:
    height, width = view.image.shape[1:]
    about: dict[str, Any] = {"format": BoundingBoxFormat.XYXY, "canvas_size": (height, width)}
    return BoundingBoxes(view.corners, **about)


def _window(size: tuple[int, int], limits: Sequence[int], where: Sequence[float]) -> tuple[int, int, int, int]:
    """Return top, left, height and width of a crop, given four random numbers `where` in [0, 1)."""
    least, most = limits

    def pick(first: int, last: int, share: float) -> int:
        return first + int(share * (last - first + 1))

    height, width = (pick(min(least, side), min(most, side), share) for side, share in zip(size, where, strict=False))
    top, left = (
        pick(0, side - extent, share) for side, extent, share in zip(size, (height, width), where[2:], strict=True)
    )
    return top, left, height, width


@dataclass(frozen=True)
class Sample:
    """A view with the original height and width of the image, and the image index."""

    view: DetectionView
    original: tuple[int, int]
    index: int


class Batch(NamedTuple):
    """Batch of views, padded to canvases of equal size.

    Attributes:
        images: (B, 3, H, W) images, each in the upper left corner of its canvas.
        boxes: (n, 4) boxes of each image: centre, width and height, relative to the canvas.
        labels: (n,) classes of each image.
        extents: (B, 2) height and width of the canvas in pixels of the original image, which convert relative to
            absolute coordinates.
        indices: (B,) image indices.
    """

    images: UInt8[Tensor, "b c h w"]
    boxes: list[Float[Tensor, "n 4"]]
    labels: list[Int64[Tensor, " n"]]
    extents: Float[Tensor, "b 2"]
    indices: Int64[Tensor, " b"]


class Collate:
    """Collates views into batches.

    A canvas has the size of the largest view, rounded up to whole patches, and is filled with the colour that is 0
    after normalisation. Boxes are relative to the canvas, like the position embeddings, as in transformers. (In YOLOS,
    boxes are relative to the image, but each device has a single image; incomplete patches at the right and bottom are
    cropped.)

    Args:
        patch_size: patch size in pixels.
        colour: RGB colour of the padding, in 0-1.
    """

    def __init__(self, patch_size: int, colour: Sequence[float]) -> None:
        self.patch_size = patch_size
        self.colour = torch.tensor(colour).mul(255).round().to(torch.uint8)

    def __call__(self, samples: Sequence[Sample]) -> Batch:
        """Collate samples into a batch."""
        patch = self.patch_size
        sizes = [sample.view.image.shape[1:] for sample in samples]
        height, width = (-(-max(size[side] for size in sizes) // patch) * patch for side in (0, 1))
        images = self.colour.view(3, 1, 1).expand(len(samples), 3, height, width).clone()
        boxes, extents = [], []
        for canvas, sample in zip(images, samples, strict=True):
            view, original = sample.view, sample.original
            canvas[:, : view.image.shape[1], : view.image.shape[2]] = view.image
            shares = view.corners / torch.tensor([width, height, width, height])
            boxes.append(box_convert(shares, "xyxy", "cxcywh").float())
            extents.append([height * original[0] / view.image.shape[1], width * original[1] / view.image.shape[2]])
        return Batch(
            images,
            boxes,
            [sample.view.labels for sample in samples],
            torch.tensor(extents, dtype=torch.float32),
            torch.tensor([sample.index for sample in samples]),
        )


@dataclass
class TrainingViews(Dataset[Sample]):
    """Augmented images without crowds, indexed by (epoch, index); draws depend on seed, epoch and index only."""

    images: BoxedImages
    sizes: Sizes
    seed: int

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, key: tuple[int, int]) -> Sample:
        epoch, index = key
        view = training_view(_loaded(self.images, index), self.sizes, keyed_generator(_VIEWS, self.seed, epoch, index))
        return Sample(view, self.images.size(index), index)


@dataclass
class WholeViews(Dataset[Sample]):
    """Whole images without crowds, with a shorter side of `sizes.size`, a longer one of at most `longest`."""

    images: BoxedImages
    sizes: Sizes

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Sample:
        view, sizes = _loaded(self.images, index), self.sizes
        image, boxes = (TF.resize(part, [sizes.size], max_size=sizes.longest) for part in (view.image, _as_boxes(view)))
        view = DetectionView(image, boxes.as_subclass(Tensor), view.labels)
        return Sample(view, self.images.size(index), index)


def _loaded(images: BoxedImages, index: int) -> DetectionView:
    boxes = images.boxes(index)
    boxes = boxes[~boxes.crowd]
    return DetectionView(images.load(index), boxes.corners, boxes.labels)
