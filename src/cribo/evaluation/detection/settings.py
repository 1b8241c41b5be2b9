"""Settings and schedules of object detection. This module does not import torch."""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self

from cribo.base.bounds import above, at_least
from cribo.evaluation.runtime import Schedule
from cribo.evaluation.settings import UNDECIDED, Decided, Settings

METRICS = ("ap", "ap50", "ap75")

ADVICE = "choose a vision transformer with a [CLS] token and no registers, such as vit_small_patch16_224"
"""Advice for networks that are not supported by YOLOS."""

# The paper's schedule is that of YOLOS-S (command in YOLOS's README), with the batch size of CrIBo (appendix "Object
# detection with YOLO-S": 32 instead of 8). The short schedule trains a small network on a CPU in minutes, with small
# images, small batches for more steps, and a higher learning rate.
SCHEDULES: dict[Schedule, dict[str, Any]] = {
    "paper": {"epochs": 150, "batch_size": 32, "learning_rate": 2.5e-5, "size": 800, "tokens": 100},
    "short": {"epochs": 40, "batch_size": 8, "learning_rate": 2e-4, "size": 256, "tokens": 100},
}
# For all schedules; the defaults of YOLOS's `main.py`.
FINAL_LEARNING_RATE = 1e-7
WEIGHT_DECAY = 1e-4
CLIP = 0.1  # maximum norm of the gradients


@dataclass(frozen=True, kw_only=True)
class DetectionSettings(Settings):
    """Settings of object detection with YOLOS.

    Attributes:
        schedule: paper (YOLOS-S on COCO, days on a GPU) or short (small images, for a small machine). It sets the
            defaults of the next five options, see [brackets].
        epochs: number of epochs. [150, short: 40]
        batch_size: number of images per step, over all devices. [32, short: 8]
        learning_rate: initial learning rate of a cosine schedule. If the loss stagnates or diverges, multiply or
            divide it by three. [2.5e-5, short: 2e-4]
        size: shorter side of validation images in pixels; in training, it varies from 0.6 to 1 times this size. Small
            objects require large images; the cost of attention grows with the fourth power. [800, short: 256]
        tokens: number of detection tokens, the maximum number of objects per image. [100]
        checkpointing: recompute activations in the backward pass; a third more computation, much less memory.
        seed: seed of the new weights, the order of the images and their augmentation.
    """

    name: ClassVar[str] = "detection"

    schedule: Schedule = "paper"
    epochs: Decided[Annotated[int, at_least(1)]] = UNDECIDED
    batch_size: Decided[Annotated[int, at_least(1)]] = UNDECIDED
    learning_rate: Decided[Annotated[float, above(0)]] = UNDECIDED
    size: Decided[Annotated[int, at_least(1)]] = UNDECIDED
    tokens: Decided[Annotated[int, at_least(1)]] = UNDECIDED
    checkpointing: bool = False
    seed: int = 0

    def scheduled(self) -> Self:
        """Return a copy with all settings set, with the defaults of the schedule."""
        return self.decided(SCHEDULES[self.schedule])
