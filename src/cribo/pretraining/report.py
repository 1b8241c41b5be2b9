"""The pictures of a run: curves, schedules, clusters on view pairs, matches across images."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cribo.data.pairs import ViewPairDataset
from cribo.drawing import frame, hide_ticks, house_style, paint_regions, region_colour, write_figure
from cribo.pretraining.config import PretrainConfig
from cribo.pretraining.files import REPORT
from cribo.pretraining.network import Network
from cribo.pretraining.sampling import ObjectSample, match_sample, paint_match, paint_query, sample_objects
from cribo.pretraining.schedules import Schedules

_CLUSTER_PAIRS = 6
_QUERIES, _NEIGHBOURS, _GALLERY = 4, 6, 256


def write_report(
    folder: Path,
    config: PretrainConfig,
    rows: Sequence[dict[str, float]],
    schedules: Schedules,
    teacher: Network,
    dataset: ViewPairDataset,
    *,
    baselines: dict[str, float],
) -> list[Path]:
    """Write the report of a run as PNG files into `report/`, and return them.

    Args:
        folder: the run folder.
        config: of the run.
        rows: of `metrics.csv`.
        schedules: of the run.
        teacher: the trained teacher, on the device to use.
        dataset: the view pairs that were trained on.
        baselines: mIoU by name, drawn beside the run's score.
    """
    (folder / REPORT).mkdir(exist_ok=True)
    pictures: dict[str, tuple[str | None, Callable[[], Figure]]] = {
        "losses": ("Losses", lambda: draw_losses(rows)),
        "schedules": (None, lambda: draw_schedules(schedules)),
    }
    if any("dense_nn" in row for row in rows):
        pictures["dense_nn"] = "Dense nearest-neighbour retrieval", lambda: draw_score(rows, baselines)
    if config.losses.cross_image:
        pictures["bootstrapping_ratio"] = "Bootstrapping ratio", lambda: draw_bootstrapping({"": rows})
    if config.needs_objects:
        sample = sample_objects(teacher.backbone, dataset, config, count=_GALLERY)
        pictures["clusters"] = None, lambda: draw_clusters(sample)
        pictures["matches"] = None, lambda: draw_matches(sample)
    written = []
    for name, (title, draw) in pictures.items():
        with house_style():
            figure = draw()
            if title is not None:
                figure.axes[0].set_title(title)
        written.append(write_figure(folder / REPORT / f"{name}.png", figure))
    return written


# ---------------------------------------------------------------------- curves


def draw_losses(rows: Sequence[dict[str, float]]) -> Figure:
    """The three losses over the epochs; a loss that is off is left out."""
    figure, axes = _figure(6.4, 3.8)
    for name, label, colour in (
        ("loss_image", r"image level $\mathcal{L}_{cv}^{g}$", "C0"),
        ("loss_cross_view", r"cross-view objects $\mathcal{L}_{cv}^{o}$", "C1"),
        ("loss_cross_image", r"cross-image objects $\mathcal{L}_{ci}^{o}$", "C2"),
    ):
        points = [(row["epoch"], row[name]) for row in rows if row.get(name)]
        if points:
            marker = "o" if len(points) == 1 else None
            axes.plot(*zip(*points, strict=True), label=label, color=colour, linewidth=1.2, marker=marker)
    axes.set(xlabel="epoch", ylabel="cross-entropy [nats]")
    _legend(axes)
    return figure


def draw_bootstrapping(runs: Mapping[str, Sequence[dict[str, float]]]) -> Figure:
    """Mean bootstrapping ratio of each epoch, a curve for each run: the share of objects with a valid match.

    The paper's figure.

    Args:
        runs: rows of the runs' `metrics.csv`, by what they are called; a single run is not named in the figure.
    """
    figure, axes = _figure(6.4, 3.8)
    for name, rows in runs.items():
        epochs: dict[int, list[float]] = {}
        for row in rows:
            if "bootstrapping_ratio" in row:
                # A row that closes an epoch has that epoch's whole number plus one.
                epochs.setdefault(max(0, int(np.ceil(row["epoch"])) - 1), []).append(row["bootstrapping_ratio"])
        numbers = sorted(epochs)
        marker = "o" if len(numbers) < 40 else None
        ratios = [100 * np.mean(epochs[n]) for n in numbers]
        axes.plot(numbers, ratios, marker=marker, markersize=3, label=name if len(runs) > 1 else None)
    axes.set(xlabel="epoch", ylabel="bootstrapping ratio [%]")
    _from_zero(axes)
    _legend(axes)
    return figure


def draw_score(rows: Sequence[dict[str, float]], baselines: dict[str, float]) -> Figure:
    """Dense retrieval over the epochs, beside the baselines."""
    figure, axes = _figure(6.4, 3.8)
    points = [(row["epoch"], 100 * row["dense_nn"]) for row in rows if "dense_nn" in row]
    axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label="teacher")
    for number, (name, value) in enumerate(baselines.items()):
        axes.axhline(100 * value, color=f"C{number + 1}", linestyle="--", linewidth=1, label=name)
    axes.set(xlabel="epoch", ylabel="mIoU [%]")
    _from_zero(axes)
    _legend(axes)
    return figure


def draw_schedules(schedules: Schedules) -> Figure:
    """Learning rate, weight decay, teacher momentum and teacher temperature over the epochs."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    steps = np.unique(np.linspace(0, schedules.total_steps - 1, 400).astype(int))
    values = [schedules.at(int(step)) for step in steps]
    panels = figure.subplots(2, 2, sharex=True)
    for axes, (name, label) in zip(
        panels.flat,
        (
            ("lr", "learning rate"),
            ("weight_decay", "weight decay"),
            ("momentum", "teacher momentum"),
            ("teacher_temperature", r"teacher temperature $\tau_t$"),
        ),
        strict=True,
    ):
        axes.plot(steps / schedules.steps_per_epoch, [getattr(value, name) for value in values])
        axes.set_title(label)
        axes.ticklabel_format(axis="y", useOffset=False)
    for axes in panels[1]:
        axes.set_xlabel("epoch")
    return figure


# -------------------------------------------------------------------- pictures


def draw_clusters(sample: ObjectSample) -> Figure:
    """View pairs beside their clusters; a colour is one cluster of the pair, grey is in one view only."""
    pairs = min(_CLUSTER_PAIRS, len(sample.pairs))
    figure = Figure(figsize=(1.9 * pairs, 7.4), layout="constrained")
    figure.suptitle("Joint-space clusters of view pairs; one colour is one object, grey is seen in one view only")
    panels = figure.subplots(4, pairs, squeeze=False)
    for image in range(pairs):
        kept = sample.objects.clusters[sample.objects.rows == image].tolist()
        colours = {cluster: region_colour(number, len(kept)) for number, cluster in enumerate(kept)}
        for view in (0, 1):
            picture = sample.view(image, view)
            panels[2 * view, image].imshow(picture)
            panels[2 * view + 1, image].imshow(paint_regions(picture, sample.label_map(image, view), colours, tint=0.5))
    for row, label in enumerate(("view 1", "its clusters", "view 2", "its clusters")):
        panels[row, 0].set_ylabel(label)
    hide_ticks(panels)
    return figure


def draw_matches(sample: ObjectSample) -> Figure:
    """Objects of some views and the nearest objects of other images (the paper's matching figures)."""
    queries = min(_QUERIES, len(sample.pairs) // 2)
    figure = Figure(figsize=(1.9 * (_NEIGHBOURS + 2), 2.1 * max(queries, 1)), layout="constrained")
    figure.suptitle("Objects of a view and, in the same colour, their nearest objects in other images")
    if queries == 0:
        return figure
    panels = figure.subplots(queries, _NEIGHBOURS + 2, squeeze=False)
    for image, matches in enumerate(match_sample(sample, queries, objects=_NEIGHBOURS)):
        panels[image, 0].imshow(sample.view(image, 0))
        panels[image, 1].imshow(paint_query(sample, image, matches))
        for axes, match in zip(panels[image, 2:], matches, strict=False):
            axes.imshow(paint_match(sample, match))
            if match.consistent:
                axes.set_xlabel("cycle-consistent", color="black", fontsize=8)
            frame(axes, match.colour)
    panels[0, 0].set_title("query")
    panels[0, 1].set_title("its largest objects")
    panels[0, 2].set_title("their neighbours", loc="left")
    hide_ticks(panels)
    return figure


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def _from_zero(axes: Axes) -> None:
    axes.set_ylim(0, max(1.0, 1.05 * axes.dataLim.y1))


def _legend(axes: Axes) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False)
