"""Time, images and training of `cribo adapt` and `cribo distill`."""

import logging
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from cribo.apps.adapt.closed_form import STATISTICS_IMAGES
from cribo.apps.adapt.config import AdaptConfig, DistillConfig
from cribo.apps.adapt.encoding import encode
from cribo.base.devices import multiplies_bfloat16
from cribo.base.errors import ConfigError, DataError, TooShort, UnreadableImage
from cribo.base.files import write_text
from cribo.base.wording import counted, is_utf8
from cribo.data import ImageFiles, open_images
from cribo.data.config import Reading, spread
from cribo.features.config import BackboneSource
from cribo.features.encoder import open_backbone
from cribo.models import Backbone
from cribo.models.channels import inflation_note
from cribo.models.saving import WEIGHTS_FILE
from cribo.objectives.base import objective_class
from cribo.pretraining.config import Precision, PretrainConfig
from cribo.pretraining.loading import load_config
from cribo.pretraining.module import PretrainingModule
from cribo.pretraining.planning import seconds_per_step, with_epochs
from cribo.pretraining.session import Session, check_packages, open_source
from cribo.training.loggers import require_logins

log = logging.getLogger("cribo")

CLOSED_FORM = "closed_form"
TRAINING = "training"
_IMAGES = "images.txt"
_LEAST_STEPS = 10
_TIMED_IMAGES = 3


def load_recipe(config: AdaptConfig | DistillConfig) -> PretrainConfig:
    """Load the recipe of the training with the values that override it, and check its optional packages and loggers.

    Raises:
        ConfigError: an invalid name or value; not logged in to the service of a logger.
        MissingPackage: an optional package is not installed.
    """
    logger = {} if config.logger is None else {"runtime.logger": list(config.logger)}
    recipe = load_config(config.recipe, config.training | logger)
    check_packages(recipe)
    require_logins(recipe.runtime.logger)
    return recipe


def open_for(source: BackboneSource, reading: Reading) -> Backbone:
    """Open a network for images with the channels of `reading`, which are stored with it; errors as `open_backbone`."""
    backbone = open_backbone(source, in_chans=reading.in_chans)
    backbone.pixels = reading.trained_with
    return backbone


def inflation_of(backbone: Backbone, *, trained: bool) -> list[str]:
    """Return a sentence about the first layer of an opened network if it was inflated; empty otherwise."""
    if backbone.loaded is None or inflation_note(backbone.in_chans) not in backbone.loaded.notes:
        return []
    how = "the training also trained it" if trained else "the closed form does not train it"
    return [f"The first layer was inflated from 3 to {backbone.in_chans} channels; {how}."]


def require_time(
    config: AdaptConfig | DistillConfig, networks: Sequence[Backbone], images: ImageFiles, *, otherwise: str
) -> None:
    """Require that the closed form fits into the time, by timing the networks on a few images.

    Args:
        config: the options; without a limit on the time, nothing is timed.
        networks: the networks that encode the images, on their device.
        images: the images, of which the closed form reads up to 300.
        otherwise: the user's other choice, for the error.

    Raises:
        ConfigError: the closed form takes longer than the time.
    """
    if config.steps is not None:
        return
    needed = min(len(images), STATISTICS_IMAGES) * _seconds_per_image(networks, images) / 60
    if needed > config.minutes:
        raise ConfigError(
            f"--minutes {config.minutes:g} is too short for the closed form, which takes about {needed:.1f} minutes "
            f"on this machine: use --minutes {math.ceil(2 * needed) + 1}, {otherwise}"
        )


def _seconds_per_image(networks: Sequence[Backbone], images: ImageFiles) -> float:
    """Time the encoding of some images by each network; 0 if none of them can be read."""
    times = []
    for index in spread(len(images), _TIMED_IMAGES):
        begun = time.perf_counter()
        try:
            pixels = images.load(index)
        except UnreadableImage:
            continue
        for network in networks:
            encode(network, pixels).tokens.cpu()
        times.append(time.perf_counter() - begun)
    return min(times, default=0.0)  # the first includes the initialisation of the device


def plan_training(
    adjusted: PretrainConfig,
    config: AdaptConfig | DistillConfig,
    images: ImageFiles,
    folder: Path,
    seconds: float,
    *,
    otherwise: str = "",
    most: float = math.inf,
) -> PretrainConfig:
    """Set images, starting weights and length of the training.

    Args:
        adjusted: the recipe for this network.
        config: the options.
        images: the images to train on.
        folder: folder of the closed form, from which the training starts, and of the list of images.
        seconds: time for the training, if `config` gives no steps.
        otherwise: the user's other choice if this is too short, for the error; empty without one.
        most: maximum number of steps in this time.

    Raises:
        TooShort: the time does not suffice for ten steps.
    """
    listed = _list_images(images, range(len(images)), folder)
    planned = replace(
        adjusted,
        data=replace(adjusted.data, root=str(listed), images="", workers=config.workers, **asdict(config.reading)),
        backbone=replace(adjusted.backbone, pretrained=str(folder / CLOSED_FORM / WEIGHTS_FILE)),
    )
    steps = config.steps
    if steps is None:
        steps = _steps_within(planned, seconds, config.minutes, otherwise=otherwise, most=most)
    return _of_length(planned, images, folder, steps)


def open_listable(images: str, reading: Reading) -> ImageFiles:
    """Open the images of a folder or list, without those whose paths cannot stand in a list for the training.

    Raises:
        DataError: there are no such images; others as for `open_images`.
    """
    found = open_images(images, reading=reading)
    fit: list[int] = []
    unfit: list[str] = []
    for index in range(len(found)):
        path = str(Path(found.path(index)).absolute())
        if is_utf8(path) and path.splitlines() == [path]:
            fit.append(index)
        else:
            unfit.append(found.name(index))
    if not unfit:
        return found
    what = f"line breaks or bytes that are not valid UTF-8 in their names, such as {unfit[0]!r}"
    if not fit:
        raise DataError(f"all {len(found)} images of {images} have {what}: rename them")
    log.warning("%s ignored for %s: rename them", counted(len(unfit), "image is", "images are"), what)
    return found.part(fit)


def _list_images(images: ImageFiles, indices: Iterable[int], folder: Path) -> Path:
    """Write a list of some of the images, as `data.root`, and return its path."""
    text = "".join(f"{Path(images.path(index)).absolute()}\n" for index in indices)
    write_text(folder / _IMAGES, text)
    return folder / _IMAGES


def try_objective(planned: PretrainConfig, images: ImageFiles) -> None:
    """Create the objective with random weights, so that invalid options are found before the closed form is fitted.

    Raises:
        ConfigError: an option is invalid for this network.
    """
    untrained = replace(planned, backbone=replace(planned.backbone, pretrained=None))
    PretrainingModule(untrained, num_images=len(images), steps_per_epoch=1)


def _steps_within(planned: PretrainConfig, seconds: float, minutes: float, *, otherwise: str, most: float) -> int:
    """Time some steps, and return the number that fits into the time."""
    if seconds <= 0:
        raise TooShort(
            f"--minutes {minutes:g} leaves no time for it: use --minutes {math.ceil(minutes - seconds / 60) + 1}"
        )
    per_step = seconds_per_step(Session(planned))
    steps = int(min(most, seconds / per_step))
    log.info("training for %d steps of %d images, at %.2f s per step", steps, planned.optim.batch_size, per_step)
    if steps < _LEAST_STEPS:
        needed = minutes + (_LEAST_STEPS * per_step - seconds) / 60
        raise TooShort(
            f"--minutes {minutes:g} suffices for {counted(steps, 'step')} of {per_step:.1f} s, but at least "
            f"{_LEAST_STEPS} are required: use --minutes {math.ceil(needed)}{otherwise}"
        )
    return steps


def _of_length(planned: PretrainConfig, images: ImageFiles, folder: Path, steps: int) -> PretrainConfig:
    """Set the number of epochs for about `steps` steps; if this is less than one epoch, use a subset of the images."""
    batch = planned.optim.batch_size
    reads_clips = objective_class(planned.objective.name).clip_frames > 0
    used = range(len(images)) if reads_clips else spread(len(images), max(batch, steps * batch))
    _list_images(images, used, folder)
    items = len(open_source(planned)) if reads_clips else len(used)
    if items // batch > 1.5 * steps:
        log.warning(
            "an epoch of %d clips takes %d steps instead of the planned %d: use fewer images, or a larger "
            "data.video.stride",
            items,
            items // batch,
            steps,
        )
    return with_epochs(planned, max(1, round(steps / max(items // batch, 1))))


def fast_precision(backbone: Backbone) -> Precision:
    """Return the fastest precision for training on this machine."""
    # With bfloat16 instructions, a step of a vision transformer on the CPU takes about half the time.
    fast = torch.cuda.is_available() or (backbone.depth > 1 and multiplies_bfloat16())
    return "bf16-mixed" if fast else "32-true"
