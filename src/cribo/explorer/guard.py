"""What stands before the page's server: which requests reach it at all, how large they may be, what browsers may load.

The server's library has more routes than this page needs: proxies, reloading, other people's components. Those that the
page needs are named here, and no other is answered.
"""

import ipaddress
import json
import re
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cribo.explorer.uploads import Uploads

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

_API = "/gradio_api"
_FILE = f"{_API}/file="
_READ = re.compile(
    r"/|/config/?|/theme\.css|/favicon\.ico|/manifest\.json|/robots\.txt|/(static|assets)/[\w./+@-]+"
    rf"|{_API}/(info|app_id|startup-events|upload_progress|queue/(data|status)|heartbeat/\w+|theme\.css)"
)
_UPLOAD = f"{_API}/upload"
_WRITTEN = (f"{_API}/queue/join", f"{_API}/cancel", f"{_API}/reset", f"{_API}/startup-events")
_JSON_BYTES = 2**20
_FORM_BYTES = 2**16  # what a form adds around a file

# Plots and the painting field compile their own code, and the page begins with scripts that stand in it: `unsafe-*`.
# Nothing of it is loaded from, or sent to, anywhere else.
_POLICY = "; ".join(
    (
        "default-src 'self'",
        "script-src 'self' 'unsafe-inline' 'unsafe-eval'",
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
_HEADERS = (
    (b"content-security-policy", _POLICY.encode()),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
)


class _Denied(Exception):
    def __init__(self, status: HTTPStatus, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass
class Guard:
    """An ASGI application before another one.

    Attributes:
        application: that gets what is let through.
        uploads: the folder of which alone files are served, and the limits of what is sent.
        folder_bytes: that the folder may hold; more is not taken.
        hosts: names by which the server may be called, besides numbers: whoever owns another name can let it lead here,
            and a page of that name would be taken for this one.
    """

    application: Application
    uploads: Uploads
    folder_bytes: int
    hosts: frozenset[str]

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            await self.application(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # the page opens no other connection
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        try:
            self._require_allowed(scope["method"], scope["path"], headers)
            if scope["method"] == "POST" and scope["path"] in _WRITTEN:
                receive = await self._checked(receive, int(headers["content-length"]))
        except _Denied as error:
            await _answer(error, send)
            return
        await self.application(scope, receive, _with_headers(send))

    def _require_allowed(self, method: str, path: str, headers: dict[str, str]) -> None:
        host = headers.get("host", "").lower()
        name = re.sub(r":\d+$", "", host)
        if name not in self.hosts and not _is_number(name):
            raise _Denied(
                HTTPStatus.FORBIDDEN,
                f"This server is not called {host!r}: open the page by its address, as in http://127.0.0.1:7860.",
            )
        # Browsers say Sec-Fetch-Site to https and to their own machine only; Origin they say to all.
        origin = headers.get("origin")
        if origin is not None and not _is_own(origin, host) and not _opens_page(method, path, origin):
            raise _Denied(HTTPStatus.FORBIDDEN, f"Nothing is answered to the pages of others, such as {origin!r}.")
        if method in ("GET", "HEAD"):
            self._require_readable(path)
        elif method == "POST":
            if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
                raise _Denied(HTTPStatus.FORBIDDEN, "Nothing is taken from the pages of others.")
            self._require_small(path, headers.get("content-length", ""))
        else:
            raise _Denied(HTTPStatus.METHOD_NOT_ALLOWED, "Pages are read with GET, and asked with POST.")

    def _require_readable(self, path: str) -> None:
        if path.startswith(_FILE):
            if not self.uploads.holds(path.removeprefix(_FILE)):
                raise _Denied(HTTPStatus.FORBIDDEN, "There is no such file here.")
        elif not _READ.fullmatch(path) or ".." in path:
            raise _Denied(HTTPStatus.NOT_FOUND, "There is no such page here.")

    def _require_small(self, path: str, length: str) -> None:
        if path == _UPLOAD:
            limit = self.uploads.limits.bytes + _FORM_BYTES
        elif path in _WRITTEN:
            limit = _JSON_BYTES
        else:
            raise _Denied(HTTPStatus.NOT_FOUND, "There is no such page here.")
        if not length.isdecimal():
            raise _Denied(HTTPStatus.LENGTH_REQUIRED, "How much is sent must be said first (Content-Length).")
        if int(length) > limit:
            megabytes = self.uploads.limits.megabytes
            raise _Denied(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"{int(length) / 1e6:.1f} MB are more than {megabytes:g} MB."
            )
        if path == _UPLOAD and _size_of(self.uploads.folder) + int(length) > self.folder_bytes:
            raise _Denied(HTTPStatus.INSUFFICIENT_STORAGE, "Too much was sent lately: try again in some minutes.")

    async def _checked(self, receive: Receive, length: int) -> Receive:
        """Read a body of JSON, refuse what names a file that was not sent here, and hand it on."""
        body, more = b"", True
        while more and len(body) <= length:
            message = await receive()
            if message["type"] == "http.disconnect":
                break
            body += message.get("body", b"")
            more = message.get("more_body", False)
        try:
            self._require_own_files(json.loads(body) if body else None)
        except (ValueError, RecursionError) as error:
            raise _Denied(HTTPStatus.BAD_REQUEST, "This is no question to this page.") from error
        pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return pending.pop() if pending else await receive()

        return replay

    def _require_own_files(self, value: Any) -> None:
        # The server's library would fetch addresses, and copy files, that stand where an upload's path belongs.
        if isinstance(value, dict):
            if isinstance(path := value.get("path"), str) and path and not self.uploads.holds(path):
                raise _Denied(HTTPStatus.FORBIDDEN, "Only files that were sent to this page can be used.")
            for part in value.values():
                self._require_own_files(part)
        elif isinstance(value, list):
            for part in value:
                self._require_own_files(part)


def _is_number(name: str) -> bool:
    try:
        ipaddress.ip_address(name[1:-1] if name.startswith("[") and name.endswith("]") else name)
    except ValueError:
        return False
    return True


def _is_own(origin: str, host: str) -> bool:
    """Whether a page was loaded from the host and port that it asks; the scheme's own port may be left out."""
    try:
        page = urlsplit(origin.lower())
        server = urlsplit(f"{page.scheme}://{host}")
        default = {"http": 80, "https": 443}[page.scheme]
        return (page.hostname, page.port or default) == (server.hostname, server.port or default)
    except (KeyError, ValueError):
        return False


def _opens_page(method: str, path: str, origin: str) -> bool:
    # Where browsers keep to themselves whence a link came: it does nothing, and other pages cannot read the answer.
    return origin == "null" and method in ("GET", "HEAD") and path == "/"


def _size_of(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):  # just removed
            total += path.lstat().st_size
    return total


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            own = {name for name, _ in _HEADERS}
            kept = [
                (name, value)
                for name, value in message.get("headers", ())
                # The server's library lets pages of others read its answers.
                if name.lower() not in own and not name.lower().startswith(b"access-control-")
            ]
            message = {**message, "headers": [*kept, *_HEADERS]}
        await send(message)

    return sending


async def _answer(error: _Denied, send: Send) -> None:
    body = f"{error}\n".encode()
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(body)).encode()), *_HEADERS]
    # What was sent is not read: the connection cannot be used again.
    headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": int(error.status), "headers": headers})
    await send({"type": "http.response.body", "body": body})
