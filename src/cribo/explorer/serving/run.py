"""`cribo serve`: open the memory, serve it, and finish running requests at the end."""

import math

from rich.console import Console

from cribo.base.console import loading
from cribo.base.errors import ConfigError, if_interrupted
from cribo.base.packages import require_packages
from cribo.base.wording import counted
from cribo.explorer.config import Limits
from cribo.explorer.server import exit_on_sigterm, host_names, is_loopback, listening, run_server
from cribo.explorer.serving.config import RequestLimits, ServeConfig


def serve_memory(
    config: ServeConfig,
    *,
    host: str,
    port: int,
    pictures: Limits,
    requests: RequestLimits,
    console: Console,
    token: str | None = None,
    open_to_all: bool = False,
    label_studio_key: str | None = None,
) -> None:
    """Serve a memory over HTTP until Ctrl-C or SIGTERM, and finish running requests.

    Args:
        config: contents of the server.
        host: name or IP address of this machine at which the server listens.
        port: its port; 0 selects a free port.
        pictures: limits of a picture.
        requests: limits of requests.
        console: console for the address of the server.
        token: token that requests need; None for none.
        open_to_all: whether other machines need no token.
        label_studio_key: access token of a user of Label Studio, to fetch images.

    Raises:
        ConfigError: other machines could use the server without a token.
        ValueError: memory or backbone cannot be opened, or the address cannot be used.
        MissingPackage: the extra is not installed.
        KeyboardInterrupt: on Ctrl-C, after the server has stopped.
    """
    require_packages("the server", "starlette", "uvicorn", "multipart", extra="explore")
    if token is None and not open_to_all and not is_loopback(host):
        raise ConfigError(
            f"--host {host} allows other machines to use the server, so it needs a token: give --token_file FILE or "
            "the environment variable CRIBO_TOKEN, or --no_token to allow all"
        )
    with exit_on_sigterm(), listening(host, port) as (listener, address):
        with loading(console):
            from cribo.explorer.serving.app import build_app
            from cribo.explorer.serving.growing import GrowingMemory
            from cribo.explorer.serving.memory_file import MemoryFile
            from cribo.explorer.serving.routes import OPERATIONS
            from cribo.explorer.serving.service import Service

            tool = None
            if config.label_studio is not None:
                from cribo.explorer.serving.label_studio.host import Host

                tool = Host(config.label_studio, label_studio_key, max_bytes=pictures.bytes, timeout=requests.timeout)
            opened = MemoryFile if tool is None else GrowingMemory
            memory = opened(config.memory, config.backbone, batch_size=config.batch_size, device=config.device)
        service = Service(memory, pictures, requests, batch_size=config.batch_size)
        operations, closing = OPERATIONS, []
        if tool is not None:
            from cribo.explorer.serving.label_studio.routes import MLBackend

            backend = MLBackend(service, tool)
            operations, closing = (*OPERATIONS, *backend.operations), [backend.close]
        app = build_app(service, token=token, hosts=host_names(host), operations=operations, closing=closing)
        served = memory.memory
        console.print(
            f"Serving {counted(len(served), 'example')} of {counted(len(served.classes), 'class', 'classes')} at "
            f"{address}; Ctrl-C stops the server.",
            markup=False,
            highlight=False,
        )
        with if_interrupted(lambda: "the server has stopped"):
            run_server(app, listener, grace=math.ceil(requests.timeout))
