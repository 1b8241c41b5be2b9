"""Large images in overlapping windows that are aligned to one grid of patches."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor

from cribo.base.errors import UnreadableImage
from cribo.base.machine import give_freed_memory_back
from cribo.data.windows import LargeImage, Rows
from cribo.features.grid import window_starts

Item = TypeVar("Item")
Result = TypeVar("Result")

WINDOW = 512
"""Approximate side of a window in pixels of the encoded image, without other settings."""

PATCHES_AT_ONCE = 16_384
"""Limit on the number of patches that are encoded at once."""


@dataclass(frozen=True)
class WindowGrid:
    """Square windows of an image, on its grid of patches.

    The last windows of each direction end with the image. Its last patches may extend beyond it.

    Attributes:
        size: height and width of the image in pixels.
        patch: side of a patch in pixels of the image.
        side: side of a window in patches.
        step: distance between windows in patches.

    Example:
        >>> windows = WindowGrid((1000, 300), patch=14, side=36, step=24)
        >>> windows.grid, windows.shape, windows.tops, windows.lefts
        ((72, 22), (36, 22), [0, 24, 36], [0])
    """

    size: tuple[int, int]
    patch: int
    side: int
    step: int

    @property
    def grid(self) -> tuple[int, int]:
        """Number of rows and columns of patches."""
        return -(-self.size[0] // self.patch), -(-self.size[1] // self.patch)

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows and columns of patches in a window; fewer than `side` in a narrow image."""
        return min(self.side, self.grid[0]), min(self.side, self.grid[1])

    @property
    def tops(self) -> list[int]:
        """First row of patches of the windows."""
        return window_starts(self.grid[0], self.side, self.step)

    @property
    def lefts(self) -> list[int]:
        """First column of patches of the windows."""
        return window_starts(self.grid[1], self.side, self.step)


def read_bands(image: LargeImage, windows: WindowGrid, *, above: int = 0) -> Iterator[tuple[int, Rows]]:
    """Yield the first row of each row of windows, in patches, and its pixels over the whole width of the image.

    Where the last patches extend beyond the image, its last pixels are repeated; `Rows.valid` does not extend.

    Args:
        image: the image.
        windows: its windows.
        above: number of rows of patches above the windows to include, if the image has them.

    Raises:
        UnreadableImage: pixels cannot be decoded.
    """
    height, width = image.size
    with image.open() as read:
        for top in windows.tops:
            start, end = max(0, top - above) * windows.patch, (top + windows.shape[0]) * windows.patch
            rows = read(start, min(end, height) - start)
            beyond = max(0, end - height), windows.grid[1] * windows.patch - width
            if any(beyond):
                pixels = F.pad(rows.pixels[None].float(), (0, beyond[1], 0, beyond[0]), mode="replicate")[0].byte()
                rows = rows._replace(pixels=pixels)
            yield top, rows
            # Freed arrays of various sizes would fragment the heap (`keep_freed_memory`), which grows with every row.
            give_freed_memory_back()


def hann_weights(height: int, width: int) -> Float[Tensor, "height width 1"]:
    """Return non-zero Hann weights of the patches of a window, which have the least context near its border."""
    down, across = (torch.hann_window(side + 2, periodic=False)[1:-1] for side in (height, width))
    return down[:, None, None] * across[:, None]


def window_batches(
    image: LargeImage, windows: WindowGrid, batch_size: int
) -> Iterator[tuple[list[tuple[int, int]], UInt8[Tensor, "b c height width"]]]:
    """Yield the windows of an image in batches, in rows from top to bottom: their first patches, and their pixels.

    Raises:
        UnreadableImage: pixels cannot be decoded.
    """
    (height, width), patch = windows.shape, windows.patch
    most = max(1, min(batch_size, PATCHES_AT_ONCE // (height * width)))
    for top, (pixels, _) in read_bands(image, windows):
        for start in range(0, len(windows.lefts), most):
            lefts = windows.lefts[start : start + most]
            cut = [pixels[:, :, left * patch : (left + width) * patch] for left in lefts]
            yield [(top, left) for left in lefts], torch.stack(cut)


def with_large(
    images: Sequence[Item | LargeImage],
    together: Callable[[list[Item]], Iterable[Result]],
    alone: Callable[[LargeImage], Result],
) -> Iterator[Result | UnreadableImage]:
    """Process decoded images together and large images one by one, and yield the results in order.

    Args:
        images: the images.
        together: returns the results of images that have been read.
        alone: returns the result of a large image; if pixels cannot be decoded, its error is the result.
    """
    found = iter(together([image for image in images if not isinstance(image, LargeImage)]))
    for image in images:
        if not isinstance(image, LargeImage):
            yield next(found)
            continue
        try:
            yield alone(image)
        except UnreadableImage as error:
            yield error
