"""Requests that the middleware accepts or rejects, tested with a server that accepts everything."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("starlette")
from starlette.formparsers import MultiPartException

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
    assert (answer.status_code, answer.text.partition(":")[0]) == (
        413,
        "The upload has 0.1 MB, but at most 0.01 MB are allowed",
    )
    assert ask("POST", "/gradio_api/queue/join", content=b"0" * 2_000_000).status_code == 413
    (uploads.folder / "earlier.png").write_bytes(b"0" * 195_000)
    answer = ask("POST", "/gradio_api/upload", content=b"0" * 9_000)
    assert (answer.status_code, answer.text.partition(";")[0]) == (507, "The uploads exceed 0 MB in total")


def test_concurrent_uploads_share_the_quota(guard: Guard, uploads: Uploads) -> None:
    """None of them has a Content-Length, and each alone would fit."""
    (uploads.folder / "earlier.png").write_bytes(b"0" * 80_000)

    async def slowly() -> AsyncIterator[bytes]:
        for _ in range(10):
            yield b"0" * 6_000
            await asyncio.sleep(0.01)

    async def upload() -> list[httpx.Response | BaseException]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=guard), base_url=HOME) as client:
            sent = [client.post("/gradio_api/upload", content=slowly()) for _ in range(4)]
            return await asyncio.gather(*sent, return_exceptions=True)

    answers = asyncio.run(upload())
    # Gradio turns these exceptions into error responses.
    assert sum(isinstance(answer, MultiPartException) for answer in answers) >= 2
    assert "The uploads exceed" in str(next(answer for answer in answers if isinstance(answer, Exception)))


def test_other_host_names_and_origins_are_refused(ask: Callable[..., httpx.Response]) -> None:
    assert ask("GET", "/", headers={"host": "localhost:99"}).status_code == 200
    for number in (
        "192.0.2.7:7860",
        "192.0.2.7",
        "[2001:db8::7]:7860",
        "[::1]",
    ):  # an IP address, so DNS rebinding is impossible
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
