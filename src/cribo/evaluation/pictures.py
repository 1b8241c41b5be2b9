"""The pictures of an evaluation: its figures as curves, its confusion, its predictions beside image and labels."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import ParamSpec

import matplotlib as mpl
import numpy as np
import torch
from jaxtyping import Bool, Float, Int, UInt8
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure, SubFigure
from matplotlib.patches import Patch
from matplotlib.ticker import PercentFormatter
from torch import Tensor

from cribo.data.segmentation import Colour
from cribo.drawing import STRIPES, house_style, paint_classes, stripes, write_figure
from cribo.evaluation.results import (
    EvaluationResult,
    class_metric_title,
    iou,
    metric_title,
    percent,
    varied_title,
    varied_value,
)

RIGHT: Colour = (0, 158, 115)
"""The colour of pixels that are predicted right."""

WRONG: Colour = (213, 94, 0)
"""The colour of pixels that are predicted wrong; told apart from `RIGHT` by the colour-blind, too."""

_NO_CLASS = "no class"
_TINT = 0.6  # of right and wrong over the image
_NUMBERED_CLASSES = 24  # up to which the cells of a confusion hold their numbers
_LISTED_CLASSES = 60  # up to which they keep the order of the class list
_PANEL_WIDTH, _PANEL_HEIGHT = 3.0, 3.2  # inch, as the following
_TITLE, _HEADING, _LEGEND_LINE = 0.36, 0.22, 0.21
_ROWS_PER_PICTURE = 8

_Arguments = ParamSpec("_Arguments")


def _styled(draw: Callable[_Arguments, Figure]) -> Callable[_Arguments, Figure]:
    @wraps(draw)
    def drawn(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> Figure:
        with house_style():
            return draw(*args, **kwargs)

    return drawn


@dataclass(frozen=True)
class Panel:
    """One image with its labels and what was predicted; the maps may hold `ignore_index` for no class.

    Args:
        name: of the image.
        image: RGB.
        labels: class of each pixel.
        prediction: predicted class of each pixel.
        ignore_index: no class: such labels do not count; such a prediction is wrong.
    """

    name: str
    image: UInt8[Tensor, "3 h w"]
    labels: UInt8[Tensor, "h w"]
    prediction: UInt8[Tensor, "h w"]
    ignore_index: int = 255

    def __post_init__(self) -> None:
        sizes = {tuple(part.shape[-2:]) for part in (self.image, self.labels, self.prediction)}
        if len(sizes) > 1:
            raise ValueError(f"image, labels and prediction of {self.name} must be of one size, got {sorted(sizes)}")

    @property
    def counts(self) -> Bool[Tensor, "h w"]:
        """Which pixels have a label."""
        return self.labels != self.ignore_index

    def confusion(self, classes: int) -> Int[Tensor, "c p"]:
        """Labels against predictions, with a last column for predictions of no class."""
        labels, predicted = self.labels[self.counts].long(), self.prediction[self.counts].long()
        predicted = torch.where(predicted == self.ignore_index, classes, predicted)
        columns = classes + 1
        return torch.bincount(labels * columns + predicted, minlength=classes * columns).view(classes, columns)


def write_pictures(
    result: EvaluationResult, panels: Sequence[Panel], palette: Sequence[Colour], folder: Path
) -> list[Path]:
    """Write what there is to see of a result as PNG files into a folder, and return them.

    These are `<metric>.png` if there are several rows, `confusion.png` of the first row that has one, and
    `predictions.png`, `predictions-2.png`, ... of eight images each.

    Args:
        result: of the evaluation.
        panels: images with labels and predictions, may be none.
        palette: a colour for each class.
        folder: it is there already.
    """
    figures: dict[str, Figure] = {}
    if len(result.results) > 1:
        figures[result.headline] = draw_curves(
            [Curve.of(result, result.backbone["name"])],
            title=result.title,
            metric=result.headline,
            varies=result.varies,
            values=varied_values([result]),
        )
    confused = next((row for row in result.results if row.get("confusion")), None)
    if confused is not None:
        where = f"{varied_title(result.varies)} {varied_value(result.varies, confused[result.varies])}"
        if len(confused.get("draws") or ()) > 1:
            where += ", all draws together"
        figures["confusion"] = draw_confusion(
            torch.tensor(confused["confusion"]),
            result.classes,
            title=f"{result.title}, {where}",
            metric=class_metric_title(result.evaluation),
        )
    for number, start in enumerate(range(0, len(panels), _ROWS_PER_PICTURE), start=1):
        name = "predictions" if number == 1 else f"predictions-{number}"
        figures[name] = draw_predictions(panels[start : start + _ROWS_PER_PICTURE], result.classes, palette)
    return [write_figure(folder / f"{name}.png", figure) for name, figure in figures.items()]


# ---------------------------------------------------------------------- curves


@dataclass(frozen=True)
class Curve:
    """A metric against a setting.

    Args:
        label: in the legend.
        points: the metric in 0-1 by the value of the setting, None where it is not known.
        spread: standard deviations in 0-1, where they are known.
        published: drawn as somebody else's.
    """

    label: str
    points: Mapping[object, float | None]
    spread: Mapping[object, float]
    published: bool = False

    @classmethod
    def of(cls, result: EvaluationResult, label: str) -> "Curve":
        """The headline metric of a result."""
        std = f"{result.headline}_std"
        return cls(
            label,
            {row[result.varies]: row[result.headline] for row in result.results},
            {row[result.varies]: row[std] for row in result.results if row.get(std) is not None},
        )


def varied_values(results: Sequence[EvaluationResult]) -> list[object]:
    """All values of the setting in which the rows of these results differ, in the order in which to show them.

    Shares grow, as in the paper: 1/128, 1/64, 1/8, 1/1. Other values stay in the order of the rows, unless that of one
    result does not tell where those of another belong: then they ascend.
    """
    values = dict.fromkeys(row[result.varies] for result in results for row in result.results)
    if results[0].varies == "ratio":
        return sorted(values, reverse=True)
    return list(values) if len(values) == len(results[0].results) else sorted(values)


@_styled
def draw_curves(curves: Sequence[Curve], *, title: str, metric: str, varies: str, values: Sequence[object]) -> Figure:
    """A metric against a setting: lines, with bars for standard deviations; bars if the setting has one value."""
    figure = Figure(figsize=(7.6, 3.8), layout="constrained")
    plot_curves(figure.subplots(), curves, metric=metric, varies=varies, values=values)
    figure.suptitle(title)
    return figure


def plot_curves(axes: Axes, curves: Sequence[Curve], *, metric: str, varies: str, values: Sequence[object]) -> None:
    """Draw curves into axes of one's own; see `draw_curves`."""
    if len(values) == 1:
        _plot_bars(axes, curves, values[0])
        axes.set_xlabel(f"{metric_title(metric)} [%]")
        return
    places = {value: place for place, value in enumerate(values)}
    for number, curve in enumerate(curves):
        known = [(places[value], value, point) for value, point in curve.points.items() if point is not None]
        known.sort(key=lambda point: point[0])
        axes.errorbar(
            [place for place, _, _ in known],
            [100 * point for _, _, point in known],
            yerr=[100 * curve.spread.get(value, 0.0) for _, value, _ in known] if curve.spread else None,
            label=curve.label,
            color=_curve_colour(number),
            linestyle="--" if curve.published else "-",
            linewidth=1 if curve.published else 1.8,
            marker="o",
            markersize=4,
            markerfacecolor="white" if curve.published else None,
            capsize=3,
            zorder=2 if curve.published else 3,
        )
    axes.set_xticks(range(len(values)), [varied_value(varies, value) for value in values])
    axes.set(xlabel=varied_title(varies), ylabel=f"{metric_title(metric)} [%]")
    axes.set_ylim(bottom=max(0.0, axes.get_ylim()[0]))
    axes.grid(axis="y", color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8)


def _plot_bars(axes: Axes, curves: Sequence[Curve], value: object) -> None:
    points = [curve.points.get(value) for curve in curves]
    bars = axes.barh(
        [curve.label for curve in curves],
        [100 * (point or 0.0) for point in points],
        xerr=[100 * curve.spread.get(value, 0.0) for curve in curves] if any(c.spread for c in curves) else None,
        color=[_curve_colour(number) for number in range(len(curves))],
        height=0.6,
    )
    for bar, curve in zip(bars, curves, strict=True):
        if curve.published:
            bar.set(facecolor="white", edgecolor=bar.get_facecolor(), hatch="///")
    axes.bar_label(bars, [percent(point) for point in points], padding=4)
    axes.margins(x=0.12)
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)


def _curve_colour(number: int) -> tuple[float, ...]:
    return mpl.colormaps["tab10"](number % 10) if number < 10 else mpl.colormaps["tab20b"](number % 20)


# ------------------------------------------------------------------- confusion


@_styled
def draw_confusion(
    confusion: Int[Tensor, "c p"], classes: Sequence[str], *, title: str = "Confusion", metric: str = "IoU"
) -> Figure:
    """What each class is taken for, in shares of its labels, beside the figure of each class.

    Up to 60 classes stand in the order of their list; more of them from the most frequent to the rarest.

    Args:
        confusion: counts, rows are labels, columns predictions; a column after those of the classes counts
            predictions of no class.
        classes: their names.
        title: of the figure.
        metric: of each class: `IoU`, of pixels or patches, or `accuracy`, of images.

    Raises:
        ValueError: not a row, and a column or one more, for each class.
    """
    count, columns = confusion.shape
    if count != len(classes) or columns not in (count, count + 1):
        raise ValueError(
            f"confusion must have {len(classes)} rows and as many columns or one more, one for each class, "
            f"got {count} x {columns}"
        )
    order = torch.arange(count)
    if count > _LISTED_CLASSES:
        order = confusion.sum(dim=1).argsort(descending=True, stable=True)
    names = [classes[place] for place in order.tolist()]
    predicted = torch.cat((order, torch.arange(count, columns)))
    shares = _shares(confusion)[order][:, predicted]
    cell = min(0.52, max(0.1, 9 / count))  # inch
    side = cell * columns
    figure = Figure(figsize=(side + 4.6, cell * count + 2.2), layout="constrained")
    matrix, bars, scale = figure.subplots(1, 3, width_ratios=(side, 1.8, 0.16))
    bars.sharey(matrix)
    drawn = matrix.imshow(
        shares.numpy(),
        # Small shares are what one looks for off the diagonal.
        norm=PowerNorm(0.5, vmin=0, vmax=1),
        cmap=mpl.colormaps["Blues"].with_extremes(bad="0.93"),
        aspect="auto",
        interpolation="nearest",
    )
    font = min(9.0, 72 * cell * 0.82)
    matrix.set_yticks(range(count), names, fontsize=font)
    matrix.set_xticks(range(columns), [*names, _NO_CLASS][:columns], rotation=90, fontsize=font)
    matrix.tick_params(length=0)
    matrix.spines[:].set_visible(False)
    matrix.set(xlabel="prediction", ylabel="label")
    if count <= _NUMBERED_CLASSES:
        _number_cells(matrix, shares)
    figures, mean, counted = _CLASS_FIGURES[metric]
    _draw_class_figures(bars, figures(confusion)[order], font, metric, mean)
    bar = figure.colorbar(drawn, cax=scale, format=PercentFormatter(1, decimals=0))
    without = " (grey: no labels)" if bool(shares.isnan().any()) else ""
    bar.set_label(f"share of the label's {counted}{without}")
    figure.suptitle(title + ("\nclasses from the most frequent to the rarest" if count > _LISTED_CLASSES else ""))
    return figure


def _shares(confusion: Int[Tensor, "c p"]) -> Float[Tensor, "c p"]:
    """Rows that sum to 1, NaN for a class without labels."""
    return confusion.double() / confusion.sum(dim=1, keepdim=True)


def _number_cells(axes: Axes, shares: Float[Tensor, "c p"]) -> None:
    for row, column in (shares >= 0.005).nonzero().tolist():
        share = float(shares[row, column])
        axes.text(
            column,
            row,
            f"{100 * share:.0f}",
            ha="center",
            va="center",
            fontsize=8,
            color="white" if share > 0.35 else "black",
        )


def accuracy(confusion: Int[Tensor, "c p"]) -> Float[Tensor, " c"]:
    """The share of each class's labels that is predicted right, NaN for a class without labels."""
    return confusion.diagonal().double() / confusion.sum(dim=1)


_CLASS_FIGURES: Mapping[str, tuple[Callable[[Tensor], Tensor], str, str]] = {
    "IoU": (iou, "mIoU", "pixels or patches"),
    "accuracy": (accuracy, "mean", "images"),
}


def _draw_class_figures(axes: Axes, values: Float[Tensor, " c"], font: float, metric: str, mean: str) -> None:
    places = range(len(values))
    axes.barh(places, 100 * values.nan_to_num(0.0).numpy(), height=0.8, color="C0")
    for place, value in zip(places, values.tolist(), strict=True):
        absent = value != value
        axes.text(
            1 if absent else 100 * value + 1,
            place,
            "does not occur" if absent else f"{100 * value:.1f}",
            va="center",
            fontsize=min(8.0, font),
            color="0.6" if absent else "black",
        )
    axes.set(xlabel=f"{metric} [%]", xlim=(0, 100), title=f"{mean} {percent(float(values.nanmean()))} %")
    axes.tick_params(axis="y", left=False, labelleft=False)
    axes.margins(y=0)


# ----------------------------------------------------------------- predictions


@_styled
def draw_predictions(panels: Sequence[Panel], classes: Sequence[str], palette: Sequence[Colour]) -> Figure:
    """Image, labels, prediction, and what of it is right, a row for each image.

    A row's title says the mIoU over the classes that occur in the image or its prediction, and the share of the
    labelled pixels that are right. Pixels without class are striped. The legend lists the classes that are drawn.

    Args:
        panels: at least one.
        classes: their names.
        palette: a colour for each class.

    Raises:
        ValueError: no panel, or not a colour for each class.
    """
    if not panels:
        raise ValueError("panels must hold at least one image, got 0")
    if len(palette) != len(classes):
        raise ValueError(f"palette must have a colour for each of the {len(classes)} classes, got {len(palette)}")
    heights = [min(_PANEL_HEIGHT, _PANEL_WIDTH * _aspect(panel)) for panel in panels]
    handles = _legend_handles(panels, classes, palette)
    columns = min(len(handles), 8)
    legend = _LEGEND_LINE * -(-len(handles) // columns) + 0.15
    spaces = [*(height + _TITLE for height in heights), legend]
    spaces[0] += _HEADING
    figure = Figure(figsize=(4 * _PANEL_WIDTH + 0.4, sum(spaces)), layout="constrained")
    rows = figure.subfigures(len(spaces), 1, squeeze=False, height_ratios=spaces)[:, 0]
    for row, panel in zip(rows, panels, strict=False):
        _draw_panel(row, panel, len(classes), palette)
    for axes, heading in zip(rows[0].axes, ("image", "labels", "prediction", "right or wrong"), strict=True):
        axes.set_title(heading, fontsize=9)
    rows[-1].legend(handles=handles, ncols=columns, loc="center", frameon=False, fontsize=8, handlelength=1.2)
    return figure


def _aspect(panel: Panel) -> float:
    return panel.labels.shape[0] / panel.labels.shape[1]


def _draw_panel(figure: SubFigure, panel: Panel, classes: int, palette: Sequence[Colour]) -> None:
    confusion = panel.confusion(classes)
    total = int(confusion.sum())
    score = "no labels"
    if total:
        accuracy = int(confusion.diagonal().sum()) / total
        score = f"mIoU {percent(float(iou(confusion).nanmean()))} %, {percent(accuracy)} % of the pixels right"
    figure.suptitle(f"{panel.name}: {score}", fontsize=9, x=0.005, ha="left")
    pictures = (
        panel.image.permute(1, 2, 0).numpy(),
        paint_classes(panel.labels, palette, panel.ignore_index),
        paint_classes(panel.prediction, palette, panel.ignore_index),
        paint_right_and_wrong(panel),
    )
    # Colours of classes are not mixed: the mixture of two may be that of a third.
    ways = ("antialiased", "nearest", "nearest", "nearest")
    for axes, picture, interpolation in zip(figure.subplots(1, 4), pictures, ways, strict=True):
        axes.imshow(picture, interpolation=interpolation)
        axes.set_axis_off()


def paint_right_and_wrong(panel: Panel) -> UInt8[np.ndarray, "h w 3"]:
    """`RIGHT` or `WRONG` over the image in grey; stripes where there is no label."""
    grey = panel.image.float().mean(dim=0)[..., None]
    right = (panel.prediction == panel.labels)[..., None]
    colour = torch.where(right, torch.tensor(RIGHT), torch.tensor(WRONG))
    painted = ((1 - _TINT) * grey + _TINT * colour).round().to(torch.uint8)
    painted[~panel.counts] = stripes(panel.labels.shape)[~panel.counts]
    return painted.numpy()


def _legend_handles(panels: Sequence[Panel], classes: Sequence[str], palette: Sequence[Colour]) -> list[Patch]:
    drawn = torch.zeros(256, dtype=torch.bool)
    unlabelled = False
    for panel in panels:
        values = torch.cat((panel.labels.unique(), panel.prediction.unique())).long()
        drawn[values[values != panel.ignore_index]] = True
        unlabelled |= bool((values == panel.ignore_index).any())
    handles = [
        Patch(facecolor=_rgb(palette[place]), edgecolor="0.4", linewidth=0.4, label=classes[place])
        for place in drawn.nonzero()[:, 0].tolist()
    ]
    if unlabelled:
        handles.append(
            Patch(facecolor=str(STRIPES[0] / 255), edgecolor=str(STRIPES[1] / 255), hatch="////", label=_NO_CLASS)
        )
    return [*handles, Patch(facecolor=_rgb(RIGHT), label="right"), Patch(facecolor=_rgb(WRONG), label="wrong")]


def _rgb(colour: Colour) -> tuple[float, float, float]:
    red, green, blue = colour
    return red / 255, green / 255, blue / 255
