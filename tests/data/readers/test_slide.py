"""Slides are made-up files in Aperio's layout, which openslide opens."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from tests.data.readers.test_scale import SMOOTH, halved

from cribo.base.errors import MissingPackage, TooManyPixels, UnreadableImage
from cribo.data.config import Reading
from cribo.data.reading import (
    EncodedImage,
    ImageOnDisk,
    image_content,
    image_size,
    open_windows,
    read_image,
    read_valid,
)
from cribo.data.sources.collection import open_collection
from cribo.data.windows import LargeImage, read_or_open

PIXELS = np.tile(SMOOTH, (2, 2, 1))


def write_slide(path: Path, values: np.ndarray = PIXELS, *, levels: int = 3, mpp: float | None = 0.25) -> Path:
    """Write a slide with tiles, a thumbnail and levels that are halved."""
    height, width = values.shape[:2]
    about = f"Aperio Image Library v1\r\n{width}x{height} [0,0 {width}x{height}] (64x64) RGB|AppMag = 40"
    about += "" if mpp is None else f"|MPP = {mpp}"
    common: dict[str, Any] = {"photometric": "rgb", "metadata": None, "description": about}
    with tifffile.TiffWriter(path) as file:
        file.write(values, tile=(64, 64), **common)
        file.write(values[::8, ::8], rowsperstrip=16, **common)  # the thumbnail
        for _ in range(levels - 1):
            values = halved(values)
            file.write(values, tile=(64, 64), subfiletype=1, **common)
    return path


def read(path: Path, **reading: Any) -> np.ndarray:
    return read_image(path, reading=Reading(**reading)).permute(1, 2, 0).numpy()


@pytest.fixture
def slide(tmp_path: Path) -> Path:
    pytest.importorskip("openslide", reason="requires the extra slides")
    return write_slide(tmp_path / "a.svs")


def test_levels_of_slides_are_read(slide: Path) -> None:
    np.testing.assert_array_equal(read(slide), PIXELS)
    np.testing.assert_array_equal(read(slide, pixel_size=0.5), halved(PIXELS))
    np.testing.assert_array_equal(read(slide, pixel_size=1.0), halved(halved(PIXELS)))
    assert image_size(slide, reading=Reading(pixel_size=2)) == (75, 102)
    assert read_valid(slide) is None
    np.testing.assert_array_equal(read(slide, channels=(2, 0)), PIXELS[..., [2, 0]])
    grey = read(slide, channels=(1,))
    np.testing.assert_array_equal(grey, PIXELS[..., [1, 1, 1]])


def test_windows_of_slides_equal_the_whole(slide: Path) -> None:
    for pixel_size in (None, 0.3, 0.5, 0.8):
        reading = Reading(pixel_size=pixel_size)
        whole = read(slide, pixel_size=pixel_size)
        with open_windows(slide, reading=reading) as picture:
            assert picture is not None
            found = picture.window(33, 20, 90, 101).pixels
            np.testing.assert_allclose(found, whole[33:123, 20:121], atol=1)
            np.testing.assert_allclose((picture.pixel_size or (0,))[:2], pixel_size or 0.25, rtol=0.01)


def test_large_slides_are_read_in_bands(slide: Path) -> None:
    file, reading = image_content("a.svs", str(slide)), Reading(max_pixels=200_000)
    assert isinstance(file, ImageOnDisk)  # openslide needs the file
    image = read_or_open(file, reading)
    assert isinstance(image, LargeImage)
    with image.open() as rows:
        np.testing.assert_array_equal(rows(500, 100).pixels.permute(1, 2, 0), PIXELS[500:600])
    assert not isinstance(read_or_open(file, Reading(max_pixels=200_000, pixel_size=1)), LargeImage)
    with pytest.raises(TooManyPixels):
        read(slide, max_pixels=200_000)
    with pytest.raises(TooManyPixels):  # a tile
        read(slide, max_pixels=4000, pixel_size=8)


def test_folders_are_searched_for_slides(slide: Path) -> None:
    images = open_collection(slide.parent)
    assert [images.name(index) for index in range(len(images))] == ["a.svs"]
    assert images.load(0).shape == (3, 600, 820)


@pytest.mark.parametrize(
    ("reading", "option"),
    [
        ({"page": 1}, "--page"),
        ({"channels": (0, 3)}, "--channels"),
        ({"range": (0, 1, 0, 2), "channels": (0, 1)}, "--range"),
        ({"pixel_size": 0.1}, "--pixel_size"),
    ],
)
def test_options_that_a_slide_lacks_are_refused(slide: Path, reading: dict[str, Any], option: str) -> None:
    with pytest.raises(UnreadableImage, match=option):
        read(slide, **reading)


def test_other_files_are_refused(slide: Path) -> None:
    content = EncodedImage("a.svs", slide.read_bytes())
    with pytest.raises(UnreadableImage, match="shards"):
        read_image(content)
    write_slide(slide, mpp=None)
    with pytest.raises(UnreadableImage, match="--pixel_size"):
        read(slide, pixel_size=1)
    tifffile.imwrite(slide, PIXELS, photometric="rgb")  # without tiles
    with pytest.raises(UnreadableImage, match="openslide"):
        read(slide)
    slide.write_bytes(b"II*\0\x08\0\0\0")
    with pytest.raises(UnreadableImage):
        read(slide)


def test_a_truncated_slide_is_refused(slide: Path) -> None:
    content = slide.read_bytes()
    for size in (len(content) // 2, len(content) - 50_000):
        slide.write_bytes(content[:size])
        with pytest.raises(UnreadableImage):
            read(slide)


def test_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_slide(tmp_path / "a.svs")
    monkeypatch.setattr("cribo.base.packages.importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingPackage, match="slides"):
        read_image(path)
