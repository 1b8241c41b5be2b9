"""CVAT's command line runs the example functions against a local server.

CVAT itself needs several containers. The server in these tests has one task and records the uploaded annotations.
"""

import io
import json
import threading
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest
from PIL import Image
from tests.commands import Commands
from torchvision.transforms.v2.functional import to_pil_image

pytest.importorskip("cvat_cli", reason="needs cvat-cli (pip install cvat-cli)")
import cvat_sdk.auto_annotation as cvataa
from cvat_sdk.masks import decode_mask, encode_mask
from examples.tools.cvat_tracker import Tracker

from cribo import SegmentationMemory
from cribo.data.labelled.regions import corners, polygon
from cribo.data.scenes import Scenes

FUNCTIONS = Path(__file__).parents[2] / "examples" / "tools"
CLI = "from cvat_cli.__main__ import main; sys.exit(main(sys.argv[1:]))"
TASK, FIRST_LABEL = 7, 40
SCENES = Scenes(9)

Cvat = Callable[..., tuple[str, Any]]
"""Runs cvat-cli with the given arguments; returns path and body of the last change that the server received."""


@dataclass
class StandIn:
    """A server with a single task.

    Attributes:
        images: images of the task.
        labels: names of its labels.
        received: path and body of each request that changes something.
        url: address of the server.
    """

    images: Sequence[Image.Image]
    labels: Sequence[str]
    received: list[tuple[str, Any]] = field(default_factory=list)
    url: str = ""

    def answer(self, path: str, query: dict[str, list[str]]) -> Any:
        """Return the JSON or the bytes of an answer."""
        if path == "/api/server/about":
            return dict.fromkeys(("name", "description", "logo_url", "subtitle"), "") | {"version": "2.80.0"}
        if path == f"/api/tasks/{TASK}":
            about = {"id": TASK, "size": len(self.images), "data_chunk_size": len(self.images)}
            about |= {"data_original_chunk_type": "imageset", "updated_date": "2026-01-01T00:00:00Z"}
            about |= {"jobs": {"completed": 0, "validation": 0}, "labels": {}, "organization": None}
            return about
        if path == "/api/labels":
            labels = [{"id": FIRST_LABEL + number, "name": name} for number, name in enumerate(self.labels)]
            every = [{**label, "type": "any", "attributes": [], "sublabels": []} for label in labels]
            return {"count": len(every), "results": every, "next": None, "previous": None}
        if path == f"/api/tasks/{TASK}/data/meta":
            sizes = [{"width": image.width, "height": image.height, "related_files": 0} for image in self.images]
            frames = [{"name": f"{number}.png", **size} for number, size in enumerate(sizes)]
            return {"chunks_updated_date": "2026-01-01T00:00:00Z", "frames": frames, "deleted_frames": []}
        assert (path, query["type"]) == (f"/api/tasks/{TASK}/data/", ["chunk"])
        chunk = io.BytesIO()
        with zipfile.ZipFile(chunk, "w") as archive:
            for number, image in enumerate(self.images):
                with archive.open(f"{number:06}.png", "w") as file:
                    image.save(file, "PNG")
        return chunk.getvalue()


@pytest.fixture
def server() -> Iterator[StandIn]:
    stand_in = StandIn([to_pil_image(SCENES.load(8))], SCENES.classes)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            address = urlsplit(self.path)
            self.respond(stand_in.answer(address.path, parse_qs(address.query)))

        def receive(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            stand_in.received.append((urlsplit(self.path).path, body))
            self.respond({"id": 1, "name": "cribo", "version": 1, "tags": [], "shapes": [], "tracks": []})

        do_PATCH = do_PUT = do_POST = receive  # noqa: N815

        def respond(self, content: Any) -> None:
            body = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/octet-stream" if body is content else "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as serving:
        stand_in.url = f"http://127.0.0.1:{serving.server_port}"
        threading.Thread(target=serving.serve_forever, args=(0.02,), daemon=True).start()
        yield stand_in
        serving.shutdown()


@pytest.fixture(scope="module")
def memory_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    memory = SegmentationMemory("mean-colour", classes=list(SCENES.classes), device="cpu")
    for number in range(8):
        memory.add(SCENES.load(number), SCENES.labels(number), name=SCENES.name(number))
    memory.save(file := tmp_path_factory.mktemp("memory") / "memory.safetensors")
    return file


@pytest.fixture
def cvat(commands: Commands, server: StandIn, tmp_path: Path) -> Cvat:
    def run(*words: object) -> tuple[str, Any]:
        environment = {"XDG_CACHE_HOME": str(tmp_path), "CVAT_ACCESS_TOKEN": "token"}
        done = commands.fork_program(CLI, "--server-host", server.url, *words, environment=environment)
        assert done.wait(120) == 0, done.output
        return server.received[-1]

    return run


def annotate(memory_file: Path, *words: str) -> list[object]:
    given = ["-p", f"memory=str:{memory_file}", "-p", "backbone=str:mean-colour", "-p", "device=str:cpu"]
    return ["task", "auto-annotate", TASK, "--function-file", FUNCTIONS / "cvat_function.py", *given, *words]


def drawn(shapes: list[dict[str, Any]], width: int, height: int) -> np.ndarray:
    """Draw shapes from the lowest z-order up, as CVAT does; 255 where there is none."""
    labels = np.full((height, width), 255, dtype=np.uint8)
    for shape in sorted(shapes, key=lambda shape: shape["z_order"]):
        if shape["type"] == "mask":
            pixels = decode_mask(shape["points"], image_width=width, image_height=height)
        else:
            pixels = polygon(corners(shape["points"]))(height, width)
        labels[pixels] = shape["label_id"] - FIRST_LABEL
    return labels


@pytest.mark.parametrize("kind", ["mask", "polygon"])
def test_a_task_gets_the_labels_of_the_memory(cvat: Cvat, server: StandIn, memory_file: Path, kind: str) -> None:
    path, body = cvat(*annotate(memory_file, *(["--conv-mask-to-poly"] if kind == "polygon" else [])))
    assert path == f"/api/tasks/{TASK}/annotations/"
    shapes = body["shapes"]
    assert {shape["type"] for shape in shapes} == {kind}
    assert {shape["source"] for shape in shapes} == {"auto"}
    found = SegmentationMemory.load(memory_file, "mean-colour", device="cpu").segment(server.images[0])
    labels = drawn(shapes, *server.images[0].size)
    assert (labels != 255).all()
    assert (labels == found.labels.numpy()).mean() > 0.85
    if kind == "mask":
        areas = [sum(shape["points"][1:-4:2]) for shape in shapes]
        assert min(areas) >= 12
        mean = np.average([shape["score"] for shape in shapes], weights=areas)
        assert mean == pytest.approx(float(found.confidence.mean()), abs=1e-4)


def test_a_threshold_leaves_regions_out(cvat: Cvat, memory_file: Path) -> None:
    shapes = cvat(*annotate(memory_file))[1]["shapes"]
    scores = sorted(shape["score"] for shape in shapes)
    middle = scores[len(scores) // 2]
    kept = cvat(*annotate(memory_file, "--conf-threshold", str(middle)))[1]["shapes"]
    assert sorted(shape["score"] for shape in kept) == [score for score in scores if score >= middle]
    assert len(kept) < len(shapes)


def test_each_object_of_a_class_is_a_shape(cvat: Cvat, server: StandIn, tmp_path: Path) -> None:
    """Two discs that touch."""
    rows, columns = np.indices((64, 128))
    labels = np.zeros((64, 128), dtype=np.uint8)
    for x in (36, 90):
        labels[(rows - 32) ** 2 + (columns - x) ** 2 <= 27**2] = 1
    image = Image.fromarray(np.array([[30, 30, 90], [220, 40, 40]], dtype=np.uint8)[labels])
    memory = SegmentationMemory("mean-colour", classes=["background", "disc"], device="cpu")
    memory.add(image, labels, name="discs")
    memory.save(file := tmp_path / "discs.safetensors")
    server.images, server.labels = [image], ["disc"]
    whole = cvat(*annotate(file))[1]["shapes"]
    split = cvat(*annotate(file, "-p", "instances=str:disc"))[1]["shapes"]
    assert (len(whole), len(split)) == (1, 2)
    assert (drawn(whole, 128, 64) == drawn(split, 128, 64)).all()


def test_classes_without_a_label_are_left_out_on_request(cvat: Cvat, server: StandIn, memory_file: Path) -> None:
    server.labels = SCENES.classes[-3:]
    shapes = cvat(*annotate(memory_file, "--allow-unmatched-labels"))[1]["shapes"]
    assert shapes
    assert {shape["label_id"] for shape in shapes} <= {FIRST_LABEL, FIRST_LABEL + 1, FIRST_LABEL + 2}


def test_the_tracker_is_registered(cvat: Cvat) -> None:
    path, body = cvat(
        *("function", "create-native", "cribo", "--function-file", FUNCTIONS / "cvat_tracker.py"),
        *("-p", "backbone=str:mean-colour", "-p", "device=str:cpu"),
    )
    assert path == "/api/functions"
    assert body["kind"] == "tracker"
    assert body["supported_shape_types"] == ["mask", "polygon"]


class Context(cvataa.TrackingFunctionShapeContext):
    """The context of a tracked shape."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    @property
    def original_shape_type(self) -> str:
        return self.kind


def frame(left: int | None) -> tuple[Image.Image, np.ndarray]:
    """Return a frame with a red square at column `left`, or without a square, and the pixels of the square."""
    pixels = np.zeros((256, 320), dtype=bool)
    if left is not None:
        pixels[96:160, left : left + 64] = True
    noise = np.random.default_rng(left or 0).integers(0, 30, (256, 320, 3), dtype=np.uint8)
    noise[pixels, 0] += 200
    return Image.fromarray(noise), pixels


@pytest.mark.parametrize("kind", ["mask", "polygon"])
def test_an_object_is_tracked_until_it_is_gone(kind: str) -> None:
    tracker, context = Tracker("mean-colour", device="cpu"), Context(kind)
    image, pixels = frame(32)
    corners = [32, 96, 96, 96, 96, 160, 32, 160]
    marked = cvataa.TrackableShape(type=kind, points=encode_mask(pixels) if kind == "mask" else corners)
    state = tracker.init_tracking_state(context, tracker.preprocess_image(context, image), marked)
    for left in (48, 80, 120, 150):
        image, pixels = frame(left)
        shape = tracker.track(context, tracker.preprocess_image(context, image), state)
        assert shape is not None
        assert shape.type == kind
        found = drawn([{"type": kind, "points": shape.points, "z_order": 0, "label_id": FIRST_LABEL}], 320, 256) == 0
        assert (found & pixels).sum() / (found | pixels).sum() > 0.8
    assert tracker.track(context, tracker.preprocess_image(context, frame(None)[0]), state) is None
