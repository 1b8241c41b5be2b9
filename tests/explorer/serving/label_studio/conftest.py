"""Fixtures: a host that serves what Label Studio serves, and requests as Label Studio 1.23 sends them."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest
from tests.explorer.serving.conftest import draw, png

from cribo.explorer.serving.label_studio.host import Host

KEY = "0123456789abcdef0123456789abcdef01234567"
PERSONAL = "eyJhbGciOiJIUzI1NiJ9.eyJ0b2tlbl90eXBlIjoicmVmcmVzaCJ9.c2lnbmF0dXJl"


class Studio:
    """A host with files and an export, for requests with a key.

    Attributes:
        files: content by path; a string is the address of a redirect.
        tasks: the export of each project.
        paths: the paths that were requested.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes | str] = {}
        self.tasks: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.access = "first"
        studio = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *words: object) -> None:  # noqa: A002
                pass

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                known = self.path == "/api/token/refresh/" and body == {"refresh": PERSONAL}
                self.reply(200 if known else 401, json.dumps({"access": studio.access}).encode())

            def do_GET(self) -> None:
                studio.paths.append(self.path)
                if self.headers.get("authorization") not in (f"Token {KEY}", f"Bearer {studio.access}"):
                    self.reply(401, b"{}")
                elif self.path.startswith("/api/projects/1/export"):
                    self.reply(200, json.dumps(studio.tasks).encode())
                elif isinstance(found := studio.files.get(self.path), str):
                    self.reply(302, b"", location=found)
                else:
                    self.reply(404 if found is None else 200, found or b"")

            def reply(self, status: int, content: bytes, **headers: str) -> None:
                self.send_response(status)
                for name, value in {**headers, "content-length": str(len(content))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        """Address of the host."""
        return f"http://127.0.0.1:{self.server.server_port}"

    def opened(self, key: str | None = KEY) -> Host:
        """Return the host as the server opens it, with low limits."""
        return Host(self.url, key, max_bytes=50_000, timeout=5)

    def upload(self, number: int, image: np.ndarray | None = None) -> str:
        """Add an image, and return its address in a task."""
        address = f"/data/upload/1/6766a4e{number % 10}-{number}.png"
        self.files[address] = png(draw(number) if image is None else image)
        return address


@pytest.fixture
def studio() -> Iterator[Studio]:
    """Serve what Label Studio serves."""
    host = Studio()
    yield host
    host.server.shutdown()
    host.server.server_close()


TAGS = {"brushlabels": "BrushLabels", "polygonlabels": "PolygonLabels", "rectanglelabels": "RectangleLabels"}


def config(*types: str, labels: tuple[str, ...] = ("right",), field: str = "image") -> str:
    """Return a labelling configuration."""
    listed = "".join(f'<Label value="{label}" background="red"/>' for label in labels)
    tags = "".join(f'<{TAGS[kind]} name="{kind}" toName="img">{listed}</{TAGS[kind]}>' for kind in types)
    return f'<View><Image name="img" value="${field}"/>{tags}</View>'


def region(label: str = "right", **place: float) -> dict[str, Any]:
    """Return a polygon, by default around the right half of an image of 64 x 48 pixels."""
    left, right = place.get("left", 50.0), place.get("right", 100.0)
    return {
        "original_width": 64,
        "original_height": 48,
        "image_rotation": 0,
        "value": {
            "points": [[left, 0], [right, 0], [right, 100], [left, 100]],
            "closed": True,
            "polygonlabels": [label],
        },
        "id": "Jx2Fq",
        "from_name": "polygonlabels",
        "to_name": "img",
        "type": "polygonlabels",
        "origin": "manual",
    }


def annotation(number: int, *regions: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return an annotation."""
    return {"id": number, "result": [*regions], "was_cancelled": False, "lead_time": 3.0, "project": 1, **changes}


def task(number: int, address: str, **changes: Any) -> dict[str, Any]:
    """Return a task."""
    return {"id": number, "data": {"image": address}, "meta": {}, "project": 1, "inner_id": number, **changes}


def project(schema: str) -> dict[str, Any]:
    """Return a project, of whose fields a few count."""
    return {"id": 1, "title": "streets", "label_config": schema}


def webhook(
    action: str, own: dict[str, Any], of: dict[str, Any], schema: str = config("polygonlabels")
) -> dict[str, Any]:
    """Return the content of the webhook for an annotation."""
    return {"action": action, "annotation": own, "task": of, "project": project(schema)}


def prediction(*tasks: dict[str, Any], schema: str = config("polygonlabels")) -> dict[str, Any]:
    """Return the content of a request for predictions."""
    params = {"login": None, "password": None, "context": None}
    return {"tasks": [*tasks], "project": "1.1795921929", "label_config": schema, "params": params}


def setup(schema: str) -> dict[str, Any]:
    """Return the content of a setup."""
    return {
        "project": "1.1795921929",
        "schema": schema,
        "hostname": "http://localhost:8090",
        "access_token": KEY,
        "extra_params": None,
    }
