"""Objects of an image as they are stored: vector, mask, box and area; does not import torch."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float

from cribo.data.labelled.coco_writing import mask_annotation
from cribo.data.labelled.run_lengths import decompressed, mask_of, require_counts
from cribo.features.grid import patch_of_pixel

Box = tuple[int, int, int, int]
"""x0, y0, x1, y1 in pixels of the image; x1 and y1 are exclusive."""


@dataclass(frozen=True)
class GridMask:
    """Mask of an object on the grid of patches, run-length encoded as in COCO.

    A mask takes tens of bytes. A pixel belongs to the patch that contains its centre.

    Attributes:
        grid: number of rows and columns of patches.
        counts: COCO's compressed run lengths over the grid.
        image: (height, width) of the image in pixels.
    """

    grid: tuple[int, int]
    counts: bytes
    image: tuple[int, int]

    def patches(self) -> Bool[np.ndarray, "gh gw"]:
        """Return the mask over patches.

        Raises:
            InputError: the counts do not describe a mask of this grid, as in a damaged database.
        """
        counts = decompressed(self.counts)
        require_counts(counts, self.grid)
        return mask_of(counts, self.grid)

    def pixels(self, size: tuple[int, ...] | None = None) -> Bool[np.ndarray, "h w"]:
        """Return the mask over pixels of the image, resized to a (height, width) if given."""
        return resize_mask(self.patches(), size or self.image)

    def contains(self, x: int, y: int) -> bool:
        """Whether a pixel belongs to the object."""
        row = (2 * y + 1) * self.grid[0] // (2 * self.image[0])
        column = (2 * x + 1) * self.grid[1] // (2 * self.image[1])
        return bool(self.patches()[row, column])

    def coco(self) -> dict[str, object]:
        """Return the mask over pixels in COCO format: `size` and compressed `counts` as a string."""
        return mask_annotation(self.pixels())["segmentation"]


def resize_mask(mask: Bool[np.ndarray, "h w"], size: tuple[int, ...]) -> Bool[np.ndarray, "new_h new_w"]:
    """Resize a mask to a (height, width) by nearest-neighbour interpolation."""
    rows, columns = (patch_of_pixel(new, old) for new, old in zip(size, mask.shape, strict=True))
    return mask[np.ix_(rows, columns)]


@dataclass(frozen=True, eq=False)
class ImageObject:
    """One object of an image.

    Attributes:
        number: index among the objects of the image, in descending order of area.
        vector: (D,) float32 of unit length, the direction of the mean of its tokens.
        mask: mask of the object.
        box: bounding box of the mask.
        area: area of the mask in pixels.
        share: share of the image's area, 0-1.
    """

    number: int
    vector: Float[np.ndarray, " d"]
    mask: GridMask
    box: Box
    area: int

    @property
    def share(self) -> float:
        """Share of the image's area, 0-1."""
        return self.area / (self.mask.image[0] * self.mask.image[1])
