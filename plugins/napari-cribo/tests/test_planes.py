"""Planes of layers become images of 8 bits, by one range for all of them."""

from typing import Any

import numpy as np
import pytest
from napari_cribo.planes import Plane, painted, reading_of

from cribo.base.errors import InputError
from cribo.data.config import PixelOptions

RAMP = np.linspace(100, 4000, 64 * 48).reshape(64, 48).astype(np.uint16)


def test_deep_planes_share_the_range_of_all() -> None:
    bright, dark = Plane("bright", RAMP), Plane("dark", RAMP // 4)
    reading = reading_of([bright, dark])
    assert reading.range is not None
    assert reading.range[0] < 200
    assert reading.range[1] > 3900
    assert np.asarray(dark.in_8_bits(reading)).max() < 70
    own = np.asarray(bright.in_8_bits(reading))
    assert own.shape == (64, 48, 3)
    assert own.min() < 10
    assert own.max() == 255


def test_each_channel_has_its_range() -> None:
    stack = np.stack([RAMP, RAMP // 10, RAMP * 8, RAMP, RAMP])
    plane = Plane("cells", stack, has_channels=True)
    reading = reading_of([plane])
    assert reading.in_chans == 5
    pixels = np.asarray(plane.in_8_bits(reading))
    assert pixels.shape == (64, 48, 5)
    assert pixels.max(axis=(0, 1)).tolist() == [255] * 5
    assert np.abs(pixels[..., 0].astype(int) - pixels[..., 2]).max() <= 1


def test_8_bits_are_not_changed() -> None:
    colour = np.random.default_rng(0).integers(0, 255, (20, 30, 3), dtype=np.uint8)
    plane = Plane("photograph", colour, is_rgb=True)
    reading = reading_of([plane])
    assert reading.range is None
    assert np.array_equal(np.asarray(plane.in_8_bits(reading)), colour)


def test_a_plane_of_a_stack_with_channels_is_read() -> None:
    data = np.random.default_rng(0).integers(0, 255, (2, 4, 20, 30), dtype=np.uint8)
    plane = Plane("stack", data, (3,), has_channels=True)
    assert plane.shape == (4, 20, 30)
    assert np.array_equal(plane.values(), np.moveaxis(data[:, 3], 0, -1))


def test_painted_planes_of_a_stack_are_found() -> None:
    plane = Plane("stack", np.zeros((5, 20, 30), np.uint8), (0,))
    strokes = np.zeros((5, 20, 30), np.uint8)
    strokes[1, 3, 4], strokes[4, 5, 6] = 1, 2
    found = list(painted(strokes, plane))
    assert [each.index for each, _ in found] == [(1,), (4,)]
    assert found[1][1][5, 6] == 2
    strokes[1] = 0
    assert found[0][1].any()  # a copy


@pytest.mark.parametrize(
    ("data", "options"),
    [
        (np.zeros((20, 30), np.complex64), {}),
        (np.zeros(20, np.uint8), {}),
        (np.zeros((4, 20, 30), np.uint8), {}),
        (np.zeros((20, 30, 3), np.uint8), {"is_rgb": True, "has_channels": True}),
    ],
    ids=["complex", "one axis", "no index", "RGB and channels"],
)
def test_other_data_is_refused(data: np.ndarray, options: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        Plane("layer", data, **options)


@pytest.mark.parametrize(
    "reading",
    [PixelOptions(), PixelOptions(channels=(0, 1))],
    ids=["memory of 8 bits", "memory of two channels"],
)
def test_planes_unlike_the_memory_are_refused(reading: PixelOptions) -> None:
    with pytest.raises(InputError, match="cells"):
        Plane("cells", RAMP).in_8_bits(reading)


def test_strokes_must_have_the_shape_of_their_image() -> None:
    with pytest.raises(InputError, match="shape"):
        list(painted(np.ones((20, 30), np.uint8), Plane("stack", np.zeros((5, 20, 30), np.uint8), (0,))))
