"""Which requests reach the page's server, tried against one that answers everything."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.explorer.conftest import SECRET

from cribo.explorer.config import Limits
from cribo.explorer.guard import Guard
from cribo.explorer.uploads import Uploads

HOME = "http://127.0.0.1:7860"


async def answer_everything(scope: Any, receive: Any, send: Any) -> None:
    """Serve any file that is asked for, and repeat any body."""
    path = scope["path"].partition("file=")[2]
    body = Path(path).read_bytes() if path else (await receive()).get("body", b"")
    headers = [(b"x-frame-options", b"ALLOW"), (b"Access-Control-Allow-Origin", b"*")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@pytest.fixture
def uploads(tmp_path: Path) -> Uploads:
    """A folder with a picture, a secret beside it, and links to the secret in it."""
    folder = tmp_path / "uploads"
    (folder / "inside").mkdir(parents=True)
    (tmp_path / "secret.txt").write_text(SECRET)
    (folder / "picture.png").write_bytes(b"a picture")
    (folder / "link.png").symlink_to(tmp_path / "secret.txt")
    (folder / "up").symlink_to(tmp_path)
    return Uploads(folder, Limits(megabytes=0.01))


@pytest.fixture
def ask(uploads: Uploads) -> Callable[..., httpx.Response]:
    """Asks a guarded server."""
    guard = Guard(answer_everything, uploads, 20_000, frozenset({"127.0.0.1", "localhost"}))

    def call(method: str, path: str, **options: Any) -> httpx.Response:
        async def request() -> httpx.Response:
            transport = httpx.ASGITransport(app=guard)
            async with httpx.AsyncClient(transport=transport, base_url=HOME) as client:
                return await client.request(method, path, **options)

        return asyncio.run(request())

    return call


def test_files_of_the_folder_are_served(ask: Callable[..., httpx.Response], uploads: Uploads) -> None:
    answer = ask("GET", f"/gradio_api/file={uploads.folder}/picture.png")
    assert answer.content == b"a picture"
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    assert answer.headers.get_list("x-frame-options") == ["DENY"]
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(
    "path",
    [
        "{folder}/../secret.txt",
        "{folder}/inside/../../secret.txt",
        "{folder}/%2e%2e/secret.txt",
        "{folder}/..%2fsecret.txt",
        "{folder}/up/secret.txt",
        "{folder}/link.png",
        "{folder}2/../secret.txt",
        "{secret}",
        "/etc/passwd",
        "file://{secret}",
        "{folder}/picture.png%00",
        "~/.bashrc",
        "",
    ],
)
def test_no_file_outside_of_the_folder_is_served(
    ask: Callable[..., httpx.Response], uploads: Uploads, path: str
) -> None:
    secret = uploads.folder.parent / "secret.txt"
    answer = ask("GET", "/gradio_api/file=" + path.format(folder=uploads.folder, secret=secret))
    assert answer.status_code in (403, 404)
    assert SECRET not in answer.text


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/gradio_api/proxy=http://example.org/"),
        ("GET", "/gradio_api/file/etc/passwd"),
        ("GET", "/static/../../secret"),
        ("GET", "/assets/%2e%2e/secret"),
        ("GET", "/svelte/x.js"),
        ("GET", "/monitoring"),
        ("GET", "/gradio_api/dev/reload"),
        ("GET", "/docs"),
        ("POST", "/gradio_api/component_server"),
        ("POST", "/gradio_api/vibe-edit"),
        ("POST", "/gradio_api/run/predict"),
        ("PUT", "/gradio_api/upload"),
        ("OPTIONS", "/gradio_api/queue/join"),
    ],
)
def test_what_the_page_does_not_need_is_not_there(ask: Callable[..., httpx.Response], method: str, path: str) -> None:
    assert ask(method, path, content=b"{}" if method == "POST" else None).status_code in (403, 404, 405)


def test_too_much_is_not_taken(ask: Callable[..., httpx.Response], uploads: Uploads) -> None:
    assert ask("POST", "/gradio_api/upload", content=b"0" * 9_000).status_code == 200
    answer = ask("POST", "/gradio_api/upload", content=b"0" * 90_000)
    assert (answer.status_code, answer.text) == (413, "0.1 MB are more than 0.01 MB.\n")
    assert ask("POST", "/gradio_api/queue/join", content=b"0" * 2_000_000).status_code == 413
    (uploads.folder / "earlier.png").write_bytes(b"0" * 19_000)
    assert ask("POST", "/gradio_api/upload", content=b"0" * 9_000).status_code == 507


def test_questions_name_files_of_the_folder_only(ask: Callable[..., httpx.Response], uploads: Uploads) -> None:
    def question(path: str) -> httpx.Response:
        body = {"data": [1, {"deep": [{"path": path, "meta": {"_type": "gradio.FileData"}}]}], "fn_index": 0}
        return ask("POST", "/gradio_api/queue/join?", content=json.dumps(body))

    passed = question(f"{uploads.folder}/picture.png")
    assert passed.status_code == 200
    assert json.loads(passed.content)["fn_index"] == 0
    for path in (
        "/etc/passwd",
        "http://127.0.0.1:9/x.png",
        f"{uploads.folder}/link.png",
        f"{uploads.folder}/../secret.txt",
    ):
        assert question(path).status_code == 403, path
    assert ask("POST", "/gradio_api/queue/join", content=b"[" * 100_000).status_code == 400
    assert ask("POST", "/gradio_api/queue/join", content=b"no json").status_code == 400


def test_other_names_and_other_pages_are_refused(ask: Callable[..., httpx.Response]) -> None:
    assert ask("GET", "/", headers={"host": "localhost:99"}).status_code == 200
    for number in ("192.0.2.7:7860", "192.0.2.7", "[2001:db8::7]:7860", "[::1]"):  # no name, so nobody's to lead astray
        assert ask("GET", "/", headers={"host": number}).status_code == 200, number
    for name in ("rebound.example:7860", "192.0.2.7.example", "[rebound.example]", ""):
        answer = ask("GET", "/", headers={"host": name})
        assert (answer.status_code, "open the page by its address" in answer.text) == (403, True), name
    elsewhere = {"sec-fetch-site": "cross-site"}
    assert ask("POST", "/gradio_api/queue/join", content=b"{}", headers=elsewhere).status_code == 403


@pytest.mark.parametrize(
    ("origin", "host", "own"),
    [
        ("http://127.0.0.1:7860", "127.0.0.1:7860", True),
        ("http://192.0.2.7", "192.0.2.7", True),
        ("https://192.0.2.7", "192.0.2.7:443", True),  # a proxy that speaks https
        ("http://LocalHost:7860", "localhost:7860", True),
        ("http://[2001:db8::7]:7860", "[2001:db8::7]:7860", True),
        ("http://evil.example", "192.0.2.7:7860", False),
        ("http://evil.example:7860", "192.0.2.7:7860", False),
        ("http://192.0.2.7", "192.0.2.7:7860", False),  # another server of the same machine
        ("http://192.0.2.7:8888", "192.0.2.7:7860", False),
        ("http://192.0.2.7:7860.evil.example", "192.0.2.7:7860", False),
        ("chrome-extension://192.0.2.7:7860", "192.0.2.7:7860", False),
        ("null", "192.0.2.7:7860", False),
        ("", "192.0.2.7:7860", False),
    ],
)
def test_only_the_page_itself_is_answered(
    ask: Callable[..., httpx.Response], uploads: Uploads, origin: str, host: str, own: bool
) -> None:
    said = {"origin": origin, "host": host}  # and no Sec-Fetch-Site, as browsers do to http elsewhere
    answers = [
        ask("POST", "/gradio_api/upload", content=b"0", headers=said),
        ask("POST", "/gradio_api/queue/join", content=b"{}", headers=said),
        ask("GET", "/gradio_api/queue/data", headers=said),
        ask("GET", f"/gradio_api/file={uploads.folder}/picture.png", headers=said),
    ]
    assert {answer.status_code for answer in answers} == {200 if own else 403}
    preflight = ask("OPTIONS", "/gradio_api/queue/join", headers={**said, "access-control-request-method": "POST"})
    assert preflight.status_code == (405 if own else 403)


def test_a_link_from_a_page_that_does_not_say_its_name_opens_the_page(ask: Callable[..., httpx.Response]) -> None:
    assert ask("GET", "/", headers={"origin": "null"}).status_code == 200
    assert ask("GET", "/config", headers={"origin": "null"}).status_code == 403
    assert ask("POST", "/", content=b"{}", headers={"origin": "null"}).status_code == 403
