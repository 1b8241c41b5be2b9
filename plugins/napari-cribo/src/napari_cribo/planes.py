"""Planes of image layers: two-dimensional pictures of any type, and their conversion to 8 bits."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Num, UInt8
from PIL import Image as Picture

from cribo.base.errors import InputError
from cribo.data.channels import scaled
from cribo.data.config import PixelOptions
from cribo.data.survey import percentile_limits

_MOST_VALUES = 2**16  # of a channel of a plane, for the range of values


@dataclass(frozen=True)
class Plane:
    """A plane of an image layer, which is read when its values are needed.

    Attributes:
        name: name of the layer.
        data: (..., Y, X), with RGB or RGBA after it if `is_rgb`, or with channels before it if `has_channels`; a NumPy
            array, or another one with its slicing, such as dask's.
        index: index of the plane along the axes between the channels and Y.
        is_rgb: whether the last axis is red, green, blue and perhaps opacity.
        has_channels: whether the first axis is the channels of the image.

    Raises:
        InputError: the data has too few axes, or a type that is no image.
    """

    name: str
    data: Any
    index: tuple[int, ...] = ()
    is_rgb: bool = False
    has_channels: bool = False

    def __post_init__(self) -> None:
        if self.is_rgb and self.has_channels:
            raise InputError(f"{self.name} is RGB: its first axis cannot be channels")
        if len(self.shape) < 2:
            raise InputError(f"{self.name} has the shape {self.data.shape}: an image must have two axes or more")
        if len(self.index) != len(self.shape) - 2:
            raise InputError(f"{self.name} has {len(self.shape)} axes: the index of a plane must have two fewer")
        if np.dtype(self.data.dtype).kind not in "buif":
            raise InputError(f"{self.name} has values of type {self.data.dtype}: convert them to numbers")

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the image without channels: (..., Y, X)."""
        shape = tuple(self.data.shape)
        return shape[: -1 if self.is_rgb else None][1 if self.has_channels else 0 :]

    @property
    def title(self) -> str:
        """Name of the layer, and the index of the plane in a stack."""
        return f"{self.name}, plane {', '.join(map(str, self.index))}" if self.index else self.name

    @property
    def channels(self) -> int | None:
        """Number of channels; None for grey and RGB images."""
        return int(self.data.shape[0]) if self.has_channels else None

    @property
    def is_deep(self) -> bool:
        """Whether the values have another type than 8-bit integers or booleans."""
        return np.dtype(self.data.dtype) not in (np.uint8, np.bool_)

    def values(self) -> Num[np.ndarray, "h w c"]:
        """Return the values of the plane; c is 1 for grey images."""
        if self.has_channels:
            return np.moveaxis(np.asarray(self.data[(slice(None), *self.index)]), 0, -1)
        plane = np.asarray(self.data[self.index])
        return plane if self.is_rgb else plane[..., None]

    def in_8_bits(self, reading: PixelOptions) -> Picture.Image | UInt8[np.ndarray, "h w c"]:
        """Return the plane as `SegmentationMemory` takes it; grey becomes RGB.

        Args:
            reading: channels and range of the memory.

        Raises:
            InputError: the plane has another number of channels than those images, or the range is unknown.
        """
        numbers = reading.channel_numbers
        if self.channels != (None if numbers is None else len(numbers)):
            wanted = "grey or RGB" if numbers is None else f"of {len(numbers)} channels"
            own = "grey or RGB" if self.channels is None else f"of {self.channels} channels"
            raise InputError(f"{self.name} is {own}, but the strokes or the memory are on images that are {wanted}")
        values = self.values()
        if self.is_deep:
            if reading.range is None:
                raise InputError(
                    f"{self.name} has {self.data.dtype} values, but the memory is of 8-bit images: convert the layer "
                    "to 8 bits"
                )
            limits = [reading.limits(place) or (0, 1) for place in range(values.shape[-1])]
            # Opacity has no range of its own.
            values = np.stack([scaled(values[..., place], *each) for place, each in enumerate(limits)], axis=-1)
            values = values[..., :3] if self.is_rgb else values
        elif values.dtype == np.bool_:
            values = values.astype(np.uint8) * np.uint8(255)
        if self.is_rgb and values.shape[-1] == 4:
            return Picture.fromarray(np.ascontiguousarray(values))
        return np.repeat(values, 3, axis=-1) if values.shape[-1] == 1 else np.ascontiguousarray(values)


def reading_of(planes: Sequence[Plane]) -> PixelOptions:
    """Return the channels of images, and the range of their values if they have no 8-bit values.

    As for files, the values of black and white are the percentiles 0.1 and 99.9 of all planes, of each channel.

    Raises:
        InputError: the images have different numbers of channels.
    """
    counts = {plane.channels: plane.name for plane in planes}
    if len(counts) > 1:
        listed = ", ".join(f"{name}: {count or 'grey or RGB'}" for count, name in counts.items())
        raise InputError(f"the painted images have different numbers of channels ({listed}): label them separately")
    channels = next(iter(counts), None)
    found = [_some(plane) for plane in planes if plane.is_deep]
    limits = None
    if found and channels is not None:
        limits = percentile_limits(np.concatenate(found))
    elif found:
        limits = percentile_limits(np.concatenate([values.reshape(-1, 1) for values in found]))
    return PixelOptions(
        channels=None if channels is None else tuple(range(channels)),
        range=None if limits is None else tuple(limits.ravel().tolist()),
    )


def _some(plane: Plane) -> Num[np.ndarray, "n c"]:
    """Return evenly spread values of each channel of a plane."""
    values = plane.values()
    values = values[..., :3] if plane.is_rgb else values
    flat = values.reshape(-1, values.shape[-1])
    return flat[:: max(1, -(-len(flat) // _MOST_VALUES))]


def painted(strokes: Num[np.ndarray, "*shape"], plane: Plane) -> Iterator[tuple[Plane, Num[np.ndarray, "h w"]]]:
    """Yield the planes of an image on which something is painted, with a copy of the strokes.

    Args:
        strokes: label of each pixel, 0 for none.
        plane: any plane of the image.

    Raises:
        InputError: the strokes have another shape than the image.
    """
    if strokes.shape != plane.shape:
        raise InputError(f"the strokes of {plane.name} must have the shape {plane.shape}, got {strokes.shape}")
    for index in np.argwhere(strokes.any(axis=(-2, -1))).tolist():
        yield (
            Plane(plane.name, plane.data, tuple(index), plane.is_rgb, plane.has_channels),
            strokes[tuple(index)].copy(),
        )
