"""Requests that the middleware accepts or rejects, tested with a server that accepts everything."""

import asyncio
import base64
import hashlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("starlette")
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse

from cribo.explorer.config import Limits
from cribo.explorer.guard import Guard
from cribo.explorer.uploads import Uploads

HOME = "http://127.0.0.1:7860"


async def answer_everything(scope: Any, receive: Any, send: Any) -> None:
    """Read any body and accept any request."""
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"answered"})


@pytest.fixture
def uploads(tmp_path: Path) -> Uploads:
    """Create an empty folder with limits."""
    (tmp_path / "uploads").mkdir()
    return Uploads(tmp_path / "uploads", Limits(max_megabytes=0.01))


@pytest.fixture
def guard(uploads: Uploads) -> Guard:
    """Guard a server that accepts everything."""
    hosts = frozenset({"127.0.0.1", "localhost"})
    return Guard(answer_everything, uploads=uploads, folder_bytes=200_000, hosts=hosts)


@pytest.fixture
def ask(guard: Guard) -> Callable[..., httpx.Response]:
    """Send a request to a guarded server."""

    def call(method: str, path: str, **options: Any) -> httpx.Response:
        async def request() -> httpx.Response:
            transport = httpx.ASGITransport(app=guard)
            async with httpx.AsyncClient(transport=transport, base_url=HOME) as client:
                return await client.request(method, path, **options)

        return asyncio.run(request())

    return call


def test_large_uploads_are_refused(ask: Callable[..., httpx.Response], uploads: Uploads) -> None:
    assert ask("POST", "/gradio_api/upload", content=b"0" * 9_000).status_code == 200
    answer = ask("POST", "/gradio_api/upload", content=b"0" * 90_000)
    assert (answer.status_code, "--max_megabytes" in answer.text) == (413, True)
    assert ask("POST", "/gradio_api/queue/join", content=b"0" * 2_000_000).status_code == 413
    (uploads.folder / "earlier.png").write_bytes(b"0" * 195_000)
    answer = ask("POST", "/gradio_api/upload", content=b"0" * 9_000)
    assert (answer.status_code, answer.text.partition(";")[0]) == (429, "The uploads exceed 0 MB in total")


def test_concurrent_uploads_share_the_quota(guard: Guard, uploads: Uploads) -> None:
    """None of them has a Content-Length, and each alone would fit."""
    (uploads.folder / "earlier.png").write_bytes(b"0" * 80_000)

    async def slowly() -> AsyncIterator[bytes]:
        for _ in range(10):
            yield b"0" * 6_000
            await asyncio.sleep(0.01)

    async def upload() -> list[httpx.Response]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=guard), base_url=HOME) as client:
            sent = [client.post("/gradio_api/upload", content=slowly()) for _ in range(4)]
            return await asyncio.gather(*sent)

    answers = asyncio.run(upload())
    refused = [answer for answer in answers if answer.status_code == 413]
    assert len(refused) >= 2
    assert "The uploads exceed" in refused[0].text


def test_other_host_names_and_origins_are_refused(ask: Callable[..., httpx.Response]) -> None:
    assert ask("GET", "/", headers={"host": "localhost:99"}).status_code == 200
    # DNS cannot rebind an IP address.
    for number in ("192.0.2.7:7860", "192.0.2.7", "[2001:db8::7]:7860", "[::1]"):
        assert ask("GET", "/", headers={"host": number}).status_code == 200, number
    for name in ("rebound.example:7860", "192.0.2.7.example", "[rebound.example]", ""):
        answer = ask("GET", "/", headers={"host": name})
        assert (answer.status_code, "open the page by its IP address" in answer.text) == (403, True), name
    elsewhere = {"sec-fetch-site": "cross-site"}
    assert ask("POST", "/gradio_api/queue/join", content=b"{}", headers=elsewhere).status_code == 403


@pytest.mark.parametrize(
    ("origin", "host", "own"),
    [
        ("http://127.0.0.1:7860", "127.0.0.1:7860", True),
        ("http://192.0.2.7", "192.0.2.7", True),
        ("https://192.0.2.7", "192.0.2.7:443", True),  # behind an HTTPS proxy
        ("http://LocalHost:7860", "localhost:7860", True),
        ("http://[2001:db8::7]:7860", "[2001:db8::7]:7860", True),
        ("http://evil.example", "192.0.2.7:7860", False),
        ("http://evil.example:7860", "192.0.2.7:7860", False),
        ("http://192.0.2.7", "192.0.2.7:7860", False),  # another server on the same machine
        ("http://192.0.2.7:8888", "192.0.2.7:7860", False),
        ("http://192.0.2.7:7860.evil.example", "192.0.2.7:7860", False),
        ("chrome-extension://192.0.2.7:7860", "192.0.2.7:7860", False),
        ("null", "192.0.2.7:7860", False),
        ("", "192.0.2.7:7860", False),
    ],
)
def test_only_requests_of_the_page_are_accepted(
    ask: Callable[..., httpx.Response], origin: str, host: str, own: bool
) -> None:
    said = {"origin": origin, "host": host}  # without Sec-Fetch-Site, as browsers send to insecure origins
    answers = [
        ask("POST", "/gradio_api/upload", content=b"0", headers=said),
        ask("POST", "/gradio_api/queue/join", content=b"{}", headers=said),
        ask("GET", "/gradio_api/queue/data", headers=said),
        ask("GET", "/gradio_api/file=picture.png", headers=said),
    ]
    assert {answer.status_code for answer in answers} == {200 if own else 403}
    preflight = ask("OPTIONS", "/gradio_api/queue/join", headers={**said, "access-control-request-method": "POST"})
    assert preflight.status_code == (200 if own else 403)


def test_a_link_from_a_sandboxed_page_opens_the_page(ask: Callable[..., httpx.Response]) -> None:
    assert ask("GET", "/", headers={"origin": "null"}).status_code == 200
    assert ask("GET", "/config", headers={"origin": "null"}).status_code == 403
    assert ask("POST", "/", content=b"{}", headers={"origin": "null"}).status_code == 403


def served_by(app: Any, uploads: Uploads) -> Guard:
    """Guard another server."""
    return Guard(app, uploads=uploads, folder_bytes=200_000, hosts=frozenset({"127.0.0.1"}))


def requests_to(
    guard: Guard, *requests: tuple[str, str], client: str = "192.0.2.1", **options: Any
) -> list[httpx.Response]:
    """Send requests from an address."""

    async def send() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app=guard, client=(client, 5))
        async with httpx.AsyncClient(transport=transport, base_url=HOME) as session:
            return [await session.request(method, path, **options) for method, path in requests]

    return asyncio.run(send())


def test_inline_scripts_are_allowed_by_their_hashes(uploads: Uploads) -> None:
    page = "<script>one()</script><p onclick=x()><script type=module>\ntwo()\n</script>"
    policy = requests_to(served_by(HTMLResponse(page), uploads), ("GET", "/"))[0].headers["content-security-policy"]
    for script in ("one()", "\ntwo()\n"):
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    scripts = next(part for part in policy.split("; ") if part.startswith("script-src"))
    assert "'unsafe-inline'" not in scripts
    assert policy.count("sha256") == 2


def test_errors_of_the_server_become_invalid_requests(uploads: Uploads) -> None:
    async def fail(scope: Any, receive: Any, send: Any) -> None:
        raise TypeError("secret of the server")

    for app in (fail, PlainTextResponse("secret of the server", 500), JSONResponse({"secret of": 1}, 501)):
        [answer] = requests_to(served_by(app, uploads), ("POST", "/gradio_api/run/x"), json={})
        assert (answer.status_code, answer.text.strip()) == (400, "Invalid request.")
    [busy] = requests_to(served_by(PlainTextResponse("full", 503), uploads), ("POST", "/x"), json={})
    assert busy.status_code == 503


def test_logging_out_requires_a_post(guard: Guard) -> None:
    answers = requests_to(guard, ("GET", "/logout"), ("HEAD", "/logout/"), ("POST", "/logout"))
    assert [answer.status_code for answer in answers] == [405, 405, 200]


def test_failed_logins_are_limited(uploads: Uploads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cribo.explorer.access._ALL_FAILURES", 25)

    async def login(scope: Any, receive: Any, send: Any) -> None:
        right = b"right" in (await receive())["body"]
        await PlainTextResponse("", 200 if right else 400)(scope, receive, send)

    guard = served_by(login, uploads)

    def attempts(client: str, count: int, password: bytes = b"wrong") -> list[int]:
        sent = [("POST", "/login")] * count
        return [answer.status_code for answer in requests_to(guard, *sent, client=client, content=password)]

    assert attempts("192.0.2.9", 1, b"right") == [200]
    assert attempts("192.0.2.1", 12) == [400] * 10 + [429] * 2
    assert attempts("2001:db8::1", 5) + attempts("2001:db8::2", 7) == [400] * 10 + [429] * 2  # one network
    assert attempts("192.0.2.3", 7) == [400] * 5 + [429] * 2  # in total
    assert attempts("192.0.2.9", 3, b"right") == [200] * 3  # not locked out by others
    now = time.monotonic()
    monkeypatch.setattr("cribo.explorer.access.time.monotonic", lambda: now + 61)
    assert attempts("192.0.2.1", 1, b"right") == [200]
