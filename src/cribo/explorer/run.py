"""`cribo explore` from what was asked for to the end of the server."""

import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cribo.console import Progress
from cribo.explorer.config import Asked, Limits
from cribo.explorer.contents import open_contents
from cribo.explorer.server import listening, require_gradio, serve, uploads_folder


def explore(
    asked: Asked, *, host: str, port: int, limits: Limits, progress: Progress, say: Callable[[str], None]
) -> None:
    """Open what was asked for and serve its page until Ctrl-C.

    Args:
        asked: what to look at.
        host: name or number of this machine under which the page is served.
        port: of the page; 0 for a free one.
        limits: of what visitors send.
        progress: told how far the opening is.
        say: told the page's address, when it can be opened.

    Raises:
        ValueError: what was asked for cannot be opened, or the address cannot be used.
        ImportError: Gradio is not installed.
        KeyboardInterrupt: Ctrl-C, when the server has ended.
    """
    require_gradio()
    with (
        _tidy_end(),
        listening(host, port) as (listener, address),
        tempfile.TemporaryDirectory(prefix="cribo-objects-", ignore_cleanup_errors=True) as workspace,
        uploads_folder(limits) as uploads,
    ):
        contents = open_contents(asked, limits, Path(workspace), progress)
        from cribo.explorer.page import build_page, look

        page = build_page(contents, uploads)
        serve(page, uploads, listener, host=host, look=look(), on_start=lambda: say(address))


@contextmanager
def _tidy_end() -> Iterator[None]:
    """Have SIGTERM end the process as an exit does, which removes what was made for the page."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
