"""Small pictures of coloured rectangles, a fast encoder, and a database of them."""

import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from cribo.apps.search import DatabaseInfo, IndexSummary, ObjectDatabase, ObjectSettings, index_images, index_lock
from cribo.data import open_images
from cribo.features import BackboneSource, Encoder, mean_colour_encoder

SETTINGS = ObjectSettings(num_objects=4, size=None)
COLOURS = ((220, 30, 30), (30, 200, 40), (40, 40, 220), (230, 220, 40), (30, 210, 220))


def picture(seed: int, size: tuple[int, int] = (64, 96)) -> np.ndarray:
    """Return grey noise with two coloured rectangles, whose colours depend on the seed."""
    generator = np.random.default_rng(seed)
    image = generator.integers(100, 130, (*size, 3), dtype=np.uint8)
    image[8:40, 8:40] = COLOURS[seed % 5]
    image[24:56, 56:88] = COLOURS[(seed + 2) % 5]
    return image


def write_picture(path: Path, seed: int, size: tuple[int, int] = (64, 96)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(picture(seed, size)).save(path)


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    folder = tmp_path / "pictures"
    for number in range(6):
        write_picture(folder / ("a" if number < 3 else "b") / f"{number}.png", number)
    return folder


@pytest.fixture
def encoder() -> Encoder:
    return mean_colour_encoder(8)


def info_of(encoder: Encoder, folder: Path, settings: ObjectSettings = SETTINGS) -> DatabaseInfo:
    assert encoder.identity is not None
    config = dataclasses.asdict(BackboneSource("mean-colour"))
    return DatabaseInfo(encoder.identity, {"name": "mean-colour"}, config, 3, settings, str(folder))


def bring_up_to_date(folder: Path, encoder: Encoder, prune: bool | None = True) -> tuple[ObjectDatabase, IndexSummary]:
    """Index `pictures` of a folder into its `objects.db`."""
    place, pictures = folder / "objects.db", folder / "pictures"
    with index_lock(str(place)):
        there = (place / "about.lance").exists()
        database = ObjectDatabase.open(place) if there else ObjectDatabase.create(place, info_of(encoder, pictures))
        return database, index_images(database, encoder, open_images(pictures), batch_size=4, prune=prune)


@pytest.fixture
def index(pictures: Path, encoder: Encoder) -> Callable[..., tuple[ObjectDatabase, IndexSummary]]:
    """Updates a database of the pictures."""
    return partial(bring_up_to_date, pictures.parent, encoder)


def held(database: ObjectDatabase) -> dict[str, list[tuple[int, bytes, tuple[int, ...]]]]:
    """Return the rows of all images without their entry numbers."""
    return {
        image.path: [(each.number, each.mask.counts, each.box) for each in database.objects_of(image.path)]
        for image in database.images()
    }


class Traffic:
    """A web application that counts the requests and the bytes that it sends."""

    def __init__(self, app: Callable[..., Iterable[bytes]]) -> None:
        self.app = app
        self.requests = self.sent = 0

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterator[bytes]:
        self.requests += 1
        for part in self.app(environ, start_response):
            self.sent += len(part)
            yield part


@contextmanager
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Traffic]]:
    """Run a local server of object storage; yield a new URL in it, and its traffic."""
    boto3, server = pytest.importorskip("boto3"), pytest.importorskip("moto.server")
    traffic = Traffic(server.DomainDispatcherApplication(server.create_backend_app))
    http = pytest.importorskip("werkzeug.serving").make_server("127.0.0.1", 0, traffic, threaded=True)
    thread = threading.Thread(target=http.serve_forever)
    thread.start()
    keys = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_DEFAULT_REGION": "us-east-1"}
    address = f"http://127.0.0.1:{http.server_port}"
    for key, value in {**keys, "AWS_ENDPOINT_URL": address, "AWS_ALLOW_HTTP": "true"}.items():
        monkeypatch.setenv(key, value)
    bucket = tmp_path.name.replace("_", "-")  # all servers of a process have the same content
    try:
        boto3.client("s3").create_bucket(Bucket=bucket)
        yield f"s3://{bucket}/some.db", traffic
    finally:
        http.shutdown()
        thread.join()
