"""Channels, range and pixel size that are stored with a backbone, and options that take precedence."""

import json
from pathlib import Path

import pytest

from cribo.base.errors import InputError
from cribo.data.config import PixelOptions, Reading
from cribo.features.config import BackboneSource
from cribo.features.reading import completed_for, saved_pixels
from cribo.models import build_backbone, inflate, load_backbone, save_backbone

PIXELS = {"channels": ["nuclei=4", 1], "range": [0, 10, 5, 20]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    args = {"depth": 1, "embed_dim": 32, "num_heads": 2}
    backbone = inflate(build_backbone("vit_tiny_patch16_224", args=args, image_size=32), 2)
    backbone.pixels = PIXELS
    save_backbone(backbone, tmp_path / "run")
    backbone.save_pretrained(tmp_path / "timm")
    return tmp_path


@pytest.mark.parametrize("name", ["run", "run/backbone.safetensors", "timm", "timm/model.safetensors"])
def test_stored_options_are_read_from_files_of_this_project(name: str, folder: Path) -> None:
    assert saved_pixels(str(folder / name)) == PIXELS
    assert load_backbone(folder / name).pixels == PIXELS
    reading = completed_for(BackboneSource(str(folder / name)), Reading(max_pixels=99))
    assert (reading.given, reading.max_pixels, reading.in_chans) == (PIXELS, 99, 2)


def test_other_sources_have_none(tmp_path: Path) -> None:
    save_backbone(build_backbone("resnet10t", image_size=32), tmp_path)
    for source in (str(tmp_path), "vit_small_patch16_224.dino", str(tmp_path / "missing.pth"), "mean-colour"):
        assert saved_pixels(source) == {}
    assert completed_for(None, Reading(page=1)) == Reading(page=1)


def test_given_options_take_precedence(folder: Path) -> None:
    source = str(folder / "run")
    assert completed_for(source, Reading(range=(0, 9))).given == {"channels": PIXELS["channels"], "range": [0, 9]}
    # A range for each of the stored channels does not apply to others.
    assert completed_for(source, Reading(channels=(0, 1))).given == {"channels": [0, 1]}
    assert PixelOptions(channels=(0,)).completed({"range": (0, 9)}).given == {"channels": [0], "range": [0, 9]}


def test_the_pixel_size_of_the_training_is_stored(tmp_path: Path) -> None:
    backbone = build_backbone("resnet10t", image_size=32)
    backbone.pixels = Reading(pixel_size=0.5, page=1).trained_with
    save_backbone(backbone, tmp_path)
    assert saved_pixels(str(tmp_path)) == {"pixel_size": 0.5}
    assert completed_for(str(tmp_path), Reading()).pixel_size == 0.5
    assert completed_for(str(tmp_path), Reading(pixel_size=0)).pixel_size == 0


def test_invalid_stored_options_are_refused_with_their_file(folder: Path) -> None:
    file = folder / "run" / "backbone.json"
    about = json.loads(file.read_text())
    for wrong in ({"channels": ["../x"]}, {"range": [5, 1]}, {"channels": 7}, {"pixel_size": -1}, {"pixel_size": "x"}):
        file.write_text(json.dumps({**about, "pixels": wrong}))
        with pytest.raises(InputError, match=r"backbone\.json"):
            saved_pixels(str(folder / "run"))
