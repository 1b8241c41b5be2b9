"""What the training of every segmentation has: its loss, its schedule, its score."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torchmetrics.classification import MulticlassConfusionMatrix

from cribo.data.crops import Crop, WholeImage
from cribo.data.segmentation import IGNORE_INDEX
from cribo.evaluation.results import iou
from cribo.evaluation.segmentation.inference import segment_image
from cribo.evaluation.segmentation.modes import Inference
from cribo.evaluation.training import TrainedModule
from cribo.models import Backbone, normalise

POWER = 0.9
LAST_RATE = 0.1

_BUDGET = 2**29  # bytes of upsampled logits, and what goes with them, that are alive at once


class SegmentationModule(TrainedModule):
    """Trains one or more segmentation heads at once, and scores them on whole images.

    A derived class says what the logits are (`logits`) and what is optimised (`parameter_groups`).

    Args:
        backbone: whose features are segmented.
        classes: C.
        heads: a name for each head, for curves and messages.
        steps: of the whole training; the learning rates fall until the last one.
        inference: how images are looked at for the score.

    Attributes:
        confusions: of each head, labels (rows) against predictions, over all images and processes, from the last
            time that all were scored.
    """

    def __init__(
        self, backbone: Backbone, *, classes: int, heads: Sequence[str], steps: int, inference: Inference
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.classes = classes
        self.steps = steps
        self.inference = inference
        self.head_names = tuple(heads)
        self.confusions: list[Int[Tensor, "c c"]] = []
        self._scores: Sequence[MulticlassConfusionMatrix] = nn.ModuleList(  # pyright: ignore[reportAttributeAccessIssue]
            MulticlassConfusionMatrix(classes, ignore_index=IGNORE_INDEX, validate_args=False) for _ in heads
        )
        self.divisor = backbone.patch_size if backbone.takes_any_size else backbone.image_size

    def logits(self, images: Float[Tensor, "b 3 h w"]) -> Float[Tensor, "heads b c rows columns"]:
        """The logits of each class on the grid of patches, by each head.

        Args:
            images: normalised; height and width are multiples of `divisor`.
        """
        raise NotImplementedError

    def parameter_groups(self) -> list[dict[str, Any]]:
        """What Adam optimises, each group with its learning rate, `lr`."""
        raise NotImplementedError

    def normalised(self, pixels: UInt8[Tensor, "b 3 h w"]) -> Float[Tensor, "b 3 h w"]:
        """Images as the backbone expects them."""
        return normalise(pixels.float().div_(255), mean=self.backbone.mean, std=self.backbone.std)

    def training_step(self, batch: Crop, batch_idx: int) -> Float[Tensor, ""]:
        """The sum of the heads' losses: heads that share nothing trainable are trained as each would be alone."""
        images = self.normalised(batch.pixels) * _inside(batch)
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
        image = self.normalised(pixels[None])[0]
        return segment_image(image, self.logits, size, self.inference, divisor=self.divisor)

    def validation_step(self, batch: WholeImage, batch_idx: int) -> None:
        """Count labels against predictions of one image."""
        (pixels,), (labels,) = batch
        predicted = self.segment(pixels, (labels.shape[0], labels.shape[1]))
        for score, found in zip(self._scores, predicted, strict=True):
            score.update(found.long(), labels.long())

    def on_validation_epoch_end(self) -> None:
        """Sum what all processes have counted."""
        self.confusions = []
        for score in self._scores:
            self.confusions.append(score.compute().cpu())
            score.reset()
        for name, miou in zip(self.head_names, self.mious(), strict=True):
            self.log("miou" if len(self.head_names) == 1 else f"miou/{name}", miou)

    def mious(self) -> list[float]:
        """Of each head, from the last time that all images were scored."""
        return [float(iou(confusion).nanmean()) for confusion in self.confusions]

    def configure_optimizers(self) -> Any:
        """Adam, its learning rates falling as a polynomial of the step."""
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
    """Cross-entropy of logits that are upsampled to the pixels (bilinearly), the mean over all pixels.

    Pixels without class have none, and are counted in the mean, as in MMSegmentation, so that every labelled pixel
    of a batch weighs the same. The upsampled logits of all images are never alive at once: the gradient is
    computed with the loss, some images at a time, and with it only the logits on the grid are kept.

    Args:
        logits: on the grid of patches; computed in float32 whatever their type is.
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
    """1 where a crop lies in its image, 0 beyond: 0 is what normalised images are filled with."""
    places = torch.arange(batch.pixels.shape[-1], device=batch.pixels.device)
    rows, columns = (places < batch.extent[:, side, None] for side in (0, 1))
    return (rows[:, None, :, None] & columns[:, None, None, :]).float()
