import os
import pickle
import socket
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from tests.data.photographs import encoded, write_files, write_tar

from cribo.base.errors import DataError, MissingData, ShardError, UnreadableImage
from cribo.data.reading import read_image
from cribo.data.sources.collection import (
    ImageCollection,
    content_hash,
    fingerprint,
    open_collection,
    read_named,
    rows_of,
    sampled_hash,
    without_repeats,
)
from cribo.data.sources.images import ImageFiles, open_images
from cribo.data.sources.parquet import ParquetImages
from cribo.data.sources.remote import RemoteImages

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

PHOTOGRAPHS = {
    "a.jpg": encoded(0),
    "b.PNG": encoded(1, "PNG"),
    "c/d.webp": encoded(2, "WEBP"),
    "c/e.jpg": encoded(3),
    "c/f/g.jpeg": encoded(4),
}


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
    monkeypatch.setattr("cribo.data.sources.storage.RETRY_DELAYS", (0.01, 0.01))
    monkeypatch.setattr("cribo.data.sources.storage._OPENING_DELAYS", (0.01, 0.01))


def folder(place: Path, memory: MemoryFileSystem) -> Path:
    write_files(place, PHOTOGRAPHS)
    return place


def listed(place: Path, memory: MemoryFileSystem) -> Path:
    write_files(place, PHOTOGRAPHS)
    (place / "list.txt").write_text("\n".join([str(place / "a.jpg"), *list(PHOTOGRAPHS)[1:]]))
    return place / "list.txt"


def mixed_list(place: Path, memory: MemoryFileSystem) -> Path:
    write_files(place, PHOTOGRAPHS)
    memory.pipe_file("/pictures/c/e.jpg", PHOTOGRAPHS["c/e.jpg"])
    lines = [f"memory://pictures/{name}" if name == "c/e.jpg" else name for name in PHOTOGRAPHS]
    (place / "list.txt").write_text("\n".join(lines))
    return place / "list.txt"


def shards(place: Path, memory: MemoryFileSystem) -> Path:
    write_tar(place / "0.tar", dict(list(PHOTOGRAPHS.items())[:2]))
    write_tar(place / "1.tar", dict(list(PHOTOGRAPHS.items())[2:]))
    return place


def remote(place: Path, memory: MemoryFileSystem) -> str:
    for name, content in {**PHOTOGRAPHS, ".hidden/h.jpg": b"", "c/.h.jpg": b"", "readme.txt": b""}.items():
        memory.pipe_file(f"/pictures/{name}", content)
    return "memory://pictures/"


def remote_shards(place: Path, memory: MemoryFileSystem) -> str:
    for path in sorted(shards(place, memory).iterdir()):
        memory.pipe_file(f"/shards/{path.name}", path.read_bytes())
    return "memory://shards"


def parquet_bytes(place: Path, memory: MemoryFileSystem) -> Path:
    place.mkdir(exist_ok=True)
    structs = [{"bytes": content, "path": name} for name, content in PHOTOGRAPHS.items()]
    pq.write_table(pa.table({"image": structs}), place / "train.parquet", row_group_size=2)
    return place


def parquet_paths(place: Path, memory: MemoryFileSystem) -> Path:
    write_files(place, PHOTOGRAPHS)
    pq.write_table(pa.table({"path": list(PHOTOGRAPHS)}), place / "train.parquet")
    return place / "train.parquet"


def file_of_parquet_bytes(place: Path, memory: MemoryFileSystem) -> Path:
    return parquet_bytes(place, memory) / "train.parquet"


SOURCES = [folder, listed, mixed_list, shards, remote, remote_shards]
SOURCES += [parquet_bytes, file_of_parquet_bytes, parquet_paths]


def names(images: ImageCollection) -> list[str]:
    return [images.name(index) for index in range(len(images))]


@pytest.mark.parametrize("source", SOURCES)
def test_all_kinds_contain_the_same_photographs(
    source: Callable[[Path, MemoryFileSystem], Path | str], tmp_path: Path, memory: MemoryFileSystem
) -> None:
    root = source(tmp_path / "images", memory)
    images = open_collection(root, cache_dir=tmp_path / "cache")
    write_files(tmp_path / "single", PHOTOGRAPHS)
    for index, (name, content) in enumerate(PHOTOGRAPHS.items()):
        assert torch.equal(images.load(index), read_image(tmp_path / "single" / name))
        assert images.read(index).content == content
        assert images.read(index).name == images.name(index)
        assert read_named(root, images.name(index)) == images.read(index)
        state = images.state(index)
        in_parquet = "parquet" in images.name(index)
        assert state.size_bytes == ((tmp_path / "images/train.parquet").stat().st_size if in_parquet else len(content))
        assert abs(state.mtime_ns / 1e9 - time.time()) < 3600
    part = pickle.loads(pickle.dumps(images.part([0, 2, 3]).part([1, 2])))
    assert names(part) == [images.name(2), images.name(3)]
    assert [part.read(index).content for index in range(2)] == [PHOTOGRAPHS["c/d.webp"], PHOTOGRAPHS["c/e.jpg"]]
    assert part.state(1) == images.state(3)
    assert fingerprint(part) == fingerprint(images.part([2, 3])) != fingerprint(images.part([1, 3]))
    with pytest.raises(IndexError, match=r"0\.\.4, got 1\.\.5"):
        images.part([1, 5])
    with pytest.raises(ValueError, match="must ascend"):
        images.part([1, 0])


@pytest.mark.parametrize("source", [folder, mixed_list, shards, remote, parquet_bytes, parquet_paths])
def test_states_change_with_the_image(
    source: Callable[[Path, MemoryFileSystem], Path | str], tmp_path: Path, memory: MemoryFileSystem
) -> None:
    root = source(tmp_path, memory)
    before = open_collection(root)
    state, all_before = before.state(3), fingerprint(before)
    time.sleep(0.01)
    try:
        PHOTOGRAPHS["c/e.jpg"] += b"\0"
        for path in tmp_path.glob("*.*"):
            path.unlink()
        source(tmp_path, memory)
    finally:
        PHOTOGRAPHS["c/e.jpg"] = PHOTOGRAPHS["c/e.jpg"][:-1]
    after = open_collection(root)
    assert after.state(3).size_bytes > state.size_bytes
    assert after.state(3).mtime_ns > state.mtime_ns
    assert fingerprint(after) != all_before


def test_names_are_those_of_files(tmp_path: Path, memory: MemoryFileSystem) -> None:
    local, below = open_collection(folder(tmp_path, memory)), open_collection(remote(tmp_path, memory))
    assert names(below) == names(local) == list(PHOTOGRAPHS)
    assert names(open_collection("memory://pictures", "c")) == ["d.webp", "e.jpg", "f/g.jpeg"]
    assert fingerprint(below).files == fingerprint(local).files


def test_files_that_disappear_are_reported_one_by_one(tmp_path: Path, memory: MemoryFileSystem) -> None:
    roots = [folder(tmp_path / "a", memory), remote(tmp_path, memory), mixed_list(tmp_path / "b", memory)]
    opened = [open_collection(root) for root in roots]
    (tmp_path / "a" / "c" / "e.jpg").unlink()
    memory.rm_file("/pictures/c/e.jpg")
    for images in opened:
        with pytest.raises(FileNotFoundError):
            images.read(3)
        with pytest.raises(UnreadableImage, match=r"e\.jpg: no such file"):
            images.load(3)
        assert images.read(4).content == PHOTOGRAPHS["c/f/g.jpeg"]
    with pytest.raises(FileNotFoundError):
        opened[0].state(3)
    assert fingerprint(opened[0]) == fingerprint(opened[0]) != fingerprint(opened[1])


def test_temporary_failures_are_retried(
    tmp_path: Path, memory: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = open_collection(remote(tmp_path, memory))
    failures: list[Exception] = [OSError("reset by peer"), TimeoutError()]
    original = MemoryFileSystem.cat_file

    def cat_file(self: MemoryFileSystem, path: str, **options: Any) -> Any:
        if failures:
            raise failures.pop()
        return original(self, path, **options)

    monkeypatch.setattr(MemoryFileSystem, "cat_file", cat_file)
    assert images.read(0).content == PHOTOGRAPHS["a.jpg"]
    failures += [OSError("reset by peer")] * 3
    with pytest.raises(ShardError, match=r"memory://pictures/a\.jpg: reset by peer; tried 3 times"):
        images.read(0)
    failures.append(PermissionError("not yours"))
    with pytest.raises(UnreadableImage, match=r"a\.jpg: not yours"):
        images.load(0)
    assert not failures


def test_parts_of_large_collections_are_small(tmp_path: Path) -> None:
    for shard in range(50):
        write_tar(tmp_path / "shards" / f"{shard:02d}.tar", {f"{number:09d}.jpg": b"x" for number in range(100)})
    opened = open_collection(tmp_path / "shards")
    sizes = np.array([(1, 1)] * 10000)
    for images in (opened, RemoteImages("s3://pictures", (f"{number:09d}.jpg" for number in range(10000)), sizes)):
        part = images.part(range(1000, 1100))
        assert len(pickle.dumps(part)) < 10_000 < len(pickle.dumps(images)) / 5
        assert names(part)[-1].endswith("99.jpg")
    for shard in set(range(50)) - {10}:
        (tmp_path / "shards" / f"{shard:02d}.tar").unlink()
    part = pickle.loads(pickle.dumps(opened.part(range(1000, 1100))))
    assert part.read(99).content == b"x"


def test_a_pickle_is_independent_of_the_working_folder(
    tmp_path: Path, memory: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    for source in (folder, mixed_list, shards, parquet_bytes, parquet_paths):
        source(tmp_path / source.__name__, memory)
    monkeypatch.chdir(tmp_path)
    roots = ["folder", "mixed_list/list.txt", "shards", "parquet_bytes", "parquet_paths/train.parquet"]
    pickles = [pickle.dumps(open_collection(root).part([1])) for root in roots]
    for root in roots:
        name = open_collection(root).name(1)
        assert read_named(root, name).content == PHOTOGRAPHS["b.PNG"]
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert [pickle.loads(each).read(0).content for each in pickles] == [PHOTOGRAPHS["b.PNG"]] * 5


def test_one_shard_is_read_without_touching_the_index_of_others(tmp_path: Path, memory: MemoryFileSystem) -> None:
    root = shards(tmp_path, memory)
    assert read_named(root / "0.tar", "0.tar/b.PNG").content == PHOTOGRAPHS["b.PNG"]
    assert sorted(path.name for path in root.iterdir()) == ["0.tar", "1.tar"]
    with pytest.raises(FileNotFoundError, match=r"0\.tar does not contain z\.jpg"):
        read_named(root, "0.tar/z.jpg")
    with pytest.raises(FileNotFoundError, match=r"2\.tar does not exist"):
        read_named(root, "2.tar/z.jpg")


def test_repeated_names_are_removed(tmp_path: Path) -> None:
    write_files(tmp_path, PHOTOGRAPHS)
    (tmp_path / "list.txt").write_text("c/e.jpg\na.jpg\nc/e.jpg\nb.PNG\n")
    assert names(without_repeats(open_collection(tmp_path / "list.txt"))) == ["c/e.jpg", "a.jpg", "b.PNG"]


# ------------------------------------------------------------------------------------------------------- batches


def test_rows_of_a_batch_are_images(tmp_path: Path, memory: MemoryFileSystem) -> None:
    memory.pipe_file("/a.jpg", PHOTOGRAPHS["a.jpg"])
    write_files(tmp_path, PHOTOGRAPHS)
    paths = rows_of({"image": np.array(["memory://a.jpg", str(tmp_path / "a.jpg")]), "label": np.array([1, 2])})
    contents = np.array([PHOTOGRAPHS["a.jpg"], b"", None, PHOTOGRAPHS["b.PNG"]], dtype=object)
    rows = rows_of({"image": np.array(["x", "y", "z", None], dtype=object), "bytes": contents})
    assert paths.read(0).content == paths.read(1).content == rows.read(0).content == PHOTOGRAPHS["a.jpg"]
    assert paths.state(0).size_bytes == rows.state(0).size_bytes == len(PHOTOGRAPHS["a.jpg"])
    assert names(rows) == ["x", "y", "z", "row 3"]
    for index in (1, 2):
        with pytest.raises(UnreadableImage, match="the row has no bytes"):
            rows.load(index)
    with pytest.raises(UnreadableImage, match="row 0: the row has no path"):
        rows_of({"image": np.array([None])}).read(0)
    assert pickle.loads(pickle.dumps(rows.part([2, 3]))).read(1).content == PHOTOGRAPHS["b.PNG"]


def test_batches_with_other_columns_are_refused() -> None:
    with pytest.raises(DataError, match=r"must have the column image.*, got path, label: rename"):
        rows_of({"path": np.array(["a"]), "label": np.array([1])})
    with pytest.raises(DataError, match="column image must contain names, paths or URLs, got bytes: put"):
        rows_of({"image": np.array([b"\xff\xd8"], dtype=object)})


# -------------------------------------------------------------------------------------------------------- errors


def test_folders_of_several_kinds_are_refused(tmp_path: Path, memory: MemoryFileSystem) -> None:
    parquet_bytes(shards(tmp_path / "shards", memory), memory)
    with pytest.raises(DataError, match=r"contains both Parquet and tar files: give the path of .*\.parquet"):
        open_collection(tmp_path / "shards")


def test_parquet_files_beside_images_are_their_metadata(tmp_path: Path, memory: MemoryFileSystem) -> None:
    parquet_bytes(folder(tmp_path / "images", memory), memory)
    assert isinstance(open_collection(tmp_path / "images"), ImageFiles)
    for place, column in (("images/train.parquet", None), ("images", "image")):
        assert isinstance(open_collection(tmp_path / place, column=column), ParquetImages)
    remote(tmp_path, memory)
    memory.pipe_file("/pictures/x.parquet", b"")
    assert isinstance(open_collection("memory://pictures"), RemoteImages)


def test_columns_need_parquet(tmp_path: Path, memory: MemoryFileSystem) -> None:
    with pytest.raises(DataError, match=r"column 'x' requires Parquet files: .* contains shards"):
        open_collection(shards(tmp_path, memory), column="x")


def test_commands_that_read_files_refuse_urls_in_lists(tmp_path: Path, memory: MemoryFileSystem) -> None:
    path = mixed_list(tmp_path, memory)
    with pytest.raises(DataError, match=r"lists the URL memory://pictures/c/e\.jpg, and this command reads files"):
        open_images(path)
    with pytest.raises(DataError, match=r"line 4 of .* resolves to memory://pictures/c/e\.jpg, outside"):
        open_collection(path, inside=True)
    (tmp_path / "a.jpg").unlink()
    with pytest.raises(MissingData, match=r"1 of the 4 images .* 'a\.jpg'"):
        open_collection(path)


def test_places_that_are_no_collections_are_refused(tmp_path: Path, memory: MemoryFileSystem) -> None:
    memory.pipe_file("/texts/a.txt", b"text")
    with pytest.raises(DataError, match=r"no images in memory://texts: looked for .*, found 1 other files"):
        open_collection("memory://texts")
    with pytest.raises(DataError, match=r"memory://texts/a\.txt is a file: give the URL of its folder"):
        open_collection("memory://texts/a.txt")
    with pytest.raises(MissingData, match=r"memory://texts/a\.parquet does not exist"):
        open_collection("memory://texts/a.parquet")


def test_a_server_that_does_not_answer_is_reported_in_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("aiohttp")
    monkeypatch.setattr("cribo.data.sources.storage.ANSWER_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/images/"
        with pytest.raises(ConnectionError, match=r"cannot open .*: no answer within 0\.5 s; check the address"):
            open_collection(url)


# ------------------------------------------------------------------------------------------------------------ S3


def test_s3_is_listed_with_sizes_and_times(bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, content in PHOTOGRAPHS.items():
        bucket.pipe_file(f"pictures/street/{name}", content)
    images = open_collection("s3://pictures/street")
    assert names(images) == list(PHOTOGRAPHS)
    for index, content in enumerate(PHOTOGRAPHS.values()):
        assert images.read(index).content == content
        assert images.state(index).size_bytes == len(content)
        assert abs(images.state(index).mtime_ns / 1e9 - time.time()) < 3600
    (tmp_path / "list.txt").write_text("s3://pictures/street/c/e.jpg\n")
    one = open_collection(tmp_path / "list.txt")
    assert (one.read(0).content, one.state(0)) == (images.read(3).content, images.state(3))
    bucket.pipe_file("pictures/street/c/e.jpg", PHOTOGRAPHS["a.jpg"] + b"\0")
    assert open_collection("s3://pictures/street").state(3) != images.state(3)
    bucket.rm_file("pictures/street/c/e.jpg")
    with pytest.raises(UnreadableImage, match=r"c/e\.jpg: no such file"):
        images.load(3)
    with pytest.raises(MissingData, match="s3://picture/street does not exist"):
        open_collection("s3://picture/street")


def test_an_address_without_a_server_is_reported(bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cribo.data.sources.storage.ANSWER_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    type(bucket).clear_instance_cache()
    with pytest.raises(ConnectionError, match=r"cannot open s3://pictures: .*check the address, the network"):
        open_collection("s3://pictures")


def test_images_that_a_server_forbids_or_lacks_are_not_requested_again() -> None:
    pytest.importorskip("aiohttp")

    class Refusing(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(403 if "forbidden" in self.path else 404)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (the name of the base class)
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        images = rows_of({"image": np.array([f"{url}/forbidden.jpg", f"{url}/gone.jpg"])})
        with pytest.raises(PermissionError, match="the server answers with status 403"):
            images.read(0)
        with pytest.raises(FileNotFoundError, match=r"No such file or directory: .*gone\.jpg"):
            images.read(1)
        server.shutdown()


def test_hashes_of_a_collection_detect_changes(tmp_path: Path) -> None:
    for name, content in (("a.jpg", b"1"), ("b.jpg", b"2")):
        (tmp_path / name).write_bytes(content)
    collection = open_collection(tmp_path)
    before = fingerprint(collection), content_hash(collection), sampled_hash(collection)
    os.utime(tmp_path / "a.jpg", (0, 0))
    assert fingerprint(collection).files == before[0].files
    assert fingerprint(collection).times != before[0].times
    assert (content_hash(collection), sampled_hash(collection)) == before[1:]
    (tmp_path / "a.jpg").write_bytes(b"3")
    assert fingerprint(collection).files == before[0].files
    assert content_hash(collection) != before[1]
    assert sampled_hash(collection) != before[2]
    (tmp_path / "a.jpg").unlink()
    assert fingerprint(collection).files != before[0].files
