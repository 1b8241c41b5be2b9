"""Figures of a run: losses, schedules, score, and the objective's own figures."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from cribo.base.drawing import curves_figure, from_zero, house_style, legend, plot_curve, write_figure
from cribo.data.samples import SampleDataset
from cribo.objectives import Columns, Objective
from cribo.pretraining.files import REPORT
from cribo.pretraining.schedules import Schedules


def write_report(
    folder: Path,
    rows: Sequence[dict[str, float]],
    schedules: Schedules,
    objective: Objective,
    dataset: SampleDataset,
    *,
    baselines: dict[str, float],
    scored: str = "",
) -> list[Path]:
    """Write the report of a run as PNG files into `report/`, and return their paths.

    Args:
        folder: the run folder.
        rows: rows of `metrics.csv`.
        schedules: schedules of the run.
        objective: the trained objective, on the device to use.
        dataset: the training samples.
        baselines: mIoU of baselines, by name.
        scored: name of the labelled images of the score.
    """
    (folder / REPORT).mkdir(exist_ok=True)
    pictures: dict[str, tuple[str | None, Callable[[], Figure]]] = {
        "losses": ("Losses", lambda: draw_losses(rows, objective.columns)),
        "schedules": (None, lambda: draw_schedules(schedules)),
    }
    if any("dense_nn" in row for row in rows):
        pictures["dense_nn"] = f"Dense retrieval on {scored}", lambda: draw_score(rows, baselines)
    written = []
    with house_style():
        for name, (title, draw) in pictures.items():
            figure = draw()
            if title is not None:
                figure.axes[0].set_title(title)
            written.append(write_figure(folder / REPORT / f"{name}.png", figure))
        for name, figure in objective.figures(rows, dataset).items():
            written.append(write_figure(folder / REPORT / f"{name}.png", figure))
    return written


def draw_losses(rows: Sequence[dict[str, float]], columns: Columns | None = None) -> Figure:
    """Draw the losses over the epochs, without those that are off."""
    columns = columns or Columns()
    figure, axes = curves_figure()
    names = dict.fromkeys(name for row in rows for name in row if name.startswith("loss_"))
    for place, name in enumerate(names):
        points = [(row["epoch"], row[name]) for row in rows if row.get(name)]
        if points:
            own = name.removeprefix("loss_")
            plot_curve(axes, points, label=columns.labels.get(own, own), color=f"C{place}", linewidth=1.2)
    axes.set(xlabel="epoch", ylabel="loss")
    legend(axes)
    return figure


def draw_score(rows: Sequence[dict[str, float]], baselines: dict[str, float]) -> Figure:
    """Draw dense retrieval over the epochs, with the baselines."""
    figure, axes = curves_figure()
    points = [(row["epoch"], 100 * row["dense_nn"]) for row in rows if "dense_nn" in row]
    plot_curve(axes, points, label="trained")
    for number, (name, value) in enumerate(baselines.items()):
        axes.axhline(100 * value, color=f"C{number + 1}", linestyle="--", linewidth=1, label=name)
    axes.set(xlabel="epoch", ylabel="mIoU [%]")
    from_zero(axes)
    legend(axes)
    return figure


def draw_schedules(schedules: Schedules) -> Figure:
    """Draw learning rate, weight decay and the objective's own schedules over the epochs."""
    steps = np.unique(np.linspace(0, schedules.total_steps - 1, 400).astype(int))
    values = [schedules.at(int(step)) for step in steps]
    epochs = steps / schedules.steps_per_epoch
    return draw_curves({name: [(e, v[name]) for e, v in zip(epochs, values, strict=True)] for name in values[0]})


def draw_curves(curves: Mapping[str, Sequence[tuple[float, float]]]) -> Figure:
    """Draw one panel per curve of (epoch, value)."""
    rows = -(-len(curves) // 2)
    figure = Figure(figsize=(8, 2.5 * rows), layout="constrained")
    panels = figure.subplots(rows, 2, sharex=True, squeeze=False)
    for axes, (name, points) in zip(panels.flat, curves.items(), strict=False):
        plot_curve(axes, points)
        axes.set_title({"lr": "learning rate"}.get(name, name.replace("_", " ")))
        axes.ticklabel_format(axis="y", useOffset=False)
    for axes in panels.flat[len(curves) :]:
        axes.set_axis_off()
    for axes in panels[-1]:
        axes.set_xlabel("epoch")
    return figure
