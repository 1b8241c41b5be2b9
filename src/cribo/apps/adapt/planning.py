"""Folder, options and training of `cribo adapt` and `cribo distill`."""

import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from rich.console import Console

from cribo.apps.adapt.closed_form import STATISTICS_IMAGES
from cribo.apps.adapt.config import AdaptConfig, DistillConfig
from cribo.apps.adapt.encoding import encode
from cribo.base.devices import multiplies_bfloat16
from cribo.base.errors import ConfigError, DataError, TooShort, UnreadableImage
from cribo.base.files import write_json, write_text
from cribo.base.folders import ResultFolder
from cribo.base.redaction import masked
from cribo.base.wording import command_line, counted, is_utf8
from cribo.data import ImageFiles, open_images
from cribo.data.config import DEFAULT_READING, Reading, spread
from cribo.data.sources.collection import sampled_hash
from cribo.models import Backbone, load_backbone
from cribo.models.saving import WEIGHTS_FILE
from cribo.objectives.base import objective_class
from cribo.pretraining.config import Precision, PretrainConfig
from cribo.pretraining.files import CONFIG
from cribo.pretraining.loading import load_config
from cribo.pretraining.module import PretrainingModule
from cribo.pretraining.planning import seconds_per_step, with_epochs
from cribo.pretraining.recorded import check_run_config, names_in, read_run_config
from cribo.pretraining.run import Run, pretrain
from cribo.pretraining.session import Session, check_packages, open_source
from cribo.training.loggers import require_logins

log = logging.getLogger("cribo")

VERDICT = "verdict.json"
CLOSED_FORM = "closed_form"
_TRAINING = "training"
_IMAGES = "images.txt"
_CONTENT = "images_content"
_LEAST_STEPS = 10
_TIMED_IMAGES = 3


@dataclass(frozen=True)
class Exported:
    """A finished adaptation or distillation.

    Attributes:
        folder: folder of the exported backbone and the verdict.
        network: name of the backbone's network.
    """

    folder: Path
    network: str = field(repr=False)

    def backbone(self) -> Backbone:
        """Load the exported backbone."""
        return load_backbone(self.folder, name=self.network)


def result_folder(
    path: Path, kind: str, *, numbered: bool, overwrite: bool, resume: bool, known_by: str, inputs: Sequence[str | None]
) -> ResultFolder:
    """Return the folder to write or resume; the arguments are those of `ResultFolder`.

    Raises:
        ConfigError: `resume` is given without a name, or with `overwrite`.
    """
    if resume and (numbered or overwrite):
        raise ConfigError("--resume requires --name and cannot be combined with --overwrite")
    return ResultFolder(
        path,
        kind,
        numbered=numbered,
        overwrite=overwrite,
        resume=resume,
        known_by=known_by,
        inputs=inputs,
        advice="choose another --name, resume it with --resume, or replace it with --overwrite",
    )


def to_continue(folder: Path) -> str:
    """Return how to continue after an interruption."""
    return f"to continue, repeat the command with {command_line('--name', folder.name, '--resume')}"


def record_options(path: Path, config: AdaptConfig | DistillConfig, images: ImageFiles) -> None:
    """Write the options, or compare them with the stored options of what is resumed.

    The time can be changed until the training has begun.

    Raises:
        ConfigError: an option that affects the result has changed, or the images have.
    """
    content = sampled_hash(images)
    options = {**json.loads(json.dumps(masked(asdict(config)))), _CONTENT: content}
    if path.is_file():
        before = {"reading": asdict(DEFAULT_READING), **json.loads(path.read_text(encoding="utf-8"))}
        free = {"logger", "workers", "device"}
        if not (path.parent / _TRAINING).exists():
            free |= {"minutes", "steps"}
        if before.get(_CONTENT, content) != content:
            raise ConfigError(
                f"{path.parent} was started with other images in {config.images}: restore them, or "
                "choose another --name"
            )
        free.add(_CONTENT)  # earlier versions did not record it
        changed = [name for name in options if before.get(name) != options[name] and name not in free]
        if changed:
            raise ConfigError(
                f"{path.parent} was started with {changed[0]} {before.get(changed[0])}, got {options[changed[0]]}: "
                "use the old value, or choose another --name"
            )
    write_json(path, options)


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


def train(
    plan: Callable[[float], PretrainConfig],
    adjusted: PretrainConfig,
    folder: Path,
    *,
    minutes: float,
    started: float,
    logger: tuple[str, ...],
    console: Console,
) -> Run | None:
    """Train in a run folder inside `folder`, or resume this run; return None if there is too little time for it.

    Args:
        plan: returns the configuration for a number of seconds; not called if the run exists.
        adjusted: the recipe for this network; a run that exists may name no other code.
        folder: the result folder.
        minutes: total time.
        started: start of the command, by `time.perf_counter`. As much time as has passed is left for the verdict.
        logger: names of the loggers.
        console: console for progress.
    """
    if (folder / _TRAINING / CONFIG).is_file():
        planned = read_run_config(folder / _TRAINING, {"runtime.logger": list(logger)})
        check_run_config(planned, folder / _TRAINING, trust=False, given=names_in(adjusted))
    else:
        try:
            planned = plan(60 * minutes - 2 * (time.perf_counter() - started))
        except TooShort as error:
            again = command_line("--name", folder.name, "--resume")
            log.warning(
                "without training, only the closed form is judged: %s; to train, repeat the command with %s",
                error,
                again,
            )
            return None
    return pretrain(planned, out=folder, name=_TRAINING, continue_run=True, advice=to_continue(folder), console=console)


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
