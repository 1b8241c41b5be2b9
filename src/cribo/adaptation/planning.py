"""Options, images and length of the training in `cribo adapt` and `cribo distill`."""

import json
import logging
import math
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path

import torch

from cribo.adaptation.config import AdaptConfig, DistillConfig
from cribo.arguments import ConfigError
from cribo.data import ImageFiles
from cribo.data.limits import spread
from cribo.devices import multiplies_bfloat16
from cribo.files import write_json, write_text
from cribo.models import Backbone
from cribo.pretraining.config import Precision, PretrainConfig
from cribo.pretraining.module import PretrainingModule
from cribo.pretraining.planning import seconds_per_step, with_epochs
from cribo.pretraining.session import Session

log = logging.getLogger("cribo")

_IMAGES = "images.txt"
_LEAST_STEPS = 10


def record_options(path: Path, config: AdaptConfig | DistillConfig) -> None:
    """Write the options, or compare them with the stored options of what is resumed.

    Raises:
        ConfigError: an option that affects the result has changed.
    """
    options = json.loads(json.dumps(asdict(config)))
    if path.is_file():
        before = json.loads(path.read_text(encoding="utf-8"))
        changed = [name for name in options if before.get(name) != options[name] and name not in ("workers", "device")]
        if changed:
            raise ConfigError(
                f"{path.parent} was started with {changed[0]} {before.get(changed[0])}, got {options[changed[0]]}: "
                "use the old value, or choose another --name"
            )
    write_json(path, options)


def list_images(images: ImageFiles, indices: Iterable[int], folder: Path) -> Path:
    """Write a list of some of the images, as `data.root`, and return its path."""
    text = "".join(f"{Path(images.path(index)).absolute()}\n" for index in indices)
    write_text(folder / _IMAGES, text)
    return folder / _IMAGES


def try_objective(planned: PretrainConfig, images: ImageFiles) -> None:
    """Create the objective with random weights, because its options are otherwise read only after the closed form.

    Raises:
        ConfigError: an option is invalid for this network.
    """
    untrained = replace(planned, backbone=replace(planned.backbone, pretrained=None))
    PretrainingModule(untrained, num_images=len(images), steps_per_epoch=1)


def steps_within(
    planned: PretrainConfig, seconds: float, minutes: float, *, otherwise: str, most: float = math.inf
) -> int:
    """Time some steps, and return how many fit.

    Args:
        planned: configuration of the training.
        seconds: time for the training.
        minutes: the duration that the user chose, for messages.
        otherwise: the user's other choice, for the error.
        most: maximum number of steps.

    Raises:
        ConfigError: the time does not suffice for ten steps.
    """
    per_step = seconds_per_step(Session(planned))
    steps = int(min(most, seconds / per_step))
    log.info("training for %d steps of %d images, at %.2f s per step", steps, planned.optim.batch_size, per_step)
    if steps < _LEAST_STEPS:
        needed = minutes + (_LEAST_STEPS * per_step - seconds) / 60
        raise ConfigError(
            f"--minutes {minutes:g} suffices for {max(0, steps)} steps of {per_step:.1f} s, but at least "
            f"{_LEAST_STEPS} are required: use --minutes {math.ceil(needed)}, or {otherwise}"
        )
    return steps


def of_length(planned: PretrainConfig, images: ImageFiles, folder: Path, steps: int) -> PretrainConfig:
    """Return the configuration of about this many steps, on a subset of the images if these are less than an epoch."""
    batch = planned.optim.batch_size
    used = spread(len(images), max(batch, steps * batch))
    list_images(images, used, folder)
    return with_epochs(planned, max(1, round(steps / (len(used) // batch))))


def fast_precision(backbone: Backbone) -> Precision:
    """Return the fastest precision for training on this machine."""
    # With bfloat16 instructions, a step of a vision transformer on the CPU takes about half the time.
    fast = torch.cuda.is_available() or (backbone.depth > 1 and multiplies_bfloat16())
    return "bf16-mixed" if fast else "32-true"
