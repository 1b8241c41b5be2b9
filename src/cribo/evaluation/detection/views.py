"""What the detector sees: augmented images with their boxes for training, whole images for the score, and batches."""

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

_VIEWS = 0x59_4F_4C_4F  # what the draws are for

# YOLOS's sizes for its small and base model (its `datasets/coco.py`), in pixels.
_SIZE = 800
_LONGEST = 1333
_SMALLEST, _STEP = 480, 16
_BEFORE_CROP = (400, 500, 600)
_CROP = (384, 600)
_POSITIONS = (512, 864)


@dataclass(frozen=True)
class Sizes:
    """Sizes in pixels that go with one another: those of YOLOS at 800, and in proportion for smaller images.

    Args:
        size: of the shorter side when images are scored, and the largest one in training.
    """

    size: int = _SIZE

    @property
    def longest(self) -> int:
        """What the longer side may have; images that would have more are made smaller."""
        return self.size * _LONGEST // _SIZE

    @property
    def sides(self) -> tuple[int, ...]:
        """The shorter sides of training, one of which is drawn."""
        smallest = self._in_proportion(_SMALLEST)
        return tuple(range(self.size, smallest - 1, -_STEP))[::-1]

    @property
    def before_crop(self) -> tuple[int, ...]:
        """The shorter sides before a crop, one of which is drawn."""
        return tuple(map(self._in_proportion, _BEFORE_CROP))

    @property
    def crop(self) -> tuple[int, int]:
        """The least and the most that a side of a crop may have."""
        least, most = map(self._in_proportion, _CROP)
        return least, most

    @property
    def positions(self) -> tuple[int, int]:
        """Height and width for which position embeddings are stored."""
        height, width = map(self._in_proportion, _POSITIONS)
        return height, width

    def _in_proportion(self, side: int) -> int:
        return max(1, side * self.size // _SIZE)


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
    """DETR's augmentation with the sizes of YOLOS: a flip in half of the cases, then one of two ways to a new size.

    In half of the cases the image gets a shorter side of `sizes.sides`. In the others it first gets one of
    `sizes.before_crop` and is cropped, both sides of the crop drawn from `sizes.crop`, as is its place. Of boxes that
    the crop cuts through stays what lies inside.

    Args:
        view: the whole image with its boxes.
        sizes: that go with one another.
        generator: all draws come from it.
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
    """The image as it is scored: its shorter side has `sizes.size`, if the longer one is not too long then."""
    boxes = TF.resize(_as_boxes(view), [sizes.size], max_size=sizes.longest)
    image = TF.resize(view.image, [sizes.size], max_size=sizes.longest)
    return DetectionView(image, boxes.as_subclass(Tensor), view.labels)


def _as_boxes(view: DetectionView) -> BoundingBoxes:
    height, width = view.image.shape[1:]
    about: dict[str, Any] = {"format": BoundingBoxFormat.XYXY, "canvas_size": (height, width)}
    return BoundingBoxes(view.corners, **about)


def _window(size: tuple[int, int], limits: tuple[int, int], where: Sequence[float]) -> tuple[int, int, int, int]:
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
    """A view, and where it is from.

    Attributes:
        view: the image as the detector sees it.
        original: height and width of the image as it lies on disk.
        index: of the image.
    """

    view: DetectionView
    original: tuple[int, int]
    index: int


# --------------------------------------------------------------------- batches


class Batch(NamedTuple):
    """Views on canvases of one size.

    Attributes:
        images: (B, 3, H, W), each in the upper left corner of its canvas.
        boxes: (n, 4) of each image: centre, width and height in shares of the canvas.
        labels: (n,) of each image.
        extents: (B, 2), height and width of the canvas in pixels of the image as it lies on disk, of which the view
            shows all: a share of the canvas times these is a place in the image.
        indices: (B,), which images these are.
    """

    images: UInt8[Tensor, "b 3 h w"]
    boxes: list[Float[Tensor, "n 4"]]
    labels: list[Int64[Tensor, " n"]]
    extents: Float[Tensor, "b 2"]
    indices: Int64[Tensor, " b"]


class Collate:
    """Puts views together to a batch.

    A canvas is as large as the largest view, rounded up to whole patches, and filled with the colour that
    normalisation turns into 0. Boxes are in shares of the canvas, over which the position embeddings are spread, so
    that what a share means does not depend on what else is in a batch. (So do transformers' image processor. YOLOS
    takes shares of the image, but had one image on each device and hence nothing to fill; it cuts off what is less
    than a patch at the right and at the bottom.)

    Args:
        patch_size: pixels.
        colour: red, green and blue of what is filled, in 0-1.
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


class TrainingViews(Dataset[Sample]):
    """Augmented images, by (epoch, index); what is drawn depends on seed, epoch and index alone.

    Args:
        images: with boxes; crowds are left out.
        sizes: that go with one another.
        seed: of the draws.
    """

    def __init__(self, images: BoxedImages, sizes: Sizes, seed: int) -> None:
        self.images, self.sizes, self.seed = images, sizes, seed

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, key: tuple[int, int]) -> Sample:
        epoch, index = key
        view = training_view(_loaded(self.images, index), self.sizes, keyed_generator(_VIEWS, self.seed, epoch, index))
        return Sample(view, self.images.size(index), index)


class WholeViews(Dataset[Sample]):
    """Whole images, by index.

    Args:
        images: with boxes.
        sizes: that go with one another.
    """

    def __init__(self, images: BoxedImages, sizes: Sizes) -> None:
        self.images, self.sizes = images, sizes

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Sample:
        return Sample(whole_view(_loaded(self.images, index), self.sizes), self.images.size(index), index)


def _loaded(images: BoxedImages, index: int) -> DetectionView:
    boxes = images.boxes(index)
    boxes = boxes[~boxes.crowd]
    return DetectionView(images.load(index), boxes.corners, boxes.labels)
