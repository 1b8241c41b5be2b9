"""Finetuning of a detector, and its detections, pictures and saved model."""

import logging
from functools import partial
from pathlib import Path
from typing import Any

from cribo.base.errors import ConfigError
from cribo.base.files import write_folder_whole, write_json
from cribo.evaluation.detection.detector import Detector
from cribo.evaluation.detection.model import build_yolos, require_transformers, save_yolos
from cribo.evaluation.detection.pictures import draw_boxes
from cribo.evaluation.detection.scoring import write_detections
from cribo.evaluation.detection.settings import DetectionSettings
from cribo.evaluation.detection.views import Collate, Sizes, TrainingViews, WholeViews
from cribo.evaluation.pages import write_pages
from cribo.evaluation.protocol import Outcome
from cribo.evaluation.results import EvaluationResult
from cribo.evaluation.run import Run
from cribo.evaluation.training import fit
from cribo.models import Backbone

log = logging.getLogger("cribo")

DETECTIONS = "detections.json"
"""File of the detections, in COCO's result format."""

DETECTOR = "detector"
"""Folder of the trained detector, in the format of transformers."""

_FEWEST_PATCHES = 4  # minimum number of patches along the shorter side


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


def train_detector(settings: DetectionSettings, run: Run) -> Outcome:
    """Finetune the detector of a run, and score the predicted boxes."""
    detector, sizes = run.prepared, Sizes(settings.size)
    collate = Collate(run.backbone.patch_size, run.backbone.mean)
    trainer = fit(
        detector,
        train=TrainingViews(run.data.train, sizes, settings.seed),
        validation=WholeViews(run.data.val, sizes),
        collate=collate,
        batch_size=settings.batch_size,
        steps=detector.steps,
        seed=settings.seed,
        folder=run.folder,
        label="detection",
        runtime=run.runtime,
        console=run.console,
    )
    val = run.data.val

    def write(result: EvaluationResult, folder: Path) -> None:
        write_detections(folder / DETECTIONS, val, detector.found)
        write_folder_whole(folder / DETECTOR, lambda part: _save(part, detector, run.backbone, sizes), replaces=True)
        title = f"{result.title}, {result.backbone['name']}"
        draw = partial(draw_boxes, images=val, found=detector.found, title=title)
        write_pages(folder, "predictions", range(len(val)), draw, number=run.num_pictures)

    return Outcome(
        rows=[{"learning_rate": settings.learning_rate, **detector.precision}],
        classes=val.classes,
        packages={"transformers": require_transformers().__version__},
        device=trainer.strategy.root_device,
        write=write,
    )


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
