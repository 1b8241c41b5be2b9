import multiprocessing
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from tests.data.photographs import encoded

from cribo.base.errors import DataError, MissingData, UnreadableImage
from cribo.data.reading import read_image
from cribo.data.sources.collection import open_collection
from cribo.data.sources.images import ImageSource
from cribo.data.sources.parquet import ParquetImages, open_parquet

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

CONTENTS = [encoded(number, "PNG" if number % 2 else "JPEG") for number in range(12)]


def write(path: Path, column: Any, *, name: str = "image", group: int = 4, **others: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({**others, name: column}), path, row_group_size=group)
    return path


def names(images: ImageSource) -> list[str]:
    return [images.name(index) for index in range(len(images))]


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cribo.data.sources.parquet._BATCH_BYTES", 1)
    monkeypatch.setattr("cribo.data.sources.parquet._BATCH_ROWS", (2, 2))


def test_rows_of_bytes_in_any_order_equal_their_files(tmp_path: Path, small_batches: None) -> None:
    write(tmp_path / "b.parquet", pa.array(CONTENTS[8:], pa.large_binary()))
    write(tmp_path / "a.parquet", pa.array(CONTENTS[:8], pa.binary()), group=5)
    write(tmp_path / ".hidden.parquet", pa.array(CONTENTS))
    images = open_collection(tmp_path)
    assert names(images) == [*(f"a.parquet/{row}" for row in range(8)), *(f"b.parquet/{row}" for row in range(4))]
    for index in np.random.default_rng(0).permutation(np.repeat(range(12), 3)).tolist():
        assert images.read(index).content == CONTENTS[index]
    with ThreadPoolExecutor(4) as pool:
        assert [image.content for image in pool.map(images.read, range(12))] == CONTENTS


def test_structs_are_named_by_row_with_the_suffix_of_their_path(tmp_path: Path) -> None:
    (tmp_path / "far.png").write_bytes(CONTENTS[1])
    values = [
        {"bytes": CONTENTS[0], "path": "street/a.JPG"},
        {"bytes": None, "path": "far.png"},
        {"bytes": CONTENTS[2], "path": None},
        {"bytes": CONTENTS[3], "path": "../#?.exe"},
        {"bytes": b"", "path": None},
        None,
    ]
    images = open_collection(write(tmp_path / "train.parquet", values, label=range(6)))
    assert names(images) == [f"train.parquet/{name}" for name in ("0.jpg", "1.png", "2", "3", "4", "5")]
    assert [images.read(index).content for index in range(4)] == CONTENTS[:4]
    for index in (4, 5):
        with pytest.raises(UnreadableImage, match=f"train.parquet/{index}: the row has no bytes"):
            images.load(index)
    assert names(images.part([1, 4])) == ["train.parquet/1.png", "train.parquet/4"]


def test_paths_are_relative_to_the_file_absolute_or_urls(tmp_path: Path, memory: MemoryFileSystem) -> None:
    (tmp_path / "near").mkdir()
    (tmp_path / "near" / "a.jpg").write_bytes(CONTENTS[0])
    memory.pipe_file("/pictures/b.png", CONTENTS[1])
    paths = ["near/a.jpg", str(tmp_path / "near" / "a.jpg"), "memory://pictures/b.png", None, "gone.jpg"]
    images = open_collection(write(tmp_path / "list.parquet", paths, name="url"))
    assert names(images) == [*paths[:3], "list.parquet/3", "gone.jpg"]
    assert [images.read(index).content for index in range(3)] == [CONTENTS[0], CONTENTS[0], CONTENTS[1]]
    assert images.state(0).size_bytes == len(CONTENTS[0])
    with pytest.raises(UnreadableImage, match="the row has no path"):
        images.read(3)
    with pytest.raises(FileNotFoundError):
        images.read(4)
    with pytest.raises(UnreadableImage, match=r"gone\.jpg: no such file"):
        images.load(4)
    with pytest.raises(DataError, match=r"a path in list\.parquet resolves to memory://pictures/b\.png, outside"):
        open_collection(tmp_path / "list.parquet", inside=True)


def test_files_below_a_url_are_read_like_those_of_a_folder(tmp_path: Path, memory: MemoryFileSystem) -> None:
    for name in ("a.parquet", "b.parquet"):
        path = write(tmp_path / name, CONTENTS[:6])
        memory.pipe_file(f"/pictures/{name}", path.read_bytes())
    memory.pipe_file("/pictures/listed/list.parquet", write(tmp_path / "c", ["../x.png"], name="path").read_bytes())
    memory.pipe_file("/pictures/x.png", CONTENTS[1])
    remote, local = open_parquet("memory://pictures"), open_parquet(tmp_path)
    assert names(remote) == names(local)
    assert all(remote.read(index) == local.read(index) for index in range(12))
    one = open_collection("memory://pictures/b.parquet")
    assert one.read(5) == local.read(11)


def test_the_column_is_chosen_by_name(tmp_path: Path) -> None:
    two = pa.table({"other": CONTENTS[:2], "img": CONTENTS[2:4], "label": [1, 2]})
    pq.write_table(two, tmp_path / "a.parquet")
    assert open_collection(tmp_path).read(0).content == CONTENTS[2]
    assert open_collection(tmp_path, column="other").read(0).content == CONTENTS[0]
    with pytest.raises(DataError, match=r"a\.parquet has no column 'othr': did you mean other\?"):
        open_collection(tmp_path, column="othr")
    with pytest.raises(DataError, match=r"column 'label' of .* has the type int64: images must be bytes, paths"):
        open_collection(tmp_path, column="label")
    with pytest.raises(DataError, match=r"no column of images in .*b\.parquet: choose .*, other, label"):
        open_collection(write(tmp_path / "b.parquet", [1, 2], name="label", other=CONTENTS[:2]))
    with pytest.raises(DataError, match=r"column 'img' contains bytes in other files, but in .*b.* does not exist"):
        open_collection(tmp_path)


def test_broken_files_are_reported(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole.parquet", CONTENTS)
    (tmp_path / "cut.parquet").write_bytes(whole.read_bytes()[:-100])
    (tmp_path / "empty.parquet").touch()
    for name in ("cut", "empty"):
        with pytest.raises(DataError, match=rf"{name}\.parquet is not a Parquet file, or it is incomplete"):
            open_collection(tmp_path / f"{name}.parquet")
    with pytest.raises(DataError, match="have no rows"):
        open_collection(write(tmp_path / "no_rows.parquet", pa.array([], pa.binary())))
    with pytest.raises(MissingData, match=r"no 'gone\.parquet'.*did you mean"):
        open_parquet(tmp_path / "gone.parquet")
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match="no Parquet files in"):
        open_parquet(tmp_path / "none")


def test_a_file_that_became_shorter_is_unreadable_not_wrong(tmp_path: Path) -> None:
    images = open_collection(write(tmp_path / "a.parquet", CONTENTS))
    write(tmp_path / "a.parquet", CONTENTS[:3])
    assert images.read(2).content == CONTENTS[2]
    with pytest.raises(UnreadableImage, match=r"a\.parquet is broken or has changed: it has 3 rows"):
        images.read(7)


def test_a_part_is_small_and_reads_only_its_own_files(tmp_path: Path) -> None:
    for file in range(30):
        write(tmp_path / f"{file:02d}.parquet", [{"bytes": content, "path": "a.png"} for content in CONTENTS])
    images = open_collection(tmp_path)
    assert isinstance(images, ParquetImages)
    images.read(0)
    part = images.part(range(2, 360, 12 * 9))
    for file in range(30):
        if file not in (0, 9, 18, 27):
            (tmp_path / f"{file:02d}.parquet").unlink()
    packed = pickle.dumps(part)
    assert len(packed) < 3000 < len(pickle.dumps(images))
    again = pickle.loads(packed)
    assert names(again) == [f"{file:02d}.parquet/2.png" for file in (0, 9, 18, 27)]
    assert [again.read(index).content for index in range(4)] == [CONTENTS[2]] * 4
    assert names(again.part([1, 3])) == ["09.parquet/2.png", "27.parquet/2.png"]
    assert len(images.part([])) == 0


def test_row_groups_are_not_read_whole(tmp_path: Path) -> None:
    contents = [os.urandom(2**18) for _ in range(600)]
    pq.write_table(pa.table({"image": contents}), tmp_path / "a.parquet", write_batch_size=8)
    images = open_parquet(tmp_path)
    before, most = pa.total_allocated_bytes(), 0
    for index, content in enumerate(contents):
        assert images.read(index).content == content
        most = max(most, pa.total_allocated_bytes() - before)
    assert most < 2**27  # of 150 MiB


def _same(images: ParquetImages) -> None:
    assert all(images.read(index).content == content for index, content in enumerate(CONTENTS))


def test_a_forked_process_reads_its_own_files(tmp_path: Path, memory: MemoryFileSystem) -> None:
    memory.pipe_file("/pictures/a.parquet", write(tmp_path / "a.parquet", CONTENTS).read_bytes())
    images = open_parquet("memory://pictures")
    images.read(0)
    with images._rows_of_files._lock:  # held by another thread at the fork
        process = multiprocessing.get_context("fork").Process(target=_same, args=(images,))
        process.start()
        process.join(60)
    assert process.exitcode == 0


def test_pretraining_reads_rows(tmp_path: Path) -> None:
    images = open_collection(write(tmp_path / "a.parquet", CONTENTS))
    (tmp_path / "b.png").write_bytes(CONTENTS[3])
    assert torch.equal(images.load(3), read_image(tmp_path / "b.png"))
    assert isinstance(images, ParquetImages)
    pixels, factor = images.load_reduced(0, lambda height, width: 2)
    assert (pixels.shape, factor) == ((3, 15, 20), 2)


def test_missing_paths_beside_a_column_of_bytes_suggest_it(tmp_path: Path) -> None:
    pq.write_table(pa.table({"image": ["a.jpg", "b.jpg"], "bytes": CONTENTS[:2]}), tmp_path / "x.parquet")
    with pytest.raises(UnreadableImage, match=r"no such file.*--column bytes"):
        open_collection(tmp_path).load(0)
    assert open_collection(tmp_path, column="bytes").read(1).content == CONTENTS[1]
    (tmp_path / "a.jpg").write_bytes(CONTENTS[2])
    assert open_collection(tmp_path).read(0).content == CONTENTS[2]
