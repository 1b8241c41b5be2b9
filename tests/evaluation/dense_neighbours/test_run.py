"""Evaluations from the command line, on images and weights on disk."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from cribo.cli import main
from cribo.evaluation import read_result
from cribo.models import build_backbone, save_backbone

COLOURS = [(200, 40, 40), (40, 200, 40), (40, 40, 200)]


def write_set(root: Path, train: int = 10, val: int = 4, side: int = 32) -> Path:
    """Write images of coloured blocks with one class per colour, in the layout of `folder`."""
    generator = np.random.default_rng(0)
    for split, count in (("train", train), ("val", val)):
        for part in ("images", "labels"):
            (root / part / split).mkdir(parents=True)
        for number in range(count):
            blocks = generator.integers(0, 3, (side // 8, side // 8))
            labels = blocks.repeat(8, 0).repeat(8, 1).astype(np.uint8)
            pixels = np.array(COLOURS)[labels] + generator.integers(-30, 30, (side, side, 1))
            Image.fromarray(pixels.astype(np.uint8)).save(root / "images" / split / f"{number}.png")
            labels[:2, :2] = 255
            Image.fromarray(labels).save(root / "labels" / split / f"{number}.png")
    (root / "classes.txt").write_text("red\ngreen\nblue\n")
    return root


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_set(tmp_path / "set")


@pytest.fixture
def backbone(tmp_path: Path) -> Path:
    args = {"patch_size": 8, "depth": 2, "embed_dim": 32, "num_heads": 2}
    made = build_backbone("vit_tiny_patch16_224", args=args, image_size=32)
    save_backbone(made, tmp_path / "runs" / "mine")
    return tmp_path / "runs" / "mine"


def words(data: Path, *more: str) -> list[str]:
    return [
        *("evaluate", "dense-nn", "--data", "folder", "--data.root", str(data), "--ratios", "1,2", "--draws", "2"),
        *("--neighbours", "3", "--cache", "none", "--devices", "cpu", "--runtime.workers", "0", *more),
    ]


# ------------------------------------------------------------------ a whole evaluation


def test_an_evaluation_writes_results_and_pictures(
    data: Path, backbone: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words(data, "--backbone", str(backbone), "--out", "result", "--pictures", "2")) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "mIoU [%]" in said
    assert all(name in said for name in ("red", "green", "blue"))
    # Every setting that the paper does not state is printed.
    assert all(choice in said for choice in ("vote majority", "unlabelled drop", "score patch", "patch labels hard"))
    content = json.loads(Path("result/results.json").read_text())
    assert [row["ratio"] for row in content["results"]] == [1, 2]
    whole, half = content["results"]
    assert 0.3 < whole["miou"] <= 1
    assert whole["miou_std"] is None
    assert half["miou_std"] >= 0
    assert half["miou"] == pytest.approx(np.mean(half["draws"]))
    assert set(whole["per_class"]) == {"red", "green", "blue"}
    assert np.mean(list(whole["per_class"].values())) == pytest.approx(whole["miou"])
    assert whole["memory_patches"] == 160
    assert content["settings"]["neighbours"] == 3
    assert content["backbone"]["fingerprint"]
    assert content["data"]["query_images"] == 4
    assert {"torch", "timm", "cribo"} <= set(content["versions"])
    assert content["command"].startswith("cribo evaluate dense-nn --data folder")
    assert {path.name for path in Path("result").iterdir()} == {
        *("cribo.json", "results.json", "images.npz", "miou.png", "confusion.png", "predictions.png"),
    }
    assert read_result("result").results == content["results"]


def test_folders_are_numbered_and_never_overwritten(data: Path, backbone: Path, refused: Callable[..., str]) -> None:
    command = words(data, "--backbone", str(backbone), "--pictures", "0")
    assert main(command) == 0
    assert main(command) == 0
    assert {path.name for path in Path("evaluations").iterdir()} == {"dense-nn-folder-mine", "dense-nn-folder-mine-2"}
    taken = "evaluations/dense-nn-folder-mine"
    before = Path(taken, "results.json").read_bytes()
    assert "already exists: choose another --out, or replace it" in refused(*command, "--out", taken)
    assert Path(taken, "results.json").read_bytes() == before
    assert main([*command, "--out", taken, "--overwrite", "--neighbours", "5"]) == 0
    assert read_result(taken).settings["neighbours"] == 5
    assert "is inside the results folder" in refused(*command, "--out", str(data), "--overwrite")
    Path("mine").mkdir()
    Path("mine", "results.json").write_text("{}")
    assert "not created by cribo, refusing to replace it" in refused(*command, "--out", "mine", "--overwrite")


def test_old_results_remain_until_new_ones_are_complete(data: Path, refused: Callable[..., str]) -> None:
    command = words(data, "--backbone", "mean-colour", "--out", "result")
    assert main(command) == 0
    before = {path.name: path.read_bytes() for path in Path("result").iterdir()}
    refused(*command, "--overwrite", "--neighbours", "1000")
    assert {path.name: path.read_bytes() for path in Path("result").iterdir()} == before
    assert main([*command, "--overwrite", "--ratios", "1"]) == 0
    assert "miou.png" in before
    assert "miou.png" not in {path.name for path in Path("result").iterdir()}


def test_the_next_evaluation_uses_the_cache(data: Path, backbone: Path) -> None:
    command = words(data, "--backbone", str(backbone), "--cache", "kept")
    assert main([*command, "--out", "first"]) == 0
    files = {path: path.stat().st_mtime_ns for path in Path("kept").rglob("*.npy")}
    assert len(files) == 14
    assert main([*command, "--out", "second", "--neighbours", "2", "--ratios", "1"]) == 0
    assert {path: path.stat().st_mtime_ns for path in Path("kept").rglob("*.npy")} == files
    assert main([*command, "--out", "without", "--cache", "none"]) == 0
    assert read_result("first").results == read_result("without").results


def test_the_hummingbird_variant(data: Path, backbone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = words(data, "--backbone", str(backbone), "--variant", "hummingbird", "--size", "32,32", "--out", "result")
    assert main(command) == 0
    settings = read_result("result").settings
    assert (settings["vote"], settings["temperature"], settings["patch_labels"]) == ("attention", 0.02, "soft")
    assert (settings["score"], settings["augmentations"], settings["size"]) == ("resized", 2, [32, 32])
    assert "variant hummingbird" in capsys.readouterr().out
    pixels = 4 * 32 * 32 - 4 * 4
    assert int(np.sum(read_result("result").results[0]["confusion"])) == pixels


def test_part_of_other_splits(data: Path) -> None:
    command = words(data, "--backbone", "mean-colour", "--data.limit", "2", "--ratios", "1", "--out", "result")
    assert main([*command, "--data.memory", "val", "--data.queries", "train"]) == 0
    about = read_result("result").data
    assert (about["memory_images"], about["query_images"], about["limit"]) == (2, 2, 2)
    assert (about["memory"], about["queries"]) == ("val", "train")


def test_scenes_need_no_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["evaluate", "dense-nn", "--backbone", "mean-colour", "--data", "scenes", "--ratios", "1"]
    assert main([*command, "--data.limit", "6", "--cache", "none", "--out", "result"]) == 0
    result = read_result("result")
    assert (result.data["memory_images"], result.data["query_images"]) == (6, 6)
    assert len(result.classes) == 9
    assert 0 < result.results[0]["miou"] < 0.4


def test_options_from_a_file(data: Path, backbone: Path) -> None:
    Path("options.yaml").write_text(
        f"backbone: {{source: {backbone}}}\ndata: {{name: folder, root: {data}}}\nratios: [2]\nneighbours: 4\n"
        "runtime: {cache: none, workers: 0}\n"
    )
    assert main(["evaluate", "dense-nn", "--config", "options.yaml", "--draws", "1", "--out", "result"]) == 0
    settings = read_result("result").settings
    assert (settings["ratios"], settings["neighbours"], settings["draws"]) == ([2], 4, 1)


# ------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--backbone nowhere.pth", "nowhere.pth"),
        ("--backbone vit_smal_patch16_224", "vit_small_patch16_224"),
        ("--data camvit", "camvid"),
        ("--data.root nowhere", "nowhere"),
        ("--data.queries test", "test"),
        ("--neighbours 1000", "got 1000 with 40 patches at ratio 1"),
        ("--ratios 0", "ratios must be >= 1"),
        ("--ratios a,b", "ratios"),
        ("--vote loud", "majority"),
        ("--size 20,32", "size must be a multiple of the patch size 16, got 20x32"),
        ("--devices cuda:99", "runtime.devices: 'cuda:99'"),
        ("--devices cpu,meta", "runtime.devices must"),
        ("--pictures -1", "pictures must be >= 0"),
        ("--memory_patches 9", "memory_patches must be at least"),
        ("--data camvid --data.root null", "data.root is required"),
        ("--backbone vit_tiny_patch16_224 --pretrained false --layers 13", "layers must be 1 to 12"),
        ("--data.limit 0", "data.limit must be >= 1"),
        ("--runtime.memory_gib -1", "runtime.memory_gib must be > 0"),
        ("--neighbors 3", "did you mean neighbours?"),
    ],
)
def test_invalid_input_is_refused_and_writes_nothing(
    data: Path, refused: Callable[..., str], given: str, message: str
) -> None:
    assert message in refused(*words(data, "--backbone", "mean-colour"), *given.split())


def test_invalid_labels_and_images(data: Path, refused: Callable[..., str]) -> None:
    path = data / "labels" / "train" / "3.png"
    good = path.read_bytes()
    Image.fromarray(np.full((32, 32), 3, np.uint8)).save(path)
    assert "labels must be in 0..2 (3 classes) or 255 (ignored), got 3" in refused(
        *words(data, "--backbone", "mean-colour")
    )
    Image.fromarray(np.zeros((16, 32), np.uint8)).save(path)
    assert "labels must have the size of image 3.png" in refused(*words(data, "--backbone", "mean-colour"))
    path.unlink()
    assert "there is no" in refused(*words(data, "--backbone", "mean-colour"))
    path.write_bytes(good)
    (data / "images" / "val" / "1.png").write_bytes(b"no picture")
    for workers in ("0", "1"):
        said = refused(*words(data, "--backbone", "mean-colour", "--runtime.workers", workers), status=1)
        assert "1.png" in said
        assert said.count("\n") == 1


@pytest.mark.parametrize(("split", "message"), [("train", "no labelled patch"), ("val", "queries cannot be scored")])
def test_a_set_without_any_label(data: Path, refused: Callable[..., str], split: str, message: str) -> None:
    for path in (data / "labels" / split).iterdir():
        Image.fromarray(np.full((32, 32), 255, np.uint8)).save(path)
    assert message in refused(*words(data, "--backbone", "mean-colour"))


def test_a_device_without_enough_memory(
    data: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(*args: Any, **options: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has ...")

    monkeypatch.setattr("cribo.features.extraction.F.normalize", encode)
    said = refused(*words(data, "--backbone", "mean-colour"), status=1)
    assert said == "cribo evaluate dense-nn: CUDA out of memory: lower --runtime.batch_size or --runtime.memory_gib\n"


def test_a_checkpoint_of_another_width(data: Path, backbone: Path, refused: Callable[..., str]) -> None:
    state = build_backbone("vit_tiny_patch16_224", args={"depth": 1}, image_size=32).model.state_dict()
    state["blocks.0.attn.proj.weight"] = torch.zeros(7, 7)
    torch.save({"teacher": state}, "wrong.pth")
    assert "blocks.0.attn.proj.weight" in refused(*words(data), "--backbone", "wrong.pth")
