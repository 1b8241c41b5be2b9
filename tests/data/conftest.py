"""Object storage for tests: S3 served by this machine, and fsspec's memory."""

from collections.abc import Iterator
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return the file system of a local S3 server with the bucket `pictures`."""
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
    }.items():
        monkeypatch.setenv(name, value)
    fsspec.get_filesystem_class("s3").clear_instance_cache()  # of another server
    system = fsspec.filesystem("s3", skip_instance_cache=True)
    system.mkdir("pictures")
    yield system
    system.rm("pictures", recursive=True)  # servers of one process share their buckets
    server.stop()


@pytest.fixture
def memory() -> Iterator[MemoryFileSystem]:
    """Return an empty file system in memory."""
    system = MemoryFileSystem()
    yield system
    system.store.clear()
    system.pseudo_dirs[:] = [""]
