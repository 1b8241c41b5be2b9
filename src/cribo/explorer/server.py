"""The web server, which is local by default and stops on Ctrl-C."""

import ipaddress
import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from cribo.base.errors import CannotListen
from cribo.explorer.uploads import Uploads

if TYPE_CHECKING:
    import gradio
    from starlette.types import ASGIApp

_FOLDER_BYTES = 2 * 2**30
_MAX_WAITING = 128  # requests; further ones are refused
_SHUTDOWN_SECONDS = 2
_ALL_ADDRESSES = ("0.0.0.0", "::")

USER = "cribo"
"""The user name to log in with, if the page has a password."""


@contextmanager
def listening(host: str, port: int) -> Iterator[tuple[socket.socket, str]]:
    """Yield a listening socket and the URL of the page.

    Args:
        host: name or IP address of this machine.
        port: port number; 0 selects a free port.

    Raises:
        CannotListen: the port is in use or out of range, or the host is not this machine.
    """
    if not 0 <= port <= 65535:
        raise CannotListen(f"port must be 0 to 65535, got {port}: 0 selects a free port")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise CannotListen(f"unknown host {host!r} ({error.strerror}): use 127.0.0.1") from error
    with listener:
        if os.name != "nt":  # on Windows, it would allow two servers on one port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
            listener.listen()
        except PermissionError as error:
            raise CannotListen(f"port {port} is reserved for system services: use --port 0 for a free port") from error
        except OSError as error:
            advice = "use another --port, or --port 0 for a free port" if port else "use --host 127.0.0.1"
            raise CannotListen(f"cannot listen on {host}:{port} ({error.strerror}): {advice}") from error
        shown = "127.0.0.1" if host in _ALL_ADDRESSES else host
        yield listener, f"http://{f'[{shown}]' if ':' in shown else shown}:{listener.getsockname()[1]}"


@contextmanager
def uploads_folder() -> Iterator[Path]:
    """Yield a temporary folder for uploads; must be entered before Gradio is imported."""
    with tempfile.TemporaryDirectory(prefix="cribo-explore-", ignore_cleanup_errors=True) as folder:
        # Folders from which Gradio serves files; it reads these variables when imported.
        os.environ |= {"GRADIO_TEMP_DIR": folder, "GRADIO_EXAMPLES_CACHE": folder}
        os.environ |= {"GRADIO_ANALYTICS_ENABLED": "False"}
        yield Path(folder)


def serve(
    page: "gradio.Blocks",
    uploads: Uploads,
    listener: socket.socket,
    *,
    host: str,
    password: str | None,
    look: dict[str, object],
    on_start: Callable[[], None],
) -> None:
    """Serve a page until Ctrl-C.

    Args:
        page: the page.
        uploads: folder and limits of uploaded pictures.
        listener: listening socket.
        host: host for which the socket was opened.
        password: password of `USER`; None disables the login.
        look: theme and style, as keyword arguments of `gradio.mount_gradio_app`.
        on_start: called before the server starts accepting requests.

    Raises:
        KeyboardInterrupt: on Ctrl-C, after the server has stopped.
    """
    import fastapi
    import gradio
    from starlette.middleware import Middleware
    from starlette.middleware.cors import CORSMiddleware

    from cribo.explorer.guard import Guard

    page.queue(max_size=_MAX_WAITING, default_concurrency_limit=4, api_open=False)
    application = fastapi.FastAPI(
        openapi_url=None,
        middleware=[
            Middleware(Guard, uploads=uploads, folder_bytes=_FOLDER_BYTES, hosts=host_names(host)),
            Middleware(CORSMiddleware),  # allows no other origins, and overrides Gradio's rules
        ],
    )
    gradio.mount_gradio_app(
        application,
        page,
        path="/",
        server_name=host,
        server_port=listener.getsockname()[1],
        app_kwargs={"openapi_url": None},
        footer_links=[],
        run_history=False,
        ssr_mode=False,
        mcp_server=False,
        enable_monitoring=False,
        pwa=False,
        show_error=True,
        max_file_size=uploads.limits.bytes,
        blocked_paths=[],
        auth=None if password is None else (USER, password),
        auth_message=f"The user name is {USER}. The password was given to the server, or printed by it, at its start.",
        **look,  # pyright: ignore[reportArgumentType]
    )
    on_start()
    run_server(application, listener, grace=_SHUTDOWN_SECONDS)


def run_server(application: "ASGIApp", listener: socket.socket, *, grace: int) -> None:
    """Serve an application until Ctrl-C.

    Args:
        application: the application.
        listener: listening socket.
        grace: seconds in which running requests may finish after Ctrl-C.

    Raises:
        KeyboardInterrupt: on Ctrl-C, after the server has stopped.
    """
    import uvicorn

    from cribo.explorer.access import HEADERS

    config = uvicorn.Config(
        application,
        headers=HEADERS,
        log_level="critical",
        timeout_graceful_shutdown=grace,
        ws="none",
        server_header=False,
    )
    uvicorn.Server(config).run(sockets=[listener])


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Exit normally on SIGTERM, so that temporary folders are removed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def is_loopback(host: str) -> bool:
    """Whether a page served at `host` is reachable from this machine only.

    Example:
        >>> is_loopback("127.0.0.1"), is_loopback("0.0.0.0")
        (True, False)
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def host_names(host: str) -> frozenset[str]:
    """Return the host names, other than IP addresses, at which a page served at `host` may be opened."""
    own = (socket.gethostname(), socket.getfqdn()) if host in _ALL_ADDRESSES else (host,)
    return frozenset({"localhost", *(name.lower() for name in own)})
