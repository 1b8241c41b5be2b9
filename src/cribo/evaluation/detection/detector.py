"""Lightning module of a detector, with the set loss of DETR."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor, nn

from cribo.base.errors import NonFiniteLoss
from cribo.data.labelled.detection import BoxedImages
from cribo.evaluation.detection.config import CLIP, FINAL_LEARNING_RATE, METRICS, WEIGHT_DECAY
from cribo.evaluation.detection.model import require_transformers
from cribo.evaluation.detection.scoring import Detections, Gathered, average_precision, read_off
from cribo.evaluation.detection.views import Batch
from cribo.models import normalise
from cribo.training.module import ResumableModule

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


class Detector(ResumableModule):
    """Module that finetunes YOLOS, and scores it on whole images.

    Args:
        model: a `YolosForObjectDetection`.
        learning_rate: initial learning rate.
        steps: total number of training steps, for the learning rate schedule.
        images: validation images.
        mean: mean of the colours for normalisation.
        std: standard deviation of the colours for normalisation.

    Attributes:
        found: detections in the validation images from the last validation; equal on all devices.
        precision: `average_precision` of these detections.
    """

    found: Detections
    precision: dict[str, Any]

    def __init__(
        self,
        model: Any,
        learning_rate: float,
        *,
        steps: int,
        images: BoxedImages,
        mean: Sequence[float],
        std: Sequence[float],
    ) -> None:
        super().__init__()
        self.model, self.learning_rate, self.steps, self.images = model, learning_rate, steps, images
        self.mean, self.std = tuple(mean), tuple(std)
        self.loss, self.gathered = SetLoss(len(images.classes)), Gathered()

    def forward(self, images: UInt8[Tensor, "b c h w"]) -> tuple[Float[Tensor, "b q classes"], Float[Tensor, "b q 4"]]:
        """Return class logits ("no object" last), and centre, width and height of boxes relative to the canvas.

        The two heads always compute in float32 or higher precision: values above 1/2 have a resolution of 1/256 in
        bfloat16, which is five pixels of a long side, and too coarse to rank boxes by probability.
        """
        pixels = normalise(images.float().div_(255), mean=self.mean, std=self.std)
        tokens = self.model.vit(pixels).last_hidden_state[:, -self.model.config.num_detection_tokens :]
        with torch.autocast(tokens.device.type, enabled=False):
            tokens = tokens.to(torch.promote_types(tokens.dtype, torch.float32))
            return self.model.class_labels_classifier(tokens), self.model.bbox_predictor(tokens).sigmoid()

    def training_step(self, batch: Batch, batch_idx: int) -> Float[Tensor, ""]:
        """Return the set loss.

        Raises:
            NonFiniteLoss: predictions are not finite. (The check is free, since matching synchronises anyway.)
        """
        logits, boxes = self(batch.images)
        if not boxes.isfinite().all():
            raise NonFiniteLoss("the predictions", self.global_step, self.advice)
        losses = self.loss(logits, boxes, batch.labels, batch.boxes, mean_over_devices=self._mean_over_devices)
        self.log("loss", losses.total.detach(), prog_bar=True)
        for name, value in (("label", losses.label), ("box", losses.box), ("giou", losses.giou)):
            self.log(f"loss/{name}", value.detach())
        return losses.total

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Predict boxes in whole images."""
        logits, boxes = self(batch.images)
        self.gathered.update(batch.indices, *read_off(logits, boxes, batch.extents))

    def on_validation_epoch_end(self) -> None:
        """Gather and score the detections of all devices."""
        self.found = Detections(*self.gathered.compute())
        self.gathered.reset()
        self.precision = average_precision(self.images, self.found)
        for name in METRICS:
            if self.precision[name] is not None:
                self.log(name, self.precision[name], rank_zero_only=True)

    def configure_optimizers(self) -> Any:
        """Create AdamW with a cosine schedule."""
        adamw = optimiser(self.model, self.learning_rate)
        # YOLOS updates the learning rate once per epoch.
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adamw, self.steps, eta_min=FINAL_LEARNING_RATE)
        return {"optimizer": adamw, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the norm of all gradients to `CLIP`, instead of Lightning's own clipping."""
        self.clip_gradients(optimizer, gradient_clip_val=CLIP, gradient_clip_algorithm="norm")

    def _mean_over_devices(self, value: Tensor) -> Tensor:
        return value if self.trainer.world_size == 1 else self.trainer.strategy.reduce(value, reduce_op="mean")


def optimiser(model: Any, learning_rate: float) -> torch.optim.AdamW:
    """Create AdamW for a `YolosForObjectDetection`.

    As in YOLOS, biases, norms, tokens and the first position embedding of the backbone have no weight decay; the two
    heads and the position embeddings between blocks do.
    """
    without_decay = [
        parameter
        for name, parameter in model.vit.named_parameters()
        if parameter.ndim == 1 or (name.startswith("embeddings.") and not name.endswith("projection.weight"))
    ]
    apart = {id(parameter) for parameter in without_decay}
    with_decay = [parameter for parameter in model.parameters() if id(parameter) not in apart]
    return torch.optim.AdamW(
        [{"params": with_decay}, {"params": without_decay, "weight_decay": 0.0}],
        lr=learning_rate,
        weight_decay=WEIGHT_DECAY,
    )
