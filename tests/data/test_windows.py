"""Images above the limit of pixels: windows equal the image decoded as a whole, and faults are named."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image

from cribo.base.errors import TooManyPixels, UnreadableImage
from cribo.data.config import Reading
from cribo.data.reading import HELD_BYTES, EncodedImage, ImageOnDisk, image_content, open_windows, read_image
from cribo.data.windows import LargeImage, open_large, read_or_open

RGB = np.random.default_rng(0).integers(0, 256, (300, 410, 3), dtype=np.uint8)
FIVE = np.random.default_rng(1).integers(0, 60_000, (5, 300, 410), dtype=np.uint16)

LAYOUTS: dict[str, dict[str, Any]] = {
    "tiles": {"tile": (64, 64), "compression": "zlib"},
    "strips": {"rowsperstrip": 7, "compression": "zlib", "predictor": True},
    "uncompressed": {},
    "uncompressed tiles": {"tile": (32, 48)},
    "big endian": {"byteorder": ">", "rowsperstrip": 16},
    "planes": {"planarconfig": "separate", "tile": (64, 64), "compression": "zlib"},
}
CHANNELS: dict[str, dict[str, Any]] = {
    "pages": {},
    "tiled pages": {"compression": "zlib", "tile": (64, 64)},
    "planes": {"planarconfig": "separate", "photometric": "minisblack", "compression": "zlib", "tile": (64, 64)},
}


def write(path: Path, values: np.ndarray = RGB, **layout: Any) -> Path:
    tifffile.imwrite(path, values, **{"photometric": "rgb", **layout})
    return path


@pytest.mark.parametrize("layout", LAYOUTS)
def test_windows_equal_the_whole_image(tmp_path: Path, layout: str) -> None:
    values = RGB.transpose(2, 0, 1) if layout == "planes" else RGB
    path = write(tmp_path / "a.tif", values, **LAYOUTS[layout])
    whole = read_image(path).permute(1, 2, 0).numpy()
    with open_windows(path) as picture:
        assert picture is not None
        for top, left, height, width in ((0, 0, 300, 410), (30, 50, 200, 333), (63, 64, 1, 1), (299, 0, 1, 410)):
            found = picture.window(top, left, height, width).pixels
            np.testing.assert_array_equal(found, whole[top : top + height, left : left + width])


@pytest.mark.parametrize("layout", CHANNELS)
def test_channels_of_windows_are_chosen_and_scaled(tmp_path: Path, layout: str) -> None:
    path = write(tmp_path / "a.tif", FIVE, **{"photometric": "minisblack", **CHANNELS[layout]})
    reading = Reading(channels=(4, 0, 2, 1), range=(0, 60_000))
    whole = read_image(path, reading=reading).permute(1, 2, 0).numpy()
    with open_windows(path, reading=reading) as picture:
        assert picture is not None
        np.testing.assert_array_equal(picture.window(30, 50, 200, 333).pixels, whole[30:230, 50:383])


def test_an_image_above_the_limit_is_read_in_bands(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tif", tile=(64, 64), compression="zlib")
    file, reading = EncodedImage("a.tif", path.read_bytes()), Reading(max_pixels=60_000)
    image, whole = read_or_open(file, reading), read_image(path)
    assert isinstance(image, LargeImage)
    assert image.size == (300, 410)
    with image.open() as read:
        for top in (0, 37, 74, 200, 10):  # also rows of the band before, and a jump back
            torch.testing.assert_close(read(top, 100).pixels, whole[:, top : top + 100], rtol=0, atol=0)
        with pytest.raises(TooManyPixels):
            read(0, 150)
    assert isinstance(read_or_open(file, Reading()), torch.Tensor)


def test_other_kinds_above_the_limit_are_refused(tmp_path: Path) -> None:
    Image.fromarray(RGB).save(tmp_path / "a.png")
    file, reading = EncodedImage("a.png", (tmp_path / "a.png").read_bytes()), Reading(max_pixels=1000)
    assert open_large(file, reading) is None
    with pytest.raises(TooManyPixels, match="max_pixels"):
        read_or_open(file, reading)


def test_faults_of_large_images_are_named(tmp_path: Path) -> None:
    def read_last(content: bytes) -> None:
        image = open_large(EncodedImage("a.tif", content), Reading(max_pixels=60_000))
        assert image is not None
        with image.open() as read:
            read(250, 50)

    def error(path: Path, size: int | None = None) -> str:
        with pytest.raises(UnreadableImage) as raised:
            read_last(path.read_bytes()[:size])
        return raised.value.reason

    compressed = {"tile": (64, 64), "compression": "zlib"}
    tiles = write(tmp_path / "tiles.tif", **compressed)
    assert "truncated" in error(tiles, tiles.stat().st_size - 20_000)
    pages = np.stack([RGB] * 2)
    assert "--page" in error(write(tmp_path / "pages.tif", pages))
    channels = FIVE.transpose(1, 2, 0)
    assert "--channels" in error(write(tmp_path / "c.tif", channels, photometric="minisblack", planarconfig="contig"))
    grey = write(tmp_path / "grey.tif", FIVE[0], photometric="minisblack", **compressed)
    assert "--range" in error(grey)
    turned = write(tmp_path / "turned.tif", extratags=[(274, "H", 1, 6, True)], **compressed)
    assert "orientation" in error(turned)
    strip = write(tmp_path / "strip.tif", rowsperstrip=300, compression="zlib")
    assert "123000 pixels" in error(strip)


def test_large_files_are_not_held_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.tif", compression="zlib", tile=(64, 64))
    assert path.stat().st_size < HELD_BYTES
    held = image_content("a.tif", str(path))
    monkeypatch.setattr("cribo.data.reading.HELD_BYTES", 1000)
    on_disk = image_content("a.tif", str(path))
    assert isinstance(held, EncodedImage)
    assert isinstance(on_disk, ImageOnDisk)
    assert held.sha256 == on_disk.sha256
    torch.testing.assert_close(read_image(on_disk), read_image(held))
