"""What trained segmentations can be asked for, typed: the command line and Python share it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from cribo.arguments import ConfigError
from cribo.data.sets import SEGMENTATION_SETS
from cribo.evaluation.data import TrainingDataConfig
from cribo.evaluation.runtime import Schedule, TrainingRuntime
from cribo.evaluation.segmentation.modes import Inference, InferenceMode
from cribo.models.modes import Checkpointing
from cribo.retrieval.source import MEAN_COLOUR, BackboneSource

if TYPE_CHECKING:
    from cribo.data.crops import Scale
    from cribo.models import Backbone

_ITERATIONS = {"paper": 80_000, "short": 300}
_LONG = 160_000, ("coco-stuff", "ade20k")
_BATCH_SIZE = {"paper": 16, "short": 8}
_CROP = {"paper": 512, "short": 224}  # whole patches of 8, 14 and 16 pixels
_STRIDE = 480, 512  # of windows, as a share of their side


@dataclass
class SegmentationTrainingConfig:
    """What a linear head and Segmenter have in common.

    Attributes:
        backbone: whose features.
        data: labelled images.
        schedule: paper (512-pixel crops, batches of 16, 80,000 iterations, 160,000 for COCO-Stuff and ADE20K) or
            short, for a small machine. It decides whatever of the next three is not given, in [brackets].
        iterations: optimiser steps. [80000 or 160000, short: 300]
        batch_size: crops of a step, over all devices. [16, short: 8]
        crop: side of the training crops, and of the windows of --inference slide, in pixels. [512, short: 224]
        learning_rates: the best of them is what counts; the schedule's when not given.
        inference: how images are scored: whole, or slide, in windows of the crop's size whose logits are averaged
            where they overlap (stride 480 of 512).
        seed: of the crops and their order, and of what is drawn for the head.
        runtime: where and how it is trained.
    """

    RATES: ClassVar[Mapping[Schedule, tuple[float, ...]]]
    """The learning rates of each schedule."""

    backbone: BackboneSource
    data: TrainingDataConfig
    schedule: Schedule = "paper"
    iterations: int | None = None
    batch_size: int | None = None
    crop: int | None = None
    learning_rates: tuple[float, ...] | None = None
    inference: InferenceMode = "whole"
    seed: int = 0
    runtime: TrainingRuntime = field(default_factory=TrainingRuntime)

    def __post_init__(self) -> None:
        for name in ("iterations", "batch_size", "crop"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError(f"{name} must be >= 1, got {value}")
        rates = self.learning_rates
        if rates is None:
            return
        if not rates:
            raise ConfigError("learning_rates must hold at least one: give --learning_rates 8e-4,3e-4, say")
        if (wrong := next((rate for rate in rates if not 0 < rate < float("inf")), None)) is not None:
            raise ConfigError(f"learning_rates must be > 0, got {wrong:g}")
        if (twice := next((rate for rate in rates if rates.count(rate) > 1), None)) is not None:
            raise ConfigError(f"learning_rates must be all different, got {twice:g} {rates.count(twice)} times")

    @property
    def scale(self) -> "Scale | None":
        """Within which the set's images are resized; None for their own size."""
        return SEGMENTATION_SETS[self.data.name].scale if self.data.name in SEGMENTATION_SETS else None


@dataclass
class LinearConfig(SegmentationTrainingConfig):
    """Linear segmentation: a linear head on frozen features, all learning rates in one pass.

    Attributes:
        learning_rates: all trained in one pass; the best one counts. [8e-4,3e-4,1e-4,8e-5, short: 3e-2,1e-2,3e-3,1e-3,
            for so few iterations]
    """

    RATES: ClassVar[Mapping[Schedule, tuple[float, ...]]] = {
        "paper": (8e-4, 3e-4, 1e-4, 8e-5),
        "short": (3e-2, 1e-2, 3e-3, 1e-3),
    }


@dataclass
class DecoderConfig:
    """Segmenter's decoder, the mask transformer.

    Attributes:
        layers: transformer blocks.
        width: channels; as many as the backbone's tokens have, when not given.
        heads: of their attention; of 64 channels each, when not given.
    """

    layers: int = 2
    width: int | None = None
    heads: int | None = None


@dataclass
class SegmenterConfig(SegmentationTrainingConfig):
    """Finetuning with Segmenter: backbone and decoder, from the same beginning for each learning rate.

    Attributes:
        learning_rates: each is trained by itself, one after the other; the best one counts. One of them takes a
            quarter of the time. [8e-5,3e-5,1e-5,8e-6, short: 1e-3,3e-4, for so few iterations]
        inference: how images are scored: slide, in windows of the crop's size whose logits are averaged where they
            overlap (stride 480 of 512), as MMSegmentation's Segmenter, or whole.
        decoder: Segmenter's mask transformer.
        drop_path: rate at which the last residual branches of backbone and decoder are dropped while training, those
            before at rates that rise from 0. The paper is silent, 0.1 is MMSegmentation's; 0 for a network
            without.
        checkpointing: where the GPU's memory is short: selective or blocks compute what a vision transformer's
            blocks hold for the backward pass a second time, with the same result.
    """

    RATES: ClassVar[Mapping[Schedule, tuple[float, ...]]] = {
        "paper": (8e-5, 3e-5, 1e-5, 8e-6),
        "short": (1e-3, 3e-4),
    }

    inference: InferenceMode = "slide"
    decoder: DecoderConfig = field(default_factory=DecoderConfig)
    drop_path: float = 0.1
    checkpointing: Checkpointing = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.backbone.source == MEAN_COLOUR:
            raise ConfigError(f"backbone {MEAN_COLOUR} has nothing that can be finetuned: give a network")
        if not 0.0 <= self.drop_path < 1.0:
            raise ConfigError(f"drop_path must be >= 0 and < 1, got {self.drop_path}")
        if self.backbone.layers != 1:
            raise ConfigError(
                f"backbone.layers must be 1, got {self.backbone.layers}: Segmenter decodes the tokens of the last block"
            )


@dataclass(frozen=True)
class TrainingSettings:
    """What was asked for, and what the schedule has decided; all that figures depend on beside backbone and data.

    Raises:
        ConfigError: a crop that does not fit the backbone's patches, or the one size that it takes.
    """

    schedule: Schedule
    iterations: int
    batch_size: int
    crop: int
    learning_rates: tuple[float, ...]
    scale: "Scale | None"
    inference: Inference
    seed: int

    @classmethod
    def of(cls, config: SegmentationTrainingConfig, backbone: "Backbone") -> "TrainingSettings":
        """Fill in what was left open."""
        long, sets = _LONG
        steps = long if config.schedule == "paper" and config.data.name in sets else _ITERATIONS[config.schedule]
        crop = _CROP[config.schedule] if config.crop is None else config.crop
        _check_crop(crop, config.inference, backbone)
        part, whole = _STRIDE
        return cls(
            schedule=config.schedule,
            iterations=steps if config.iterations is None else config.iterations,
            batch_size=_BATCH_SIZE[config.schedule] if config.batch_size is None else config.batch_size,
            crop=crop,
            learning_rates=config.RATES[config.schedule] if config.learning_rates is None else config.learning_rates,
            scale=config.scale,
            inference=Inference(config.inference, window=crop, stride=max(1, crop * part // whole)),
            seed=config.seed,
        )

    def used(self) -> dict[str, object]:
        """For the result."""
        return {
            "schedule": self.schedule,
            "iterations": self.iterations,
            "batch_size": self.batch_size,
            "crop": self.crop,
            "scale": self.scale,
            "optimiser": "adam",
            "learning_rates": self.learning_rates,
            "inference": self.inference.mode,
            "stride": self.inference.stride if self.inference.mode == "slide" else None,
            "seed": self.seed,
        }


def _check_crop(crop: int, mode: InferenceMode, backbone: "Backbone") -> None:
    if not backbone.takes_any_size:
        if crop != backbone.image_size or mode != "slide":
            raise ConfigError(
                f"{backbone.name} takes images of {backbone.image_size} pixels alone, got crop {crop} and inference "
                f"{mode}: give --crop {backbone.image_size} --inference slide"
            )
    elif crop % backbone.patch_size:
        below, above = crop // backbone.patch_size * backbone.patch_size, crop + -crop % backbone.patch_size
        raise ConfigError(
            f"crop must be a multiple of the patch size of {backbone.name}, {backbone.patch_size}, got {crop}: "
            f"use {f'{below} or {above}' if below else above}"
        )
