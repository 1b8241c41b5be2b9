"""Principal components of features, and dense features in colour: three components as red, green and blue."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from cribo.base.errors import InputError

_CHANNELS = 3
_TAIL = 0.01  # fraction of the patches clipped at each end of a component, so that outliers do not set the scale


class PrincipalComponents(NamedTuple):
    """The directions in which features differ most.

    The sign of each component is chosen so that its largest weight is positive, which makes them deterministic.

    Attributes:
        mean: of the features.
        axes: the components, of unit length, in descending order of their variance; all D if there are fewer than
            requested.
    """

    mean: Float[Tensor, " d"]
    axes: Float[Tensor, "d k"]

    @classmethod
    def fit(cls, blocks: Iterable[Float[Tensor, "n d"]], count: int) -> "PrincipalComponents":
        """Fit components to blocks of rows in double precision, of which one is in memory at a time.

        Args:
            blocks: the features, at least one row in all; D must not differ.
            count: number of components.
        """
        rows, total, products = 0, torch.zeros(()), torch.zeros(())
        for block in blocks:
            rows, total, products = rows + len(block), total + block.sum(dim=0), products + block.mT @ block
        mean = total / rows
        _, vectors = torch.linalg.eigh(products - rows * torch.outer(mean, mean))
        axes = vectors[:, -count:].flip(1)  # eigh sorts in ascending order
        greatest = axes.abs().argmax(dim=0, keepdim=True)
        return cls(mean, axes * axes.gather(0, greatest).sign())

    def project(self, rows: Float[Tensor, "*n d"]) -> Float[Tensor, "*n k"]:
        """Return the coordinates of rows along the components."""
        return (rows - self.mean) @ self.axes


class PCAColours:
    """Colours of patch features by their first three principal components, fitted to some images.

    Features are scaled to unit length first, as in retrieval. The components are fitted to all patches of all images,
    so that equal colours mean equal features across these and further images. Each component is scaled by its 1 % and
    99 % quantiles.

    Args:
        grids: (h, w, D) patch features of each image; h and w may differ, D must not.

    Raises:
        ValueError: `grids` is empty, a shape is invalid, D differs, or features are not finite.

    Example:
        >>> grids = [torch.randn(4, 6, 16), torch.randn(3, 3, 16)]
        >>> colours = PCAColours(grids)
        >>> colours(grids[0]).shape, colours(torch.randn(2, 2, 16), size=(32, 48)).shape
        (torch.Size([4, 6, 3]), torch.Size([32, 48, 3]))
    """

    def __init__(self, grids: Sequence[Float[Tensor, "h w d"]]) -> None:
        if not grids:
            raise InputError("colours need the features of at least one image, got none")
        self.dim = grids[0].shape[-1]
        directions = torch.cat([self._directions(grid).flatten(0, 1) for grid in grids])
        self._components = PrincipalComponents.fit([directions], _CHANNELS)
        projected = self._components.project(directions).sort(dim=0).values
        cut = int(_TAIL * (len(projected) - 1))
        self._low, self._high = projected[cut], projected[len(projected) - 1 - cut]

    def __call__(
        self, grid: Float[Tensor, "h w d"], size: tuple[int, int] | None = None
    ) -> Float[Tensor, "new_h new_w 3"]:
        """Compute the colours of an image's patches.

        Args:
            grid: (h, w, D) features.
            size: (height, width) in pixels to which the components are resized bilinearly; None returns one colour per
                patch.

        Returns:
            RGB in 0-1, on the host. A component that is constant, or missing because D < 3, is 0.5.

        Raises:
            ValueError: the shape is invalid, D differs from that of the fitted features, or features are not finite.
        """
        projected = self._components.project(self._directions(grid))
        if size is not None:
            maps = projected.permute(2, 0, 1)[None]
            projected = F.interpolate(maps, size=size, mode="bilinear", align_corners=False)[0].permute(1, 2, 0)
        spread = self._high - self._low
        is_flat = spread <= 1e-9  # rounding error, since directions have length 1
        scaled = (projected - self._low) / spread.masked_fill(is_flat, 1)
        colours = scaled.masked_fill(is_flat, 0.5).clamp(0, 1).float()
        return F.pad(colours, (0, _CHANNELS - colours.shape[-1]), value=0.5)

    def _directions(self, grid: Float[Tensor, "h w d"]) -> Float[Tensor, "h w d"]:
        if grid.ndim != 3 or grid.shape[-1] != self.dim or not grid.numel():
            raise InputError(
                f"features must have shape (h, w, {self.dim}), one row per patch row, got {tuple(grid.shape)}"
            )
        grid = grid.detach().cpu().double()  # double precision on the host gives the same colours on every machine
        if not grid.isfinite().all():
            raise InputError("features must be finite, got NaN or infinity: check the network's weights")
        return F.normalize(grid, dim=-1)


def pca_colours(grids: Sequence[Float[Tensor, "h w d"]]) -> list[Float[Tensor, "h w 3"]]:
    """Colour the patches of some images by their common principal components, one colour per patch.

    To resize the result, or to colour further images with the same components, use `PCAColours`.

    Args:
        grids: (h, w, D) patch features of each image; h and w may differ, D must not.

    Returns:
        RGB in 0-1 of each image.

    Raises:
        ValueError: see `PCAColours`.

    Example:
        >>> [colours.shape for colours in pca_colours([torch.randn(4, 6, 16), torch.randn(3, 3, 16)])]
        [torch.Size([4, 6, 3]), torch.Size([3, 3, 3])]
    """
    colours = PCAColours(grids)
    return [colours(grid) for grid in grids]
