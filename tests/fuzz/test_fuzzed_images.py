"""Damaged, forged or malicious image files are decoded, or raise the error for unreadable images."""

import io
import warnings
import zlib
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tests.fuzz.profile import fuzzed

from cribo.base.errors import UnreadableImage
from cribo.data.config import Reading
from cribo.data.reading import EncodedImage, image_size, read_image, read_reduced

FUZZED = fuzzed(4)
MOST = 20_000


def picture(mode: str) -> Image.Image:
    """Draw 24 x 40 pixels of noise in one of Pillow's modes."""
    channels = {"RGB": 3, "RGBA": 4, "CMYK": 4, "L": 1}.get(mode, 1)
    values = np.random.default_rng(0).integers(0, 256, (24, 40, channels), dtype=np.uint8)
    if mode == "I;16":
        return Image.fromarray(values[..., 0].astype(np.uint16) * 257)
    made = Image.fromarray(values.squeeze(), mode if channels > 1 else "L")
    return made if made.mode == mode else made.convert(mode)


def encoded(mode: str, kind: str, **options: object) -> bytes:
    """Encode the picture as a file."""
    file = io.BytesIO()
    picture(mode).save(file, kind, **options)
    return file.getvalue()


def with_exif(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    exif[0x010E] = "a description"
    return exif


FILES: dict[str, Callable[[], bytes]] = {
    "png": lambda: encoded("RGB", "PNG"),
    "png, palette": lambda: encoded("P", "PNG", transparency=3),
    "png, 16 bits": lambda: encoded("I;16", "PNG"),
    "png, alpha": lambda: encoded("RGBA", "PNG"),
    "jpeg, exif": lambda: encoded("RGB", "JPEG", exif=with_exif(6)),
    "jpeg, cmyk": lambda: encoded("CMYK", "JPEG"),
    "jpeg, progressive": lambda: encoded("RGB", "JPEG", progressive=True),
    "jpeg, several": lambda: encoded("RGB", "MPO", save_all=True, append_images=[picture("RGB")]),
    "webp": lambda: encoded("RGBA", "WEBP", lossless=True, exif=with_exif(3)),
    "tiff": lambda: encoded("RGB", "TIFF", exif=with_exif(8)),
    "tiff, packed": lambda: encoded("CMYK", "TIFF", compression="tiff_lzw"),
    "tiff, deflated": lambda: encoded("I;16", "TIFF", compression="tiff_adobe_deflate"),
    "gif": lambda: encoded("P", "GIF", save_all=True, append_images=[picture("P")]),
    "bmp": lambda: encoded("RGB", "BMP"),
    "ppm": lambda: encoded("RGB", "PPM"),
    "jpeg 2000": lambda: encoded("RGB", "JPEG2000"),
}


@st.composite
def damaged(draw: st.DrawFn, whole: bytes, other: bytes) -> bytes:
    """Damage a file: flip bits, forge numbers, remove, double or insert parts, or truncate it."""
    content = bytearray(whole)
    for kind in draw(st.lists(st.sampled_from(["bits", "number", "cut", "double", "foreign", "end"]), max_size=4)):
        # Half of the changes are made in the header.
        place = draw(st.integers(0, max(1, min(len(content) - 1, draw(st.sampled_from([120, 2**20]))))))
        length = draw(st.integers(1, 40))
        if kind == "bits" and place < len(content):
            content[place] ^= 1 << draw(st.integers(0, 7))
        elif kind == "number":
            extreme = draw(st.sampled_from([0, 1, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF]))
            order, size = draw(st.sampled_from(["little", "big"])), draw(st.sampled_from([2, 4]))
            content[place : place + size] = (extreme % 256**size).to_bytes(size, order)
        elif kind == "cut":
            del content[place : place + length]
        elif kind == "double":
            content[place:place] = content[place : place + length]
        elif kind == "foreign":
            content[place : place + length] = other[place : place + length]
        elif kind == "end":
            del content[place:]
    if whole[1:4] == b"PNG" and draw(st.booleans()):
        return with_checksums(bytes(content))
    return bytes(content)


def with_checksums(content: bytes) -> bytes:
    """Correct the checksums of a changed PNG; with wrong ones, readers stop before decoding."""
    made, place = bytearray(content[:8]), 8
    while place + 8 <= len(content):
        length = min(int.from_bytes(content[place : place + 4], "big"), len(content) - place - 8)
        chunk = content[place + 4 : place + 8 + length]
        made += content[place : place + 4] + chunk + zlib.crc32(chunk).to_bytes(4, "big")
        place += 12 + length
    return bytes(made)


@pytest.mark.parametrize("kind", FILES)
@FUZZED
@given(data=st.data())
def test_any_damage_gives_pixels_or_the_error_for_images(kind: str, tmp_path, data: st.DataObject) -> None:
    other = FILES[data.draw(st.sampled_from(sorted(FILES)))]()
    content = data.draw(damaged(FILES[kind](), other))
    (tmp_path / "x").write_bytes(content)
    image = EncodedImage("x", content)
    with warnings.catch_warnings(action="ignore"):  # Pillow warns about errors that it corrects
        for read in (
            lambda: read_image(image, reading=Reading(max_pixels=MOST)),
            lambda: read_reduced(image, lambda height, width: 2, reading=Reading(max_pixels=MOST))[0],
        ):
            try:
                pixels = read()
            except UnreadableImage as error:
                assert error.reason  # noqa: PT017
                continue
            assert pixels.dtype == torch.uint8
            assert pixels.numel() <= 3 * MOST
        try:
            assert min(image_size(tmp_path / "x")) >= 2
        except UnreadableImage as error:
            assert str(error).startswith(str(tmp_path))  # noqa: PT017


@FUZZED
@given(
    start=st.sampled_from([b"", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"II*\0", b"MM\0*", b"GIF89a", b"BM", b"P6 "]),
    rest=st.binary(max_size=200),
)
def test_noise_after_any_magic_number(start: bytes, rest: bytes) -> None:
    with warnings.catch_warnings(action="ignore"):
        try:
            read_image(EncodedImage("x", start + rest), reading=Reading(max_pixels=MOST))
        except UnreadableImage as error:
            assert error.reason  # noqa: PT017
