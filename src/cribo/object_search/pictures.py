"""Contact sheets of a search: queries with similar objects, or pairs of similar images."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from jaxtyping import UInt8
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from cribo.data.reading import UnreadableImage, read_image, read_reduced
from cribo.drawing import PAGE_WIDTH, hide_ticks, house_style, outline_region, short_name, write_figure
from cribo.object_search.database import FoundObject
from cribo.object_search.duplicates import DuplicatePair
from cribo.object_search.queries import Query
from cribo.retrieval.patches import resize_image

_SHOWN = 300  # shorter side of an image on the sheet, in pixels
_COLUMNS = 6  # including the query
_PANEL, _HEADING = PAGE_WIDTH / _COLUMNS, 0.52  # inch
_MOST_ROWS = 16
_TEXT = 8  # points
_LETTERS = 21  # that fit over a panel


def write_sheet(
    path: Path, query: Query, found: Sequence[Sequence[FoundObject]], states: dict[str, str], root: Path
) -> Path:
    """Draw the query on the left and the nearest objects on the right, and write a PNG.

    With one region, all its objects are drawn in rows of four; with several, the first five of each in one row.

    Args:
        path: path of the picture.
        query: the query.
        found: objects found for each region, in descending order of similarity.
        states: states of the found images: `changed`, `missing` or "".
        root: folder that the paths are relative to.
    """
    with house_style():
        figure, queries, cells = _panels(query, len(found), len(found[0]))
        figure.suptitle(
            "The query (left) and the most similar objects, outlined. Above each: the cosine similarity\n"
            "of its features to those of the query (at most 1), its number in the image, and the file",
            fontsize=9,
        )
        for number, axes in enumerate(queries):
            _draw_query(axes, query, number, len(queries))
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
        figure = Figure(figsize=(PAGE_WIDTH, rows * (PAGE_WIDTH / 4 * 0.75 + _HEADING) + 0.6), layout="constrained")
        more = f"the first {len(shown)} of {len(pairs)} pairs" if len(pairs) > len(shown) else f"{len(pairs)} pairs"
        figure.suptitle(
            f"Similar images: {more}. Above each: cosine similarity of their mean features (at most 1)",
            fontsize=9,
        )
        axes = figure.subplots(rows, 4, squeeze=False)
        frames = axes.reshape(-1, 2)
        for (left, right), pair in zip(frames, shown, strict=False):
            for one, name, number in ((left, pair.first, f"{pair.similarity:.3f}"), (right, pair.second, "")):
                pixels = _load(root / name)
                one.imshow(np.full((3, 4, 3), 0.9) if pixels is None else _array(pixels))
                _title(one, number, name, letters=30)
        if not pairs:
            frames[0][0].set_title("no similar images", fontsize=_TEXT)
        hide_ticks(axes)
        return write_figure(path, figure)


def _panels(query: Query, regions: int, nearest: int) -> tuple[Figure, list[Axes], list[Axes]]:
    """Return a figure with the axes of the queries (left) and of the found objects (row-major)."""
    height, width = query.size
    # A single query is drawn at twice the width and height of the found objects.
    side = 2 if regions == 1 else 1
    columns = _COLUMNS - side
    rows = min(max(side, math.ceil(nearest / columns)) if regions == 1 else regions, _MOST_ROWS)
    panel = _PANEL * min(max(height / width, 0.5), 1.5) + _HEADING
    figure = Figure(figsize=(PAGE_WIDTH, panel * rows + 0.5), layout="constrained")
    grid = figure.add_gridspec(rows, _COLUMNS)
    queries = [figure.add_subplot(grid[row : row + side, :side]) for row in range(1 if regions == 1 else rows)]
    cells = [figure.add_subplot(grid[row, side + column]) for row in range(rows) for column in range(columns)]
    return figure, queries, cells


def _placed(cells: list[Axes], found: Sequence[Sequence[FoundObject]], rows: int) -> Iterator[tuple[Axes, FoundObject]]:
    """Yield the found objects with their axes; objects beyond the available axes are omitted."""
    room = len(cells) // rows
    for number, several in enumerate(found[:rows]):
        yield from zip(cells[number * room : (number + 1) * room], several, strict=False)


def _draw_query(axes: Axes, query: Query, number: int, queries: int) -> None:
    region = query.regions[number]
    mask = region.pixels(*query.size)
    pixels = _small(read_image(query.path))
    small = torch.nn.functional.interpolate(torch.from_numpy(mask)[None, None].float(), pixels.shape[1:])[0, 0]
    axes.imshow(outline_region(_array(pixels), small.numpy() > 0))
    axes.set_anchor("N")  # aligns the query with the first row of found objects
    _title(axes, f"query: {region.name}", query.path.name, letters=_LETTERS * (2 if queries == 1 else 1), bold=True)


def _draw_found(axes: Axes, found: FoundObject, state: str, root: Path) -> None:
    pixels = None if state == "missing" else _load(root / found.image)
    note = ""
    if pixels is None:
        axes.imshow(np.full((3, 4, 3), 0.9), aspect="auto")
        note = "deleted since indexing" if state == "missing" else "unreadable"
    elif state == "changed":
        # The stored mask does not apply to the changed image.
        axes.imshow(outline_region(_array(pixels), np.zeros(pixels.shape[1:], dtype=bool)))
        note = "changed since indexing"
    else:
        axes.imshow(outline_region(_array(pixels), found.object.mask.pixels(pixels.shape[1:])))
    axes.text(0.5, 0.5, note.replace(" ", "\n"), transform=axes.transAxes, ha="center", va="center", fontsize=_TEXT)
    _title(axes, f"{found.similarity:.3f}, object {found.object.number}", found.image)


def _title(axes: Axes, what: str, name: str, *, letters: int = _LETTERS, bold: bool = False) -> None:
    """Write a line above a picture, and the folder and name of its file."""
    folder, _, file = name.rpartition("/")
    lines = [what, *(short_name(part, letters) for part in (f"{folder}/" if folder else "", file) if part)]
    axes.set_title("\n".join(lines), fontsize=_TEXT, fontweight="bold" if bold else "normal")


def _array(pixels: UInt8[Tensor, "3 h w"]) -> UInt8[np.ndarray, "h w 3"]:
    return pixels.permute(1, 2, 0).numpy()


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
