"""Folders of transformers: weights split into files, and the preparation of images."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from cribo.base.errors import InputError
from cribo.models import load_backbone
from cribo.models.hub.download import HubName, choose_files

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "whole"
    config = transformers.Dinov2Config(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, image_size=56, patch_size=14
    )
    torch.manual_seed(0)
    network = transformers.Dinov2Model(config)
    network.save_pretrained(folder)
    network.save_pretrained(folder.with_name("split"), max_shard_size="20KB")
    return folder


@pytest.fixture
def split(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole.with_name("split"), tmp_path / "split"))


def test_split_weights_are_read(whole: Path, split: Path):
    assert len(list(split.glob("*.safetensors"))) > 1
    assert load_backbone(split).fingerprint() == load_backbone(whole).fingerprint()
    files = sorted(path.name for path in split.iterdir())
    weights, others = choose_files(files, HubName("owner/name"))
    assert sorted([weights, *others]) == files  # all are downloaded


@pytest.mark.parametrize("kind", ["outside", "missing", "not named", "damaged"])
def test_an_index_names_files_of_its_own_folder(split: Path, kind: str):
    index = split / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    key, name = next(iter(content["weight_map"].items()))
    if kind == "outside":
        shutil.copy(split / name, split.parent / name)
        content["weight_map"][key] = f"../{name}"
    elif kind == "missing":
        (split / name).unlink()
    elif kind == "not named":
        content["weight_map"]["other.weight"] = name
    else:
        content["weight_map"] = [name]
    index.write_text(json.dumps(content))
    with pytest.raises((InputError, FileNotFoundError), match=r"model\.safetensors\.index\.json"):
        load_backbone(split)


@pytest.mark.parametrize(
    "options",
    [
        {"image_mean": 0.5, "image_std": 0.25},
        {"image_mean": [123, 116, 103], "image_std": [58, 57, 57], "do_rescale": False},
        {"image_mean": 1.0, "image_std": 1.0, "rescale_factor": 1 / 127.5},
        {"do_normalize": False},
        {"do_normalize": False, "do_rescale": False},
    ],
)
def test_images_are_normalised_as_transformers_does(whole: Path, tmp_path: Path, options: dict[str, Any]):
    folder = Path(shutil.copytree(whole, tmp_path / "folder"))
    others = {"image_processor_type": "BitImageProcessor", "do_resize": False, "do_center_crop": False}
    (folder / "preprocessor_config.json").write_text(json.dumps(others | options))
    pixels = np.random.default_rng(0).integers(0, 256, (56, 56, 3), dtype=np.uint8)
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    expected = processor(Image.fromarray(pixels), return_tensors="pt")["pixel_values"][0]
    backbone = load_backbone(folder)
    mean, std = (torch.tensor(values)[:, None, None] for values in (backbone.mean, backbone.std))
    image = torch.from_numpy(pixels).permute(2, 0, 1) / 255
    assert torch.allclose((image - mean) / std, expected.float(), atol=1e-4)


@pytest.mark.parametrize(
    "options",
    [{"do_rescale": False}, {"image_mean": [0.5, 0.5]}, {"image_std": 0}, {"image_mean": "0.5"}, {"rescale_factor": 0}],
)
def test_contradictory_preparation_is_refused(whole: Path, tmp_path: Path, options: dict[str, Any]):
    folder = Path(shutil.copytree(whole, tmp_path / "folder"))
    (folder / "preprocessor_config.json").write_text(json.dumps(options))
    with pytest.raises(InputError, match=r"preprocessor_config\.json has"):
        load_backbone(folder)
