"""Files are written in each format and read back, with known expected pixels."""

import io
import pickle
import re
import struct
import sys
import zlib
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image

from cribo.base.errors import InputError, MissingPackage, TooManyPixels, UnreadableImage
from cribo.data.config import MAX_PIXELS, Reading
from cribo.data.readers import ImageKind, Picture
from cribo.data.reading import IMAGE_KINDS, EncodedImage, image_size, read_image, read_reduced, read_values


def gradient(height: int = 24, width: int = 40) -> np.ndarray:
    """Return an asymmetric RGB picture that JPEG preserves well."""
    y, x = np.mgrid[0:height, 0:width]
    return np.stack([x * 255 / (width - 1), y * 255 / (height - 1), (x + y) * 2.0], axis=-1).astype(np.uint8)


def read(path: Path) -> np.ndarray:
    tensor = read_image(path)
    assert tensor.dtype == torch.uint8
    assert tensor.shape[0] == 3
    return tensor.permute(1, 2, 0).numpy()


def assert_close(got: np.ndarray, expected: np.ndarray, tolerance: float) -> None:
    assert got.shape == expected.shape
    assert np.abs(got.astype(int) - expected.astype(int)).mean() <= tolerance


@pytest.mark.parametrize("suffix", ["png", "bmp", "tif", "ppm", "webp"])
def test_lossless_formats_return_the_exact_pixels(tmp_path, suffix):
    path = tmp_path / f"x.{suffix}"
    Image.fromarray(gradient()).save(path, lossless=True)
    np.testing.assert_array_equal(read(path), gradient())


def test_jpeg_is_close_and_writable(tmp_path):
    path = tmp_path / "x.jpg"
    Image.fromarray(gradient()).save(path, quality=98, subsampling=0)
    assert_close(read(path), gradient(), 1.5)
    read_image(path).add_(1)


def test_jpeg_with_several_pictures(tmp_path):
    path = tmp_path / "x.jpg"
    second = Image.new("RGB", (40, 24), "black")
    Image.fromarray(gradient()).save(path, format="MPO", save_all=True, append_images=[second], quality=98)
    with Image.open(path) as image:
        assert image.format == "MPO"
    assert_close(read(path), gradient(), 2.0)


def test_big_endian_sixteen_bit_grey(tmp_path):
    values = np.arange(0, 65536, 1024, dtype=np.uint16).reshape(8, 8)
    (tmp_path / "x.pgm").write_bytes(b"P5 8 8 65535\n" + values.astype(">u2").tobytes())
    np.testing.assert_allclose(read(tmp_path / "x.pgm")[..., 0], values / 257, atol=1)


def test_the_extension_does_not_matter(tmp_path):
    path = tmp_path / "x.JPEG"
    Image.fromarray(gradient()).save(path, format="PNG")
    np.testing.assert_array_equal(read(path), gradient())


@pytest.mark.parametrize(("suffix", "dtype"), [("png", np.uint8), ("jpg", np.uint8), ("png", np.bool_)])
def test_greyscale_becomes_three_equal_channels(tmp_path, suffix, dtype):
    path = tmp_path / f"x.{suffix}"
    grey = gradient()[..., 0] if dtype == np.uint8 else gradient()[..., 0] > 100
    Image.fromarray(grey).save(path, quality=98)
    shown = grey if dtype == np.uint8 else grey * np.uint8(255)
    assert_close(read(path), np.repeat(shown[..., None], 3, axis=-1), 0.0 if suffix == "png" else 1.0)


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_sixteen_bit_grey_is_scaled_not_clipped(tmp_path, suffix):
    path = tmp_path / f"x.{suffix}"
    values = np.linspace(0, 65535, 24 * 40).reshape(24, 40).astype(np.uint16)
    Image.fromarray(values).save(path)
    got = read(path)
    assert got.min() == 0
    assert got.max() == 255
    np.testing.assert_allclose(got[..., 1], values / 257, atol=1)


def test_sixteen_bit_colour_png_is_scaled(tmp_path):
    values = np.random.default_rng(0).integers(0, 65536, (5, 7, 3), dtype=np.uint16)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    (tmp_path / "x.png").write_bytes(png(7, 5, bit_depth=16, colour_type=2, data=zlib.compress(rows)))
    np.testing.assert_allclose(read(tmp_path / "x.png"), values / 257, atol=1)


def test_float_tiff_is_refused(tmp_path):
    Image.fromarray(np.ones((4, 4), dtype=np.float32)).save(tmp_path / "x.tif")
    with pytest.raises(UnreadableImage, match="convert the file to 8 or 16 bits"):
        read_image(tmp_path / "x.tif")


def test_palette_png_and_first_frame_of_a_gif(tmp_path):
    indices = np.arange(12, dtype=np.uint8).reshape(3, 4) % 3
    palette = np.array([[250, 10, 20], [30, 240, 50], [60, 70, 230]], dtype=np.uint8)
    image = Image.fromarray(indices)
    image.putpalette(palette.tobytes())
    image.save(tmp_path / "x.png")
    image.save(tmp_path / "x.gif", save_all=True, append_images=[Image.new("RGB", (4, 3), "black")])
    for name in ("x.png", "x.gif"):
        np.testing.assert_array_equal(read(tmp_path / name), palette[indices])


def test_transparent_pixels_are_composited_over_white(tmp_path):
    rgba = np.dstack([gradient(), np.full((24, 40), 255, dtype=np.uint8)])
    rgba[:12, :, 3] = 0
    rgba[0, 0] = (200, 100, 0, 51)
    Image.fromarray(rgba).save(tmp_path / "rgba.png")
    got = read(tmp_path / "rgba.png")
    np.testing.assert_array_equal(got[12:], gradient()[12:])
    assert (got[1:12] == 255).all()
    np.testing.assert_allclose(got[0, 0], [244, 224, 204], atol=1)  # a fifth of the colour, four fifths of white

    grey_alpha = np.dstack([np.full((4, 4), 30, np.uint8), np.diag([255] * 4).astype(np.uint8)])
    Image.fromarray(grey_alpha, mode="LA").save(tmp_path / "la.png")
    np.testing.assert_array_equal(read(tmp_path / "la.png")[..., 2], np.where(np.eye(4), 30, 255))


def test_a_transparent_palette_colour_is_composited_over_white(tmp_path):
    image = Image.fromarray(np.eye(4, dtype=np.uint8))
    image.putpalette([9, 9, 9, 50, 60, 70])
    image.save(tmp_path / "x.png", transparency=0)
    np.testing.assert_array_equal(read(tmp_path / "x.png")[..., 0], np.where(np.eye(4), 50, 255))


def test_cmyk_jpeg_with_and_without_adobe_marker(tmp_path):
    ink = np.zeros((16, 16, 4), dtype=np.uint8)
    ink[..., 0], ink[..., 1], ink[..., 3] = 255, 51, 0  # cyan with a fifth of magenta: azure
    buffer = io.BytesIO()
    Image.fromarray(ink, mode="CMYK").save(buffer, "JPEG", quality=98)
    inverted = buffer.getvalue()
    start = inverted.index(b"\xff\xee")
    (length,) = struct.unpack(">H", inverted[start + 2 : start + 4])
    assert inverted[start + 4 : start + 9] == b"Adobe"
    (tmp_path / "adobe.jpg").write_bytes(inverted)
    # Without the marker, the same values are the complementary inks.
    (tmp_path / "plain.jpg").write_bytes(inverted[:start] + inverted[start + 2 + length :])
    assert_close(read(tmp_path / "adobe.jpg"), np.full((16, 16, 3), (0, 204, 255)), 2)
    assert_close(read(tmp_path / "plain.jpg"), np.full((16, 16, 3), (0, 0, 0)), 2)


def test_cmyk_tiff(tmp_path):
    Image.new("CMYK", (8, 8), (0, 255, 255, 0)).save(tmp_path / "x.tif")
    assert (read(tmp_path / "x.tif") == (255, 0, 0)).all()


UPRIGHT = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: np.rot90(a, -1),
    7: lambda a: a[::-1, ::-1].swapaxes(0, 1),
    8: lambda a: np.rot90(a),
}


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", ["png", "jpg", "tif"])
def test_exif_orientation(tmp_path, orientation, suffix):
    path = tmp_path / f"x.{suffix}"
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(gradient()).save(path, exif=exif, quality=98)
    expected = UPRIGHT[orientation](gradient())
    assert_close(read(path), expected, 2.0)
    assert image_size(path) == expected.shape[:2]


def test_broken_exif_is_ignored(tmp_path):
    Image.fromarray(gradient()).save(tmp_path / "x.jpg", exif=b"Exif\0\0nonsense" * 3)
    assert read(tmp_path / "x.jpg").shape == (24, 40, 3)


@pytest.mark.parametrize("suffix", ["jpg", "png", "tif", "bmp", "webp", "gif"])
@pytest.mark.parametrize("keep", [0.05, 0.5, 0.95])
def test_truncated_files_are_refused(tmp_path, suffix, keep):
    path = tmp_path / f"x.{suffix}"
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * keep)])
    with pytest.raises(UnreadableImage) as caught:
        read_image(path)
    assert caught.value.path == str(path)
    assert caught.value.reason


def test_jpeg_without_its_last_two_bytes_is_refused_and_with_trailing_bytes_is_not(tmp_path):
    path = tmp_path / "x.jpg"
    Image.fromarray(gradient()).save(path)
    whole = path.read_bytes()
    assert whole.endswith(b"\xff\xd9")
    path.write_bytes(whole[:-2])
    with pytest.raises(UnreadableImage, match="truncated"):
        read_image(path)
    path.write_bytes(whole + b"\0" * 100)
    assert read_image(path).shape == (3, 24, 40)


def test_end_marker_of_an_embedded_thumbnail_does_not_hide_a_truncation(tmp_path):
    thumbnail = io.BytesIO()
    Image.fromarray(gradient(8, 8)).save(thumbnail, "JPEG")
    path = tmp_path / "x.jpg"
    Image.fromarray(gradient(200, 200)).save(path, comment=thumbnail.getvalue())
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2 + len(thumbnail.getvalue()) // 2])
    with pytest.raises(UnreadableImage):
        read_image(path)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("x.jpg", b"", "empty"),
        ("x.jpg", b"just some text, renamed\n", "not an image"),
        ("x.jpg", b"\xff\xd8", "not an image"),
        ("x.jpg", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image"),
        ("x.jpg", b"\0\0\0\x18ftypheic\0\0\0\0", "HEIC"),
        ("scan.nii", b"\x5c\x01\0\0" + bytes(344), "NIfTI"),
        ("x.dng", b"II*\0\x08\0\0\0", "camera raw"),  # Pillow would read the thumbnail of such a TIFF
        ("missing.jpg", None, "no such file"),
        (".", None, "directory"),
    ],
)
def test_other_files_are_refused_by_their_kind(tmp_path, name, content, words):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UnreadableImage, match=words) as caught:
        read_image(tmp_path / name)
    assert caught.value.path == str(tmp_path / name)
    assert words in caught.value.reason


def test_the_extensions_of_all_kinds_differ_and_the_documentation_lists_those_that_are_read():
    extensions = [extension for kind in IMAGE_KINDS for extension in kind.extensions]
    assert len({*extensions}) == len(extensions)
    page = Path(__file__).parents[2].joinpath("docs/data.md").read_text(encoding="utf-8")
    rows = [
        f"| {kind.name} | {' '.join(kind.extensions)} | {kind.channels} | {kind.bits} | {kind.pages} |"
        for kind in IMAGE_KINDS
        if kind.reader
    ]
    assert "\n".join(rows) in page


class Flat(Picture):
    """An image of one colour: a reader that does not use Pillow."""

    def __init__(self, kind: ImageKind, header: bytes) -> None:
        super().__init__(kind, (header[4], header[5]))
        self.colour = header[6:9]

    def require_whole(self) -> None:
        if self.colour[0] == 13:
            raise InputError("it has a second page")

    def pixels(self) -> np.ndarray:
        return np.full((*self.header_size, 3), np.frombuffer(self.colour, dtype=np.uint8))


@pytest.fixture
def flat_kind(monkeypatch):
    """Add a kind of image to the table, as a row and a module."""
    module = ModuleType("cribo.data.readers.flat")
    vars(module)["open_picture"] = lambda file, name, kind, reading: nullcontext(Flat(kind, file.read()))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    kind = ImageKind("Flat", (".flat",), re.compile(b"FLAT"), "flat")

    def add(**changes) -> None:
        monkeypatch.setattr("cribo.data.reading.IMAGE_KINDS", (*IMAGE_KINDS, replace(kind, **changes)))

    return add


def test_a_kind_with_a_reader_of_its_own(flat_kind):
    flat_kind()
    image = EncodedImage("x.flat", b"FLAT" + bytes([3, 5, 10, 20, 30]))
    assert read_image(image)[:, 2, 4].tolist() == [10, 20, 30]
    assert image_size(image) == (3, 5)
    pixels, factor = read_reduced(image, lambda height, width: height)
    assert (pixels.shape, factor) == ((3, 3, 5), 1)
    for refused, reason in (
        (EncodedImage("x", b"FLAT" + bytes([3, 5, 13, 0, 0])), "it has a second page"),
        (EncodedImage("x", b"FLAT" + bytes([3, 1, 0, 0, 0])), "too few"),
        (EncodedImage("x", b"FLAT"), "index"),  # any error of a reader
    ):
        with pytest.raises(UnreadableImage, match=reason):
            read_image(refused)
    with pytest.raises(UnreadableImage, match="Flat"):
        read_values(image)


def test_a_reader_whose_package_is_missing(flat_kind):
    flat_kind(packages=("no_such_package",), extra="video")
    with pytest.raises(MissingPackage, match="Flat images needs no_such_package"):
        read_image(EncodedImage("x.flat", b"FLAT" + bytes(5)))


@pytest.mark.parametrize(("width", "height"), [(1, 1), (1, 9), (9, 1)])
def test_too_small(tmp_path, width, height):
    Image.new("RGB", (width, height)).save(tmp_path / "x.png")
    with pytest.raises(UnreadableImage, match=f"{width} x {height} pixels are too few: at least 2 x 2"):
        read_image(tmp_path / "x.png")


def test_smallest_image(tmp_path):
    Image.new("RGB", (2, 2)).save(tmp_path / "x.png")
    assert read_image(tmp_path / "x.png").shape == (3, 2, 2)


def test_pixel_limit_is_inclusive(tmp_path):
    Image.fromarray(gradient()).save(tmp_path / "x.png")
    assert read_image(tmp_path / "x.png", reading=Reading(max_pixels=24 * 40)).shape == (3, 24, 40)
    with pytest.raises(UnreadableImage, match="40 x 24 pixels are more than max_pixels = 959"):
        read_image(tmp_path / "x.png", reading=Reading(max_pixels=24 * 40 - 1))


@pytest.mark.parametrize("side", [14_000, 60_000])
def test_a_decompression_bomb_is_refused_by_its_header(tmp_path, side):
    assert side * side > MAX_PIXELS
    (tmp_path / "x.png").write_bytes(png(side, side, bit_depth=8, colour_type=2, data=b""))
    with pytest.raises(UnreadableImage, match="pixels"):
        read_image(tmp_path / "x.png")


def test_the_error_can_be_pickled():
    error = pickle.loads(pickle.dumps(UnreadableImage(Path("a/b.jpg"), "the file is empty")))
    assert (type(error), error.path, error.reason) == (UnreadableImage, "a/b.jpg", "the file is empty")
    assert str(error) == "a/b.jpg: the file is empty"
    many = pickle.loads(pickle.dumps(TooManyPixels(Path("a/b.jpg"), "9 x 9 pixels", 80)))
    assert (type(many), many.path) == (TooManyPixels, "a/b.jpg")
    assert many.reason.startswith("9 x 9 pixels are more than max_pixels = 80")


def mean_of_squares(image: np.ndarray, side: int) -> np.ndarray:
    """Return the mean of each complete square of pixels."""
    height, width = (length // side for length in image.shape[:2])
    squares = image[: height * side, : width * side].reshape(height, side, width, side, 3)
    return squares.mean(axis=(1, 3))


def reduced(path: Path, by: int) -> tuple[np.ndarray, int, list[tuple[int, int]]]:
    """Return pixels, factor, and the sizes passed to the callback."""
    asked: list[tuple[int, int]] = []

    def reduction(height: int, width: int) -> int:
        asked.append((height, width))
        return by

    pixels, done = read_reduced(path, reduction)
    return pixels.permute(1, 2, 0).numpy(), done, asked


@pytest.mark.parametrize("by", [2, 4, 8])
@pytest.mark.parametrize(("subsampling", "progressive"), [(0, False), (2, False), (2, True)])
def test_a_reduced_pixel_is_the_mean_of_its_square(tmp_path, by, subsampling, progressive):
    path = tmp_path / "x.jpg"
    image = gradient(203, 165)
    image[..., 2] = 128  # the blue gradient restarts in the middle
    Image.fromarray(image).save(path, quality=95, subsampling=subsampling, progressive=progressive)
    pixels, done, asked = reduced(path, by)
    assert done == by
    assert asked == [(203, 165)]
    assert pixels.shape == (-(-203 // by), -(-165 // by), 3)
    inside = pixels[: 203 // by, : 165 // by]
    assert_close(inside, mean_of_squares(image, by), 1.0)
    assert np.abs(inside - mean_of_squares(image, by)).max() < 6


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_reduced_image_is_upright(tmp_path, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    for (height, width), expected in (((96, 160), 4), ((98, 163), 1 if orientation > 1 else 4)):
        path = tmp_path / "x.jpg"
        Image.fromarray(gradient(height, width)).save(path, exif=exif, quality=98)
        upright = UPRIGHT[orientation](gradient(height, width))
        pixels, done, asked = reduced(path, 4)
        assert done == expected  # squares would start outside the image
        assert asked == [upright.shape[:2]]
        squares = mean_of_squares(upright, done)
        assert_close(pixels[: squares.shape[0], : squares.shape[1]], squares, 2.0)


def test_reduced_phone_pictures_grey_and_cmyk(tmp_path):
    image = Image.fromarray(gradient(64, 80))
    image.save(
        tmp_path / "mpo.jpg", format="MPO", save_all=True, append_images=[Image.new("RGB", (80, 64))], quality=98
    )
    image.convert("L").save(tmp_path / "grey.jpg", quality=98)
    image.convert("CMYK").save(tmp_path / "cmyk.jpg", quality=98)
    for name in ("mpo", "grey", "cmyk"):
        path = tmp_path / f"{name}.jpg"
        pixels, done, _ = reduced(path, 2)
        assert done == 2
        assert_close(pixels, mean_of_squares(read(path), 2), 1.5)


def test_other_images_are_not_reduced(tmp_path):
    Image.fromarray(gradient(64, 80)).save(tmp_path / "x.png")
    Image.fromarray(gradient(64, 80)).save(tmp_path / "x.jpg")
    Image.fromarray(gradient(40, 63)).save(tmp_path / "small.jpg")
    whole, small = (64, 80), (40, 63)
    for name, by, size in (("x.png", 4, whole), ("x.jpg", 1, whole), ("x.jpg", 3, whole), ("small.jpg", 8, small)):
        pixels, done, asked = reduced(tmp_path / name, by)
        assert (done, asked) == (1, [size])
        np.testing.assert_array_equal(pixels, read(tmp_path / name))


@pytest.mark.parametrize("keep", [0.05, 0.5, 0.95])
def test_truncated_files_are_refused_when_reduced(tmp_path, keep):
    path = tmp_path / "x.jpg"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * keep)])
    with pytest.raises(UnreadableImage):
        read_reduced(path, lambda height, width: 2)


def test_camvid_image(camvid):
    path = camvid / "images" / "val" / "0016E5_07959.jpg"
    assert read_image(path).shape == (3, 360, 480)
    assert image_size(path) == (360, 480)


def png(width: int, height: int, *, bit_depth: int, colour_type: int, data: bytes) -> bytes:
    """Return the bytes of a PNG with any header, also those that Pillow does not write."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", width, height, bit_depth, colour_type, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
