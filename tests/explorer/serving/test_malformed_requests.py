"""Malformed requests, drawn with a fixed seed: no error of the server, and no growing memory."""

import io
import random
import socket
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
from PIL import Image
from tests.commands import Commands
from tests.explorer.serving.conftest import Running, draw, png
from tests.explorer.serving.test_command import start

PATHS = [*["/segment"] * 9, "/features", "/memory", "/health", "/openapi.json", "/", "/x/../segment"]
METHODS = ["POST"] * 40 + ["GET", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "X"]
QUERIES = [
    "",
    "",
    "?format=png",
    "?format=",
    "?format=%00",
    "?format=polygons",
    "?format[]=1",
    "?%ff=%ff",
    "?format=vector",
]
TYPES = [
    *["application/octet-stream"] * 6,
    *(
        "application/octet-stream",
        "application/octet-stream",
        "application/octet-stream",
        "image/png",
        "IMAGE/",
        "image",
    ),
    *("multipart/form-data", "multipart/form-data; boundary=x", "multipart/form-data; boundary=x; charset=none"),
    *("text/plain", "", "application/json", "a/b; c", "multipart/form-data; boundary=", "application/dicom"),
]
ACCEPTS = ["*/*", "image/png", "application/json", "", ",", "image/*;q=0", "text/html", "*", "application/octet-stream"]
PARTS = [
    *(b"", b"--x\r\n", b"--x--", b'Content-Disposition: form-data; name="image"; filename="a"\r\n', b"\r\n\r\n", b"\0"),
    *(
        b'Content-Disposition: form-data; name="image"\r\n',
        b"Content-Disposition: a\r\n",
        b"Content-Type: \xff\r\n",
        b"a",
    ),
    *(b"Content-Transfer-Encoding: x\r\n", b"--y\r\n", b":" * 50),
]
HEADERS = [
    *(("content-length", "-1"), ("content-length", "x"), ("content-length", "5"), ("transfer-encoding", "chunked")),
    *(("host", "evil.example"), ("host", "[::1"), ("origin", "null"), ("authorization", "Bearer x"), ("expect", "1")),
    *(("range", "bytes=0-"), ("content-encoding", "gzip"), ("cookie", "a" * 3000), ("sec-fetch-site", "cross-site")),
    *(("connection", "upgrade"), ("upgrade", "websocket"), ("accept-encoding", "\xff"), ("x\0", "y"), ("", "")),
]


def pictures() -> list[bytes]:
    """Return a small picture in each format that Pillow writes."""
    files = []
    for kind in ("PNG", "JPEG", "TIFF", "GIF", "BMP", "WEBP", "PPM", "JPEG2000"):
        file = io.BytesIO()
        Image.fromarray(draw(5, (24, 32))).save(file, kind)
        files.append(file.getvalue())
    return files


PICTURES = pictures()


def body(draw: random.Random) -> bytes:
    """Return a damaged picture, or a malformed form."""
    if draw.random() < 0.25:
        return b"".join(draw.choices([*PARTS, PICTURES[0]], k=draw.randrange(8)))
    content = bytearray(draw.choice(PICTURES))
    for _ in range(draw.choice([0, 0, 1, 12])):
        content[draw.randrange(len(content)) if draw.random() < 0.5 else draw.randrange(64)] = draw.randrange(256)
    kept = draw.random() < 0.7
    return bytes(content if kept else content[: draw.randrange(len(content))])


def request(draw: random.Random) -> tuple[bytes, bool]:
    """Return a request as the bytes of a connection, and whether its header is that of its body."""
    content = body(draw)
    headers = {"host": "127.0.0.1", "content-length": str(len(content)), "connection": "close"}
    headers |= {"content-type": draw.choice(TYPES), "accept": draw.choice(ACCEPTS)}
    is_complete = draw.random() < 0.7
    if not is_complete:
        headers |= [draw.choice(HEADERS)]
    for name in draw.sample(["content-type", "accept"], draw.randrange(2)):
        del headers[name]
    first = f"{draw.choice(METHODS)} {draw.choice(PATHS)}{draw.choice(QUERIES)} HTTP/1.1"
    if draw.random() < 0.03:
        is_complete = False
        first = draw.choice(["GET", "GET / HTTP/9", "\0", "POST /segment", "GET http://evil.example/ HTTP/1.1"])
    lines = [first, *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + content, is_complete


def statuses(address: str, draw: random.Random, count: int) -> Counter[int]:
    """Send malformed requests, and count the statuses of the responses; 0 for none."""
    found: Counter[int] = Counter()
    place = urlsplit(address)
    for _ in range(count):
        with socket.create_connection((place.hostname, place.port), timeout=60) as connection:
            sent, is_complete = request(draw)
            connection.sendall(sent)
            if not is_complete:  # the server may be waiting for the rest
                connection.shutdown(socket.SHUT_WR)
            answer = b""
            try:
                while part := connection.recv(65_536):
                    answer += part
            except ConnectionResetError:
                pass
        found[int(answer[9:12]) if answer.startswith(b"HTTP/1.1 ") else 0] += 1
        assert b"Traceback" not in answer
    return found


def test_malformed_requests_are_no_errors_of_the_server(running: Running) -> None:
    found = statuses(running.address, random.Random(63), 500)
    assert not [status for status in found if status >= 500], found
    assert min(found[status] for status in (200, 400, 403, 404, 405, 406, 415, 422)) > 0, found
    assert found[200] > 20
    assert running.segment(png(draw(3))).status_code == 200


@pytest.mark.slow
def test_ten_thousand_malformed_requests_leave_no_memory_behind(
    memory_file: Path, run_folder: Path, commands: Commands, record_property: Callable[[str, object], None]
) -> None:
    # Allocators keep what the largest picture needed, so that is small.
    server = start(commands, "--memory", memory_file, "--backbone", run_folder, "--max_megapixels", 0.02)
    process = psutil.Process(server.command.pid)
    draws = random.Random(64)
    statuses(server.address, draws, 1000)  # fills caches, and pools of threads and memory
    before = process.memory_info().rss
    found = statuses(server.address, draws, 10_000)
    grown = process.memory_info().rss - before
    record_property("statuses", dict(found))
    record_property("MiB before, grown", (before / 2**20, grown / 2**20))
    assert not [status for status in found if status >= 500], found
    assert grown < 50 * 2**20
    assert "Traceback" not in server.command.output
    assert httpx.get(f"{server.address}/health").json()["status"] == "ok"
    assert server.stop() == 130
