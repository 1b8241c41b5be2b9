"""The closed form of adaptation: which block to read, and a partial whitening behind it, chosen without labels."""

import copy
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from cribo.adaptation.encoding import encode, readable
from cribo.adaptation.signs import neighbour_agreement, view_points
from cribo.adaptation.whitening import Moments, partial_whitening
from cribo.console import Progress
from cribo.data import ImageSource
from cribo.evaluation.data import spread
from cribo.method import ViewRecipe
from cribo.models import Backbone
from cribo.models.building import first_blocks

POWERS = (0.3, 0.6, 0.8, 1.0)
"""Of the partial whitening, to choose from."""

_IMAGES = 300
_NEARLY_AS_GOOD = 0.95  # at equal agreement, later blocks know more of what things are


@dataclass(frozen=True)
class Choice:
    """What the closed form reads.

    Attributes:
        blocks: so many of a vision transformer's; None for another network.
        power: of the partial whitening.
        agreement: of neighbours across views that it gives.
        before: likewise, of the network as it was.
    """

    blocks: int | None
    power: float
    agreement: float
    before: float


def choose_closed_form(
    backbone: Backbone,
    images: ImageSource,
    recipe: ViewRecipe,
    *,
    blocks: int | None = None,
    power: float | None = None,
    dims: int | None = None,
    progress: Progress,
) -> tuple[Backbone, Choice]:
    """A copy of the backbone that ends where its features are best, with a partial whitening as its readout.

    Of a few powers the one whose neighbours agree most across views is taken (`neighbour_agreement`), and of the upper
    half of a vision transformer's blocks the last one that comes within 5 % of the best: in trials this predicted dense
    retrieval (docs/adapting.md).

    Args:
        backbone: on the device where it shall run.
        images: unlabelled; up to 300 of them are read, evenly spread.
        recipe: how views are drawn.
        blocks: read after this one; None to choose.
        power: of the whitening; None to choose.
        dims: directions to keep.
        progress: is told what is being done, and how much of it is.

    Raises:
        ValueError: `dims` is more than there are, or too few images.
        DataError: no image can be read.
    """
    candidates = [blocks] if blocks is not None else list(range((backbone.depth + 1) // 2, backbone.depth + 1))
    layers = backbone.depth - candidates[0] + 1
    moments = gather_moments(backbone, images, layers, lambda *so_far: progress("statistics of patches", *so_far))
    points = view_points(
        backbone, images, recipe, layers=layers, progress=lambda *so_far: progress("pairs of views", *so_far)
    ).chunk(layers, dim=-1)
    best: list[tuple[float, int, float]] = []
    for block, own_moments, own_points in zip(candidates, moments, points, strict=False):
        tried = []
        for exponent in POWERS if power is None else (power,):
            weight, bias = partial_whitening(own_moments, power=exponent, dims=dims)
            tried.append((neighbour_agreement(own_points @ weight.T + bias), block, exponent))
        best.append(max(tried))
    enough = _NEARLY_AS_GOOD * max(best)[0]
    agreement, block, exponent = next(each for each in reversed(best) if each[0] >= enough)
    start = first_blocks(backbone, block) if backbone.depth > 1 else copy.deepcopy(backbone)
    start.set_readout(*partial_whitening(moments[block - candidates[0]], power=exponent, dims=dims))
    before = neighbour_agreement(points[-1])
    return start, Choice(block if backbone.depth > 1 else None, exponent, agreement, before)


def refit_whitening(
    backbone: Backbone,
    images: ImageSource,
    *,
    power: float,
    dims: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Fit a partial whitening to unlabelled images, in place of the backbone's present readout.

    Args:
        backbone: on the device where it shall run.
        images: up to 300 of them are read, evenly spread.
        power: see `partial_whitening`.
        dims: directions to keep.
        progress: is told how many images of how many are done.

    Raises:
        ValueError: see `partial_whitening`.
        DataError: no image can be read.
    """
    backbone.remove_readout()
    (moments,) = gather_moments(backbone, images, 1, progress)
    backbone.set_readout(*partial_whitening(moments, power=power, dims=dims))


def gather_moments(
    backbone: Backbone, images: ImageSource, layers: int, progress: Callable[[int, int], None]
) -> list[Moments]:
    """Mean and covariance of the patches of images after each of the last blocks."""
    moments = [Moments(backbone.embed_dim) for _ in range(layers)]
    indices = spread(len(images), _IMAGES)
    for done, (_, pixels) in enumerate(readable(images, indices), start=1):
        tokens: Tensor = encode(backbone, pixels, layers=layers).tokens[0].cpu()
        for own, part in zip(moments, tokens.chunk(layers, dim=-1), strict=True):
            own.update(part)
        progress(done, len(indices))
    return moments
