"""Requests and responses: the same labels and features as without a server, and an error for each invalid request."""

import io
import json
import struct
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tifffile
import torch
from PIL import Image
from tests.explorer.serving.conftest import Running, Serve, add_example, draw, png

from cribo.data.labelled.regions import polygon
from cribo.data.labelled.scaling import Scaling
from cribo.explorer.painting import from_runs
from cribo.features import BackboneSource
from cribo.features.memory import SegmentationMemory


def bomb(width: int, height: int) -> bytes:
    """Return a small PNG whose header announces many pixels."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        body = kind + content
        return struct.pack(">I", len(content)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = zlib.compress(b"\0" * 10_000)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def test_labels_are_those_of_the_memory(running: Running, expected: SegmentationMemory) -> None:
    image = draw(7, (40, 90))
    found, content = expected.segment(image), png(image)
    answer = running.segment(content)
    assert answer.status_code == 200
    about = answer.json()
    assert torch.equal(from_runs(about["runs"], (40, 90), 2), found.labels)
    assert about["shares"] == dict(found.shares)
    assert (about["width"], about["height"], about["classes"]) == (90, 40, ["left", "right"])
    assert about["confidence"]["mean"] == pytest.approx(float(found.confidence.mean()))
    form = running.client.post("/segment", files={"image": ("a.png", content)})
    assert form.json() == about
    for labels in (
        running.segment(content, params={"format": "png"}),
        running.segment(content, headers={"accept": "text/html, image/png;q=0.9"}),
    ):
        assert labels.headers["content-type"] == "image/png"
        assert np.array_equal(np.array(Image.open(io.BytesIO(labels.content))), found.labels.numpy())
    grey = np.array(Image.open(io.BytesIO(running.segment(content, params={"format": "confidence"}).content)))
    assert np.abs(grey / 255 - found.confidence.numpy()).max() < 0.01
    drawn, whole = np.full((40, 90), 255), Scaling.unscaled((40, 90))
    for each in running.segment(content, params={"format": "polygons"}).json()["polygons"]:
        outer, *holes = (polygon([(float(x), float(y)) for x, y in ring])(whole) for ring in each["rings"])
        mask = outer & ~np.any(holes, axis=0) if holes else outer
        drawn[mask] = about["classes"].index(each["class"])
    assert np.array_equal(drawn, found.labels.numpy())


def test_pixels_without_data_have_no_label(running: Running) -> None:
    image, file = draw(7), io.BytesIO()
    image[:20, :30] = 0
    tifffile.imwrite(file, image, photometric="rgb", extratags=[(42113, "s", 0, "0", True)])
    answer = running.segment(file.getvalue(), params={"format": "png"})
    assert answer.status_code == 200, answer.text
    labels = np.array(Image.open(io.BytesIO(answer.content)))
    assert (labels[:20, :30] == 255).all()
    assert (labels[20:] != 255).all()


def test_features_are_those_of_the_memory(running: Running, expected: SegmentationMemory) -> None:
    image = draw(8)
    content, headers = png(image), {"content-type": "image/png"}
    answer = running.client.post("/features", content=content, headers=headers)
    patches = np.load(io.BytesIO(answer.content), allow_pickle=False)
    [own] = expected.encode([torch.from_numpy(image).permute(2, 0, 1)], expected.fit().probe.blocks)
    assert np.allclose(patches, own.numpy(), atol=1e-5)
    vector = running.client.post("/features", content=content, headers={**headers, "accept": "application/json"}).json()
    assert len(vector["global"]) == expected.encoder.backbone.embed_dim
    assert vector["patches"] == [*patches.shape]


def test_the_memory_is_described(running: Running, expected: SegmentationMemory) -> None:
    about = running.client.get("/memory").json()
    assert [each["name"] for each in about["examples"]] == expected.names
    assert about["examples"][0]["classes"] == pytest.approx({"left": 0.5, "right": 0.5})
    assert (about["classes"], about["fingerprint"]) == (expected.classes, expected.fingerprint)
    assert about["settings"]["size"] == 64
    health = running.client.get("/health").json()
    assert (health["status"], health["memory"], health["active"]) == ("ok", "current", 0)


PICTURE = png(draw(3))
RAW = {"content-type": "application/octet-stream"}
FORM = {"content-type": "multipart/form-data; boundary=x"}


@pytest.mark.parametrize(
    ("request_", "status", "named"),
    [
        (("POST", "/segment", {"content": b"", "headers": RAW}), 422, "empty"),
        (("POST", "/segment", {"content": b"no picture", "headers": RAW}), 422, "JPEG"),
        (("POST", "/segment", {"content": PICTURE[:200], "headers": RAW}), 422, ""),
        (("POST", "/segment", {"content": png(draw(0))[:30] + b"\0" * 99, "headers": RAW}), 422, ""),
        (("POST", "/segment", {"content": bomb(30_000, 30_000), "headers": RAW}), 413, "--max_megapixels"),
        (("POST", "/segment", {"content": bomb(1, 1), "headers": RAW}), 422, "2 x 2"),
        (("POST", "/features", {"content": b"0" * 120_000, "headers": RAW}), 413, "--max_megabytes"),
        (("POST", "/segment", {"content": iter([b"0" * 60_000] * 2), "headers": RAW}), 413, "--max_megabytes"),
        (("POST", "/segment", {"content": PICTURE, "headers": {"content-type": "text/plain"}}), 415, "text/plain"),
        (("POST", "/segment", {"data": {"image": "a"}}), 415, "-F image=@FILE"),
        (("POST", "/segment", {"files": {"picture": ("a.png", PICTURE)}}), 400, "'image'"),
        (("POST", "/segment", {"files": [("image", PICTURE), ("image", PICTURE)]}), 400, "-F image=@FILE"),
        (("POST", "/segment", {"content": PICTURE, "headers": FORM}), 400, "-F image=@FILE"),
        (("POST", "/segment", {"content": PICTURE, "headers": {"content-type": "multipart/form-data"}}), 400, "form"),
        (("POST", "/segment?format=jpeg", {"content": PICTURE, "headers": RAW}), 400, "runs, polygons"),
        (("POST", "/segment", {"content": PICTURE, "headers": {**RAW, "accept": "text/html"}}), 406, "image/png"),
        (("GET", "/segment", {}), 405, "POST /segment"),
        (("DELETE", "/memory", {}), 405, "GET /memory"),
        (("GET", "/", {}), 404, "POST /segment"),
        (("GET", "/../etc/passwd", {}), 404, "POST /segment"),
        (("GET", "/health", {"headers": {"host": "rebound.example"}}), 403, "--host"),
        (("POST", "/segment", {"content": PICTURE, "headers": {**RAW, "origin": "http://evil.example"}}), 403, "evil"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_an_invalid_request_gets_an_error(
    running: Running, request_: tuple[str, str, dict[str, Any]], status: int, named: str
) -> None:
    method, path, options = request_
    answer = running.client.request(method, path, **options)
    assert answer.status_code == status, answer.text
    assert named in answer.json()["error"]
    assert "Traceback" not in answer.text
    assert running.segment(PICTURE).status_code == 200


def test_elongated_pictures_are_refused_by_their_patches(serving: Serve) -> None:
    with serving(megapixels=100) as running:
        file = io.BytesIO()
        Image.new("L", (120_000, 2)).save(file, "PNG")
        answer = running.segment(file.getvalue())
        assert (answer.status_code, "patches" in answer.json()["error"]) == (413, True)


def test_a_token_is_required(serving: Serve) -> None:
    with serving(token="sesame") as running:
        assert running.client.get("/health").status_code == 200
        for header in ({}, {"authorization": "Bearer sesam"}, {"authorization": "Basic sesame"}):
            answer = running.segment(PICTURE, headers=header)
            assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
        named = {"host": "service.example", "authorization": "Bearer sesame"}
        assert running.segment(PICTURE, headers=named).status_code == 200
        for _ in range(10):
            answer = running.client.get("/memory", headers=[(b"authorization", b"Bearer \xe9")])
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "60")


def test_the_rate_of_a_client_is_limited(serving: Serve) -> None:
    with serving(max_per_minute=3) as running:
        statuses = [running.client.get("/health").status_code for _ in range(4)]
        assert statuses == [200, 200, 200, 429]


def test_images_in_a_batch_get_their_own_labels(serving: Serve, expected: SegmentationMemory) -> None:
    """Images that wait while the thread is busy are computed together; one that fails does not disturb the others."""
    images = [draw(seed, size) for seed in range(4) for size in ((48, 64), (64, 48))]
    with serving(batch_size=8) as running:
        sizes, begin = [], threading.Event()
        segment = running.service.memory.segment

        def counted(images: Any) -> Any:
            sizes.append(len(images))
            return segment(images)

        running.service.memory.segment = counted
        blocked = running.service._batches.submit(lambda items: [begin.wait()], None)
        with ThreadPoolExecutor(9) as pool:
            answers = [pool.submit(running.segment, png(image)) for image in images]
            failing = pool.submit(running.segment, b"no picture")
            while running.service._batches._waiting.qsize() < len(images):
                time.sleep(0.01)
            begin.set()
            found = [answer.result().json() for answer in answers]
            assert failing.result().status_code == 422
        assert blocked.done()
        assert sizes == [8]
    for image, about in zip(images, found, strict=True):
        own = expected.segment(image)
        assert torch.equal(from_runs(about["runs"], image.shape[:2], 2), own.labels)


def test_more_pictures_than_the_limit_are_refused(serving: Serve) -> None:
    with serving(max_waiting=2) as running, ThreadPoolExecutor(2) as pool:
        begin = threading.Event()
        running.service._batches.submit(lambda items: [begin.wait()], None)
        answers = [pool.submit(running.segment, PICTURE) for _ in range(2)]
        while running.service.active < 2:
            time.sleep(0.01)
        answer = running.segment(PICTURE)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        begin.set()
        assert [each.result().status_code for each in answers] == [200, 200]
        assert running.segment(PICTURE).status_code == 200


def test_slow_requests_end(serving: Serve) -> None:
    with serving(timeout=0.5) as running:

        def slowly() -> Any:
            yield PICTURE[:100]
            time.sleep(1.5)
            yield PICTURE[100:]

        assert running.segment(slowly()).status_code == 408
        begin = threading.Event()
        running.service._batches.submit(lambda items: [begin.wait()], None)
        assert running.segment(PICTURE).status_code == 503
        begin.set()
        assert running.segment(PICTURE).status_code == 200


def test_the_image_of_a_client_that_disconnects_is_not_computed(serving: Serve) -> None:
    with serving() as running:
        begin = threading.Event()
        running.service._batches.submit(lambda items: [begin.wait()], None)
        seen: list[int] = []
        running.service.memory.segment = lambda images: seen.append(len(images)) or []
        with pytest.raises(httpx.ReadTimeout):
            running.segment(PICTURE, timeout=0.5)
        while running.service.active:
            time.sleep(0.01)
        begin.set()
        running.service._batches.submit(lambda items: items, None).result(60)  # after all others
        assert seen == []


def test_a_memory_that_another_process_changes_is_read_again(serving: Serve, own_file: Path, run_folder: Path) -> None:
    with serving(own_file) as running:
        before = running.segment(PICTURE).json()["memory"]
        memory = SegmentationMemory.load(own_file, BackboneSource(str(run_folder)), device="cpu")
        add_example(memory, 2)
        memory.save(own_file)
        assert running.client.get("/health").json()["memory"] == "changed"
        assert running.segment(PICTURE).json()["memory"] == memory.fingerprint != before
        assert len(running.client.get("/memory").json()["examples"]) == 3
        content = own_file.read_bytes()
        for damaged in (content[:-100], b"", None):
            own_file.unlink() if damaged is None else own_file.write_bytes(damaged)
            assert running.segment(PICTURE).json()["memory"] == memory.fingerprint
            health = running.client.get("/health").json()
            assert (health["status"], health["memory"]) == ("degraded", "damaged")
            assert str(own_file.parent) not in str(health)  # which needs no token
            assert own_file.name in running.client.get("/memory").json()["problem"]
        own_file.write_bytes(content)
        assert running.segment(PICTURE).status_code == 200
        assert running.client.get("/health").json()["status"] == "ok"


def test_the_description_is_valid_openapi(running: Running) -> None:
    described = running.client.get("/openapi.json").json()
    assert set(described["paths"]) == {"/segment", "/features", "/memory", "/health", "/openapi.json"}
    validator = pytest.importorskip("openapi_spec_validator")
    validator.validate(described)


def test_responses_match_their_schemas(running: Running) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    paths = running.client.get("/openapi.json").json()["paths"]
    pictures = [("/segment", {"format": name}) for name in ("runs", "polygons")] + [("/features", {"format": "vector"})]
    for path, query in pictures:
        answer = running.client.post(path, params=query, content=PICTURE, headers=RAW).json()
        schema = paths[path]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
        jsonschema.validate(answer, schema)
    for path in ("/memory", "/health"):
        schema = paths[path]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
        jsonschema.validate(json.loads(running.client.get(path).content), schema)
