"""Linear segmentation and Segmenter protocols: help and measurement."""

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from cribo.base.errors import ConfigError, DataError
from cribo.evaluation.protocol import Outcome, Protocol
from cribo.evaluation.runtime import TrainingRuntime
from cribo.evaluation.segmentation.settings import (
    DecoderConfig,
    LinearSettings,
    SegmentationTrainingSettings,
    SegmenterSettings,
    scale_of,
)
from cribo.features.config import MEAN_COLOUR, BackboneSource

if TYPE_CHECKING:
    from pathlib import Path

    from cribo.evaluation.results import EvaluationResult
    from cribo.evaluation.run import Run


@dataclass(frozen=True, kw_only=True)
class SegmentationTraining(SegmentationTrainingSettings, Protocol):
    """Common parts of linear segmentation and Segmenter."""

    metrics: ClassVar[tuple[str, ...]] = ("miou",)
    varies: ClassVar[str] = "learning_rate"
    runtime_type: ClassVar[type[Any]] = TrainingRuntime

    def prepare(self, run: "Run") -> Self:
        """Set all settings that are None, and check that both splits have labels."""
        for split in ("train", "val"):
            images = getattr(run.data, split)
            # Reads label maps up to the first one with a labelled pixel.
            if not any(bool((images.labels(index) != images.ignore_index).any()) for index in range(len(images))):
                name = run.data.about[split]
                raise DataError(
                    f"all labels of the {len(images)} images of {name} are ignored: no head can be trained or scored"
                )
        return self.for_data(run.data.about["name"], run.backbone)

    def used(self, run: "Run") -> dict[str, Any]:
        """Return the settings, including those that depend on the data."""
        return {
            **dataclasses.asdict(self),
            "scale": None if self.rules.mask_size else scale_of(run.data.about["name"]),
            "optimiser": self.rules.optimiser,
            "stride": self.stride if self.inference == "slide" else None,
        }

    def report(self, result: "EvaluationResult") -> list[Any]:
        """Return the best learning rate, if there is more than one."""
        from cribo.evaluation.results import percent, setting_value

        if len(result.results) == 1:
            return []
        rate = setting_value(result.best["learning_rate"])
        return [f"  best         mIoU {percent(result.best['miou'])} % at learning rate {rate}"]


@dataclass(frozen=True, kw_only=True)
class Linear(LinearSettings, SegmentationTraining):
    """Linear segmentation: a linear head on frozen features."""

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

    def prepare(self, run: "Run") -> Self:
        """Set all settings that are None, and open the backbone with the drop path of the variant."""
        from cribo.evaluation.segmentation.linear import open_frozen

        settings = super().prepare(run)
        run.prepared = open_frozen(settings, run)
        return settings

    def used(self, run: "Run") -> dict[str, Any]:
        """Return the settings, with the number of layers that provide tokens."""
        return {**super().used(run), "layers": run.source.layers}

    def measure(self, run: "Run") -> Outcome:
        """Train all heads, and score them."""
        from cribo.evaluation.segmentation.linear import train_heads

        return train_heads(self, run)

    def places(self, folder: "Path") -> dict[str, Any]:
        """Return the path of the training curves."""
        return {"curves": folder / "tensorboard"}


@dataclass(frozen=True, kw_only=True)
class FinetunedSegmenter(SegmenterSettings, SegmentationTraining):
    """End-to-end finetuning with Segmenter."""

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

    def check_backbone(self, source: BackboneSource) -> None:
        """Raise ConfigError for backbones that cannot be finetuned."""
        if source.source == MEAN_COLOUR:
            raise ConfigError(f"backbone {MEAN_COLOUR} has no weights to finetune: choose a network")
        if source.layers != 1:
            raise ConfigError(
                f"backbone.layers must be 1, got {source.layers}: Segmenter decodes the tokens of the last block"
            )

    def prepare(self, run: "Run") -> Self:
        """Set all settings that are None, including those of the decoder."""
        from cribo.evaluation.segmentation.finetuning import build_segmenter

        settings = super().prepare(run)
        run.prepared = build_segmenter(settings, run)
        built = run.prepared.decoder
        return dataclasses.replace(settings, decoder=DecoderConfig(len(built.blocks), built.width, built.heads))

    def used(self, run: "Run") -> dict[str, Any]:
        """Return the settings, without those of memory."""
        return {name: value for name, value in super().used(run).items() if name != "checkpointing"}

    def measure(self, run: "Run") -> Outcome:
        """Finetune and score the network with each learning rate."""
        from cribo.evaluation.segmentation.finetuning import finetune

        return finetune(self, run)

    def places(self, folder: "Path") -> dict[str, Any]:
        """Return the paths of the training curves and the network."""
        return {"curves": folder / "lr=*" / "tensorboard", "network": folder / "segmenter.safetensors"}
