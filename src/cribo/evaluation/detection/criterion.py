"""Set loss of DETR in transformers' implementation, for batches distributed over several devices."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from cribo.evaluation.detection.model import require_transformers

# YOLOS, section 3 and its `main.py`, as in DETR; the costs of the matching have the same weights.
CLASS_WEIGHT, BOX_WEIGHT, GIOU_WEIGHT = 1, 5, 2
NO_OBJECT_WEIGHT = 0.1


class SetLosses(NamedTuple):
    """Losses of a batch.

    Attributes:
        total: weighted sum, which is minimised.
        label: cross-entropy of the classes, with a weight of 0.1 for "no object".
        box: L1 distance of centre, width and height of matched boxes.
        giou: 1 - generalised IoU of matched boxes.
    """

    total: Float[Tensor, ""]
    label: Float[Tensor, ""]
    box: Float[Tensor, ""]
    giou: Float[Tensor, ""]


class SetLoss(nn.Module):
    """Set loss with Hungarian matching of predictions and objects.

    Box losses are normalised by the number of objects of the whole batch over all devices, the cross-entropy by the
    total weight of its predictions. Gradients are therefore independent of the number of devices, unlike those of
    transformers, which normalises per device. Matching runs on the CPU, image by image.

    Args:
        num_classes: number of classes without "no object", which is the last index.

    Raises:
        ImportError: transformers or scipy is not installed.
    """

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        require_transformers()
        from transformers.loss.loss_for_object_detection import HungarianMatcher, ImageLoss

        matcher = HungarianMatcher(class_cost=CLASS_WEIGHT, bbox_cost=BOX_WEIGHT, giou_cost=GIOU_WEIGHT)
        self._loss = ImageLoss(matcher, num_classes, eos_coef=NO_OBJECT_WEIGHT, losses=["labels", "boxes"])

    def forward(
        self,
        logits: Float[Tensor, "b q classes"],
        boxes: Float[Tensor, "b q 4"],
        true_labels: Sequence[Int64[Tensor, " n"]],
        true_boxes: Sequence[Float[Tensor, "n 4"]],
        *,
        mean_over_devices: Callable[[Tensor], Tensor] = lambda value: value,
    ) -> SetLosses:
        """Return the losses of a batch, computed in float32 or higher precision.

        Args:
            logits: class logits, "no object" last.
            boxes: centre, width and height, relative to the canvas.
            true_labels: true classes of each image; may be empty.
            true_boxes: true boxes of each image, in the format of `boxes`.
            mean_over_devices: averages a tensor over all devices.
        """
        with torch.autocast(logits.device.type, enabled=False):
            wide = torch.promote_types(logits.dtype, torch.float32)
            outputs = {"logits": logits.to(wide), "pred_boxes": boxes.to(wide)}
            targets = [
                {"class_labels": label, "boxes": box.to(wide)}
                for label, box in zip(true_labels, true_boxes, strict=True)
            ]
            pairs = self._loss.matcher(outputs, targets)
            matched = sum(len(predicted) for predicted, _ in pairs)
            weight = matched + NO_OBJECT_WEIGHT * (logits.shape[0] * logits.shape[1] - matched)
            here = torch.tensor([sum(map(len, true_labels)), weight], dtype=wide, device=logits.device)
            objects, weights = mean_over_devices(here).unbind()
            found = self._loss.get_loss("boxes", outputs, targets, pairs, objects.clamp(min=1))
            found |= self._loss.get_loss("labels", outputs, targets, pairs, None)
            label, box, giou = found["loss_ce"] * (weight / weights), found["loss_bbox"], found["loss_giou"]
            return SetLosses(CLASS_WEIGHT * label + BOX_WEIGHT * box + GIOU_WEIGHT * giou, label, box, giou)
