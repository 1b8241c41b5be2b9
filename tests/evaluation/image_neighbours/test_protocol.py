"""The classifier against a plain implementation of the protocol, and its features under faults."""

import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from cribo.base.errors import ConfigError, UnreadableImage
from cribo.data import ImageFiles
from cribo.data.labelled.classification import ClassifiedFiles
from cribo.evaluation.image_neighbours import protocol as module
from cribo.evaluation.image_neighbours.protocol import ImageNN, ImageRetrieval, image_nn, places
from cribo.features import image_features as features_module
from cribo.features.cache import FeatureCache, Machine
from cribo.features.encoder import Encoder
from cribo.features.image_features import SquareCrop, extract_global
from cribo.models import Backbone

SIDE = 4
CLASSES = ["a", "b", "c", "d", "e", "f", "g"]


class Colours(nn.Module):
    """Mean colours; counts encoded images, and raises after `limit` batches."""

    def __init__(self, limit: int = 10**9) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.limit = limit
        self.batches: list[int] = []

    def encoder(self) -> Encoder:
        backbone = Backbone(self, "colours", {}, SIDE)
        backbone.mean, backbone.std = (0.5,) * 3, (1.0,) * 3
        backbone.eval()
        self.batches.clear()  # of the probe
        return Encoder(backbone)

    def forward_features(self, images: torch.Tensor) -> torch.Tensor:
        if len(self.batches) == self.limit:
            raise RuntimeError("the power fails")
        self.batches.append(len(images))
        return self.scale * images


class Broken(Colours):
    def forward_features(self, images: torch.Tensor) -> torch.Tensor:
        return torch.cat((images[:-1], torch.full_like(images[:1], torch.nan)))


def write(folder: Path, colours: np.ndarray, labels: list[int], prefix: str = "") -> ClassifiedFiles:
    """Write images of one colour each, and their labels."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"{prefix}{number:03d}.png" for number in range(len(colours))]
    for name, colour in zip(names, colours.tolist(), strict=True):
        Image.new("RGB", (SIDE + 2, SIDE), tuple(colour)).save(folder / name)
    return ClassifiedFiles(ImageFiles(folder, names), CLASSES, np.array(labels))


def drawn(folder: Path, count: int, seed: int, classes: list[int]) -> tuple[ClassifiedFiles, np.ndarray]:
    """Return images with colours around those of their classes, and their features computed by NumPy."""
    generator = np.random.default_rng(seed)
    centres = np.random.default_rng(9).integers(30, 225, (len(CLASSES), 3))
    labels = generator.choice(classes, count)
    colours = (centres[labels] + generator.integers(-60, 60, (count, 3))).clip(0, 255).astype(np.uint8)
    features = colours / 255 - 0.5
    return write(folder, colours, labels.tolist()), features / np.linalg.norm(features, axis=1, keepdims=True)


def plain(
    train: np.ndarray, labels: np.ndarray, val: np.ndarray, k: int, *, temperature: float = 0.07, own: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Compute the protocol in a few lines: votes for each class, and classes by votes."""
    votes = np.zeros((len(val), len(CLASSES)))
    for number, feature in enumerate(val):
        similarity = train @ feature
        if own:
            similarity[number] = -np.inf
        for row in np.argsort(-similarity, kind="stable")[:k]:
            votes[number, labels[row]] += np.exp(similarity[row] / temperature)
    return votes, np.argsort(-votes, axis=1, kind="stable")


def settings(*neighbours: int, **more: float) -> ImageNN:
    return ImageNN(neighbours=neighbours or (1,), resize=SIDE, crop=SIDE, **more)  # pyright: ignore[reportArgumentType]


def check(
    found: ImageRetrieval, train: np.ndarray, labels: np.ndarray, val: np.ndarray, truth: np.ndarray, **how: bool
) -> None:
    for row, (k, predictions) in zip(found.rows, found.predictions.items(), strict=True):
        votes, order = plain(train, labels, val, k, **how)
        assert predictions.classes.tolist() == order[:, 0].tolist()
        has_votes = votes[np.arange(len(truth)), truth] > 0
        for number in (1, 3, 5):
            among = (order[:, :number] == truth[:, None]).any(axis=1) & has_votes
            assert (predictions.place < number).double().mean() == pytest.approx(among.mean())
            assert row.get(f"top{number}", among.mean()) == pytest.approx(among.mean())
        for place, value in enumerate(row["per_class"].values()):
            own = order[truth == place, 0] == place
            assert value == pytest.approx(own.mean() if len(own) else np.nan, nan_ok=True)


@pytest.mark.parametrize("at_once", [None, 2])
def test_results_equal_the_plain_protocol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int | None) -> None:
    """Class 5 occurs in the training images only, class 6 nowhere."""
    train, known = drawn(tmp_path / "train", 80, 0, [0, 1, 2, 3, 4, 5])
    val, asked = drawn(tmp_path / "val", 40, 1, [0, 1, 2, 3, 4])
    ks = (1, 4, 20, 80)
    if at_once is not None:  # queries that are voted on at once
        monkeypatch.setattr(module, "_VOTES_AT_ONCE", at_once * len(CLASSES))
    found = image_nn([Colours().encoder()], train, val, settings(*reversed(ks)))
    assert [row["neighbours"] for row in found.rows] == list(ks)
    check(found, known, train.labels, asked, val.labels)
    similarity = asked @ known.T
    assert torch.allclose(found.nearest.similarity.double(), torch.from_numpy(-np.sort(-similarity)), atol=1e-5)


def test_leave_one_out_without_a_split(tmp_path: Path) -> None:
    train, known = drawn(tmp_path, 60, 2, [0, 1, 2])
    found = image_nn([Colours().encoder()], train, None, settings(1, 5, 59))
    check(found, known, train.labels, known, train.labels, own=True)
    assert not (found.nearest.rows == torch.arange(60)[:, None]).any()


def test_duplicates_do_not_let_an_image_vote_for_itself(tmp_path: Path) -> None:
    """Six images are identical, of two classes: the last ones are not among their own nearest four."""
    colours = np.array([[200, 40, 40]] * 6 + [[40, 200, 40]] * 2, dtype=np.uint8)
    images = write(tmp_path, colours, [0, 0, 1, 1, 1, 0, 2, 2])
    found = image_nn([Colours().encoder()], images, None, settings(3))
    assert found.nearest.rows.tolist()[:6] == [[1, 2, 3], [0, 2, 3], [0, 1, 3], [0, 1, 2], [0, 1, 2], [0, 1, 2]]
    assert found.predictions[3].classes.tolist()[:6] == [1, 1, 0, 0, 0, 0]


def test_ties_are_broken_by_class_order(tmp_path: Path) -> None:
    colours = np.array([[200, 40, 40]] * 4, dtype=np.uint8)
    train = write(tmp_path / "train", colours, [4, 2, 2, 4])
    val = write(tmp_path / "val", colours[:3], [2, 4, 6])
    found = image_nn([Colours().encoder()], train, val, settings(4))
    assert found.predictions[4].classes.tolist() == [2, 2, 2]
    # No neighbour belongs to class 6, so its rank is the number of classes.
    assert found.predictions[4].place.tolist() == [0, 1, 7]
    (row,) = found.rows
    assert (row["top1"], row["top5"]) == (pytest.approx(1 / 3), pytest.approx(2 / 3))
    assert places(torch.tensor([[0.0, 3.0, 3.0]]), torch.tensor([2])).tolist() == [1]


def test_very_low_temperatures_are_stable(tmp_path: Path) -> None:
    train, known = drawn(tmp_path / "train", 30, 3, [0, 1, 2])
    val, asked = drawn(tmp_path / "val", 10, 4, [0, 1, 2])
    cold = image_nn([Colours().encoder()], train, val, settings(10, temperature=1e-6)).predictions[10]
    _, order = plain(known, train.labels, asked, 1)
    assert cold.classes.tolist() == order[:, 0].tolist()


# --------------------------------------------------------------------- features


def machine(cache: Path | None, **more: object) -> Machine:
    kept = None if cache is None else FeatureCache(cache, "colours")
    return Machine(batch_size=3, cache=kept, **more)  # pyright: ignore[reportArgumentType]


def rows(images: ClassifiedFiles, colours: Colours, cache: Path | None = None, **more: object) -> torch.Tensor:
    encoder = colours.encoder()
    made = machine(cache, **more)
    found = extract_global([encoder] * len(made.devices), images, SquareCrop(SIDE, SIDE), machine=made)
    assert len(found) == len(images)
    blocks = list(found.blocks(7))
    assert all(len(block) == 7 for block in blocks[:-1])
    return torch.cat(blocks)


def test_interrupted_extraction_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features_module, "_BLOCK", 4)
    images, known = drawn(tmp_path / "images", 18, 0, [0, 1])
    cache = tmp_path / "cache"
    with pytest.raises(RuntimeError, match="the power fails"):
        rows(images, Colours(limit=4), cache)
    rest = Colours()
    found = rows(images, rest, cache)
    assert sum(rest.batches) == 18 - 12  # 12 images were finished, in three files of four
    assert torch.allclose(found.double(), torch.from_numpy(known), atol=1e-6)
    none = Colours()
    assert torch.equal(rows(images, none, cache), found)
    assert none.batches == []
    # A truncated file and a changed image are computed again; the others are not.
    sorted(cache.rglob("*.npy"))[0].write_bytes(b"half")
    assert torch.equal(rows(images, again := Colours(), cache), found)
    assert sum(again.batches) in (4, 2)
    Image.new("RGB", (SIDE, SIDE), (9, 250, 9)).save(images.path(17))
    assert not torch.equal(rows(images, changed := Colours(), cache), found)
    assert sum(changed.batches) == 2


def test_images_with_equal_names_sizes_and_dates_are_distinguished(tmp_path: Path) -> None:
    for split, colour in (("train", (250, 9, 9)), ("val", (9, 9, 250))):
        (tmp_path / split).mkdir()
        Image.new("RGB", (SIDE, SIDE), colour).save(tmp_path / split / "0.bmp")
        os.utime(tmp_path / split / "0.bmp", (0, 0))
    splits = [
        ClassifiedFiles(ImageFiles(tmp_path / split, ["0.bmp"]), CLASSES, np.array([0])) for split in ("train", "val")
    ]
    train, val = (rows(images, Colours(), tmp_path / "cache") for images in splits)
    assert not torch.allclose(train, val)


def test_results_are_independent_of_devices_and_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features_module, "_BLOCK", 5)
    images, _ = drawn(tmp_path, 23, 0, [0, 1])
    alone = rows(images, Colours())
    assert torch.equal(rows(images, Colours(), devices=("cpu", "cpu", "cpu")), alone)
    assert torch.equal(rows(images, Colours(), workers=2), alone)
    train, _ = drawn(tmp_path / "train", 40, 1, [0, 1, 2])
    one, two = (
        image_nn([Colours().encoder()] * len(devices), train, images, settings(5), machine=Machine(devices=devices))
        for devices in (("cpu",), ("cpu", "cpu"))
    )
    assert torch.equal(one.nearest.rows, two.nearest.rows)
    assert torch.equal(one.predictions[5].classes, two.predictions[5].classes)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_and_cpu_agree(tmp_path: Path) -> None:
    train, _ = drawn(tmp_path / "train", 80, 0, [0, 1, 2, 3])
    val, _ = drawn(tmp_path / "val", 40, 1, [0, 1, 2, 3])
    host, gpu = (
        image_nn([Colours().encoder()], train, val, settings(1, 20), machine=Machine(devices=(device,)))
        for device in ("cpu", "cuda:0")
    )
    assert torch.allclose(host.nearest.similarity, gpu.nearest.similarity, atol=1e-3)
    for one, other in zip(host.rows, gpu.rows, strict=True):
        assert one["top1"] == pytest.approx(other["top1"], abs=0.05)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_broken_image_is_named(tmp_path: Path, workers: int) -> None:
    images, _ = drawn(tmp_path, 8, 0, [0, 1])
    Path(images.path(5)).write_bytes(b"no image")
    with pytest.raises(UnreadableImage, match=r"005\.png: not an image of a known format"):
        rows(images, Colours(), workers=workers)


def test_a_deleted_image_is_named(tmp_path: Path) -> None:
    images, _ = drawn(tmp_path / "images", 8, 0, [0, 1])
    Path(images.path(5)).unlink()
    with pytest.raises(UnreadableImage, match=r"005\.png: No such file"):
        rows(images, Colours(), tmp_path / "cache")


def test_non_finite_features_name_their_image(tmp_path: Path) -> None:
    images, _ = drawn(tmp_path / "images", 8, 0, [0, 1])
    with pytest.raises(ValueError, match=r"features of the backbone for 002\.png are not finite"):
        extract_global([Broken().encoder()], images, SquareCrop(SIDE, SIDE), machine=machine(tmp_path / "cache"))
    assert not list((tmp_path / "cache").rglob("*.npy"))


def test_features_beyond_memory_are_refused_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images, _ = drawn(tmp_path, 8, 0, [0, 1])
    monkeypatch.setattr("cribo.features.cache.available_memory", lambda device: 95)  # 8 * 3 * 4 bytes are needed
    colours = Colours()
    with pytest.raises(ValueError, match=r"memory has .* free: store them on disk"):
        rows(images, colours)
    assert colours.batches == []


def test_images_are_resized_by_the_shorter_side_and_centre_cropped() -> None:
    image = torch.zeros(3, 40, 80, dtype=torch.uint8)
    image[:, :, 20:60] = 200
    middle = SquareCrop(20, 18)(image)
    assert middle.shape == (3, 18, 18)
    assert int(middle.min()) > 190


# --------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("wrong", "pattern"),
    [
        ({"neighbours": ()}, "neighbours must be distinct numbers"),
        ({"neighbours": (5, 0)}, "neighbours must be >= 1, got"),
        ({"neighbours": (5, 5)}, "neighbours must be distinct numbers, such as 10,20, got 5,5"),
        ({"temperature": 0.0}, "temperature must be > 0, got 0.0"),
        ({"temperature": float("nan")}, "temperature must be > 0"),
        ({"crop": 0}, "crop must be >= 1"),
        ({"resize": 100}, "resize must be >= crop, got resize 100 and crop 224"),
    ],
)
def test_settings_out_of_range(wrong: dict[str, object], pattern: str) -> None:
    with pytest.raises(ConfigError, match=pattern):
        ImageNN(**wrong)  # pyright: ignore[reportArgumentType]


def test_more_neighbours_than_images(tmp_path: Path) -> None:
    images, _ = drawn(tmp_path, 8, 0, [0, 1])
    encoder = Colours().encoder()
    with pytest.raises(ConfigError, match="at most the number of training images, 8, got 9"):
        image_nn([encoder], images, images, settings(9))
    with pytest.raises(ConfigError, match="other training images, 7, got 8"):
        image_nn([encoder], images, None, settings(8))
    other = ClassifiedFiles(ImageFiles(tmp_path, ["000.png"]), ["x", "y"], np.zeros(1))
    with pytest.raises(ValueError, match="must have the same classes"):
        image_nn([encoder], images, other, settings(1))
    assert Counter(images.labels.tolist()).keys() == {0, 1}
