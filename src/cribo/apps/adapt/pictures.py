"""Picture of patches and their nearest neighbours in other images, before and after adaptation."""

import torch
from jaxtyping import Float, UInt8
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor
from torch.nn.functional import normalize

from cribo.apps.adapt.encoding import PATCHES, encode
from cribo.apps.adapt.verdict import Candidate
from cribo.base.colours import rgb
from cribo.base.console import Progress
from cribo.base.drawing import house_style, panel_grid
from cribo.base.painting import MARK, as_picture
from cribo.data import ImageSource
from cribo.data.config import spread
from cribo.data.randomness import keyed_generator
from cribo.features.grid import encoding_size
from cribo.features.patches import resize_image
from cribo.pretraining.agreement import readable

PICTURED_IMAGES = 100
_QUERIES = 6
_NEIGHBOURS = 3
_REACH = 4  # patches drawn on each side of a patch


@house_style()
def draw_neighbours(
    before: Candidate,
    after: Candidate,
    images: ImageSource,
    progress: Progress = lambda what, done, total: None,
) -> Figure:
    """Draw patches of some images with their nearest neighbours in other images, for both networks."""
    found: list[tuple[list[Tensor], list[tuple[int, int]]]] = [([], []), ([], [])]
    pictures = []
    indices = spread(len(images), PICTURED_IMAGES)
    for done, (_, pixels) in enumerate(readable(images, indices), start=1):
        for candidate, (features, grids) in zip((before, after), found, strict=True):
            encoded = encode(candidate.backbone, pixels)
            features.append(normalize(encoded.tokens[0].float().cpu(), dim=-1))
            grids.append(encoded.grid)
        size = encoding_size(pixels.shape[1], pixels.shape[2], after.backbone.patch_size, patches=PATCHES)
        pictures.append(resize_image(pixels, size, "bicubic"))
        progress("neighbours before and after", done, len(indices))
    queries = spread(len(pictures), _QUERIES)
    figure, cells = panel_grid(
        [(1, 1)] * len(queries),
        ("patch", "", f"nearest, {before.name}", "", "", f"nearest, {after.name}", ""),
        title="Patches (framed) and their nearest neighbours in other images, before and after adaptation.\n"
        "Numbers: cosine similarity to the first patch of the row",
        text=0.25,
    )
    for row, query in zip(cells, queries, strict=True):
        place = _query_patch(found[1][1][query], query)
        _draw_patch(row[0], pictures[query], found[1][1][query], place)
        for side, (features, grids) in zip(row[1:].reshape(2, _NEIGHBOURS), found, strict=True):
            near = _nearest(features, grids, query, place)
            for axes, (image, patch, similarity) in zip(side, near, strict=False):
                _draw_patch(axes, pictures[image], grids[image], patch)
                axes.set_xlabel(f"{similarity:.2f}", fontsize=8)
    return figure


def _query_patch(grid: tuple[int, int], key: int) -> int:
    """Draw a random patch in the central half of the image, whose surroundings are inside the image."""
    row, column = (
        int(
            torch.randint(
                length // 4, max(length // 4 + 1, length * 3 // 4), (1,), generator=keyed_generator(key, axis)
            )
        )
        for axis, length in enumerate(grid)
    )
    return row * grid[1] + column


def _nearest(
    features: list[Float[Tensor, "n d"]], grids: list[tuple[int, int]], query: int, place: int
) -> list[tuple[int, int, float]]:
    """Return (image, patch, similarity) of the most similar patch of each of the nearest other images."""
    patch = features[query][place]
    best = [(patches @ patch).max(dim=0) for patches in features]
    similarity = torch.stack([each.values for each in best])
    similarity[query] = -2
    count = min(_NEIGHBOURS, len(features) - 1)
    return [
        (image, int(best[image].indices), float(similarity[image])) for image in similarity.topk(count).indices.tolist()
    ]


def _draw_patch(axes: Axes, picture: UInt8[Tensor, "c h w"], grid: tuple[int, int], patch: int) -> None:
    """Draw a framed patch with its surroundings inside the image."""
    height, width = picture.shape[1:]
    side = height // grid[0]
    length = min((2 * _REACH + 1) * side, height, width)
    row, column = divmod(patch, grid[1])
    top = min(max(0, (row - _REACH) * side), height - length)
    left = min(max(0, (column - _REACH) * side), width - length)
    axes.imshow(as_picture(picture[:, top : top + length, left : left + length].numpy()))
    corner = (column * side - left - 0.5, row * side - top - 0.5)
    for colour, width in (("black", 3.2), (rgb(MARK), 1.4)):
        axes.add_patch(Rectangle(corner, side, side, fill=False, edgecolor=colour, linewidth=width))
