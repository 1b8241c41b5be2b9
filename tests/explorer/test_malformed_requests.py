"""Malformed requests, drawn with a fixed seed, get no error of the server and leave no traceback in its log."""

import json
import random
from typing import Any

import httpx
import pytest
from tests.explorer.conftest import Served, Visitor

REQUESTS = 300
ODD: list[Any] = [
    *(None, True, -1, 0, 1.5, 2**63, 10**400, float("nan"), float("inf"), "", "x", "\0", "\ud800", "a" * 5000, "é"),
    *([], {}, [[]], [None] * 50, {"path": ""}, {"path": 3}, {"path": "\0"}, {"path": "/etc/passwd"}, {"url": "file:"}),
    *({"__type__": "update"}, {"_type": "gradio.FileData"}, {"meta": {"_type": "gradio.FileData"}}),
    *("../../x", "%00", "%ff", "0", "c999999999", {"index": [1, 2]}, {"key": {}, "time": "nan", "runs": [1, -1]}),
]
POSTS = [
    *("queue/join", "run/predict", "api/x", "call/nearest", "call/v2/nearest", "cancel", "reset", "upload", "stream/x"),
    *("component_server", "process_recording", "vibe-edit", "undo-vibe-edit", "run-history/connect", "stream/x/close"),
]
GETS = [
    *("queue/data", "queue/status", "heartbeat/", "heartbeat/%00", "file=", "file/", "proxy=", "info", "openapi.json"),
    *("upload_progress", "call/x/y", "custom_component/a/b/c/d", "stream/a/b/c/playlist.m3u8", "stream/a/b/1/c.ts"),
    *("deep_link", "dev/reload", "runs", "app_id", "user", "token", "vibe-code", "theme.css", "startup-events"),
]
PAGES = ["/", "/config", "/login", "/logout", "/assets/", "/static/", "/svelte/", "/pwa_icon/", "/monitoring/x"]
NAMES = ["fn_index", "data", "session_hash", "event_data", "api_name", "event_id", "trigger_id", "batched", "path"]
TYPES = ["application/json", "multipart/form-data", "multipart/form-data; boundary=x", "text/plain", "", "a; charset=x"]


def drawn(draw: random.Random, functions: list[int]) -> tuple[str, str, dict[str, Any]]:
    """Return the method, the path and the rest of a request; numbers and strings of its JSON may be invalid."""
    odd = draw.choice(ODD)
    text = str(draw.choice(ODD)).encode("utf-8", "replace").decode()[:200]
    query = {draw.choice([*NAMES, "upload_id", "deep_link", "__theme", "view"]): text}
    headers = {"content-type": draw.choice(TYPES)} if draw.random() < 0.3 else {"content-type": "application/json"}
    kind = draw.random()
    if kind < 0.35:
        place = draw.choice([*(f"/gradio_api/{route}" for route in GETS), *PAGES])
        end = draw.choice(["", "", "/", f"/{draw.choice(['..', '%2e%2e', '%00', '%ff', '1e999'])}"])
        return "GET", place + end, {"params": query}
    if kind < 0.6:  # nearly valid
        question = {"data": [odd, draw.choice(ODD), draw.choice(ODD)], "fn_index": draw.choice(functions)}
        question |= {"session_hash": "malformed", "event_data": draw.choice(ODD)}
        question[draw.choice(NAMES)] = draw.choice(ODD)
        if draw.random() < 0.3:
            del question[draw.choice(list(question))]
        content = json.dumps(question).encode()
    elif kind < 0.75:
        content = json.dumps({draw.choice(NAMES): odd, draw.choice(NAMES): draw.choice(ODD)}).encode()
    elif kind < 0.85:
        broken = [b"", b"{", b"[" * 9000, b"\xff\xfe", b'{"a":1e999}', b"--x\r\n\r\n", b"--x--", b"null", b"[]"]
        content = draw.choice(broken)
    else:
        content = json.dumps(odd).encode()
    place = f"/gradio_api/{draw.choice(POSTS)}" if draw.random() < 0.95 else draw.choice(PAGES)
    method = draw.choice(["POST"] * 9 + ["PUT", "DELETE", "PATCH", "OPTIONS"])
    return method, place, {"content": content, "headers": headers, "params": query if draw.random() < 0.2 else None}


@pytest.mark.slow
def test_malformed_requests_are_no_errors_of_the_server(served: Served, visitor: Visitor) -> None:
    draw, failed = random.Random(55), []
    before = len(served.command.output)
    for _ in range(REQUESTS):
        method, path, options = drawn(draw, list(visitor.functions.values()))
        try:  # some answers are endless streams: the first line suffices
            with visitor.client.stream(method, path, **options, timeout=httpx.Timeout(60, read=60)) as answer:
                if answer.status_code >= 500:
                    failed.append((answer.status_code, method, path, options))
        except (httpx.RemoteProtocolError, httpx.InvalidURL, httpx.LocalProtocolError):
            failed.append(("no answer", method, path, options))
    assert failed == []
    assert "Traceback" not in served.command.output[before:]
    assert visitor.ask("nearest", None, 2, 1, 3)[0] == 1
