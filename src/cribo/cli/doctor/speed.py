"""Measured speed of this machine, and the expected durations of pretrain, adapt and segment.

A few steps and images of the real commands are timed, with random weights and images in memory. Reading and writing of
files are not included. Each expected duration is a sum of measured times (docs/doctor.md):

    pretrain   images / second = batch / (update + batch x image)
    adapt      encoded images x encode + agreements x agreement + steps x step
    segment    images / second = 1 / image
"""

import logging
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from cribo.apps.adapt.closed_form import POWERS, STATISTICS_IMAGES
from cribo.apps.adapt.config import AdaptConfig
from cribo.apps.adapt.encoding import PATCHES, encode
from cribo.apps.adapt.pictures import PICTURED_IMAGES
from cribo.apps.adapt.run import MOST_STEPS
from cribo.apps.segment import SegmentationMemory, SegmentationSettings
from cribo.base.console import Progress, log_level, no_progress
from cribo.base.devices import multiplies_bfloat16, resolve_device
from cribo.cli.doctor.findings import GIB, described
from cribo.models import Backbone, build_backbone
from cribo.pretraining.agreement import INDICATOR_IMAGES, neighbour_agreement
from cribo.pretraining.loading import load_config
from cribo.pretraining.planning import TIMED_STEPS, seconds_per_step
from cribo.pretraining.profiling import profile
from cribo.pretraining.session import Session

PRETRAINED, ADAPTED = "coco_vits16", "vit_small_patch14_dinov2"
"""Preset of the pretraining and network of the adaptation and segmentation that are timed."""

OBJECTS = 16
"""Number of objects per image in the timed pretraining."""

IMAGE = (480, 640)
"""Height and width in pixels of the images that are encoded."""

_SECONDS = 1.0  # for repeated encodings of one kind
_PER_STEP = ("optimiser", "moving average", "centres")  # parts of a step that do not depend on the images
_SMALL_BANK = 5_000  # images; the search is scaled to the bank of the preset
_LARGE_GPU = 20 * GIB
_POINTS = 64  # per image, as in `neighbour_agreement` of an adaptation


@dataclass
class Speed:
    """Measured times on a device; None for what could not be measured.

    Attributes:
        device: the device.
        precision: precision of training.
        pretrain_batch: number of images per step of the preset.
        pretrain_image: seconds of a pretraining step per image.
        pretrain_update: seconds per step of the optimiser and the moving averages, for any number of images.
        adapt_step: seconds of a training step of `cribo adapt`.
        adapt_encode: seconds to encode an image of about 432 patches.
        adapt_agreement: seconds to compute the neighbour agreement of one candidate.
        segment_image: seconds to label an image of 640 x 480 pixels.
        seconds: duration of the test.
        failures: the error of each measurement that failed, by command.
    """

    device: str
    precision: Literal["bf16-mixed", "32-true"]
    pretrain_batch: int = 256
    pretrain_image: float | None = None
    pretrain_update: float | None = None
    adapt_step: float | None = None
    adapt_encode: float | None = None
    adapt_agreement: float | None = None
    segment_image: float | None = None
    seconds: float = 0.0
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def pretrain_rate(self) -> float | None:
        """Images per second of the pretraining."""
        if self.pretrain_image is None or self.pretrain_update is None:
            return None
        return self.pretrain_batch / (self.pretrain_update + self.pretrain_batch * self.pretrain_image)

    @property
    def segment_rate(self) -> float | None:
        """Labelled images per second."""
        return None if self.segment_image is None else 1 / self.segment_image

    def adaptation(self, minutes: float = AdaptConfig.minutes) -> "Adaptation | None":
        """Return the expected course of `cribo adapt --minutes`, on 300 images or more."""
        if self.adapt_step is None or self.adapt_encode is None or self.adapt_agreement is None:
            return None
        # Pairs of views have 2 x 256 patches.
        pair = 512 / PATCHES * self.adapt_encode
        candidates = 7 * len(POWERS) + 1  # the upper half of twelve blocks, and the original network
        statistics_seconds = STATISTICS_IMAGES * self.adapt_encode
        closed_form = statistics_seconds + INDICATOR_IMAGES * pair + candidates * self.adapt_agreement
        steps = int(min(MOST_STEPS, max(0.0, 60 * minutes - 2 * closed_form) / self.adapt_step))
        indicators = INDICATOR_IMAGES * (pair + self.adapt_encode) + self.adapt_agreement
        return Adaptation(
            steps=steps,
            closed_form=closed_form,
            training=(steps + 2 * TIMED_STEPS) * self.adapt_step,
            verdict=statistics_seconds + 3 * indicators + 2 * PICTURED_IMAGES * self.adapt_encode,
        )


@dataclass(frozen=True)
class Adaptation:
    """Expected course of an adaptation.

    Attributes:
        steps: number of training steps.
        closed_form: seconds of the closed form.
        training: seconds of the training, with the steps that are timed to plan it.
        verdict: seconds of the rest.
    """

    steps: int
    closed_form: float
    training: float
    verdict: float

    @property
    def seconds(self) -> float:
        """Duration in total."""
        return self.closed_form + self.training + self.verdict


def measure_speed(device: Literal["cpu", "cuda"] | None = None, progress: Progress = no_progress) -> Speed:
    """Time a few steps and images of `cribo pretrain`, `cribo adapt` and `cribo segment`.

    Args:
        device: the device; by default the first GPU, else the CPU.
        progress: called with the phase, the number of measurements done and their total.

    Raises:
        ConfigError: the device is unavailable.
    """
    begun = time.perf_counter()
    name = resolve_device(device)
    on_gpu = torch.device(name).type == "cuda"
    speed = Speed(name, "bf16-mixed" if on_gpu or multiplies_bfloat16() else "32-true")
    measurements: dict[str, Callable[[Speed], None]] = {
        "pretrain": _time_pretraining,
        "adapt": _time_adaptation,
        "segment": _time_segmentation,
    }
    for done, (command, measure) in enumerate(measurements.items()):
        progress("speed test", done, len(measurements))
        # Warnings about the settings of the test are suppressed.
        with log_level(logging.ERROR, "cribo"), warnings.catch_warnings(action="ignore"):
            try:
                measure(speed)
            except Exception as error:  # such as out of memory; the others may succeed
                speed.failures[command] = described(error)
    progress("speed test", len(measurements), len(measurements))
    speed.seconds = time.perf_counter() - begun
    return speed


def _time_pretraining(speed: Speed) -> None:
    """Time steps of the preset with fewer images and, unless the GPU is large, a smaller bank."""
    preset = load_config(PRETRAINED)
    full_bank = preset.objects.bank_images
    assert full_bank is not None
    on_gpu = speed.device != "cpu"
    is_large = on_gpu and torch.cuda.get_device_properties(0).total_memory >= _LARGE_GPU
    bank = full_bank if is_large else _SMALL_BANK
    batch = 64 if is_large else 16 if on_gpu else 4
    changes = {"optim.batch_size": batch, "objects.group_size": min(batch, preset.objects.group_size)}
    config = load_config(PRETRAINED, _in_memory(speed, batch) | changes | {"objects.bank_images": bank})
    steps = 5 if on_gpu else 2
    parts = profile(config, kept=[OBJECTS], steps=steps, warmup=2, loader_seconds=0).steps[0].parts
    of_images = sum(seconds for part, seconds in parts.items() if part not in (*_PER_STEP, "waiting for data"))
    of_images += parts["retrieval"] * (full_bank / bank - 1)
    speed.pretrain_batch = preset.optim.batch_size
    speed.pretrain_update = sum(parts[part] for part in _PER_STEP)
    speed.pretrain_image = of_images / batch


def _time_adaptation(speed: Speed) -> None:
    """Time the encoding of an image, the agreement of a candidate, and training steps."""
    backbone = build_backbone(ADAPTED, image_size=224).to(speed.device).eval()
    image = torch.randint(256, (3, *IMAGE), dtype=torch.uint8)
    speed.adapt_encode = _seconds(lambda: encode(backbone, image), speed.device)
    points = torch.randn(INDICATOR_IMAGES, 2, _POINTS, backbone.embed_dim)
    speed.adapt_agreement = _seconds(lambda: neighbour_agreement(points), "cpu")
    recipe = load_config("adapt")
    network = {"backbone.name": ADAPTED, "backbone.pretrained": None}
    config = load_config("adapt", _in_memory(speed, recipe.optim.batch_size) | network)
    speed.adapt_step = seconds_per_step(Session(config), steps=8 if speed.device != "cpu" else 2)


def _time_segmentation(speed: Speed) -> None:
    """Time the labelling of an image by two examples."""
    backbone: Backbone = build_backbone(ADAPTED, image_size=224).to(speed.device).eval()
    settings = SegmentationSettings(blocks=(9, 10, 11, 12), whiten=False, head="ridge")
    memory = SegmentationMemory(backbone, classes=["left", "right"], settings=settings)
    labels = (torch.arange(IMAGE[1]) >= IMAGE[1] // 2).expand(IMAGE)
    examples = torch.randint(256, (3, 3, *IMAGE), dtype=torch.uint8)
    for example in examples[:2]:
        memory.add(example, labels)
    speed.segment_image = _seconds(lambda: memory.segment(examples[2]), speed.device)


def _in_memory(speed: Speed, images: int) -> dict[str, Any]:
    """Return options for training on a few images in memory."""
    return {
        "data.root": "scenes",
        "data.images": "",
        "data.scenes.count": images,
        "data.scenes.size": 224,
        "data.workers": 0,
        "runtime.accelerator": "cpu" if speed.device == "cpu" else "gpu",
        "runtime.precision": speed.precision,
    }


def _seconds(function: Callable[[], object], device: str) -> float:
    """Return the median duration of a function's calls within a second, at least one, after a first call."""

    def timed() -> float:
        begun = time.perf_counter()
        function()
        if device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter() - begun

    first = timed()
    times: list[float] = []
    while not times or sum(times) < min(_SECONDS, 10 * first):
        times.append(timed())
    return statistics.median(times)
