"""`cribo explore`: open the contents, serve the page, and clean up."""

import tempfile
from contextlib import closing
from pathlib import Path

from rich.console import Console

from cribo.base.console import Phases, loading
from cribo.base.errors import if_interrupted
from cribo.base.packages import require_packages
from cribo.explorer.config import ExploreConfig, Limits
from cribo.explorer.contents import open_contents
from cribo.explorer.server import USER, exit_on_sigterm, is_loopback, listening, serve, uploads_folder
from cribo.explorer.uploads import Uploads


def explore(
    config: ExploreConfig, *, host: str, port: int, limits: Limits, console: Console, password: str | None = None
) -> None:
    """Open the contents and serve the page until Ctrl-C.

    Args:
        config: contents of the page.
        host: name or IP address of this machine at which the page is served.
        port: port of the page; 0 selects a free port.
        limits: limits of uploaded pictures.
        console: console for progress and the address of the page.
        password: password of the user `cribo`; None disables the login.

    Raises:
        ValueError: the contents cannot be opened, or the address cannot be used.
        ImportError: Gradio is not installed.
        KeyboardInterrupt: on Ctrl-C, after the server has stopped.
    """
    require_packages("the page", "gradio", "lance", extra="explore")
    with (
        exit_on_sigterm(),
        listening(host, port) as (listener, address),
        tempfile.TemporaryDirectory(prefix="cribo-objects-", ignore_cleanup_errors=True) as workspace,
        uploads_folder() as folder,
    ):
        with Phases(console) as progress:
            contents = open_contents(config, Path(workspace), progress)
        with loading(console):
            from cribo.explorer.page import build_page, look

            uploads = Uploads(folder, limits, contents.reading)
            page = build_page(contents, uploads)

        def announce() -> None:
            console.print(f"Open {address} in a browser; Ctrl-C stops the server.")
            if password is not None:
                console.print(f"Log in as {USER} with the password {password}")
            elif not is_loopback(host):
                console.print("No password is set: anyone who can reach the port can see the images.")

        with closing(contents.visitors), if_interrupted(lambda: _kept(config)):
            serve(page, uploads, listener, host=host, password=password, look=look(), on_start=announce)


def _kept(config: ExploreConfig) -> str:
    """Return the message for Ctrl-C: the server has stopped, and what the page has saved."""
    saved = "" if config.examples is None else f"; examples that the page saved are in {config.examples}"
    return f"the server has stopped{saved}"
