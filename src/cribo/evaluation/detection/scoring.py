"""Detections gathered from all devices, and COCO's average precision."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torchmetrics import Metric
from torchvision.ops import box_convert

from cribo.base.errors import InputError
from cribo.base.files import write_text
from cribo.data.labelled.detection import BoxedImages
from cribo.evaluation.detection.config import METRICS

# In the order of the statistics of COCO's evaluation.
SIZES = ("small", "medium", "large")


_STATES = ("indices", "corners", "labels", "scores")


@dataclass(frozen=True)
class Detections:
    """Predicted boxes of images, sorted by image index.

    Attributes:
        indices: (N,) image indices.
        corners: (N, Q, 4) left, top, right and bottom in pixels of the image.
        labels: (N, Q) classes.
        scores: (N, Q) probabilities of the classes.
    """

    indices: Int64[Tensor, " n"]
    corners: Float[Tensor, "n q 4"]
    labels: Int64[Tensor, "n q"]
    scores: Float[Tensor, "n q"]

    def __len__(self) -> int:
        return len(self.indices)


def read_off(
    logits: Float[Tensor, "b q classes"], boxes: Float[Tensor, "b q 4"], extents: Float[Tensor, "b 2"]
) -> tuple[Float[Tensor, "b q 4"], Int64[Tensor, "b q"], Float[Tensor, "b q"]]:
    """Return predicted boxes: corners in pixels, most likely class, and its probability.

    Args:
        logits: class logits, "no object" last.
        boxes: centre, width and height, relative to the canvas.
        extents: height and width of the canvas in pixels of the image.
    """
    scores, labels = logits.float().softmax(dim=-1)[..., :-1].max(dim=-1)
    pixels = extents.flip(-1).repeat(1, 2)[:, None]
    return box_convert(boxes.float(), "cxcywh", "xyxy") * pixels, labels, scores


class Gathered(Metric):
    """Metric that gathers the detections of all devices."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        for name in _STATES:
            self.add_state(name, default=[], dist_reduce_fx="cat")

    def update(self, *found: Tensor) -> None:
        """Add the detections of some images, in the order of the fields of `Detections`."""
        for name, value in zip(_STATES, found, strict=True):
            getattr(self, name).append(value.detach())

    def compute(self) -> tuple[Tensor, ...]:
        """Return the fields of `Detections` over all devices, on the CPU."""
        states = [getattr(self, name) for name in _STATES]
        parts = [(state if isinstance(state, Tensor) else torch.cat(state)).cpu() for state in states]
        order = parts[0].argsort()
        return tuple(part[order] for part in parts)


def average_precision(images: BoxedImages, found: Detections) -> dict[str, Any]:
    """Score detections with COCO's evaluation (faster-coco-eval), with up to 100 boxes per image.

    Args:
        images: images with true boxes; detections in crowds are ignored.
        found: detections of each image.

    Returns:
        The AP over all classes, averaged over IoU thresholds of .50 to .95, at .50 and at .75 (`METRICS`); `by_size`,
        for objects with an area of less than 32² pixels, of up to 96², and of more; and `per_class`. In 0-1; None if no
        object exists for it.

    Raises:
        ValueError: images are missing or repeated in the detections.
    """
    if not torch.equal(found.indices, torch.arange(len(images))):
        raise InputError(f"each of the {len(images)} images must have detections exactly once, got {len(found)}")
    from faster_coco_eval.core.coco import COCO
    from faster_coco_eval.core.faster_eval_api import COCOeval_faster

    truth = COCO(_as_coco(images))
    evaluation = COCOeval_faster(truth, truth.loadRes(_as_table(found)), "bbox", print_function=lambda *words: None)
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    # (IoU thresholds, recalls, classes, areas, most boxes): all areas, the largest number of boxes
    precision = torch.from_numpy(np.asarray(evaluation.eval["precision"]))[:, :, :, 0, -1]
    figures = dict(zip((*METRICS, *SIZES), map(_known, evaluation.stats), strict=False))
    return {
        **{name: figures[name] for name in METRICS},
        "by_size": {size: figures[size] for size in SIZES},
        "per_class": {name: _known(precision[:, :, number].mean()) for number, name in enumerate(images.classes)},
    }


def _known(value: Any) -> float | None:
    """Return None for -1, which COCO's evaluation returns if there are no objects."""
    return None if value < 0 else float(value)


def _as_coco(images: BoxedImages) -> dict[str, Any]:
    annotations: list[dict[str, Any]] = []
    for index in range(len(images)):
        boxes = images.boxes(index)
        columns = (box_convert(boxes.corners, "xyxy", "xywh"), boxes.labels, boxes.areas, boxes.crowd.int())
        for box, label, area, crowd in zip(*(part.tolist() for part in columns), strict=True):
            number = len(annotations) + 1  # 0 means no match
            about = {"id": number, "image_id": index, "category_id": label}
            annotations.append({**about, "bbox": box, "area": area, "iscrowd": crowd})
    return {
        "images": [{"id": index} for index in range(len(images))],
        "categories": [{"id": number, "name": name} for number, name in enumerate(images.classes)],
        "annotations": annotations,
    }


def _as_table(found: Detections) -> np.ndarray:
    """Return rows of image, left, top, width, height, score and class."""
    number = found.scores.shape[1]
    image = found.indices.repeat_interleave(number)
    boxes = box_convert(found.corners.flatten(0, 1), "xyxy", "xywh")
    columns = (image[:, None], boxes, found.scores.view(-1, 1), found.labels.view(-1, 1))
    return torch.cat([part.double() for part in columns], dim=1).numpy()


def write_detections(path: Path, images: BoxedImages, found: Detections) -> Path:
    """Write detections atomically in COCO's result format, with the ids of the annotation file."""
    rows = []
    columns = found.indices, box_convert(found.corners.double(), "xyxy", "xywh"), found.labels, found.scores
    for index, *of_image in zip(*(part.tolist() for part in columns), strict=True):
        for box, label, score in zip(*of_image, strict=True):
            row = {"image_id": images.image_ids[index], "category_id": images.category_ids[label]}
            rows.append(json.dumps({**row, "bbox": [round(side, 3) for side in box], "score": round(score, 6)}))
    write_text(path, "[\n" + ",\n".join(rows) + "\n]\n")
    return path
