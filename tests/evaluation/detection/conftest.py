"""Images of coloured rectangles with known boxes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from cribo.models import Backbone, build_backbone

COLOURS = {"red": (210, 40, 40), "green": (40, 190, 60)}
IDS = {"red": 7, "green": 90}


def write_split(root: Path, split: str, images: list[list[tuple[str, list[int]]]], side: tuple[int, int]) -> None:
    """Write images with (colour, [left, top, width, height]) rectangles on grey."""
    folder = root / "images" / split
    folder.mkdir(parents=True, exist_ok=True)
    content: dict[str, Any] = {
        "images": [
            {"id": 100 + number, "file_name": f"{number}.png", "width": side[1], "height": side[0]}
            for number in range(len(images))
        ],
        "annotations": [],
        "categories": [{"id": IDS[name], "name": name} for name in COLOURS],
    }
    for number, rectangles in enumerate(images):
        pixels = np.full((*side, 3), 128, dtype=np.uint8)
        for colour, box in rectangles:
            left, top, width, height = box
            pixels[top : top + height, left : left + width] = COLOURS[colour]
            annotation = {"image_id": 100 + number, "category_id": IDS[colour], "bbox": box}
            content["annotations"].append({"id": len(content["annotations"]) + 1, **annotation})
        Image.fromarray(pixels).save(folder / f"{number}.png")
    (root / f"instances_{split}.json").write_text(json.dumps(content))


@pytest.fixture
def rectangles(tmp_path: Path) -> Path:
    """Write four images of 64 x 48 pixels, one of them empty, for both training and validation."""
    images = [
        [("red", [4, 6, 20, 16]), ("green", [34, 20, 24, 22])],
        [("green", [8, 22, 30, 18])],
        [],
        [("red", [36, 4, 22, 30]), ("red", [4, 28, 16, 16])],
    ]
    for split in ("train", "val"):
        write_split(tmp_path / "set", split, images, (48, 64))
    return tmp_path / "set"


@pytest.fixture
def tiny_vit() -> Callable[..., Backbone]:
    """Return a function that builds a vision transformer of two blocks."""

    def make(name: str = "vit_tiny_patch16_224", image_size: int = 32, **args: Any) -> Backbone:
        small = {"patch_size": 8, "depth": 2, "embed_dim": 32, "num_heads": 2, **args}
        return build_backbone(name, args=small, image_size=image_size)

    return make
