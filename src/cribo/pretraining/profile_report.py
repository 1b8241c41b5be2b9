"""A profile as people read it: tables, a figure, and a file of numbers."""

from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import matplotlib as mpl
from matplotlib.figure import Figure
from rich.table import Table

from cribo.drawing import house_style, write_figure
from cribo.files import write_json
from cribo.pretraining.profiling import PARTS, Profile, Row, Spread, StepProfile

PROFILE, FIGURE = "profile.json", "profile.png"

# The paper's notation; f are backbones, h heads, C the clustering, M the banks.
_OPERATIONS: dict[Row, str] = {
    "Input": "loader, photometric work",
    "Forward pass": "f_t + f_s + image level",
    "Clustering": "C, pooling",
    "NN retrieval": "nn + cycle + update(M)",
    "Object projections": "h_t + h_s on objects",
    "Object losses": "logits, losses, gradients",
    "Update": "backprop. + optimiser + EMA",
}


def profile_tables(profile: Profile) -> list[Table]:
    """The paper's table, all parts, and memory, with a column for each number of objects."""
    return [_paper_table(profile), _parts_table(profile), _memory_table(profile)]


def write_profile(profile: Profile, folder: Path, *, command: str) -> list[Path]:
    """Write `profile.json` and `profile.png` and return their paths."""
    write_json(folder / PROFILE, profile_json(profile) | {"command": command})
    return [folder / PROFILE, write_figure(folder / FIGURE, profile_figure(profile))]


def profile_json(profile: Profile) -> dict[str, Any]:
    """The profile and what follows from it, as plain numbers."""
    return {
        **asdict(profile),
        "steps": [
            asdict(step)
            | {
                "object_share": step.object_share,
                "object_floor_seconds": profile.object_floor(step),
                "utilisation": profile.utilisation(step),
                "images_per_second": profile.batch_size / step.step.median,
            }
            for step in profile.steps
        ],
    }


def profile_figure(profile: Profile) -> Figure:
    """Bars of the rows of the paper's table, one bar for each number of objects."""
    with house_style():
        figure = Figure(figsize=(7.5, 1.1 + 0.55 * len(profile.steps)), layout="constrained")
        axes = figure.subplots()
        colours = mpl.colormaps["tab20"]
        for place, step in enumerate(profile.steps):
            left = 0.0
            for number, row in enumerate(get_args(Row)):
                seconds = step.row(row)
                of_objects = any(part.row == row and part.of_objects for part in PARTS.values())
                axes.barh(
                    place,
                    1000 * seconds,
                    left=1000 * left,
                    color=colours(2 * number + (0 if of_objects else 1)),
                    edgecolor="white",
                    label=row if place == 0 else None,
                )
                left += seconds
        axes.set_yticks(range(len(profile.steps)), [_heading(step) for step in profile.steps])
        axes.invert_yaxis()
        axes.set_xlabel("ms per step; strong colours: for the objects alone")
        about = profile.about
        figure.suptitle(
            f"{about['backbone']}, {profile.batch_size} images of {about['image size']} px, {about['precision']}, "
            f"{about['device']}",
            fontsize=9,
        )
        figure.legend(loc="outside right center", frameon=False, fontsize=8)
    return figure


def _heading(step: StepProfile) -> str:
    return f"{step.objects_per_image:.1f} objects" if step.fixed_objects is None else f"{step.fixed_objects} objects"


def _table(profile: Profile, title: str, *columns: str) -> Table:
    table = Table(title=title)
    for column in columns:
        table.add_column(column)
    for step in profile.steps:
        table.add_column(_heading(step), justify="right")
    return table


def _paper_table(profile: Profile) -> Table:
    about = profile.about
    table = _table(
        profile,
        f"A step of {profile.batch_size} images: {about['backbone']} at {about['image size']}, K = {about['K']}, "
        f"S = {about['S']:,}, {about['precision']} on {about['device']}",
        "",
        "operation",
    )
    for row in get_args(Row):
        if any(step.row(row) for step in profile.steps):
            of_objects = any(part.row == row and part.of_objects for part in PARTS.values())
            cells = [_milliseconds(step.row(row), step) for step in profile.steps]
            table.add_row(row, _OPERATIONS[row], *cells, style="cyan" if of_objects else None)
    table.add_section()

    def add(name: str, meaning: str, *cells: str, style: str | None = None) -> None:
        table.add_row(name, meaning, *cells, style=style)

    steps = profile.steps
    add("step, ms", "median (least to most)", *(_spread(step.step) for step in steps), style="bold")
    add(
        "for the objects alone",
        "clustering to object losses",
        *(_milliseconds(step.object_seconds, step) for step in steps),
        style="bold cyan",
    )
    add(
        "  their products at the ceiling",
        f"{profile.ceiling / 1e12:.3g} TFLOP/s measured",
        *(_milliseconds(profile.object_floor(step), step) for step in steps),
    )
    add("model FLOPs utilisation", "backbones over the step", *(f"{profile.utilisation(step):.1%}" for step in steps))
    add("images/s", "", *(f"{profile.batch_size / step.step.median:.4g}" for step in steps))
    add(
        "  the loader alone",
        f"{about['workers']} workers",
        *(f"{profile.loader_images_per_second:.4g}" for _ in steps),
    )
    add("bootstrapping ratio", "as given", *(f"{step.bootstrapping_ratio:.0%}" for step in steps))
    return table


def _parts_table(profile: Profile) -> Table:
    table = _table(profile, "Parts of the step, ms (least to most)", "part")
    for name, part in PARTS.items():
        if any(name in step.parts for step in profile.steps):
            cells = []
            for step in profile.steps:
                spread = step.parts.get(name)
                cells.append(_spread(spread) if spread else "")
            table.add_row(name, *cells, style="cyan" if part.of_objects else None)
    return table


def _memory_table(profile: Profile) -> Table:
    whole = "of the device's tensors" if profile.about["device"] != "CPU" else "of the process, programs included"
    table = _table(profile, "Memory, MiB", "what")
    for name in dict.fromkeys(name for step in profile.steps for name in step.memory):
        table.add_row(name, *(f"{step.memory.get(name, 0) / 2**20:,.0f}" for step in profile.steps))
    table.add_section()
    table.add_row(f"peak {whole}", *(f"{step.peak / 2**20:,.0f}" for step in profile.steps), style="bold")
    return table


def _milliseconds(seconds: float, step: StepProfile) -> str:
    whole = sum(spread.median for spread in step.parts.values())
    return f"{_ms(seconds)} ms {seconds / whole:>6.1%}"


def _spread(seconds: Spread) -> str:
    return f"{_ms(seconds.median)} ({_ms(seconds.low)} to {_ms(seconds.high)})"


def _ms(seconds: float) -> str:
    """Milliseconds in three digits, and never with an exponent."""
    milliseconds = 1000 * seconds
    return f"{milliseconds:,.{2 if milliseconds < 10 else 1 if milliseconds < 100 else 0}f}"
