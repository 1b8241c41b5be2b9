"""Limits on the pixels and the number of images, the range of their values, and formats of labels; no torch."""

from dataclasses import dataclass
from typing import Annotated, Literal

from cribo.base.bounds import at_least, check_bounds
from cribo.base.errors import DataError

MAX_PIXELS = 2 * 89_478_485
"""Default limit of width x height: the size at which Pillow refuses to open an image."""


@dataclass(frozen=True)
class Reading:
    """How images are read.

    Attributes:
        max_pixels: larger images count as unreadable, since a small file can expand to more pixels than fit into
            memory. Raise it for larger images.
        range: LOW,HIGH, the values that become black and white in images with more than 8 bits per channel, such as
            0,4095 for a camera of 12 bits. Give it if images are refused as nearly black, if the log reports dark
            images, or for pixels of 32 bits. [the range that the file states, else 0,65535]

    Raises:
        InputError: a value is out of range.
    """

    max_pixels: Annotated[int, at_least(4)] = MAX_PIXELS
    range: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.range is not None and not -float("inf") < self.range[0] < self.range[1] < float("inf"):
            raise DataError(f"range must be two ascending numbers LOW,HIGH, got {self.range[0]:g},{self.range[1]:g}")


LabelFormatName = Literal["coco", "yolo", "cvat", "label-studio", "labelme", "geojson", "voc", "maps"]
"""Formats of labels: the rows of `data.labelled.formats.LABEL_FORMATS`."""

DEFAULT_READING = Reading()
"""Limit of pixels and range of values without options."""

READING_SHORT = {"--max_pixels": "--reading.max_pixels", "--range": "--reading.range"}
"""Short options for the fields of a `Reading`."""


def spread(count: int, most: int) -> list[int]:
    """Return up to `most` indices below `count`, evenly spaced.

    Example:
        >>> spread(10, 3), spread(2, 3)
        ([0, 3, 6], [0, 1])
    """
    number = min(count, most)
    return [place * count // number for place in range(number)]
