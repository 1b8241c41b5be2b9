"""Requests with random values in place of valid ones: no error of the server, and a memory that still works."""

import copy
import json
import random
from typing import Any

import pytest
from tests.explorer.serving.conftest import Serve
from tests.explorer.serving.label_studio.conftest import (
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

VALUES: list[Any] = [
    *(
        None,
        True,
        -1,
        0,
        1e999,
        10**30,
        0.5,
        "",
        "\ud800",
        "\0",
        "right",
        "a" * 5000,
        "/data/../x",
        "$image",
        "<View/>",
    ),
    *([], [[]], {}, {"id": 1}, [None], [1] * 50, {"a": {"b": []}}, "data:,", "http://[", "data:image/png;base64,=="),
    *(config("brushlabels", "rectanglelabels", labels=("right", "left", "right")), config("polygonlabels", field="")),
]


def changed(draw: random.Random, content: Any) -> Any:
    """Return a request of which some values are others, or missing."""
    content = copy.deepcopy(content)
    for _ in range(draw.randrange(1, 4)):
        if not (places := list(inner(content))):
            break
        owner, key = draw.choice(places)
        if isinstance(owner, dict) and draw.random() < 0.2:
            del owner[key]
        else:
            owner[key] = copy.deepcopy(draw.choice(VALUES))
    return content


def inner(content: Any) -> Any:
    """Yield each place in nested lists and dictionaries."""
    places = content.items() if isinstance(content, dict) else enumerate(content)
    for key, value in places:
        yield content, key
        if isinstance(value, dict | list):
            yield from inner(value)


@pytest.mark.parametrize("seed", range(3))
def test_malformed_requests_are_no_errors_of_the_server(
    serving: Serve, own_file: Any, studio: Studio, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    address, draw = studio.upload(5), random.Random(seed)
    own = annotation(11, region(), {**region(), "value": {"format": "rle", "rle": [0, 9], "brushlabels": ["right"]}})
    requests: list[tuple[str, Any]] = [
        ("/setup", setup(config("polygonlabels"))),
        ("/predict", prediction(task(1, address))),
        ("/webhook", webhook("ANNOTATION_CREATED", own, task(1, address))),
        ("/webhook", {"action": "ANNOTATIONS_DELETED", "annotations": [{"id": 3}], "project": {}}),
        ("/webhook", {"action": "START_TRAINING", "project": project(config("polygonlabels"))}),
        (
            "/train",
            {
                "annotations": [task(1, address, annotations=[own])],
                "label_config": config("brushlabels"),
                "project": "1",
            },
        ),
    ]
    with serving(own_file, tool=studio.opened()) as running:
        statuses = set()
        for _ in range(150):
            path, content = draw.choice(requests)
            body = dumps(changed(draw, content))
            answer = running.client.post(path, content=body, headers={"content-type": "application/json"})
            assert answer.status_code < 500, (path, body, answer.text)
            statuses.add(answer.status_code)
        assert {200, 422} <= statuses
        running.backend.learner.join()
        good = webhook("ANNOTATION_CREATED", annotation(99, region()), task(99, studio.upload(99)))
        assert running.client.post("/webhook", json=good).status_code == 200
        running.backend.learner.join()
        assert "99.png" in str(running.client.get("/memory").json()["examples"][-1]["name"])
    assert not [record for record in caplog.records if record.exc_info and record.levelname == "ERROR"], caplog.text


def dumps(content: Any) -> bytes:
    """Return JSON, also of numbers that are none, and of half characters."""
    return json.dumps(content).encode()
