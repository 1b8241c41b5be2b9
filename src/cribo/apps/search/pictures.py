"""Contact sheets of a search: queries with similar objects, or pairs of similar images.

Drawn with Pillow, since importing matplotlib takes longer than searching.
"""

import importlib.util
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageDraw, ImageFont

from cribo.apps.search.database import FoundObject
from cribo.apps.search.queries import Query
from cribo.base.errors import DataError, ShardError, UnreadableImage
from cribo.base.files import write_whole
from cribo.base.painting import as_picture, outline_region
from cribo.base.wording import counted, shortened
from cribo.data.config import DEFAULT_READING, Reading
from cribo.data.reading import EncodedImage, largest_factor, open_picture
from cribo.features.objects import resize_mask

if TYPE_CHECKING:
    from cribo.apps.search.duplicates import DuplicatePair

_WIDTH, _GAP = 1200, 12  # of the sheet, and between its pictures, in pixels
_COLUMNS = 6  # including the query
_MOST_ROWS = 16
_TEXT, _LINE = 17, 21  # size of the text and distance of its lines, in pixels
_HEADING = 3  # maximum number of text lines above a picture
_OUTLINE = 2  # width of outlines, in pixels
_NO_PICTURE = (230, 230, 230)
_DELETED = "deleted since indexing"

Pixels = UInt8[np.ndarray, "h w 3"]
Locate = Callable[[str], Path | EncodedImage]


@dataclass(frozen=True)
class _Cell:
    """A picture with lines of text above it, and a note written over it."""

    lines: Sequence[str]
    pixels: Pixels | None
    note: str = ""
    bold: bool = False


@dataclass
class _Sheet:
    """A white picture with a title and a grid of cells.

    Attributes:
        title: lines of the title.
        rows: number of rows.
        columns: number of columns.
        aspect: maximum height of a picture, as a multiple of the width of its cell.
        image: the sheet.
    """

    title: Sequence[str]
    rows: int
    columns: int
    aspect: float
    image: Image.Image = field(init=False)

    def __post_init__(self) -> None:
        self.image = Image.new("RGB", (_WIDTH, self._corner(self.rows, 0)[1]), "white")
        for number, line in enumerate(self.title):
            self._write(line, _GAP, _GAP + number * _LINE, _WIDTH - 2 * _GAP)

    def room(self, span: int = 1) -> tuple[int, int]:
        """Return the maximum (width, height), in pixels, of a picture in a cell of `span` rows and columns."""
        (left, top), (right, bottom) = self._corner(0, 0), self._corner(span, span)
        return right - left - _GAP, bottom - top - _GAP - _HEADING * _LINE

    def place(self, cell: _Cell, row: int, column: int, span: int = 1) -> None:
        """Draw a cell of `span` rows and columns, with a picture of at most the size `room(span)`."""
        left, top = self._corner(row, column)
        width, height = self.room(span)
        first = top + (_HEADING - len(cell.lines)) * _LINE  # text is aligned at the bottom, next to the picture
        for number, line in enumerate(cell.lines):
            self._write(line, left, first + number * _LINE, width, bold=cell.bold)
        top += _HEADING * _LINE
        if cell.pixels is not None:
            self.image.paste(Image.fromarray(cell.pixels), (left, top))
        else:
            self.image.paste(_NO_PICTURE, (left, top, left + width, top + height))
        for number, line in enumerate(cell.note.split()):
            self._write(line, left + _GAP, top + _GAP + number * _LINE, width - 2 * _GAP)

    def write(self, path: Path) -> Path:
        """Write the sheet atomically as a PNG, and return its path."""
        write_whole(path, lambda part: self.image.save(part, "PNG"))
        return path

    def _corner(self, row: int, column: int) -> tuple[int, int]:
        width = (_WIDTH - _GAP) / self.columns
        height = round(self.aspect * (width - _GAP)) + _HEADING * _LINE + _GAP
        return _GAP + round(column * width), 2 * _GAP + len(self.title) * _LINE + row * height

    def _write(self, line: str, left: int, top: int, width: int, *, bold: bool = False) -> None:
        font = _font("DejaVuSans-Bold" if bold else "DejaVuSans")
        lengths = range(1, len(line) + 1)
        letters = bisect_right(lengths, width, key=lambda letters: font.getlength(shortened(line, letters)))
        ImageDraw.Draw(self.image).text((left, top), shortened(line, max(1, letters)), "black", font)


@cache
def _font(name: str) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Load one of matplotlib's fonts, or Pillow's default font if it is missing."""
    package = importlib.util.find_spec("matplotlib")  # does not import it
    folder = Path(package.origin).parent if package and package.origin else Path()
    try:
        return ImageFont.truetype(folder / "mpl-data" / "fonts" / "ttf" / f"{name}.ttf", _TEXT)
    except OSError:  # some distributions move the files; Pillow's font has Latin letters only
        return ImageFont.load_default(_TEXT)


def write_sheet(
    path: Path,
    query: Query,
    found: Sequence[Sequence[FoundObject]],
    states: dict[str, str],
    locate: Locate,
    reading: Reading = DEFAULT_READING,
) -> Path:
    """Draw the query on the left and the nearest objects on the right, and write a PNG.

    With one region, all its objects are drawn in rows of four; with several, the first five of each in one row.

    Args:
        path: path of the picture.
        query: the query.
        found: objects found for each region, in descending order of similarity.
        states: states of the found images: `changed`, `missing` or "".
        locate: returns the file of an indexed image, or its content (`ObjectDatabase.locate`).
        reading: how images are read.
    """
    height, width = query.size
    # A single query is drawn at twice the width and height of the found objects.
    single = len(found) == 1
    span = 2 if single else 1
    columns = _COLUMNS - span
    rows = min(max(span, math.ceil(len(found[0]) / columns)) if single else len(found), _MOST_ROWS)
    shown = columns * (rows if single else 1)  # results of each query
    title = (
        "The query (left) and the most similar objects, outlined. Above each: the cosine similarity",
        "of its features to those of the query (at most 1), its number in the image, and the file",
    )
    sheet = _Sheet(title, rows, _COLUMNS, min(max(height / width, 0.5), 1.5))
    pixels = _read(query.image, sheet.room(span), reading)
    for row, nearest in enumerate(found[:rows]):
        sheet.place(_query_cell(query, row, pixels), row, 0, span)
        for place, one in enumerate(nearest[:shown]):
            cell = _found_cell(one, states.get(one.image, ""), locate, sheet.room(), reading)
            sheet.place(cell, row + place // columns, span + place % columns)
    return sheet.write(path)


def write_pairs(
    path: Path, pairs: "Sequence[DuplicatePair]", locate: Locate, reading: Reading = DEFAULT_READING
) -> Path:
    """Draw the first pairs of similar images, two pairs per row, and write a PNG.

    Args:
        path: path of the picture.
        pairs: pairs in descending order of similarity.
        locate: returns the file of an indexed image, or its content (`ObjectDatabase.locate`).
        reading: how images are read.
    """
    shown = pairs[: 2 * _MOST_ROWS]
    count = counted(len(pairs), "pair")
    if len(pairs) > len(shown):
        count = f"the first {len(shown)} of {count}"
    title = f"Similar images: {count}. Above each: cosine similarity of their mean features (at most 1)"
    if not pairs:
        title = "No similar images"
    sheet = _Sheet((title,), math.ceil(len(shown) / 2), 4, 0.75)
    for number, pair in enumerate(shown):
        for side, name in enumerate((pair.first, pair.second)):
            similarity = () if side else (f"{pair.similarity:.3f}",)
            pixels, note = _load(name, locate, sheet.room(), reading)
            sheet.place(_Cell((*similarity, *_file_lines(name)), pixels, note), number // 2, 2 * (number % 2) + side)
    return sheet.write(path)


def _query_cell(query: Query, number: int, pixels: Pixels) -> _Cell:
    region = query.regions[number]
    inside = resize_mask(region.pixels(*query.size), pixels.shape[:2])
    return _Cell((f"query: {region.name}", query.name), outline_region(pixels, inside, width=_OUTLINE), bold=True)


def _found_cell(found: FoundObject, state: str, locate: Locate, room: tuple[int, int], reading: Reading) -> _Cell:
    lines = (f"{found.similarity:.3f}, object {found.object.number}", *_file_lines(found.image))
    pixels, note = (None, _DELETED) if state == "missing" else _load(found.image, locate, room, reading)
    if pixels is None:
        return _Cell(lines, None, note)
    if state == "changed":
        # The stored mask does not apply to the changed image.
        nothing = np.zeros(pixels.shape[:2], dtype=bool)
        return _Cell(lines, outline_region(pixels, nothing), "changed since indexing")
    inside = found.object.mask.pixels(pixels.shape[:2])
    return _Cell(lines, outline_region(pixels, inside, width=_OUTLINE))


def _file_lines(name: str) -> list[str]:
    """Return the folder and the name of a file."""
    folder, _, file = name.rpartition("/")
    return [f"{folder}/", file] if folder else [file]


def _load(name: str, locate: Locate, room: tuple[int, int], reading: Reading) -> tuple[Pixels | None, str]:
    """Return the pixels of an indexed image, or a note that says why there are none."""
    try:
        return _read(locate(name), room, reading), ""
    except FileNotFoundError:
        return None, _DELETED
    except UnreadableImage as error:
        return None, _DELETED if isinstance(error.__cause__, FileNotFoundError) else "unreadable"
    except (OSError, DataError, ShardError):
        return None, "unreadable"


def _read(path: Path | EncodedImage, room: tuple[int, int], reading: Reading) -> Pixels:
    """Read an image as a picture, scaled to fit into (width, height) = `room`."""

    def reduction(height: int, width: int) -> int:
        return largest_factor(lambda factor: min(height, width) // factor >= 2 * max(room))

    with open_picture(path, reading=reading) as opened:  # unlike `read_reduced`, does not import torch
        pixels, _ = opened.reduced_pixels(reduction)
        picture = Image.fromarray(np.ascontiguousarray(as_picture(pixels.transpose(2, 0, 1))))
    scale = min(side / own for side, own in zip(room, picture.size, strict=True))
    width, height = (max(1, round(scale * side)) for side in picture.size)
    return np.array(picture.resize((width, height), Image.Resampling.BILINEAR))
