"""Training of segmentation heads: loss, schedules, score, result rows and pictures."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchmetrics.classification import MulticlassConfusionMatrix

from cribo.base.console import Phases
from cribo.base.errors import DataError
from cribo.base.machine import is_first_process
from cribo.data.config import spread
from cribo.data.labelled.crops import (
    Crop,
    Crops,
    MMSegPreparation,
    Preparation,
    SquarePreparation,
    WholeImage,
    WholeImages,
)
from cribo.data.labelled.segmentation import IGNORE_INDEX
from cribo.evaluation.pictures import panel_of
from cribo.evaluation.protocol import Outcome, Protocol
from cribo.evaluation.results import EvaluationResult, best_place, percent, setting_value
from cribo.evaluation.run import Run
from cribo.evaluation.segmentation.config import SegmentationTrainingSettings, scale_of
from cribo.evaluation.segmentation.inference import Inference, segment_pixels
from cribo.evaluation.segmentation.rules import PAPER, Rules
from cribo.evaluation.segmentation.segmenter import MaskTransformer
from cribo.evaluation.training import fit
from cribo.features.scores import iou, mean_iou
from cribo.models import Backbone, normalise
from cribo.models.backbone import drop_feed_forward_only
from cribo.training.module import ResumableModule

POWER = 0.9
LAST_RATE = 0.1
MOMENTUM = 0.9

_BUDGET = 2**29  # maximum bytes of upsampled logits and their gradients


@dataclass(frozen=True, kw_only=True)
class SegmentationTraining(SegmentationTrainingSettings, Protocol):
    """Common parts of linear segmentation and Segmenter."""

    @property
    def windows(self) -> Inference:
        """Inference mode for scoring."""
        stretch = self.rules.stretches_windows
        return Inference(self.inference, window=self.crop, stride=self.stride, stretch=stretch)

    def prepare(self, run: Run) -> Self:
        """Set all settings that are None, and check that both splits have labels."""
        for split in ("train", "val"):
            images = getattr(run.data, split)
            # Reads label maps up to the first one with a labelled pixel.
            if not any(bool((images.labels(index) != images.ignore_index).any()) for index in range(len(images))):
                name = run.data.about[split]
                raise DataError(
                    f"all labels of the {len(images)} images of {name} are ignored: no head can be trained or scored"
                )
        return self.for_data(run.data.about["name"], run.backbone)

    def used(self, run: Run) -> dict[str, Any]:
        """Return the settings, including those that depend on the data."""
        return {
            **dataclasses.asdict(self),
            "scale": None if self.rules.mask_size else scale_of(run.data.about["name"]),
            "optimiser": self.rules.optimiser,
            "stride": self.stride if self.inference == "slide" else None,
        }

    def report(self, result: EvaluationResult) -> list[Any]:
        """Return the best learning rate, if there is more than one."""
        if len(result.results) == 1:
            return []
        rate = setting_value(result.best["learning_rate"])
        return [f"  best         mIoU {percent(result.best['miou'])} % at learning rate {rate}"]


class SegmentationModule(ResumableModule):
    """Trains one or more segmentation heads at once, and scores them on whole images.

    Subclasses define `logits` and `parameter_groups`.

    Args:
        backbone: backbone of the features.
        classes: C, number of classes.
        heads: names of the heads, for curves and messages.
        steps: total number of training steps, for the learning rate schedule.
        inference: inference mode, whole images or windows.
        rules: rules of the variant.

    Attributes:
        confusions: confusion matrix of each head (labels in rows) over all images and ranks, from the last validation.
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
        self._scores: Sequence[Any] = nn.ModuleList(  # pyright: ignore[reportAttributeAccessIssue]
            MulticlassConfusionMatrix(classes, IGNORE_INDEX, validate_args=False) for _ in heads
        )

    def logits(
        self, images: Float[Tensor, "b chans h w"], *, drop_path_noise: Float[Tensor, "b sites"] | None = None
    ) -> Float[Tensor, "heads b c rows columns"]:
        """Return the logits of each class on the grid of patches, for each head.

        Args:
            images: normalised images; height and width are multiples of the patch size.
            drop_path_noise: uniform random numbers, as in `Backbone.encode`; None disables drop path.
        """
        raise NotImplementedError

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups of the optimiser, each with its learning rate `lr`."""
        raise NotImplementedError

    def training_step(self, batch: Crop, batch_idx: int) -> Float[Tensor, ""]:
        """Return the sum of the heads' losses; without shared parameters, heads train independently."""
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

    def segment(
        self, pixels: UInt8[Tensor, "chans h w"], size: tuple[int, int]
    ) -> UInt8[Tensor, "heads label_h label_w"]:
        """Return the class of each pixel of an image, for each head.

        Args:
            pixels: RGB image, resized to the scale of the data set (`WholeImages`), on the device of the module.
            size: (height, width) of the result.
        """
        return segment_pixels(pixels, self.backbone, self.logits, size, self.inference)

    def validation_step(self, batch: WholeImage, batch_idx: int) -> None:
        """Add the pixels of an image to the confusion matrices."""
        (pixels,), (labels,) = batch
        predicted = self.segment(pixels, (labels.shape[0], labels.shape[1]))
        for score, found in zip(self._scores, predicted, strict=True):
            score.update(found, labels)

    def on_validation_epoch_end(self) -> None:
        """Reduce the confusion matrices over all ranks, and log the mIoU."""
        self.confusions = []
        for score in self._scores:
            self.confusions.append(score.compute().cpu())
            score.reset()
        for name, miou in zip(self.head_names, self.mious(), strict=True):
            self.log("miou" if len(self.head_names) == 1 else f"miou/{name}", miou)

    def mious(self) -> list[float]:
        """Return the mIoU of each head in the last validation."""
        return list(map(mean_iou, self.confusions))

    def configure_optimizers(self) -> Any:
        """Create Adam or SGD with L2 regularisation, and the learning rate schedule."""
        kinds = {"adam": torch.optim.Adam, "sgd": partial(torch.optim.SGD, momentum=MOMENTUM)}
        optimizer = kinds[self.rules.optimiser](self.parameter_groups(), weight_decay=self.rules.weight_decay)
        decay = {"polynomial": polynomial_decay, "step": step_decay}[self.rules.rate_decay]
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, decay(self.steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def polynomial_decay(steps: int, power: float = POWER, last: float = LAST_RATE) -> Callable[[int], float]:
    """Return the polynomial learning rate factor, from 1 at the first to `last` at the last step (PolyLR).

    Example:
        >>> [round(polynomial_decay(3)(step), 3) for step in range(4)]
        [1.0, 0.582, 0.1, 0.1]
    """

    def factor(step: int) -> float:
        left = max(0.0, 1 - step / (steps - 1)) if steps > 1 else 1.0
        return last + (1 - last) * left**power

    return factor


def step_decay(steps: int, last: float = LAST_RATE) -> Callable[[int], float]:
    """Return the step-wise learning rate factor: 1, and `last` from four fifths of the steps on.

    Example:
        >>> [step_decay(10)(step) for step in (0, 7, 8, 9)]
        [1.0, 1.0, 0.1, 0.1]
    """
    return lambda step: last if 5 * step >= 4 * steps else 1.0


def pixel_cross_entropy(
    logits: Float[Tensor, "b c rows columns"], labels: UInt8[Tensor, "b h w"], count: Float[Tensor, ""] | None = None
) -> Float[Tensor, ""]:
    """Return the mean cross-entropy over pixels, with bilinearly upsampled logits.

    Unlabelled pixels have a loss of 0 but count in the mean, as in MMSegmentation, unless a count is given. To bound
    memory, logits are upsampled for a few images at a time, and again in the backward pass.

    Args:
        logits: logits on the grid of patches, of any dtype; the loss is computed in float32.
        labels: class of each pixel, `IGNORE_INDEX` for none.
        count: divisor of the sum; the number of all pixels if None.

    Example:
        >>> pixel_cross_entropy(torch.zeros(1, 4, 2, 2), torch.tensor([[[0, 3], [1, 255]]], dtype=torch.uint8))
        tensor(1.0397)
    """
    # Logits, log-probabilities and both gradients, in float32.
    image_bytes = 4 * 4 * logits.shape[1] * labels.shape[1] * labels.shape[2]
    parts = (part.split(max(1, _BUDGET // image_bytes)) for part in (logits, labels))
    losses = [
        checkpoint(_summed_cross_entropy, *part, use_reentrant=False, preserve_rng_state=False)
        for part in zip(*parts, strict=True)
    ]
    return torch.stack(losses).sum() / (labels.numel() if count is None else count)


def _summed_cross_entropy(
    logits: Float[Tensor, "b c rows columns"], labels: UInt8[Tensor, "b h w"]
) -> Float[Tensor, ""]:
    with torch.autocast(logits.device.type, enabled=False):
        full = F.interpolate(logits.float(), size=labels.shape[1:], mode="bilinear")
        return F.cross_entropy(full, labels.long(), ignore_index=IGNORE_INDEX, reduction="sum")


def labelled_pixels(labels: UInt8[Tensor, "b h w"]) -> Float[Tensor, ""]:
    """Return the number of labelled pixels of a batch, averaged over ranks, at least 1."""
    count = (labels != IGNORE_INDEX).sum().float()
    if dist.is_available() and dist.is_initialized():
        # DDP averages gradients over ranks, which yields the gradient of the mean over all labelled pixels.
        dist.all_reduce(count)
        count /= dist.get_world_size()
    return count.clamp(min=1)


def follow_rules(rules: Rules, backbone: Backbone, *decoders: MaskTransformer) -> None:
    """Apply the rules on normalisation and drop path to a backbone and its decoders, in place."""
    if rules.mean_std is not None:
        mean, std = rules.mean_std
        backbone.mean, backbone.std = (mean,) * 3, (std,) * 3
    if rules.drop_path_branches == "feed-forward":
        for network in (backbone, *decoders):
            drop_feed_forward_only(network)


def _inside(batch: Crop) -> Float[Tensor, "b 1 size size"]:
    """Return a mask that is 1 inside the image and 0 in the padding, since normalised images are padded with 0."""
    places = torch.arange(batch.pixels.shape[-1], device=batch.pixels.device)
    rows, columns = (places < batch.extent[:, side, None] for side in (0, 1))
    return (rows[:, None, :, None] & columns[:, None, None, :]).float()


def preparation(settings: SegmentationTrainingSettings, run: Run) -> Preparation:
    """Return the preparation of images for training and scoring."""
    rules, name, crop = settings.rules, run.data.about["name"], settings.crop
    if rules.mask_size is not None:
        return SquarePreparation(crop, rules.mask_size)
    size = settings.stride if name in rules.narrow_crops else crop
    return MMSegPreparation(size, scale_of(name), pad_to=crop, black_padding=name in rules.black_padding)


def train(
    module: SegmentationModule,
    settings: SegmentationTrainingSettings,
    run: Run,
    *,
    sites: int,
    folder: Path,
    label: str,
) -> torch.device:
    """Train and score a module, or resume its training; return its device.

    Args:
        module: trained in place.
        settings: settings of the protocol.
        run: the evaluation.
        sites: number of drop path sites of the network.
        folder: folder of the checkpoints and TensorBoard logs.
        label: label of the progress bar.
    """
    prepared = preparation(settings, run)
    trainer = fit(
        module,
        train=Crops(run.data.train, prepared, settings.seed, sites),
        validation=WholeImages(run.data.val, prepared),
        batch_size=settings.batch_size,
        steps=settings.iterations,
        seed=settings.seed,
        folder=folder,
        label=label,
        runtime=run.runtime,
        console=run.console,
    )
    return trainer.strategy.root_device


def rows_of(confusions: Mapping[float, Int[Tensor, "c c"]], run: Run) -> tuple[list[dict[str, Any]], int]:
    """Return the row of each learning rate and the index of the best one, which has the confusion matrix.

    Args:
        confusions: confusion matrices (labels in rows), by learning rate.
        run: the evaluation.
    """
    rows = []
    for rate, confusion in confusions.items():
        per_class = iou(confusion)
        rows.append(
            {
                "learning_rate": rate,
                "miou": float(per_class.nanmean()),
                "pixel_accuracy": float(confusion.diagonal().sum() / confusion.sum().clamp(min=1)),
                "per_class": dict(zip(run.data.train.classes, per_class.tolist(), strict=True)),
            }
        )
    best = best_place([row["miou"] for row in rows])
    rows[best]["confusion"] = list(confusions.values())[best].tolist()
    return rows, best


def outcome(
    rows: list[dict[str, Any]], segment: Callable[[int], UInt8[Tensor, "h w"]], run: Run, **more: Any
) -> Outcome:
    """Return the outcome of a protocol, with predictions for evenly spaced images of val.

    Args:
        rows: rows of the result.
        segment: returns the class of each pixel of an image of val, given its index; called on rank 0.
        run: the evaluation.
        more: further fields of the outcome.
    """
    panels, val = [], run.data.val
    shown = spread(len(val), run.num_pictures) if is_first_process() else []
    with Phases(run.console) as progress:
        for number, index in enumerate(shown, start=1):
            panels.append(panel_of(val, index, segment(index)))
            progress("pictures", number, len(shown))
    return Outcome(rows, run.data.train.classes, panels, val.palette, **more)
