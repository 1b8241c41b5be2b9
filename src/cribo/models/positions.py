"""Resizing of position embeddings as implemented by each project, to reproduce its features.

At the training size, all methods return the embedding unchanged. At other sizes they differ: MAE's embedding differs by
0.9 to 1.5 % between methods when resized from 14 x 14 to 32 x 32 patches, and by up to 3.8 % from 14 x 14 to 7 x 7.
"""

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float
from timm.models.beit import gen_relative_position_index
from timm.models.swin_transformer import window_partition, window_reverse
from torch import Tensor

from cribo.base.errors import InputError
from cribo.models.config import Resizing

Windows = Literal["timm", "original"]
"""Padding and shifting of Swin's windows for maps of other sizes than it was built for: see `attend_in_windows`."""

RelativeResizing = Literal["timm", "geometric_spline", "bilinear"]
"""Method of resizing a table of relative position biases. `timm`: by timm's filter, when weights are loaded.
`geometric_spline`: when weights are loaded, by a cubic spline over geometrically growing distances (BEiT, SimMIM).
`bilinear`: to the size of each image (Hugging Face)."""

RESIZINGS: tuple[Resizing, ...] = get_args(Resizing)


def resize_positions(
    positions: Float[Tensor, "1 p d"],
    old_grid: Sequence[int],
    new_grid: Sequence[int],
    how: Resizing,
    *,
    prefix_tokens: int = 0,
) -> Float[Tensor, "1 q d"]:
    """Resize a position embedding of h * w patches; prefix tokens are not changed.

    As in the originals, a square image with the number of patches of the embedding is not resized.

    Args:
        positions: (1, prefix_tokens + h * w, D) position embedding, in row-major order.
        old_grid: (h, w) of the embedding.
        new_grid: (h', w') of the result.
        how: see `Resizing`.
        prefix_tokens: number of positions of [CLS] and registers, which come first.
    """
    (old_h, old_w), (new_h, new_w) = old_grid, new_grid
    # A graph holds for every size: a condition would restrict it to the sizes for which the condition is the same.
    if not torch.compiler.is_exporting() and new_h * new_w == old_h * old_w and new_h == new_w:
        return positions
    prefix, patches = positions[:, :prefix_tokens], positions[:, prefix_tokens:]
    grid = patches.float().unflatten(1, (old_h, old_w)).permute(0, 3, 1, 2)
    options: dict[str, Any] = {"size": (new_h, new_w), "mode": how.partition("_")[0], "align_corners": False}
    match how:
        case "timm":
            options |= {"mode": "bicubic", "antialias": True}
        case "bicubic_offset" if torch.compiler.is_exporting():
            resized = _resize_with_offset(grid, new_h, new_w).permute(0, 2, 3, 1).flatten(1, 2)
            return torch.cat([prefix, resized.to(patches.dtype)], dim=1)
        case "bicubic_offset":
            options |= {"size": None, "scale_factor": ((new_h + 0.1) / old_h, (new_w + 0.1) / old_w)}
        case "bilinear_antialiased":
            options |= {"antialias": True}
        case "bilinear_corners":
            options |= {"align_corners": True}
        case _:
            pass
    resized = F.interpolate(grid, **options).permute(0, 2, 3, 1).flatten(1, 2)
    return torch.cat([prefix, resized.to(patches.dtype)], dim=1)


def _resize_with_offset(grid: Float[Tensor, "1 d h w"], new_h: int, new_w: int) -> Float[Tensor, "1 d h2 w2"]:
    """Resize by `bicubic_offset` in a graph of free sizes; `interpolate` with a scale factor would fix the sizes."""
    (old_h, old_w), device = grid.shape[2:], grid.device
    is_own = (torch.full((), new_h, device=device) == old_h) & (torch.full((), new_w, device=device) == old_w)
    offset = torch.where(is_own, 0.0, 0.1)
    return _cubic_weights(old_h, new_h, offset) @ grid @ _cubic_weights(old_w, new_w, offset).T


def _cubic_weights(old: int, new: int, offset: Float[Tensor, ""]) -> Float[Tensor, "n o"]:
    """Return the weights of the old positions along an axis for each new one, by cubic convolution as in PyTorch."""
    device, a = offset.device, -0.75
    places = (torch.arange(new, device=device) + 0.5) * (old / (torch.full((), new, device=device) + offset)) - 0.5
    neighbours = places.floor()[:, None] + torch.arange(-1, 3, device=device)
    x = (places[:, None] - neighbours).abs()
    near, far = ((a + 2) * x - (a + 3)) * x**2 + 1, ((x - 5) * x + 8) * a * x - 4 * a
    weights = torch.where(x <= 1, near, far)
    is_neighbour = neighbours.clamp(0, old - 1)[..., None] == torch.arange(old, device=device)
    return (weights[..., None] * is_neighbour).sum(dim=1)


def resize_relative_positions(
    table: Float[Tensor, "p heads"],
    old_grid: Sequence[int],
    new_grid: Sequence[int],
    how: Literal["geometric_spline", "bilinear"],
) -> Float[Tensor, "q heads"]:
    """Resize BEiT's table of relative position biases, whose last three rows are those of [CLS].

    Args:
        table: ((2h - 1) * (2w - 1) + 3, heads) biases.
        old_grid: (h, w) of the table.
        new_grid: (h', w') of the result.
        how: see `RelativeResizing`.
    """
    if not torch.compiler.is_exporting() and tuple(old_grid) == tuple(new_grid):
        return table
    (old_h, old_w), (new_h, new_w) = ([2 * side - 1 for side in grid] for grid in (old_grid, new_grid))
    grid = table[:-3].float().T.unflatten(1, (old_h, old_w))
    if how == "bilinear":
        resized = F.interpolate(grid[None], size=(new_h, new_w), mode="bilinear", align_corners=False)[0]
    else:
        resized = _resize_by_spline(grid, new_h, new_w)
    return torch.cat([resized.flatten(1).T.to(table), table[-3:]])


def _resize_by_spline(grid: Float[Tensor, "heads h w"], new_h: int, new_w: int) -> Float[Tensor, "heads h2 w2"]:
    from scipy.interpolate import RectBivariateSpline

    old_h, old_w = grid.shape[1:]
    down, across = _geometric_distances(old_h, new_h), _geometric_distances(old_w, new_w)
    new_down, new_across = (torch.arange(side) - side // 2 for side in (new_h, new_w))
    splines = (RectBivariateSpline(down, across, each.numpy()) for each in grid.cpu())
    return torch.stack([torch.from_numpy(spline(new_down.numpy(), new_across.numpy())) for spline in splines]).float()


def _geometric_distances(old: int, new: int) -> list[float]:
    """Return distances 0, 1, 1 + q, 1 + q + q**2, ... to both sides, with q such that the last is the new table's."""
    low, high, ratio = 1.01, 1.5, 0.0
    while high - low > 1e-6:
        ratio = (low + high) / 2
        is_beyond = (1 - ratio ** (old // 2)) / (1 - ratio) > new // 2
        low, high = (low, ratio) if is_beyond else (ratio, high)
    steps = [sum(ratio**power for power in range(count + 1)) for count in range(old // 2)]
    return [*(-step for step in reversed(steps)), 0.0, *steps]


class RelativePositions:
    """Relative position biases of a Beit network for images of any size, computed as by Hugging Face."""

    def __init__(self, model: Any) -> None:
        self.built = model.patch_embed.grid_size
        self.grid = self.built

    def bias(self, holder: Any) -> Float[Tensor, "heads n n"]:
        """Return the bias of a timm module for the current grid."""
        table = resize_relative_positions(holder.relative_position_bias_table, self.built, self.grid, "bilinear")
        index = gen_relative_position_index(self.grid, device=table.device)
        return table[index.flatten()].unflatten(0, index.shape).permute(2, 0, 1).contiguous()


def attend_in_windows(block: Any, x: Float[Tensor, "b h w d"]) -> Float[Tensor, "b h w d"]:
    """Apply Swin's window attention to a map of any size: `SwinTransformerBlock._attn` as in the originals.

    The originals pad a map before shifting it, timm afterwards. They shift it unless the map itself is one window high
    or wide; timm checks the size for which the network was built instead.

    Raises:
        ValueError: the map is smaller than a window.
    """
    height, width = x.shape[1:3]
    window = block.window_size
    if min(height, width) < max(window):
        raise InputError(
            f"images of this size have a {height}x{width} map, smaller than a window of {max(window)}: use "
            "larger images"
        )
    block.shift_size = block.target_shift_size if min(height, width) > max(window) else (0, 0)
    x = F.pad(x, (0, 0, 0, -width % window[1], 0, -height % window[0]))
    shifted = torch.roll(x, [-shift for shift in block.shift_size], (1, 2))
    parts = window_partition(shifted, window).flatten(1, 2)
    parts = block.attn(parts, mask=block.get_attn_mask(shifted)).unflatten(1, window)
    shifted = window_reverse(parts, window, *x.shape[1:3])
    return torch.roll(shifted, block.shift_size, (1, 2))[:, :height, :width]


def embed_positions(model: Any, patches: Float[Tensor, "b h w d"]) -> Float[Tensor, "b n d"]:
    """Add positions, [CLS] and registers to patches: `VisionTransformer._pos_embed` with another resizing method."""
    prefix = [
        token.expand(patches.shape[0], -1, -1) for token in (model.cls_token, model.reg_token) if token is not None
    ]
    positions = resize_positions(
        model.pos_embed,
        model.patch_embed.grid_size,
        patches.shape[1:3],
        model.position_resizing,
        prefix_tokens=0 if model.no_embed_class else model.num_prefix_tokens,
    )
    tokens = patches.flatten(1, 2)
    if model.no_embed_class:
        return model.pos_drop(torch.cat([*prefix, tokens + positions], dim=1))
    return model.pos_drop(torch.cat([*prefix, tokens], dim=1) + positions)
