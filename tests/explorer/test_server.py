"""The server over HTTP, started by the command."""

import re
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from tests.commands import Commands
from tests.explorer.conftest import COLOURS, SECRET, Refusal, Served, Visitor, draw_square, encoded, serve

from cribo.cli import main
from cribo.explorer.server import host_names

COLOUR = ("--backbone", "mean-colour")


def test_paths_outside_the_uploads_are_refused(served: Served, visitor: Visitor, tmp_path: Path, squares: Path) -> None:
    (tmp_path / "secret.png").write_text(SECRET)
    sent = visitor.send(draw_square(COLOURS["red"], (0, 0)))
    folder = str(Path(sent["path"]).parents[1])
    up = "/".join([".."] * 12)
    places = [
        f"{tmp_path}/secret.png",
        f"{folder}/{up}{tmp_path}/secret.png",
        f"{folder}/{up.replace('..', '%2e%2e')}{tmp_path}/secret.png",
        f"{folder}/{up.replace('/', '%2f')}%2f{str(tmp_path).replace('/', '%2f')}%2fsecret.png",
        f"{squares}/0-red.png",
        str(served.command.folder / "log"),
        "/etc/passwd",
        "..%5c..%5csecret.png",
    ]
    routes = (
        "/gradio_api/file=",
        "/file=",
        "/gradio_api/file/",
        "/file/",
        "/static/",
        "/assets/",
        "/gradio_api/proxy=",
    )
    for route in routes:
        for place in places:
            answer = visitor.client.get(route + place)
            assert answer.status_code in (400, 403, 404), (route, place)
            assert SECRET not in answer.text
            assert "root:" not in answer.text
    assert visitor.client.get("/gradio_api/file=" + sent["path"]).status_code == 200
    for place in places[:1]:
        question = {"data": [{**sent, "path": place}], "fn_index": visitor.functions["features"], "session_hash": "x"}
        assert visitor.client.post("/gradio_api/queue/join", json=question).status_code == 403


def test_a_file_named_like_a_path_is_stored_in_the_folder(visitor: Visitor) -> None:
    sent = visitor.send(draw_square(COLOURS["red"], (0, 0)), "../../../../tmp/evil.png")
    assert "cribo-explore-" in Path(sent["path"]).parts[-3]
    assert visitor.ask("features", sent, None)[1:3] == [3, 3]


def test_concurrent_requests_get_their_own_responses(served: Served) -> None:
    places = [(16 * (n % 4), 16 * (n // 8)) for n in range(20)]
    names = [list(COLOURS)[n % 4] for n in range(20)]

    def visit(number: int) -> tuple[str, str]:
        visitor = Visitor(served.address, f"parallel{number}")
        sent = visitor.send(draw_square(COLOURS[names[number]], places[number]))
        said = visitor.ask("nearest", sent, 0, 1, 1)[2]
        row = places[number][0] // 16
        likeness = visitor.ask("likeness", sent, None, row, places[number][1] // 16)
        return said, likeness[3]

    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(visit, range(20)))
    for number, (said, alike) in enumerate(answers):
        assert f"-{names[number]}.png, cosine similarity 1.00" in said
        assert f"Patch in row {places[number][0] // 16} of 6, column {places[number][1] // 16} of 6" in alike


def test_shown_pictures_match_the_requests(visitor: Visitor) -> None:
    number, picture, said, nearest = visitor.ask("nearest", None, 2, 1, 3)
    assert number == 1
    assert said.startswith("Object 1 of 2 in 0-red.png")
    shown = visitor.picture(picture)
    assert shown.getpixel((60, 60)) == COLOURS["red"]
    first = visitor.picture(nearest[0]["image"])
    assert nearest[0]["caption"] == "1. 1.00 1-red.png"
    assert first.getpixel((first.width // 2, int(first.height * 0.75))) == COLOURS["red"]
    thumbnails = visitor.ask("page", 99)[1]
    assert [each["caption"] for each in thumbnails][:3] == ["0: 0-blue.png", "1: 0-green.png", "2: 0-red.png"]


@pytest.mark.parametrize(
    ("what", "data", "said"),
    [
        ("nearest", (None, 99, 0, 3), "The image must be 0 to 7, got 99."),
        ("nearest", (None, "../../etc/passwd", 0, 3), "Not a number"),
        ("nearest", ({"path": "", "url": "http://127.0.0.1:9/"}, 0, 0, 3), "No picture was uploaded yet"),
        ("likeness", (None, None, 0, 0), "No picture was uploaded yet"),
        ("upload", ("visitor-with-errors", None), "No picture was uploaded yet"),
        ("open_number", ("visitor-with-errors", 99), "The picture must be 0 to 7, got 99."),
        ("open_image", ("../../etc/passwd",), "Not a number"),
    ],
)
def test_errors_are_shown_as_messages(visitor: Visitor, what: str, data: tuple[object, ...], said: str) -> None:
    with pytest.raises(Refusal, match=re.escape(said)):
        visitor.ask(what, *data)


def test_examples_are_separate_per_visitor_and_saved(served: Served, visitor: Visitor) -> None:
    assert served.examples is not None
    shutil.rmtree(served.examples, ignore_errors=True)
    own, others = "visitor-of-this-test", "another-visitor-of-it"
    other = Visitor(served.address, "another")
    for each, name in ((visitor, own), (other, others)):
        canvas, advice, *_ = each.ask("begin", name)
        assert advice.startswith("Name a class")
        assert canvas["predicted"] is None
    visitor.ask("classes", own, event={"names": ["square", "ground"]})
    canvas = visitor.ask("open_number", own, 2)[0]
    assert (canvas["name"], canvas["width"], canvas["height"]) == ("0-red.png", 96, 96)
    row = [0, 44, 255, 36, 1, 16]  # 44 pixels of the square, and 16 of the ground
    painting = {"key": canvas["key"], "time": 1, "runs": [*row * 44, 255, 96 * 52]}
    canvas, advice, saved, _ = visitor.ask("confirm", own, event=painting)
    assert re.fullmatch(r"1 example, \d+ patches: square, ground\.", advice)
    assert saved == "All examples are saved in “examples”."
    assert sum(canvas["predicted"][1::2]) == 96 * 96
    assert (served.examples / "labels" / "0-red.png").is_file()
    canvas = other.ask("open_number", others, 2)[0]
    assert canvas["predicted"] is None
    assert canvas["classes"] == []
    sent = other.send(draw_square(COLOURS["red"], (48, 32)), "mine.png")
    assert other.ask("upload", others, sent)[0]["name"] == "mine.png"
    with pytest.raises(Refusal, match="There are no examples yet"):
        other.ask("download_examples", others)
    with pytest.raises(Refusal, match="The visitor is unknown"):
        other.ask("begin", "")
    proposal = visitor.ask("propose", own, event={"key": canvas["key"], "corners": [0, 0, 60, 60], "number": 4})[0]
    assert (proposal["key"], proposal["number"], sum(proposal["proposed"][1::2])) == (canvas["key"], 4, 96 * 96)
    with pytest.raises(Refusal, match="The marked place is invalid"):
        visitor.ask("propose", own, event={"key": "c0"})
    with pytest.raises(Refusal, match="The painting is invalid"):
        other.ask("confirm", others, event={"key": "c0"})


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/gradio_api/proxy=http://example.org/"),
        ("GET", "/gradio_api/file=https://example.org/x.png"),
        ("GET", "/gradio_api/file=HTTPS:/example.org/x.png"),
        ("GET", "/gradio_api/file/etc/passwd"),
        ("GET", "/static/../../secret"),
        ("GET", "/assets/%2e%2e/secret"),
        ("GET", "/monitoring"),
        ("GET", "/docs"),
        ("GET", "/openapi.json"),
        ("POST", "/gradio_api/run/predict"),
        ("POST", "/gradio_api/vibe-edit"),
        ("PUT", "/gradio_api/upload"),
        ("OPTIONS", "/gradio_api/queue/join"),
    ],
)
def test_unused_routes_are_refused(visitor: Visitor, method: str, path: str) -> None:
    body = {"data": [], "fn_index": 0, "session_hash": "x", "prompt": "x"}
    answer = visitor.client.request(method, path, json=body if method == "POST" else None)
    assert answer.status_code in (400, 403, 404, 405), answer.text
    assert "root:" not in answer.text


@pytest.mark.parametrize("route", ["component_server", "process_recording", "an_unknown_route"])
def test_files_are_accepted_by_the_upload_route_only(visitor: Visitor, route: str) -> None:
    files = {"video": ("x.mp4", b"0" * 100), "files": ("x.png", b"0" * 100)}
    data = {"data": "{}", "component_id": "1", "session_hash": "x", "fn_name": "accept_blobs"}
    answer = visitor.client.post(f"/gradio_api/{route}", files=files, data=data)
    assert (answer.status_code, answer.text) == (400, "Invalid request: the body must be JSON.\n")


def test_requests_may_refer_to_uploaded_files_only(visitor: Visitor, squares: Path) -> None:
    sent = visitor.send(draw_square(COLOURS["red"], (0, 0)))
    for path in ("/etc/passwd", f"{squares}/0-red.png", "http://127.0.0.1:9/x.png", f"{sent['path']}/../../../x"):
        for route in ("queue/join", "run/features", "call/features", "api/features", "component_server"):
            question = {"data": [1, {"deep": [{**sent, "path": path}]}], "fn_index": 0, "session_hash": "x"}
            answer = visitor.client.post(f"/gradio_api/{route}", json=question)
            assert (answer.status_code, answer.text) == (
                403,
                "Only files uploaded to this page can be used.\n",
            )
    for body in (b"[" * 100_000, b"no json"):
        assert visitor.client.post("/gradio_api/queue/join", content=body).status_code == 400


def files_of(visitor: Visitor) -> set[Path]:
    """Return all uploaded files."""
    sent = visitor.send(draw_square(COLOURS["red"], (0, 0)))
    return {path for path in Path(sent["path"]).parents[1].rglob("*") if path.is_file()}


def form_of(size: int) -> tuple[dict[str, str], bytes]:
    """Return headers and body of a form with a file of a given size."""
    request = httpx.Request("POST", "http://x/", files={"files": ("large.png", b"0" * size)})
    return {"content-type": request.headers["content-type"]}, request.read()


def test_the_size_of_an_upload_is_checked_while_receiving(visitor: Visitor) -> None:
    before = files_of(visitor)
    headers, body = form_of(1_500_000)  # of 1 MB that are allowed

    def chunks() -> Iterator[bytes]:
        yield from (body[start : start + 50_000] for start in range(0, len(body), 50_000))

    announced = visitor.client.post("/gradio_api/upload", content=body, headers=headers)
    assert (announced.status_code, announced.text) == (
        413,
        "The upload has 1.5 MB, but at most 1 MB are allowed: make the picture smaller, or start the page with a "
        "larger --max_megabytes.\n",
    )
    for more in ({}, {"content-length": "10", "transfer-encoding": "chunked"}):
        answer = visitor.client.post("/gradio_api/upload", content=chunks(), headers={**headers, **more})
        assert answer.status_code in (400, 413), answer.text
    assert files_of(visitor) == before

    small, content = form_of(900_000)
    assert visitor.client.post("/gradio_api/upload", content=iter([content]), headers=small).status_code == 200


def test_an_upload_of_several_files_counts_as_one(visitor: Visitor) -> None:
    before = files_of(visitor)
    files = [("files", (f"{n}.png", b"%d" % n * 200_000)) for n in range(8)]
    request = httpx.Request("POST", "http://x/", files=files)
    headers = {"content-type": request.headers["content-type"]}
    answer = visitor.client.post("/gradio_api/upload", content=iter([request.read()]), headers=headers)
    assert answer.status_code in (400, 413)
    assert files_of(visitor) == before


def test_an_interrupted_upload_is_removed(visitor: Visitor) -> None:
    before = files_of(visitor)

    def eventually(kept: bool) -> bool:
        for _ in range(100):
            if (files_of(visitor) == before) is not kept:
                return True
            time.sleep(0.05)
        return False

    headers, body = form_of(900_000)
    address = visitor.client.base_url
    with socket.create_connection((address.host, address.port or 80)) as connection:
        lines = [
            "POST /gradio_api/upload HTTP/1.1",
            f"Host: {address.host}",
            f"Content-Type: {headers['content-type']}",
            f"Content-Length: {len(body)}",
        ]
        connection.sendall("\r\n".join([*lines, "", ""]).encode() + body[:500_000])
        assert eventually(kept=True)
    assert eventually(kept=False)


def test_headers_forbid_other_origins(visitor: Visitor) -> None:
    headers = visitor.client.get("/").headers
    assert "default-src 'self'" in headers["content-security-policy"]
    assert "http" not in headers["content-security-policy"]
    assert headers["referrer-policy"] == "no-referrer"
    assert visitor.client.get("/", headers={"host": "rebound.example"}).status_code == 403
    assert visitor.client.get("/config").json().get("analytics_enabled") is False
    own = visitor.client.get("/config", headers={"origin": str(visitor.client.base_url).rstrip("/")})
    assert own.status_code == 200
    assert not [name for name in own.headers if name.startswith("access-control-")]
    assert visitor.client.get("/config", headers={"origin": "http://evil.example"}).status_code == 403
    linked = visitor.client.get("/", headers={"host": "192.0.2.7:7860", "origin": "null"})  # as from a sandboxed page
    assert linked.status_code == 200
    assert not [name for name in linked.headers if name.startswith("access-control-")]


def test_a_public_page_accepts_the_names_of_its_machine() -> None:
    own = {"localhost", socket.gethostname().lower(), socket.getfqdn().lower()}
    assert host_names("0.0.0.0") == host_names("::") == own
    assert host_names("Lab.example") == {"localhost", "lab.example"}


@pytest.mark.slow
def test_a_password_is_required_and_sigterm_removes_the_files(tmp_path: Path, commands: Commands) -> None:
    prelude = f"import tempfile; tempfile.tempdir = {str(tmp_path)!r}"
    served = serve(commands, "--backbone", "mean-colour", "--password", "open sesame", prelude=prelude)
    assert len(list(tmp_path.glob("cribo-*"))) == 2
    client = httpx.Client(base_url=served.address, timeout=300)
    picture = {"files": ("picture.png", encoded(draw_square(COLOURS["red"], (0, 0))))}
    question = {"data": [None], "fn_index": 0, "session_hash": "x"}
    assert client.get("/config").status_code == 401
    assert client.post("/gradio_api/upload", files=picture).status_code == 401
    assert client.post("/gradio_api/queue/join", json=question).status_code == 401
    right, wrong = ({"username": "cribo", "password": word} for word in ("open sesame", "sesame"))
    assert client.post("/login", data=wrong).status_code == 400
    assert client.post("/login", data={**wrong, "password": "0" * 100_000}).status_code == 413
    assert client.post("/login", data=right).status_code == 200
    assert client.get("/config").status_code == 200
    assert client.get("/logout").status_code == 405  # as from a link on another page
    assert client.get("/config").status_code == 200
    assert client.post("/logout").status_code == 302
    assert client.get("/config").status_code == 401
    assert client.post("/login", data=right).status_code == 200
    assert client.post("/gradio_api/upload", files=picture).status_code == 200
    assert served.stop(signal.SIGTERM) == 143
    assert "Traceback" not in served.command.output
    assert not list(tmp_path.glob("cribo-*"))


def test_only_pages_for_other_machines_need_a_password(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[str | None] = []
    monkeypatch.setattr("cribo.explorer.run.explore", lambda *given, password, **named: asked.append(password))
    for words in ([], ["--host", "0.0.0.0"], ["--host", "0.0.0.0", "--no_password"], ["--host", "::1"]):
        assert main(["explore", "--backbone", "mean-colour", *words]) == 0
    monkeypatch.setenv("CRIBO_PASSWORD", "of the environment")
    (tmp_path / "password").write_text("of a file\n")
    for words in ([], ["--password_file", str(tmp_path / "password")], ["--no_password"], ["--password", "given"]):
        assert main(["explore", "--backbone", "mean-colour", *words]) == 0
    assert asked[4:] == ["of the environment", "of a file", None, "given"]
    local, others, open_to_all, also_local = asked[:4]
    assert local is open_to_all is also_local is None
    assert others is not None
    assert len(others) >= 12


# ------------------------------------------------------------------ errors before the server starts


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command that must fail and return its error message."""

    def call(*words: str) -> str:
        assert main(["explore", "--port", "0", "--device", "cpu", *words]) == 2
        said = capsys.readouterr()
        assert "Open" not in said.out
        return said.err

    return call


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ((), "--run DIR, --db DIR or --backbone SOURCE is required"),
        (("--run", "."), "is not a run (no config.yaml)"),
        (("--run", "street"), "there is no 'street'"),
        (("--db", "."), "contains no database of objects"),
        ((*COLOUR, "--images", "."), "no images in"),
        ((*COLOUR, "--limit", "-1"), "limit must be >= 0, got -1"),
        ((*COLOUR, "--password", "x", "--no_password"), "exclude each other"),
        ((*COLOUR, "--password", ""), "--password must not be empty"),
        ((*COLOUR, "--password", " "), "--password must not be empty"),
        ((*COLOUR, "--password_file", "empty"), "--password_file must not be empty"),
        ((*COLOUR, "--password_file", "none"), "--password_file"),
        ((*COLOUR, "--max_megabytes", "0"), "max_megabytes must be > 0, got 0"),
        ((*COLOUR, "--port", "70000"), "port must be 0 to 65535, got 70000"),
        ((*COLOUR, "--host", "no.such.host.invalid"), "unknown host"),
        ((*COLOUR, "--host", "192.0.2.1"), "cannot listen on 192.0.2.1"),
    ],
)
def test_invalid_options_are_refused(
    refused: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], named: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").write_text("\n")
    assert named in refused(*words)


def test_a_database_of_another_backbone_is_refused(
    refused: Callable[..., str], database: Path, run_folder: Path
) -> None:
    assert "was built with the backbone mean-colour" in refused("--db", str(database), "--backbone", str(run_folder))


def test_an_address_in_use_is_reported_with_advice(refused: Callable[..., str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        said = refused(*COLOUR, "--port", port)
        assert f"cannot listen on 127.0.0.1:{port} (Address already in use): use another --port, or --port 0" in said
