"""Errors on the page."""

import logging

import gradio as gr
import pytest

from cribo.explorer.tabs.fields import show_errors
from cribo.explorer.uploads import Refused


def test_refusals_are_shown_and_other_errors_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    def refuse() -> None:
        raise Refused("The painting is empty.")

    def fail() -> None:
        raise FileNotFoundError("/home/somebody/secret.png")

    with pytest.raises(gr.Error, match="The painting is empty"):
        show_errors(refuse)()
    logging.getLogger("cribo").propagate = True
    with pytest.raises(gr.Error) as raised:
        show_errors(fail)()
    assert "/home/somebody" not in str(raised.value)
    assert "/home/somebody/secret.png" in caplog.text
