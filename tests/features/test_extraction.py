import dataclasses
import errno
import multiprocessing
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from tests.evaluation.coded import Coded, blocks, random_maps

from cribo.base.errors import UnreadableImage
from cribo.data import LabelledFolder
from cribo.features import Encoder
from cribo.features import cache as cache_module
from cribo.features import extraction as module
from cribo.features.cache import FeatureCache, Machine
from cribo.features.extraction import (
    EncodedView,
    PatchFeatures,
    Preparation,
    SelectedKeys,
    extract_patches,
)
from cribo.features.patches import class_counts

SIDE = 8
SIZES = [(16, 24), (24, 24), (16, 24), (40, 16), (24, 24), (16, 24), (17, 25)]


class Counting:
    """Mean colours; counts encoded images, and raises after `limit`."""

    def __init__(self, limit: int = 10**9) -> None:
        self.limit = limit
        self.batches: list[int] = []

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        if sum(self.batches) + len(images) > self.limit:
            raise RuntimeError("the power went")
        self.batches.append(len(images))
        return F.avg_pool2d(images, SIDE).flatten(2).mT

    @property
    def images(self) -> int:
        return sum(self.batches)

    def encoder(self, identity: str | None = "counting") -> Encoder:
        return Encoder.from_function(self, SIDE, identity=identity)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write images of several sizes, with labels."""
    generator = np.random.default_rng(0)
    for part in ("images", "labels"):
        (tmp_path / part).mkdir()
    for number, (height, width) in enumerate(SIZES):
        pixels = generator.integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "images" / f"{number}.png")
        labels = generator.integers(0, 3, (height, width), dtype=np.uint8)
        Image.fromarray(labels).save(tmp_path / "labels" / f"{number}.png")
    return tmp_path


def open_folder(folder: Path) -> LabelledFolder:
    return LabelledFolder(folder / "images", folder / "labels", ["a", "b", "c"])


VIEWS = [EncodedView(number) for number in range(len(SIZES))]
PREPARATION = Preparation(SIDE)


def run(folder: Path, encode: Counting, cache: Path | None = None, **options) -> PatchFeatures:
    encoder = encode.encoder()
    kept = None if cache is None else FeatureCache(cache, encoder.identity)
    preparation, precision = options.pop("preparation", PREPARATION), options.pop("precision", "float32")
    machine = Machine(cache=kept, **options)
    return extract_patches(encoder, open_folder(folder), VIEWS, preparation, machine=machine, precision=precision)


def same(first: PatchFeatures, second: PatchFeatures) -> bool:
    return all(torch.equal(first.features(view), second.features(view)) for view in VIEWS)


# ------------------------------------------------------------------ extraction


def test_features_are_in_the_order_of_patches_and_normalised_unless_raw(folder: Path) -> None:
    found = run(folder, Counting())
    raw = run(folder, Counting(), preparation=dataclasses.replace(PREPARATION, unit=False))
    images = open_folder(folder)
    for view in VIEWS:
        pixels = PREPARATION.image(images, view).float()[None] / 255
        expected = F.avg_pool2d(pixels, SIDE).flatten(2).mT[0]
        torch.testing.assert_close(raw.features(view), expected)
        torch.testing.assert_close(found.features(view), F.normalize(expected, dim=-1))
        labels = PREPARATION.labels(images, view)
        assert torch.equal(torch.from_numpy(found.counts[view].toarray()).long(), class_counts(labels, SIDE, 3, 255))
        assert found.sizes[view] == tuple(labels.shape)


@pytest.mark.parametrize("options", [{"batch_size": 1}, {"batch_size": 2}, {"workers": 2}, {"batch_size": 64}])
def test_features_are_independent_of_batches_and_workers(folder: Path, options: dict[str, Any]) -> None:
    assert same(run(folder, Counting()), run(folder, Counting(), **options))


def test_images_of_one_size_share_a_batch(folder: Path) -> None:
    encode = Counting()
    run(folder, encode, batch_size=2)
    # Four of 16 x 24 (one of them resized), two of 24 x 24, one of 40 x 16.
    assert sorted(encode.batches) == [1, 2, 2, 2]
    assert encode.images == len(SIZES)


def test_the_number_of_waiting_images_is_bounded(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Without a bound, images of many sizes would all be held until the end."""
    monkeypatch.setattr(module, "_PENDING_BATCHES", 1)
    encode = Counting()
    found = run(folder, encode, batch_size=3)
    assert same(found, run(folder, Counting()))
    assert len(encode.batches) > 3


def test_half_precision_takes_half_the_memory(folder: Path) -> None:
    full, half = run(folder, Counting()), run(folder, Counting(), precision="float16")
    for view in VIEWS:
        assert half.features(view).dtype == torch.float16
        torch.testing.assert_close(half.features(view).float(), full.features(view), atol=5e-4, rtol=0)


def test_an_encoder_with_another_grid_is_refused(folder: Path) -> None:
    encoder = Encoder.from_function(lambda images: torch.ones(len(images), 5, 2), SIDE)
    with pytest.raises(ValueError, match="the encoder must return 6 patch features, got 5"):
        extract_patches(encoder, open_folder(folder), VIEWS, PREPARATION)


def test_features_beyond_memory_are_refused_early(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "available_memory", lambda device: 100)
    monkeypatch.setattr(module, "_PROBE_VIEWS", 3)
    encode = Counting()
    with pytest.raises(ValueError, match="--cache"):
        run(folder, encode, batch_size=1)
    assert encode.images <= 3


# ------------------------------------------------------------------ the cache on disk


def test_nothing_is_encoded_twice(folder: Path, tmp_path: Path) -> None:
    first, second = Counting(), Counting()
    written, read = run(folder, first, tmp_path / "cache"), run(folder, second, tmp_path / "cache")
    assert (first.images, second.images) == (len(SIZES), 0)
    assert same(written, read)
    assert same(read, run(folder, Counting()))
    assert read.dim == 3


def test_the_cache_is_keyed_by_content(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    run(folder, Counting(), cache)
    # The same image under another name is cached; a changed image under the same name is not.
    image = folder / "images" / "0.png"
    (folder / "images" / "1.png").write_bytes((folder / "images" / "0.png").read_bytes())
    (folder / "labels" / "1.png").write_bytes((folder / "labels" / "0.png").read_bytes())
    again = Counting()
    assert same(run(folder, again, cache), run(folder, Counting()))
    assert again.images == 0
    pixels = np.array(Image.open(image))
    pixels[0, 0] ^= 255
    Image.fromarray(pixels).save(image)
    again = Counting()
    assert same(run(folder, again, cache), run(folder, Counting()))
    assert again.images == 1


@pytest.mark.parametrize(
    "preparation",
    [Preparation(SIDE, (24, 24)), Preparation(SIDE, interpolation="bilinear"), Preparation(SIDE, unit=False)],
)
def test_another_preparation_has_other_features(folder: Path, tmp_path: Path, preparation: Preparation) -> None:
    run(folder, Counting(), tmp_path / "cache")
    again = Counting()
    found = run(folder, again, tmp_path / "cache", preparation=preparation)
    assert again.images == len(SIZES)
    assert same(found, run(folder, Counting(), preparation=preparation))


def test_other_precisions_and_encoders_are_cached_separately(folder: Path, tmp_path: Path) -> None:
    run(folder, Counting(), tmp_path / "cache")
    half, other = Counting(), Counting()
    assert run(folder, half, tmp_path / "cache", precision="float16").features(VIEWS[0]).dtype == torch.float16
    encoder = other.encoder("another")
    machine = Machine(cache=FeatureCache(tmp_path / "cache", encoder.identity))
    extract_patches(encoder, open_folder(folder), VIEWS, PREPARATION, machine=machine)
    assert (half.images, other.images) == (len(SIZES), len(SIZES))


def test_augmented_views_are_cached_by_draw(folder: Path, tmp_path: Path) -> None:
    views = [EncodedView(0, 0), EncodedView(0, 1), EncodedView(1, 0)]

    def encode(seed: int) -> tuple[int, PatchFeatures]:
        counting = Counting()
        encoder = counting.encoder()
        preparation = Preparation(SIDE, (24, 24), "bilinear", seed)
        cache = FeatureCache(tmp_path / "cache", encoder.identity)
        found = extract_patches(encoder, open_folder(folder), views, preparation, machine=Machine(cache=cache))
        return counting.images, found

    encoded, first = encode(0)
    assert encoded == 3
    encoded, again = encode(0)
    assert encoded == 0
    assert torch.equal(first.features(views[1]), again.features(views[1]))
    assert not torch.equal(first.features(views[0]), first.features(views[1]))
    assert encode(1)[0] == 3


def test_interrupted_extraction_resumes(folder: Path, tmp_path: Path) -> None:
    broken = Counting(limit=4)
    with pytest.raises(RuntimeError, match="the power went"):
        run(folder, broken, tmp_path / "cache", batch_size=1)
    again = Counting()
    assert same(run(folder, again, tmp_path / "cache", batch_size=1), run(folder, Counting()))
    assert again.images == len(SIZES) - broken.images
    assert not list((tmp_path / "cache").rglob("*.part"))


@pytest.mark.parametrize("damage", [lambda data: data[:-7], lambda data: b"", lambda data: b"no array" + data[8:]])
def test_damaged_files_are_recomputed(folder: Path, tmp_path: Path, damage) -> None:
    run(folder, Counting(), tmp_path / "cache")
    file = sorted((tmp_path / "cache").rglob("*.npy"))[2]
    file.write_bytes(damage(file.read_bytes()))
    again = Counting()
    assert same(run(folder, again, tmp_path / "cache"), run(folder, Counting()))
    assert again.images == 1


def _fill(folder: Path, cache: Path, barrier) -> None:
    torch.set_num_threads(1)  # a forked process cannot use OpenMP threads started by its parent
    barrier.wait()
    run(folder, Counting(), cache, batch_size=1)


def test_two_processes_fill_one_cache_at_once(folder: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(2)
    processes = [context.Process(target=_fill, args=(folder, tmp_path / "cache", barrier)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    again = Counting()
    assert same(run(folder, again, tmp_path / "cache"), run(folder, Counting()))
    assert again.images == 0


def test_a_cache_that_cannot_be_written_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(ValueError, match="--cache none"):
        run(folder, Counting(), tmp_path / "cache")


def test_an_encoder_without_identity_is_not_cached(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="identity"):
        FeatureCache(tmp_path, Counting().encoder(None).identity)


def test_images_without_files_are_distinguished_by_pixels(tmp_path: Path) -> None:
    maps = random_maps(3, 0)
    encode = Counting()

    def pool(images: torch.Tensor) -> torch.Tensor:
        encode.batches.append(len(images))
        return F.avg_pool2d(images, 4).flatten(2).mT

    encoder = Encoder.from_function(pool, 4, identity="counting")
    cache = FeatureCache(tmp_path, encoder.identity)
    views = [EncodedView(0), EncodedView(1), EncodedView(2)]
    extract_patches(encoder, Coded(maps), views, Preparation(4), machine=Machine(cache=cache))
    extract_patches(encoder, Coded([*maps[::-1]]), views, Preparation(4), machine=Machine(cache=cache))
    assert encode.images == 3
    extract_patches(
        encoder, Coded([blocks([0, 1], [2, 3])]), [EncodedView(0)], Preparation(4), machine=Machine(cache=cache)
    )
    assert encode.images == 4


# ------------------------------------------------------------------ keys


@pytest.mark.parametrize("rows", [1, 3, 7, 1000])
def test_key_blocks_are_contiguous(folder: Path, rows: int) -> None:
    found = run(folder, Counting())
    kept = {view: torch.arange(number % 3, found.patches_of(view), 2) for number, view in enumerate(VIEWS)}
    keys = SelectedKeys(found, kept)
    everything = torch.cat([found.features(view)[kept[view]] for view in VIEWS])
    blocks_ = list(keys.blocks(rows))
    assert all(len(block) == rows for block in blocks_[:-1])
    assert torch.equal(torch.cat(blocks_), everything)
    assert len(keys) == len(everything)


# ------------------------------------------------------------------ workers


def test_errors_in_workers_are_raised_unchanged(folder: Path) -> None:
    (folder / "images" / "3.png").write_bytes(b"no picture")
    with pytest.raises(UnreadableImage, match=r"3\.png: not an image") as found:
        run(folder, Counting(), workers=1)
    assert "Traceback" not in str(found.value)


def test_waiting_images_hold_no_open_file(folder: Path) -> None:
    resource = pytest.importorskip("resource")
    images = Coded([torch.zeros(8, 8 * width, dtype=torch.long) for width in range(1, 61)])
    views = [EncodedView(number) for number in range(60)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(list(Path("/dev/fd").iterdir())) + 30, hard))
    try:
        found = extract_patches(Counting().encoder(), images, views, PREPARATION, machine=Machine(workers=1))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(found.held) == 60


# ------------------------------------------------------------------ disk space


def test_cached_features_need_no_disk_space(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PROBE_VIEWS", 1)
    kept = run(folder, Counting(), tmp_path / "cache")
    monkeypatch.setattr(cache_module.shutil, "disk_usage", lambda path: SimpleNamespace(free=1))
    again = run(folder, Counting(0), tmp_path / "cache")
    assert same(kept, again)
    with pytest.raises(ValueError, match="--cache"):
        run(folder, Counting(), tmp_path / "other", batch_size=1)


def test_a_full_disk(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: Any, features: np.ndarray, **options: Any) -> None:
        file.write(b"half of it")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(cache_module.np, "save", full)
    with pytest.raises(ValueError, match="No space left on device"):
        run(folder, Counting(), tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()] == ["about.json"]
