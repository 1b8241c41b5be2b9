"""Protocol of object detection with YOLOS: data and measurement."""

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from cribo.base.bounds import at_least, check_bounds
from cribo.base.errors import ConfigError
from cribo.base.packages import require_packages
from cribo.base.wording import command_line
from cribo.data.config import spread
from cribo.evaluation.data import Splits, about_splits
from cribo.evaluation.detection.settings import (
    ADVICE,
    CLIP,
    FINAL_LEARNING_RATE,
    METRICS,
    SCHEDULES,
    WEIGHT_DECAY,
    DetectionSettings,
)
from cribo.evaluation.protocol import Outcome, Protocol
from cribo.evaluation.runtime import TrainingRuntime
from cribo.features.config import MEAN_COLOUR, BackboneSource

if TYPE_CHECKING:
    from pathlib import Path

    from cribo.evaluation.results import EvaluationResult
    from cribo.evaluation.run import Run


@dataclass
class DetectionData:
    """Images with boxes, in files of COCO's format.

    Attributes:
        root: folder of the data set, in COCO's own layout (annotations/instances_train2017.json, train2017), with
            instances_train.json and images/train, or with train/_annotations.coco.json next to the images; the same
            for val (or valid).
        train_annotations: JSON file of the training annotations, at any path.
        train_images: folder of the training images. [that of the layout, or of the JSON file]
        val_annotations: JSON file of the validation annotations, at any path.
        val_images: folder of the validation images. [that of the layout, or of the JSON file]
        limit: maximum number of images per split, evenly spaced, for a quick trial.
    """

    layout: ClassVar[str] = "instances_<split>.json with images/<split>, or another layout of COCO's format"

    root: str | None = None
    train_annotations: str | None = None
    train_images: str | None = None
    val_annotations: str | None = None
    val_images: str | None = None
    limit: Annotated[int, at_least(1)] | None = None

    def __post_init__(self) -> None:
        check_bounds(self, "data.")

    @classmethod
    def find(cls, folder: "Path") -> Self | None:
        """Return the data set in a folder with annotations in one of the layouts, None if there are none."""
        from cribo.data.labelled.detection import has_annotations

        return cls(str(folder)) if has_annotations(folder) else None

    def open(self) -> Splits:
        """Open both splits.

        Raises:
            DataError: see `open_detection`.
        """
        from cribo.data.labelled.detection import open_detection

        places = {name: value for name, value in dataclasses.asdict(self).items() if name not in ("root", "limit")}
        found = open_detection(self.root, **places)
        train, val = found.train, found.val
        if self.limit is not None:
            train, val = (images.subset(spread(len(images), self.limit)) for images in (train, val))
        boxes = {"train_boxes": train.num_boxes, "val_boxes": val.num_boxes}
        about = about_splits(self, str(found.root), train, "train", val, "val", name=found.name, **boxes)
        title = found.name if found.name != "folder" else found.root.absolute().name
        return Splits(train, val, title, about)


@dataclass(frozen=True, kw_only=True)
class Detection(DetectionSettings, Protocol):
    """Object detection with YOLOS."""

    title: ClassVar[str] = "Object detection"
    metrics: ClassVar[tuple[str, ...]] = METRICS
    varies: ClassVar[str] = "learning_rate"
    class_metric: ClassVar[str] = "AP"
    data_type: ClassVar[type[Any]] = DetectionData
    runtime_type: ClassVar[type[Any]] = TrainingRuntime
    pictures: ClassVar[str] = "images for which the boxes are drawn"
    less_memory: ClassVar[str] = (
        "use --checkpointing, --runtime.precision bf16-mixed, more --devices, or a smaller --size"
    )
    description: ClassVar[str] = """\
Object detection with YOLOS: the backbone with detection tokens is finetuned on images with boxes (COCO's format), and
the boxes predicted for the validation images are scored (AP, AP50, AP75).

  cribo evaluate detection --backbone runs/mine --data COCO --runtime.precision bf16-mixed
  cribo evaluate detection --backbone runs/mine --data MINE --schedule short
  cribo evaluate detection --backbone checkpoint.pth --data.train_annotations t.json --data.train_images t/ \\
                           --data.val_annotations v.json --data.val_images v/

The backbone must be a vision transformer with a [CLS] token. The paper's schedule takes days on a GPU for COCO; to
resume after an interruption, use --out FOLDER --resume. For a quick trial: --schedule short --limit 20 --epochs 2
Requires the extra detection (README.md, Install).
"""

    def check_packages(self) -> None:
        """Check that transformers is installed."""
        require_packages("detection", "transformers", extra="detection")

    def check_backbone(self, source: BackboneSource) -> None:
        """Raise ConfigError for backbones that cannot be finetuned as a detector."""
        if source.source == MEAN_COLOUR:
            raise ConfigError(f"{MEAN_COLOUR} is not a network and cannot be finetuned as a detector: {ADVICE}")
        if source.layers != 1:
            raise ConfigError(
                f"layers must be 1 for detection, got {source.layers}: detection tokens pass through all blocks"
            )

    def prepare(self, run: "Run") -> Self:
        """Set all settings that are None, and build the detector."""
        from cribo.evaluation.detection.training import build_detector

        settings = self.scheduled()
        run.prepared = build_detector(settings, run)
        return settings

    def used(self, run: "Run") -> dict[str, Any]:
        """Return the settings for `results.json`."""
        return {
            "protocol": self.schedule,
            **{name: getattr(self, name) for name in SCHEDULES[self.schedule]},
            "final_learning_rate": FINAL_LEARNING_RATE,
            "weight_decay": WEIGHT_DECAY,
            "clip": CLIP,
            "seed": self.seed,
            "precision": run.runtime.precision,
        }

    def measure(self, run: "Run") -> Outcome:
        """Finetune the detector, and score the predicted boxes."""
        from cribo.evaluation.detection.training import train_detector

        return train_detector(self, run)

    def report(self, result: "EvaluationResult") -> list[Any]:
        """Return AP by object size."""
        from cribo.evaluation.results import percent

        sizes = " · ".join(f"{size} {percent(value)}" for size, value in result.results[0]["by_size"].items())
        return [f"AP by the size of objects [%]: {sizes}"]

    def places(self, folder: "Path") -> dict[str, Any]:
        """Return the paths of the detections, the detector and the training curves."""
        return {
            "found": folder / "detections.json",
            "detector": folder / "detector",
            "curves": command_line("tensorboard", "--logdir", folder / "tensorboard"),
        }
