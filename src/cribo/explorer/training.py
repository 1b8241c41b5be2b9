"""Curves and summary of a run, read from the run folder at each update."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from cribo.console import duration
from cribo.errors import InputError
from cribo.pretraining.files import CONFIG, METRICS, SUMMARY

_SCORE = {"dense_nn": "mIoU"}
_PERCENT = ("bootstrapping_ratio", "dense_nn")
_POINTS = 500  # per curve, about the resolution of a screen


@dataclass(frozen=True)
class Point:
    """One point of a curve."""

    epoch: float
    value: float
    name: str


@dataclass(frozen=True)
class RunState:
    """Current state of a run.

    Attributes:
        rows: rows of `metrics.csv`.
        summary: contents of `summary.json`; None until the run is finished.
        epochs: planned number of epochs; None if the configuration cannot be read.
    """

    rows: Sequence[dict[str, float]]
    summary: dict[str, Any] | None
    epochs: int | None

    @property
    def is_finished(self) -> bool:
        """Whether the run has written its summary."""
        return self.summary is not None

    @property
    def curves(self) -> dict[str, dict[str, str]]:
        """The curves that are always shown: maps titles to columns of the metrics and their display names."""
        losses = {name: name.removeprefix("loss_").replace("_", " ") for name in self._names if name[:5] == "loss_"}
        return {"Losses": losses, "Dense retrieval: mIoU [%]": _SCORE}

    @property
    def columns(self) -> list[str]:
        """The columns not contained in `curves`, `bootstrapping_ratio` first."""
        shown = {"step", "epoch", "seconds", *(column for names in self.curves.values() for column in names)}
        return sorted(set(self._names) - shown, key=lambda name: (name != "bootstrapping_ratio", name))

    @cached_property
    def _names(self) -> list[str]:
        return list(dict.fromkeys(name for row in self.rows for name in row))

    def curve(self, names: dict[str, str]) -> list[Point]:
        """Return points of columns of the metrics over epochs, subsampled; ratios are in percent.

        Args:
            names: display name of each column.
        """
        points = []
        for column, name in names.items():
            scale = 100.0 if column in _PERCENT else 1.0
            found = [(row["epoch"], scale * row[column]) for row in self.rows if column in row]
            if column.startswith("loss_"):  # 0 until the loss is enabled
                found = [point for point in found if point[1]]
            every = max(1, -(-len(found) // _POINTS))
            kept = found[::every] if not found or found[-1] in found[::every] else [*found[::every], found[-1]]
            points += [Point(epoch, value, name) for epoch, value in kept]
        return points


def read_run(folder: Path) -> RunState:
    """Read the current state of a run.

    Raises:
        ValueError: the folder does not contain a run.
    """
    from cribo.pretraining.monitoring import read_metrics
    from cribo.pretraining.presets import load_config

    require_run(folder)
    rows = read_metrics(folder / METRICS) if (folder / METRICS).is_file() else []
    summary = None
    if (folder / SUMMARY).is_file():
        summary = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
    try:
        epochs = load_config(folder / CONFIG).optim.epochs
    except ValueError:  # for example of another version; the curves can still be shown
        epochs = None
    return RunState(rows, summary, epochs)


def require_run(folder: Path) -> None:
    """Check that a folder contains a run.

    Raises:
        ValueError: the folder does not exist, or has no configuration.
    """
    from cribo.data.images import require

    require(folder)
    if not (folder / CONFIG).is_file():
        raise InputError(f"{folder} is not a run (no {CONFIG}): use the folder printed by `cribo pretrain`")


def summary_table(state: RunState) -> str:
    """Format the summary of a run as a Markdown table."""
    head, *lines = (f"| {name} | {value} |" for name, value in _summary(state))
    return "\n".join([head, "|:--|--:|", *lines])


def _summary(state: RunState) -> list[tuple[str, str]]:
    if not state.rows:
        return [("state", "started, no measurements yet")]
    last = state.rows[-1]
    trained = next((row for row in reversed(state.rows) if "loss" in row), {})
    of = f" of {state.epochs}" if state.epochs else ""
    entries = [
        ("state", "finished" if state.is_finished else "in progress or stopped"),
        ("steps", f"{last['step']:.0f}"),
        ("epochs", f"{last['epoch']:.1f}{of}"),
        ("time", duration(last["seconds"])),
    ]
    if "images_per_second" in trained:
        entries.append(("images/s", f"{trained['images_per_second']:.0f}"))
    if "loss" in trained:
        entries.append(("loss", f"{trained['loss']:.3g}"))
    if (state.summary or {}).get("shown"):
        entries.append(("at the end", str((state.summary or {})["shown"]).replace("|", "/")))
    scores = [row["dense_nn"] for row in state.rows if "dense_nn" in row]
    if scores:
        entries.append(("dense retrieval at start, now", f"{100 * scores[0]:.1f} %, {100 * scores[-1]:.1f} % mIoU"))
    for warning in (state.summary or {}).get("warnings", [])[:5]:
        entries.append((f"warning at step {warning['step']}", str(warning["text"]).replace("|", "/")))
    return entries
