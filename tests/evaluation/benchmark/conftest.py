"""Small sets in the layouts supported by cards, with known scores."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cribo.models import build_backbone, save_backbone

COLOURS = np.array([[220, 30, 30], [30, 220, 30], [30, 30, 220]], dtype=np.uint8)
SIDE, PATCH = 64, 16


def write_labelled(folder: Path, splits: tuple[str, ...] = ("train", "val"), images: int = 4) -> Path:
    """Write images whose patches have the colour of their class."""
    rng = np.random.default_rng(0)
    for split in splits:
        for kind in ("images", "labels"):
            (folder / kind / split).mkdir(parents=True)
        for number in range(images):
            classes = rng.integers(0, 3, (SIDE // PATCH, SIDE // PATCH)).repeat(PATCH, 0).repeat(PATCH, 1)
            Image.fromarray(COLOURS[classes]).save(folder / "images" / split / f"{number}.png")
            Image.fromarray(classes.astype(np.uint8)).save(folder / "labels" / split / f"{number}.png")
    (folder / "classes.txt").write_text("red\ngreen\nblue\n")
    return folder


def write_classes(folder: Path) -> Path:
    """Write images in folders of classes."""
    for number, colour in enumerate(COLOURS):
        (folder / f"class{number}").mkdir(parents=True)
        for image in range(4):
            Image.fromarray(np.full((32, 32, 3), colour)).save(folder / f"class{number}" / f"{image}.png")
    return folder


def write_boxes(folder: Path, splits: tuple[str, ...] = ("train", "val")) -> Path:
    """Write images with one box each, in COCO's format."""
    for split in splits:
        (folder / "images" / split).mkdir(parents=True)
        Image.fromarray(np.zeros((32, 32, 3), np.uint8)).save(folder / "images" / split / "0.png")
        content = {
            "images": [{"id": 1, "file_name": "0.png", "height": 32, "width": 32}],
            "annotations": [{"id": 1, "image_id": 1, "category_id": 1, "bbox": [4, 4, 16, 16], "iscrowd": 0}],
            "categories": [{"id": 1, "name": "thing"}],
        }
        (folder / f"instances_{split}.json").write_text(json.dumps(content))
    return folder


@pytest.fixture
def sets(tmp_path: Path) -> Path:
    """Return a folder with sets of several layouts, one of them incomplete, and other folders."""
    root = tmp_path / "sets"
    write_labelled(root / "squares")
    half = write_labelled(root / "half", ("train",))
    (half / "images" / "val").mkdir()
    write_classes(root / "kinds" / "images")
    write_boxes(root / "boxes")
    (root / "notes").mkdir()
    (root / ".hidden" / "images").mkdir(parents=True)
    return root


@pytest.fixture
def make_backbone(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that saves a tiny network and returns its folder."""

    def make(name: str = "tiny", seed: int = 5) -> Path:
        args = {"patch_size": PATCH, "depth": 1, "embed_dim": 32, "num_heads": 2}
        (tmp_path / name).mkdir(exist_ok=True)
        save_backbone(build_backbone("vit_tiny_patch16_224", args=args, image_size=SIDE, seed=seed), tmp_path / name)
        return tmp_path / name

    return make
