"""Object detection from beginning to end: backbone, boxes, finetuning, score, and what is left in a folder."""

import dataclasses
import logging
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from cribo.arguments import ConfigError
from cribo.data.detection import BoxedImages, DetectionSplits
from cribo.evaluation.detection.config import DetectionConfig
from cribo.evaluation.detection.detector import Detector
from cribo.evaluation.detection.model import build_yolos, require_transformers, save_yolos
from cribo.evaluation.detection.pictures import panels_of, write_pictures
from cribo.evaluation.detection.recipe import Recipe
from cribo.evaluation.detection.scoring import METRICS, write_detections
from cribo.evaluation.detection.views import Collate, Sizes, TrainingViews, WholeViews
from cribo.evaluation.results import EvaluationResult, versions
from cribo.evaluation.training import evaluation_folder, finished_result, fit
from cribo.files import write_folder_whole, write_json
from cribo.models import Backbone
from cribo.processes import is_first_process
from cribo.retrieval.encoders import about_backbone, open_backbone
from cribo.retrieval.source import backbone_name

log = logging.getLogger("cribo")

DETECTIONS = "detections.json"
"""What was found, in COCO's format for results."""

DETECTOR = "detector"
"""The folder of the trained detector, in transformers' format."""

_SAME_DATA = ("train_images", "val_images", "train_boxes", "val_boxes")
_FEWEST_PATCHES = 4  # along the shorter side


def evaluate_detection(
    config: DetectionConfig,
    *,
    out: Path | None = None,
    overwrite: bool = False,
    resume: bool = False,
    pictures: int = 6,
    command: str = "",
    console: Console | None = None,
) -> tuple[EvaluationResult, Path]:
    """Finetune a backbone as YOLOS and score the boxes that it finds; write results, detections and pictures.

    Args:
        config: what is asked for.
        out: the folder; `evaluations/detection-<data>-<backbone>`, numbered, when not given.
        overwrite: replace an evaluation that stands in `out`.
        resume: go on with one that stands in `out`, from its last checkpoint; begin one if there is none.
        pictures: of how many images the boxes are drawn.
        command: by which it can be repeated, for the record.
        console: shows how far it is.

    Returns:
        the result, and the folder it was written to.

    Raises:
        ImportError: transformers or scipy is not installed.
        ValueError: backbone, data, settings or folder cannot be used; said before anything is computed.
        FileNotFoundError: a file of the backbone or the data is not there.
        ConnectionError: timm's weights cannot be fetched.
        UnreadableImage: an image is broken.
        NonFiniteLoss: weights are not finite.
        Interrupted: SIGTERM or SIGUSR1 came; a checkpoint was written. (Ctrl-C is a KeyboardInterrupt.)
    """
    if pictures < 0:
        raise ValueError(f"pictures must be >= 0, got {pictures}")
    require_transformers()
    started = time.perf_counter()
    splits = config.data.open()
    _require_boxes(splits.train)
    recipe = config.recipe
    backbone = open_backbone(config.backbone)
    backbone.remove_readout()  # the detection tokens are of the blocks
    detector = _detector(config, recipe, backbone, splits)
    _require_patches(recipe, backbone)
    about, data = about_backbone(config.backbone, backbone), _about_data(config, splits)
    settings = _settings(config, recipe)
    # Files may lie elsewhere when it is gone on with.
    same = {"backbone": about["fingerprint"], "data": {name: data[name] for name in _SAME_DATA}, **settings}
    name = f"detection-{_short_name(splits)}-{backbone_name(config.backbone)}"
    with evaluation_folder(
        out,
        name,
        same,
        overwrite=overwrite,
        resume=resume,
        runtime=config.runtime,
        inputs=(config.backbone.source, splits.root),
    ) as folder:
        # Asked for here, where its settings are known to be these.
        if (done := finished_result(folder, resume=resume)) is not None:
            return done, folder
        sizes = Sizes(recipe.size)
        collate = Collate(backbone.patch_size, backbone.mean)
        trainer = fit(
            detector,
            train=TrainingViews(splits.train, sizes, config.seed),
            validation=WholeViews(splits.val, sizes),
            collate=collate,
            validation_collate=collate,
            batch_size=recipe.batch_size,
            steps=detector.steps,
            seed=config.seed,
            folder=folder,
            label="detection",
            runtime=config.runtime,
            console=console or Console(quiet=True),
        )
        result = EvaluationResult(
            evaluation="detection",
            settings=settings,
            backbone=about,
            data=data,
            classes=splits.val.classes,
            metrics=list(METRICS),
            varies="learning_rate",
            results=[_row(recipe, detector)],
            seconds=time.perf_counter() - started,
            versions={**versions(trainer.strategy.root_device), "transformers": require_transformers().__version__},
            command=command,
        )
        if is_first_process():
            _write(folder, detector, backbone, splits.val, result, pictures)
    return result, folder


def _require_boxes(images: BoxedImages) -> None:
    if not images.num_boxes:
        raise ConfigError(
            f"there must be a box to train on, got none in {len(images)} images of {images.file}: raise data.limit, or "
            "give another file"
        )


def _require_patches(recipe: Recipe, backbone: Backbone) -> None:
    least = _FEWEST_PATCHES * backbone.patch_size
    if recipe.size < least:
        raise ConfigError(
            f"size must be >= {least}, {_FEWEST_PATCHES} patches of {backbone.patch_size} pixels, got {recipe.size}"
        )


def _detector(config: DetectionConfig, recipe: Recipe, backbone: Backbone, splits: DetectionSplits) -> Detector:
    model = build_yolos(
        backbone,
        splits.train.classes,
        positions=Sizes(recipe.size).positions,
        tokens=recipe.tokens,
        seed=config.seed,
    )
    if config.checkpointing:
        enable_checkpointing(model)
    most = max(splits.train.most_boxes, splits.val.most_boxes)
    if most > recipe.tokens:
        log.warning(
            "an image has %d boxes, but no more than %d can be found in one: raise --tokens to have all of them",
            most,
            recipe.tokens,
        )
    steps = max(1, round(recipe.epochs * len(splits.train) / recipe.batch_size))
    return Detector(model, recipe, steps=steps, images=splits.val, mean=backbone.mean, std=backbone.std)


def enable_checkpointing(model: Any) -> None:
    """Have a model of transformers compute its blocks once more in the backward pass."""
    # The older name goes with version 6.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def _settings(config: DetectionConfig, recipe: Recipe) -> dict[str, Any]:
    return {
        "protocol": config.schedule,
        **dataclasses.asdict(recipe),
        "seed": config.seed,
        "precision": config.runtime.precision,
    }


def _about_data(config: DetectionConfig, splits: DetectionSplits) -> dict[str, Any]:
    return {
        **dataclasses.asdict(config.data),
        "name": splits.name,
        "root": str(splits.root.absolute()),
        "train": "train",
        "val": "val",
        "train_images": len(splits.train),
        "val_images": len(splits.val),
        "train_boxes": splits.train.num_boxes,
        "val_boxes": splits.val.num_boxes,
    }


def _short_name(splits: DetectionSplits) -> str:
    return splits.name if splits.name != "folder" else splits.root.absolute().name


def _row(recipe: Recipe, detector: Detector) -> dict[str, Any]:
    found = detector.precision
    return {
        "learning_rate": recipe.learning_rate,
        **found.metrics,
        "by_size": found.by_size,
        "per_class": found.per_class,
    }


def _write(
    folder: Path, detector: Detector, backbone: Backbone, images: BoxedImages, result: EvaluationResult, pictures: int
) -> None:
    """What stays; the results last, by which the folder counts as finished."""
    write_detections(folder / DETECTIONS, images, detector.found)
    write_folder_whole(folder / DETECTOR, lambda part: _save(part, detector, backbone), replaces=True)
    if pictures:
        panels = panels_of(images, detector.found, pictures)
        write_pictures(panels, images.classes, folder, title=f"{result.title}, {result.backbone['name']}")
    result.write(folder)


def _save(folder: Path, detector: Detector, backbone: Backbone) -> None:
    """The detector as transformers loads it, with what its image processor must do."""
    save_yolos(detector.model, folder)
    sizes = Sizes(detector.recipe.size)
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
