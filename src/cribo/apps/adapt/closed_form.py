"""Closed form of adaptation: the block to use and a partial whitening of its features, chosen without labels."""

import copy
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import linear

from cribo.apps.adapt.encoding import encode
from cribo.base.console import Progress
from cribo.data import ImageSource
from cribo.data.config import spread
from cribo.features.whitening import Moments, partial_whitening
from cribo.method import ViewRecipe
from cribo.models import Backbone
from cribo.models.building import first_blocks
from cribo.pretraining.agreement import neighbour_agreement, readable, view_points

POWERS = (None, 0.3, 0.6, 0.8, 1.0)
"""Candidate powers of the partial whitening; None disables it, which is best for some networks."""

STATISTICS_IMAGES = 300
_NEARLY_AS_GOOD = 0.95  # at similar agreement, later blocks are more semantic


@dataclass(frozen=True)
class Choice:
    """A closed form and its neighbour agreement.

    Attributes:
        blocks: number of blocks of a vision transformer that are kept; None for other networks.
        power: power of the partial whitening; None for no whitening.
        agreement: neighbour agreement across views, from 0 to 1.
        before: neighbour agreement of the original backbone.
    """

    blocks: int | None
    power: float | None
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
    """Copy the backbone up to its best block, and add a partial whitening as readout if it helps.

    The power with the highest neighbour agreement across views (`neighbour_agreement`) is chosen and, in the upper half
    of a vision transformer, the last block whose agreement is within 5 % of the best. In experiments, this predicted
    dense retrieval (docs/adapting.md).

    Args:
        backbone: the backbone, on its device; an existing readout is replaced.
        images: unlabelled images; up to 300 of them are read, evenly spaced.
        recipe: recipe of the views.
        blocks: number of blocks to keep; None to choose.
        power: power of the whitening; None to choose, which includes no whitening unless `dims` is set.
        dims: number of directions to keep; None for all.
        progress: called with the phase, the number of processed images and their total.

    Raises:
        ValueError: `dims` exceeds the number of directions, or there are too few images.
        DataError: no image can be read.
    """
    candidates = [blocks] if blocks is not None else list(range((backbone.depth + 1) // 2, backbone.depth + 1))
    layers = backbone.depth - candidates[0] + 1
    plain = copy.deepcopy(backbone)
    plain.remove_readout()
    moments = gather_moments(plain, images, layers, lambda *so_far: progress("statistics of patches", *so_far))
    points = view_points(
        plain, images, recipe, layers=layers, progress=lambda *so_far: progress("pairs of views", *so_far)
    ).chunk(layers, dim=-1)
    read = points[-1]
    if backbone.readout is not None:
        read = linear(read, backbone.readout.weight.cpu(), backbone.readout.bias.cpu())
    before = neighbour_agreement(read)
    powers = (power,) if power is not None else POWERS if dims is None else POWERS[1:]
    best: list[Choice] = []
    for block, own_moments, own_points in zip(candidates, moments, points, strict=False):
        tried = []
        for exponent in powers:
            seen = own_points
            if exponent is not None:
                weight, bias = partial_whitening(own_moments, power=exponent, dims=dims)
                seen = own_points @ weight.T + bias
            kept = block if backbone.depth > 1 else None
            tried.append(Choice(kept, exponent, neighbour_agreement(seen), before))
        best.append(max(tried, key=lambda choice: choice.agreement))
    enough = _NEARLY_AS_GOOD * max(choice.agreement for choice in best)
    last = max(index for index, choice in enumerate(best) if choice.agreement >= enough)
    choice = best[last]
    start = plain if choice.blocks is None else first_blocks(plain, choice.blocks)
    if choice.power is not None:
        start.set_readout(*partial_whitening(moments[last], power=choice.power, dims=dims))
    return start, choice


def refit_whitening(
    backbone: Backbone,
    images: ImageSource,
    *,
    power: float,
    dims: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Fit a partial whitening to unlabelled images, replacing the backbone's readout in place.

    Args:
        backbone: the backbone, on its device.
        images: unlabelled images; up to 300 of them are read, evenly spaced.
        power: see `partial_whitening`.
        dims: number of directions to keep; None for all.
        progress: called with the number of processed images and their total.

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
    """Compute mean and covariance of the patch features after each of the last blocks."""
    moments = [Moments(backbone.embed_dim) for _ in range(layers)]
    indices = spread(len(images), STATISTICS_IMAGES)
    for done, (_, pixels) in enumerate(readable(images, indices), start=1):
        tokens: Tensor = encode(backbone, pixels, layers=layers).tokens[0].cpu()
        for own, part in zip(moments, tokens.chunk(layers, dim=-1), strict=True):
            own.update(part)
        progress(done, len(indices))
    return moments
