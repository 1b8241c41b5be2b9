"""The application: the operations behind the checks of tokens, hosts, origins and rates."""

import base64
import logging
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from cribo.explorer.access import Denied, FailureLimit, client_network, require_known_host, require_own_origin
from cribo.explorer.serving.operations import Operation, describe
from cribo.explorer.serving.routes import OPERATIONS
from cribo.explorer.serving.service import Service

log = logging.getLogger("cribo")

_SECONDS = 60
_MOST_CLIENTS = 4096  # whose requests are counted


class Gate:
    """ASGI middleware that rejects requests without the token, of other origins, or above the rate of a client.

    Args:
        app: the wrapped application.
        token: the token; None for none.
        hosts: host names of the server, which are checked if there is no token: another page cannot send one.
        public: paths that need no token.
        max_per_minute: number of requests of a client per minute; None for no limit.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        token: str | None,
        hosts: frozenset[str],
        public: frozenset[str] = frozenset(),
        max_per_minute: int | None = None,
    ) -> None:
        self._app, self._token, self._hosts, self._public = app, token, hosts, public
        self._failures = FailureLimit("tokens")
        self._rate = None if max_per_minute is None else _Rate(max_per_minute)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] == "http":
            try:
                self._check(scope)
            except Denied as error:
                await problem(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        require_own_origin(scope)
        client = client_network(scope)
        if self._rate is not None:
            self._rate.count(client)
        if self._token is None:
            require_known_host(
                scope,
                self._hosts,
                "use an IP address, as in http://127.0.0.1:7861, or start it with --host NAME.",
            )
        elif scope["path"] not in self._public:
            self._require_token(scope, client, self._token)

    def _require_token(self, scope: Scope, client: str, token: str) -> None:
        attempt = self._failures.begin(client)
        given = _given_token(Headers(scope=scope).get("authorization", ""))
        if given is None or not secrets.compare_digest(given, token.encode()):
            raise Denied(
                HTTPStatus.UNAUTHORIZED,
                "The token is missing or wrong: send the header Authorization: Bearer TOKEN.",
                {"www-authenticate": "Bearer"},
            )
        self._failures.succeed(attempt)


def _given_token(authorization: str) -> bytes | None:
    """Return the token of a header: of Bearer, or the password of Basic, which tools offer; None for others."""
    kind, _, given = authorization.partition(" ")
    if kind.lower() == "bearer":
        return given.strip().encode()
    if kind.lower() == "basic":
        try:
            return base64.b64decode(given.strip(), validate=True).partition(b":")[2]
        except ValueError:
            return None
    return None


class _Rate:
    """Counts the requests of each client in the last minute."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._times: OrderedDict[str, deque[float]] = OrderedDict()

    def count(self, client: str) -> None:
        """Count a request; raise Denied above the limit."""
        now, times = time.monotonic(), self._times.setdefault(client, deque())
        self._times.move_to_end(client)
        while len(self._times) > _MOST_CLIENTS:
            self._times.popitem(last=False)
        while times and now - times[0] > _SECONDS:
            times.popleft()
        if len(times) >= self._most:
            wait = max(1, round(_SECONDS - (now - times[0])))
            raise Denied(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"More than {self._most} requests per minute: try again in {wait} seconds, or start the server with a "
                "larger --max_per_minute.",
                {"retry-after": str(wait)},
            )
        times.append(now)


def problem(error: Denied) -> Response:
    """Return the response to a request that is refused."""
    # Part of the body may be unread, so the connection cannot be reused.
    headers = {"connection": "close", **error.headers}
    return JSONResponse({"error": str(error)}, error.status, headers=headers)


def build_app(
    service: Service,
    *,
    token: str | None,
    hosts: frozenset[str],
    operations: Sequence[Operation] = OPERATIONS,
    closing: Sequence[Callable[[], None]] = (),
) -> Starlette:
    """Build the application of a server.

    Args:
        service: what the operations share; closed when the application ends.
        token: the token that requests need; None for none.
        hosts: host names of the server.
        operations: the operations.
        closing: called when the application ends, before the service is closed.
    """

    async def openapi(service: Service, request: Request) -> Response:
        return JSONResponse(described)

    own = Operation(
        "GET", "/openapi.json", "Describe the server in OpenAPI", openapi, {"application/json": {"type": "object"}}
    )
    described = describe([*operations, own])

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        for close in closing:
            close()
        service.close()

    return Starlette(
        routes=[Route(each.path, _endpoint(service, each), methods=[each.method]) for each in (*operations, own)],
        middleware=[
            Middleware(
                Gate,
                token=token,
                hosts=hosts,
                public=frozenset(each.path for each in operations if each.is_public),
                max_per_minute=service.requests.max_per_minute,
            )
        ],
        exception_handlers={HTTPException: _unknown(operations)},
        lifespan=lifespan,
    )


def _endpoint(service: Service, operation: Operation) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        try:
            return await operation.handle(service, request)
        except Denied as error:
            return problem(error)
        except Exception:
            log.exception("error in %s %s", operation.method, operation.path)
            return JSONResponse({"error": "Internal error: see the log of the server."}, 500)

    return endpoint


def _unknown(operations: Sequence[Operation]) -> Any:
    """Return a handler of unknown paths and wrong methods."""
    listed = ", ".join(f"{each.method} {each.path}" for each in operations)

    async def handle(request: Request, error: HTTPException) -> Response:
        status = HTTPStatus(error.status_code)
        path = request.url.path[:80]
        return problem(
            Denied(status, f"{request.method[:20]} {path!r}: {status.phrase}. There are {listed}.", error.headers or {})
        )

    return handle
