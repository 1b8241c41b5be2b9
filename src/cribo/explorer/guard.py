"""Security middleware of the page: checks hosts, origins, file references, sizes and logins; writes the policy.

Gradio restricts the files that it serves, uvicorn adds the headers in `HEADERS`, and Starlette limits JSON bodies. The
other checks are implemented here, because existing middleware does not cover them:

- hosts and origins: see `cribo.explorer.access`.
- Gradio fetches URLs given instead of an uploaded file, and does not limit the total size of uploads.
- Gradio does not limit logins, ends all sessions by a link, and answers malformed requests with errors of the server.

The checks do not depend on Gradio's route names, except that only two routes accept bodies other than JSON.
"""

import json
import logging
import re
from base64 import b64encode
from collections.abc import Iterable
from contextlib import suppress
from hashlib import sha256
from http import HTTPStatus
from pathlib import Path
from typing import Any

from starlette.datastructures import Headers
from starlette.formparsers import MultiPartException
from starlette.middleware.body_limit import RequestBodyLimitMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cribo.explorer.access import Denied, FailureLimit, client_network, require_known_host, require_own_origin
from cribo.explorer.uploads import Uploads

log = logging.getLogger("cribo")

_UPLOAD = "/gradio_api/upload"
_LOGIN, _LOGOUT = "/login", "/logout"
_JSON_BYTES = 2**20
_FORM_BYTES = 2**16  # of a form, without its file
_INVALID = "Invalid request."

_SCRIPT = re.compile(rb"<script\b[^>]*>(.*?)</script\s*>", re.DOTALL | re.IGNORECASE)

# `unsafe-eval`, because gr.HTML compiles the code of the editor; inline styles, because Gradio's components have them.
# Of inline scripts, only those that the server wrote are allowed, by their hashes. No other servers are allowed.
_POLICY = "; ".join(
    (
        "default-src 'self'",
        "script-src 'self' 'unsafe-eval' {scripts}",
        "style-src 'self' 'unsafe-inline'",
        "img-src 'self' data: blob:",
        "font-src 'self' data:",
        "connect-src 'self' data: blob:",
        "worker-src 'self' blob:",
        "media-src 'none'",
        "object-src 'none'",
        "frame-src 'none'",
        "frame-ancestors 'none'",
        "base-uri 'self'",
        "form-action 'self'",
    )
)


class Guard:
    """ASGI middleware that rejects requests from other origins and oversized bodies.

    Args:
        app: the wrapped application.
        uploads: folder and limits of uploaded files.
        folder_bytes: maximum total size of uploaded files.
        hosts: host names of the server. IP addresses are always allowed; other names are rejected to prevent DNS
            rebinding.
    """

    def __init__(self, app: ASGIApp, *, uploads: Uploads, folder_bytes: int, hosts: frozenset[str]) -> None:
        self._app = app
        self._uploads = uploads
        self._hosts = hosts
        self._upload = _UploadQuota(app, uploads, folder_bytes)
        self._logins = _Logins(RequestBodyLimitMiddleware(app, _FORM_BYTES))
        self._json = RequestBodyLimitMiddleware(self._with_own_files, _JSON_BYTES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._require_own_page(scope)
            send = _Answer(scope, send)
            if scope["path"].rstrip("/") == _LOGOUT:
                scope = _logout(scope)
            if scope["method"] in ("GET", "HEAD", "OPTIONS"):
                await self._app(scope, receive, send)
            elif scope["path"].rstrip("/") == _UPLOAD:
                await self._upload(scope, receive, send)
            elif scope["path"].rstrip("/") == _LOGIN:
                await self._logins(scope, receive, send)
            else:
                await self._json(scope, receive, send)
        except Denied as error:
            # Part of the body may be unread, so the connection cannot be reused.
            response = PlainTextResponse(f"{error}\n", error.status, headers={"connection": "close", **error.headers})
            await response(scope, receive, send)
        except MultiPartException as error:  # Gradio has not read the upload
            await PlainTextResponse(f"{error.message}\n", HTTPStatus.REQUEST_ENTITY_TOO_LARGE)(scope, receive, send)
        except Exception as error:  # Gradio does not check the types of all values
            if isinstance(send, _Answer) and send.is_complete:
                return
            log.info("invalid request: %s %s (%s)", scope["method"], scope["path"][:200], type(error).__name__)
            if not (isinstance(send, _Answer) and send.has_started):
                await PlainTextResponse(_INVALID, HTTPStatus.BAD_REQUEST)(scope, receive, send)

    def _require_own_page(self, scope: Scope) -> None:
        require_known_host(
            scope,
            self._hosts,
            "open the page by its IP address, as in http://127.0.0.1:7860, or start it with --host NAME.",
        )
        # Links on sandboxed pages have the origin "null". They can open the page, but not read it.
        opens_page = scope["method"] in ("GET", "HEAD") and scope["path"] == "/"
        if not (opens_page and Headers(scope=scope).get("origin") == "null"):
            require_own_origin(scope)
        if re.search("https?:/", scope["path"], re.IGNORECASE):
            raise Denied(HTTPStatus.FORBIDDEN, "URLs of other servers are refused.")

    async def _with_own_files(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a JSON body after checking that it refers only to uploaded files."""
        body = await Request(scope, receive).body()
        try:
            if body:
                value = json.loads(body)
                self._require_own_files(value)
                body = json.dumps(value).encode()  # so that Gradio parses exactly the checked value
        except (ValueError, RecursionError) as error:
            raise Denied(HTTPStatus.BAD_REQUEST, "Invalid request: the body must be JSON.") from error
        pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return pending.pop() if pending else await receive()

        await self._app(scope, replay, send)

    def _require_own_files(self, value: Any) -> None:
        # Gradio would fetch URLs, and copy local files, given instead of an uploaded file.
        if isinstance(value, dict):
            if isinstance(path := value.get("path"), str) and path and not self._uploads.holds(path):
                raise Denied(HTTPStatus.FORBIDDEN, "Only files uploaded to this page can be used.")
            for part in value.values():
                self._require_own_files(part)
        elif isinstance(value, list):
            for part in value:
                self._require_own_files(part)


class _Answer:
    """Sends a response with the Content-Security-Policy; errors of the server become `_INVALID`.

    A page is sent once it is complete, since its policy has the hashes of its inline scripts.

    Args:
        scope: the request.
        send: sends to the client.
    """

    def __init__(self, scope: Scope, send: Send) -> None:
        self._send = send
        self._start: Message = {}
        self._page: bytearray | None = None
        self._is_failed = False
        self.has_started = self.is_complete = False
        if scope["method"] in ("GET", "HEAD") and b"text/html" in dict(scope["headers"]).get(b"accept", b""):
            scope["headers"] = [header for header in scope["headers"] if header[0] != b"accept-encoding"]

    async def __call__(self, message: Message) -> None:
        """Send one message."""
        if message["type"] == "http.response.start":
            headers = Headers(raw=message["headers"])
            self._is_failed = message["status"] >= 500 and message["status"] != HTTPStatus.SERVICE_UNAVAILABLE
            is_page = headers.get("content-type", "").startswith("text/html") and "content-encoding" not in headers
            self._start, self._page = message, bytearray() if is_page or self._is_failed else None
            if self._page is None:
                await self._begin([])
        elif self._page is None:
            self.is_complete = not message.get("more_body", False)
            await self._send(message)
        elif not self.is_complete:
            self._page.extend(message.get("body", b""))
            if not message.get("more_body", False):
                self.is_complete = True
                await self._send_page()

    async def _send_page(self) -> None:
        page = bytes(self._page or b"")
        if self._is_failed:
            page = f"{_INVALID}\n".encode()
            headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(page)).encode())]
            self._start = {**self._start, "status": int(HTTPStatus.BAD_REQUEST), "headers": headers}
        scripts = dict.fromkeys(b64encode(sha256(script).digest()).decode() for script in _SCRIPT.findall(page))
        await self._begin(f"'sha256-{script}'" for script in scripts)
        await self._send({"type": "http.response.body", "body": page})

    async def _begin(self, scripts: Iterable[str]) -> None:
        policy = (b"content-security-policy", _POLICY.format(scripts=" ".join(scripts)).encode())
        self.has_started = True
        await self._send({**self._start, "headers": [*self._start["headers"], policy]})


def _logout(scope: Scope) -> Scope:
    """Return the request for Gradio that ends one session, which links of other pages cannot send."""
    if scope["method"] != "POST":
        raise Denied(HTTPStatus.METHOD_NOT_ALLOWED, "Logging out requires a POST request.", {"allow": "POST"})
    return {**scope, "method": "GET", "query_string": b"all_session=false"}


class _Logins:
    """ASGI middleware that limits failed logins.

    Args:
        app: the wrapped application.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._limit = FailureLimit("logins")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one login."""
        attempt = self._limit.begin(client_network(scope))

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] < 400:
                self._limit.succeed(attempt)
            await send(message)

        await self._app(scope, receive, counted)


class _UploadQuota:
    """ASGI middleware that counts the bytes of uploads and stops them at the limit of a file or of the folder.

    It raises `MultiPartException`, the only exception after which Gradio removes a partial file.
    """

    def __init__(self, app: ASGIApp, uploads: Uploads, folder_bytes: int) -> None:
        self._app = app
        self._uploads = uploads
        self._folder_bytes = folder_bytes
        self._unfinished = 0
        self._total = 0  # bytes in the folder at the last measurement, plus those received since

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one upload."""
        # Unfinished uploads may already be in the folder; counting them twice is safe.
        self._total = _size_of(self._uploads.folder) + self._unfinished
        # Content-Length may be missing or wrong; it only allows rejecting uploads before writing.
        announced = Headers(scope=scope).get("content-length", "")
        size = int(announced) if announced.isdecimal() else 0
        self._require_room(size, self._total + size)
        arrived, complete = 0, False

        async def counted() -> Message:
            nonlocal arrived, complete
            message = await receive()
            if message["type"] == "http.disconnect" and not complete:
                raise MultiPartException("The upload was interrupted.")
            size = len(message.get("body", b""))
            arrived += size
            self._unfinished += size
            self._total += size
            complete = not message.get("more_body", False)
            try:
                self._require_room(arrived, self._total)
            except Denied as error:
                raise MultiPartException(str(error)) from error
            return message

        try:
            await self._app(scope, counted, send)
        finally:
            self._unfinished -= arrived

    def _require_room(self, size: int, total: int) -> None:
        """Reject an upload of `size` bytes, which would increase the size of all uploads to `total` bytes."""
        limits = self._uploads.limits
        if size > limits.bytes + _FORM_BYTES:
            raise Denied(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"The upload has {size / 1e6:.1f} MB, but at most {limits.max_megabytes:g} MB are allowed: make the "
                "picture smaller, or start the page with a larger --max_megabytes.",
            )
        if total > self._folder_bytes:
            raise Denied(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"The uploads exceed {self._folder_bytes / 1e6:.0f} MB in total; they are deleted after an hour: try "
                "again later.",
            )


def _size_of(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):  # removed meanwhile
            total += path.lstat().st_size
    return total
