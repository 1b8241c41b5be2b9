"""The field's evaluation protocols, one file each."""

from cribo.evaluation.dense_nn import (
    DenseRetrieval,
    Encoder,
    backbone_encoder,
    dense_nn,
    mean_colour_encoder,
    patch_labels,
)

__all__ = [
    "DenseRetrieval",
    "Encoder",
    "backbone_encoder",
    "dense_nn",
    "mean_colour_encoder",
    "patch_labels",
]
