"""Contact sheets of a search: queries with similar objects, or pairs of similar images."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from cribo.data.reading import UnreadableImage, read_image, read_reduced
from cribo.drawing import hide_ticks, house_style, paint_regions, write_figure
from cribo.object_search.database import FoundObject
from cribo.object_search.duplicates import DuplicatePair
from cribo.object_search.queries import Query
from cribo.retrieval.patches import resize_image

_QUERY_COLOUR, _FOUND_COLOUR = (0.9, 0.35, 0.0), (0.0, 0.62, 0.45)
_TINT = 0.2
_SHOWN = 300  # shorter side of an image on the sheet, in pixels
_COLUMNS = 5
_PANEL, _HEADING = 2.3, 0.42  # inch
_MOST_ROWS = 16
_NAME = 26  # maximum length of an image's name


def write_sheet(
    path: Path, query: Query, found: Sequence[Sequence[FoundObject]], states: dict[str, str], root: Path
) -> Path:
    """Draw the query on the left and the nearest objects on the right, and write a PNG.

    With one region, all its objects are drawn in rows of five; with several, the first five of each in one row.

    Args:
        path: path of the picture.
        query: the query.
        found: objects found for each region, in descending order of similarity.
        states: states of the found images: `changed`, `missing` or "".
        root: folder that the paths are relative to.
    """
    with house_style():
        figure, queries, cells = _panels(query, len(found), len(found[0]))
        for number, axes in enumerate(queries):
            _draw_query(axes, query, number)
        for axes, one in _placed(cells, found, len(queries)):
            _draw_found(axes, one, states.get(one.image, ""), root)
        hide_ticks(np.array([*queries, *cells]))
        return write_figure(path, figure)


def write_pairs(path: Path, pairs: Sequence[DuplicatePair], root: Path) -> Path:
    """Draw the first pairs of similar images, two pairs per row, and write a PNG.

    Args:
        path: path of the picture.
        pairs: pairs in descending order of similarity.
        root: folder that the paths are relative to.
    """
    shown = pairs[: 2 * _MOST_ROWS]
    rows = max(1, math.ceil(len(shown) / 2))
    with house_style():
        figure = Figure(figsize=(4 * _PANEL, rows * (_PANEL + _HEADING) + 0.1), layout="constrained")
        axes = figure.subplots(rows, 4, squeeze=False)
        frames = axes.reshape(-1, 2)
        for (left, right), pair in zip(frames, shown, strict=False):
            for one, name in ((left, pair.first), (right, pair.second)):
                pixels = _load(root / name)
                one.imshow(np.full((3, 4, 3), 0.9) if pixels is None else pixels.permute(1, 2, 0).numpy())
                one.set_title(_short(name), fontsize=8)
            left.set_title(f"{pair.similarity:.3f}\n{_short(pair.first)}", fontsize=8)
        if not pairs:
            frames[0][0].set_title("no similar images", fontsize=8)
        hide_ticks(axes)
        return write_figure(path, figure)


def _panels(query: Query, regions: int, nearest: int) -> tuple[Figure, list[Axes], list[Axes]]:
    """Return a figure with the axes of the queries (left) and of the found objects (row-major)."""
    height, width = query.size
    rows = min(max(1, math.ceil(nearest / _COLUMNS)) if regions == 1 else regions, _MOST_ROWS)
    # A single query is drawn at twice the width and height of the found objects.
    side = 2 if regions == 1 and rows > 1 else 1
    panel = _PANEL * min(max(height / width, 0.5), 1.5) + _HEADING
    figure = Figure(figsize=(_PANEL * (_COLUMNS + side), panel * rows + 0.1), layout="constrained")
    grid = figure.add_gridspec(rows, _COLUMNS + side)
    queries = [figure.add_subplot(grid[row : row + side, :side]) for row in range(1 if regions == 1 else rows)]
    cells = [figure.add_subplot(grid[row, side + column]) for row in range(rows) for column in range(_COLUMNS)]
    return figure, queries, cells


def _placed(cells: list[Axes], found: Sequence[Sequence[FoundObject]], rows: int) -> Iterator[tuple[Axes, FoundObject]]:
    """Yield the found objects with their axes; objects beyond the available axes are omitted."""
    room = len(cells) // rows
    for number, several in enumerate(found[:rows]):
        yield from zip(cells[number * room : (number + 1) * room], several, strict=False)


def _draw_query(axes: Axes, query: Query, number: int) -> None:
    region = query.regions[number]
    mask = region.pixels(*query.size)
    pixels = _small(read_image(query.path))
    small = torch.nn.functional.interpolate(torch.from_numpy(mask)[None, None].float(), pixels.shape[1:])[0, 0]
    axes.imshow(_painted(pixels, small.numpy() > 0, _QUERY_COLOUR))
    axes.set_anchor("N")  # aligns the query with the first row of found objects
    axes.set_title(f"{region.name}\n{_short(query.path.name)}", fontsize=8, color=_QUERY_COLOUR, fontweight="bold")


def _draw_found(axes: Axes, found: FoundObject, state: str, root: Path) -> None:
    title = f"{found.similarity:.3f}, object {found.object.number}\n{_short(found.image)}"
    pixels = None if state == "missing" else _load(root / found.image)
    if pixels is None:
        axes.imshow(np.full((3, 4, 3), 0.9), aspect="auto")
        note = "deleted since indexing" if state == "missing" else "unreadable"
        axes.text(0.5, 0.5, note, transform=axes.transAxes, ha="center", va="center", fontsize=8)
    elif state == "changed":
        # The stored mask does not apply to the changed image.
        axes.imshow(0.4 * pixels.permute(1, 2, 0).numpy() / 255 + 0.5)
        axes.text(0.5, 0.5, "changed since indexing", transform=axes.transAxes, ha="center", va="center", fontsize=8)
    else:
        axes.imshow(_painted(pixels, found.object.mask.pixels(pixels.shape[1:]), _FOUND_COLOUR))
    axes.set_title(title, fontsize=8)


def _painted(pixels: Tensor, mask: np.ndarray, colour: tuple[float, float, float]) -> np.ndarray:
    picture = pixels.permute(1, 2, 0).numpy() / 255
    return paint_regions(picture, torch.from_numpy(mask.astype(np.int64)), {1: colour}, tint=_TINT)


def _load(path: Path) -> Tensor | None:
    """Read an image at the size of the sheet; None if it is unreadable."""

    def reduction(height: int, width: int) -> int:
        return max((each for each in (8, 4, 2, 1) if min(height, width) >= each * _SHOWN), default=1)

    try:
        return _small(read_reduced(path, reduction)[0])
    except UnreadableImage:
        return None


def _small(pixels: Tensor) -> Tensor:
    scale = _SHOWN / min(pixels.shape[1:])
    if scale >= 1:
        return pixels
    return resize_image(pixels, (round(scale * pixels.shape[1]), round(scale * pixels.shape[2])), "bilinear")


def _short(name: str) -> str:
    short = name if len(name) <= _NAME else f"…{name[1 - _NAME :]}"
    return short.replace("$", r"\$")  # matplotlib renders text between two $ as a formula
