"""The tab with curves and summary of a run, updated while the run is in progress."""

from pathlib import Path
from typing import Any

import gradio as gr
import pandas as pd

from cribo.explorer.tabs.fields import show_errors
from cribo.explorer.training import Point, RunState, read_run, summary_table

_REFRESH_SECONDS = 10
_AXES: dict[str, Any] = {"x": "epoch", "y": "value", "y_title": " ", "tooltip": "all", "buttons": []}


def training_tab(run: Path) -> None:
    """Add curves, a summary table, and a selectable further curve."""

    @show_errors
    def read(column: str | None) -> tuple[Any, ...]:
        state = read_run(run)
        chosen = column if column in state.columns else next(iter(state.columns), None)
        column_of = gr.Dropdown(choices=state.columns, value=chosen)
        return *_frames(state, chosen), column_of, summary_table(state), gr.Timer(active=not state.is_finished)

    state = read_run(run)
    chosen = next(iter(state.columns), None)
    losses, score, column = _frames(state, chosen)
    with gr.Row(equal_height=False):
        with gr.Column(scale=2, min_width=280):
            curves = [
                gr.LinePlot(losses, label="Losses", color="curve", color_title=" ", **_AXES),
                gr.LinePlot(score, label="Dense retrieval: mIoU [%]", **_AXES),
            ]
        with gr.Column(scale=1, min_width=280):
            table = gr.Markdown(summary_table(state))
            again = gr.Button("Refresh", variant="primary")
            choice = gr.Dropdown(state.columns, value=chosen, label="Further column of metrics.csv")
            further = gr.LinePlot(column, label="Further column", **_AXES)
    timer = gr.Timer(_REFRESH_SECONDS, active=not state.is_finished)
    shown = [*curves, further, choice, table, timer]
    again.click(read, choice, shown, api_name="training")
    timer.tick(read, choice, shown, show_progress="hidden", api_visibility="private")
    choice.input(read, choice, shown, show_progress="hidden", api_visibility="private")


def _frames(state: RunState, column: str | None) -> list[pd.DataFrame]:
    """Return the points of the curves that are always shown, and of a further column."""
    further = {} if column is None else {column: column}
    return [_frame(state.curve(names)) for names in (*state.curves.values(), further)]


def _frame(points: list[Point]) -> pd.DataFrame:
    rows = [(point.epoch, point.value, point.name) for point in points]
    return pd.DataFrame(rows, columns=pd.Index(["epoch", "value", "curve"]))
