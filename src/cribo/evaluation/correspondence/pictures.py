"""Pictures of image pairs with true and matched keypoints."""

from collections.abc import Sequence
from typing import Any

from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from torch import Tensor

from cribo.colours import rgb
from cribo.data.correspondence import PairedImages
from cribo.evaluation.correspondence.matching import are_correct
from cribo.evaluation.pages import draw_box, show_image
from cribo.evaluation.pictures import RIGHT, WRONG, draw_rows


def draw_pairs(
    numbers: Sequence[int], matches: Sequence[Float[Tensor, "k 2"]], images: PairedImages, *, alpha: float
) -> Figure:
    """Draw the points of each source and their matches in the target, with lines to the ground truth."""

    def draw(number: int, axes: Sequence[Axes]) -> tuple[str, str]:
        pair, found = images.pairs[number], matches[number]
        correct = are_correct(pair, found, alpha).tolist()
        for part, index in zip(axes, (pair.source, pair.target), strict=True):
            show_image(part, images.load(index))
        draw_box(axes[1], pair.box, "white", line_width=0.8)
        points = (part.tolist() for part in (pair.source_points, pair.target_points, found))
        for source, target, match, is_right in zip(*points, correct, strict=True):
            colour = rgb(RIGHT if is_right else WRONG)
            axes[0].plot(*source, "o", markersize=5, color=colour, markeredgecolor="white")
            axes[1].plot(*zip(target, match, strict=True), "-", color=colour, linewidth=1.2)
            axes[1].plot(*target, "o", markersize=6, color="none", markeredgecolor="white")
            axes[1].plot(*match, "o", markersize=5, color=colour, markeredgecolor="white")
        return pair.name, f"{sum(correct)} of {len(correct)} points correct"

    shapes = [images.load(images.pairs[number].target).shape for number in numbers]
    return draw_rows(
        numbers,
        draw,
        aspects=[height / width for _, height, width in shapes],
        headings=("source", "target"),
        handles=[
            _dot(rgb(RIGHT), "white", f"correct, within {alpha:g} of the box"),
            _dot(rgb(WRONG), "white", "wrong"),
            _dot("none", "0.4", "ground truth"),
        ],
    )


def _dot(colour: Any, edge: str, label: str) -> Line2D:
    return Line2D([], [], color=colour, marker="o", linestyle="none", markeredgecolor=edge, label=label)
