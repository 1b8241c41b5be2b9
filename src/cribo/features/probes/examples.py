"""Encoding of labelled images as the examples that probes are fitted to."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from cribo.data.labelled.crops import resize_labels
from cribo.data.labelled.label_maps import IGNORE_INDEX
from cribo.data.randomness import keyed_generator
from cribo.features.config import FeaturePrecision
from cribo.features.patches import grid_counts, labels_in_memory
from cribo.features.probes.fitting import LabelledPatches

_DTYPES: Mapping[str, torch.dtype] = {"float32": torch.float32, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class EncodedExample:
    """The labelled patches of an image.

    Attributes:
        features: features of the N labelled patches in random order, for each of L blocks.
        pixels: rows of patch, class and number of pixels.
        halves: see `LabelledPatches`.
        labelled: share of the image's patches that have labels; 1 if unknown, in files of earlier versions.
    """

    features: Float[Tensor, "n l d"]
    pixels: Int[Tensor, "s 3"]
    halves: Int[Tensor, " n"]
    labelled: float = 1.0

    def patches(self, classes: int) -> LabelledPatches:
        """Return its patches with dense class shares."""
        shares = torch.zeros(len(self.features), classes)
        shares[self.pixels[:, 0].long(), self.pixels[:, 1].long()] = self.pixels[:, 2].float()
        return LabelledPatches(self.features, shares / shares.sum(dim=1, keepdim=True), self.halves)


def label_features(
    features: Float[Tensor, "rows columns l d"],
    labels: UInt8[Tensor, "h w"],
    patch_size: int,
    precision: FeaturePrecision,
) -> EncodedExample:
    """Combine the features of an image with the class of each pixel.

    Args:
        features: output of `encode_grids` for the image.
        labels: class of each pixel, 255 for none; at least one pixel must have a class.
        patch_size: patch size of the encoder in pixels.
        precision: data type of the stored features.
    """
    rows, columns = features.shape[:2]
    if rows > labels.shape[0] or columns > labels.shape[1]:  # a pixel covers several patches
        labels = resize_labels(labels, (rows * patch_size, columns * patch_size))
    classes = int(labels[labels != IGNORE_INDEX].max()) + 1
    # Count at the size of the labels: resizing them to the encoded size would lose thin strokes.
    counts = grid_counts(labels, (rows, columns), classes, IGNORE_INDEX)
    counts, kept = labels_in_memory(counts, "outvote")
    # In random order, so that the first patches are a random sample (see `thinned`).
    order = kept[torch.randperm(len(kept), generator=keyed_generator(len(kept)))]
    counts = counts[order]
    patches, label = counts.nonzero(as_tuple=True)
    return EncodedExample(
        features=features.flatten(0, 1)[order.to(features.device)].to("cpu", _DTYPES[precision]),
        pixels=torch.stack((patches, label, counts[patches, label]), dim=1).int(),
        halves=(order % columns >= columns / 2).int(),
        labelled=len(kept) / (rows * columns),
    )


def content_hash(values: UInt8[Tensor, "*shape"]) -> str:
    """Return a hash of the shape and the values of an image or label map."""
    return hashlib.sha256(f"{tuple(values.shape)}".encode() + values.contiguous().numpy().tobytes()).hexdigest()
