"""The inputs of a detector: augmented images for training, resized whole images for the score, and their batches."""

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

from cribo.data.detection import BoxedImages
from cribo.data.randomness import keyed_generator

_VIEWS = 0x59_4F_4C_4F  # separates these draws from others of the same seed
# YOLOS's sizes for its small and base model (its `datasets/coco.py`), in pixels.
_SIZE, _LONGEST, _SMALLEST, _STEP = 800, 1333, 480, 16
_BEFORE_CROP, _CROP, _POSITIONS = (400, 500, 600), (384, 600), (512, 864)


@dataclass(frozen=True)
class Sizes:
    """Sizes in pixels: those of YOLOS at 800, and in proportion for smaller images.

    Attributes:
        size: of the shorter side when images are scored, and the largest in training.
    """

    size: int = _SIZE

    @property
    def longest(self) -> int:
        """The greatest longer side; images that would exceed it are made smaller."""
        return self.size * _LONGEST // _SIZE

    @property
    def sides(self) -> tuple[int, ...]:
        """The shorter sides of training."""
        (smallest,) = self._in_proportion(_SMALLEST)
        return tuple(range(self.size, smallest - 1, -_STEP))[::-1]

    @property
    def before_crop(self) -> tuple[int, ...]:
        """The shorter sides before a crop."""
        return self._in_proportion(*_BEFORE_CROP)

    @property
    def crop(self) -> tuple[int, ...]:
        """The least and the greatest side of a crop."""
        return self._in_proportion(*_CROP)

    @property
    def positions(self) -> tuple[int, ...]:
        """Height and width for which position embeddings are stored."""
        return self._in_proportion(*_POSITIONS)

    def _in_proportion(self, *sides: int) -> tuple[int, ...]:
        return tuple(max(1, side * self.size // _SIZE) for side in sides)


class DetectionView(NamedTuple):
    """An image as the detector sees it.

    Attributes:
        image: RGB.
        corners: (n, 4), left, top, right and bottom of its boxes in pixels of the view.
        labels: (n,), the class of each.
    """

    image: UInt8[Tensor, "3 h w"]
    corners: Float[Tensor, "n 4"]
    labels: Int64[Tensor, " n"]


def training_view(view: DetectionView, sizes: Sizes, generator: torch.Generator) -> DetectionView:
    """DETR's augmentation with the sizes of YOLOS.

    The image is flipped with probability 0.5. With probability 0.5 it is resized to a shorter side of
    `sizes.before_crop` and cropped, with sides between `sizes.crop`; boxes are clipped to the crop. Finally it is
    resized to a shorter side of `sizes.sides`.

    Args:
        view: the whole image with its boxes.
        sizes: of all views.
        generator: source of all draws.
    """

    def draw(least: int, most: int) -> int:
        return int(torch.randint(least, most + 1, (), generator=generator))

    # All draws at once: none depends on whether another one is used.
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


def whole_view(view: DetectionView, sizes: Sizes) -> DetectionView:
    """Resize an image for the score: its shorter side to `sizes.size`, unless the longer one exceeds its limit."""
    boxes = TF.resize(_as_boxes(view), [sizes.size], max_size=sizes.longest)
    image = TF.resize(view.image, [sizes.size], max_size=sizes.longest)
    return DetectionView(image, boxes.as_subclass(Tensor), view.labels)


def _as_boxes(view: DetectionView) -> BoundingBoxes:
    height, width = view.image.shape[1:]
    about: dict[str, Any] = {"format": BoundingBoxFormat.XYXY, "canvas_size": (height, width)}
    return BoundingBoxes(view.corners, **about)


def _window(size: tuple[int, int], limits: Sequence[int], where: Sequence[float]) -> tuple[int, int, int, int]:
    """Top, left, height and width of a crop; `where` holds four numbers in [0, 1)."""
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
    """A view, with the height and width of the image on disk, and the index of the image."""

    view: DetectionView
    original: tuple[int, int]
    index: int


class Batch(NamedTuple):
    """Views on canvases of one size.

    Attributes:
        images: (B, 3, H, W), each in the upper left corner of its canvas.
        boxes: (n, 4) of each image: centre, width and height in shares of the canvas.
        labels: (n,) of each image.
        extents: (B, 2), height and width of the canvas in pixels of the image on disk: shares of the canvas times
            these are places in that image.
        indices: (B,), of the images.
    """

    images: UInt8[Tensor, "b 3 h w"]
    boxes: list[Float[Tensor, "n 4"]]
    labels: list[Int64[Tensor, " n"]]
    extents: Float[Tensor, "b 2"]
    indices: Int64[Tensor, " b"]


class Collate:
    """Makes batches of views.

    A canvas is as large as the largest view, rounded up to whole patches, and filled with the colour that is 0 after
    normalisation. Boxes are in shares of the canvas, as the position embeddings, so that a share does not depend on the
    other images of the batch. (As in transformers. YOLOS takes shares of the image, but had one image on each device;
    it cuts off incomplete patches at the right and at the bottom.)

    Args:
        patch_size: patch size in pixels.
        colour: red, green and blue of the filling, in 0-1.
    """

    def __init__(self, patch_size: int, colour: Sequence[float]) -> None:
        self.patch_size = patch_size
        self.colour = torch.tensor(colour).mul(255).round().to(torch.uint8)

    def __call__(self, samples: Sequence[Sample]) -> Batch:
        """A batch of samples."""
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
    """Augmented images, by (epoch, index); draws depend on seed, epoch and index alone. Crowds are left out."""

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
    """Whole images, by index."""

    images: BoxedImages
    sizes: Sizes

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Sample:
        return Sample(whole_view(_loaded(self.images, index), self.sizes), self.images.size(index), index)


def _loaded(images: BoxedImages, index: int) -> DetectionView:
    boxes = images.boxes(index)
    boxes = boxes[~boxes.crowd]
    return DetectionView(images.load(index), boxes.corners, boxes.labels)
