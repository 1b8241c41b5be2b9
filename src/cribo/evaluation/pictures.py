"""Pictures of results: pages of images with boxes, points or classes, metric curves and confusion matrices."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import matplotlib as mpl
import numpy as np
import torch
from jaxtyping import Bool, Float, Int, UInt8
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import PercentFormatter
from torch import Tensor

from cribo.base.colours import Colour, rgb
from cribo.base.drawing import (
    PAGE_WIDTH,
    house_style,
    number_regions,
    panel_grid,
    stripes_handle,
    title_row,
    write_figure,
)
from cribo.base.errors import InputError
from cribo.base.painting import as_picture, paint_classes, stripes, tint
from cribo.data import LabelledImages
from cribo.data.config import spread
from cribo.data.labelled.crops import resize_labels
from cribo.evaluation.curves import Curve, plot_curves, varied_values
from cribo.evaluation.results import EvaluationResult, percent, varied_title, varied_value
from cribo.features.scores import accuracy, count_confusion, iou, mean_iou

RIGHT: Colour = (0, 158, 115)
"""Colour of correct pixels."""

WRONG: Colour = (213, 94, 0)
"""Colour of wrong pixels; distinguishable from `RIGHT` with colour vision deficiency."""

_NO_CLASS = "no class"
_NUMBERED_CLASSES = 24  # maximum number of classes for numbers in the cells of a confusion matrix
_LISTED_CLASSES = 60  # maximum number of classes that keep the order of the class list
_NUMBERED = 0.03  # smaller regions have no number: radius as a share of the width of the picture
_ROWS_PER_PICTURE = 8
_CLASS_FIGURES: Mapping[str, tuple[Callable[[Tensor], Tensor], str, str]] = {
    "IoU": (iou, "mIoU", "pixels or patches"),
    "accuracy": (accuracy, "mean", "images"),
}


_T = TypeVar("_T")

Overlay = Callable[[Axes], object]
"""Draws over a picture in its axes."""

# ----------------------------------------------------------------------- pages


class Picture(NamedTuple):
    """An image of a page.

    Attributes:
        image: a (C, h, w) tensor, or an RGB picture as an (h, w, 3) array.
        overlays: what is drawn over it, such as `box` or `point`.
        nearest: whether it is not interpolated: a mixture of two class colours may equal the colour of a third class.
    """

    image: UInt8[Tensor, "c h w"] | UInt8[np.ndarray, "h w 3"]
    overlays: Sequence[Overlay] = ()
    nearest: bool = False

    @property
    def pixels(self) -> UInt8[np.ndarray, "h w 3"]:
        """The image as an array."""
        return as_picture(self.image.numpy()) if isinstance(self.image, Tensor) else self.image


class Row(NamedTuple):
    """A row of a page: its name and verdict are its title, and its height is that of its last picture."""

    name: str
    verdict: str
    pictures: Sequence[Picture]


@dataclass(frozen=True)
class Page:
    """A page of pictures in rows.

    Attributes:
        headings: title of each column.
        rows: at least one.
        handles: handles of the legend.
        title: title of the page.
        text: height in inches of the text below the pictures of a row.
    """

    headings: Sequence[str]
    rows: Sequence[Row]
    handles: Sequence[Artist]
    title: str = ""
    text: float = 0.0

    def draw(self) -> Figure:
        """Return the figure."""
        figure, grid = panel_grid(
            [row.pictures[-1].pixels.shape[:2] for row in self.rows],
            self.headings,
            title=self.title,
            row_titles=True,
            text=self.text,
            handles=self.handles,
        )
        for panels, row in zip(grid, self.rows, strict=True):
            title_row(panels, row.name, row.verdict)
            for axes, picture in zip(panels, row.pictures, strict=True):
                axes.imshow(picture.pixels, interpolation="nearest" if picture.nearest else None)
                axes.autoscale(enable=False)  # overlays do not change the limits
                for overlay in picture.overlays:
                    overlay(axes)
        return figure


@house_style()
def write_pages(
    folder: Path,
    name: str,
    items: Sequence[_T],
    page: Callable[[Sequence[_T]], Page],
    *,
    number: int | None = None,
    rows: int = 6,
) -> list[Path]:
    """Draw items into `<name>.png`, `<name>-2.png`, ..., and return the paths of these files.

    Args:
        folder: output folder.
        name: name of the files.
        items: items to draw.
        page: function that returns the page of some items.
        number: maximum number of items to draw, evenly spaced; all if None.
        rows: maximum number of items per file.
    """
    chosen = items if number is None else [items[place] for place in spread(len(items), number)]
    return [
        write_figure(folder / f"{name}{f'-{number}' * (number > 1)}.png", page(chosen[start : start + rows]).draw())
        for number, start in enumerate(range(0, len(chosen), rows), start=1)
    ]


def box(
    corners: Sequence[float], colour: Any, *, text: str = "", line_width: float = 1.5, dashed: bool = False
) -> Overlay:
    """Return an overlay that draws a box.

    Args:
        corners: left, top, right and bottom in pixels.
        colour: colour of the line, RGB in 0-1 if there is a text.
        text: text in the upper left corner.
        line_width: width of the line in points.
        dashed: whether the line is dashed.
    """
    left, top, right, bottom = corners
    corner = left - 0.5, top - 0.5  # imshow places pixel centres at integers

    def draw(axes: Axes) -> None:
        style: dict[str, Any] = {"edgecolor": colour, "linewidth": line_width, "linestyle": "--" if dashed else "-"}
        axes.add_patch(Rectangle(corner, right - left, bottom - top, fill=False, **style))
        if text:
            ink = "black" if np.dot(colour, (0.3, 0.6, 0.1)) > 0.45 else "white"
            label = {"facecolor": colour, "edgecolor": "none", "pad": 0.8}
            place = max(0.0, left), max(0.0, top)
            axes.text(*place, text, fontsize=8, color=ink, va="top", clip_on=True, bbox=label)

    return draw


def point(place: Sequence[float], colour: Any, *, edge: Any = "white", size: float = 5) -> Overlay:
    """Return an overlay that draws a point at (x, y) in pixels."""
    return lambda axes: axes.plot(*place, "o", markersize=size, color=colour, markeredgecolor=edge)


def line(start: Sequence[float], end: Sequence[float], colour: Any) -> Overlay:
    """Return an overlay that draws a line between two places (x, y) in pixels."""
    return lambda axes: axes.plot(*zip(start, end, strict=True), "-", color=colour, linewidth=1.2)


# --------------------------------------------------------------------- results


@dataclass(frozen=True)
class Panel:
    """An image with its labels and predictions.

    Args:
        name: name of the image.
        image: RGB image.
        labels: class of each pixel.
        prediction: predicted class of each pixel.
        ignore_index: value of unlabelled pixels, which are not scored; as a prediction it is always wrong.
    """

    name: str
    image: UInt8[Tensor, "c h w"]
    labels: UInt8[Tensor, "h w"]
    prediction: UInt8[Tensor, "h w"]
    ignore_index: int = 255

    def __post_init__(self) -> None:
        sizes = {tuple(part.shape[-2:]) for part in (self.image, self.labels, self.prediction)}
        if len(sizes) > 1:
            raise InputError(f"image, labels and prediction of {self.name} must be of one size, got {sorted(sizes)}")

    @property
    def counts(self) -> Bool[Tensor, "h w"]:
        """Mask of the labelled pixels."""
        return self.labels != self.ignore_index

    def confusion(self, classes: int) -> Int[Tensor, "c p"]:
        """Return the confusion matrix, with an additional last column for predictions of no class."""
        labels, predicted = self.labels[self.counts].long(), self.prediction[self.counts].long()
        predicted = torch.where(predicted == self.ignore_index, classes, predicted)
        return count_confusion(labels, predicted, classes, classes + 1)


def write_pictures(
    result: EvaluationResult, panels: Sequence[Panel], palette: Sequence[Colour], folder: Path
) -> list[Path]:
    """Write the pictures of a result to a folder as PNG files, and return their paths.

    The files are `<metric>.png` if there are several rows, `confusion.png` for the first row with a confusion matrix,
    and `predictions.png`, `predictions-2.png`, ... with eight images each.

    Args:
        result: result of the evaluation.
        panels: images with labels and predictions; may be empty.
        palette: colour of each class.
        folder: an existing folder.
    """
    written, varies, headline = [], result.varies, result.headline
    with house_style():
        if len(result.results) > 1:
            curve = Curve(result.backbone["name"], {row[varies]: row for row in result.results})
            figure = Figure(figsize=(PAGE_WIDTH, 3.8), layout="constrained")
            plot_curves(figure.subplots(), [curve], metric=headline, varies=varies, values=varied_values([result]))
            figure.suptitle(result.title)
            written.append(write_figure(folder / f"{headline}.png", figure))
        confused = next((row for row in result.results if row.get("confusion")), None)
        if confused is not None:
            where = f"{varied_title(varies)} {varied_value(varies, confused[varies])}"
            draws = ", all draws together" if len(confused.get("draws") or ()) > 1 else ""
            title, counts = f"{result.title}, {where}{draws}", torch.tensor(confused["confusion"])
            figure = draw_confusion(counts, result.classes, title=title, metric=result.class_metric)
            written.append(write_figure(folder / "confusion.png", figure))
    page = partial(predictions_page, classes=result.classes, palette=palette)
    return [*written, *write_pages(folder, "predictions", panels, page, rows=_ROWS_PER_PICTURE)]


def panel_of(
    images: LabelledImages,
    index: int,
    prediction: Int[Tensor, "rows columns"],
    labels: UInt8[Tensor, "h w"] | None = None,
) -> Panel:
    """Return the panel of an image, with a prediction for pixels or patches, which is not interpolated.

    Args:
        images: images with labels.
        index: index of the image.
        prediction: predicted classes.
        labels: labels to draw; those of the image if None.
    """
    labels = images.labels(index) if labels is None else labels
    shown = resize_labels(prediction.to(torch.uint8), (labels.shape[0], labels.shape[1]))
    return Panel(images.name(index), images.load(index), labels, shown, images.ignore_index)


# ------------------------------------------------------------------- confusion


def draw_confusion(
    confusion: Int[Tensor, "c p"], classes: Sequence[str], *, title: str = "Confusion", metric: str = "IoU"
) -> Figure:
    """Draw a confusion matrix normalised by row, and the metric of each class.

    Up to 60 classes are drawn in the order of `classes`; more are sorted by descending frequency.

    Args:
        confusion: counts with labels in rows and predictions in columns; an additional last column counts predictions
            of no class.
        classes: class names.
        title: title of the figure.
        metric: per-class metric: `IoU`, of pixels or patches, or `accuracy`, of images.

    Raises:
        ValueError: the numbers of rows or columns do not match the number of classes.
    """
    count, columns = confusion.shape
    if count != len(classes) or columns not in (count, count + 1):
        raise InputError(
            f"confusion must have {len(classes)} rows and as many columns or one more, one for each class, "
            f"got {count} x {columns}"
        )
    order = torch.arange(count)
    if count > _LISTED_CLASSES:
        order = confusion.sum(dim=1).argsort(descending=True, stable=True)
    names = [classes[place] for place in order.tolist()]
    predicted = torch.cat((order, torch.arange(count, columns)))
    # Rows sum to 1, and are NaN for a class without labels.
    shares = (confusion.double() / confusion.sum(dim=1, keepdim=True))[order][:, predicted]
    cell = min(0.5, max(0.11, (PAGE_WIDTH - 4) / columns))  # inch
    side = cell * columns
    figure = Figure(figsize=(side + 4, cell * count + 2.2), layout="constrained")
    matrix, bars, scale = figure.subplots(1, 3, width_ratios=(side, 1.8, 0.16))
    bars.sharey(matrix)
    drawn = matrix.imshow(
        shares.numpy(),
        # The square root emphasises small values off the diagonal.
        norm=PowerNorm(0.5, vmin=0, vmax=1),
        cmap=mpl.colormaps["Blues"].with_extremes(bad="0.93"),
        aspect="auto",
        interpolation="nearest",
    )
    font, inside = min(9.0, 72 * cell * 0.82), min(8.0, 36 * cell)
    matrix.set_yticks(range(count), names, fontsize=font)
    matrix.set_xticks(range(columns), [*names, _NO_CLASS][:columns], rotation=90, fontsize=font)
    matrix.tick_params(length=0)
    matrix.spines[:].set_visible(False)
    matrix.set(xlabel="prediction", ylabel="label")
    for row, column in (shares >= 0.005).nonzero().tolist() if count <= _NUMBERED_CLASSES else ():
        share = float(shares[row, column])
        colour = "white" if share > 0.35 else "black"
        matrix.text(column, row, f"{100 * share:.0f}", ha="center", va="center", fontsize=inside, color=colour)
    figures, mean, counted = _CLASS_FIGURES[metric]
    _draw_class_figures(bars, figures(confusion)[order], font, metric, mean)
    bar = figure.colorbar(drawn, cax=scale, format=PercentFormatter(1, decimals=0))
    without = " (grey: no labels)" if bool(shares.isnan().any()) else ""
    bar.set_label(f"share of the label's {counted}{without}")
    figure.suptitle(title + ("\nclasses from the most frequent to the rarest" if count > _LISTED_CLASSES else ""))
    return figure


def _draw_class_figures(axes: Axes, values: Float[Tensor, " c"], font: float, metric: str, mean: str) -> None:
    bars = axes.barh(range(len(values)), 100 * values.nan_to_num(0.0).numpy(), height=0.8, color="C0")
    texts = [percent(value) if value == value else "does not occur" for value in values.tolist()]
    for text in axes.bar_label(bars, texts, padding=2, fontsize=min(8.0, font)):
        text.set_color("0.6" if text.get_text() == "does not occur" else "black")
    axes.set(xlabel=f"{metric} [%]", xlim=(0, 100), title=f"{mean} {percent(float(values.nanmean()))} %")
    axes.tick_params(axis="y", left=False, labelleft=False)
    axes.margins(y=0)


# ----------------------------------------------------------------- predictions


def predictions_page(panels: Sequence[Panel], classes: Sequence[str], palette: Sequence[Colour]) -> Page:
    """Return a page of images, labels, predictions and their correctness, one row per image.

    The title of a row contains the mIoU over the classes that occur in the image or its prediction, and the fraction of
    correct labelled pixels. Unlabelled pixels are striped. Regions have the number of their class, its index, since no
    palette of so many classes is distinct for everybody; the legend lists the classes drawn.

    Args:
        panels: at least one.
        classes: class names.
        palette: colour of each class.

    Raises:
        ValueError: the palette does not have one colour per class.
    """
    if len(palette) != len(classes):
        raise InputError(f"palette must have a colour for each of the {len(classes)} classes, got {len(palette)}")
    numbers = {c: c for c in range(len(classes)) if c != panels[0].ignore_index}

    def painted(panel: Panel, labels: UInt8[np.ndarray, "h w"]) -> Picture:
        numbered = partial(number_regions, labels=labels, numbers=numbers, smallest=_NUMBERED)
        return Picture(paint_classes(labels, palette, panel.ignore_index), [numbered], nearest=True)

    rows = [
        Row(
            panel.name,
            _verdict(panel.confusion(len(classes))),
            [
                Picture(panel.image),
                painted(panel, panel.labels.numpy()),
                painted(panel, panel.prediction.numpy()),
                Picture(paint_right_and_wrong(panel), nearest=True),
            ],
        )
        for panel in panels
    ]
    headings = "image", "labels", "prediction", "right or wrong"
    return Page(headings, rows, _legend_handles(panels, classes, palette))


def _verdict(confusion: Int[Tensor, "c p"]) -> str:
    if not confusion.sum():
        return "no labels"
    right = float(confusion.diagonal().sum() / confusion.sum())
    return f"mIoU {percent(mean_iou(confusion))} %, {percent(right)} % of the pixels right"


def paint_right_and_wrong(panel: Panel) -> UInt8[np.ndarray, "h w 3"]:
    """Return the greyscale image tinted with `RIGHT` or `WRONG`; unlabelled pixels are striped."""
    right = (panel.prediction == panel.labels).numpy()[..., None]
    painted = tint(as_picture(panel.image.numpy()), np.where(right, RIGHT, WRONG))
    unlabelled = ~panel.counts.numpy()
    painted[unlabelled] = stripes(panel.labels.shape)[unlabelled]
    return painted


def _legend_handles(panels: Sequence[Panel], classes: Sequence[str], palette: Sequence[Colour]) -> list[Patch]:
    drawn = {value for panel in panels for part in (panel.labels, panel.prediction) for value in part.unique().tolist()}
    ignored = {panel.ignore_index for panel in panels}
    handles = [
        Patch(facecolor=rgb(palette[place]), edgecolor="0.4", linewidth=0.4, label=f"{place} {classes[place]}")
        for place in sorted(drawn - ignored)
    ]
    return [
        *handles,
        *([stripes_handle(_NO_CLASS)] if drawn & ignored else ()),
        Patch(facecolor=rgb(RIGHT), label="last column: right"),
        Patch(facecolor=rgb(WRONG), label="wrong"),
    ]
