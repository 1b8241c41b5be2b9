"""Every command with a backbone supports a linear layer after its features, and reads its channels."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from cribo.apps.search import ObjectDatabase
from cribo.cli import main
from cribo.models import build_backbone, load_backbone, save_backbone
from cribo.objectives import Setting
from cribo.pretraining import PretrainConfig, pretrain

COLOURS = np.array([[200, 60, 60], [60, 200, 60], [60, 60, 200]])
NETWORKS = {
    "vit": ("vit_tiny_patch16_224", {"patch_size": 8, "depth": 2, "embed_dim": 32, "num_heads": 2}),
    "resnet": ("resnet18", {"layers": (1, 1, 0, 0), "channels": (8, 16, 16, 16)}),
}
WIDTH = 6


def save_with_readout(kind: str, folder: Path) -> Path:
    name, args = NETWORKS[kind]
    backbone = build_backbone(name, args=args, image_size=32)
    generator = torch.Generator().manual_seed(0)
    backbone.set_readout(torch.randn(WIDTH, backbone.embed_dim, generator=generator), torch.zeros(WIDTH))
    return save_backbone(backbone, folder).parent


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A labelled set of coloured blocks; its training images are also examples for `segment`."""
    monkeypatch.chdir(tmp_path)
    generator = np.random.default_rng(0)
    for split, count in (("train", 6), ("val", 3)):
        for part in ("images", "labels"):
            (tmp_path / "set" / part / split).mkdir(parents=True)
        for number in range(count):
            labels = generator.integers(0, 3, (4, 4)).repeat(8, 0).repeat(8, 1).astype(np.uint8)
            Image.fromarray(COLOURS[labels].astype(np.uint8)).save(f"set/images/{split}/{number}.png")
            Image.fromarray(labels).save(f"set/labels/{split}/{number}.png")
    Path("set/classes.txt").write_text("red\ngreen\nblue\n")
    for number in range(2):
        Path("examples").mkdir(exist_ok=True)
        Image.open(f"set/images/train/{number}.png").save(f"examples/{number}.bmp")
        Image.open(f"set/labels/train/{number}.png").save(f"examples/{number}_labels.png")
    Path("examples/classes.txt").write_text("red\ngreen\nblue\n")
    return tmp_path


COMMANDS = {
    "dense-nn": "evaluate dense-nn --backbone mine --data folder --data.root set --ratios 1 --neighbours 3 "
    "--cache none --devices cpu --runtime.workers 0 --out out",
    "segment": "segment --backbone mine --images set/images/val --examples examples --device cpu --workers 1 --out out",
    "index": "index --backbone mine --images set/images/val --db out --num_objects 3 --size 0 --min_share 0 "
    "--device cpu --workers 1",
    "export": "export --backbone mine --to timm --out out",
}


@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.parametrize("command", ["dense-nn", "segment", "index"])
def test_commands_read_its_channels(command: str, kind: str, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_with_readout(kind, data / "mine")
    assert main(COMMANDS[command].split()) == 0, capsys.readouterr().err
    if command == "dense-nn":
        about = json.loads(Path("out/results.json").read_text())["backbone"]
        assert about["embed_dim"] == WIDTH
        assert f"they include a linear layer after the features, of {WIDTH} channels" in about["notes"]
    if command == "index":
        assert ObjectDatabase.open("out").info.dim == WIDTH
        words = "search --db out --image set/images/val/1.png --point 10,10 --k 2 --out found"
        assert main(words.split()) == 0, capsys.readouterr().err
        [result] = json.loads(Path("found/results.json").read_text())["results"]
        assert len(result["found"]) == 2


@pytest.mark.parametrize(
    ("command", "option", "value"),
    [
        *((name, "--backbone.layers", "2") for name in ("dense-nn", "index", "export")),
        ("segment", "--blocks", "2,3"),
    ],
)
def test_commands_reject_more_blocks_than_the_layer_reads(
    command: str, option: str, value: str, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_with_readout("vit", data / "mine")
    assert main([*COMMANDS[command].split(), option, value]) == 2
    assert re.search(rf"{option.rpartition('.')[2].strip('-')} must be .*got {value[-1]}", capsys.readouterr().err)
    assert not Path("out").exists()


def test_training_keeps_the_layer(
    tiny: Callable[..., PretrainConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run from such weights does not change the layer, which is also in its checkpoints."""
    name, args = NETWORKS["vit"]
    source = save_with_readout("vit", tmp_path / "mine")
    config = tiny({
        "objective.name": "alignment",
        "backbone.name": name,
        "backbone.args": args,
        "backbone.pretrained": str(source),
        "optim.epochs": 1,
    })  # fmt: skip
    monkeypatch.setattr("cribo.pretraining.run.write_report", lambda *args, **kwargs: [])
    run = pretrain(config, out=tmp_path)
    finished = load_backbone(run.folder)
    unfinished = load_backbone(run.folder / "checkpoints" / "step=00000004.ckpt")
    assert finished.fingerprint() == unfinished.fingerprint()
    before = Setting(config, 36, 4).build_backbone()
    assert before.readout is not None
    assert finished.readout is not None
    assert finished.embed_dim == WIDTH
    assert torch.equal(finished.readout.weight, before.readout.weight)
    assert not torch.equal(finished.model.norm.weight, before.model.norm.weight)
