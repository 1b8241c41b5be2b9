"""Pictures of image pairs with true and matched keypoints."""

from collections.abc import Sequence

from jaxtyping import Float
from matplotlib.figure import Figure
from torch import Tensor

from cribo.base.colours import rgb
from cribo.base.drawing import marker_handle, panel_grid, title_row
from cribo.data.labelled.correspondence import PairedImages
from cribo.evaluation.correspondence.matching import are_correct
from cribo.evaluation.pages import draw_box, show_image
from cribo.evaluation.pictures import RIGHT, WRONG


def draw_pairs(
    numbers: Sequence[int], matches: Sequence[Float[Tensor, "k 2"]], images: PairedImages, *, alpha: float
) -> Figure:
    """Draw the points of each source and their matches in the target, with lines to the ground truth.

    Args:
        numbers: indices of the pairs, at least one.
        matches: matched points in the target of each pair.
        images: paired images.
        alpha: threshold of correct points.
    """
    figure, rows = panel_grid(
        [images.load(images.pairs[number].target).shape[1:] for number in numbers],
        ("source", "target"),
        row_titles=True,
        handles=[
            marker_handle(f"correct, within {alpha:g} of the box", rgb(RIGHT), "white"),
            marker_handle("wrong", rgb(WRONG), "white"),
            marker_handle("ground truth", "none", "0.4"),
        ],
    )
    for row, number in zip(rows, numbers, strict=True):
        (left, right), pair, found = row, images.pairs[number], matches[number]
        correct = are_correct(pair, found, alpha).tolist()
        title_row(row, pair.name, f"{sum(correct)} of {len(correct)} points correct")
        show_image(left, images.load(pair.source))
        show_image(right, images.load(pair.target))
        draw_box(right, pair.box, "white", line_width=0.8)
        points = (part.tolist() for part in (pair.source_points, pair.target_points, found))
        for source, target, match, is_right in zip(*points, correct, strict=True):
            colour = rgb(RIGHT if is_right else WRONG)
            left.plot(*source, "o", markersize=5, color=colour, markeredgecolor="white")
            right.plot(*zip(target, match, strict=True), "-", color=colour, linewidth=1.2)
            right.plot(*target, "o", markersize=6, color="none", markeredgecolor="white")
            right.plot(*match, "o", markersize=5, color=colour, markeredgecolor="white")
    return figure
