"""Masks of objects from boxes and points, by the features inside against those around, in closed form."""

from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, UInt8
from torch import Tensor

from cribo.data.labelled.label_maps import IGNORE_INDEX, LabelledBox, LabelMap
from cribo.features.grid import patch_of_pixel
from cribo.features.memory.pixels import label_pixels
from cribo.features.memory.settings import Refine
from cribo.features.patches import grid_counts

_NEIGHBOURS = 30  # patches that a patch is compared with on each side
_LEAST = 4  # patches in a box; the object of a smaller one is the whole box
_WHOLE = 0.5  # share of a patch in the box from which it takes part in the split
_SLOPE = 4.0  # of the probability over the standard deviation of the scores


class PromptImage(NamedTuple):
    """An image and its features, for prompts by boxes and points.

    Attributes:
        image: the image.
        features: concatenated features of its patches, of unit length.
        patch_size: patch size of the encoder, in pixels of the encoded image.
        refine: filter of the borders (see `label_pixels`).
    """

    image: UInt8[Tensor, "c h w"]
    features: Float[Tensor, "rows columns e"]
    patch_size: int
    refine: Refine = "bilateral"

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return self.image.shape[1], self.image.shape[2]

    def mask_of_box(self, box: LabelledBox, alike: Bool[Tensor, "rows columns"] | None = None) -> Bool[Tensor, "h w"]:
        """Return the pixels of the object in a box.

        The score of a patch is its mean cosine similarity to the 30 nearest patches in the box, minus that to the 30
        nearest outside. The object is the upper one of the two groups into which the scores in the box are best split
        (Otsu 1979). In boxes of fewer than four patches, or without anything around, it is the whole box.

        Args:
            box: the box; it must meet the image.
            alike: patches outside that may belong to an object of the same class, and are not compared with.
        """
        place = box.clipped(*self.size)
        assert place is not None
        within = torch.zeros(self.size, dtype=torch.bool)
        within[place[1] : place[3], place[0] : place[2]] = True
        share = self._share_in(within)
        own, around = share > _WHOLE, share == 0
        if alike is not None:
            around &= ~alike
        if own.sum() < _LEAST or not around.any():
            return within
        scores = _contrast(self.features.flatten(0, 1), own.flatten(), around.flatten()).view(own.shape)
        mask = self._upsampled(scores, _split(scores[own]), scores[own].std(), share.to(scores) > 0) & within
        return mask if mask.any() else within

    def mask_at_point(self, x: float, y: float) -> Bool[Tensor, "h w"]:
        """Return the connected region around a point, (x, y) in pixels, that resembles the patch at the point.

        Patches are compared by cosine similarity, which is split in two over the image (Otsu 1979).
        """
        from scipy import ndimage

        column, row = min(max(int(x), 0), self.size[1] - 1), min(max(int(y), 0), self.size[0] - 1)
        rows, columns = (
            patch_of_pixel(side, patches) for side, patches in zip(self.size, self.features.shape[:2], strict=True)
        )
        scores = self.features @ self.features[rows[row], columns[column]]
        everywhere = torch.ones_like(scores, dtype=torch.bool)
        mask = self._upsampled(scores, _split(scores.flatten()), scores.std(), everywhere)
        mask[row, column] = True
        numbers: Any = np.zeros(self.size, dtype=np.int32)
        ndimage.label(mask.numpy(), output=numbers)
        return torch.from_numpy(numbers == numbers[row, column])

    def _share_in(self, within: Bool[Tensor, "h w"]) -> Float[Tensor, "rows columns"]:
        """Return the share of each patch in a region."""
        rows, columns = self.features.shape[:2]
        if rows > within.shape[0] or columns > within.shape[1]:  # more patches than pixels
            return torch.nn.functional.interpolate(within[None, None].float(), size=(rows, columns))[0, 0]
        counts = grid_counts(within.byte(), (rows, columns), 2, IGNORE_INDEX)[:, :2].float()
        return (counts[:, 1] / counts.sum(dim=1)).view(rows, columns)

    def _upsampled(
        self,
        scores: Float[Tensor, "rows columns"],
        threshold: float,
        deviation: Float[Tensor, ""],
        possible: Bool[Tensor, "rows columns"],
    ) -> Bool[Tensor, "h w"]:
        """Return the pixels whose upsampled and refined scores are above a threshold."""
        likely = torch.sigmoid(_SLOPE * (scores - threshold) / deviation.clamp(min=1e-6)) * possible
        votes = torch.stack((1 - likely, likely), dim=-1)
        found = label_pixels(votes, self.image, patch_size=self.patch_size, refine=self.refine)
        return found.labels == 1

    def fill(self, labels: LabelMap) -> UInt8[Tensor, "h w"]:
        """Label the unlabelled pixels of the objects in the boxes of a label map, smaller objects on top."""
        filled, unknown = labels.labels.clone(), labels.labels == IGNORE_INDEX
        shares = {}
        for label in {box.label for box in labels.boxes}:
            of_class = labels.labels == label
            for box in labels.boxes:
                left, top, right, bottom = box.clipped(*self.size) or (0, 0, 0, 0)
                if box.label == label:
                    of_class[top:bottom, left:right] = True
                filled[top:bottom, left:right][unknown[top:bottom, left:right]] = box.rest
            shares[label] = self._share_in(of_class) > 0
        drawn = [(self.mask_of_box(box, shares[box.label]), box) for box in labels.boxes if box.clipped(*self.size)]
        for mask, box in sorted(drawn, key=lambda each: -int(each[0].sum())):
            filled[mask & unknown] = box.label
        return filled


def _contrast(rows: Float[Tensor, "n e"], own: Bool[Tensor, " n"], around: Bool[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Return the similarity of patches to the nearest ones in a box, minus that to the nearest ones around it."""
    inside = rows @ rows[own].T
    inside[own.nonzero()[:, 0], torch.arange(inside.shape[1], device=rows.device)] = -1.0  # not with itself
    outside = rows @ rows[around].T
    near = inside.topk(min(_NEIGHBOURS, inside.shape[1] - 1), dim=1).values.mean(dim=1)
    return near - outside.topk(min(_NEIGHBOURS, outside.shape[1]), dim=1).values.mean(dim=1)


def _split(scores: Float[Tensor, " n"]) -> float:
    """Return the threshold with the largest variance between the two groups of scores that it splits (Otsu 1979).

    Example:
        >>> round(_split(torch.tensor([0.0, 0.1, 0.9, 1.0])), 3)
        0.5
    """
    ordered = scores.double().sort().values
    lower = torch.arange(1, len(ordered), device=scores.device)
    upper, sums = len(ordered) - lower, ordered.cumsum(0)
    means = sums[:-1] / lower, (sums[-1] - sums[:-1]) / upper
    best = int((lower * upper * (means[1] - means[0]) ** 2).argmax())
    return float((ordered[best] + ordered[best + 1]) / 2)
