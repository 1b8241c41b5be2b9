"""Fixtures: a memory of a tiny network, and servers of it in threads of this process."""

import io
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("gradio")
import uvicorn

from cribo.explorer.access import HEADERS
from cribo.explorer.config import Limits
from cribo.explorer.server import host_names, listening
from cribo.explorer.serving.app import build_app
from cribo.explorer.serving.config import RequestLimits
from cribo.explorer.serving.growing import GrowingMemory
from cribo.explorer.serving.label_studio.host import Host
from cribo.explorer.serving.label_studio.routes import MLBackend
from cribo.explorer.serving.memory_file import MemoryFile
from cribo.explorer.serving.routes import OPERATIONS
from cribo.explorer.serving.service import Service
from cribo.features import BackboneSource
from cribo.features.memory import SegmentationMemory, SegmentationSettings


def draw(seed: int, size: tuple[int, int] = (48, 64)) -> np.ndarray:
    """Return an image with a bright right half and noise."""
    noise = np.random.default_rng(seed).integers(0, 60, (*size, 3), dtype=np.uint8)
    noise[:, size[1] // 2 :] += 160
    return noise


def png(image: np.ndarray) -> bytes:
    """Return the bytes of a PNG."""
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()


def add_example(memory: SegmentationMemory, seed: int) -> None:
    """Add an image whose right half has class 1."""
    labels = torch.zeros(48, 64, dtype=torch.uint8)
    labels[:, 32:] = 1
    memory.add(draw(seed), labels, name=f"{seed}.png")


@pytest.fixture(scope="session")
def memory_file(run_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a memory of two examples of a tiny network."""
    settings = SegmentationSettings(size=64, head="knn", refine="none")
    memory = SegmentationMemory(
        BackboneSource(str(run_folder)), classes=["left", "right"], settings=settings, device="cpu"
    )
    for seed in (0, 1):
        add_example(memory, seed)
    memory.fit()
    file = tmp_path_factory.mktemp("memories") / "halves.safetensors"
    memory.save(file)
    return file


@pytest.fixture
def own_file(memory_file: Path, tmp_path: Path) -> Path:
    """Return a copy of the memory file, to be changed."""
    file = tmp_path / "own.safetensors"
    file.write_bytes(memory_file.read_bytes())
    return file


@pytest.fixture(scope="session")
def expected(memory_file: Path, run_folder: Path) -> SegmentationMemory:
    """Return the memory, read apart from a server."""
    return SegmentationMemory.load(memory_file, BackboneSource(str(run_folder)), device="cpu")


class Running:
    """A server in a thread of this process.

    Attributes:
        client: sends requests.
        service: what its routes share.
        backend: that of Label Studio; None without one.
    """

    def __init__(self, address: str, service: Service, backend: MLBackend | None = None) -> None:
        self.client = httpx.Client(base_url=address, timeout=60)
        self.address, self.service, self.backend = address, service, backend

    def segment(self, content: bytes, **options: Any) -> httpx.Response:
        """Send a picture, to be labelled."""
        headers = {"content-type": "application/octet-stream", **options.pop("headers", {})}
        return self.client.post("/segment", content=content, headers=headers, **options)


Serve = Callable[..., Any]


@pytest.fixture(scope="session")
def serving(memory_file: Path, run_folder: Path) -> Serve:
    """Serve a memory file."""

    @contextmanager
    def serve(
        file: Path = memory_file,
        *,
        token: str | None = None,
        batch_size: int = 4,
        megapixels: float = 0.1,
        tool: Host | None = None,
        **limits: Any,
    ) -> Iterator[Running]:
        opened = MemoryFile if tool is None else GrowingMemory
        memory = opened(file, BackboneSource(str(run_folder)), batch_size=batch_size, device="cpu")
        pictures = Limits(max_megabytes=0.05, max_megapixels=megapixels)
        service = Service(memory, pictures, RequestLimits(**limits), batch_size=batch_size)
        backend = None if tool is None else MLBackend(service, tool)
        app = build_app(
            service,
            token=token,
            hosts=host_names("127.0.0.1"),
            operations=OPERATIONS if backend is None else (*OPERATIONS, *backend.operations),
            closing=[] if backend is None else [backend.close],
        )
        with listening("127.0.0.1", 0) as (listener, address):
            server = uvicorn.Server(uvicorn.Config(app, headers=HEADERS, log_level="critical", server_header=False))
            thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
            thread.start()
            running = Running(address, service, backend)
            try:
                yield running
            finally:
                running.client.close()
                server.should_exit = True
                thread.join(60)
                assert not thread.is_alive()

    return serve


@pytest.fixture(scope="module")
def running(serving: Serve) -> Iterator[Running]:
    """Serve the memory file to the tests of a module."""
    with serving() as server:
        yield server
