"""Figures in the report of a CrIBo run: bootstrapping ratio, clusters on view pairs, matches."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from cribo.base.drawing import (
    curves_figure,
    frame,
    from_zero,
    legend,
    line_handle,
    number_regions,
    panel_grid,
    plot_curve,
)
from cribo.data.samples import SampleDataset
from cribo.models import Backbone
from cribo.objectives.config import ObjectiveOptions
from cribo.objectives.sampling import ObjectSample, match_sample, sample_objects

_CLUSTER_PAIRS = 6
_FEW_EPOCHS = 5
_QUERIES, _NEIGHBOURS, _GALLERY = 4, 5, 256
_INCONSISTENT = "it finds another; such pairs are not used in training"

CYCLE_CONSISTENT = "a search back, from the second view of the found object, finds the same object"
"""What it means that a match is cycle-consistent, in plain words."""


def object_figures(
    backbone: Backbone, options: ObjectiveOptions, rows: Sequence[dict[str, float]], dataset: SampleDataset
) -> dict[str, Figure]:
    """Draw figures of the run's objects, by name; computed on the backbone's device."""
    figures: dict[str, Figure] = {}
    if sum("bootstrapping_ratio" in row for row in rows) > 1:
        figures["bootstrapping_ratio"] = draw_bootstrapping({"": rows})
        figures["bootstrapping_ratio"].axes[0].set_title("Share of objects with a cycle-consistent match")
    if options.needs_objects:
        sample = sample_objects(backbone, dataset.source, options, count=_GALLERY)
        figures |= {"clusters": draw_clusters(sample), "matches": draw_matches(sample)}
    return figures


def draw_bootstrapping(runs: Mapping[str, Sequence[dict[str, float]]]) -> Figure:
    """Draw the mean bootstrapping ratio of each epoch, one curve per run; each row if there are few epochs.

    The ratio is the share of objects with a valid match. A figure of the paper.

    Args:
        runs: rows of each run's `metrics.csv`, by label; the label of a single run is not shown.
    """
    figure, axes = curves_figure()
    for name, rows in runs.items():
        points = [(row["epoch"], 100 * row["bootstrapping_ratio"]) for row in rows if "bootstrapping_ratio" in row]
        epochs: dict[int, list[float]] = {}
        for epoch, ratio in points:
            # The last row of epoch n (from 0) has the value n + 1.
            epochs.setdefault(max(0, int(np.ceil(epoch)) - 1), []).append(ratio)
        if len(epochs) > _FEW_EPOCHS:
            points = [(float(n), float(np.mean(ratios))) for n, ratios in sorted(epochs.items())]
        plot_curve(axes, points, label=name if len(runs) > 1 else None)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="epoch", ylabel="bootstrapping ratio [%]")
    from_zero(axes)
    legend(axes)
    return figure


def draw_clusters(sample: ObjectSample) -> Figure:
    """Draw view pairs and their clusters: a number and a colour per object, grey for clusters in one view only."""
    pairs = min(_CLUSTER_PAIRS, len(sample.pairs))
    figure, panels = panel_grid(
        [(1, 1)] * 4,
        [""] * _CLUSTER_PAIRS,
        title="Clusters of pairs of views",
    )
    figure.supxlabel("One number and one colour per object. Grey: clusters in one view only", fontsize="medium")
    for image in range(pairs):
        colours = sample.object_colours(image)
        numbers = {cluster: number for number, cluster in enumerate(colours, start=1)}
        for view, (shown, painted) in enumerate(panels[:, image].reshape(2, 2)):
            shown.imshow(sample.view(image, view))
            painted.imshow(sample.painted(image, view, colours))
            number_regions(painted, sample.clusters(image, view).numpy(), numbers, size=7.5)
    for axes, label in zip(panels[:, 0], ("view 1", "clusters", "view 2", "clusters"), strict=True):
        axes.set_ylabel(label)
    return figure


def draw_matches(sample: ObjectSample) -> Figure:
    """Draw objects of some views and the nearest objects of other images (the paper's matching figures)."""
    queries = min(_QUERIES, len(sample.pairs) // 2)
    figure, panels = panel_grid(
        [(1, 1)] * max(queries, 1),
        ("view", "its objects", *[""] * _NEIGHBOURS),
        title="The largest objects of some views, and the nearest object of other images to each",
        text=0.25,
        handles=[
            line_handle(f"cycle-consistent: {CYCLE_CONSISTENT}", "0.3"),
            line_handle(f"not cycle-consistent: {_INCONSISTENT}", "0.3", dashed=True),
        ],
    )
    found = match_sample(sample, queries, objects=_NEIGHBOURS) if queries else ()
    for image, (painted, neighbours) in enumerate(found):
        view, objects, *others = panels[image]
        view.imshow(sample.view(image, 0))
        objects.imshow(painted)
        numbers = {neighbour.cluster: number for number, neighbour in enumerate(neighbours, start=1)}
        number_regions(objects, sample.clusters(image, 0).numpy(), numbers)
        for number, (axes, neighbour) in enumerate(zip(others, neighbours, strict=False), start=1):
            axes.imshow(neighbour.picture)
            axes.set_title(f"nearest to {number}", fontsize="medium")
            frame(axes, neighbour.colour, dashed=not neighbour.consistent)
    return figure
