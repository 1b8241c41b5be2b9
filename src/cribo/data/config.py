"""Limits on the pixels and the number of images, their values and their scale, and formats of labels; no torch."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal, Self

from cribo.base.bounds import at_least, check_bounds
from cribo.base.errors import InputError
from cribo.base.wording import option_text

MAX_PIXELS = 2 * 89_478_485
"""Default limit of width x height: the size at which Pillow refuses to open an image."""


_CHANNEL = re.compile(r"([^=,]+=)?\d+")


@dataclass(frozen=True, kw_only=True)
class PixelOptions:
    """Selection of the channels, the page, the range of values and the scale when image files are read.

    Attributes:
        range: LOW,HIGH, the values that become black and white in images with more than 8 bits per channel, such as
            0,4095 for a camera of 12 bits; or LOW,HIGH for each of `channels`. Give it if images are too dark or
            too bright, or for a single image of 32 bits. [the range that the file states, else
            the percentiles 0.1 and 99.9 of the collection]
        channels: numbers, from 0, of the channels to read, such as 3,2,1, with names if you like, such as
            nuclei=0,membrane=2. Three become red, green and blue, one becomes grey; for any other number, the first
            layer of an RGB network is inflated to take them. Required for images with other numbers of channels. [all
            of grey and RGB images]
        page: number, from 0, of the one page of each stack to read, such as a plane, a time or a depth. [every page is
            an image of its own, named stack.page003.tif]
        pixel_size: side of a pixel to which images are resized: in micrometres for slides, OME-TIFF and other TIFFs
            that state their resolution, in units of the map, such as metres, for GeoTIFF. Of a pyramid, the level that
            is just as fine or finer is read. Give it if objects have different sizes in pixels in images of
            several magnifications, or if less detail suffices. 0 is full resolution, whatever a backbone states.
            [full resolution]

    Raises:
        InputError: a value is out of range.
    """

    range: tuple[float, ...] | None = None
    channels: tuple[int | str, ...] | None = None
    page: Annotated[int, at_least(0)] | None = None
    pixel_size: Annotated[float, at_least(0)] | None = None

    def __post_init__(self) -> None:
        for name in ("range", "channels"):  # lists in JSON
            if getattr(self, name) is not None:
                object.__setattr__(self, name, tuple(getattr(self, name)))
        check_bounds(self)
        channels, limits = self.channels, self.range
        if channels is not None:
            parts = [_CHANNEL.fullmatch(str(each)) for each in channels]
            if not channels or not all(parts):
                raise InputError(
                    f"channels must be numbers from 0, or NAME=NUMBER, such as nuclei=0,2; got {option_text(channels)}"
                )
        if limits is None:
            return
        if len(limits) != 2 and (channels is None or len(limits) != 2 * len(channels)):
            raise InputError(
                f"range must be two numbers LOW,HIGH, or two for each of channels, got {option_text(limits)}"
            )
        for low, high in zip(limits[::2], limits[1::2], strict=True):
            if not -float("inf") < low < high < float("inf"):
                raise InputError(f"range must be two ascending numbers LOW,HIGH, got {option_text((low, high))}")

    @property
    def full_resolution(self) -> Self:
        """The same options without a pixel size."""
        return replace(self, pixel_size=None)

    def limits(self, channel: int = 0) -> tuple[float, float] | None:
        """Return the values of black and white of a channel, by its place in `channels`; None if they are not given."""
        if self.range is None:
            return None
        start = 2 * channel if len(self.range) > 2 else 0
        return self.range[start], self.range[start + 1]

    @property
    def channel_numbers(self) -> tuple[int, ...] | None:
        """The channels' numbers in the file; None for all channels."""
        return None if self.channels is None else tuple(int(str(each).rpartition("=")[2]) for each in self.channels)

    def channel_name(self, place: int) -> str:
        """Return the name of a channel, by its place in `channels`; "channel NUMBER" without a name.

        >>> PixelOptions(channels=("nuclei=4", 1)).channel_name(0), PixelOptions(channels=(4, 1)).channel_name(1)
        ('nuclei', 'channel 1')
        """
        name, _, number = str(self.channels[place] if self.channels else place).rpartition("=")
        return name or f"channel {number}"

    @property
    def in_chans(self) -> int:
        """C, the number of channels of the images that are read: 3, or that of `channels` if it is not 1."""
        return 3 if self.channels is None or len(self.channels) == 1 else len(self.channels)

    @property
    def given(self) -> dict[str, Any]:
        """The options that are not None, as JSON types."""
        values = {name: getattr(self, name) for name in PIXEL_OPTIONS}
        lists = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
        return {name: value for name, value in lists.items() if value is not None}

    @property
    def trained_with(self) -> dict[str, Any] | None:
        """The options that matter to a network trained on the images, as JSON types; None without any."""
        return {name: value for name, value in self.given.items() if name != "page"} or None

    def completed(self, known: Mapping[str, Any]) -> Self:
        """Return these options, with those of `known` where they are None.

        A range for each of its channels applies to these channels only.

        >>> PixelOptions(range=(0, 9)).completed({"channels": (1, 0), "range": (0, 1)}).given
        {'range': [0, 9], 'channels': [1, 0]}
        """
        stored = PixelOptions(**known)
        is_of_others = self.channels not in (None, stored.channels) and len(stored.range or ()) > 2
        stored = replace(stored, range=None) if is_of_others else stored
        return replace(self, **{name: each for name, each in stored.given.items() if getattr(self, name) is None})

    @property
    def key(self) -> bytes:
        """Bytes that identify these options in hashes; empty for the defaults."""
        if self.given.keys() <= {"range"}:  # as in earlier versions
            return b"" if self.range is None else str(self.range).encode()
        return str(sorted(self.given.items())).encode()


@dataclass(frozen=True, kw_only=True)
class Reading(PixelOptions):
    """How images are read.

    Attributes:
        max_pixels: larger images count as unreadable, since a small file can expand to more pixels than fit into
            memory. Raise it for larger images.

    Raises:
        InputError: a value is out of range.
    """

    max_pixels: Annotated[int, at_least(4)] = MAX_PIXELS


LabelFormatName = Literal["coco", "yolo", "cvat", "label-studio", "labelme", "geojson", "voc", "maps"]
"""Formats in which labels are read: rows of `data.labelled.formats.LABEL_FORMATS`."""

PIXEL_OPTIONS = tuple(field.name for field in fields(PixelOptions))
"""Names of the fields of `PixelOptions`."""

DEFAULT_READING = Reading()
"""How images are read without options."""

READING_SHORT = {f"--{name}": f"--reading.{name}" for name in ("max_pixels", *PIXEL_OPTIONS)}
"""Short options for the fields of a `Reading`."""


def spread(count: int, most: int) -> list[int]:
    """Return up to `most` indices below `count`, evenly spaced.

    Example:
        >>> spread(10, 3), spread(2, 3)
        ([0, 3, 6], [0, 1])
    """
    number = min(count, most)
    return [place * count // number for place in range(number)]
