"""Image-level nearest neighbours from the command line, on images and weights on disk."""

import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tests.commands import Commands

from cribo.cli import main
from cribo.evaluation import read_result
from cribo.evaluation.image_neighbours.protocol import Predictions, chosen_images
from cribo.models import build_backbone, save_backbone

CLASSES = {"red": (200, 40, 40), "green": (40, 200, 40), "blue": (40, 40, 200)}


def write_classes(root: Path, each: int, *, seed: int = 0) -> Path:
    """Write images with one colour per class and some noise."""
    generator = np.random.default_rng(seed)
    for name, colour in CLASSES.items():
        (root / name).mkdir(parents=True)
        for number in range(each):
            pixels = np.array(colour) + generator.integers(-40, 40, (20, 26, 1))
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(root / name / f"{number}.png")
    return root


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_classes(tmp_path / "set" / "train", 8)
    write_classes(tmp_path / "set" / "val", 3, seed=1)
    return tmp_path / "set"


@pytest.fixture
def backbone(tmp_path: Path) -> Path:
    args = {"patch_size": 8, "depth": 2, "embed_dim": 32, "num_heads": 2}
    save_backbone(build_backbone("vit_tiny_patch16_224", args=args, image_size=16, seed=0), tmp_path / "runs" / "mine")
    return tmp_path / "runs" / "mine"


def words(data: Path, *more: str, backbone: str | Path = "mean-colour") -> list[str]:
    return [
        *("evaluate", "image-nn", "--backbone", str(backbone), "--data", "folder", "--data.root", str(data)),
        *("--resize", "20", "--crop", "16", "--cache", "none", "--devices", "cpu", "--runtime.workers", "0", *more),
    ]


def test_an_evaluation_writes_results_and_pictures(
    data: Path, backbone: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words(Path("set"), "--out", "result", "--neighbours", "3,5", backbone=backbone)) == 0
    result = read_result("result")
    assert result.data["root"] == str(data)  # distinguishes data sets of other folders in comparisons
    assert (result.evaluation, result.varies, result.metrics) == ("image-nn", "neighbours", ["top1", "top5"])
    assert [row["neighbours"] for row in result.results] == [3, 5]
    assert result.classes == ["blue", "green", "red"]
    assert result.settings["neighbours"] == [3, 5]
    assert not result.settings["leave_one_out"]
    assert (result.data["train_images"], result.data["val_images"], result.data["val"]) == (24, 9, "val")
    assert (result.backbone["name"], result.backbone["embed_dim"]) == ("mine", 32)
    for row in result.results:
        assert row["top1"] == pytest.approx(np.mean(list(row["per_class"].values())))
        assert row["top1"] <= row["top5"]
    confusion = np.array(result.results[0]["confusion"])
    assert confusion.sum(axis=1).tolist() == [3, 3, 3]
    assert np.trace(confusion) / 9 == pytest.approx(result.results[0]["top1"])
    assert sum(pair["images"] for pair in result.results[0]["confused"]) == 9 - np.trace(confusion)
    said = capsys.readouterr().out
    assert "Image nearest-neighbour classification on set" in said
    assert "Accuracy of each class [%]" in said
    pictures = sorted(path.name for path in Path("result").glob("*.png"))
    assert pictures == ["confusion.png", "neighbours.png", "top1.png"]
    for name in pictures:
        with Image.open(Path("result") / name) as picture:
            picture.verify()


def test_mean_colours_separate_colour_classes(data: Path) -> None:
    """Also without a split, and with only those k that the number of images allows."""
    assert main(words(data, "--out", "split", "--pictures", "0")) == 0
    assert main(words(data / "train", "--out", "alone", "--pictures", "0")) == 0
    split, alone = read_result("split"), read_result("alone")
    assert [row["neighbours"] for row in split.results] == [10, 20]
    assert split.results[0]["top1"] == alone.results[0]["top1"] == 1.0
    assert alone.settings["leave_one_out"]
    assert alone.data["val_images"] is None
    # With five images, the four others vote.
    assert main(words(data / "train", "--out", "few", "--pictures", "0", "--limit", "5")) == 0
    assert [row["neighbours"] for row in read_result("few").results] == [4]
    assert not list(Path("few").glob("neighbours*.png"))


def test_features_are_cached_for_the_next_run(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    again = words(data, "--neighbours", "1", "--pictures", "0")
    again[again.index("none")] = "cache"
    assert main([*again, "--out", "one"]) == 0
    capsys.readouterr()
    assert main([*again, "--out", "two"]) == 0
    assert "features of the training images" not in capsys.readouterr().out
    assert read_result("one").results == read_result("two").results


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (("--neighbours", "25"), "neighbours must be at most"),
        (("--neighbours", "0"), "neighbours must be >= 1, got"),
        (("--crop", "20"), "crop must be a multiple of 16, the patch size of mean-colour, got 20: use 16"),
        (("--crop", "32"), "resize must be >= crop"),
        (("--temperature", "0"), "temperature must be > 0"),
        (("--limit", "0"), "data.limit must be >= 1"),
        (("--pictures", "-1"), "pictures must be >= 0, got -1"),
        (("--backbone.layers", "2"), "layers must be 1, since the global token is that of the last block, got 2"),
        (("--data.val", "vall"), "did you mean 'val'?"),
        (("--temprature", "1"), "did you mean temperature"),
        (("--data", "imagenet"), "ImageNet-1k train in"),
        (("--runtime.devices", "cuda:99"), "cannot be used"),
    ],
)
def test_invalid_arguments_are_refused_before_any_work(
    data: Path, refused: Callable[..., str], more: tuple[str, ...], reason: str
) -> None:
    said = refused(*words(data, *more))
    assert said.startswith("cribo evaluate image-nn: ")
    assert reason in " ".join(said.split())


def test_invalid_folders(data: Path, refused: Callable[..., str]) -> None:
    without_root = words(data)
    del without_root[without_root.index("--data.root") : without_root.index("--data.root") + 2]
    assert "data.root is required" in refused(*without_root)
    (data / "val" / "violet").mkdir()
    Image.new("RGB", (20, 20)).save(data / "val" / "violet" / "1.png")
    assert "classes without training images, violet" in refused(*words(data))
    Path("result").mkdir()
    (Path("result") / "mine.txt").write_text("not yours")
    assert "already exists" in refused(*words(data / "train", "--out", "result"))
    assert "has no cribo.json" in refused(*words(data / "train", "--out", "result", "--overwrite"))


def test_a_broken_image_is_named_and_nothing_is_written(data: Path, refused: Callable[..., str]) -> None:
    (data / "train" / "red" / "3.png").write_bytes(b"no image")
    assert "red/3.png: not an image of a known format" in refused(*words(data), status=1)


def test_half_of_the_pictures_show_errors_if_possible() -> None:
    def score(*places: int) -> Predictions:
        place = torch.tensor(places)
        return Predictions(torch.zeros_like(place), place, torch.ones(len(place)))

    assert chosen_images(score(0, 0, 0, 0, 1, 2, 0, 0), 4) == [0, 3, 4, 5]
    assert chosen_images(score(1, 1, 1, 0), 4) == [0, 1, 2, 3]
    assert chosen_images(score(0, 0, 0), 2) == [0, 1]
    assert chosen_images(score(0, 1), 0) == []
    assert chosen_images(score(2, 1, 0), 99) == [0, 1, 2]


@pytest.mark.slow
def test_a_killed_extraction_resumes(data: Path, backbone: Path, commands: Commands) -> None:
    """After SIGKILL following the first file of features, that file is not computed again."""
    write_classes(data / "train" / "more", 700, seed=2)  # in a separate class: 2124 images in three files
    command = words(data, "--out", str(Path("result").absolute()), "--neighbours", "5", backbone=backbone)
    command[command.index("none")] = str(Path("cache").absolute())
    killed = commands.fork(*command)
    while not list(Path("cache").rglob("*.npy")):
        assert killed.wait(0.02) is None, killed.output
    killed.kill(all_of_it=True)
    assert killed.wait(60) == -signal.SIGKILL
    assert not Path("result/results.json").exists()
    kept = {path: path.stat().st_mtime_ns for path in Path("cache").rglob("*.npy")}
    assert kept
    finished = commands.fork(*command)
    assert finished.wait(900) == 0, finished.output
    assert "cached)" in finished.output or len(kept) == 3
    assert all(path.stat().st_mtime_ns == written for path, written in kept.items())
    assert Path("result/results.json").is_file()
