"""Images of five channels with 16 bits through whole commands."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image
from tests.end_to_end.conftest import Run

from cribo.features.memory.storage import stored_reading
from cribo.models import build_backbone, inflate, load_backbone, save_backbone

CHANNELS = ("--channels", "0,1,2,3,4", "--range", "0,4095")
VIT_ARGS = {"depth": 2, "embed_dim": 32, "num_heads": 2}
VIT = ("--backbone", "net", "--device", "cpu")
COLOURS = ("--backbone", "mean-colour", "--device", "cpu")


@pytest.fixture
def cribo(cribo: Run, tmp_path: Path) -> Run:
    """`cribo` in a folder with images, examples, and an RGB network."""
    write_images(tmp_path)
    save_backbone(build_backbone("vit_tiny_patch16_224", args=VIT_ARGS, image_size=64), tmp_path / "net")
    return cribo


def write_images(folder: Path) -> None:
    """Write images whose first three channels are noise: a square is bright in the fourth, dark in the fifth."""
    (folder / "images").mkdir()
    (folder / "examples").mkdir()
    for number in range(4):
        draws = np.random.default_rng(number)
        values = draws.integers(0, 2048, (5, 64, 96))
        inside = np.zeros((64, 96), dtype=bool)
        inside[16:48, 16 * (1 + number % 2) : 64] = True
        values[3:] = np.where(inside, [[[4000]], [[200]]], [[[300]], [[3000]]])
        for place in ("images", "examples"):
            path = folder / place / f"{number}.tif"
            pixels = values.transpose(1, 2, 0).astype(np.uint16)
            tifffile.imwrite(path, pixels, photometric="minisblack", planarconfig="contig")
        Image.fromarray(inside.astype(np.uint8)).save(folder / "examples" / f"{number}_labels.png")


def test_segment_reads_all_channels_and_draws_pictures(cribo: Run) -> None:
    cribo("segment", "images", "--examples", "examples", *COLOURS, *CHANNELS, "--memory", "memory", "--out", "out")
    for number in range(4):
        found = np.array(Image.open(f"out/labels/{number}.png"))
        true = np.array(Image.open(f"examples/{number}_labels.png"))
        assert (found == true).mean() > 0.98  # the square is in channels 3 and 4 only
    assert Image.open("out/overlays/0.jpg").mode == "RGB"
    assert Path("out/contact.png").is_file()
    again = cribo("segment", "images", "--memory", "memory", *COLOURS, "--out", "again")
    assert "again" in again
    assert (np.array(Image.open("again/labels/1.png")) == np.array(Image.open("out/labels/1.png"))).all()


def test_an_rgb_network_is_inflated_for_every_command(cribo: Run) -> None:
    cribo("segment", "images", "--examples", "examples", *VIT, *CHANNELS, "--memory", "memory", "--out", "s")
    cribo("segment", "images", "--memory", "memory", *VIT, "--out", "again")
    cribo("embed", "images", *VIT, *CHANNELS, "--features", "patches", "--out", "e")
    assert json.loads(Path("e/about.json").read_text())["same"]["channels"] == [0, 1, 2, 3, 4]
    cribo("index", "images", *VIT, *CHANNELS, "--db", "db")
    assert "4 unchanged" in cribo("index", "--db", "db")
    cribo("search", "--db", "db", "--image", "images/0.tif", "--out", "found")
    cribo("search", "--db", "db", "--duplicates", "--out", "pairs")
    assert Image.open("found/sheet.png").mode in ("RGB", "RGBA")
    assert "channels" in cribo("segment", "images", "--memory", "memory", *VIT, "--channels", "0,1", status=2)


TINY = {
    "views.size": 32,
    "backbone.drop_path": 0.0,
    "objects.num_objects": 4,
    "head.hidden_dim": 16,
    "head.bottleneck_dim": 8,
    "head.prototypes": 8,
    "runtime.devices": 1,
    "data.workers": 0,
}


def test_pretraining_stores_channels_and_range_with_the_backbone(cribo: Run) -> None:
    options = [word for name, value in TINY.items() for word in (f"--{name}", value)]
    network = (
        "--backbone.name",
        "vit_tiny_patch16_224",
        "--backbone.args",
        '{"depth": 2, "embed_dim": 32, "num_heads": 2}',
    )
    short = ("--optim.epochs", 2, "--optim.batch_size", 4, "--objects.group_size", 2, "--optim.warmup_epochs", 0)
    start = ("--backbone.pretrained", "net/backbone.safetensors", "--backbone.train_blocks", 1)
    cribo("pretrain", "--data.root", "images", *CHANNELS, *network, *options, *short, *start, "--name", "run")
    about = json.loads(Path("runs/run/backbone.json").read_text())
    assert about["pixels"] == {"range": [0, 4095], "channels": [0, 1, 2, 3, 4]}
    trained, rgb = load_backbone("runs/run"), load_backbone("net")
    before = inflate(rgb, 5)
    assert not torch.equal(trained.model.patch_embed.proj.weight, before.model.patch_embed.proj.weight)
    assert torch.equal(trained.model.blocks[0].attn.qkv.weight, rgb.model.blocks[0].attn.qkv.weight)
    # Later commands read images as the training did.
    how = ("--backbone", "runs/run", "--device", "cpu")
    cribo("embed", "images", *how, "--out", "e")
    assert json.loads(Path("e/about.json").read_text())["same"]["channels"] == [0, 1, 2, 3, 4]
    cribo("index", "images", *how, "--db", "db")
    cribo("segment", "images", "--examples", "examples", *how, "--memory", "memory", "--out", "s")
    assert stored_reading(Path("memory")).given == about["pixels"]
    assert "5 channels" in cribo("embed", "images", *how, "--channels", "0,1,2", "--out", "wrong", status=2)


def test_adapting_and_evaluating(cribo: Run) -> None:
    few = json.dumps({"optim.batch_size": 4, "views.size": 32, "objects.group_size": 2})
    how = ("--backbone", "net", "--device", "cpu", "--workers", 0)
    printed = cribo("adapt", "images", *how, *CHANNELS, "--steps", 2, "--training", few, "--keep", "adapted")
    assert "from 3 to 5 channels" in printed
    about = json.loads(Path("adapted/net-adapted/backbone.json").read_text())
    assert about["pixels"] == {"range": [0, 4095], "channels": [0, 1, 2, 3, 4]}
    first = [load_backbone(each).model.patch_embed.proj.weight for each in ("adapted/net-adapted/closed_form", "net")]
    assert torch.equal(first[0], inflate(load_backbone("net"), 5).model.patch_embed.proj.weight)
    trained = load_backbone("adapted/net-adapted/training").model.patch_embed.proj.weight
    assert not torch.equal(trained, first[0])
    for split in ("train", "val"):
        for kind in ("images", "labels"):
            Path(f"set/{kind}/{split}").mkdir(parents=True)
        for number in range(4):
            shutil.copy(f"images/{number}.tif", f"set/images/{split}")
            shutil.copy(f"examples/{number}_labels.png", f"set/labels/{split}/{number}.png")
    data = ("--data", "folder", "--data.root", "set", "--ratios", 1, "--neighbours", 5)
    cribo("evaluate", "dense-nn", *data, "--backbone", "adapted/net-adapted", "--out", "evaluated")
    found = json.loads(Path("evaluated/results.json").read_text())
    assert found["data"]["channels"] == [0, 1, 2, 3, 4]
    assert found["backbone"]["args"]["in_chans"] == 5
