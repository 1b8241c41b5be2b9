"""Anomalies: distances of patches to those of normal images, as in AnomalyDINO (Damm et al. 2025, WACV).

The distance of a patch is 1 - cosine to its nearest patch in the normal images (section 3.2); the score of an image is
the mean of its largest distances. Nothing is trained.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor

from cribo.base.errors import InputError
from cribo.data.config import spread
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
    """Return the mean of the largest 1 % of the distances of an image's patches, at least one.

    Example:
        >>> image_score(torch.cat([torch.zeros(198), torch.tensor([0.2, 0.6])]))
        0.4000000059604645
    """
    return float(distances.flatten().topk(max(1, int(LARGEST_SHARE * distances.numel()))).values.mean())


def pixel_distances(distances: Float[Tensor, "rows columns"], size: tuple[int, int]) -> Float[Tensor, "h w"]:
    """Upsample the distances of patches bilinearly to the (height, width) of an image."""
    return F.interpolate(distances[None, None], size, mode="bilinear", align_corners=False)[0, 0]


class NormalPatches:
    """The patch features of normal images.

    Args:
        grids: features of unit length of each image, at least one; float32 or float16.
        device: device of the search.

    Raises:
        InputError: there are no images.

    Example:
        >>> normal = NormalPatches([torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])])
        >>> normal.distances(torch.tensor([[[0.0, 1.0], [-1.0, 0.0]]])).tolist()
        [[0.0, 1.0]]
    """

    def __init__(self, grids: Sequence[Float[Tensor, "_ _ d"]], device: torch.device | str = "cpu") -> None:
        if not grids:
            raise InputError("normal images must contain at least one image, got 0")
        self._sizes = [grid.shape[:2] for grid in grids]
        self._rows = torch.cat([grid.flatten(0, 1) for grid in grids])
        self._device = device

    def __len__(self) -> int:
        return len(self._sizes)

    def distances(self, grid: Float[Tensor, "rows columns d"]) -> Float[Tensor, "rows columns"]:
        """Return the distance of each patch to the nearest normal one: 1 - cosine, 0 to 2, float32 on the CPU.

        Args:
            grid: features of unit length.
        """
        return self._distances(grid, [self._rows])

    def left_out(self, index: int) -> Float[Tensor, "rows columns"]:
        """Return the distances of the patches of a normal image to those of the other normal images.

        A single normal image is compared with itself.
        """
        end = sum(map(math.prod, self._sizes[: index + 1]))
        start = end - math.prod(self._sizes[index])
        others = [self._rows[:start], self._rows[end:]] if len(self) > 1 else [self._rows]
        return self._distances(self._rows[start:end].unflatten(0, self._sizes[index]), others)

    def left_out_scores(self) -> dict[int, float]:
        """Return the scores of normal images compared with the others, by index; none if there is only one image.

        Of more than `MOST_LEFT_OUT` images, as many are left out, evenly spaced.
        """
        if len(self) == 1:
            return {}
        return {index: image_score(self.left_out(index)) for index in spread(len(self), MOST_LEFT_OUT)}

    def _distances(
        self, grid: Float[Tensor, "rows columns d"], parts: Sequence[Float[Tensor, "_ d"]]
    ) -> Float[Tensor, "rows columns"]:
        """Return the distances to the nearest rows in any of the parts."""
        queries, devices = grid.flatten(0, 1).cpu(), [self._device]
        found = [nearest(queries, TensorKeys(rows), 1, devices=devices) for rows in parts if len(rows)]
        cosine = torch.stack([each.similarity[:, 0] for each in found]).amax(dim=0)
        return (1 - cosine).clamp(0, 2).view(grid.shape[:2])


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

    def __call__(self, images: Sequence[UInt8[Tensor, "c _ _"]]) -> list[Float[Tensor, "_ _ d"]]:
        """Return the features of images of any sizes, as float16 on the CPU."""
        grids = encode_grids(self.encoder, images, self._settings, batch_size=self._batch_size, blocks=self.blocks)
        return [(grid.flatten(2) / len(self.blocks) ** 0.5).half().cpu() for grid in grids]
