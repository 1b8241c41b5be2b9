"""Common to the training of segmentations: loss, schedule and score."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.utils.data import Dataset

from cribo.data.crops import LabelledCrops, WholeImage
from cribo.data.randomness import keyed_generator
from cribo.data.segmentation import IGNORE_INDEX
from cribo.data.squares import SquareCrops
from cribo.evaluation.scores import Confusion, mean_iou
from cribo.evaluation.segmentation.inference import Inference, segment_pixels
from cribo.evaluation.segmentation.mask_transformer import MaskTransformer
from cribo.evaluation.segmentation.rules import PAPER, Rules
from cribo.evaluation.training import TrainedModule
from cribo.models import Backbone, normalise
from cribo.models.backbone import drop_feed_forward_only

POWER = 0.9
LAST_RATE = 0.1
MOMENTUM = 0.9

_BUDGET = 2**29  # bytes of upsampled logits, and what goes with them, that are alive at once
_NOISE = 0x64726F70  # separates these draws from others of the same seed


class NoisyCrop(NamedTuple):
    """A `Crop`, with a uniform number for each site of drop path."""

    pixels: UInt8[Tensor, "3 size size"]
    labels: UInt8[Tensor, "mask mask"]
    extent: Int[Tensor, "2"]
    drop_path_noise: Float[Tensor, " sites"]


@dataclass
class NoisyCrops(Dataset[NoisyCrop]):
    """Crops with noise for `sites` of drop path; draws depend on seed, epoch and index alone."""

    crops: LabelledCrops | SquareCrops
    sites: int

    def __len__(self) -> int:
        return len(self.crops)

    def __getitem__(self, key: tuple[int, int]) -> NoisyCrop:
        noise = torch.rand(self.sites, generator=keyed_generator(_NOISE, self.crops.seed, *key))
        return NoisyCrop(*self.crops[key], noise)


class SegmentationModule(TrainedModule):
    """Trains one or more segmentation heads at once, and scores them on whole images.

    Subclasses define `logits` and `parameter_groups`.

    Args:
        backbone: gives the features.
        classes: C.
        heads: a name for each head, for curves and messages.
        steps: of the whole training; the learning rates fall until the last one.
        inference: how images are scored, whole or in windows.
        rules: of the variant.

    Attributes:
        confusions: of each head, labels (rows) against predictions, over all images and processes, of the last score.
    """

    def __init__(
        self,
        backbone: Backbone,
        *,
        classes: int,
        heads: Sequence[str],
        steps: int,
        inference: Inference,
        rules: Rules = PAPER,
    ) -> None:
        super().__init__()
        self.backbone, self.classes, self.steps, self.inference = backbone, classes, steps, inference
        self.rules = rules
        self.head_names = tuple(heads)
        self.confusions: list[Int[Tensor, "c c"]] = []
        self._scores: Sequence[Confusion] = nn.ModuleList(  # pyright: ignore[reportAttributeAccessIssue]
            Confusion(classes, IGNORE_INDEX) for _ in heads
        )

    def logits(
        self, images: Float[Tensor, "b 3 h w"], *, drop_path_noise: Float[Tensor, "b sites"] | None = None
    ) -> Float[Tensor, "heads b c rows columns"]:
        """The logits of each class on the grid of patches, by each head.

        Args:
            images: normalised; height and width are multiples of the patch size.
            drop_path_noise: uniform numbers, as for `Backbone.encode`; None drops nothing.
        """
        raise NotImplementedError

    def parameter_groups(self) -> list[dict[str, Any]]:
        """The parameters for Adam, each group with its learning rate, `lr`."""
        raise NotImplementedError

    def training_step(self, batch: NoisyCrop, batch_idx: int) -> Float[Tensor, ""]:
        """The sum of the heads' losses: heads that share nothing trainable are trained as each would be alone."""
        images = normalise(batch.pixels.float().div_(255), mean=self.backbone.mean, std=self.backbone.std)
        images = images * _inside(batch)
        noise = batch.drop_path_noise if batch.drop_path_noise.shape[1] else None
        count = labelled_pixels(batch.labels) if self.rules.labelled_mean else None
        losses = [pixel_cross_entropy(head, batch.labels, count) for head in self.logits(images, drop_path_noise=noise)]
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
        """Create Adam or SGD with L2 regularisation, and the schedule of the learning rates."""
        kinds = {"adam": torch.optim.Adam, "sgd": partial(torch.optim.SGD, momentum=MOMENTUM)}
        optimizer = kinds[self.rules.optimiser](self.parameter_groups(), weight_decay=self.rules.weight_decay)
        decay = {"polynomial": polynomial_decay, "step": step_decay}[self.rules.rate_decay]
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, decay(self.steps))
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


def step_decay(steps: int, last: float = LAST_RATE) -> Callable[[int], float]:
    """The factor of the learning rate at each step: 1, and `last` from four fifths of the steps on.

    Example:
        >>> [step_decay(10)(step) for step in (0, 7, 8, 9)]
        [1.0, 1.0, 0.1, 0.1]
    """
    return lambda step: last if 5 * step >= 4 * steps else 1.0


def pixel_cross_entropy(
    logits: Float[Tensor, "b c rows columns"], labels: UInt8[Tensor, "b h w"], count: Float[Tensor, ""] | None = None
) -> Float[Tensor, ""]:
    """Mean cross-entropy over the pixels of logits that are upsampled bilinearly.

    Pixels without class have none, but count in the mean, as in MMSegmentation, unless a count is given. To bound
    memory, the gradient is computed together with the loss, some images at a time; only logits on the grid are kept
    for the backward pass.

    Args:
        logits: on the grid of patches, of any type; computed in float32.
        labels: class of each pixel, `IGNORE_INDEX` for none.
        count: by which the sum is divided; that of all pixels if None.

    Example:
        >>> pixel_cross_entropy(torch.zeros(1, 4, 2, 2), torch.tensor([[[0, 3], [1, 255]]], dtype=torch.uint8))
        tensor(1.0397)
    """
    return _PixelCrossEntropy.apply(logits, labels, labels.numel() if count is None else count)


def labelled_pixels(labels: UInt8[Tensor, "b h w"]) -> Float[Tensor, ""]:
    """Count the pixels with a class in the batches of all processes, as the mean over processes, at least 1."""
    count = (labels != IGNORE_INDEX).sum().float()
    if dist.is_available() and dist.is_initialized():
        # Gradients are averaged over processes: this makes theirs that of the mean over all labelled pixels.
        dist.all_reduce(count)
        count /= dist.get_world_size()
    return count.clamp(min=1)


class _PixelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, logits: Tensor, labels: Tensor, count: Tensor | int) -> Tensor:
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
                loss = loss / count
                (gradient[part],) = torch.autograd.grad(loss, coarse)
                total += loss.detach()
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (gradient,) = ctx.saved_tensors
        return gradient * grad, None, None


def follow_rules(rules: Rules, backbone: Backbone, *decoders: MaskTransformer) -> None:
    """Set the normalisation of a backbone and the branches with drop path, its own and those of decoders, in place."""
    if rules.mean_std is not None:
        mean, std = rules.mean_std
        backbone.mean, backbone.std = (mean,) * 3, (std,) * 3
    if rules.drop_path_branches == "feed-forward":
        for network in (backbone, *decoders):
            drop_feed_forward_only(network)


def _inside(batch: NoisyCrop) -> Float[Tensor, "b 1 size size"]:
    """1 inside the image, 0 beyond: normalised images are padded with 0."""
    places = torch.arange(batch.pixels.shape[-1], device=batch.pixels.device)
    rows, columns = (places < batch.extent[:, side, None] for side in (0, 1))
    return (rows[:, None, :, None] & columns[:, None, None, :]).float()
