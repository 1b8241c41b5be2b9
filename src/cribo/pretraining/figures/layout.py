"""Layout of pictures in figures."""

import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec, SubplotSpec
from torch import Tensor

from cribo.base.colours import distinct_colours
from cribo.base.drawing import frame, hide_ticks, number_regions, panel_grid
from cribo.base.painting import as_picture, paint_regions
from cribo.objectives.cluster_record import ClusterHistory
from cribo.objectives.sampling import ObjectSample, enlarge_labels, match_sample

TEXT_WIDTH, COLUMN_WIDTH = 6.9, 3.3
"""Widths of a two-column page and of one column, in inches."""

_MATCH_COLUMNS = 6
_GAP = {"wspace": 0.04, "hspace": 0.04, "left": 0.01, "right": 0.99, "top": 0.99, "bottom": 0.01}


def lay_out_matches(sample: ObjectSample, *, queries: int, objects: int) -> Figure:
    """Draw query views, their objects, and the nearest object in other images to each, with the same number and colour.

    As in the paper's matching figures. Matches that are not cycle-consistent, and hence not used, have dashed frames.

    Args:
        sample: the first `queries` images are the queries; the others are searched.
        queries: number of query images.
        objects: maximum number of objects per query, largest first.
    """
    rows = 2 * math.ceil(objects / (2 * _MATCH_COLUMNS))
    columns = rows * 2 + _MATCH_COLUMNS
    cell = TEXT_WIDTH / columns
    figure = Figure(figsize=(TEXT_WIDTH, cell * rows * queries))
    grid = GridSpec(rows * queries, columns, figure=figure, **_GAP)
    for query, (painted, neighbours) in enumerate(match_sample(sample, queries, objects=objects)):
        top = rows * query
        _picture(figure, grid[top : top + rows, :rows], sample.view(query, 0))
        axes = _picture(figure, grid[top : top + rows, rows : 2 * rows], painted)
        numbers = {neighbour.cluster: number for number, neighbour in enumerate(neighbours, start=1)}
        number_regions(axes, sample.clusters(query, 0).numpy(), numbers, size=6)
        for number, neighbour in enumerate(neighbours):
            row, column = divmod(number, _MATCH_COLUMNS)
            axes = _picture(figure, grid[top + row, 2 * rows + column], neighbour.picture)
            frame(axes, neighbour.colour, width=1.2, dashed=not neighbour.consistent)
            _number(axes, number + 1)
    return figure


def lay_out_clusters(history: ClusterHistory, *, pairs: int) -> Figure:
    """Draw view pairs in rows and their clusters at several epochs in columns, with consistent numbers and colours.

    Clusters in one view only are not objects and are drawn grey. Pairs are sorted by the area covered by objects.
    """
    most = covered(history.labels[-1]).argsort(descending=True, stable=True).tolist()[:pairs]
    pairs = len(most)
    height, width = history.views.shape[-2:]
    headings = ("views", *(f"epoch {epoch}" for epoch in history.epochs))
    figure, panels = panel_grid([(height, width)] * 2 * pairs, headings, width=TEXT_WIDTH)
    for place, pair in enumerate(most):
        numbers = consistent_numbers(history.labels[:, pair])
        colours = distinct_colours(1 + max((place for own in numbers for place in own.values()), default=0))
        for view in (0, 1):
            row = panels[2 * place + view]
            picture = as_picture(history.views[pair, view].numpy())
            row[0].imshow(picture)
            for time, axes in enumerate(row[1:]):
                labels = enlarge_labels(history.labels[time, pair, view], history.grid, (height, width)).numpy()
                axes.imshow(paint_regions(picture, labels, {c: colours[n - 1] for c, n in numbers[time].items()}))
                number_regions(axes, labels, numbers[time], size=6)
    return figure


def covered(labels: Int[Tensor, "p 2 n"]) -> Int[Tensor, " p"]:
    """Count the patches of each view pair in clusters that occur in both views."""
    first, second = labels.unbind(dim=1)
    same = first[:, :, None] == second[:, None]
    return same.any(dim=2).sum(dim=1) + same.any(dim=1).sum(dim=1)


def consistent_numbers(labels: Int[Tensor, "e 2 n"]) -> list[dict[int, int]]:
    """Number a pair's objects from 1 at each epoch, so that overlapping objects keep their number.

    Since cluster indices are arbitrary, objects of consecutive epochs are matched by the number of shared patches,
    largest first, from the last epoch to the first.
    """
    kept = [sorted(set(first.tolist()) & set(second.tolist())) for first, second in labels]
    most = max(map(len, kept), default=0)
    numbers: list[dict[int, int]] = [{cluster: place for place, cluster in enumerate(kept[-1], start=1)}]
    for time in range(len(kept) - 2, -1, -1):
        later, flat, after = numbers[0], labels[time].flatten(), labels[time + 1].flatten()
        shared = [
            (int(((flat == cluster) & (after == other)).sum()), cluster, other)
            for cluster in kept[time]
            for other in later
        ]
        given: dict[int, int] = {}
        for count, cluster, other in sorted(shared, key=lambda entry: (-entry[0], *entry[1:])):
            if count and cluster not in given and later[other] not in given.values():
                given[cluster] = later[other]
        free = iter([place for place in range(1, most + 1) if place not in given.values()])
        numbers.insert(0, {cluster: given[cluster] if cluster in given else next(free) for cluster in kept[time]})
    return numbers


def lay_out_features(
    pictures: Sequence[Float[np.ndarray, "h w 3"]], colours: Sequence[Float[np.ndarray, "h w 3"]], *, columns: int = 6
) -> Figure:
    """Draw images and, below each, its features as colours."""
    columns = min(columns, len(pictures))
    blocks = math.ceil(len(pictures) / columns)
    tallest = max(picture.shape[0] / picture.shape[1] for picture in pictures)
    figure, panels = panel_grid([(tallest, 1)] * 2 * blocks, [""] * columns, width=TEXT_WIDTH, tallest=tallest)
    for number, (picture, painted) in enumerate(zip(pictures, colours, strict=True)):
        block, column = divmod(number, columns)
        panels[2 * block, column].imshow(picture)
        panels[2 * block + 1, column].imshow(painted)
    return figure


def _number(axes: Axes, number: int) -> None:
    """Write a number into the upper left corner of a picture."""
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
    axes.text(0.04, 0.95, str(number), transform=axes.transAxes, fontsize=6, ha="left", va="top", bbox=box)


def _picture(figure: Figure, place: SubplotSpec, picture: np.ndarray) -> Axes:
    axes = figure.add_subplot(place)
    axes.imshow(picture)
    hide_ticks(axes)
    return axes
