"""The ML backend: predictions, and a memory that grows, with requests as Label Studio sends them."""

import base64
import io
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import tifffile
import torch
from tests.commands import Commands
from tests.explorer.serving.conftest import Running, Serve, add_example, draw, png
from tests.explorer.serving.label_studio.conftest import (
    KEY,
    Studio,
    annotation,
    config,
    prediction,
    project,
    region,
    setup,
    task,
    webhook,
)
from tests.explorer.serving.test_command import start
from tests.explorer.serving.test_routes import bomb

from cribo.data.labelled.label_studio import read_annotation
from cribo.data.labelled.regions import RegionSet, draw_regions
from cribo.data.labelled.scaling import Scaling
from cribo.features import BackboneSource
from cribo.features.memory import SegmentationMemory
from cribo.features.memory.storage import memory_lock, read_memory

HALVES = ("left", "right")


@pytest.fixture
def backend(serving: Serve, own_file: Path, studio: Studio) -> Iterator[Running]:
    """Serve a copy of the memory to Label Studio."""
    with serving(own_file, tool=studio.opened()) as running:
        yield running


@pytest.fixture
def fresh(serving: Serve, tmp_path: Path, studio: Studio) -> Iterator[Running]:
    """Serve a memory that does not exist yet."""
    with serving(tmp_path / "new.safetensors", tool=studio.opened()) as running:
        yield running


def post(running: Running, path: str, content: dict[str, Any]) -> Any:
    """Send a request that must succeed, and wait until its annotations are learned."""
    answer = running.client.post(path, json=content)
    assert answer.status_code == 200, answer.text
    assert running.backend is not None
    running.backend.learner.join()
    return answer.json()


def submit(running: Running, address: str, number: int = 1, **changes: Any) -> None:
    """Submit an annotation of the right half of a task."""
    own = annotation(10 + number, region(), **changes)
    post(running, "/webhook", webhook("ANNOTATION_CREATED", own, task(number, address)))


def names(running: Running) -> list[str]:
    """Return the names of the examples in the file."""
    return [example.name.partition(" ")[0] for example in read_memory(running.service.memory.file).examples]


def drawn(found: dict[str, Any], labels: dict[str, int], size: tuple[int, int] = (48, 64)) -> torch.Tensor:
    """Draw the regions of a prediction."""
    regions = read_annotation(found, RegionSet(Path("prediction"), [], []), names=("a.png",))
    return draw_regions(regions, Scaling.unscaled(size), labels, name="a.png").map.labels


@pytest.mark.parametrize("types", [("brushlabels",), ("polygonlabels", "brushlabels", "rectanglelabels")])
def test_strokes_are_the_labels_of_the_memory(
    backend: Running, studio: Studio, expected: SegmentationMemory, types: tuple[str, ...]
) -> None:
    schema = config(*types, labels=HALVES)
    found = post(backend, "/predict", prediction(task(1, studio.upload(7)), schema=schema))
    [one] = found["results"]
    assert one["model_version"] == found["model_version"] == post(backend, "/setup", setup(schema))["model_version"]
    own = expected.segment(draw(7))
    assert torch.equal(drawn(one, {"left": 0, "right": 1}), own.labels)
    assert one["score"] == pytest.approx(float(own.confidence.mean()))
    for each in one["result"]:
        assert (each["type"], each["from_name"], each["to_name"]) == ("brushlabels", "brushlabels", "img")
        assert 0 < each["score"] <= 1


def test_polygons_and_boxes_surround_the_regions(
    backend: Running, studio: Studio, expected: SegmentationMemory
) -> None:
    labels, address = expected.segment(draw(7)).labels, studio.upload(7)
    [one] = post(backend, "/predict", prediction(task(1, address)))["results"]
    assert {each["value"]["polygonlabels"][0] for each in one["result"]} == {"right"}
    found = drawn(one, {"right": 1}) == 1
    assert (found & (labels == 1)).sum() / (found | (labels == 1)).sum() > 0.95
    [one] = post(backend, "/predict", prediction(task(1, address), schema=config("rectanglelabels")))["results"]
    places = (labels == 1).nonzero()
    box = max(one["result"], key=lambda each: each["value"]["width"])["value"]
    assert box["x"] * 0.64 == pytest.approx(int(places[:, 1].min()))
    assert (box["x"] + box["width"]) * 0.64 == pytest.approx(1 + int(places[:, 1].max()))


def test_pixels_without_data_have_no_label(backend: Running, studio: Studio) -> None:
    image, file, address = draw(7), io.BytesIO(), "/data/upload/1/part.tif"
    image[:, 40:] = 0
    tifffile.imwrite(file, image, photometric="rgb", extratags=[(42113, "s", 0, "0", True)])
    studio.files[address] = file.getvalue()
    schema = config("brushlabels", labels=HALVES)
    [one] = post(backend, "/predict", prediction(task(1, address), schema=schema))["results"]
    found = drawn(one, {"left": 1, "right": 2})
    assert (found[:, 40:] == 0).all()
    assert (found[:, :40] > 0).all()


def test_a_new_memory_grows_with_annotations(fresh: Running, studio: Studio, run_folder: Path) -> None:
    file, addresses = fresh.service.memory.file, [studio.upload(number) for number in range(3)]
    assert not file.exists()
    about = post(fresh, "/setup", setup(config("polygonlabels")))
    assert about["new_labels"] == ["right"]
    before = post(fresh, "/predict", prediction(task(3, addresses[2])))
    assert before["results"][0]["result"] == []
    assert fresh.client.get("/memory").json()["examples"] == []
    assert fresh.segment(png(draw(0))).status_code == 422
    versions, found = [before["model_version"]], before
    for number in range(2):
        submit(fresh, addresses[number], number + 1)
        found = post(fresh, "/predict", prediction(task(3, addresses[2])))
        versions.append(found["model_version"])
    assert len(set(versions)) == 3
    assert fresh.client.get("/versions").json() == {"versions": [versions[-1]], "learning": 0}
    right = torch.zeros(48, 64, dtype=torch.bool)
    right[:, 32:] = True
    assert ((drawn(found["results"][0], {"right": 1}) == 1) == right).float().mean() > 0.8
    # The file is that of `cribo segment` with the same labels.
    memory = SegmentationMemory.load(file, BackboneSource(str(run_folder)), device="cpu")
    assert memory.classes == ["background", "right"]
    own = SegmentationMemory(BackboneSource(str(run_folder)), classes=memory.classes, device="cpu")
    for number in range(2):
        own.add(draw(number), right)
    assert memory.fingerprint == own.fingerprint


def test_an_annotation_is_replaced_and_deleted(backend: Running, studio: Studio) -> None:
    address = studio.upload(5)
    version = backend.client.get("/versions").json()["versions"]
    submit(backend, address)
    grown = backend.client.get("/versions").json()["versions"]
    assert names(backend) == ["0.png", "1.png", "5.png"]
    corrected = annotation(11, region(left=25), region("left", left=0, right=25))
    post(backend, "/webhook", webhook("ANNOTATION_UPDATED", corrected, task(1, address)))
    assert names(backend) == ["0.png", "1.png", "5.png"]
    assert backend.client.get("/versions").json()["versions"] not in (version, grown)
    assert backend.client.get("/memory").json()["examples"][2]["classes"] == {"right": 0.75, "left": 0.25}
    post(backend, "/webhook", {"action": "ANNOTATIONS_DELETED", "annotations": [{"id": 12}], "project": {}})
    assert len(names(backend)) == 3
    post(backend, "/webhook", {"action": "ANNOTATIONS_DELETED", "annotations": [{"id": 11}], "project": {}})
    assert names(backend) == ["0.png", "1.png"]
    assert backend.client.get("/versions").json()["versions"] == version
    submit(backend, address)
    post(backend, "/webhook", {"action": "TASKS_DELETED", "tasks": [{"id": 1}], "project": {}})
    assert names(backend) == ["0.png", "1.png"]
    submit(backend, address)
    skipped = annotation(11, was_cancelled=True)
    post(backend, "/webhook", webhook("ANNOTATION_UPDATED", skipped, task(1, address)))
    assert names(backend) == ["0.png", "1.png"]


def test_the_image_of_a_task_may_change(backend: Running, studio: Studio) -> None:
    submit(backend, studio.upload(5))
    submit(backend, studio.upload(6))
    assert names(backend) == ["0.png", "1.png", "6.png"]


def test_the_last_example_stays(fresh: Running, studio: Studio) -> None:
    submit(fresh, studio.upload(5))
    post(fresh, "/webhook", {"action": "ANNOTATIONS_DELETED", "annotations": [{"id": 11}], "project": {}})
    assert names(fresh) == ["5.png"]


def test_an_empty_annotation_is_background(fresh: Running, studio: Studio) -> None:
    address = studio.upload(5)
    post(fresh, "/webhook", webhook("ANNOTATION_CREATED", annotation(11), task(1, address)))
    [one] = post(fresh, "/predict", prediction(task(1, address)))["results"]
    assert one["result"] == []
    assert fresh.client.get("/memory").json()["examples"][0]["classes"] == {"background": 1}


def test_labels_are_matched_with_classes(backend: Running, studio: Studio) -> None:
    address, schema = studio.upload(5), config("polygonlabels", labels=("Right", "lamp"))
    about = post(backend, "/setup", setup(schema))
    assert (about["new_labels"], about["other_classes"]) == (["lamp"], ["left"])
    own = annotation(11, region("Right"), region("lamp", left=0, right=25))
    post(backend, "/webhook", webhook("ANNOTATION_CREATED", own, task(1, address), schema))
    assert backend.client.get("/memory").json()["classes"] == ["left", "right", "lamp"]
    # Without a class of the background, pixels without a label have none.
    assert set(backend.client.get("/memory").json()["examples"][2]["classes"]) == {"right", "lamp"}
    [one] = post(backend, "/predict", prediction(task(1, address), schema=schema))["results"]
    assert {each["value"]["polygonlabels"][0] for each in one["result"]} <= {"Right", "lamp"}


def test_training_learns_all_annotations(backend: Running, studio: Studio) -> None:
    cancelled = annotation(30, was_cancelled=True)
    tasks = [
        task(number, studio.upload(number), annotations=[annotation(20 + number, region()), cancelled])
        for number in range(4, 16)
    ]
    studio.tasks = [*tasks, task(40, "/data/upload/1/missing.png", annotations=[annotation(41, region())])]
    post(backend, "/webhook", {"action": "START_TRAINING", "project": project(config("polygonlabels"))})
    assert names(backend)[2:] == [f"{number}.png" for number in range(4, 16)]
    submitted = [task(50, studio.upload(50), annotations=[annotation(51, region())])]
    content = {"annotations": submitted, "label_config": config("polygonlabels"), "project": "1.1795921929"}
    post(backend, "/train", content)
    assert names(backend)[-1] == "50.png"


def test_two_tools_at_once(serving: Serve, own_file: Path, studio: Studio) -> None:
    """Four clients of two servers of one file: all examples are in it."""
    hosts = [studio.opened() for _ in range(2)]
    with serving(own_file, tool=hosts[0]) as one, serving(own_file, tool=hosts[1]) as other:
        addresses = [studio.upload(number) for number in range(10, 18)]
        with ThreadPoolExecutor(4) as pool:
            jobs = [
                pool.submit(submit, running, address, number)
                for number, (running, address) in enumerate(zip([one, other] * 4, addresses, strict=True))
            ]
            for job in jobs:
                job.result()
        assert {*names(one)} == {"0.png", "1.png", *(f"{number}.png" for number in range(10, 18))}
        for running in (one, other):
            post(running, "/predict", prediction(task(1, addresses[0])))  # reads the file again
            assert len(running.client.get("/memory").json()["examples"]) == 10


def test_a_memory_that_another_command_changes(backend: Running, studio: Studio, run_folder: Path) -> None:
    file, address = backend.service.memory.file, studio.upload(5)
    with memory_lock(file):
        memory = SegmentationMemory.load(file, BackboneSource(str(run_folder)), device="cpu")
        own = webhook("ANNOTATION_CREATED", annotation(11, region()), task(1, address))
        assert backend.client.post("/webhook", json=own).json() == {"learning": 1}
        assert post_predict(backend, address)  # while the annotation waits for the other command
        add_example(memory, 2)
        memory.save(file)
    assert backend.backend is not None
    backend.backend.learner.join()
    assert names(backend) == ["0.png", "1.png", "2.png", "5.png"]
    for damage in (b"damaged", None):
        file.unlink() if damage is None else file.write_bytes(damage)
        submit(backend, studio.upload(6), 2)
        assert (file.read_bytes() if file.exists() else None) == damage
        assert post_predict(backend, address)


def post_predict(running: Running, address: str) -> list[Any]:
    """Return the regions of a prediction, which does not wait for annotations."""
    return running.client.post("/predict", json=prediction(task(9, address))).json()["results"][0]["result"]


def test_a_tool_that_disconnects_has_its_annotation_learned(backend: Running, studio: Studio) -> None:
    """Label Studio waits for a second."""
    begin = threading.Event()
    backend.service.submit(lambda items: [begin.wait()], None)
    started = time.monotonic()
    own = webhook("ANNOTATION_CREATED", annotation(11, region()), task(1, studio.upload(5)))
    assert backend.client.post("/webhook", json=own, timeout=5).json() == {"learning": 1}
    with pytest.raises(httpx.ReadTimeout):
        backend.client.post("/predict", json=prediction(task(1, studio.upload(6))), timeout=0.3)
    begin.set()
    assert backend.backend is not None
    backend.backend.learner.join()
    assert names(backend)[-1] == "5.png"
    assert time.monotonic() - started < 60


KILLED_WHILE_SAVING = """
import os, signal
import safetensors.torch
save = safetensors.torch.save_file
def half(tensors, path, metadata=None):
    save(tensors, path, metadata=metadata)
    with open(path, "r+b") as file:
        file.truncate(os.path.getsize(path) // 2)
    os.kill(os.getpid(), signal.SIGKILL)
safetensors.torch.save_file = half
"""


def test_a_server_that_is_killed_leaves_the_memory_whole(
    own_file: Path, run_folder: Path, studio: Studio, commands: Commands
) -> None:
    words = ("--memory", own_file, "--backbone", run_folder, "--label_studio", studio.url)
    before = own_file.read_bytes()
    own = webhook("ANNOTATION_CREATED", annotation(11, region()), task(1, studio.upload(5)))
    server = start(commands, *words, prelude=KILLED_WHILE_SAVING, LABEL_STUDIO_API_KEY=KEY)
    assert httpx.post(f"{server.address}/webhook", json=own).status_code == 200
    assert server.command.wait(60) in (-signal.SIGKILL, 128 + signal.SIGKILL)
    assert own_file.read_bytes() == before
    server = start(commands, *words, LABEL_STUDIO_API_KEY=KEY)
    assert httpx.post(f"{server.address}/webhook", json=own).status_code == 200
    while httpx.get(f"{server.address}/versions").json()["learning"]:
        time.sleep(0.05)
    assert len(read_memory(own_file).examples) == 3
    os.kill(server.command.pid, signal.SIGTERM)
    assert server.command.wait(60) == 143


POLYGONS = config("polygonlabels")
DEEP = "<View>" * 200 + "</View>" * 200
ENTITIES = '<!DOCTYPE v [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;">]><View>&b;</View>'


@pytest.mark.parametrize(
    ("path", "content", "status", "named"),
    [
        ("/setup", {"schema": "<View></View>"}, 422, "BrushLabels"),
        ("/setup", {"schema": '<View><Text name="t" value="$t"/><Choices name="c" toName="t"/></View>'}, 422, "text"),
        ("/setup", {"schema": POLYGONS.replace("$image", "http://a/b.png")}, 422, "$image"),
        ("/setup", {"schema": config("polygonlabels", labels=())}, 422, "Label"),
        ("/setup", {"schema": ENTITIES}, 422, "DOCTYPE"),
        ("/setup", {"schema": DEEP}, 422, "nested"),
        ("/setup", {"schema": "<View>"}, 422, "XML"),
        ("/setup", {"schema": 5}, 422, "XML"),
        ("/setup", {}, 422, "XML"),
        ("/setup", [], 400, "object"),
        ("/predict", prediction(), 422, "tasks"),
        ("/predict", {**prediction(), "tasks": [5]}, 422, "data"),
        ("/predict", prediction(task(1, "")), 422, "'image'"),
        ("/predict", prediction(task(1, "/data/upload/1/none.png")), 422, "404"),
        ("/predict", prediction(task(1, "/data/upload/1/text.png")), 422, "JPEG"),
        ("/predict", prediction(task(1, "/data/upload/1/bomb.png")), 413, "--max_megapixels"),
        ("/predict", prediction(task(1, "/data/upload/1/large.png")), 422, "--max_megabytes"),
        ("/predict", prediction(task(1, "/data/upload/1/elsewhere.png")), 422, "redirects"),
        ("/predict", prediction(task(1, "http://169.254.169.254/latest/meta-data")), 422, "--label_studio"),
        ("/predict", prediction(task(1, "//169.254.169.254/a.png")), 422, "--label_studio"),
        ("/predict", prediction(task(1, "s3://bucket/a.png")), 422, "--label_studio"),
        ("/predict", prediction(task(1, "file:///etc/passwd")), 422, "--label_studio"),
        ("/predict", prediction(task(1, "http://[::1")), 422, "--label_studio"),
        ("/predict", prediction(task(1, "data:image/png;base64,AAAA!")), 422, ""),
        ("/predict", prediction(task(1, "data:text/plain,hello")), 422, "JPEG"),
        ("/predict", prediction(task(1, "data:,%00" + 70_000 * "a")), 422, "--max_megabytes"),
        ("/train", {"label_config": POLYGONS}, 422, "annotations"),
        ("/webhook", webhook("ANNOTATION_CREATED", annotation(1, region()), task(1, "")), 422, "'image'"),
        ("/webhook", webhook("ANNOTATION_CREATED", {"result": []}, task(1, "/a.png")), 422, "id"),
        ("/webhook", webhook("ANNOTATION_CREATED", annotation(1), task(1, "/a.png"), "<View/>"), 422, "BrushLabels"),
        ("/webhook", {}, 422, "action"),
        ("/webhook", {"action": "ANNOTATIONS_CREATED", "project": project(POLYGONS)}, 422, "object"),
        ("/webhook", {"action": "START_TRAINING"}, 422, "XML"),
    ],
    ids=lambda value: str(value)[:50] if isinstance(value, str | int) else "content",
)
def test_invalid_requests_get_an_error(
    backend: Running, studio: Studio, path: str, content: Any, status: int, named: str
) -> None:
    studio.files |= {
        "/data/upload/1/text.png": b"no picture",
        "/data/upload/1/bomb.png": bomb(30_000, 30_000),
        "/data/upload/1/large.png": png(draw(0)) + b"0" * 60_000,
        "/data/upload/1/elsewhere.png": "http://169.254.169.254/latest/meta-data",
    }
    answer = backend.client.post(path, json=content)
    assert answer.status_code == status, answer.text
    assert named in answer.json()["error"]
    assert len(names(backend)) == 2
    assert "/latest/meta-data" not in studio.paths


INVALID = [
    annotation(11, region(), {**region(), "value": {"points": "?", "polygonlabels": ["right"]}}),
    annotation(11, {**region(), "original_width": 640}),
    annotation(11),  # this memory has no background
]


@pytest.mark.parametrize("own", INVALID, ids=["points", "size", "nothing"])
def test_invalid_annotations_change_nothing(backend: Running, studio: Studio, own: dict[str, Any]) -> None:
    before = backend.service.memory.file.read_bytes()
    post(backend, "/webhook", webhook("ANNOTATION_CREATED", own, task(1, studio.upload(5))))
    assert backend.service.memory.file.read_bytes() == before
    good = [
        webhook("ANNOTATION_CREATED", each, task(number, studio.upload(number)))
        for number, each in ((5, own), (6, annotation(16, region())))
    ]
    for each in good:
        assert backend.client.post("/webhook", json=each).status_code == 200
    assert backend.backend is not None
    backend.backend.learner.join()
    assert names(backend) == ["0.png", "1.png", "6.png"]


def test_one_unreadable_image_does_not_disturb_the_others(backend: Running, studio: Studio) -> None:
    addresses = [studio.upload(5), "http://169.254.169.254/a.png", studio.upload(6)]
    found = post(backend, "/predict", prediction(*(task(number, each) for number, each in enumerate(addresses))))
    assert [bool(each["result"]) for each in found["results"]] == [True, False, True]
    assert "--label_studio" in found["results"][1]["error"]


def test_other_events_are_ignored(backend: Running) -> None:
    for action in ("TASKS_CREATED", "PROJECT_UPDATED", "LABEL_LINK_CREATED"):
        assert post(backend, "/webhook", {"action": action, "tasks": [], "project": {}}) == {"learning": 0}


def test_images_of_data_uris(backend: Running, expected: SegmentationMemory) -> None:
    uri = f"data:image/png;base64,{base64.b64encode(png(draw(7))).decode()}"
    [one] = post(backend, "/predict", prediction(task(1, uri), schema=config("brushlabels", labels=HALVES)))["results"]
    assert torch.equal(drawn(one, {"left": 0, "right": 1}), expected.segment(draw(7)).labels)


def test_a_token_may_be_the_password_of_label_studio(serving: Serve, own_file: Path, studio: Studio) -> None:
    with serving(own_file, token="sesame", tool=studio.opened()) as running:
        for path in ("/setup", "/predict", "/train", "/webhook"):
            assert running.client.post(path, json={}).status_code == 401
        assert running.client.post("/setup", json=setup(POLYGONS), auth=("cribo", "sesame")).status_code == 200
        assert running.client.post("/setup", json=setup(POLYGONS), auth=("sesame", "cribo")).status_code == 401


def test_the_description_is_valid_openapi(backend: Running, studio: Studio) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    validator = pytest.importorskip("openapi_spec_validator")
    described = backend.client.get("/openapi.json").json()
    assert {"/setup", "/predict", "/train", "/webhook", "/versions", "/segment"} <= set(described["paths"])
    validator.validate(described)
    contents: list[tuple[str, Any]] = [
        ("/setup", setup(POLYGONS)),
        ("/predict", prediction(task(1, studio.upload(5)))),
        ("/webhook", webhook("ANNOTATION_CREATED", annotation(11, region()), task(1, studio.upload(5)))),
    ]
    for path, content in contents:
        operation = described["paths"][path]["post"]
        jsonschema.validate(content, operation["requestBody"]["content"]["application/json"]["schema"])
        schema = operation["responses"]["200"]["content"]["application/json"]["schema"]
        jsonschema.validate(post(backend, path, content), schema)


def test_without_the_option_nothing_is_learned(serving: Serve, own_file: Path) -> None:
    with serving(own_file) as running:
        for path in ("/setup", "/predict", "/train", "/webhook"):
            assert running.client.post(path, json={}).status_code == 404
