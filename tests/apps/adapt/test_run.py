"""`cribo adapt` on the command line, with a small network and synthetic scenes."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from cribo.apps.adapt import AdaptConfig, adapt, planning
from cribo.apps.adapt.averaging import averaged
from cribo.apps.adapt.encoding import encode
from cribo.apps.adapt.run import Adaptation
from cribo.base.errors import ConfigError, FolderError
from cribo.cli import main
from cribo.data import open_images
from cribo.data.scenes import Scenes
from cribo.features.config import BackboneSource
from cribo.models import Backbone, build_backbone, load_backbone, save_backbone

SMALL = {"depth": 4, "embed_dim": 32, "num_heads": 2, "patch_size": 8}


def write_scenes(folder: Path, size: int) -> Path:
    """Write twenty scenes with labels, in the layout of a labelled folder."""
    found = Scenes(20, size=size, seed=0)
    for kind in ("images", "labels"):
        (folder / kind).mkdir()
    for index in range(len(found)):
        Image.fromarray(found.load(index).permute(1, 2, 0).numpy()).save(folder / "images" / f"{index:02d}.png")
        Image.fromarray(found.labels(index).numpy()).save(folder / "labels" / f"{index:02d}.png")
    (folder / "classes.txt").write_text("\n".join(found.classes))
    return folder


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scenes(tmp_path_factory.mktemp("scenes"), 64)


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small images, since the fit takes time for each patch."""
    return write_scenes(tmp_path_factory.mktemp("labelled"), 32)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a small network to disk."""
    folder = tmp_path_factory.mktemp("backbone")
    save_backbone(build_backbone("vit_tiny_patch16_224", args=SMALL, image_size=32), folder)
    return folder


TRAINING = {"runtime.checkpoint_every": 4, "views.size": 32, "backbone.train_blocks": 1, "optim.batch_size": 4}


def _asked(scenes: Path, source: Path, **changes: object) -> AdaptConfig:
    """Return the options of a run with a closed form that need not be chosen."""
    values = {"images": str(scenes / "images"), "steps": 10, "training": TRAINING, "workers": 0, "device": "cpu"}
    return AdaptConfig(backbone=BackboneSource(str(source)), **{**values, "blocks": 4, "power": 0.6, **changes})


@pytest.mark.slow
def test_the_command_writes_a_backbone_a_verdict_and_a_picture(
    scenes: Path, labelled: Path, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (
        f"--backbone {source} --steps 10 --blocks 3 --power 0.6 --workers 0 --labelled {labelled} --second {labelled}"
    )
    words += f" --out {tmp_path} --name mine --keep adapted --device cpu"
    assert main(["adapt", str(scenes / "images"), *words.split(), "--training", json.dumps(TRAINING)]) == 0
    said = capsys.readouterr().out
    assert "Kept the adapted weights" in said
    assert str(tmp_path / "mine") in said
    backbone = load_backbone(tmp_path / "mine")
    assert backbone.depth == 3
    assert backbone.readout is not None
    start = load_backbone(tmp_path / "mine" / "closed_form")
    assert _changed_blocks(start, backbone) == {"2"}  # only the last block was trained
    trained = load_backbone(tmp_path / "mine" / "training")
    before, after, exported = (each.model.blocks[2].attn.qkv.weight for each in (start, trained, backbone))
    assert not torch.equal(before, after)
    assert torch.allclose(exported, 0.25 * before + 0.75 * after, atol=1e-7)
    verdict = json.loads((tmp_path / "mine" / "verdict.json").read_text())
    assert set(verdict["labelled"]) == set(verdict["second"]) == {"closed form", "adapted weights"}
    assert verdict["labelled"] == verdict["second"]  # the same images
    assert set(verdict["segmentation"]) == {"closed form", "adapted weights"}
    assert verdict["segmentation"]["closed form"]["before"] > 0.1
    probe = verdict["probes"]["adapted weights"]
    assert f"Segmentation from a few examples with the adapted weights ({probe})" in " ".join(said.split())
    with Image.open(tmp_path / "mine" / "neighbours.png") as picture:
        assert np.asarray(picture).std() > 10


def _changed_blocks(start: Backbone, trained: Backbone) -> set[str]:
    """Return the numbers of the blocks whose weights differ."""
    before, after = start.model.state_dict(), trained.model.state_dict()
    names = {name for name in after if name.startswith("blocks.") and not after[name].equal(before[name])}
    return {name.split(".")[1] for name in names}


def test_the_closed_form_decorrelates_the_patches_of_the_images(scenes: Path, source: Path, tmp_path: Path) -> None:
    options = {"steps": None, "minutes": 1, "blocks": None, "power": 1.0, "keep": "adapted"}
    adapted = adapt(_asked(scenes, source, **options), out=tmp_path)
    assert adapted.verdict.kept == "closed form"
    assert not (adapted.folder / "training").exists()
    images = open_images(scenes / "images")
    patches = torch.cat([encode(adapted.backbone(), images.load(index)).tokens[0] for index in range(len(images))])
    covariance = torch.cov(patches.T.double(), correction=0)
    assert torch.allclose(covariance, torch.eye(len(covariance), dtype=torch.double), atol=1e-3)
    assert patches.mean(dim=0).abs().max() < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    "objective",
    [
        {"objective.name": "neco", "objective.args": {"local_crops": 1, "local_size": 16, "grid": 2}},
        {"objective.name": "paka", "objective.args": {"local_crops": 1, "local_size": 16}},
        {"objective.name": "timet", "objective.args": {"frames": 2}, "data.video.frames": 4},  # five clips
    ],
    ids=lambda objective: objective["objective.name"],
)
def test_another_objective_trains_the_last_block(
    scenes: Path, source: Path, tmp_path: Path, objective: dict[str, Any]
) -> None:
    asked = _asked(scenes, source, steps=2, keep="adapted", training={**TRAINING, **objective})
    adapted = adapt(asked, out=tmp_path)
    assert adapted.verdict.kept == "adapted weights"
    start, trained = (load_backbone(adapted.folder / name) for name in ("closed_form", "training"))
    assert _changed_blocks(start, trained) == {"3"}


@pytest.mark.slow
def test_an_interrupted_adaptation_continues_to_the_same_weights(scenes: Path, source: Path, tmp_path: Path) -> None:
    asked = _asked(scenes, source, keep="adapted")
    folder = tmp_path / "cut"
    whole = adapt(asked, out=tmp_path, name="cut")
    weights = (folder / "backbone.safetensors").read_bytes()
    for name in ("backbone.safetensors", "verdict.json", "training/summary.json", "training/backbone.safetensors"):
        (folder / name).unlink()
    for checkpoint in (folder / "training" / "checkpoints").glob("*10.ckpt"):
        checkpoint.unlink()
    again = adapt(asked, out=tmp_path, name="cut", resume=True)
    assert again.verdict == whole.verdict
    assert (folder / "backbone.safetensors").read_bytes() == weights
    with pytest.raises(ValueError, match=r"power was 0\.6"):
        adapt(replace(asked, power=0.5), out=tmp_path, name="cut", resume=True)
    with pytest.raises(ValueError, match="already exists"):
        adapt(asked, out=tmp_path, name="cut")


def test_other_images_of_equal_names_and_sizes_are_not_continued(scenes: Path, source: Path, tmp_path: Path) -> None:
    images = tmp_path / "images"
    shutil.copytree(scenes / "images", images)
    for path in images.iterdir():
        Image.open(path).save(path.with_suffix(".bmp"))  # all of one size
        path.unlink()
    asked = replace(_asked(scenes, source, steps=None, minutes=1), images=str(images))
    whole = adapt(asked, out=tmp_path, name="cut")
    (images / "00.bmp").write_bytes((images / "00.bmp").read_bytes())  # a copy
    assert adapt(asked, out=tmp_path, name="cut", resume=True).verdict == whole.verdict
    (images / "00.bmp").write_bytes((images / "01.bmp").read_bytes())
    with pytest.raises(FolderError, match="--name"):
        adapt(asked, out=tmp_path, name="cut", resume=True)


def test_weights_are_averaged_except_a_resized_position_embedding() -> None:
    small, large = (build_backbone("vit_tiny_patch16_224", args=SMALL, image_size=size) for size in (32, 64))
    average = averaged(small, large, 0.25)
    assert average.model.pos_embed.equal(small.model.pos_embed)
    mean = 0.75 * small.model.blocks[0].mlp.fc1.weight + 0.25 * large.model.blocks[0].mlp.fc1.weight
    assert torch.allclose(average.model.blocks[0].mlp.fc1.weight, mean)
    assert averaged(small, large, 1.0).model.blocks[3].mlp.fc2.weight.equal(large.model.blocks[3].mlp.fc2.weight)


def test_a_network_that_does_not_improve_is_not_kept(
    scenes: Path, labelled: Path, source: Path, tmp_path: Path
) -> None:
    # Whitening with a single direction loses nearly all information.
    asked = _asked(scenes, source, steps=None, minutes=1, dims=1, labelled=str(labelled))
    adapted = adapt(asked, out=tmp_path, name="worse")
    assert adapted.verdict.kept == "starting weights"
    assert adapted.verdict.labelled["closed form"].high < 0
    assert "Kept the starting weights: adaptation did not help." in adapted.verdict.sentences
    image = torch.rand(1, 3, 32, 32)
    kept, original = (load_backbone(place).encode(image).tokens for place in (tmp_path / "worse", source))
    assert kept.equal(original)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"blocks": 5}, "blocks must be at most 4"),
        ({"power": 1.5}, "power must be >= 0 and <= 1"),
        ({"minutes": 0}, "minutes must be > 0"),
        ({"trained_share": 0}, "trained_share must be > 0 and <= 1"),
        ({"steps": 0}, "steps must be >= 1"),
        ({"second": "x"}, "--second requires --labelled"),
        ({"images": "/nowhere"}, "there is no 'nowhere'"),
        ({"dims": 400, "steps": None, "minutes": 1}, "dims must be 1 to"),
        ({"training": {"optim.lr": -1}}, "optim.lr"),
        ({"training": {"backbone.train_blocks": 0}}, "train_blocks must be"),
        ({"training": {"backbone.train_blocks": 5}}, "train_blocks must be at most 4"),
        ({"training": {**TRAINING, "objective.name": "dino", "objective.args": {"local_size": 20}}}, "local_size"),
        ({"stride": 16}, "stride applies to convolutional networks"),
    ],
)
def test_bad_input_is_refused_before_any_work(
    scenes: Path, source: Path, tmp_path: Path, changes: dict[str, object], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        adapt(_asked(scenes, source, **changes), out=tmp_path)
    assert not list(tmp_path.iterdir())


def test_nine_labelled_images_are_refused(scenes: Path, source: Path, tmp_path: Path) -> None:
    for kind in ("images", "labels"):
        (tmp_path / "few" / kind).mkdir(parents=True)
        for index in range(9):
            name = f"{index:02d}.png"
            (tmp_path / "few" / kind / name).write_bytes((scenes / kind / name).read_bytes())
    with pytest.raises(ValueError, match="has 9 labelled images to score, but the verdict needs at least 10"):
        adapt(_asked(scenes, source, labelled=str(tmp_path / "few")), out=tmp_path)
    assert not list(tmp_path.glob("*-adapted"))


def test_a_too_short_budget_names_the_required_minutes(scenes: Path, source: Path, tmp_path: Path) -> None:
    asked = _asked(scenes, source, steps=None, minutes=2)
    adapt(replace(asked, minutes=1), out=tmp_path, name="start")
    folder = tmp_path / "start"
    start, steps = load_backbone(folder / "closed_form"), Adaptation(asked, open_images(asked.images))
    with pytest.raises(ValueError, match=r"--minutes 2 suffices for 0 steps.*use --minutes 3"):
        steps.plan(start, folder, seconds=1e-6)
    planned = steps.plan(start, folder, seconds=10_000.0)
    assert planned.optim.epochs * (20 // 4) == 500  # the default maximum, on any machine


def test_what_is_ready_is_kept_where_the_time_does_not_suffice_for_training(
    scenes: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "seconds_per_step", lambda session: 1e6)  # on a slow machine
    asked = _asked(scenes, source, steps=None, minutes=30)
    adapted = adapt(asked, out=tmp_path, name="short")
    assert set(adapted.verdict.indicators) == {"starting weights", "closed form"}
    assert (adapted.folder / "verdict.json").is_file()
    assert adapted.backbone().patch_size == 8
    monkeypatch.setattr(planning, "_seconds_per_image", lambda networks, images: 1e6)
    with pytest.raises(ConfigError, match="--minutes 30 is too short for the closed form"):
        adapt(asked, out=tmp_path, name="slow")
    assert not (tmp_path / "slow").exists()
