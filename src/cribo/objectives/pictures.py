"""Figures in the report of a CrIBo run: bootstrapping ratio, clusters on view pairs, matches."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from cribo.data.samples import SampleDataset
from cribo.drawing import (
    DASHES,
    PAGE_WIDTH,
    curves_figure,
    frame,
    from_zero,
    hide_ticks,
    legend,
    number_regions,
    plot_curve,
)
from cribo.objectives.sampling import ObjectSample, match_sample, sample_objects

if TYPE_CHECKING:
    from cribo.objectives.cribo import CrIBo

_CLUSTER_PAIRS = 6
_FEW_EPOCHS = 5
_QUERIES, _NEIGHBOURS, _GALLERY = 4, 5, 256

CYCLE_CONSISTENT = "a search back, from the second view of the found object, finds the same object"
"""What it means that a match is cycle-consistent, in plain words."""


def object_figures(objective: "CrIBo", rows: Sequence[dict[str, float]], dataset: SampleDataset) -> dict[str, Figure]:
    """Draw figures of the run's objects, by name; computed on the teacher's device."""
    figures: dict[str, Figure] = {}
    if sum("bootstrapping_ratio" in row for row in rows) > 1:
        figures["bootstrapping_ratio"] = draw_bootstrapping({"": rows})
        figures["bootstrapping_ratio"].axes[0].set_title("Share of objects with a cycle-consistent match")
    if objective.options.needs_objects:
        sample = sample_objects(objective.exported(), dataset.source, objective.options, count=_GALLERY)
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
    cell = PAGE_WIDTH / _CLUSTER_PAIRS
    figure = Figure(figsize=(max(pairs, 3) * cell + 0.3, 4 * cell + 0.8), layout="constrained")
    figure.suptitle("Clusters of pairs of views")
    figure.supxlabel("One number and one colour per object. Grey: clusters in one view only", fontsize=9)
    panels = figure.subplots(4, pairs, squeeze=False)
    for image in range(pairs):
        colours = sample.object_colours(image)
        numbers = {cluster: number for number, cluster in enumerate(colours, start=1)}
        for view in (0, 1):
            panels[2 * view, image].imshow(sample.view(image, view))
            painted = panels[2 * view + 1, image]
            painted.imshow(sample.painted(image, view, colours))
            number_regions(painted, sample.clusters(image, view).numpy(), numbers, size=7.5)
    for row, label in enumerate(("view 1", "clusters", "view 2", "clusters")):
        panels[row, 0].set_ylabel(label)
    hide_ticks(panels)
    return figure


def draw_matches(sample: ObjectSample) -> Figure:
    """Draw objects of some views and the nearest objects of other images (the paper's matching figures)."""
    queries = min(_QUERIES, len(sample.pairs) // 2)
    cell = PAGE_WIDTH / (_NEIGHBOURS + 2)
    figure = Figure(figsize=(PAGE_WIDTH, (cell + 0.25) * max(queries, 1) + 1.0), layout="constrained")
    figure.suptitle("The largest objects of some views, and the nearest object of other images to each")
    if queries == 0:
        return figure
    panels = figure.subplots(queries, _NEIGHBOURS + 2, squeeze=False)
    for image, (painted, neighbours) in enumerate(match_sample(sample, queries, objects=_NEIGHBOURS)):
        panels[image, 0].imshow(sample.view(image, 0))
        panels[image, 1].imshow(painted)
        numbers = {neighbour.cluster: number for number, neighbour in enumerate(neighbours, start=1)}
        number_regions(panels[image, 1], sample.clusters(image, 0).numpy(), numbers)
        for axes, neighbour in zip(panels[image, 2:], neighbours, strict=False):
            axes.imshow(neighbour.picture)
            axes.set_title(f"nearest to {numbers[neighbour.cluster]}", fontsize=9, pad=3)
            frame(axes, neighbour.colour, dashed=not neighbour.consistent)
    panels[0, 0].set_title("view", fontsize=9, pad=3)
    panels[0, 1].set_title("its objects", fontsize=9, pad=3)
    hide_ticks(panels)
    figure.legend(
        handles=[
            Line2D([], [], color="0.3", linewidth=2, label=f"cycle-consistent: {CYCLE_CONSISTENT}"),
            Line2D(
                [],
                [],
                color="0.3",
                linewidth=2,
                linestyle=DASHES,
                label="not cycle-consistent: it finds another; such pairs are not used in training",
            ),
        ],
        loc="outside lower left",
        frameon=False,
        fontsize=9,
    )
    return figure
