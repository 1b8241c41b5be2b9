"""What the tabs share: fields for pictures, places that were clicked, and errors that become sentences."""

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import gradio as gr

from cribo.errors import Stopped
from cribo.explorer.uploads import Refused

log = logging.getLogger("cribo")

T = TypeVar("T")

HEIGHT = 400
"""Of the fields for pictures that are sent, in pixels."""

ASKING: dict[str, Any] = {
    # Fields are read here and not by Gradio, which would decode pictures of any size before anybody asks.
    "preprocess": False,
    "concurrency_id": "network",
    "concurrency_limit": 4,
    "show_progress": "minimal",
}
"""How events are bound whose functions read what a visitor has sent."""

HIDDEN: dict[str, Any] = {**ASKING, "api_visibility": "private"}
"""The same, for events that are another way to what has a name already."""


def sentence(function: Callable[..., T]) -> Callable[..., T]:
    """A function of the page whose errors appear on the page as a sentence."""

    @wraps(function)
    def asked(*arguments: Any, **named: Any) -> T:
        try:
            return function(*arguments, **named)
        except gr.Error:
            raise
        except (Refused, ValueError, OSError, Stopped) as error:
            raise gr.Error(str(error), title="Not possible", print_exception=False) from error
        except Exception as error:
            log.exception("an error on the page")
            told = f"Something went wrong ({type(error).__name__}); it is written down where the page was started."
            raise gr.Error(told, print_exception=False) from error

    return asked


def sent_picture(caption: str, alt: str) -> gr.Image:
    """A field for a picture that a visitor sends."""
    gr.Markdown(caption, elem_classes="caption")
    return gr.Image(
        label=caption,
        show_label=False,
        sources=["upload", "clipboard"],
        height=HEIGHT,
        buttons=["fullscreen"],
        alt_text=alt,
    )


def shown_picture(caption: str, alt: str) -> gr.Image:
    """A field for a picture that is shown."""
    gr.Markdown(caption, elem_classes="caption")
    return gr.Image(
        label=caption,
        show_label=False,
        interactive=False,
        format="png",
        buttons=["fullscreen"],
        alt_text=alt,
        elem_classes="shown",
    )


def found_objects(elem_id: str) -> gr.Gallery:
    """A gallery of objects that were found."""
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
    """The whole number in a field; 0 in an empty one.

    Raises:
        Refused: there is something else in it.
    """
    if value is None or value == "":
        return 0
    try:
        return int(float(value))
    except (TypeError, ValueError, OverflowError) as error:
        raise Refused(f"This is no number: {str(value)[:40]!r}.") from error


def clicked_point(event: gr.SelectData) -> tuple[float, float]:
    """(x, y) in pixels of the picture that was clicked.

    Raises:
        Refused: the click has no place.
    """
    place = event.index
    if not isinstance(place, list | tuple) or len(place) != 2:
        raise Refused("This click has no place in the picture: click again.")
    try:
        return float(place[0]), float(place[1])
    except (TypeError, ValueError) as error:
        raise Refused("This click has no place in the picture: click again.") from error
