"""Tests of `ImageFunction` with a function that returns the mean of each image."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torch import Tensor

from cribo.base.errors import DataError
from cribo.data.config import Reading
from cribo.data.reading import ImageContent, read_image
from cribo.data.sources.collection import open_collection
from cribo.features import stream
from cribo.features.spread.parts import ImagePart
from cribo.features.stream import ImageFunction, Streamed

NAMES = ["0.png", "1.png", "2.png", "3.png", "4.png", "broken.png", "missing.png"]


class Means(ImageFunction[Tensor, float]):
    def __init__(self, batch_size: int = 2) -> None:
        super().__init__(batch_size, 2)
        self.groups: list[int] = []

    def open(self) -> None:
        pass

    def prepare(self, file: ImageContent, reading: Reading) -> Tensor:
        return read_image(file, reading=reading)

    def compute(self, images: Sequence[Tensor]) -> list[float]:
        self.groups.append(len(images))
        return [float(image.float().mean()) for image in images]

    def rows(self, image: Streamed[float]) -> dict[str, np.ndarray]:
        mean = np.nan if image.result is None else image.result
        return {"image": np.array([image.name]), "mean": np.array([mean]), "error": np.array([image.reason])}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for value in range(5):
        Image.new("RGB", (4 + value, 8), (value,) * 3).save(tmp_path / f"{value}.png")
    (tmp_path / "broken.png").write_bytes(b"no image")
    (tmp_path / "missing.png").write_bytes(b"removed before it is read")
    return tmp_path


def parts(folder: Path, stored: dict[str, str] | None = None) -> list[ImagePart]:
    images = open_collection(str(folder))
    (folder / "missing.png").unlink()
    hashes = [(stored or {}).get(images.name(index), "") for index in range(len(images))]
    return [ImagePart(images.part(range(start, stop)), hashes[start:stop]) for start, stop in ((0, 3), (3, 7))]


def test_images_come_in_order_with_their_results_or_reasons(folder: Path) -> None:
    given = parts(folder)
    function, found = Means(), []
    for part, images in function.stream(given):
        assert part is given[len(found)]
        found.append([*images])
    assert [each.name for images in found for each in images] == NAMES
    assert [each.result for images in found for each in images] == [0, 1, 2, 3, 4, None, None]
    broken, missing = found[1][2:]
    assert isinstance(missing.error, OSError)
    assert missing.reason
    assert not missing.sha256
    assert broken.reason
    assert not broken.unchanged
    assert broken.sha256 == hashlib.sha256(b"no image").hexdigest()
    assert function.groups == [2, 1, 2]  # a group ends with a batch or a part, and has no unreadable image


def test_nothing_is_computed_for_unchanged_images(folder: Path) -> None:
    content = hashlib.sha256((folder / "1.png").read_bytes()).hexdigest()
    function = Means(8)
    found = [
        each for _, images in function.stream(parts(folder, {"1.png": content, "2.png": content})) for each in images
    ]
    assert [each.name for each in found if each.unchanged] == ["1.png"]
    assert [each.result for each in found] == [0, None, 2, 3, 4, None, None]
    assert function.groups == [2, 2]


def test_large_images_are_computed_in_smaller_groups(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "BUDGET", 1)
    function = Means(8)
    assert [len([*images]) for _, images in function.stream(parts(folder))] == [3, 4]
    assert function.groups == [1] * 5


def test_rows_of_a_batch(folder: Path) -> None:
    rows = Means()({"image": np.array([str(folder / name) for name in ("3.png", "broken.png", "1.png")])})
    assert [Path(name).name for name in rows["image"]] == ["3.png", "broken.png", "1.png"]
    np.testing.assert_equal(rows["mean"], [3, np.nan, 1])
    assert [bool(reason) for reason in rows["error"]] == [False, True, False]
    named = Means()({"image": np.array(["a"]), "bytes": np.array([(folder / "4.png").read_bytes()], dtype=object)})
    assert (named["image"].tolist(), named["mean"].tolist()) == (["a"], [4])
    none = Means()({"image": np.array([], dtype=object)})
    assert {name: len(values) for name, values in none.items()} == {"image": 0, "mean": 0, "error": 0}
    with pytest.raises(DataError, match="image"):
        Means()({"path": np.array(["a"])})
