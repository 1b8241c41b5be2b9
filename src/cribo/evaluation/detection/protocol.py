"""Object detection with YOLOS: finetuning of a detector, and its detections, pictures and saved model."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

from matplotlib.patches import Patch

from cribo.base.colours import distinct_colours, rgb
from cribo.base.drawing import line_handle
from cribo.base.errors import ConfigError
from cribo.base.files import write_folder_whole, write_json
from cribo.base.wording import command_line, counted
from cribo.data.labelled.detection import BoxedImages
from cribo.evaluation.detection.config import (
    CLIP,
    FINAL_LEARNING_RATE,
    SCHEDULES,
    WEIGHT_DECAY,
    DetectionSettings,
)
from cribo.evaluation.detection.detector import Detector
from cribo.evaluation.detection.model import build_yolos, require_transformers, save_yolos
from cribo.evaluation.detection.scoring import Detections, write_detections
from cribo.evaluation.detection.views import Collate, Sizes, TrainingViews, WholeViews
from cribo.evaluation.pictures import Page, Picture, Row, box, write_pages
from cribo.evaluation.protocol import Outcome, Protocol
from cribo.evaluation.results import EvaluationResult, percent
from cribo.evaluation.run import Run
from cribo.evaluation.training import fit
from cribo.models import Backbone

log = logging.getLogger("cribo")

DETECTIONS = "detections.json"
"""File of the detections, in COCO's result format."""

DETECTOR = "detector"
"""Folder of the trained detector, in the format of transformers."""

SURE = 0.5
"""Minimum probability of the predictions to draw."""

_FEWEST_PATCHES = 4  # minimum number of patches along the shorter side


@dataclass(frozen=True, kw_only=True)
class Detection(DetectionSettings, Protocol):
    """Object detection with YOLOS."""

    def prepare(self, run: Run) -> Self:
        """Set all settings that are None, and build the detector."""
        settings = self.scheduled()
        run.prepared = build_detector(settings, run)
        return settings

    def used(self, run: Run) -> dict[str, Any]:
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

    def measure(self, run: Run) -> Outcome:
        """Finetune the detector, and score the predicted boxes."""
        detector, sizes = run.prepared, Sizes(self.size)
        collate = Collate(run.backbone.patch_size, run.backbone.mean)
        trainer = fit(
            detector,
            train=TrainingViews(run.data.train, sizes, self.seed),
            validation=WholeViews(run.data.val, sizes),
            collate=collate,
            batch_size=self.batch_size,
            steps=detector.steps,
            seed=self.seed,
            folder=run.folder,
            label="detection",
            runtime=run.runtime,
            console=run.console,
        )
        val = run.data.val

        def write(result: EvaluationResult, folder: Path) -> None:
            write_detections(folder / DETECTIONS, val, detector.found)
            write_folder_whole(
                folder / DETECTOR, lambda part: _save(part, detector, run.backbone, sizes), replaces=True
            )
            title = f"{result.title}, {result.backbone['name']}"
            page = partial(boxes_page, images=val, found=detector.found, title=title)
            write_pages(folder, "predictions", range(len(val)), page, number=run.num_pictures)

        return Outcome(
            rows=[{"learning_rate": self.learning_rate, **detector.precision}],
            classes=val.classes,
            packages={"transformers": require_transformers().__version__},
            device=trainer.strategy.root_device,
            write=write,
        )

    def report(self, result: EvaluationResult) -> list[Any]:
        """Return AP by object size."""
        sizes = " · ".join(f"{size} {percent(value)}" for size, value in result.results[0]["by_size"].items())
        return [f"AP by the size of objects [%]: {sizes}"]

    def places(self, folder: Path) -> dict[str, Any]:
        """Return the paths of the detections, the detector and the training curves."""
        return {
            "found": folder / DETECTIONS,
            "detector": folder / DETECTOR,
            "curves": command_line("tensorboard", "--logdir", folder / "tensorboard"),
        }


def build_detector(settings: DetectionSettings, run: Run) -> Detector:
    """Return the detector before training.

    Raises:
        ImportError: transformers or scipy is not installed.
        ConfigError: YOLOS does not support the backbone or size, or there are no boxes to train on.
    """
    require_transformers()
    train, val, backbone = run.data.train, run.data.val, run.backbone
    if not train.num_boxes:
        raise ConfigError(
            f"training needs at least one box, got none in {len(train)} images of {train.file}: raise data.limit, or "
            "give another file"
        )
    backbone.remove_readout()  # the detection tokens belong to the blocks
    model = build_yolos(
        backbone,
        train.classes,
        positions=Sizes(settings.size).positions,
        tokens=settings.tokens,
        seed=settings.seed,
    )
    if settings.checkpointing:
        enable_checkpointing(model)
    if (most := max(train.most_boxes, val.most_boxes)) > settings.tokens:
        log.warning(
            "an image has %d boxes, but at most %d can be detected per image: increase --tokens to detect all of them",
            most,
            settings.tokens,
        )
    if settings.size < (least := _FEWEST_PATCHES * backbone.patch_size):
        raise ConfigError(
            f"size must be >= {least}, {_FEWEST_PATCHES} patches of {backbone.patch_size} pixels, got {settings.size}"
        )
    steps = max(1, round(settings.epochs * len(train) / settings.batch_size))
    return Detector(model, settings.learning_rate, steps=steps, images=val, mean=backbone.mean, std=backbone.std)


def enable_checkpointing(model: Any) -> None:
    """Enable activation checkpointing in a model of transformers."""
    # transformers 6 removes the older name.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def _save(folder: Path, detector: Detector, backbone: Backbone, sizes: Sizes) -> None:
    """Save the detector in the format of transformers, with the configuration of its image processor."""
    save_yolos(detector.model, folder)
    write_json(
        folder / "preprocessor_config.json",
        {
            "image_processor_type": "YolosImageProcessor",
            "do_resize": True,
            "size": {"shortest_edge": sizes.size, "longest_edge": sizes.longest},
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": list(backbone.mean),
            "image_std": list(backbone.std),
            "do_pad": True,
        },
    )


def boxes_page(indices: Sequence[int], images: BoxedImages, found: Detections, *, title: str) -> Page:
    """Return a page with the true boxes of each image next to those predicted with a probability of at least 0.5.

    Args:
        indices: indices of the images, at least one.
        images: images with true boxes.
        found: detections in all images.
        title: title of the page.
    """
    colours = [rgb(colour) for colour in distinct_colours(len(images.classes))]
    rows, drawn, crowds = [], set(), False
    for index in indices:
        truth, scores, labels = images.boxes(index), found.scores[index], found.labels[index].tolist()
        # In ascending order, so that the most probable box is on top.
        places = [place for place in scores.argsort().tolist() if scores[place] >= SURE]
        drawn |= {*truth.labels.tolist(), *(labels[place] for place in places)}
        crowds = crowds or bool(truth.crowd.any())
        columns = (part.tolist() for part in (truth.corners, truth.labels, truth.crowd))
        true = [
            box(corners, colours[label], text=images.classes[label], dashed=crowd)
            for corners, label, crowd in zip(*columns, strict=True)
        ]
        predicted = [
            box(
                found.corners[index, place].tolist(),
                colours[labels[place]],
                text=f"{images.classes[labels[place]]} {100 * float(scores[place]):.0f} %",
            )
            for place in places
        ]
        image, objects = images.load(index), counted(int((~truth.crowd).sum()), "object")
        rows.append(
            Row(
                images.name(index), f"{objects}, {len(places)} found", [Picture(image, true), Picture(image, predicted)]
            )
        )
    handles = [
        *(Patch(facecolor=colours[label], label=images.classes[label]) for label in sorted(drawn)),
        *([line_handle("crowd, not counted", "0.3", dashed=True)] if crowds else ()),
    ]
    headings = "labels", f"found, probability ≥ {SURE:g}"
    return Page(headings, rows, handles or [line_handle("no objects", "none")], title)
