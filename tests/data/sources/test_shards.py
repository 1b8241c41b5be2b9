import errno
import io
import multiprocessing
import os
import pickle
import shutil
import tarfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from filelock import FileLock
from fsspec.implementations.memory import MemoryFileSystem
from tests.data.batches import assert_same_samples, view_pairs
from tests.data.photographs import encoded, write_tar

from cribo.base.errors import ConfigError, DataError, MissingData, ShardError, UnreadableImage
from cribo.data.config import Reading
from cribo.data.loading import BatchLoader
from cribo.data.reading import read_image
from cribo.data.samples import Batch, StepBatchSampler
from cribo.data.sources.collection import open_collection
from cribo.data.sources.images import OrderedSource, PackedNames, ReducingSource
from cribo.data.sources.shards import ShardedImages, open_shards, window_of
from cribo.data.sources.storage import LocalShards, RemoteShards, ShardCache
from cribo.data.sources.tars import INDEX, ShardIndex


def write_collection(folder: Path, shards: int, per_shard: int) -> list[bytes]:
    """Write shards of noise images and return the images in index order."""
    contents = [encoded(number) for number in range(shards * per_shard)]
    for shard in range(shards):
        part = range(shard * per_shard, (shard + 1) * per_shard)
        write_tar(folder / f"part-{shard:04d}.tar", {f"{number:06d}.jpg": contents[number] for number in part})
    return contents


def of_sizes(counts: list[int], shard_bytes: int) -> ShardedImages:
    """Return images without files, to test their order."""

    class Nowhere(LocalShards):
        def __init__(self) -> None:
            self.root = "nowhere"
            self.names, self.sizes = tuple(map(str, range(len(counts)))), (shard_bytes,) * len(counts)

    store, total = Nowhere(), sum(counts)
    places = np.full(total, 512), np.ones(total, dtype=np.int64)
    return ShardedImages(store, ShardIndex(store.names, store.sizes, np.cumsum(counts), *places, PackedNames([])))


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setattr("cribo.data.sources.storage.RETRY_DELAYS", (0.01, 0.01, 0.01))
    return folder


# ------------------------------------------------------------------ contents of tars


def test_images_come_shard_by_shard_and_equal_their_files(tmp_path: Path) -> None:
    kinds = {"a.jpg": "JPEG", "b.PNG": "PNG", "c/d.webp": "WEBP"}
    contents = {name: encoded(number, kind) for number, (name, kind) in enumerate(kinds.items())}
    write_tar(tmp_path / "b.tar", {"z.jpg": contents["a.jpg"]})
    write_tar(tmp_path / "a.tar", contents)
    images = open_collection(tmp_path)
    assert isinstance(images, ReducingSource)
    assert isinstance(images, OrderedSource)
    assert [images.name(i) for i in range(len(images))] == [
        "a.tar/a.jpg",
        "a.tar/b.PNG",
        "a.tar/c/d.webp",
        "b.tar/z.jpg",
    ]
    for index, (name, content) in enumerate(contents.items()):
        path = tmp_path / "single" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        assert torch.equal(images.load(index), read_image(path))
    with pytest.raises(IndexError, match=r"0\.\.3, got 4"):
        images.load(4)


def test_jpegs_are_decoded_reduced(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", {"a.jpg": encoded(0, size=(64, 48))})
    pixels, reduction = open_shards(tmp_path).load_reduced(
        0, lambda height, width: 2 if (height, width) == (48, 64) else 1
    )
    assert (pixels.shape, reduction) == ((3, 24, 32), 2)


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT])
def test_other_members_of_a_tar_are_ignored(tmp_path: Path, form: int) -> None:
    image = encoded(0)
    deep = "/".join(["folder"] * 13) + "/deep.jpg"  # some longer than 100 characters, for which formats differ
    longer = f"{'long' * 40}.jpg" if form != tarfile.USTAR_FORMAT else "long.jpg"
    (tmp_path / "made").mkdir()
    with tarfile.open(tmp_path / "made" / "a.tar", "w", format=form) as tar:
        for name, content in {
            "0.jpg": image,
            "0.json": b"{}",
            "0.cls": b"7",
            "0.mask.png": encoded(1, "PNG"),  # a further part of sample 0
            "a.photograph.jpg": image,  # not part of a sample
            "._0.jpg": b"what a Mac leaves",
            ".jpg": image,
            deep: image,
            longer: image,
        }.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        for name, kind in (
            ("folder.jpg", tarfile.DIRTYPE),
            ("link.jpg", tarfile.SYMTYPE),
            ("hard.jpg", tarfile.LNKTYPE),
        ):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "/etc/passwd"
            tar.addfile(member)
        tar.addfile(tarfile.TarInfo("empty.jpg"))
    images = open_shards(tmp_path / "made")
    names = [images.name(i).removeprefix("a.tar/") for i in range(len(images))]
    assert names == ["0.jpg", "a.photograph.jpg", deep, longer, "empty.jpg"]
    assert all(torch.equal(images.load(i), images.load(0)) for i in range(4))
    with pytest.raises(UnreadableImage, match=r"a\.tar/empty\.jpg: the file is empty"):
        images.load(4)


def test_names_are_not_used_as_paths(tmp_path: Path) -> None:
    image = encoded(0)
    hostile = ["/etc/absolute.jpg", "../../up.jpg", "new\nline\x1b[31m.jpg", os.fsdecode(b"caf\xe9.jpg"), "straße.jpg"]
    write_tar(tmp_path / "data" / "a.tar", dict.fromkeys(hostile, image))
    images = open_shards(tmp_path / "data")
    assert [images.name(i) for i in range(5)] == [
        "a.tar/etc/absolute.jpg",
        "a.tar/../../up.jpg",
        r"a.tar/new\nline\x1b[31m.jpg",
        r"a.tar/caf\udce9.jpg",
        "a.tar/straße.jpg",
    ]
    assert all(images.load(i).shape == (3, 30, 40) for i in range(5))
    assert {path.name for path in tmp_path.rglob("*")} - {f".{INDEX}.lock"} == {"data", "a.tar", INDEX}


def test_large_images_are_not_decoded(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", {"a.jpg": encoded(0)})
    with pytest.raises(UnreadableImage, match=r"a\.tar/a\.jpg: 40 x 30 pixels are more than max_pixels = 1199"):
        open_shards(tmp_path, reading=Reading(max_pixels=1199)).load(0)


# ------------------------------------------------------------------ detection of shards


def test_a_folder_of_tars_without_images_is_read_as_shards(tmp_path: Path) -> None:
    write_collection(tmp_path / "root" / "train", 2, 3)
    assert len(open_collection(tmp_path / "root", "train")) == 6
    assert len(open_collection(tmp_path / "root" / "train" / "part-0001.tar")) == 3
    unpacked = tmp_path / "unpacked"
    write_collection(unpacked, 1, 3)
    (unpacked / "train").mkdir()
    (unpacked / "train" / "a.jpg").write_bytes(encoded(0))
    assert [open_collection(unpacked).name(0)] == ["train/a.jpg"]


def test_missing_shards_are_reported(tmp_path: Path) -> None:
    with pytest.raises(MissingData, match="there is no 'nothing'"):
        open_collection(tmp_path / "nothing")
    with pytest.raises(DataError, match="no images in"):
        open_collection(tmp_path)
    with pytest.raises(DataError, match="no shards in"):
        open_shards(tmp_path)
    write_tar(tmp_path / "texts" / "a.tar", {"a.txt": b"text"})
    with pytest.raises(DataError, match="no images in the 1 shards of"):
        open_collection(tmp_path / "texts")
    with pytest.raises(DataError, match="no images in the 1 shards of"):  # and no index is stored
        open_collection(tmp_path / "texts")
    with pytest.raises(MissingData, match="memory://nothing does not exist"):
        open_collection("memory://nothing", cache_dir=tmp_path / "cache")
    with pytest.raises(DataError, match="carrier-pigeon"):
        open_collection("carrier-pigeon://coop", cache_dir=tmp_path / "cache")


def test_inside_refuses_paths_outside_the_list_folder(tmp_path: Path) -> None:
    inner, outer = tmp_path / "inner", tmp_path / "outer"
    for folder in (inner, outer):
        folder.mkdir()
        (folder / "a.jpg").write_bytes(encoded(0))
    (inner / "link.jpg").symlink_to(outer / "a.jpg")
    (inner / "near.jpg").symlink_to(inner / "a.jpg")
    for line in ("../outer/a.jpg", str(outer / "a.jpg"), "link.jpg"):
        (inner / "list.txt").write_text(f"# mine\na.jpg\nnear.jpg\n\n{line}\n")
        assert len(open_collection(inner / "list.txt")) == 3
        with pytest.raises(DataError, match=r"line 5 of .*list\.txt resolves to .*outer/a\.jpg, outside .*inner"):
            open_collection(inner / "list.txt", inside=True)
    with pytest.raises(DataError, match=r"link\.jpg resolves to"):
        open_collection(inner, inside=True)
    (inner / "link.jpg").unlink()
    assert len(open_collection(inner, inside=True)) == 2


# ------------------------------------------------------------------ the index


def test_the_index_is_rebuilt_when_shards_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_collection(tmp_path, 2, 3)
    first = open_shards(tmp_path)
    monkeypatch.setattr("cribo.data.sources.tars.image_members", None)  # no shard is scanned again
    again = open_shards(tmp_path)
    assert [again.name(i) for i in range(6)] == [first.name(i) for i in range(6)]
    assert all(torch.equal(again.load(i), first.load(i)) for i in range(6))
    monkeypatch.undo()
    write_tar(tmp_path / "part-0002.tar", {"new.jpg": encoded(9)})
    assert len(open_shards(tmp_path)) == 7
    (tmp_path / "part-0000.tar").unlink()
    assert open_shards(tmp_path).name(0) == "part-0001.tar/000003.jpg"


@pytest.mark.parametrize("damage", ["text", "cut", "beyond", "negative", "short"])
def test_a_broken_index_is_rebuilt(tmp_path: Path, damage: str) -> None:
    contents = write_collection(tmp_path, 2, 3)
    index = open_shards(tmp_path).index
    path = tmp_path / INDEX
    whole = path.read_bytes()
    broken = {
        "beyond": replace(index, offsets=index.offsets + 10**9),
        "negative": replace(index, lengths=-index.lengths),
        "short": replace(index, lengths=index.lengths[:-1]),
    }
    if damage in broken:
        broken[damage].write(path)
    else:
        path.write_bytes(b"text" if damage == "text" else whole[: len(whole) // 2])
    images = open_shards(tmp_path)
    assert images.load(5).shape == (3, 30, 40)
    assert len(images) == len(contents)


def test_a_replaced_shard_of_the_same_size_is_detected(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", {"a.jpg": bytes(1000), "b.jpg": bytes(2000)})
    open_shards(tmp_path)
    write_tar(tmp_path / "a.tar", {"a.jpg": bytes(2000), "b.jpg": bytes(1000)})
    with pytest.raises(ShardError, match=r"a\.tar has changed and does not match cribo-index\.npz: remove"):
        open_shards(tmp_path).load(1)


# ------------------------------------------------------------------ broken shards


def test_a_truncated_shard_is_refused_by_name(tmp_path: Path) -> None:
    write_tar(tmp_path / "whole.tar", {"a.jpg": encoded(0), "b.jpg": encoded(1)})
    whole = (tmp_path / "whole.tar").read_bytes()
    lengths = [len(encoded(0)), len(encoded(1))]
    second = 512 + -(-lengths[0] // 512) * 512
    for cut in (100, 512, 512 + lengths[0] - 1, second + 100, second + 512, second + 512 + lengths[1] - 1):
        (tmp_path / "data").mkdir()
        (tmp_path / "data" / "whole.tar").write_bytes(whole)
        (tmp_path / "data" / "zcut.tar").write_bytes(whole[:cut])
        with pytest.raises(DataError, match=r"the shard .*zcut\.tar is broken"):
            open_shards(tmp_path / "data")
        shutil.rmtree(tmp_path / "data")
    end = second + 512 + -(-lengths[1] // 512) * 512
    for cut in (end, end + 512):  # all images are present; some programs write no end-of-archive marker
        (tmp_path / "cut.tar").write_bytes(whole[:cut])
        assert len(open_shards(tmp_path / "cut.tar")) == 2
        (tmp_path / INDEX).unlink()


def test_other_files_are_refused(tmp_path: Path) -> None:
    import gzip

    write_tar(tmp_path / "a.tar", {"a.jpg": encoded(0)})
    whole = (tmp_path / "a.tar").read_bytes()
    damaged = bytearray(whole + whole)
    damaged[512 + -(-len(encoded(0)) // 512) * 512] = 7  # the end-of-archive marker
    for content in (gzip.compress(whole), b"text" * 1000, bytes(damaged)):
        (tmp_path / "a.tar").write_bytes(content)
        with pytest.raises(DataError, match=r"a\.tar is broken"):
            open_shards(tmp_path)


def test_a_shard_deleted_or_truncated_during_use_is_reported(tmp_path: Path) -> None:
    write_collection(tmp_path, 2, 3)
    images = open_shards(tmp_path)
    images.load(0)
    (tmp_path / "part-0001.tar").unlink()
    with pytest.raises(ShardError, match=r"the shard .*part-0001\.tar: file not found"):
        images.load(3)
    with (tmp_path / "part-0000.tar").open("r+b") as file:
        file.truncate(600)
    with pytest.raises(ShardError, match=r"part-0000\.tar has changed"):
        images.load(2)
    write_collection(tmp_path, 2, 3)
    images = open_shards(tmp_path)
    images.load(0)
    (tmp_path / "part-0000.tar").unlink()
    assert images.load(1).shape == (3, 30, 40)  # the shard is still open


# ------------------------------------------------------------------ order


@pytest.mark.parametrize("counts", [[5], [4, 0, 9], [3] * 40, [7, 1] * 60, [200] * 100])
def test_the_order_is_a_permutation_that_depends_on_seed_and_epoch(counts: list[int]) -> None:
    images = of_sizes(counts, 64 * 2**20)
    orders = [images.epoch_order(seed, epoch) for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    for order in orders:
        assert order.sort().values.tolist() == list(range(sum(counts)))
    assert torch.equal(orders[0], images.epoch_order(0, 0))
    if sum(counts) > 10:
        assert not torch.equal(orders[0], orders[1])
        assert not torch.equal(orders[0], orders[2])


def test_few_shards_are_read_at_a_time() -> None:
    images = of_sizes([100] * 200, 2**30)
    assert images.window == 8
    shards = images.epoch_order(3, 5) // 100
    for start in range(0, len(shards) - 100, 100):  # one shard enters for each shard's worth of images
        assert len(shards[start : start + 100].unique()) <= images.window + 2
    seen = [(shards == shard).nonzero() for shard in range(200)]
    # The window is circular, so a shard may contribute its last images at the start.
    spans = [int(places.max() - places.min()) for places in seen]
    assert sum(span <= 100 * (images.window + 1) for span in spans) >= 200 - images.window - 1
    joins = Counter((place.min() // 100).item() for place in seen)
    assert max(joins.values()) <= images.window + 1


def test_batches_are_mixed_as_well_as_the_window_allows() -> None:
    counts, batch = 50, 256
    for shards, shard_bytes, window in ((400, 64 * 2**20, 64), (400, 2**30, 8), (20, 2**20, 20)):
        images = of_sizes([counts] * shards, shard_bytes)
        assert images.window == window
        order = images.epoch_order(0, 0) // counts
        # Including the first and the last batch.
        for rows in (order[: len(order) // batch * batch].view(-1, batch), order[:batch][None], order[-batch:][None]):
            same = [(torch.bincount(row) * (torch.bincount(row) - 1)).sum() / (batch * (batch - 1)) for row in rows]
            assert float(torch.stack(same).mean()) == pytest.approx(1 / window, rel=0.25)


def test_few_shards_give_uniform_permutations() -> None:
    images = of_sizes([2, 2], 2**20)
    seen = Counter(tuple(images.epoch_order(0, epoch).tolist()) for epoch in range(2400))
    assert len(seen) == 24
    # 100 of each are expected, with a standard deviation of 10.
    assert 55 < min(seen.values()) <= max(seen.values()) < 145


def test_the_window_depends_on_the_sizes_only() -> None:
    assert window_of([64 * 2**20] * 1000) == 64
    assert window_of([256 * 2**20] * 1000) == 16
    assert window_of([4 * 2**30] * 1000) == 8
    assert window_of([0] * 100) == 64


def batches_of(images: ShardedImages, epoch: int, *, skip: int = 0, **rank: int) -> list[list[tuple[int, int]]]:
    start = epoch * (len(images) // 12) + skip
    sampler = StepBatchSampler(images, 12, 3, position=lambda: start, **rank)
    return list(sampler)


def test_processes_share_the_batches_of_one() -> None:
    images = of_sizes([11] * 30, 2**30)
    whole = batches_of(images, epoch=2)
    order = images.epoch_order(3, 2).tolist()
    assert [image for batch in whole for _, image in batch] == order[: 330 // 12 * 12]
    for world_size in (2, 3, 4, 12):
        shares = [batches_of(images, epoch=2, rank=rank, world_size=world_size) for rank in range(world_size)]
        joined = [[key for share in shares for key in share[step]] for step in range(len(whole))]
        assert joined == whole


def test_the_order_resumes_at_any_step() -> None:
    images = of_sizes([11] * 30, 2**30)
    whole = batches_of(images, epoch=1)
    for step in range(len(whole)):
        assert batches_of(images, epoch=1, skip=step) == whole[step:]


# ------------------------------------------------------------------ batches


def assert_same_views(ours: Batch, theirs: Batch) -> None:
    assert torch.equal(ours.images, theirs.images)
    assert_same_samples(ours, theirs)
    assert [entry.name.rpartition("/")[2] for entry in ours.unreadable] == [
        entry.name.rpartition("/")[2] for entry in theirs.unreadable
    ]


def test_shards_give_the_same_batches_as_the_folder(tmp_path: Path) -> None:
    contents = write_collection(tmp_path / "shards", 3, 4)
    broken = tmp_path / "shards" / "part-0001.tar"
    contents[5] = contents[5][:200]
    write_tar(broken, {f"{number:06d}.jpg": contents[number] for number in range(4, 8)})
    (tmp_path / "files").mkdir()
    for number, content in enumerate(contents):
        (tmp_path / "files" / f"{number:06d}.jpg").write_bytes(content)
    sharded, files = open_collection(tmp_path / "shards"), open_collection(tmp_path / "files")
    keys = [(epoch, image) for epoch in (0, 1) for image in sharded.epoch_order(0, epoch).tolist()]  # type: ignore[union-attr]
    ours, theirs = view_pairs(sharded).__getitems__(keys), view_pairs(files).__getitems__(keys)
    assert_same_views(ours, theirs)
    assert {entry.name for entry in ours.unreadable} == {"part-0001.tar/000005.jpg"}


@pytest.mark.parametrize("url", [False, True])
def test_workers_do_not_change_batches(tmp_path: Path, url: bool) -> None:
    write_collection(tmp_path / "shards", 10, 4)
    root = f"file://{tmp_path}/shards" if url else tmp_path / "shards"
    images = open_shards(root, cache_dir=tmp_path / "cache")
    images.load(0)  # files and connections are open when the workers are forked

    def batches(workers: int) -> list[Batch]:
        sampler = StepBatchSampler(images, 8, 0, position=lambda: 0)
        return list(BatchLoader(view_pairs(images), sampler, workers=workers, pin_memory=False))

    for ours, theirs in zip(batches(3), batches(0), strict=True):
        assert_same_views(ours, theirs)


def test_a_collection_can_be_pickled(tmp_path: Path) -> None:
    write_collection(tmp_path / "shards", 2, 2)
    for root in (tmp_path / "shards", f"file://{tmp_path}/shards"):
        images = open_shards(root, cache_dir=tmp_path / "cache")
        images.load(0)
        assert torch.equal(pickle.loads(pickle.dumps(images)).load(3), images.load(3))


# ------------------------------------------------------------------ failing storage


class Flaky(MemoryFileSystem):
    """An in-memory storage with injected failures."""

    protocol = "flaky"
    store: dict[str, Any] = {}
    pseudo_dirs = [""]
    cachable = False

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix("flaky://").strip("/")

    failures: list[Any] = []
    opened: list[str] = []

    def _open(self, path: str, mode: str = "rb", *args: Any, **kwargs: Any) -> Any:
        file = super()._open(path, mode, *args, **kwargs)
        if mode != "rb" or not path.endswith(".tar"):
            return file
        Flaky.opened.append(path)
        if not Flaky.failures:
            return io.BytesIO(file.getvalue())
        failure = Flaky.failures.pop(0)
        if isinstance(failure, Exception):
            raise failure
        return failure(file.getvalue())


@pytest.fixture
def flaky(tmp_path: Path) -> Iterator[Callable[..., ShardedImages]]:
    fsspec.register_implementation("flaky", Flaky, clobber=True)
    write_collection(tmp_path / "made", 10, 2)
    for path in (tmp_path / "made").iterdir():
        Flaky().pipe_file(f"/pictures/{path.name}", path.read_bytes())

    def call(**arguments: Any) -> ShardedImages:
        images = open_shards("flaky://pictures", cache_dir=tmp_path / "cache", **arguments)
        Flaky.opened.clear()
        return images

    yield call
    Flaky.store.clear()
    Flaky.failures.clear()


def cut(content: bytes) -> io.BytesIO:
    return io.BytesIO(content[:700])


@pytest.mark.parametrize("failure", [OSError("reset by peer"), ValueError("odd answer"), cut])
def test_temporary_failures_are_retried(flaky: Callable[..., ShardedImages], tmp_path: Path, failure: Any) -> None:
    images = flaky()
    Flaky.failures[:] = [failure] * 3
    expected = open_shards(tmp_path / "made").load(0)
    assert torch.equal(images.load(0), expected)
    assert Flaky.opened == ["/pictures/part-0000.tar"] * 4
    assert [path.name for path in (tmp_path / "cache").glob("*/*part*") if path.suffix != ".lock"] == ["part-0000.tar"]


def test_permanent_failures_name_the_shard(flaky: Callable[..., ShardedImages], tmp_path: Path) -> None:
    images = flaky()
    Flaky.failures[:] = [OSError("reset by peer")] * 9
    with pytest.raises(ShardError, match=r"the shard flaky://pictures/part-0004\.tar: reset by peer; tried 4 times"):
        images.load(8)
    assert not list((tmp_path / "cache").glob("*/*.part"))
    Flaky.failures.clear()
    assert images.load(8).shape == (3, 30, 40)


def test_scanning_retries_temporary_failures(flaky: Callable[..., ShardedImages]) -> None:
    Flaky.failures[:] = [OSError("reset by peer"), cut, OSError("reset by peer")]
    with pytest.raises(DataError, match="is broken"):  # as for a file that is broken in the storage
        flaky()
    Flaky.failures[:] = [OSError("reset by peer")] * 3
    assert len(flaky()) == 20


def test_a_deleted_shard_is_not_retried(flaky: Callable[..., ShardedImages], monkeypatch: pytest.MonkeyPatch) -> None:
    images = flaky()
    monkeypatch.setattr("cribo.data.sources.storage.RETRY_DELAYS", (100.0,))
    Flaky().rm("/pictures/part-0003.tar")
    with pytest.raises(ShardError, match=r"the shard flaky://pictures/part-0003\.tar: file not found"):
        images.load(6)


def test_shards_are_downloaded_once_within_the_limit(flaky: Callable[..., ShardedImages]) -> None:
    images = flaky()
    for index in images.epoch_order(0, 0).tolist():
        images.load(index)
    assert sorted(Counter(Flaky.opened).values()) == [1] * 10
    again = flaky()
    again.load(0)
    assert Flaky.opened == []


def test_the_index_of_remote_shards_is_used(flaky: Callable[..., ShardedImages], tmp_path: Path) -> None:
    open_shards(tmp_path / "made")
    Flaky().pipe_file(f"/pictures/{INDEX}", (tmp_path / "made" / INDEX).read_bytes())
    Flaky.failures[:] = [OSError("no shard is to be walked over")] * 99
    images = flaky()
    Flaky.failures.clear()
    assert images.load(19).shape == (3, 30, 40)


# ------------------------------------------------------------------ the cache


def test_the_cache_evicts_the_least_recently_used_shard(flaky: Callable[..., ShardedImages], tmp_path: Path) -> None:
    images = flaky()
    size = images.index.sizes[0]
    cache = ShardCache(tmp_path / "small", limit_bytes=3 * size)
    store = RemoteShards("flaky://pictures", cache)
    for number, shard in enumerate((0, 1, 2, 0, 3)):
        with store.open(shard) as file:
            os.utime(store.index_folder / store.names[shard], (number, number))  # file system timestamps are coarse
            assert len(file.read()) == size
    assert sorted(path.name[5:9] for path in store.index_folder.glob("*.tar")) == ["0000", "0002", "0003"]


def test_a_cache_that_is_too_small_is_refused(flaky: Callable[..., ShardedImages], tmp_path: Path) -> None:
    size = flaky().index.sizes[0]
    with pytest.raises(DataError, match=r"data\.cache_gib .* is too small for flaky://pictures: 10 of its shards"):
        flaky(cache_gib=9 * size / 2**30)
    with pytest.raises(ConfigError, match="cache_gib must be > 0, got 0"):
        flaky(cache_gib=0)


def test_partial_files_of_killed_processes_are_removed(flaky: Callable[..., ShardedImages], tmp_path: Path) -> None:
    size = flaky().index.sizes[0]
    store = RemoteShards("flaky://pictures", ShardCache(tmp_path / "small", limit_bytes=2 * size))
    store.open(0).close()
    shard, left = store.index_folder / store.names[7], store.index_folder / f"{store.names[7]}.part"
    process = multiprocessing.get_context("fork").Process(
        target=store.cache.open, args=(shard, size, lambda part: time.sleep(60))
    )
    process.start()
    while not left.exists():
        time.sleep(0.01)
    os.utime(left, (1, 1))
    store.open(1).close()
    assert left.stat().st_size == size  # others are evicted during the download
    process.kill()
    process.join()
    store.open(2).close()
    assert {path.name for path in store.index_folder.glob("*[!k]")} == {"part-0001.tar", "part-0002.tar"}


def test_a_full_disk_stops_immediately_with_advice(flaky: Callable[..., ShardedImages], tmp_path: Path) -> None:
    images = flaky()
    Flaky.failures[:] = [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))]
    with pytest.raises(ShardError, match=r"cannot store shards in .*No space left on device; lower data\.cache_gib"):
        images.load(0)
    assert len(Flaky.opened) == 1
    assert not list((tmp_path / "cache").glob("*/*.part"))


def test_a_shard_of_another_size_is_downloaded_again(flaky: Callable[..., ShardedImages], tmp_path: Path) -> None:
    images = flaky()
    images.load(0)
    kept = next((tmp_path / "cache").glob("*/part-0000.tar"))
    kept.write_bytes(b"cut")
    assert flaky().load(0).shape == (3, 30, 40)


def _read_all(root: str, cache: str, limit: int, epoch: int, results: Any) -> None:
    """Read every image in a random order, in one of several processes."""
    store = RemoteShards(root, ShardCache(cache, limit_bytes=limit))
    images = ShardedImages(store)
    over = 0
    seen: dict[int, int] = {}
    for index in torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch)).tolist():
        seen[index] = int(ShardedImages(store, images.index).load(index).sum())  # opens the shard again
        with FileLock(store.cache.folder / ".room.lock"):  # held while a shard is created or evicted
            kept: dict[int, int] = {}
            for path in (path for pattern in ("*.part", "*.tar") for path in store.index_folder.glob(pattern)):
                with suppress(FileNotFoundError):  # complete, so it is listed again
                    kept[path.stat().st_ino] = path.stat().st_size
        used = sum(kept.values())
        over = max(over, used)
    results.put((seen, over))


def test_two_processes_share_a_tiny_cache(tmp_path: Path) -> None:
    write_collection(tmp_path / "made", 6, 8)
    expected = open_shards(tmp_path / "made")
    size = expected.index.sizes[0]
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    arguments = (f"file://{tmp_path}/made", str(tmp_path / "cache"), 2 * size + 10)
    processes = [context.Process(target=_read_all, args=(*arguments, epoch, results)) for epoch in (0, 1)]
    for process in processes:
        process.start()
    found = [results.get(timeout=900) for _ in processes]
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    for seen, over in found:
        assert seen == {index: int(expected.load(index).sum()) for index in range(48)}
        assert over <= 2 * size + 10


# ------------------------------------------------------------------ HTTP


class _WholeFiles(SimpleHTTPRequestHandler):
    """HTTP handler that serves files of a folder and ignores ranges."""

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


class _Ranges(_WholeFiles):
    """HTTP handler that serves ranges of files."""

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        if "Range" not in self.headers or not path.is_file():
            super().do_GET()
            return
        first, last = self.headers["Range"].removeprefix("bytes=").split("-")
        part = path.read_bytes()[int(first) : int(last) + 1]
        self.send_response(206)
        self.send_header("Content-Length", str(len(part)))
        self.send_header("Content-Range", f"bytes {first}-{last}/{path.stat().st_size}")
        self.end_headers()
        self.wfile.write(part)

    def end_headers(self) -> None:
        self.send_header("Accept-Ranges", "bytes")
        super().end_headers()


def test_http_with_a_listing(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    write_collection(tmp_path / "made", 3, 2)
    with served(tmp_path, _Ranges) as url:
        images, expected = open_shards(url, cache_dir=tmp_path / "cache"), open_shards(tmp_path / "made")
        assert images.index.sizes == expected.index.sizes
        for index in range(6):
            assert torch.equal(images.load(index), expected.load(index))


@contextmanager
def served(folder: Path, handler: type[SimpleHTTPRequestHandler]) -> Iterator[str]:
    """Serve a folder; the value is the URL of its folder `made`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/made/"
    finally:
        server.shutdown()
        server.server_close()


def test_a_server_without_range_requests_is_not_retried(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("aiohttp")
    write_tar(tmp_path / "made/0.tar", {f"{number}.jpg": bytes(2**23) for number in range(3)})
    with served(tmp_path, _WholeFiles) as url, pytest.raises(ShardError, match="range requests"):
        open_shards(url, cache_dir=tmp_path / "cache").read(2)
    assert "attempt" not in caplog.text


# ------------------------------------------------------------------ S3


def test_s3_is_configured_by_the_environment(bucket: Any, tmp_path: Path) -> None:
    write_collection(tmp_path / "made", 9, 3)
    for path in (tmp_path / "made").iterdir():
        bucket.put_file(str(path), f"pictures/street/{path.name}")
    images = open_collection("s3://pictures", "street", cache_dir=tmp_path / "cache")
    expected = open_collection(tmp_path / "made")
    assert len(images) == 27
    sampler = StepBatchSampler(images, 9, 0, position=lambda: 0)
    local = view_pairs(expected)
    batches = list(sampler)
    loaded = BatchLoader(view_pairs(images), sampler, workers=2, pin_memory=False)
    for keys, batch in zip(batches, loaded, strict=True):
        assert_same_views(batch, local.__getitems__(keys))
    with pytest.raises(MissingData, match="s3://pictures/streets does not exist"):
        open_collection("s3://pictures/streets", cache_dir=tmp_path / "cache")
