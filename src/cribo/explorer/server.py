"""The server of the page: on one machine by default, with nothing loaded from elsewhere, and an end by Ctrl-C."""

import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from cribo.explorer.config import Limits
from cribo.explorer.guard import Guard
from cribo.explorer.uploads import Uploads

if TYPE_CHECKING:
    import gradio

_FOLDER_BYTES = 2 * 2**30
_WAITING = 128  # requests; others are told to come back
_SECONDS_TO_END = 2
_ANYWHERE = ("0.0.0.0", "::")


class CannotListen(ValueError):
    """The address is taken, or not this machine's."""


@contextmanager
def listening(host: str, port: int) -> Iterator[tuple[socket.socket, str]]:
    """A socket that listens, and the address of the page there.

    Args:
        host: name or number of this machine.
        port: 0 for any that is free.

    Raises:
        CannotListen: the port is taken or no port, or the host is not this machine.
    """
    if not 0 <= port <= 65535:
        raise CannotListen(f"port must be 0 to 65535, got {port}: 0 takes a free one")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise CannotListen(f"host {host!r} is not known here ({error.strerror}): use 127.0.0.1") from error
    with listener:
        if os.name != "nt":  # there it would let two servers share a port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
            listener.listen()
        except PermissionError as error:
            raise CannotListen(f"port {port} is for the system's own servers: use --port 0 for a free one") from error
        except OSError as error:
            advice = "use another --port, or --port 0 for a free one" if port else "use --host 127.0.0.1"
            raise CannotListen(f"cannot listen on {host}:{port} ({error.strerror}): {advice}") from error
        shown = "127.0.0.1" if host in _ANYWHERE else host
        yield listener, f"http://{f'[{shown}]' if ':' in shown else shown}:{listener.getsockname()[1]}"


@contextmanager
def uploads_folder(limits: Limits) -> Iterator[Uploads]:
    """A folder of this server's own for what visitors send, removed at the end; for before Gradio is imported."""
    with tempfile.TemporaryDirectory(prefix="cribo-explore-", ignore_cleanup_errors=True) as folder:
        # Read when Gradio is imported.
        os.environ |= {"GRADIO_TEMP_DIR": folder, "GRADIO_ANALYTICS_ENABLED": "False"}
        yield Uploads(Path(folder), limits)


def require_gradio() -> None:
    """Refuse to go on without the library of the page.

    Raises:
        ImportError: it is not installed.
    """
    import importlib.util

    if importlib.util.find_spec("gradio") is None:
        raise ImportError('the page needs Gradio: pip install "cribo-ssl[explore]"')


def serve(
    page: "gradio.Blocks",
    uploads: Uploads,
    listener: socket.socket,
    *,
    host: str,
    look: dict[str, object],
    on_start: Callable[[], None],
) -> None:
    """Serve a page until Ctrl-C.

    Args:
        page: to serve.
        uploads: where visitors' pictures go.
        listener: where it is served.
        host: by which it was opened.
        look: theme and style, as Gradio takes them.
        on_start: called when the page can be opened.

    Raises:
        KeyboardInterrupt: Ctrl-C, when the server has ended.
    """
    import fastapi
    import gradio
    import uvicorn

    page.queue(max_size=_WAITING, default_concurrency_limit=4, api_open=False)
    application = gradio.mount_gradio_app(
        fastapi.FastAPI(docs_url=None, redoc_url=None, openapi_url=None),
        page,
        path="/",
        server_name=host,
        server_port=listener.getsockname()[1],
        footer_links=[],
        run_history=False,
        ssr_mode=False,
        mcp_server=False,
        enable_monitoring=False,
        pwa=False,
        show_error=True,
        max_file_size=uploads.limits.bytes,
        blocked_paths=[],
        **look,  # pyright: ignore[reportArgumentType]
    )
    guard = Guard(application, uploads, _FOLDER_BYTES, names_of(host))
    config = uvicorn.Config(
        guard, log_level="critical", timeout_graceful_shutdown=_SECONDS_TO_END, ws="none", server_header=False
    )
    server = uvicorn.Server(config)
    on_start()
    server.run(sockets=[listener])


def names_of(host: str) -> frozenset[str]:
    """Names by which the page of a host may be called, besides numbers."""
    own = (socket.gethostname(), socket.getfqdn()) if host in _ANYWHERE else (host,)
    return frozenset({"localhost", *(name.lower() for name in own)})
