"""Files with many bits, channels and pages are read by their real range, or refused with the reason and the way out."""

import io
import struct
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image

from cribo.base.errors import InputError, UnreadableImage
from cribo.data.channels import DIM_IMAGES
from cribo.data.config import Reading
from cribo.data.reading import image_size, read_image, read_reduced

HEIGHT, WIDTH = 6, 8


def grey(image: Path, **reading) -> np.ndarray:
    pixels = read_image(image, reading=Reading(**reading)).numpy()
    assert (pixels == pixels[:1]).all()
    return pixels[0]


def ramp(highest: int, dtype: type = np.uint16) -> np.ndarray:
    return np.linspace(0, highest, HEIGHT * WIDTH).reshape(HEIGHT, WIDTH).round().astype(dtype)


def as_8_bits(values: np.ndarray, highest: float) -> np.ndarray:
    return 255 * values.astype(float) / highest


def tiff(path: Path, *pages: tuple[Mapping[int, int | tuple[int, ...]], bytes]) -> Path:
    """Write an uncompressed little-endian TIFF; each page has tags (numbers as 32-bit integers) and pixels."""
    content = io.BytesIO()
    content.write(b"II*\0")
    link = 4
    content.write(struct.pack("<I", 0))
    for given, pixels in pages:
        start = content.tell()
        content.write(pixels)
        tags = {256: WIDTH, 257: HEIGHT, 259: 1, 273: start, 278: HEIGHT, 279: len(pixels), **given}
        entries = []
        for tag, value in sorted(tags.items()):
            numbers = value if isinstance(value, tuple) else (value,)
            place = numbers[0]
            if len(numbers) > 1:
                place = content.tell()
                content.write(struct.pack(f"<{len(numbers)}I", *numbers))
            entries.append(struct.pack("<HHII", tag, 4, len(numbers), place))
        here = content.tell()
        content.seek(link)
        content.write(struct.pack("<I", here))
        content.seek(here)
        content.write(struct.pack("<H", len(entries)) + b"".join(entries))
        link = content.tell()
        content.write(struct.pack("<I", 0))
    path.write_bytes(content.getvalue())
    return path


GREY = {258: 8, 262: 1, 277: 1}
GREY_16 = {258: 16, 262: 1, 277: 1}


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png_16(path: Path, values: np.ndarray, significant: int | None = None) -> Path:
    """Write a PNG of 16 bits, grey or RGB, with the chunk sBIT if `significant` is given."""
    channels = 1 if values.ndim == 2 else 3
    header = struct.pack(">IIBBBBB", values.shape[1], values.shape[0], 16, 0 if channels == 1 else 2, 0, 0, 0)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    bits = b"" if significant is None else chunk(b"sBIT", bytes([significant] * channels))
    body = chunk(b"IHDR", header) + bits + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + body)
    return path


@pytest.mark.parametrize("bits", [10, 12, 14])
def test_range_that_the_file_states(tmp_path, bits):
    values, highest = ramp(2**bits - 1), 2**bits - 1
    files = [
        png_16(tmp_path / "sbit.png", values, bits),
        tiff(tmp_path / "smax.tif", ({**GREY_16, 341: highest}, values.tobytes())),
        tmp_path / "maxval.pgm",
    ]
    files[2].write_bytes(f"P5 {WIDTH} {HEIGHT} {highest}\n".encode() + values.astype(">u2").tobytes())
    for file in files:
        np.testing.assert_allclose(grey(file), as_8_bits(values, highest), atol=1)


def test_12_bits_per_sample_in_a_tiff(tmp_path):
    values = ramp(4095).reshape(-1, 2)
    first, second = values[:, 0], values[:, 1]
    packed = np.stack([first >> 4, (first & 15) << 4 | second >> 8, second & 255], axis=1).astype(np.uint8)
    file = tiff(tmp_path / "x.tif", ({**GREY, 258: 12}, packed.tobytes()))
    np.testing.assert_allclose(grey(file), as_8_bits(ramp(4095), 4095), atol=1)


def test_significant_bits_of_a_png_whose_values_fill_16_bits(tmp_path):
    values = ramp(4095) << 4
    np.testing.assert_allclose(grey(png_16(tmp_path / "x.png", values, 12)), as_8_bits(values, 65535), atol=1)


def test_dark_images_of_a_stated_range_are_read(tmp_path):
    values = ramp(200)
    (tmp_path / "x.pgm").write_bytes(f"P5 {WIDTH} {HEIGHT} 4095\n".encode() + values.astype(">u2").tobytes())
    np.testing.assert_allclose(grey(tmp_path / "x.pgm"), as_8_bits(values, 4095), atol=1)


@pytest.mark.parametrize("suffix", ["png", "tif", "pgm"])
def test_nearly_black_images_are_refused_with_the_value_and_the_option(tmp_path, suffix):
    file, values = tmp_path / f"x.{suffix}", ramp(3000)
    if suffix == "pgm":
        file.write_bytes(f"P5 {WIDTH} {HEIGHT} 65535\n".encode() + values.astype(">u2").tobytes())
    else:
        Image.fromarray(values).save(file)
    with pytest.raises(UnreadableImage, match=r"3000.*--range 0,4095"):
        read_image(file)
    np.testing.assert_allclose(grey(file, range=(0, 4095)), as_8_bits(values, 4095), atol=1)
    np.testing.assert_allclose(grey(file, range=(1000, 2000)), as_8_bits((values - 1000.0).clip(0, 1000), 1000), atol=1)
    np.testing.assert_allclose(grey(file, range=(0, 65535)), as_8_bits(values, 65535), atol=1)


def test_nearly_black_colour_is_refused(tmp_path):
    values = np.stack([ramp(4095)] * 3, axis=-1)
    with pytest.raises(UnreadableImage, match="nearly black"):
        read_image(png_16(tmp_path / "x.png", values))
    assert read_image(tmp_path / "x.png", reading=Reading(range=(0, 65535))).max() == 15
    with pytest.raises(UnreadableImage, match="--range"):
        read_image(tmp_path / "x.png", reading=Reading(range=(0, 4095)))
    read_image(png_16(tmp_path / "y.png", values << 4))


def test_images_that_look_dark_are_counted_once_each(tmp_path):
    DIM_IMAGES.take()
    for number in range(3):
        Image.fromarray(ramp(2**14 - 1)).save(tmp_path / f"{number}.png")
        for _ in range(2):
            read_image(tmp_path / f"{number}.png")
    message = DIM_IMAGES.message()
    assert message is not None
    assert message.startswith("3 images")
    assert "--range 0,16383" in message
    assert DIM_IMAGES.message() is None


def test_white_is_zero(tmp_path):
    values = ramp(65535)
    file = tiff(tmp_path / "x.tif", ({**GREY_16, 262: 0}, values.tobytes()))
    np.testing.assert_allclose(grey(file), 255 - as_8_bits(values, 65535), atol=1)
    dark = tiff(tmp_path / "y.tif", ({**GREY_16, 262: 0, 341: 4095}, ramp(4095).tobytes()))
    np.testing.assert_allclose(grey(dark), 255 - as_8_bits(ramp(4095), 4095), atol=1)


@pytest.mark.parametrize("kind", [np.float32, np.int32])
def test_32_bits_require_a_range(tmp_path, kind):
    values = ramp(1000, kind)
    Image.fromarray(values).save(tmp_path / "x.tif")
    with pytest.raises(UnreadableImage, match="--range"):
        read_image(tmp_path / "x.tif")
    np.testing.assert_allclose(grey(tmp_path / "x.tif", range=(0, 1000)), as_8_bits(values, 1000), atol=1)


@pytest.mark.parametrize(
    ("tags", "count"),
    [
        ({258: (8,) * 5, 262: 1, 277: 5, 338: (0,) * 4}, 5),
        ({258: (8,) * 5, 262: 1, 277: 5, 338: (0,) * 4, 284: 2}, 5),
        ({258: (8,) * 4, 262: 2, 277: 4, 338: 0}, 4),  # RGB and near infrared
        ({258: (8,) * 4, 262: 2, 277: 4, 338: 0, 284: 2}, 4),
        ({258: (8,) * 5, 262: 2, 277: 5, 338: (2, 0)}, 5),
        ({258: (8,) * 2, 262: 1, 277: 2, 338: 0}, 2),
        ({258: (16,) * 4, 262: 2, 277: 4, 338: 0}, 4),
    ],
)
def test_more_channels_than_rgb_are_refused_by_their_number(tmp_path, tags, count):
    file = tiff(tmp_path / "x.tif", (tags, bytes(range(count)) * (HEIGHT * WIDTH * 2)))
    for open_file in (read_image, image_size):
        with pytest.raises(UnreadableImage, match=f"{count} channels"):
            open_file(file)


def test_planar_deep_colour_and_64_bits_are_read(tmp_path):
    rgb = np.stack([ramp(60_000), ramp(40_000), ramp(255)])
    tifffile.imwrite(tmp_path / "planar.tif", rgb, photometric="rgb", planarconfig="separate")
    np.testing.assert_array_equal(read_image(tmp_path / "planar.tif").numpy(), rgb >> 8)
    found = read_image(tmp_path / "planar.tif", reading=Reading(range=(0, 255))).numpy()  # the low bits too
    np.testing.assert_array_equal(found, rgb.clip(0, 255))
    tifffile.imwrite(tmp_path / "float.tif", rgb[0] / 60_000)
    with pytest.raises(UnreadableImage, match="--range"):
        read_image(tmp_path / "float.tif")
    np.testing.assert_allclose(grey(tmp_path / "float.tif", range=(0, 1)), as_8_bits(rgb[0], 60_000), atol=1)


LAYOUTS = {
    "interleaved": {"photometric": "minisblack", "planarconfig": "contig"},
    "planar": {"photometric": "minisblack", "planarconfig": "separate"},
    "pages": {"photometric": "minisblack"},
    "deflate": {"photometric": "minisblack", "planarconfig": "separate", "compression": "zlib", "tile": (16, 16)},
    "big-endian": {"photometric": "minisblack", "planarconfig": "contig", "byteorder": ">"},
    "ImageJ": {"imagej": True, "metadata": {"axes": "CYX"}},
    "OME": {"ome": True, "metadata": {"axes": "CYX"}},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_channels_are_chosen_in_every_layout(tmp_path, layout):
    values = np.random.default_rng(0).integers(0, 4096, (5, HEIGHT, WIDTH), dtype=np.uint16)
    options = LAYOUTS[layout]
    stored = values.transpose(1, 2, 0) if options.get("planarconfig") == "contig" else values
    tifffile.imwrite(tmp_path / "x.tif", np.ascontiguousarray(stored), **options)
    reading = Reading(channels=(4, 0, 2), range=(0, 4095))
    expected = np.rint(values[[4, 0, 2]] / 4095 * 255)
    np.testing.assert_allclose(read_image(tmp_path / "x.tif", reading=reading).numpy(), expected, atol=1)
    limits = (0, 4095, 0, 2000, 1000, 3000)
    found = read_image(tmp_path / "x.tif", reading=Reading(channels=(4, 0, 2), range=limits)).numpy()
    np.testing.assert_allclose(found[1], np.rint(values[0].clip(0, 2000) / 2000 * 255), atol=1)
    np.testing.assert_allclose(found[2], np.rint((values[2].clip(1000, 3000) - 1000.0) / 2000 * 255), atol=1)
    np.testing.assert_allclose(grey(tmp_path / "x.tif", channels=(3,), range=(0, 4095)), values[3] / 4095 * 255, atol=1)
    assert image_size(tmp_path / "x.tif", reading=reading) == (HEIGHT, WIDTH)
    many = Reading(channels=("nuclei=1", 0, 4, 2), range=(0, 4095))
    expected = np.rint(values[[1, 0, 4, 2]] / 4095 * 255)
    np.testing.assert_allclose(read_image(tmp_path / "x.tif", reading=many).numpy(), expected, atol=1)
    with pytest.raises(UnreadableImage, match="--channels"):
        read_image(tmp_path / "x.tif", reading=Reading(channels=(0, 1, 5), range=(0, 4095)))
    if layout != "pages":
        with pytest.raises(UnreadableImage, match="--channels"):
            read_image(tmp_path / "x.tif")


@pytest.mark.parametrize("options", [{"imagej": True}, {"ome": True}, {"ome": True, "compression": "zlib"}])
def test_pages_are_chosen_among_times_and_depths(tmp_path, options):
    values = np.random.default_rng(0).integers(0, 65536, (2, 3, 4, HEIGHT, WIDTH), dtype=np.uint16)
    tifffile.imwrite(tmp_path / "x.tif", values, metadata={"axes": "TZCYX"}, **options)
    reading = Reading(channels=(3, 1, 0), page=4)  # time 1, depth 1
    np.testing.assert_array_equal(read_image(tmp_path / "x.tif", reading=reading).numpy(), values[1, 1][[3, 1, 0]] >> 8)
    for wrong in (Reading(channels=(3, 1, 0)), replace(reading, page=6)):
        with pytest.raises(UnreadableImage, match="--page"):
            read_image(tmp_path / "x.tif", reading=wrong)


def test_colour_with_opacity_is_shown_over_white(tmp_path):
    values = np.full((HEIGHT, WIDTH, 4), 40_000, dtype=np.uint16)
    values[..., 3] = ramp(65_535)
    tifffile.imwrite(tmp_path / "x.tif", values, photometric="rgb", extrasamples=["unassalpha"])
    expected = 255 - (255 - (40_000 >> 8)) * (values[..., 3] >> 8) / 255
    np.testing.assert_allclose(read_image(tmp_path / "x.tif").numpy(), np.stack([expected] * 3), atol=1)


def test_channels_of_ordinary_pictures_are_chosen(tmp_path):
    rgb = np.stack([ramp(255, np.uint8), ramp(200, np.uint8), ramp(100, np.uint8)], axis=-1)
    Image.fromarray(rgb).save(tmp_path / "x.png")
    found = read_image(tmp_path / "x.png", reading=Reading(channels=(2, 1, 0), page=0)).numpy()
    np.testing.assert_array_equal(found, rgb.transpose(2, 0, 1)[::-1])
    np.testing.assert_array_equal(grey(tmp_path / "x.png", channels=(1,)), rgb[..., 1])
    wrong = Reading(channels=(3,)), Reading(page=1), Reading(channels=(0, 1, 2), range=(0, 1, 0, 1, 0, 1))
    for reading, option in zip(wrong, ("--channels", "--page", "--range"), strict=True):
        with pytest.raises(UnreadableImage, match=option):
            read_image(tmp_path / "x.png", reading=reading)


def test_pages_of_several_sizes_are_refused(tmp_path):
    with tifffile.TiffWriter(tmp_path / "x.tif") as file:
        file.write(ramp(255, np.uint8))
        file.write(np.zeros((9, 9), dtype=np.uint8))
    with pytest.raises(UnreadableImage, match="several sizes"):
        read_image(tmp_path / "x.tif")


def test_a_truncated_stack_is_unreadable(tmp_path):
    tifffile.imwrite(tmp_path / "x.tif", np.zeros((5, 64, 64), dtype=np.uint16), imagej=True, metadata={"axes": "CYX"})
    content = (tmp_path / "x.tif").read_bytes()
    (tmp_path / "x.tif").write_bytes(content[: len(content) // 2])
    with pytest.raises(UnreadableImage):
        read_image(tmp_path / "x.tif", reading=Reading(channels=(4,)))


@pytest.mark.parametrize(
    "values",
    [{"channels": ("nuclei",)}, {"channels": (-1,)}, {"range": (0, 1, 2)}, {"range": (1, 0)}, {"range": (0, 1, 0, 1)}],
)
def test_invalid_choices_of_channels_and_ranges(values):
    with pytest.raises(InputError, match=next(iter(values))):
        Reading(**values)


def test_stacks_are_refused_but_reduced_copies_and_masks_are_ignored(tmp_path):
    first, second = ramp(255, np.uint8), 255 - ramp(255, np.uint8)
    page = GREY, first.tobytes()
    with pytest.raises(UnreadableImage, match="3 pages"):
        read_image(tiff(tmp_path / "stack.tif", page, page, page))
    for kind in (1, 4, 5):
        file = tiff(tmp_path / f"{kind}.tif", page, ({**GREY, 254: kind}, second.tobytes()))
        np.testing.assert_array_equal(grey(file), first)
    strange = {**GREY, 254: 1, 258: 7}  # a copy that Pillow cannot read
    np.testing.assert_array_equal(grey(tiff(tmp_path / "s.tif", page, (strange, second.tobytes()))), first)
    hyperstack = Image.fromarray(first)
    hyperstack.save(tmp_path / "imagej.tif", tiffinfo={270: "ImageJ=1.53k\nimages=4\nslices=4\n"})
    with pytest.raises(UnreadableImage, match="4 pages"):
        read_image(tmp_path / "imagej.tif")


def test_what_was_read_right_is_read_as_before(tmp_path):
    rgb = np.stack([ramp(255, np.uint8), ramp(200, np.uint8), ramp(100, np.uint8)], axis=-1)
    for mode in ("RGB", "P", "CMYK", "LA", "RGBA", "1", "L", "LAB"):
        image = Image.fromarray(rgb[..., 0]) if mode == "LAB" else Image.fromarray(rgb)
        image = Image.merge("LAB", [image] * 3) if mode == "LAB" else image.convert(mode)
        image.save(tmp_path / "x.tif")
        np.testing.assert_array_equal(
            read_image(tmp_path / "x.tif").permute(1, 2, 0).numpy(), np.array(image.convert("RGB"))
        )
    planar = {258: (8,) * 3, 262: 2, 277: 3, 284: 2, 273: (8, 56, 104), 279: (48, 48, 48)}
    file = tiff(tmp_path / "planar.tif", (planar, np.ascontiguousarray(rgb.transpose(2, 0, 1)).tobytes()))
    np.testing.assert_array_equal(read_image(file).numpy(), rgb.transpose(2, 0, 1))
    sixteen = {258: (16,) * 3, 262: 2, 277: 3}
    file = tiff(tmp_path / "rgb16.tif", (sixteen, (rgb.astype(np.uint16) * 257).tobytes()))
    np.testing.assert_array_equal(read_image(file).permute(1, 2, 0).numpy(), rgb)


@pytest.mark.parametrize(("suffix", "options"), [("gif", {}), ("webp", {"lossless": True}), ("png", {})])
def test_animations_keep_their_first_frame(tmp_path, suffix, options):
    first, second = Image.new("RGB", (8, 6), "red"), Image.new("RGB", (8, 6), "blue")
    first.save(tmp_path / f"x.{suffix}", save_all=True, append_images=[second], **options)
    assert read_image(tmp_path / f"x.{suffix}")[:, 0, 0].tolist() == [255, 0, 0]


def test_pillows_limit_does_not_interfere(tmp_path, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    Image.new("RGB", (40, 24)).save(tmp_path / "x.png")
    Image.new("RGB", (40, 24)).save(tmp_path / "x.tif")
    for name in ("x.png", "x.tif"):
        with pytest.raises(UnreadableImage, match=r"max_pixels = 300.*--max_pixels"):
            read_image(tmp_path / name, reading=Reading(max_pixels=300))
        assert read_image(tmp_path / name, reading=Reading(max_pixels=960)).shape == (3, 24, 40)


def test_exif_orientation_out_of_range_turns_nothing(tmp_path):
    exif = Image.Exif()
    exif[0x112] = 9
    Image.fromarray(np.zeros((24, 40, 3), np.uint8)).save(tmp_path / "x.jpg", exif=exif)
    assert image_size(tmp_path / "x.jpg") == (24, 40) == tuple(read_image(tmp_path / "x.jpg").shape[1:])
    sizes = []
    read_reduced(tmp_path / "x.jpg", lambda height, width: sizes.append((height, width)) or 1)
    assert sizes == [(24, 40)]


def test_warnings_about_a_file_are_silent(tmp_path, recwarn, capfd):
    content = io.BytesIO()
    Image.new("RGB", (8, 6)).save(content, "JPEG", exif=b"Exif\0\0II*\0\x08\0\0\0\x09\0\x0f\x01\x02\0\xff\0\0\0")
    (tmp_path / "x.jpg").write_bytes(content.getvalue())
    read_image(tmp_path / "x.jpg")
    with pytest.raises(UnreadableImage):
        read_image(tiff(tmp_path / "y.tif", ({258: (8,) * 9, 262: 1, 277: 9, 338: (0,) * 8}, bytes(9 * 48))))
    assert not capfd.readouterr().err


@pytest.mark.parametrize("mode", ["LA", "RGBA"])
def test_jpeg_2000_with_more_channels_than_colours_and_opacity(tmp_path, mode):
    """Aerial images store near infrared as a fourth channel, which is not opacity."""
    file, pixels = tmp_path / "x.jp2", np.full((8, 8, len(mode)), 90, np.uint8)
    pixels[..., -1] = 255
    Image.fromarray(pixels).save(file)
    assert (read_image(file).numpy() == 90).all()
    content = file.read_bytes()
    place = content.index(b"cdef") + 4 + 2 + 6 * (len(mode) - 1) + 2
    assert content[place : place + 2] == b"\0\1"
    box = struct.pack(">I4s", 2**17, b"free") + bytes(2**17 - 8)  # as a large colour profile precedes the definitions
    size = content.index(b"jp2h") - 4
    (length,) = struct.unpack_from(">I", content, size)
    large = content[:size] + struct.pack(">I", length + len(box)) + b"jp2h" + box + content[size + 8 :]
    file.write_bytes(large)
    assert (read_image(file).numpy() == 90).all()
    unspecified, absent = bytearray(content), content.replace(b"cdef", b"free")
    unspecified[place : place + 2] = b"\xff\xff"
    for changed in (bytes(unspecified), absent):
        file.write_bytes(changed)
        with pytest.raises(UnreadableImage, match=f"{len(mode)} channels per pixel, .* and 1 more: "):
            read_image(file)
