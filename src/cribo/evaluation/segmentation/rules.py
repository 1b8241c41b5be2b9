"""The rules of each variant of linear segmentation and Segmenter. This module does not import torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from cribo.models.modes import NormalisedLayers

InferenceMode = Literal["whole", "slide"]
InitialWeights = Literal["segmenter", "mmsegmentation"]


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The rules in which variants differ.

    Attributes:
        schedule: settings of `--schedule paper` that are not the paper's.
        optimiser: `adam`, or `sgd` with a momentum of 0.9.
        rate_decay: the learning rates fall to a tenth: as a `polynomial` of power 0.9, or in one `step` after four
            fifths of the iterations.
        weight_decay: factor of the weights that is added to their gradient (L2 regularisation, not AdamW's decay).
        labelled_mean: whether the loss is the mean over the labelled pixels of a batch, or over all.
        mask_size: side of the label maps to which squares are trained and scored (`SquareCrops`, `SquareImages`); None
            for images that are prepared as in MMSegmentation (`LabelledCrops`, `WholeImages`).
        inference: `whole`, or `slide` in windows of the crop's size.
        drop_path: rate of the last block while training, of a frozen backbone too; the rates rise linearly from 0.
        drop_path_branches: `all` branches of a block, or only its `feed-forward` branch.
        initial_weights: of Segmenter's decoder: those of its original code, or of MMSegmentation.
        normalised_layers: which of several concatenated layers pass the final norm.
        mean_std: mean and standard deviation by which all channels (in 0-1) are normalised; the backbone's if None.
        black_padding: sets whose small crops are padded before the normalisation, with black. Those of all other sets
            are padded after it, with 0, which is the mean colour.
        narrow_crops: sets cropped at 480 of 512 pixels and padded to 512.
        stretches_windows: windows whose sides are not multiples of the patch size are padded; whether the logits of
            the padded window are stretched to the window, or cut to it.
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

# Leopart's linear segmentation of VOC as NeCo's code has it: 25 epochs of 82 batches.
_NECO = Rules(
    schedule={"iterations": 2050, "batch_size": 128, "crop": 448, "learning_rates": (0.01,)},
    optimiser="sgd",
    rate_decay="step",
    weight_decay=0.0001,
    labelled_mean=True,
    mask_size=100,
)

LINEAR: Mapping[str, Rules] = MappingProxyType({"paper": PAPER, "released": _RELEASED, "neco-linear": _NECO})
"""The rules of each variant of linear segmentation."""

SEGMENTER: Mapping[str, Rules] = MappingProxyType(
    {"paper": Rules(inference="slide", drop_path=0.1), "released": _RELEASED}
)
"""The rules of each variant of Segmenter."""
