"""Reading of image files as tensors: one table of image kinds, and one error class for all invalid files.

Decoding imports torch.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import posixpath
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from cribo.base.errors import MissingPackage, TooManyPixels, UnreadableImage
from cribo.base.packages import require_packages
from cribo.base.wording import is_utf8
from cribo.data.config import DEFAULT_READING, Reading
from cribo.data.readers import ImageKind, Picture, WindowedPicture

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Bool, UInt8
    from PIL import Image
    from torch import Tensor


# ------------------------------------------------------------------------------------------------------ image kinds


def _starts(pattern: bytes) -> re.Pattern[bytes]:
    return re.compile(pattern, re.DOTALL)


_TIFF = _starts(rb"II[*+]\0|MM\0[*+]|II\0\*|MM\*\0")
# Of MIRAX, a picture of the slide; of Hamamatsu's VMS, a text.
_SLIDE = _starts(_TIFF.pattern + rb"|\xff\xd8\xff|\x89PNG|BM|\[(Uncompressed )?Virtual Microscope Specimen\]")

IMAGE_KINDS = (
    ImageKind(
        "JPEG", (".jpg", ".jpeg", ".jpe", ".jfif"), _starts(rb"\xff\xd8\xff"), "pillow", channels="grey, RGB, CMYK"
    ),
    ImageKind("PNG", (".png",), _starts(rb"\x89PNG\r\n\x1a\n"), "pillow", bits=16),
    ImageKind("WEBP", (".webp",), _starts(rb"RIFF.{4}WEBP"), "pillow"),
    ImageKind("TIFF", (".tif", ".tiff"), _TIFF, "tiff", channels="any", bits=64, pages="one", has_windows=True),
    ImageKind("BMP", (".bmp",), _starts(rb"BM"), "pillow"),
    ImageKind("GIF", (".gif",), _starts(rb"GIF8[79]a"), "pillow"),
    ImageKind("PPM", (".ppm", ".pgm", ".pbm", ".pnm"), _starts(rb"P[0-6fy]"), "pillow", bits=32),
    ImageKind("JPEG2000", (".jp2",), _starts(rb"\xff\x4f\xff\x51|\0\0\0\x0cjP  \r\n\x87\n"), "pillow", bits=16),
    ImageKind(
        *("DICOM", (".dcm",), _starts(rb".{128}DICM"), "dicom"),
        bits=32,
        pages="one",
        packages=("pydicom",),
        extra="dicom",
    ),
    ImageKind(
        *("whole slide", (".svs", ".ndpi", ".mrxs", ".scn", ".vms", ".vmu", ".bif"), _SLIDE, "slide"),
        channels="RGB",
        packages=("openslide",),
        extra="slides",
        has_windows=True,
        on_disk=True,
    ),
    # Recognised, and refused by name.
    ImageKind("HEIC", (".heic", ".heif"), _starts(rb".{4}ftyp(hei|hev|mif1|msf1)")),
    ImageKind("AVIF", (".avif",), _starts(rb".{4}ftypavi[fs]")),
    ImageKind("JPEG XL", (".jxl",), _starts(rb"\xff\x0a|\0\0\0\x0cJXL ")),
    ImageKind("NIfTI", (".nii",), _starts(rb"\x5c\x01\0\0|\0\0\x01\x5c|\x1c\x02\0\0|\0\0\x02\x1c")),
    ImageKind("OpenEXR", (".exr",), _starts(rb"\x76\x2f\x31\x01")),
    ImageKind("Radiance HDR", (".hdr",), _starts(rb"#\?R(ADIANCE|GBE)")),
    ImageKind("Photoshop", (".psd",), _starts(rb"8BPS")),
    ImageKind("CZI", (".czi",), _starts(rb"ZISRAWFILE")),
    ImageKind("ND2", (".nd2",), _starts(rb"\xda\xce\xbe\x0a")),
    ImageKind("LIF", (".lif",), _starts(rb"\x70\0\0\0")),
    ImageKind(
        "camera raw",
        (".dng", ".cr2", ".cr3", ".nef", ".arw", ".raf", ".orf", ".rw2"),
        _starts(rb".{4}ftypcrx|FUJIFILMCCD-RAW|IIR[OS]|MMOR|IIU\0|" + _TIFF.pattern),
    ),
)
"""All kinds of images. A file is of the first kind whose signature it has, or of one that its extension confirms."""

# Compared in lower case: ImageNet's files end in .JPEG.
EXTENSIONS = tuple(extension for kind in IMAGE_KINDS if kind.reader for extension in kind.extensions)
"""Extensions of images."""

UNREAD_EXTENSIONS = tuple(extension for kind in IMAGE_KINDS if not kind.reader for extension in kind.extensions)
"""Extensions of images that cannot be read, of which the number is reported."""

_SIGNATURE_BYTES = 256


def kind_of_name(name: str) -> ImageKind | None:
    """Return the kind of image that the extension of a name indicates; None for other names."""
    extension = Path(name).suffix.lower()
    return next((kind for kind in IMAGE_KINDS if extension in kind.extensions), None)


def _kind_of(start: bytes, name: str) -> ImageKind | None:
    found = [kind for kind in IMAGE_KINDS if kind.signature.match(start)]
    named = kind_of_name(name)
    return named if named in found else next(iter(found), None)


# ------------------------------------------------------------------------------------------------------------ files

# Errors of the path itself; all others may be temporary server or network failures.
_PERMANENT = {errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EINVAL}


def temporary_errno(error: BaseException) -> int | None:
    """Return the `errno` of a reading error that may be temporary; None for broken files and permanent errors.

    >>> temporary_errno(OSError(errno.ESTALE, "stale handle")) == errno.ESTALE
    True
    >>> temporary_errno(OSError("image file is truncated")) is None
    True
    """
    cause = error.__cause__ if isinstance(error, UnreadableImage) else error
    return cause.errno if isinstance(cause, OSError) and cause.errno not in _PERMANENT else None


@dataclass(frozen=True)
class EncodedImage:
    """The bytes of an image file.

    Attributes:
        name: its name for messages.
        content: the bytes.
        page: the page of a stack that the name means (`page_name`); None for other names.
    """

    name: str
    content: bytes = field(repr=False)
    page: int | None = None

    def __fspath__(self) -> str:
        return self.name

    def open(self) -> BinaryIO:
        """Open the bytes as a file."""
        return io.BytesIO(self.content)

    @property
    def sha256(self) -> str:
        """SHA-256 of the bytes."""
        return hashlib.sha256(self.content).hexdigest()


@dataclass(frozen=True)
class ImageOnDisk:
    """An image file that is not held in memory.

    Attributes:
        name: its name for messages.
        path: its path.
        page: the page of a stack that the name means (`page_name`); None for other names.
    """

    name: str
    path: str
    page: int | None = None

    def __fspath__(self) -> str:
        return self.name

    @property
    def content(self) -> bytes:
        """The bytes of the file."""
        return Path(self.path).read_bytes()

    def open(self) -> BinaryIO:
        """Open the file."""
        return Path(self.path).open("rb")

    @property
    def sha256(self) -> str:
        """SHA-256 of the bytes, which are read in blocks."""
        with Path(self.path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()


ImageContent = EncodedImage | ImageOnDisk
"""An image of a collection: its bytes, or its file."""

HELD_BYTES = 2**26
"""Limit on the size of files that are held in memory while they are decoded."""


def image_content(name: str, path: str) -> ImageContent:
    """Return the bytes of an image file; the file itself if it is large or its kind is read from disk.

    Raises:
        OSError: the file cannot be read.
    """
    place, page = stored_page(path)
    kind = kind_of_name(name)
    if Path(place).stat().st_size > HELD_BYTES or (kind is not None and kind.on_disk):
        return ImageOnDisk(name, place, page)
    return EncodedImage(name, Path(place).read_bytes(), page)


_PAGE = re.compile(r"\.page(\d+)(\.[^./\\]+)$")


def page_name(name: str, page: int, pages: int) -> str:
    """Return the name of a page of a stack as an image of its own.

    >>> page_name("cells/stack.tif", 3, 120)
    'cells/stack.page003.tif'
    """
    stem, extension = posixpath.splitext(name)
    return f"{stem}.page{page:0{len(str(pages - 1))}}{extension}"


def stored_page(path: str | os.PathLike[str]) -> tuple[str, int | None]:
    """Return the file that contains an image, and its page if the path is the name of one (`page_name`)."""
    place = os.fspath(path)
    found = _PAGE.search(place)
    if found is None or Path(place).exists():
        return place, None
    return place[: found.start()] + found[2], int(found[1])


class FileState(NamedTuple):
    """Size and modification time of an image, or of the file that contains it.

    Attributes:
        size_bytes: size in bytes.
        mtime_ns: nanoseconds since 1970; 0 if the storage does not report it.
    """

    size_bytes: int
    mtime_ns: int


def read_image(
    path: str | os.PathLike[str] | ImageContent, *, reading: Reading = DEFAULT_READING
) -> UInt8[Tensor, "c h w"]:
    """Read an image file, or the bytes of one, upright: as RGB, or with C = `reading.in_chans` channels.

    Reads `IMAGE_KINDS`, the first frame of an animation and the first picture of a phone's MPO.
    Transparent pixels are composited over white, since the colour stored under them is arbitrary. EXIF orientation is
    applied, embedded colour profiles are ignored. 9 to 16 bits per channel are scaled to 8 by `reading.range`, else by
    the range that the file states, else by 0 to 65535. With `reading.pixel_size`, the level of a pyramid that is just
    as fine or finer is read and resized. The tensor is writable and channels-last in memory (strides (1, 3 w, 3)), the
    layout that torchvision resizes fastest.

    Raises UnreadableImage if the file is missing, empty, truncated or not an image, has a side shorter than 2 pixels,
    has several pages without `reading.page` and is not the name of one of them (`page_name`), has more channels than
    RGB and transparency without `reading.channels`, has 16-bit values below 2^13 of an unknown range, has 32-bit pixels
    without `reading.range`, does not state its pixel size or is coarser than `reading.pixel_size`, or has more than
    `reading.max_pixels` pixels according to its header, in which case it is not decoded. Pillow's limit for the whole
    process, `PIL.Image.MAX_IMAGE_PIXELS`, is raised to `reading.max_pixels`.

    >>> read_image("street.jpg").shape  # doctest: +SKIP
    torch.Size([3, 360, 480])
    """
    # torchvision.io decodes JPEGs about 20 % faster, but is deprecated since torchvision 0.29 and will be removed.
    with open_picture(path, reading=reading) as picture:
        return _tensor(picture.pixels())


def read_reduced(
    path: str | os.PathLike[str] | ImageContent,
    reduction: Callable[[int, int], int],
    *,
    reading: Reading = DEFAULT_READING,
) -> tuple[UInt8[Tensor, "c h w"], int]:
    """Read an image as `read_image` does, reducing JPEGs while decoding.

    `reduction` is called once with height and width of the full-size upright image, and returns the factor by which
    it may be reduced: 8, 4 or 2; with any other number, it is not reduced. Each pixel of the result covers a square of
    that many pixels of the full-size image, starting at its upper left corner; squares of the last row and column
    may extend beyond its edge. The decoder omits the high frequencies of each block of 8 x 8 pixels, which
    is much faster; it still reads the whole file and detects damage.

    Returns the tensor and the factor. The factor is 1 for formats other than JPEG, for images with a side of fewer
    pixels than the square of the factor, and for a JPEG rotated by EXIF if the factor does not divide its sides, since
    the squares would then start outside the image.

    Raises UnreadableImage as `read_image` does.

    >>> pixels, reduction = read_reduced("street.jpg", lambda height, width: 2)  # doctest: +SKIP
    >>> pixels.shape, reduction  # doctest: +SKIP
    (torch.Size([3, 180, 240]), 2)
    """
    with open_picture(path, reading=reading) as picture:
        pixels, factor = picture.reduced_pixels(reduction)
        return _tensor(pixels), factor


def read_valid(
    path: str | os.PathLike[str] | EncodedImage, *, reading: Reading = DEFAULT_READING
) -> Bool[np.ndarray, "h w"] | None:
    """Return which pixels of an upright image have data; None if all have.

    Pixels without data are those that have the nodata value of their TIFF (tag 42113, GDAL's), NaN or infinity in all
    channels that are read. Their labels are 255, and they enter no range of values.

    Raises UnreadableImage as `read_image` does.
    """
    with open_picture(path, reading=reading) as picture:
        return picture.valid()


def largest_factor(fits: Callable[[int], bool]) -> int:
    """Return the largest factor by which a decoder can reduce an image and that fits: 8, 4, 2, or 1.

    >>> largest_factor(lambda factor: 1000 // factor >= 224)
    4
    """
    return next(filter(fits, (8, 4, 2)), 1)


def image_size(path: str | os.PathLike[str] | ImageContent, *, reading: Reading = DEFAULT_READING) -> tuple[int, int]:
    """Return height and width of the tensor that `read_image` would return, reading only the header.

    Raises UnreadableImage if the header is invalid; the rest of the file is not read, except that a TIFF is decoded.
    """
    with open_picture(path, reading=reading) as picture:
        return picture.size()


def full_size(path: str | os.PathLike[str] | ImageContent, *, reading: Reading = DEFAULT_READING) -> tuple[int, int]:
    """Return height and width of an image at full resolution, of any size, reading only the header.

    Raises UnreadableImage as `image_size` does, except for too many pixels of a kind with windows.
    """
    try:
        return image_size(path, reading=reading.full_resolution)
    except TooManyPixels:
        with open_windows(path, reading=reading.full_resolution) as picture:
            if picture is None:
                raise
            return picture.size()


def read_values(path: str | os.PathLike[str] | ImageContent, *, reading: Reading = DEFAULT_READING) -> Image.Image:
    """Read an image without converting its values, such as a map of classes or depths.

    Only the limit of pixels of `reading` applies. Raises UnreadableImage if the file is not an image, or its kind has
    no such values.
    """
    with open_picture(path, reading=Reading(max_pixels=reading.max_pixels)) as picture:
        return picture.values()


NOT_UTF8 = "its name is not valid UTF-8: rename it"
"""Why a file is not read whose name cannot be written to results."""


def require_utf8(name: str) -> None:
    """Raise UnreadableImage for a name that is not valid UTF-8, with which results could not be written."""
    if not is_utf8(name):
        raise UnreadableImage(name, NOT_UTF8)


@contextmanager
def open_picture(
    path: str | os.PathLike[str] | ImageContent, *, reading: Reading = DEFAULT_READING
) -> Iterator[Picture]:
    """Open an image file, check its header, and yield the image before decoding.

    All errors, here and inside the `with` block, are raised as UnreadableImage, except MissingPackage if the reader of
    its kind is not installed.
    """
    with (
        _recognised(path, reading) as (file, kind, reader, reading),
        reader.open_picture(file, os.fspath(path), kind, reading) as picture,
    ):
        height, width = picture.header_size
        if width * height > reading.max_pixels:
            raise TooManyPixels(path, f"{width} x {height} pixels", reading.max_pixels)
        _require_sides(picture, path)
        picture.require_whole()
        if reading.pixel_size and isinstance(picture, WindowedPicture):
            _require_units(picture, path, reading)  # what is decoded is larger than the picture
        yield picture


@contextmanager
def open_windows(
    path: str | os.PathLike[str] | ImageContent, *, reading: Reading = DEFAULT_READING
) -> Iterator[WindowedPicture | None]:
    """Open an image file of any size to decode windows of it, as `open_picture` does.

    Yields None if files of its kind can only be decoded as a whole.

    Raises:
        UnreadableImage: see `open_picture`; or a tile or strip of the file has more than `reading.max_pixels` pixels.
    """
    with _recognised(path, reading) as (file, kind, reader, reading):
        if not kind.has_windows:
            yield None
            return
        with reader.open_windows(file, os.fspath(path), kind, reading) as picture:
            _require_sides(picture, path)
            picture.require_whole()
            _require_units(picture, path, reading)
            yield picture


@contextmanager
def _recognised(
    path: str | os.PathLike[str] | ImageContent, reading: Reading
) -> Iterator[tuple[BinaryIO, ImageKind, Any, Reading]]:
    """Yield an open file, its kind, its reader and the reading of its page; raise all errors as `open_picture` does."""
    require_utf8(os.fspath(path))
    place, page = (path, path.page) if isinstance(path, EncodedImage | ImageOnDisk) else stored_page(path)
    if page is not None:
        reading = replace(reading, page=page)
    try:
        with _opened(place) as file:
            if not (start := file.read(_SIGNATURE_BYTES)):
                raise UnreadableImage(path, "the file is empty")
            file.seek(0)
            kind = _kind_of(start, os.fspath(path))
            if kind is None:
                read = ", ".join(kind.name for kind in IMAGE_KINDS if kind.reader)
                raise UnreadableImage(path, f"not an image of a known format ({read})")
            if kind.reader is None:
                raise UnreadableImage(path, f"{kind.name} images cannot be read: convert it to JPEG, PNG or TIFF")
            if kind.packages:
                require_packages(f"reading {kind.name} images", *kind.packages, extra=kind.extra)
            if reading.pixel_size and not kind.has_windows:
                raise UnreadableImage(
                    path,
                    f"no pixel size is read from {kind.name} images, which --pixel_size {reading.pixel_size:g} "
                    "requires: convert it to TIFF with a resolution, or give --pixel_size 0",
                )
            yield file, kind, import_module(f"cribo.data.readers.{kind.reader}"), reading
    except (UnreadableImage, MissingPackage, MemoryError):
        raise
    except FileNotFoundError as error:
        raise UnreadableImage(path, "no such file") from error
    except Exception as error:  # decoders raise various errors: OSError, SyntaxError, struct.error, ...
        raise UnreadableImage(path, str(error) or type(error).__name__) from error


def _require_sides(picture: Picture, path: str | os.PathLike[str] | ImageContent) -> None:
    height, width = picture.header_size
    if min(width, height) < 2:
        raise UnreadableImage(path, f"{width} x {height} pixels are too few: at least 2 x 2 are required")


def _require_units(picture: WindowedPicture, path: str | os.PathLike[str] | ImageContent, reading: Reading) -> None:
    if picture.unit_pixels > reading.max_pixels:
        what = f"{picture.unit_pixels} pixels, in tiles or strips of the file that are decoded at once,"
        raise TooManyPixels(path, what, reading.max_pixels)


def _opened(path: str | ImageContent) -> BinaryIO:
    return path.open() if isinstance(path, EncodedImage | ImageOnDisk) else Path(path).open("rb")


def _tensor(pixels: UInt8[np.ndarray, "h w c"]) -> UInt8[Tensor, "c h w"]:
    import torch

    return torch.from_numpy(pixels).permute(2, 0, 1)
