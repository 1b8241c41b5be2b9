"""Anomalies: distances of patches to those of normal images, as in AnomalyDINO (Damm et al. 2025, WACV).

The distance of a patch is 1 - cosine to its nearest patch in the normal images (section 3.2); the score of an image is
the mean of its largest distances. Nothing is trained. Patches with a pixel without data have no distance: NaN.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from cribo.base.errors import InputError
from cribo.data.config import spread
from cribo.data.labelled.inputs import DecodedImage
from cribo.features.config import AnomalySettings, ProbeSettings
from cribo.features.encoder import Encoder
from cribo.features.probes.encoding import encode_grids, probe_encoder
from cribo.features.probes.fitting import default_blocks
from cribo.features.search import TensorKeys, nearest
from cribo.models import Backbone

LARGEST_SHARE = 0.01
"""Share of the patches of an image whose distances are averaged (section 3.2 of the paper)."""

MOST_LEFT_OUT = 32
"""Limit on the normal images that are left out for the threshold."""


def image_score(distances: Float[Tensor, "*grid"]) -> float:
    """Return the mean of the largest 1 % of the distances of an image's patches, at least one; NaN are left out.

    Example:
        >>> image_score(torch.cat([torch.zeros(198), torch.tensor([0.2, 0.6, torch.nan])]))
        0.4000000059604645
    """
    values = distances[~distances.isnan()]
    return float(values.topk(max(1, int(LARGEST_SHARE * len(values)))).values.mean())


def pixel_distances(distances: Float[Tensor, "rows columns"], size: tuple[int, int]) -> Float[Tensor, "h w"]:
    """Upsample the distances of patches bilinearly to the (height, width) of an image.

    Patches of NaN have no weight; the distance is 0 where no other patch has one.
    """
    stacked = torch.stack([distances.nan_to_num(0), (~distances.isnan()).to(distances)])
    sums, weights = F.interpolate(stacked[None], size, mode="bilinear", align_corners=False)[0]
    return sums / weights.where(weights > 0, 1)


def has_data(grid: Float[Tensor, "rows columns d"]) -> Bool[Tensor, "rows columns"]:
    """Return which patches have features that are not NaN (see `PatchEncoder`)."""
    return ~grid.isnan().any(dim=-1)


class NormalPatches:
    """The patch features of normal images.

    Args:
        grids: features of unit length of each image, at least one; float32 or float16. NaN for patches without data.
        device: device of the search.

    Raises:
        InputError: there are no images, or an image has no patch with data.

    Example:
        >>> normal = NormalPatches([torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])])
        >>> normal.distances(torch.tensor([[[0.0, 1.0], [-1.0, 0.0]]])).tolist()
        [[0.0, 1.0]]
    """

    def __init__(self, grids: Sequence[Float[Tensor, "_ _ d"]], device: torch.device | str = "cpu") -> None:
        if not grids:
            raise InputError("normal images must contain at least one image, got 0")
        self._known = [has_data(grid) for grid in grids]
        if empty := [number for number, known in enumerate(self._known) if not known.any()]:
            raise InputError(f"normal images must have patches with data, got none in that of index {empty[0]}")
        self._rows = torch.cat([grid[known] for grid, known in zip(grids, self._known, strict=True)])
        self._device = device

    def __len__(self) -> int:
        return len(self._known)

    def distances(self, grid: Float[Tensor, "rows columns d"]) -> Float[Tensor, "rows columns"]:
        """Return the distance of each patch to the nearest normal one: 1 - cosine, 0 to 2, float32 on the CPU.

        Args:
            grid: features of unit length; NaN for patches without data, whose distance is NaN.
        """
        known = has_data(grid)
        return _placed(self._distances(grid[known], [self._rows]), known)

    def left_out(self, index: int) -> Float[Tensor, "rows columns"]:
        """Return the distances of the patches of a normal image to those of the other normal images.

        A single normal image is compared with itself.
        """
        known = self._known[index]
        end = sum(int(each.sum()) for each in self._known[: index + 1])
        start = end - int(known.sum())
        others = [self._rows[:start], self._rows[end:]] if len(self) > 1 else [self._rows]
        return _placed(self._distances(self._rows[start:end], others), known)

    def left_out_scores(self) -> dict[int, float]:
        """Return the scores of normal images compared with the others, by index; none if there is only one image.

        Of more than `MOST_LEFT_OUT` images, as many are left out, evenly spaced.
        """
        if len(self) == 1:
            return {}
        return {index: image_score(self.left_out(index)) for index in spread(len(self), MOST_LEFT_OUT)}

    def _distances(self, queries: Float[Tensor, "n d"], parts: Sequence[Float[Tensor, "_ d"]]) -> Float[Tensor, " n"]:
        """Return the distances to the nearest rows in any of the parts."""
        if not len(queries):
            return torch.zeros(0)
        devices = [self._device]
        found = [nearest(queries.cpu(), TensorKeys(rows), 1, devices=devices) for rows in parts if len(rows)]
        cosine = torch.stack([each.similarity[:, 0] for each in found]).amax(dim=0)
        return (1 - cosine).clamp(0, 2)


def _placed(distances: Float[Tensor, " n"], known: Bool[Tensor, "rows columns"]) -> Float[Tensor, "rows columns"]:
    """Place the distances of the patches with data in the grid; NaN elsewhere."""
    return torch.full(known.shape, torch.nan).masked_scatter(known.cpu(), distances)


class PatchEncoder:
    """Encodes images as grids of patch features of unit length.

    The features of the chosen blocks, each of unit length, are concatenated.

    Args:
        backbone: the backbone, on the device where it runs.
        settings: size and blocks.
        batch_size: number of images to encode at once.

    Raises:
        MissingBlocks: the backbone does not have these blocks.

    Attributes:
        encoder: the encoder of the backbone.
        blocks: numbers of the blocks, from 1.
    """

    def __init__(self, backbone: Backbone, settings: AnomalySettings, *, batch_size: int) -> None:
        self.encoder: Encoder = probe_encoder(backbone, settings.blocks)
        self.blocks = settings.blocks or default_blocks(self.encoder.blocks)
        self._settings = ProbeSettings(size=settings.size, scale=settings.scale)
        self._batch_size = batch_size

    def __call__(self, images: Sequence[DecodedImage]) -> list[Float[Tensor, "_ _ d"]]:
        """Return the features of images of any sizes, as float16 on the CPU; NaN for patches without data."""
        pixels = [image.pixels for image in images]
        grids = encode_grids(self.encoder, pixels, self._settings, batch_size=self._batch_size, blocks=self.blocks)
        features = [(grid.flatten(2) / len(self.blocks) ** 0.5).half().cpu() for grid in grids]
        return [_marked(grid, image.valid) for grid, image in zip(features, images, strict=True)]


def _marked(
    grid: Float[Tensor, "rows columns d"], valid: Bool[Tensor, "h w"] | None
) -> Float[Tensor, "rows columns d"]:
    """Set the features of patches with a pixel without data to NaN."""
    if valid is None:
        return grid
    # Patches at the edge of an area without data would be anomalies by the colour of the area.
    lost = F.adaptive_max_pool2d((~valid)[None].float(), grid.shape[:2])[0] > 0
    return grid.masked_fill(lost[..., None], torch.nan)
