"""No secret of a URL reaches a file, the output or the log."""

import base64
import json
import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image
from rich.console import Console

from cribo.base.errors import DataError
from cribo.base.files import append_json, write_json, write_text
from cribo.base.redaction import is_masked, mask_messages, masked, without_secrets
from cribo.cli import main
from cribo.cli.doctor import examine
from cribo.data.sources.collection import open_collection, read_named

CANARY = "canary-Xq7"
USER = "visitor-Xq8"
TOKEN = "canary-Xq9"
SECRETS = (CANARY, USER, TOKEN)


class _Locked(SimpleHTTPRequestHandler):
    """A folder over HTTP, for requests with the password."""

    def do_GET(self) -> None:
        expected = base64.b64encode(f"{USER}:{CANARY}".encode()).decode()
        if self.headers.get("authorization") == f"Basic {expected}":
            super().do_GET()
        else:
            self.send_error(401)

    def do_HEAD(self) -> None:
        self.do_GET()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (the name of the base class)
        """Print nothing."""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve four pictures, and yield the address without the password."""
    pytest.importorskip("aiohttp")
    folder = tmp_path_factory.mktemp("served")
    (folder / "pictures").mkdir()
    for number in range(4):
        pixels = np.random.default_rng(number).integers(0, 255, (64, 64, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "pictures" / f"{number}.png")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Locked, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}/pictures"
        server.shutdown()


@pytest.fixture
def url(address: str) -> str:
    """Return the address with the password."""
    return f"http://{USER}:{CANARY}@{address}"


@pytest.fixture
def quiet(capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Run a command; neither its output nor a file in the folder of the test may contain a secret."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr("cribo.data.sources.storage.RETRY_DELAYS", (0.01,))
    monkeypatch.setattr("cribo.data.sources.storage._OPENING_DELAYS", (0.01, 0.01))

    def call(*words: object) -> int:
        status = main([str(word) for word in words])
        said = capfd.readouterr()
        assert not [secret for secret in SECRETS if secret in said.out + said.err], said
        assert files_with_secrets(tmp_path) == []
        return status

    return call


def files_with_secrets(folder: Path) -> list[str]:
    """Return the files below a folder whose name or content has a secret."""
    return [
        str(path)
        for path in folder.rglob("*")
        if any(secret in str(path.relative_to(folder)) for secret in SECRETS)
        or (path.is_file() and any(secret.encode() in path.read_bytes() for secret in SECRETS))
    ]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://me:secret@host/x", "https://***@host/x"),
        ("https:/me:secret@host/x", "https:/***@host/x"),  # as a path
        ("'s3://key:a/b?c@host'", "'s3://key:a/b?c@host'"),  # no URL: these characters must be quoted
        ("https://me:secret@[::1]:80/x?sig=secret&x=1", "https://***@[::1]:80/x?sig=***&x=1"),
        ("simplecache::https://me:s@host/x.tar", "simplecache::https://***@host/x.tar"),
        ("https://h/x?X-Amz-Signature=a%2Fb&X-Amz-Date=2&y=3", "https://h/x?X-Amz-Signature=***&X-Amz-Date=***&y=3"),
        ("max retries exceeded with url: /models?token=secret", "max retries exceeded with url: /models?token=***"),
        ("hf://owner/name@v1/x.pth", "hf://owner/name@v1/x.pth"),
        ("C:/me@home/x", "C:/me@home/x"),
        ("s3://bucket, mail me@host", "s3://bucket, mail me@host"),
        ("/photographs/a@2x.jpg", "/photographs/a@2x.jpg"),
    ],
)
def test_secrets_of_urls_are_masked(text: str, shown: str) -> None:
    assert without_secrets(text) == shown
    assert without_secrets(shown) == shown
    assert masked({"a": [text, {"b": (text, 1)}]}) == {"a": [shown, {"b": (shown, 1)}]}


def test_records_have_no_secrets(tmp_path: Path) -> None:
    url = f"https://{USER}:{CANARY}@host/x?token={TOKEN}"
    write_json(tmp_path / "a.json", {"command": f"cribo embed '{url}'", "sources": [url], url: 1})
    append_json(tmp_path / "b.jsonl", {"source": url})
    write_text(tmp_path / "c.md", f"`cribo embed {url}`")
    assert files_with_secrets(tmp_path) == []
    assert json.loads((tmp_path / "a.json").read_text())["sources"] == ["https://***@host/x?token=***"]


def test_messages_of_libraries_have_no_secrets(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    mask_messages()
    url = f"https://{USER}:{CANARY}@host/x?token={TOKEN}"
    log = logging.getLogger("some.library")
    try:
        raise ValueError(url)
    except ValueError:
        log.exception("cannot open %s", url)
    log.warning("100 %% of %s", url)
    assert len(caplog.records) == 2
    assert "cannot open https://***@host/x?token=***" in caplog.text
    assert not [secret for secret in SECRETS if secret in caplog.text]
    assert CANARY not in warnings.formatwarning(f"retry {url}", UserWarning, "x.py", 1)


@pytest.mark.slow
def test_embed_and_index_record_no_secrets(quiet: Callable[..., int], url: str, tmp_path: Path) -> None:
    pytest.importorskip("lance")
    colour = ("--backbone", "mean-colour", "--device", "cpu")
    assert quiet("embed", url, *colour, "--out", "result") == 0
    assert json.loads((tmp_path / "result" / "about.json").read_text())["images"].startswith("http://***@127.0.0.1")
    assert quiet("embed", url, *colour, "--out", "result", "--resume") == 0
    assert quiet("embed", f"{url}/missing", *colour, "--out", "other") == 2

    assert quiet("index", "--images", url, *colour, "--size", "64", "--db", "objects.db") == 0
    assert quiet("index", "--images", url, "--db", "objects.db", "--device", "cpu") == 0  # the same images
    assert quiet("index", "--db", "objects.db", "--device", "cpu") == 2  # the password must be given again
    search = ("search", "--db", "objects.db", "--image", "0.png", "--device", "cpu")
    assert quiet(*search, "--images", url, "--out", "found") == 0
    assert (tmp_path / "found" / "results.json").is_file()


def test_a_list_of_urls_has_names_without_secrets(address: str, tmp_path: Path) -> None:
    signed = f"http://{USER}:{CANARY}@{address}/0.png?token="
    (tmp_path / "list.txt").write_text(f"{signed}{TOKEN}\n")
    images = open_collection(tmp_path / "list.txt")
    name = images.name(0)
    assert name == f"http://***@{address}/0.png?token=***"
    content = images.read(0).content
    (tmp_path / "list.txt").write_text(f"{signed}another\n")  # tokens change
    assert open_collection(tmp_path / "list.txt").name(0) == name
    assert read_named(tmp_path / "list.txt", name).content == content
    with pytest.raises(DataError, match="credentials"):
        open_collection(f"http://***@{address}")


def test_a_run_records_no_secrets(quiet: Callable[..., int], url: str, tmp_path: Path) -> None:
    """The configuration is complete but for the password; the images need not exist for that."""
    from cribo.pretraining.loading import dump_config, load_config

    text = dump_config(load_config("quickstart", {"data.root": url}))
    assert not [secret for secret in SECRETS if secret in text]
    assert is_masked(yaml.safe_load(text)["data"]["root"])
    assert quiet("pretrain", "--data.root", f"{url}/missing", "--out", "runs") == 2


@pytest.mark.parametrize(
    "words",
    [
        ("embed", "{url}/missing", "--backbone", "mean-colour"),
        ("embed", "{url}", "--backbone", "{url}/x.pth?token=" + TOKEN),
        ("index", "--images", "{url}/missing", "--backbone", "mean-colour", "--db", "x.db"),
        ("segment", "--images", "{url}/missing", "--examples", "{url}", "--backbone", "mean-colour"),
        ("adapt", "{url}", "--backbone", "{url}/x.pth"),
        ("distill", "{url}", "--teacher", "{url}/x.pth", "--student", "{url}/y.pth"),
        ("evaluate", "dense-nn", "--backbone", "{url}/x.pth", "--data", "{url}"),
        ("benchmark", "{url}", "--backbone", "{url}/x.pth"),
        ("study", "{url}"),
        ("profile", "--data.root", "{url}/missing"),
        ("merge", "{url}", "--out", "y"),
        ("search", "--db", "{url}", "--image", "{url}"),
        ("explore", "--backbone", "mean-colour", "--images", "{url}", "--port", "0"),
        ("explore", "--db", "{url}", "--port", "0"),
        ("figures", "--run", "{url}"),
        ("export", "--backbone", "{url}/x.pth", "--to", "timm"),
        ("shard", "{url}/missing", "--out", "y"),
    ],
    ids=lambda words: " ".join(words[:1]),
)
def test_errors_have_no_secrets(quiet: Callable[..., int], url: str, words: tuple[str, ...]) -> None:
    assert quiet(*(word.format(url=url) for word in words)) != 0


def test_doctor_shows_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", f"https://{USER}:{CANARY}@hub.example/models?token={TOKEN}")
    section = next(each for each in examine(Console(quiet=True)) if each.title == "Environment")
    assert section.facts["HF_ENDPOINT"] == "https://***@hub.example/models?token=***"
