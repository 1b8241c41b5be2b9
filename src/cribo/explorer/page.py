"""The page's layout: fields, buttons, and which function fills what. What is shown is made elsewhere."""

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import gradio as gr
import pandas as pd

from cribo.errors import Stopped
from cribo.explorer import features, training
from cribo.explorer.contents import Contents
from cribo.explorer.pictures import as_shown
from cribo.explorer.uploads import Refused, Uploads

log = logging.getLogger("cribo")

T = TypeVar("T")

_REFRESH_SECONDS = 10
_FONTS = ["system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif"]
_MONOSPACE = ["ui-monospace", "Consolas", "monospace"]
_STYLE = """
:focus-visible { outline: 3px solid #d6336c !important; outline-offset: 2px; }
.gradio-container { max-width: 1280px !important; margin: 0 auto !important; }
.gradio-container main.app { padding: 12px; }
@media (max-width: 640px) { .gradio-container main.app { padding: 6px; } }
"""


def look() -> dict[str, Any]:
    """Theme and style of the page: fonts are the system's own, nothing is fetched."""
    theme = gr.themes.Default(primary_hue="indigo", font=_FONTS, font_mono=_MONOSPACE)
    return {"theme": theme, "css": _STYLE}


def build_page(contents: Contents, uploads: Uploads) -> gr.Blocks:
    """The page with a tab for each thing that there is to show."""
    with gr.Blocks(title=f"{contents.title} - cribo", analytics_enabled=False, delete_cache=(300, 3600)) as page:
        gr.Markdown(f"# {contents.title}")
        if contents.missing:
            gr.Markdown(contents.missing)
        with gr.Tabs():
            if contents.run is not None:
                with gr.Tab("Training"):
                    _training(contents)
            if contents.encoder is not None:
                with gr.Tab("Features"):
                    _features(contents, uploads)
    return page


def sentence(function: Callable[..., T]) -> Callable[..., T]:
    """A function of the page whose errors appear on the page as a sentence."""

    @wraps(function)
    def asked(*arguments: Any, **named: Any) -> T:
        try:
            return function(*arguments, **named)
        except (Refused, ValueError, OSError, Stopped) as error:
            raise gr.Error(str(error), print_exception=False) from error
        except gr.Error:
            raise
        except Exception as error:
            log.exception("an error on the page")
            told = f"This went wrong here ({type(error).__name__}), and is written down where the page was started."
            raise gr.Error(told, print_exception=False) from error

    return asked


# -------------------------------------------------------------------- training


def _training(contents: Contents) -> None:
    assert contents.run is not None
    folder = contents.run

    def frame(points: list[training.Point]) -> pd.DataFrame:
        return pd.DataFrame([(point.epoch, point.value, point.name) for point in points], columns=_POINT_COLUMNS)

    @sentence
    def read(column: str | None) -> tuple[Any, ...]:
        state = training.read_run(folder)
        curves = [frame(state.curve(names)) for names in training.CURVES.values()]
        columns = state.columns
        chosen = column if column in columns else next(iter(columns), None)
        further = frame(state.curve({chosen: chosen})) if chosen else frame([])
        timer = gr.Timer(active=not state.is_finished)
        return (*curves, gr.Dropdown(choices=columns, value=chosen), further, training.summary_table(state), timer)

    *first, choice, values, said, _ = read(None)
    with gr.Row(equal_height=False):
        with gr.Column(scale=2, min_width=280):
            losses = gr.LinePlot(first[0], label="Losses [nats]", height=300, color="curve", color_title=" ", **_AXES)
            ratio = gr.LinePlot(first[1], label="Bootstrapping ratio: objects with a valid match [%]", **_AXES)
            score = gr.LinePlot(first[2], label="Dense retrieval: mIoU of the teacher [%]", **_AXES)
        with gr.Column(scale=1, min_width=280):
            table = gr.Markdown(said)
            refresh = gr.Button("Read the run again", variant="primary")
            column = gr.Dropdown(choice.choices, value=choice.value, label="Another column of metrics.csv")
            further = gr.LinePlot(values, label="That column", **_AXES)
    plots = [losses, ratio, score]
    timer = gr.Timer(_REFRESH_SECONDS, active=not training.read_run(folder).is_finished)
    shown = [*plots, column, further, table, timer]
    refresh.click(read, column, shown, api_name="training")
    timer.tick(read, column, shown, show_progress="hidden", api_visibility="private")
    column.input(read, column, shown, show_progress="hidden", api_visibility="private")


_POINT_COLUMNS = ["epoch", "value", "curve"]
_AXES: dict[str, Any] = {"x": "epoch", "y": "value", "y_title": " ", "tooltip": "all", "buttons": []}


# -------------------------------------------------------------------- features


def _features(contents: Contents, uploads: Uploads) -> None:
    encoder = contents.encoder
    assert encoder is not None

    def alike(sent: Any, row: float | None, column: float | None) -> tuple[Any, ...]:
        image = uploads.read(sent)
        found = features.likeness(image, encoder.encode(image), int(row or 0), int(column or 0))
        return found.row, found.column, found.picture, found.sentence

    @sentence
    def dropped(sent: Any) -> tuple[Any, ...]:
        if sent is None:
            return None, 0, 0, None, _DROP_ADVICE
        image = uploads.read(sent)
        dense = encoder.encode(image)
        rows, columns = dense.grid
        return features.colour_picture(dense), *alike(sent, rows // 2, columns // 2)

    @sentence
    def clicked(sent: Any, event: gr.SelectData) -> tuple[Any, ...]:
        image = uploads.read(sent)
        row, column = encoder.encode(image).patch_at(*_point(event))
        return alike(sent, row, column)

    def stepped(down: int, right: int) -> Callable[..., tuple[Any, ...]]:
        @sentence
        def step(sent: Any, row: float | None, column: float | None) -> tuple[Any, ...]:
            return alike(sent, (row or 0) + down, (column or 0) + right)

        return step

    with gr.Row(equal_height=False):
        with gr.Column(min_width=280):
            picture = gr.Image(
                label=f"Your picture ({uploads.limits}); click on a patch",
                sources=["upload", "clipboard"],
                height=380,
                buttons=["fullscreen"],
                alt_text="The picture that you have dropped here",
            )
        with gr.Column(min_width=280):
            colours = _picture("Its features: three principal components as colours", "Principal components as colours")
    with gr.Row(equal_height=False):
        with gr.Column(min_width=280):
            said = gr.Markdown(_DROP_ADVICE)
            with gr.Row():
                row = gr.Number(0, label="Row of the patch", precision=0, minimum=0, min_width=120)
                column = gr.Number(0, label="Column of the patch", precision=0, minimum=0, min_width=120)
            with gr.Row():
                arrows = [gr.Button(name, min_width=60, size="sm") for name in ("← left", "↑ up", "↓ down", "right →")]
        with gr.Column(min_width=280):
            heat = _picture("How alike all patches are to the chosen one", "Heat map of similarity to the chosen patch")
    place = [row, column, heat, said]
    raw: dict[str, Any] = {"preprocess": False, "concurrency_id": "network", "concurrency_limit": 4}
    picture.change(dropped, picture, [colours, *place], api_name="features", **raw)
    picture.select(clicked, picture, place, api_visibility="private", show_progress="hidden", **raw)
    for field in (row, column):
        field.submit(sentence(alike), [picture, row, column], place, api_name=None, show_progress="hidden", **raw)
        field.blur(sentence(alike), [picture, row, column], place, api_visibility="private", show_progress="hidden", **raw)
    for arrow, (down, right) in zip(arrows, ((0, -1), (-1, 0), (1, 0), (0, 1)), strict=True):
        arrow.click(
            stepped(down, right), [picture, row, column], place, api_visibility="private", show_progress="hidden", **raw
        )


_DROP_ADVICE = "Drop a picture on the field, or choose a file. Nothing is kept: it goes when the server ends."


def _picture(label: str, alt: str) -> gr.Image:
    return gr.Image(label=label, interactive=False, format="png", height=380, buttons=["fullscreen"], alt_text=alt)


def _point(event: gr.SelectData) -> tuple[float, float]:
    """(x, y) in pixels of the picture that was clicked."""
    place = event.index
    if not isinstance(place, list | tuple) or len(place) != 2:
        raise Refused("This click has no place in the picture: click again.")
    return float(place[0]), float(place[1])
