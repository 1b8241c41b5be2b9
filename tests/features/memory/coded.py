"""Images with exactly known features, and their files."""

from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image

from cribo.features import Encoder
from cribo.features.memory import SegmentationSettings

PATCH = 4
EXACT = SegmentationSettings(scale=1.0, neighbours=3, refine="none", head="knn", whiten=False)


def _one_hot_of_red(images: torch.Tensor) -> torch.Tensor:
    red = F.avg_pool2d(images[:, :1] * 255, PATCH).flatten(2)[:, 0]
    return F.one_hot((red / 20).round().long().clamp(max=15), 16).float()


PERFECT = Encoder.from_function(_one_hot_of_red, PATCH, identity="one-hot")
"""One-hot encoder of the class, decoded from the mean red of a patch."""


def blocks(*rows: list[int]) -> torch.Tensor:
    """Return a label map with one class per patch."""
    return torch.tensor(rows, dtype=torch.uint8).repeat_interleave(PATCH, 0).repeat_interleave(PATCH, 1)


def image_of(labels: torch.Tensor, blue: int = 200) -> torch.Tensor:
    """Return the image (3, H, W) whose red is the class of each pixel times 20."""
    red = torch.where(labels == 255, 140, labels.long() * 20).to(torch.uint8)
    return torch.stack((red, torch.full_like(red, 3), torch.full_like(red, blue)))


def save_example(
    folder: Path, name: str, labels: torch.Tensor, *, palette: list[int] | None = None, label_name: str | None = None
) -> None:
    """Write a lossless image and its label map to one folder."""
    folder.mkdir(parents=True, exist_ok=True)
    save_image(folder / f"{name}.bmp", labels)
    save_labels(folder / f"{label_name or name}.png", labels, palette)


def save_image(path: Path, labels: torch.Tensor) -> None:
    """Write the image of a label map."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image_of(labels).permute(1, 2, 0).contiguous().numpy()).save(path)


def save_labels(path: Path, labels: torch.Tensor, palette: list[int] | None = None) -> None:
    """Write a label map with a palette."""
    path.parent.mkdir(parents=True, exist_ok=True)
    written = Image.fromarray(labels.to(torch.uint8).numpy())
    if palette is not None:
        written.putpalette(palette)
    written.save(path, bits=8)  # with fewer bits for a short palette, 255 would become another value
