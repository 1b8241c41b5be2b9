"""Difference between timm's interpolation of position embeddings and that of supported projects.

    uv run python -m benchmarks.positions

Prints the relative L2 difference of the patch features of a random ViT-S/16, whose position embedding is the fixed
sine-cosine embedding of 14 x 14 patches, resized by the formula of each project and by timm's.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from timm.layers.pos_embed import resample_abs_pos_embed
from torch import Tensor

from cribo.models import build_backbone

GRID, DIM = 14, 384
SIZES = (32, 14, 7)


def sine_cosine() -> Tensor:
    """Return the fixed position embedding of MAE and MoCo v3, (1, GRID * GRID, DIM)."""
    frequency = 10000 ** -(torch.arange(DIM // 4) / (DIM / 4))
    rows, columns = torch.meshgrid(torch.arange(GRID), torch.arange(GRID), indexing="ij")
    angles = [place.flatten()[:, None] * frequency for place in (columns, rows)]
    return torch.cat([wave(angle) for angle in angles for wave in (torch.sin, torch.cos)], dim=1)[None]


def resized(positions: Tensor, **how: object) -> Tensor:
    """Resize positions by PyTorch's interpolation."""
    grid = positions.unflatten(1, (GRID, GRID)).permute(0, 3, 1, 2)
    return F.interpolate(grid, **how).flatten(2).mT  # pyright: ignore[reportArgumentType]


ORIGINALS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "bicubic, offset 0.1 (DINO, iBOT, CrIBo, CrOC, DINOv2, NeCo, TimeT)": lambda positions, size: resized(
        positions, scale_factor=((size + 0.1) / GRID,) * 2, mode="bicubic"
    ),
    "bicubic (MMSegmentation, Hugging Face)": lambda positions, size: resized(
        positions, size=(size, size), mode="bicubic"
    ),
    "bilinear (Segmenter)": lambda positions, size: resized(positions, size=(size, size), mode="bilinear"),
    "bilinear, anti-aliased (LOCA)": lambda positions, size: resized(
        positions, size=(size, size), mode="bilinear", antialias=True
    ),
}


@torch.no_grad()
def features(positions: Tensor, size: int) -> Tensor:
    """Compute the features of a random image of `size` x `size` patches."""
    backbone = build_backbone("vit_small_patch16_224", image_size=16 * size, seed=1).eval()
    backbone.model.pos_embed[:, 1:] = 0.3 * positions
    image = torch.randn(1, 3, 16 * size, 16 * size, generator=torch.Generator().manual_seed(3))
    return backbone.encode(image).tokens


def main() -> None:
    """Print a row for each formula."""
    positions = sine_cosine()
    table = Table("original interpolation", *(f"{size} x {size}" for size in SIZES))
    for name, original in ORIGINALS.items():
        cells = []
        for size in SIZES:
            ours = resample_abs_pos_embed(positions, [size, size], num_prefix_tokens=0)
            # No project resizes at the training size.
            theirs = positions if size == GRID else original(positions, size)
            expected = features(ours, size)
            cells.append(f"{float((features(theirs, size) - expected).norm() / expected.norm()):.1%}")
        table.add_row(name, *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
