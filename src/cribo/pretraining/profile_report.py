"""Write a profile as a table, a figure, and a JSON file."""

from dataclasses import asdict
from pathlib import Path

from matplotlib.figure import Figure
from rich.table import Table

from cribo.base.colours import LINE_COLOURS
from cribo.base.drawing import house_style, write_figure
from cribo.base.files import write_json
from cribo.pretraining.profiling import OF_OBJECTS, OTHER, TABLE, Profile, StepProfile, rows_of

PROFILE, FIGURE = "profile.json", "profile.png"

_GREYS = [row for row in (*TABLE, OTHER) if row not in OF_OBJECTS]
_COLOURS: dict[str, str] = dict(zip(OF_OBJECTS, LINE_COLOURS, strict=False))
_COLOURS |= dict(zip(_GREYS, ("0.55", "0.7", "0.85", "0.95"), strict=True))


def write_profile(profile: Profile, folder: Path, *, command: str) -> list[Path]:
    """Write `profile.json` and `profile.png` and return their paths."""
    write_json(folder / PROFILE, asdict(profile) | {"command": command})
    return [folder / PROFILE, write_figure(folder / FIGURE, profile_figure(profile))]


def profile_table(profile: Profile) -> Table:
    """Return the paper's table with the parts of each row, speed and memory; one column per number of objects."""
    steps = profile.steps
    table = Table("", *(_heading(step) for step in steps), title=_title(profile))
    for column in table.columns[1:]:
        column.justify = "right"
    for row, parts in rows_of(part for step in steps for part in step.parts).items():
        if any(step.rows.get(row) for step in steps):
            style = "cyan" if row in OF_OBJECTS else ""
            table.add_row(row, *(_share(step.rows.get(row, 0.0), step) for step in steps), style=f"bold {style}")
            for part in parts:
                if any(step.parts.get(part) for step in steps):
                    table.add_row(
                        f"  {part}", *(_share(step.parts.get(part, 0.0), step) for step in steps), style=style
                    )
    table.add_section()
    table.add_row("step (fastest to slowest)", *(_range(step) for step in steps), style="bold")
    if any(step.object_share for step in steps):
        objects = (_share(sum(step.rows[row] for row in OF_OBJECTS), step) for step in steps)
        table.add_row("objects only", *objects, style="bold cyan")
    table.add_row("images/s", *(f"{step.images_per_second:.4g}" for step in steps))
    loader = f"  loader only, {profile.machine['workers']} workers"
    table.add_row(loader, *(f"{profile.loader_images_per_second:.4g}" for _ in steps))
    if profile.bank_images:
        table.add_row("bootstrapping ratio (fixed)", *(f"{step.bootstrapping_ratio:.0%}" for step in steps))
    whole = "the process" if profile.machine["device"] == "CPU" else "the device's tensors"
    table.add_row(f"peak memory of {whole}", *(f"{step.peak / 2**20:,.0f} MiB" for step in steps))
    table.add_row("  weights, gradients, optimiser, bank", *(f"{step.held / 2**20:,.0f} MiB" for step in steps))
    return table


def profile_figure(profile: Profile) -> Figure:
    """Draw the rows of the paper's table as bars, one bar per number of objects."""
    steps = profile.steps
    with house_style():
        figure = Figure(figsize=(7.5, 1.1 + 0.55 * len(steps)), layout="constrained")
        axes, places = figure.subplots(), range(len(steps))
        left = [0.0 for _ in places]
        for row in dict.fromkeys(row for step in steps for row in step.rows):
            widths = [1000 * step.rows.get(row, 0.0) for step in steps]
            axes.barh(places, widths, left=left, color=_COLOURS[row], edgecolor="white", label=row)
            left = [begin + width for begin, width in zip(left, widths, strict=True)]
        axes.set_yticks(places, [_heading(step) for step in steps])
        axes.invert_yaxis()
        axes.set_xlabel("ms per step (grey: parts that need no objects)")
        figure.suptitle(_title(profile), fontsize=9)
        figure.legend(loc="outside right center", frameon=False, fontsize=9)
    return figure


def _title(profile: Profile) -> str:
    config = profile.config
    of_objects = f"K = {config.objects.num_objects}, S = {profile.bank_images:,}, " if profile.bank_images else ""
    return (
        f"A step of {config.objective.name} on {config.optim.batch_size} images: {config.backbone.name} at "
        f"{config.views.size}, {of_objects}{config.runtime.precision} on {profile.machine['device']}"
    )


def _heading(step: StepProfile) -> str:
    if step.fixed_objects is not None:
        return f"{step.fixed_objects} objects"
    return f"{step.objects_per_image:.1f} objects" if step.objects_per_image else "step"


def _share(seconds: float, step: StepProfile) -> str:
    return f"{_ms(seconds)} ms {seconds / sum(step.rows.values()):>6.1%}"


def _range(step: StepProfile) -> str:
    low, high = step.step_range
    return f"{_ms(step.step)} ms ({_ms(low)} to {_ms(high)})"


def _ms(seconds: float) -> str:
    """Format milliseconds with three digits, without an exponent."""
    milliseconds = 1000 * seconds
    return f"{milliseconds:,.{2 if milliseconds < 10 else 1 if milliseconds < 100 else 0}f}"
