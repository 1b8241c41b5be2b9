"""Segmentation with trained heads as protocols: settings, schedules, and what they return."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from cribo.arguments import ConfigError
from cribo.data.sets import SEGMENTATION_SETS
from cribo.errors import DataError
from cribo.evaluation.protocol import UNDECIDED, Decided, Outcome, Protocol
from cribo.evaluation.runtime import Schedule, TrainingRuntime, require_least
from cribo.evaluation.segmentation.rules import LINEAR, SEGMENTER, InferenceMode, Rules
from cribo.models.modes import Checkpointing
from cribo.retrieval.source import MEAN_COLOUR, BackboneSource

if TYPE_CHECKING:
    from pathlib import Path

    from cribo.data.crops import Scale
    from cribo.evaluation.results import EvaluationResult
    from cribo.evaluation.runner import Run
    from cribo.evaluation.segmentation.inference import Inference
    from cribo.models import Backbone


# Crops of whole patches of 8, 14 and 16 pixels.
_SCHEDULES: Mapping[Schedule, Mapping[str, int]] = {
    "paper": {"iterations": 80_000, "batch_size": 16, "crop": 512},
    "short": {"iterations": 300, "batch_size": 8, "crop": 224},
}
_LONG_ITERATIONS, _LONG_SETS = 160_000, ("coco-stuff", "ade20k")  # of the paper's schedule
_STRIDE = 480, 512  # of windows, as a share of their side
_RULES_TO_SET = "inference", "weight_decay", "drop_path"


@dataclass(frozen=True, kw_only=True)
class SegmentationTraining(Protocol):
    """Common to the linear head and Segmenter.

    Attributes:
        variant: the rules to follow; docs/evaluation.md lists them.
        schedule: paper (512-pixel crops, batches of 16, 80,000 iterations, 160,000 for COCO-Stuff and ADE20K) or
            short, for a small machine. It decides the next four unless given, see [brackets].
        iterations: optimiser steps. [80000 or 160000, short: 300]
        batch_size: crops of a step, over all devices. [16, short: 8]
        crop: side of the training crops, and of the windows of --inference slide, in pixels. [512, short: 224]
        learning_rates: the best one is reported; the schedule's when not given.
        inference: how images are scored: whole, or slide, in windows of the crop's size whose logits are averaged
            where they overlap (stride 480 of 512). [whole, released: slide]
        weight_decay: factor of the weights that is added to their gradient (L2). The paper is silent. [0, released:
            0.01, neco-linear: 1e-4]
        drop_path: rate at which the residual branches of the last block are dropped in training; the rates of those
            before rise from 0. [0, released: 0.1]
        seed: of the crops and their order, and of the initial weights of the head.
    """

    RATES: ClassVar[Mapping[Schedule, tuple[float, ...]]]
    """The learning rates of each schedule."""

    RULES: ClassVar[Mapping[str, Rules]]
    """The rules of each variant."""

    metrics: ClassVar[tuple[str, ...]] = ("miou",)
    varies: ClassVar[str] = "learning_rate"
    runtime_type: ClassVar[type[Any]] = TrainingRuntime

    variant: str = "paper"
    schedule: Schedule = "paper"
    iterations: Decided[int] = UNDECIDED
    batch_size: Decided[int] = UNDECIDED
    crop: Decided[int] = UNDECIDED
    learning_rates: Decided[tuple[float, ...]] = UNDECIDED
    inference: Decided[InferenceMode] = UNDECIDED
    weight_decay: Decided[float] = UNDECIDED
    drop_path: Decided[float] = UNDECIDED
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_least(self, {"iterations": 1, "batch_size": 1, "crop": 1, "weight_decay": 0})
        if self.is_decided("drop_path") and not 0.0 <= self.drop_path < 1.0:
            raise ConfigError(f"drop_path must be >= 0 and < 1, got {self.drop_path}")
        if not self.is_decided("learning_rates"):
            return
        rates = self.learning_rates
        if not rates:
            raise ConfigError("learning_rates must hold at least one: give --learning_rates 8e-4,3e-4, say")
        if (wrong := next((rate for rate in rates if not 0 < rate < float("inf")), None)) is not None:
            raise ConfigError(f"learning_rates must be > 0, got {wrong:g}")
        if (twice := next((rate for rate in rates if rates.count(rate) > 1), None)) is not None:
            raise ConfigError(f"learning_rates must be all different, got {twice:g} {rates.count(twice)} times")

    def for_data(self, name: str, backbone: "Backbone") -> Self:
        """Return a copy in which variant and schedule have decided all settings.

        Args:
            name: of the data set.
            backbone: that is trained on.

        Raises:
            ConfigError: a crop that does not fit the patches of the backbone, or the only size that it takes.
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
        """The rules of the variant, with those that are set."""
        decided = {name: getattr(self, name) for name in _RULES_TO_SET if self.is_decided(name)}
        return dataclasses.replace(self.RULES[self.variant], **decided)

    @property
    def stride(self) -> int:
        """Pixels from one window to the next."""
        part, whole = _STRIDE
        return max(1, self.crop * part // whole)

    @property
    def windows(self) -> "Inference":
        """How images are scored."""
        from cribo.evaluation.segmentation.inference import Inference

        stretch = self.rules.stretches_windows
        return Inference(self.inference, window=self.crop, stride=self.stride, stretch=stretch)

    def prepare(self, run: "Run") -> Self:
        """Decide all settings, and check that there are labels."""
        for split in ("train", "val"):
            images = getattr(run.data, split)
            # Reads labels up to the first image that has some.
            if not any(bool((images.labels(index) != images.ignore_index).any()) for index in range(len(images))):
                name = run.data.about[split]
                raise DataError(
                    f"the labels of all {len(images)} images of {name} are ignored: nothing can be learned or scored"
                )
        return self.for_data(run.data.about["name"], run.backbone)

    def used(self, run: "Run") -> dict[str, Any]:
        """Return the settings, with those that follow from the data."""
        return {
            "variant": self.variant,
            "schedule": self.schedule,
            "iterations": self.iterations,
            "batch_size": self.batch_size,
            "crop": self.crop,
            "scale": None if self.rules.mask_size else scale_of(run.data.about["name"]),
            "optimiser": self.rules.optimiser,
            "weight_decay": self.weight_decay,
            "drop_path": self.drop_path,
            "learning_rates": self.learning_rates,
            "inference": self.inference,
            "stride": self.stride if self.inference == "slide" else None,
            "seed": self.seed,
        }

    def report(self, result: "EvaluationResult") -> list[Any]:
        """Return the best learning rate, if there are several."""
        from cribo.evaluation.results import percent, setting_value

        if len(result.results) == 1:
            return []
        rate = setting_value(result.best["learning_rate"])
        return [f"  best         mIoU {percent(result.best['miou'])} % at learning rate {rate}"]


@dataclass(frozen=True, kw_only=True)
class Linear(SegmentationTraining):
    """Linear segmentation: a linear head on frozen features, all learning rates in one pass.

    Attributes:
        variant: paper, as the paper's text says; released, as its code does; or neco-linear, as in Leopart and NeCo,
            with 2,050 iterations of 128 crops of 448 pixels (docs/evaluation.md lists the rules).
        learning_rates: all trained in one pass; the best one is reported. [8e-4,3e-4,1e-4,8e-5, neco-linear: 0.01,
            short: 3e-2,1e-2,3e-3,1e-3]
    """

    RATES: ClassVar[Mapping[Schedule, tuple[float, ...]]] = {
        "paper": (8e-4, 3e-4, 1e-4, 8e-5),
        "short": (3e-2, 1e-2, 3e-3, 1e-3),
    }
    RULES: ClassVar[Mapping[str, Rules]] = LINEAR

    variant: Literal["paper", "released", "neco-linear"] = "paper"

    name: ClassVar[str] = "linear"
    title: ClassVar[str] = "Linear segmentation"
    less_memory: ClassVar[str] = "lower --batch_size or --crop"
    description: ClassVar[str] = """\
Linear segmentation: one linear layer is trained on the patch tokens of the frozen backbone, its logits are
upsampled to pixels, and the labels of the validation images are scored (mIoU). All learning rates are trained
in one pass over the features; the best one is reported. --variant released follows the paper's code in place of
its text, --variant neco-linear the linear segmentation of Leopart and NeCo (docs/evaluation.md lists the rules).

  cribo evaluate linear --backbone runs/coco --data voc --data.root VOCdevkit/VOC2012
  cribo evaluate linear --backbone vit_small_patch16_224.dino --data ade20k --data.root ADEChallengeData2016 \\
      --layers 4 --runtime.precision bf16-mixed --out linear-ade20k --resume
  cribo evaluate linear --backbone runs/camvid --data camvid --data.root CAMVID --schedule short

The default settings are the paper's: 80,000 or 160,000 iterations of 16 crops of 512 pixels, which take hours on a
GPU. --schedule short takes minutes on a laptop; its scores are only comparable with each other. For a first try:
--schedule short --limit 20 --iterations 20
"""

    def prepare(self, run: "Run") -> Self:
        """Decide all settings, and open the backbone with the drop path of the variant."""
        from cribo.evaluation.segmentation.linear import open_frozen

        settings = super().prepare(run)
        run.prepared = open_frozen(settings, run)
        return settings

    def used(self, run: "Run") -> dict[str, Any]:
        """Return the settings, with the layers that give tokens."""
        return {**super().used(run), "layers": run.source.layers}

    def measure(self, run: "Run") -> Outcome:
        """Train all heads, and score them."""
        from cribo.evaluation.segmentation.linear import train_heads

        return train_heads(self, run)

    def places(self, folder: "Path") -> dict[str, Any]:
        """Return the path of the curves."""
        return {"curves": folder / "tensorboard"}


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


@dataclass(frozen=True, kw_only=True)
class FinetunedSegmenter(SegmentationTraining):
    """Finetuning with Segmenter: backbone and decoder, from the same initial weights for each learning rate.

    Attributes:
        variant: paper, as the paper's text says, or released, as its code does (docs/evaluation.md lists the rules).
        learning_rates: each is trained separately, one after the other; the best one is reported. One of them takes a
            quarter of the time. [8e-5,3e-5,1e-5,8e-6, short: 1e-3,3e-4]
        inference: how images are scored: slide, in windows of the crop's size whose logits are averaged where they
            overlap (stride 480 of 512), as in the released code, or whole. [slide]
        drop_path: rate at which the residual branches of the last blocks of backbone and decoder are dropped in
            training; the rates of those before rise from 0. The paper is silent; 0 for a network without. [0.1]
        decoder: Segmenter's mask transformer.
        checkpointing: if a GPU runs out of memory: selective or blocks recompute activations of a vision
            transformer's blocks in the backward pass, with the same result.
    """

    RATES: ClassVar[Mapping[Schedule, tuple[float, ...]]] = {
        "paper": (8e-5, 3e-5, 1e-5, 8e-6),
        "short": (1e-3, 3e-4),
    }
    RULES: ClassVar[Mapping[str, Rules]] = SEGMENTER

    variant: Literal["paper", "released"] = "paper"

    name: ClassVar[str] = "segmenter"
    title: ClassVar[str] = "Finetuning with Segmenter"
    less_memory: ClassVar[str] = "use --checkpointing selective (vision transformers), or lower --batch_size or --crop"
    description: ClassVar[str] = """\
Finetuning with Segmenter: the backbone is trained end to end with a mask transformer on its tokens (two blocks,
one learnable token per class), and the labels of the validation images are scored (mIoU). Each learning rate is
trained separately from the same weights; the best one is reported, and its network is saved. --variant released
follows the paper's code in place of its text (docs/evaluation.md lists the rules).

  cribo evaluate segmenter --backbone runs/coco --data voc --data.root VOCdevkit/VOC2012 \\
      --runtime.precision bf16-mixed --out segmenter-voc --resume
  cribo evaluate segmenter --backbone runs/camvid --data camvid --data.root CAMVID --schedule short
  cribo evaluate segmenter --backbone vit_small_patch16_224.dino --data folder --data.root MINE \\
      --iterations 20000 --learning_rates 3e-5

The default settings are the paper's: 80,000 iterations of 16 crops of 512 pixels at four learning rates take 1.1e18
floating-point operations for a ViT-S/16 (ViT-B/16: 3.9e18), and 160,000 iterations twice that. This takes hours to
days on GPUs with --runtime.precision bf16-mixed, and is not feasible on CPUs. To reduce it, use one learning rate (a
quarter), fewer --iterations, or --schedule short, which takes minutes for a small network on a laptop. Scores are only
comparable between equal settings. For a first try: --schedule short --limit 20 --iterations 20 --learning_rates 1e-3

If a GPU runs out of memory: --checkpointing selective, more --devices, or a smaller --batch_size.
"""

    decoder: DecoderConfig = field(default_factory=DecoderConfig)
    checkpointing: Checkpointing = "none"

    def check_backbone(self, source: BackboneSource) -> None:
        """Refuse backbones that cannot be finetuned."""
        if source.source == MEAN_COLOUR:
            raise ConfigError(f"backbone {MEAN_COLOUR} has nothing that can be finetuned: give a network")
        if source.layers != 1:
            raise ConfigError(
                f"backbone.layers must be 1, got {source.layers}: Segmenter decodes the tokens of the last block"
            )

    def prepare(self, run: "Run") -> Self:
        """Decide all settings, also those of the decoder."""
        from cribo.evaluation.segmentation.finetuning import build_segmenter, warn_of_batch_norms

        settings = super().prepare(run)
        run.prepared = segmenter = build_segmenter(settings, run)
        warn_of_batch_norms(run.runtime, segmenter)
        built = segmenter.decoder
        return dataclasses.replace(settings, decoder=DecoderConfig(len(built.blocks), built.width, built.heads))

    def used(self, run: "Run") -> dict[str, Any]:
        """Return the settings, with those of the decoder."""
        return {**super().used(run), "decoder": dataclasses.asdict(self.decoder)}

    def measure(self, run: "Run") -> Outcome:
        """Finetune the network with each learning rate, and score it."""
        from cribo.evaluation.segmentation.finetuning import finetune

        return finetune(self, run)

    def places(self, folder: "Path") -> dict[str, Any]:
        """Return the paths of the curves and of the network."""
        return {"curves": folder / "lr=*" / "tensorboard", "network": folder / "segmenter.safetensors"}


def scale_of(name: str) -> "Scale | None":
    """Return the scale to which the images of a set are resized; None for their own size."""
    return SEGMENTATION_SETS[name].scale if name in SEGMENTATION_SETS else None


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
