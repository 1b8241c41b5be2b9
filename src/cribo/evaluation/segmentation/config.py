"""Settings, schedules and variants of linear segmentation and Segmenter. This module does not import torch."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from cribo.base.bounds import above, at_least, below, require_distinct_numbers
from cribo.base.errors import ConfigError
from cribo.data.labelled.sets import SEGMENTATION_SETS
from cribo.evaluation.config import UNDECIDED, Decided, Schedule, Settings, TrainingRuntime
from cribo.evaluation.segmentation.rules import LINEAR, SEGMENTER, InferenceMode, Rules
from cribo.features.config import MEAN_COLOUR, BackboneSource
from cribo.models.config import Checkpointing

if TYPE_CHECKING:
    from cribo.data.labelled.crops import Scale
    from cribo.models import Backbone

# Crop sizes that are multiples of the patch sizes 8, 14 and 16.
_SCHEDULES: Mapping[Schedule, Mapping[str, int]] = {
    "paper": {"iterations": 80_000, "batch_size": 16, "crop": 512},
    "short": {"iterations": 300, "batch_size": 8, "crop": 224},
}
_LONG_ITERATIONS, _LONG_SETS = 160_000, ("coco-stuff", "ade20k")  # longer schedule of the paper
_STRIDE = 480, 512  # numerator and denominator: the stride of windows as a fraction of their side
_RULES_TO_SET = "inference", "weight_decay", "drop_path"


@dataclass(frozen=True, kw_only=True)
class SegmentationTrainingSettings(Settings):
    """Common settings of linear segmentation and Segmenter.

    Attributes:
        variant: implementation to follow, see docs/evaluation/linear.md.
        schedule: paper (512-pixel crops, batches of 16, 80,000 iterations, 160,000 for COCO-Stuff and ADE20K) or
            short, for a small machine. It sets the defaults of the next four options, see [brackets].
        iterations: number of optimiser steps. [80000 or 160000, short: 300]
        batch_size: number of crops per step, over all devices. [16, short: 8]
        crop: side of the training crops, and of the windows of --inference slide, in pixels. [512, short: 224]
        learning_rates: learning rates to train with; the best one is reported. [those of the schedule]
        inference: whole (whole images) or slide (windows of the crop size, whose logits are averaged where they
            overlap; stride 480 of 512). [whole, released: slide]
        weight_decay: L2 penalty that is added to the gradient. Not specified in the paper. [0, released: 0.01,
            neco-linear: 1e-4]
        drop_path: drop path rate of the last block in training; the rates of earlier blocks rise linearly from 0. [0,
            released: 0.1]
        seed: seed of the crops, their order, and the initial weights of the head.
    """

    metrics: ClassVar[tuple[str, ...]] = ("miou",)
    varies: ClassVar[str] = "learning_rate"
    runtime_type: ClassVar[type[Any]] = TrainingRuntime

    RATES: ClassVar[Mapping[Schedule, tuple[float, ...]]]
    """Learning rates of each schedule."""

    RULES: ClassVar[Mapping[str, Rules]]
    """Rules of linear segmentation and of Segmenter, by variant."""

    variant: str = "paper"
    schedule: Schedule = "paper"
    iterations: Decided[Annotated[int, at_least(1)]] = UNDECIDED
    batch_size: Decided[Annotated[int, at_least(1)]] = UNDECIDED
    crop: Decided[Annotated[int, at_least(1)]] = UNDECIDED
    learning_rates: Decided[tuple[Annotated[float, above(0)], ...]] = UNDECIDED
    inference: Decided[InferenceMode] = UNDECIDED
    weight_decay: Decided[Annotated[float, at_least(0)]] = UNDECIDED
    drop_path: Decided[Annotated[float, at_least(0) & below(1)]] = UNDECIDED
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_distinct_numbers("learning_rates", self.learning_rates, "8e-4,3e-4")

    def for_data(self, name: str, backbone: "Backbone") -> Self:
        """Return a copy with all settings set, with the defaults of variant and schedule.

        Args:
            name: name of the data set.
            backbone: backbone of the segmentation.

        Raises:
            ConfigError: the crop is not a multiple of the patch size, or not the backbone's fixed input size.
        """
        defaults: dict[str, Any] = {**_SCHEDULES[self.schedule], "learning_rates": self.RATES[self.schedule]}
        defaults |= {name: getattr(self.rules, name) for name in _RULES_TO_SET}
        if self.schedule == "paper":
            defaults |= {"iterations": _LONG_ITERATIONS} if name in _LONG_SETS else {}
            defaults |= self.rules.schedule
        settings = self.decided(defaults)
        _check_crop(settings.crop, settings.inference, backbone)
        return settings

    @property
    def rules(self) -> Rules:
        """Rules of the variant, overridden by the settings."""
        decided = {name: getattr(self, name) for name in _RULES_TO_SET if self.is_decided(name)}
        return dataclasses.replace(self.RULES[self.variant], **decided)

    @property
    def stride(self) -> int:
        """Stride of the windows in pixels."""
        part, whole = _STRIDE
        return max(1, self.crop * part // whole)


@dataclass(frozen=True, kw_only=True)
class LinearSettings(SegmentationTrainingSettings):
    """Linear segmentation: a linear head on frozen features.

    Attributes:
        variant: paper, following the paper's text; released, following its code; or neco-linear, as in Leopart and
            NeCo, with 2,050 iterations of 128 crops of 448 pixels (see docs/evaluation/linear.md).
        learning_rates: learning rates, trained concurrently in one pass; the best one is reported.
            [8e-4,3e-4,1e-4,8e-5, neco-linear: 0.01, short: 3e-2,1e-2,3e-3,1e-3]
    """

    RATES: ClassVar[Mapping[Schedule, tuple[float, ...]]] = {
        "paper": (8e-4, 3e-4, 1e-4, 8e-5),
        "short": (3e-2, 1e-2, 3e-3, 1e-3),
    }
    RULES: ClassVar[Mapping[str, Rules]] = LINEAR
    name: ClassVar[str] = "linear"
    title: ClassVar[str] = "Linear segmentation"
    less_memory: ClassVar[str] = "lower --batch_size or --crop"
    description: ClassVar[str] = """\
Linear segmentation: one linear layer is trained on the patch tokens of the frozen backbone, its logits are
upsampled to pixels, and the predictions for the validation images are scored (mIoU). All learning rates are trained
in one pass over the features; the best one is reported. --variant released follows the paper's code instead of its
text, --variant neco-linear the linear segmentation of Leopart and NeCo (see docs/evaluation/linear.md).

  cribo evaluate linear --backbone runs/coco --data VOCdevkit/VOC2012
  cribo evaluate linear --backbone vit_small_patch16_224.dino --data ADEChallengeData2016 \\
      --layers 4 --runtime.precision bf16-mixed --out linear-ade20k --resume
  cribo evaluate linear --backbone runs/camvid --data CAMVID --schedule short

The default settings are the paper's: 80,000 or 160,000 iterations of 16 crops of 512 pixels, which take hours on a
GPU. --schedule short takes minutes on a laptop; its scores are only comparable with each other. For a quick trial:
--schedule short --limit 20 --iterations 20
"""

    variant: Literal["paper", "released", "neco-linear"] = "paper"


@dataclass
class DecoderConfig:
    """Segmenter's decoder, the mask transformer.

    Attributes:
        layers: number of transformer blocks.
        width: number of channels. [that of the backbone's tokens]
        heads: number of attention heads. [one per 64 channels]
    """

    layers: Annotated[int, at_least(1)] = 2
    width: Annotated[int, at_least(1)] | None = None
    heads: Annotated[int, at_least(1)] | None = None


@dataclass(frozen=True, kw_only=True)
class SegmenterSettings(SegmentationTrainingSettings):
    """End-to-end finetuning with Segmenter.

    Attributes:
        variant: paper, following the paper's text, or released, following its code (see docs/evaluation/linear.md).
        learning_rates: learning rates, trained separately from the same initial weights; the best one is reported. A
            single one takes a quarter of the time. [8e-5,3e-5,1e-5,8e-6, short: 1e-3,3e-4]
        inference: slide (windows of the crop size, whose logits are averaged where they overlap; stride 480 of 512),
            as in the released code, or whole (whole images). [slide]
        drop_path: drop path rate of the last blocks of backbone and decoder in training; the rates of earlier blocks
            rise linearly from 0. Not specified in the paper; use 0 for networks without drop path. [0.1]
        decoder: Segmenter's mask transformer.
        checkpointing: selective or blocks recompute activations of a vision transformer's blocks in the backward
            pass, which saves GPU memory with the same result.
    """

    RATES: ClassVar[Mapping[Schedule, tuple[float, ...]]] = {
        "paper": (8e-5, 3e-5, 1e-5, 8e-6),
        "short": (1e-3, 3e-4),
    }
    RULES: ClassVar[Mapping[str, Rules]] = SEGMENTER
    name: ClassVar[str] = "segmenter"
    title: ClassVar[str] = "Finetuning with Segmenter"
    less_memory: ClassVar[str] = "use --checkpointing selective (vision transformers), or lower --batch_size or --crop"
    description: ClassVar[str] = """\
Finetuning with Segmenter: the backbone is trained end to end with a mask transformer on its tokens (two blocks,
one learnable token per class), and the predictions for the validation images are scored (mIoU). Each learning rate is
trained separately from the same weights; the best one is reported, and its network is saved. --variant released
follows the paper's code instead of its text (see docs/evaluation/linear.md).

  cribo evaluate segmenter --backbone runs/coco --data VOCdevkit/VOC2012 \\
      --runtime.precision bf16-mixed --out segmenter-voc --resume
  cribo evaluate segmenter --backbone runs/camvid --data CAMVID --schedule short
  cribo evaluate segmenter --backbone vit_small_patch16_224.dino --data MINE \\
      --iterations 20000 --learning_rates 3e-5

The default settings are the paper's: 80,000 iterations of 16 crops of 512 pixels at four learning rates take 1.1e18
floating-point operations for a ViT-S/16 (ViT-B/16: 3.9e18), and 160,000 iterations twice that. This takes hours to
days on GPUs with --runtime.precision bf16-mixed, and is not feasible on CPUs. To reduce it, use one learning rate (a
quarter), fewer --iterations, or --schedule short, which takes minutes for a small network on a laptop. Scores are only
comparable between equal settings. For a quick trial: --schedule short --limit 20 --iterations 20 --learning_rates 1e-3

If a GPU runs out of memory: --checkpointing selective, more --devices, or a smaller --batch_size.
"""

    variant: Literal["paper", "released"] = "paper"
    decoder: DecoderConfig = field(default_factory=DecoderConfig)
    checkpointing: Checkpointing = "none"

    def check_backbone(self, source: BackboneSource) -> None:
        """Raise ConfigError for backbones that cannot be finetuned."""
        if source.source == MEAN_COLOUR:
            raise ConfigError(f"backbone {MEAN_COLOUR} has no weights to finetune: choose a network")
        if source.layers != 1:
            raise ConfigError(
                f"backbone.layers must be 1, got {source.layers}: Segmenter decodes the tokens of the last block"
            )


def scale_of(name: str) -> "Scale | None":
    """Return the scale to which images of a data set are resized; None keeps their size."""
    return SEGMENTATION_SETS[name].scale if name in SEGMENTATION_SETS else None


def _check_crop(crop: int, mode: InferenceMode, backbone: "Backbone") -> None:
    if not backbone.takes_any_size:
        if crop != backbone.image_size or mode != "slide":
            raise ConfigError(
                f"{backbone.name} only accepts images of {backbone.image_size} pixels, got crop {crop} and inference "
                f"{mode}: use --crop {backbone.image_size} --inference slide"
            )
    elif crop % backbone.patch_size:
        below, above = crop // backbone.patch_size * backbone.patch_size, crop + -crop % backbone.patch_size
        raise ConfigError(
            f"crop must be a multiple of the patch size of {backbone.name}, {backbone.patch_size}, got {crop}: "
            f"use {f'{below} or {above}' if below else above}"
        )
