"""Rules of each variant of linear segmentation and Segmenter. This module does not import torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from cribo.models.config import NormalisedLayers

InferenceMode = Literal["whole", "slide"]
InitialWeights = Literal["segmenter", "mmsegmentation"]


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Implementation details in which variants differ.

    Attributes:
        schedule: settings of `--schedule paper` that differ from the paper's.
        optimiser: `adam`, or `sgd` with a momentum of 0.9.
        rate_decay: decay of the learning rates to a tenth: `polynomial` of power 0.9, or one `step` after four fifths
            of the iterations.
        weight_decay: L2 penalty that is added to the gradient (not AdamW's decoupled weight decay).
        labelled_mean: whether the loss is averaged over the labelled pixels of a batch instead of all pixels.
        mask_size: side of the label maps of square images (`SquarePreparation`), for training and scoring;
            None for images that are prepared as in MMSegmentation (`MMSegPreparation`).
        inference: `whole` images, or `slide` for windows of the crop size.
        drop_path: drop path rate of the last block in training, also in a frozen backbone; the rates rise linearly
            from 0.
        drop_path_branches: `all` branches of a block, or only the `feed-forward` branch.
        initial_weights: initialisation of Segmenter's decoder, that of the original code or of MMSegmentation.
        normalised_layers: layers to which the final norm is applied, if several are concatenated.
        mean_std: mean and standard deviation for normalising all channels (in 0-1); the backbone's if None.
        black_padding: data sets whose small crops are padded with black before normalisation. Crops of all others are
            padded after normalisation with 0, the mean colour.
        narrow_crops: data sets with crops of 480 pixels instead of 512, padded to 512.
        stretches_windows: whether the logits of windows that are padded to multiples of the patch size are stretched
            to the window, instead of cropped.
    """

    schedule: Mapping[str, Any] = field(default_factory=dict)
    optimiser: Literal["adam", "sgd"] = "adam"
    rate_decay: Literal["polynomial", "step"] = "polynomial"
    weight_decay: float = 0.0
    labelled_mean: bool = False
    mask_size: int | None = None
    inference: InferenceMode = "whole"
    drop_path: float = 0.0
    drop_path_branches: Literal["all", "feed-forward"] = "all"
    initial_weights: InitialWeights = "segmenter"
    normalised_layers: NormalisedLayers = "all"
    mean_std: tuple[float, float] | None = None
    black_padding: tuple[str, ...] = ()
    narrow_crops: tuple[str, ...] = ()
    stretches_windows: bool = False


PAPER = Rules()

# CrIBo's configurations and launcher for MMSegmentation 1.x, common to both protocols.
_RELEASED = Rules(
    inference="slide",
    weight_decay=0.01,
    drop_path=0.1,
    drop_path_branches="feed-forward",
    initial_weights="mmsegmentation",
    normalised_layers="last",
    mean_std=(0.5, 0.5),
    black_padding=("voc",),
    narrow_crops=("pascal-context", "pascal-context-60"),
    stretches_windows=True,
)

# Leopart's linear segmentation of VOC as implemented by NeCo: 25 epochs of 82 batches.
_NECO = Rules(
    schedule={"iterations": 2050, "batch_size": 128, "crop": 448, "learning_rates": (0.01,)},
    optimiser="sgd",
    rate_decay="step",
    weight_decay=0.0001,
    labelled_mean=True,
    mask_size=100,
)

LINEAR: Mapping[str, Rules] = MappingProxyType({"paper": PAPER, "released": _RELEASED, "neco-linear": _NECO})
"""Rules of each variant of linear segmentation."""

SEGMENTER: Mapping[str, Rules] = MappingProxyType(
    {"paper": Rules(inference="slide", drop_path=0.1), "released": _RELEASED}
)
"""Rules of each variant of Segmenter."""
