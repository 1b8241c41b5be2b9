"""Common to the training of segmentations: loss, schedule and score."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from cribo.data.crops import Crop, WholeImage
from cribo.data.segmentation import IGNORE_INDEX
from cribo.evaluation.scores import Confusion, mean_iou
from cribo.evaluation.segmentation.inference import Inference, segment_pixels
from cribo.evaluation.training import TrainedModule
from cribo.models import Backbone, normalise

POWER = 0.9
LAST_RATE = 0.1

_BUDGET = 2**29  # bytes of upsampled logits, and what goes with them, that are alive at once


class SegmentationModule(TrainedModule):
    """Trains one or more segmentation heads at once, and scores them on whole images.

    Subclasses define `logits` and `parameter_groups`.

    Args:
        backbone: gives the features.
        classes: C.
        heads: a name for each head, for curves and messages.
        steps: of the whole training; the learning rates fall until the last one.
        inference: how images are looked at for the score.

    Attributes:
        confusions: of each head, labels (rows) against predictions, over all images and processes, of the last score.
    """

    def __init__(
        self, backbone: Backbone, *, classes: int, heads: Sequence[str], steps: int, inference: Inference
    ) -> None:
        super().__init__()
        self.backbone, self.classes, self.steps, self.inference = backbone, classes, steps, inference
        self.head_names = tuple(heads)
        self.confusions: list[Int[Tensor, "c c"]] = []
        self._scores: Sequence[Confusion] = nn.ModuleList(  # pyright: ignore[reportAttributeAccessIssue]
            Confusion(classes, IGNORE_INDEX) for _ in heads
        )

    def logits(self, images: Float[Tensor, "b 3 h w"]) -> Float[Tensor, "heads b c rows columns"]:
        """The logits of each class on the grid of patches, by each head.

        Args:
            images: normalised; height and width are multiples of the patch size.
        """
        raise NotImplementedError

    def parameter_groups(self) -> list[dict[str, Any]]:
        """The parameters for Adam, each group with its learning rate, `lr`."""
        raise NotImplementedError

    def training_step(self, batch: Crop, batch_idx: int) -> Float[Tensor, ""]:
        """The sum of the heads' losses: heads that share nothing trainable are trained as each would be alone."""
        images = normalise(batch.pixels.float().div_(255), mean=self.backbone.mean, std=self.backbone.std)
        images = images * _inside(batch)
        losses = [pixel_cross_entropy(head, batch.labels) for head in self.logits(images)]
        if len(losses) > 1:
            for name, loss in zip(self.head_names, losses, strict=True):
                self.log(f"loss/{name}", loss.detach())
        total = torch.stack(losses).sum()
        self.log("loss", total.detach() / len(losses), prog_bar=True)
        return total

    def segment(self, pixels: UInt8[Tensor, "3 h w"], size: tuple[int, int]) -> UInt8[Tensor, "heads label_h label_w"]:
        """The class of each pixel of an image, by each head.

        Args:
            pixels: RGB, resized within the scale of the set (`WholeImages`), on the device of the module.
            size: (height, width) of the result.
        """
        return segment_pixels(pixels, self.backbone, self.logits, size, self.inference)

    def validation_step(self, batch: WholeImage, batch_idx: int) -> None:
        """Count the pixels of an image."""
        (pixels,), (labels,) = batch
        predicted = self.segment(pixels, (labels.shape[0], labels.shape[1]))
        for score, found in zip(self._scores, predicted, strict=True):
            score.update(labels, found)

    def on_validation_epoch_end(self) -> None:
        """Sum the counts of all processes."""
        self.confusions = []
        for score in self._scores:
            self.confusions.append(score.compute().cpu())
            score.reset()
        for name, miou in zip(self.head_names, self.mious(), strict=True):
            self.log("miou" if len(self.head_names) == 1 else f"miou/{name}", miou)

    def mious(self) -> list[float]:
        """The mIoU of each head in the last score."""
        return list(map(mean_iou, self.confusions))

    def configure_optimizers(self) -> Any:
        """Adam with polynomial decay of the learning rates."""
        optimizer = torch.optim.Adam(self.parameter_groups())
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, polynomial_decay(self.steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def polynomial_decay(steps: int, power: float = POWER, last: float = LAST_RATE) -> Callable[[int], float]:
    """The factor of the learning rate at each step: 1 at the first, `last` at the last (MMSegmentation's PolyLR).

    Example:
        >>> [round(polynomial_decay(3)(step), 3) for step in range(4)]
        [1.0, 0.582, 0.1, 0.1]
    """

    def factor(step: int) -> float:
        left = max(0.0, 1 - step / (steps - 1)) if steps > 1 else 1.0
        return last + (1 - last) * left**power

    return factor


def pixel_cross_entropy(logits: Float[Tensor, "b c rows columns"], labels: UInt8[Tensor, "b h w"]) -> Float[Tensor, ""]:
    """Mean cross-entropy over all pixels of logits that are upsampled bilinearly.

    Pixels without class have none but count in the mean, as in MMSegmentation. To bound memory, the gradient is
    computed together with the loss, some images at a time; only logits on the grid are kept for the backward pass.

    Args:
        logits: on the grid of patches, of any type; computed in float32.
        labels: class of each pixel, `IGNORE_INDEX` for none.

    Example:
        >>> pixel_cross_entropy(torch.zeros(1, 4, 2, 2), torch.tensor([[[0, 3], [1, 255]]], dtype=torch.uint8))
        tensor(1.0397)
    """
    return _PixelCrossEntropy.apply(logits, labels)


class _PixelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, logits: Tensor, labels: Tensor) -> Tensor:
        gradient = torch.empty_like(logits, dtype=torch.float32)
        total = torch.zeros((), device=logits.device)
        # The logits, their logarithms and both gradients.
        image_bytes = 4 * 4 * logits.shape[1] * labels.shape[1] * labels.shape[2]
        with torch.enable_grad(), torch.autocast(logits.device.type, enabled=False):
            for images in torch.arange(len(logits)).split(max(1, _BUDGET // image_bytes)):
                part = slice(int(images[0]), int(images[-1]) + 1)
                coarse = logits[part].detach().float().requires_grad_()
                full = F.interpolate(coarse, size=labels.shape[1:], mode="bilinear")
                loss = F.cross_entropy(full, labels[part].long(), ignore_index=IGNORE_INDEX, reduction="sum")
                loss = loss / labels.numel()
                (gradient[part],) = torch.autograd.grad(loss, coarse)
                total += loss.detach()
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (gradient,) = ctx.saved_tensors
        return gradient * grad, None


def _inside(batch: Crop) -> Float[Tensor, "b 1 size size"]:
    """1 inside the image, 0 beyond: normalised images are padded with 0."""
    places = torch.arange(batch.pixels.shape[-1], device=batch.pixels.device)
    rows, columns = (places < batch.extent[:, side, None] for side in (0, 1))
    return (rows[:, None, :, None] & columns[:, None, None, :]).float()
