"""Functions shared by the tabs: picture fields, click positions and error messages."""

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import gradio as gr

from cribo.explorer.text import as_text
from cribo.explorer.uploads import Refused

log = logging.getLogger("cribo")

T = TypeVar("T")

HEIGHT = 400
"""Height of the fields for uploaded pictures, in pixels."""

REQUEST: dict[str, Any] = {
    # Disable Gradio's preprocessing, which decodes pictures of any size.
    "preprocess": False,
    "concurrency_id": "network",
    "concurrency_limit": 4,
    "show_progress": "minimal",
}
"""Arguments of events that read user input."""

HIDDEN: dict[str, Any] = {**REQUEST, "api_visibility": "private"}
"""`REQUEST` for events without an API name."""


def show_errors(function: Callable[..., T]) -> Callable[..., T]:
    """Decorate a function of the page so that its errors are shown as messages, which Gradio renders as HTML."""

    @wraps(function)
    def wrapper(*arguments: Any, **named: Any) -> T:
        try:
            return function(*arguments, **named)
        except gr.Error:
            raise
        except Refused as error:
            raise gr.Error(as_text(error), title="Not possible", print_exception=False) from error
        except Exception as error:  # log it, since its message may contain paths of this machine
            log.exception("an error on the page")
            raise gr.Error("Something went wrong; see the log of `cribo explore`.", print_exception=False) from error

    return wrapper


def sent_picture(caption: str, alt: str) -> gr.Image:
    """Create a field for an uploaded picture."""
    gr.Markdown(caption, elem_classes="caption")
    return gr.Image(
        label=caption,
        show_label=False,
        sources=["upload", "clipboard"],
        height=HEIGHT,
        format="png",
        buttons=["fullscreen"],
        alt_text=alt,
    )


def shown_picture(caption: str, alt: str, *, elem_id: str | None = None) -> gr.Image:
    """Create a field that shows a picture."""
    gr.Markdown(caption, elem_classes="caption")
    return gr.Image(
        label=caption,
        show_label=False,
        interactive=False,
        format="png",
        buttons=["fullscreen"],
        alt_text=alt,
        elem_id=elem_id,
        elem_classes="shown",
    )


def found_objects(elem_id: str) -> gr.Gallery:
    """Create a gallery of found objects."""
    return gr.Gallery(
        label="Nearest objects",
        show_label=False,
        height="auto",
        interactive=False,
        object_fit="contain",
        format="png",
        buttons=["fullscreen"],
        elem_id=elem_id,
        elem_classes="tiles",
    )


def whole_number(value: Any) -> int:
    """Convert the value of a field to an integer; 0 if it is empty.

    Raises:
        Refused: the value is not a number.
    """
    if value is None or value == "":
        return 0
    try:
        return int(float(value))
    except (TypeError, ValueError, OverflowError) as error:
        raise Refused(f"Not a number: {str(value)[:40]!r}.") from error


def clicked_point(event: gr.SelectData) -> tuple[float, float]:
    """Return (x, y) of a click, in pixels of the picture.

    Raises:
        Refused: the event has no position.
    """
    place = event.index
    if not isinstance(place, list | tuple) or len(place) != 2:
        raise Refused("The position of the click is unknown: click again.")
    try:
        return float(place[0]), float(place[1])
    except (TypeError, ValueError) as error:
        raise Refused("The position of the click is unknown: click again.") from error
