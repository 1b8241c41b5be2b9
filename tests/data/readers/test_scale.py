"""Images are read at a pixel size from the level of their pyramid that is just as fine or finer."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from PIL import Image

from cribo.base.errors import InputError, MissingPackage, TooManyPixels, UnreadableImage
from cribo.data.config import Reading
from cribo.data.readers.scale import MAP_UNITS, MICROMETRES, PixelSize, Scale
from cribo.data.reading import image_size, open_windows, read_image, read_valid

OF_TILES: dict[str, Any] = {"tile": (64, 64), "compression": "zlib"}
LEVELS = [(4000, 3000), (1000, 750), (250, 188)]
RNG = np.random.default_rng(0)
SMOOTH = np.asarray(
    Image.fromarray(RNG.integers(0, 256, (10, 12, 3), dtype=np.uint8)).resize((410, 300), Image.Resampling.BICUBIC)
)


def halved(values: np.ndarray) -> np.ndarray:
    height, width = (side // 2 * 2 for side in values.shape[:2])
    parts = values[:height, :width].reshape(height // 2, 2, width // 2, 2, -1).astype(float)
    return parts.mean((1, 3)).round().astype(values.dtype)


def write_pyramid(path: Path, values: np.ndarray, levels: int = 3, *, pixel: float = 0.5, **options: Any) -> Path:
    """Write a TIFF of tiles with its reduced levels, whose pixels have a size in micrometres."""
    resolution = {"resolution": (10_000 / pixel, 10_000 / pixel), "resolutionunit": "CENTIMETER"}
    common = {"photometric": "rgb", **OF_TILES, **options}
    with tifffile.TiffWriter(path) as file:
        file.write(values, subifds=levels - 1, **resolution, **common)
        for _ in range(levels - 1):
            values = halved(values)
            file.write(values, subfiletype=1, **common)
    return path


def read(path: Path, pixel_size: float | None = None, **reading: Any) -> np.ndarray:
    return read_image(path, reading=Reading(pixel_size=pixel_size, **reading)).permute(1, 2, 0).numpy()


@pytest.mark.parametrize(
    ("pixel_size", "level", "size"),
    [
        (None, 0, (4000, 3000)),
        (0, 0, (4000, 3000)),
        (0.5, 0, (4000, 3000)),
        (1.0, 0, (2000, 1500)),
        (1.99, 1, (1000, 750)),  # within 1 %
        (2.0, 1, (1000, 750)),
        (3.0, 1, (667, 500)),
        (8.0, 2, (250, 188)),
        (100.0, 2, (20, 15)),
        (0.45, 0, (4444, 3333)),
    ],
)
def test_the_coarsest_level_that_is_fine_enough_is_read(
    pixel_size: float | None, level: int, size: tuple[int, int]
) -> None:
    found = Scale.of(LEVELS, PixelSize(0.5, 0.5, MICROMETRES), Reading(pixel_size=pixel_size))
    assert (found.level, found.stored, found.size) == (level, LEVELS[level], size)


def test_pixels_that_are_no_squares_become_squares() -> None:
    stated = PixelSize(1.0, 0.5, MAP_UNITS)
    found = Scale.of([(100, 200), (50, 100)], stated, Reading(pixel_size=1.0))
    assert (found.level, found.size) == (0, (100, 100))
    assert stated.of((100, 200), found.size) == (1.0, 1.0, MAP_UNITS)


def test_a_missing_size_and_one_below_the_finest_are_refused() -> None:
    with pytest.raises(InputError, match="--pixel_size"):
        Scale.of(LEVELS, None, Reading(pixel_size=1.0))
    with pytest.raises(InputError, match=r"0\.5 micrometres.*--pixel_size 0\.1 .*at least 0\.4"):
        Scale.of(LEVELS, PixelSize(0.5, 0.5, MICROMETRES), Reading(pixel_size=0.1))
    assert Scale.of(LEVELS, None, Reading(pixel_size=0)).size == LEVELS[0]


def test_levels_of_pyramids_are_read(tmp_path: Path) -> None:
    path = write_pyramid(tmp_path / "a.tif", SMOOTH)
    np.testing.assert_array_equal(read(path), SMOOTH)
    np.testing.assert_array_equal(read(path, 0.5), SMOOTH)
    np.testing.assert_array_equal(read(path, 1.0), halved(SMOOTH))
    np.testing.assert_array_equal(read(path, 2.0), halved(halved(SMOOTH)))
    assert image_size(path, reading=Reading(pixel_size=1.5)) == (100, 137)
    resized = read(path, 1.5)
    expected = Image.fromarray(SMOOTH).resize((137, 100), Image.Resampling.BILINEAR)
    assert np.abs(resized.astype(int) - np.asarray(expected)).mean() < 2
    # Pages that are marked as reduced are levels, too.
    with tifffile.TiffWriter(tmp_path / "pages.tif") as file:
        resolution = {"resolution": (20_000, 20_000), "resolutionunit": "CENTIMETER"}
        for number, values in enumerate((SMOOTH, halved(SMOOTH))):
            file.write(values, photometric="rgb", subfiletype=number, metadata=None, **OF_TILES, **resolution)
    np.testing.assert_array_equal(read(tmp_path / "pages.tif", 1.0), halved(SMOOTH))


def test_files_without_a_coarser_level_are_resized_from_what_they_have(tmp_path: Path) -> None:
    whole = write_pyramid(tmp_path / "a.tif", SMOOTH, levels=1)
    np.testing.assert_allclose(read(whole, 1.0), halved(SMOOTH), atol=3)
    assert read(whole, 4.0).shape == (38, 51, 3)
    with pytest.raises(UnreadableImage, match="--pixel_size"):
        read(whole, 0.1)


@pytest.mark.parametrize("pixel_size", [1.0, 2.0])
def test_a_truncated_pyramid_gives_no_other_pixels(tmp_path: Path, pixel_size: float) -> None:
    path = write_pyramid(tmp_path / "a.tif", SMOOTH)
    content, whole = path.read_bytes(), read(path, pixel_size)
    refused = 0
    for part in range(20):
        path.write_bytes(content[: len(content) * part // 20])
        try:  # of the levels that are left
            assert np.abs(read(path, pixel_size).astype(int) - whole).mean() < 3
        except UnreadableImage:
            refused += 1
    assert refused >= 15


def test_levels_with_compression_need_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("imagecodecs", reason="requires the extra tiff")
    path = write_pyramid(tmp_path / "a.tif", SMOOTH, compression="lzw")
    np.testing.assert_array_equal(read(path, 1.0), halved(SMOOTH))
    monkeypatch.setattr("cribo.base.packages.importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingPackage, match="tiff"):
        read(path, 1.0)


def test_windows_equal_the_resized_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_pyramid(tmp_path / "a.tif", SMOOTH)
    for pixel_size in (0.45, 1.0, 1.3, 3.7):
        whole = read(path, pixel_size)
        height, width = whole.shape[:2]
        with open_windows(path, reading=Reading(pixel_size=pixel_size)) as picture:
            assert picture is not None
            assert picture.size() == (height, width)
            stated = picture.pixel_size
            assert stated is not None
            np.testing.assert_allclose(stated[:2], pixel_size, rtol=0.02)
            for top, left, tall, wide in ((0, 0, 1, width), (7, 3, 20, 31), (height - 9, width - 5, 9, 5)):
                found = picture.window(top, left, tall, wide).pixels
                np.testing.assert_allclose(found, whole[top : top + tall, left : left + wide], atol=1)
        monkeypatch.setattr("cribo.data.readers.scale._AT_ONCE", 5000)
        np.testing.assert_allclose(read(path, pixel_size), whole, atol=1)
        monkeypatch.undo()


def test_deep_channels_are_resized_before_they_are_scaled(tmp_path: Path) -> None:
    values = RNG.integers(0, 60_000, (5, 64, 96), dtype=np.uint16)
    path = tmp_path / "a.ome.tif"
    about = {"axes": "CYX", "PhysicalSizeX": 250.0, "PhysicalSizeXUnit": "nm", "PhysicalSizeY": 0.25}
    tifffile.imwrite(path, values, metadata=about, photometric="minisblack")
    found = read(path, 0.5, channels=(4, 0), range=(0, 30_000))
    chosen = [Image.fromarray(values[channel].astype(np.float32)) for channel in (4, 0)]
    expected = np.stack([np.array(each.resize((48, 32), Image.Resampling.BILINEAR)) for each in chosen], axis=-1)
    scaled = np.rint(expected).clip(0, 30_000) / 30_000 * 255
    np.testing.assert_allclose(found, scaled, atol=1)


def test_values_of_no_data_enter_no_mean(tmp_path: Path) -> None:
    resolution = {"resolution": (10_000, 10_000), "resolutionunit": "CENTIMETER"}
    options: dict[str, Any] = {"photometric": "minisblack", **resolution}
    values = np.full((40, 60), 100, np.float32)
    values[:, :21] = np.nan
    tifffile.imwrite(tmp_path / "nan.tif", values, **options)
    lost = np.where(np.isnan(values), -9999, values)
    tifffile.imwrite(tmp_path / "nodata.tif", lost, **options, extratags=[(42113, "s", 0, "-9999", True)])
    for name in ("nan.tif", "nodata.tif"):
        reading = Reading(pixel_size=4, range=(0, 200))
        valid = read_valid(tmp_path / name, reading=reading)
        np.testing.assert_array_equal(valid, np.broadcast_to(np.arange(15) >= 5, (10, 15)))
        pixels = read_image(tmp_path / name, reading=reading)
        assert (pixels[:, :, 5:] == 128).all()


def test_pixel_sizes_are_those_that_files_state(tmp_path: Path) -> None:
    values = np.zeros((40, 60), np.uint8)

    def stated(name: str, **options: Any) -> PixelSize | None:
        tifffile.imwrite(tmp_path / name, values, **{"photometric": "minisblack", **options})
        with open_windows(tmp_path / name) as picture:
            assert picture is not None
            return picture.pixel_size

    assert stated("inch.tif", resolution=(25_400, 12_700), resolutionunit="INCH") == (2, 1, MICROMETRES)
    assert stated("none.tif", resolution=(2, 2), resolutionunit="NONE") is None
    assert stated("plain.tif") is None
    imagej = {"imagej": True, "resolution": (4, 4)}
    assert stated("j.tif", **imagej, metadata={"unit": "um"}) == (0.25, 0.25, MICROMETRES)
    assert stated("n.tif", **imagej, metadata={"unit": "pixel"}) is None
    scale = [(33550, "d", 3, (0.5, 0.25, 0.0), True)]
    assert stated("geo.tif", extratags=scale) == (0.25, 0.5, MAP_UNITS)
    turned = (0.0, 2.0, 0, 9, -2.0, 0.0, 0, 9, 0, 0, 0, 0, 0, 0, 0, 1)
    assert stated("turned.tif", extratags=[(34264, "d", 16, turned, True)]) == (2, 2, MAP_UNITS)
    about = {"PhysicalSizeX": 3.0, "PhysicalSizeY": 2.0, "PhysicalSizeXUnit": "nm", "PhysicalSizeYUnit": "mm"}
    found = stated("x.ome.tif", metadata={"axes": "YX", **about})
    assert found is not None
    np.testing.assert_allclose(found[:2], (2000, 0.003))
    assert stated("y.ome.tif", metadata={"axes": "YX"}) is None
    assert stated("z.ome.tif", metadata={"axes": "YX", **about, "PhysicalSizeXUnit": "pixel"}) is None


def test_other_kinds_state_no_pixel_size(tmp_path: Path) -> None:
    Image.fromarray(SMOOTH).save(tmp_path / "a.png", dpi=(25_400, 25_400))
    with pytest.raises(UnreadableImage, match="--pixel_size"):
        read(tmp_path / "a.png", 2.0)
    np.testing.assert_array_equal(read(tmp_path / "a.png", 0), SMOOTH)


def test_the_limit_of_pixels_holds_for_what_is_decoded_at_once(tmp_path: Path) -> None:
    resolution = {"resolution": (10_000, 10_000), "resolutionunit": "CENTIMETER"}
    options: dict[str, Any] = {"photometric": "rgb", "compression": "zlib", **resolution}
    tifffile.imwrite(tmp_path / "strip.tif", SMOOTH, rowsperstrip=300, **options)
    tifffile.imwrite(tmp_path / "strips.tif", SMOOTH, rowsperstrip=10, **options)
    with pytest.raises(TooManyPixels):
        read(tmp_path / "strip.tif", 4.0, max_pixels=60_000)
    assert read(tmp_path / "strips.tif", 4.0, max_pixels=60_000).shape == (75, 102, 3)
    with pytest.raises(TooManyPixels):
        read(tmp_path / "strips.tif", 1.0, max_pixels=60_000)
