"""Figures in the report of a CrIBo run: bootstrapping ratio, clusters on view pairs, matches."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure

from cribo.data.samples import SampleDataset
from cribo.drawing import curves_figure, frame, from_zero, hide_ticks, legend
from cribo.objectives.sampling import ObjectSample, match_sample, sample_objects

if TYPE_CHECKING:
    from cribo.objectives.cribo import CrIBo

_CLUSTER_PAIRS = 6
_QUERIES, _NEIGHBOURS, _GALLERY = 4, 6, 256


def object_figures(objective: "CrIBo", rows: Sequence[dict[str, float]], dataset: SampleDataset) -> dict[str, Figure]:
    """Draw figures of the run's objects, by name; computed on the teacher's device."""
    figures: dict[str, Figure] = {}
    if any("bootstrapping_ratio" in row for row in rows):
        figures["bootstrapping_ratio"] = draw_bootstrapping({"": rows})
        figures["bootstrapping_ratio"].axes[0].set_title("Bootstrapping ratio")
    if objective.options.needs_objects:
        sample = sample_objects(objective.exported(), dataset.source, objective.options, count=_GALLERY)
        figures |= {"clusters": draw_clusters(sample), "matches": draw_matches(sample)}
    return figures


def draw_bootstrapping(runs: Mapping[str, Sequence[dict[str, float]]]) -> Figure:
    """Draw the mean bootstrapping ratio of each epoch, one curve per run.

    The ratio is the share of objects with a valid match. A figure of the paper.

    Args:
        runs: rows of each run's `metrics.csv`, by label; the label of a single run is not shown.
    """
    figure, axes = curves_figure()
    for name, rows in runs.items():
        epochs: dict[int, list[float]] = {}
        for row in rows:
            if "bootstrapping_ratio" in row:
                # The last row of epoch n (from 0) has the value n + 1.
                epochs.setdefault(max(0, int(np.ceil(row["epoch"])) - 1), []).append(row["bootstrapping_ratio"])
        numbers = sorted(epochs)
        marker = "o" if len(numbers) < 40 else None
        ratios = [100 * np.mean(epochs[n]) for n in numbers]
        axes.plot(numbers, ratios, marker=marker, markersize=3, label=name if len(runs) > 1 else None)
    axes.set(xlabel="epoch", ylabel="bootstrapping ratio [%]")
    from_zero(axes)
    legend(axes)
    return figure


def draw_clusters(sample: ObjectSample) -> Figure:
    """Draw view pairs and their clusters: one colour per cluster of a pair, grey for clusters in one view only."""
    pairs = min(_CLUSTER_PAIRS, len(sample.pairs))
    figure = Figure(figsize=(1.9 * pairs, 7.4), layout="constrained")
    figure.suptitle("Joint-space clusters of view pairs (one colour per object; grey: in one view only)")
    panels = figure.subplots(4, pairs, squeeze=False)
    for image in range(pairs):
        colours = sample.object_colours(image)
        for view in (0, 1):
            panels[2 * view, image].imshow(sample.view(image, view))
            panels[2 * view + 1, image].imshow(sample.painted(image, view, colours))
    for row, label in enumerate(("view 1", "clusters", "view 2", "clusters")):
        panels[row, 0].set_ylabel(label)
    hide_ticks(panels)
    return figure


def draw_matches(sample: ObjectSample) -> Figure:
    """Draw objects of some views and the nearest objects of other images (the paper's matching figures)."""
    queries = min(_QUERIES, len(sample.pairs) // 2)
    figure = Figure(figsize=(1.9 * (_NEIGHBOURS + 2), 2.1 * max(queries, 1)), layout="constrained")
    figure.suptitle("Objects of a view and their nearest objects in other images, in the same colour")
    if queries == 0:
        return figure
    panels = figure.subplots(queries, _NEIGHBOURS + 2, squeeze=False)
    for image, (painted, neighbours) in enumerate(match_sample(sample, queries, objects=_NEIGHBOURS)):
        panels[image, 0].imshow(sample.view(image, 0))
        panels[image, 1].imshow(painted)
        for axes, neighbour in zip(panels[image, 2:], neighbours, strict=False):
            axes.imshow(neighbour.picture)
            if neighbour.consistent:
                axes.set_xlabel("cycle-consistent", color="black", fontsize=8)
            frame(axes, neighbour.colour)
    panels[0, 0].set_title("query")
    panels[0, 1].set_title("largest objects")
    panels[0, 2].set_title("nearest objects", loc="left")
    hide_ticks(panels)
    return figure
