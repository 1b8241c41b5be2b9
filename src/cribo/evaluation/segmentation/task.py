"""What trained segmentations begin and end with: backbone and data, the result, the pictures."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from rich.console import Console
from torch import Tensor

from cribo.console import Phases
from cribo.data import DataError, LabelledImages
from cribo.data.crops import LabelledCrops, WholeImages
from cribo.evaluation.data import open_training_splits, spread, whole_path
from cribo.evaluation.pictures import Panel
from cribo.evaluation.results import EvaluationResult, iou, versions
from cribo.evaluation.segmentation.config import SegmentationTrainingConfig, TrainingSettings
from cribo.evaluation.segmentation.module import SegmentationModule
from cribo.models import Backbone
from cribo.retrieval.encoders import about_backbone, mean_colour_backbone, open_backbone
from cribo.retrieval.source import MEAN_COLOUR


@dataclass(frozen=True)
class SegmentationTask:
    """All that a segmentation is trained and scored with, opened and checked.

    Attributes:
        config: what was asked for.
        settings: with what the schedule has decided.
        backbone: on the host.
        backbone_about: what results say of it.
        train, train_split: labelled images to train on, and their split.
        val, val_split: those that are scored.
    """

    config: SegmentationTrainingConfig
    settings: TrainingSettings
    backbone: Backbone
    backbone_about: dict[str, Any]
    train: LabelledImages
    train_split: str
    val: LabelledImages
    val_split: str

    @classmethod
    def open(cls, config: SegmentationTrainingConfig, *, pictures: int) -> "SegmentationTask":
        """Open backbone and data.

        Raises:
            ValueError, FileNotFoundError, ConnectionError: they cannot be used, or do not go together.
        """
        if pictures < 0:
            raise ValueError(f"pictures must be >= 0, got {pictures}")
        train, train_split, val, val_split = open_training_splits(config.data)
        for images, split in ((train, train_split), (val, val_split)):
            _require_labels(images, split)
        is_baseline = config.backbone.source == MEAN_COLOUR
        backbone = mean_colour_backbone() if is_baseline else open_backbone(config.backbone)
        about = about_backbone(config.backbone, backbone)
        settings = TrainingSettings.of(config, backbone)
        return cls(config, settings, backbone, about, train, train_split, val, val_split)

    @property
    def crops(self) -> LabelledCrops:
        """What is trained on."""
        return LabelledCrops(self.train, self.settings.crop, self.settings.scale, seed=self.settings.seed)

    @property
    def scored(self) -> WholeImages:
        """What is scored."""
        return WholeImages(self.val, self.settings.scale)

    @property
    def about_data(self) -> dict[str, Any]:
        """What results say of the data."""
        return {
            **dataclasses.asdict(self.config.data),
            "root": whole_path(self.config.data.root),
            "train": self.train_split,
            "val": self.val_split,
            "train_images": len(self.train),
            "val_images": len(self.val),
        }

    def identity(self) -> dict[str, Any]:
        """Backbone and data, as a resumed evaluation must find them."""
        # Files may lie elsewhere when it is gone on with.
        data = {name: value for name, value in self.about_data.items() if name != "root"}
        return {"backbone": self.backbone_about["fingerprint"], "data": data}

    def result(
        self,
        evaluation: str,
        used: dict[str, Any],
        confusions: dict[float, Int[Tensor, "c c"]],
        *,
        seconds: float,
        device: torch.device,
        command: str,
    ) -> EvaluationResult:
        """The result of confusions by learning rate; the best rate's is kept whole.

        Args:
            evaluation: its name.
            used: settings.
            confusions: of each learning rate, labels against predictions.
            seconds: it took.
            device: on which it ran.
            command: by which it can be repeated.
        """
        classes = list(self.train.classes)
        rows = [score_row(rate, confusion, classes) for rate, confusion in confusions.items()]
        best = max(rows, key=lambda row: row["miou"])
        best["confusion"] = confusions[best["learning_rate"]].tolist()
        return EvaluationResult(
            evaluation=evaluation,
            settings=used,
            backbone=self.backbone_about,
            data=self.about_data,
            classes=classes,
            metrics=["miou"],
            varies="learning_rate",
            results=rows,
            seconds=seconds,
            versions=versions(device),
            command=command,
        )

    def panels(self, module: SegmentationModule, head: int, count: int, console: Console) -> list[Panel]:
        """Images of those that are scored, evenly spread, beside their labels and what a head predicts.

        Args:
            module: on the device to use.
            head: which of its heads.
            count: how many.
            console: shows how far it is.
        """
        scored, panels = self.scored, []
        shown = spread(len(scored), count)
        module.eval()
        with Phases(console) as progress:
            for number, index in enumerate(shown, start=1):
                pixels, labels = scored[index]
                found = module.segment(pixels.to(module.device), (labels.shape[0], labels.shape[1]))[head].cpu()
                panels.append(Panel(self.val.name(index), self.val.load(index), labels, found, self.val.ignore_index))
                progress("pictures", number, len(shown))
        return panels


def _require_labels(images: LabelledImages, split: str) -> None:
    """Refuse images of which no pixel has a class; reads labels up to the first that has."""
    if not any(bool((images.labels(index) != images.ignore_index).any()) for index in range(len(images))):
        raise DataError(
            f"the labels of all {len(images)} images of {split} are ignored: nothing can be learned or scored"
        )


def score_row(rate: float, confusion: Int[Tensor, "c c"], classes: Sequence[str]) -> dict[str, Any]:
    """The row of a result: mIoU, the share of pixels that are right, and the IoU of each class."""
    per_class = iou(confusion)
    return {
        "learning_rate": rate,
        "miou": float(per_class.nanmean()),
        "pixel_accuracy": float(confusion.diagonal().sum() / confusion.sum().clamp(min=1)),
        "per_class": dict(zip(classes, per_class.tolist(), strict=True)),
    }


def best_row(result: EvaluationResult) -> int:
    """Which row has the highest headline metric."""
    return max(range(len(result.results)), key=lambda row: result.results[row][result.headline])
