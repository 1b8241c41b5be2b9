"""Dense features as colours: their first three principal components, read as red, green and blue."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from cribo.errors import InputError

_CHANNELS = 3
_TAIL = 0.01  # share of the patches at each end of a component that may be cut off, so that no odd patch sets the scale


class PCAColours:
    """The colours of features: what three principal components of some images' patches say of any patch.

    Features are compared by their direction, as in retrieval: each is scaled to unit length first. The components are
    those of all patches of all images together, so that equal colours mean equal features across these images and
    those that come later. Each is scaled by its 1 % and 99 % quantiles. Of the two signs of a component, the one
    that makes its greatest weight positive is taken: the same features get the same colours, always.

    Args:
        grids: (h, w, D) features of each image's patches; sizes may differ, D may not.

    Raises:
        ValueError: no image, another shape, different D, or features that are not finite.

    Example:
        >>> grids = [torch.randn(4, 6, 16), torch.randn(3, 3, 16)]
        >>> colours = PCAColours(grids)
        >>> colours(grids[0]).shape, colours(torch.randn(2, 2, 16), size=(32, 48)).shape
        (torch.Size([4, 6, 3]), torch.Size([32, 48, 3]))
    """

    def __init__(self, grids: Sequence[Float[Tensor, "h w d"]]) -> None:
        if not grids:
            raise InputError("colours need the features of one image at least, got none")
        self.dim = grids[0].shape[-1]
        directions = torch.cat([self._directions(grid).flatten(0, 1) for grid in grids])
        self._mean = directions.mean(dim=0)
        centred = directions - self._mean
        _, vectors = torch.linalg.eigh(centred.mT @ centred)
        components = vectors[:, -_CHANNELS:].flip(1)  # eigh gives the greatest last
        greatest = components.abs().argmax(dim=0, keepdim=True)
        self._components = components * components.gather(0, greatest).sign()
        projected = (centred @ self._components).sort(dim=0).values
        cut = int(_TAIL * (len(projected) - 1))
        self._low, self._high = projected[cut], projected[len(projected) - 1 - cut]

    def __call__(
        self, grid: Float[Tensor, "h w d"], size: tuple[int, int] | None = None
    ) -> Float[Tensor, "new_h new_w 3"]:
        """The colours of one image's patches.

        Args:
            grid: (h, w, D) features.
            size: (height, width) in pixels to which the components are enlarged, bilinearly; None: one colour per
                patch.

        Returns:
            RGB in 0-1, on the host. A component that is the same everywhere, or missing because D < 3, is 0.5.

        Raises:
            ValueError: another shape, or another D than the colours were made for.
        """
        projected = (self._directions(grid) - self._mean) @ self._components
        if size is not None:
            maps = projected.permute(2, 0, 1)[None]
            projected = F.interpolate(maps, size=size, mode="bilinear", align_corners=False)[0].permute(1, 2, 0)
        spread = self._high - self._low
        is_flat = spread <= 1e-9  # directions have length 1: less is rounding
        scaled = (projected - self._low) / spread.masked_fill(is_flat, 1)
        colours = scaled.masked_fill(is_flat, 0.5).clamp(0, 1).float()
        return F.pad(colours, (0, _CHANNELS - colours.shape[-1]), value=0.5)

    def _directions(self, grid: Float[Tensor, "h w d"]) -> Float[Tensor, "h w d"]:
        if grid.ndim != 3 or grid.shape[-1] != self.dim or not grid.numel():
            raise InputError(
                f"features must be (h, w, {self.dim}), the patches of one image row by row, got {tuple(grid.shape)}"
            )
        grid = grid.detach().cpu().double()  # products of a host in double precision are the same on every machine
        if not grid.isfinite().all():
            raise InputError("features must be finite, got NaN or infinity: the network's weights are damaged")
        return F.normalize(grid, dim=-1)


def pca_colours(grids: Sequence[Float[Tensor, "h w d"]]) -> list[Float[Tensor, "h w 3"]]:
    """The patches of some images in the colours of their common principal components, one colour per patch.

    The standard picture of dense features. To enlarge it, or to paint further images in the same colours, keep
    the `PCAColours`.

    Args:
        grids: (h, w, D) features of each image's patches; sizes may differ, D may not.

    Returns:
        RGB in 0-1 of each image.

    Raises:
        ValueError: as `PCAColours` does.

    Example:
        >>> [colours.shape for colours in pca_colours([torch.randn(4, 6, 16), torch.randn(3, 3, 16)])]
        [torch.Size([4, 6, 3]), torch.Size([3, 3, 3])]
    """
    colours = PCAColours(grids)
    return [colours(grid) for grid in grids]
