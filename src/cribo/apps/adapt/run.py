"""Steps of `cribo adapt`: closed form, training, closed form of the trained weights, verdict, and export."""

import json
import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from rich.console import Console

from cribo.apps.adapt.averaging import averaged
from cribo.apps.adapt.closed_form import Choice, choose_closed_form, refit_whitening
from cribo.apps.adapt.config import AdaptConfig
from cribo.apps.adapt.indicators import measure_indicators
from cribo.apps.adapt.labelled import open_labelled
from cribo.apps.adapt.pictures import draw_neighbours
from cribo.apps.adapt.planning import (
    CLOSED_FORM,
    VERDICT,
    Exported,
    fast_precision,
    load_recipe,
    open_listable,
    plan_training,
    record_options,
    require_time,
    result_folder,
    to_continue,
    train,
    try_objective,
)
from cribo.apps.adapt.verdict import ADAPTATION, Candidate, Verdict, judge
from cribo.base.console import Phases
from cribo.base.devices import resolve_devices
from cribo.base.drawing import write_figure
from cribo.base.errors import ConfigError, if_interrupted
from cribo.base.files import write_json
from cribo.base.folders import named_folder
from cribo.data import ImageFiles
from cribo.features.config import backbone_name
from cribo.features.encoder import open_backbone
from cribo.models import Backbone, load_backbone, save_backbone
from cribo.models.building import with_stride
from cribo.pretraining.batches import fit_batch
from cribo.pretraining.config import PretrainConfig
from cribo.pretraining.recorded import read_run_config
from cribo.pretraining.run import Run
from cribo.training.folder import claim

log = logging.getLogger("cribo")

OPTIONS = "adapt.json"
PICTURE = "neighbours.png"
_CHOICE = "choice.json"

_TRAIN_BLOCKS = "backbone.train_blocks"
_PRECISION = "runtime.precision"
MOST_STEPS = 500  # more steps improve results on these images but degrade them on others (docs/adapting.md)


@dataclass(frozen=True)
class Adapted(Exported):
    """A finished adaptation.

    Attributes:
        folder: folder of the exported backbone and the verdict.
        network: name of the backbone's network.
        verdict: the exported network and the evidence.
    """

    verdict: Verdict


def adapt(
    config: AdaptConfig,
    *,
    out: str | Path = "adapted",
    name: str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    console: Console | None = None,
) -> Adapted:
    """Adapt a pretrained backbone to unlabelled images, as `cribo adapt` does.

    Args:
        config: the options.
        out: parent folder of the results.
        name: name of the results folder; by default that of the backbone, numbered.
        resume: resume the adaptation with this name.
        overwrite: replace the adaptation with this name.
        console: console for progress; silent by default.

    Raises:
        ValueError: images, backbone, options or folder are invalid; raised before computation whenever possible.
        MissingPackage: the package of a logger is not installed.
        FileNotFoundError: a file of the backbone or the images does not exist.
        Interrupted: SIGTERM or SIGUSR1 was received during training, which can be resumed.
    """
    started = time.perf_counter()
    console = console or Console(quiet=True)
    target = result_folder(
        named_folder(out, name or f"{backbone_name(config.backbone)}-adapted"),
        "adaptation",
        numbered=name is None,
        overwrite=overwrite,
        resume=resume,
        known_by=OPTIONS,
        inputs=(config.images, config.labelled, config.second, config.backbone.source),
    )
    images = open_listable(config.images, config.reading)
    sets = [
        None if folder is None else open_labelled(folder, reading=config.reading)
        for folder in (config.labelled, config.second)
    ]
    device = resolve_devices(None if config.device is None else [config.device], "device")[0]
    recipe = load_recipe(config)
    original = open_backbone(config.backbone).to(device)
    _check_network(config, original)
    if config.trains:
        if not (resume and (target.path / CLOSED_FORM / _CHOICE).is_file()):
            require_time(config, [original], images, otherwise="or --minutes 1 for the closed form only")
        try_objective(_for_network(config, recipe, original, images), images)
    with ExitStack() as stack:
        folder = claim(stack, target)
        stack.enter_context(if_interrupted(lambda: to_continue(folder)))
        record_options(folder / OPTIONS, config, images)
        with Phases(console) as progress:
            start, choice = _closed_form(original, images, recipe, config, folder, progress)
        log.info(_described(choice))
        candidates = [Candidate("starting weights", original), Candidate("closed form", start)]
        if config.trains:
            plan = partial(planned_training, config, recipe, start, images, folder)
            run = train(
                plan,
                _for_network(config, recipe, start, images),
                folder,
                minutes=config.minutes,
                started=started,
                logger=recipe.runtime.logger,
                console=console,
            )
            if run is not None:
                trained = _with_start(run, start, config.trained_share).to(device)
                if choice.power is not None:
                    with Phases(console) as progress:
                        again = partial(progress, "closed form of the adapted weights")
                        refit_whitening(trained, images, power=choice.power, dims=config.dims, progress=again)
                candidates.append(Candidate("adapted weights", trained))
        with Phases(console) as progress:
            indicators = {
                each.name: asdict(
                    measure_indicators(
                        each.backbone, images, recipe.views, partial(progress, f"indicators of the {each.name}")
                    )
                )
                for each in candidates
            }
            keep_last = config.keep == "adapted"
            verdict = judge(candidates, indicators, *sets, keep_last=keep_last, process=ADAPTATION, progress=progress)
            kept = next(each.backbone for each in candidates if each.name == verdict.kept)
            figure = draw_neighbours(candidates[0], candidates[-1], images, progress)
        write_figure(folder / PICTURE, figure)
        save_backbone(kept, folder)
        write_json(folder / VERDICT, asdict(verdict))
    return Adapted(folder, kept.name, verdict)


def _check_network(config: AdaptConfig, backbone: Backbone) -> None:
    """Raise an error for options that the network does not support."""
    if config.stride is not None and backbone.patch_size != config.stride:
        if backbone.depth > 1:
            raise ConfigError(f"stride applies to convolutional networks only, got {backbone.name}: omit it")
        with_stride(backbone, config.stride)
    trained = config.training.get(_TRAIN_BLOCKS)
    if trained is not None and 1 < backbone.depth < trained:
        raise ConfigError(
            f"{_TRAIN_BLOCKS} must be at most {backbone.depth}, the number of blocks of {backbone.name}, got {trained}"
        )
    if config.blocks is None:
        return
    if backbone.depth == 1:
        raise ConfigError(f"blocks applies to vision transformers only, got {backbone.name}: omit it")
    if config.blocks > backbone.depth:
        raise ConfigError(
            f"blocks must be at most {backbone.depth}, the number of blocks of {backbone.name}, got {config.blocks}"
        )


def _closed_form(
    original: Backbone,
    images: ImageFiles,
    recipe: PretrainConfig,
    config: AdaptConfig,
    folder: Path,
    progress: Callable[[str, int, int], None],
) -> tuple[Backbone, Choice]:
    """Fit and save the closed form, or load a saved one."""
    own = folder / CLOSED_FORM
    if (own / _CHOICE).is_file():
        choice = Choice(**json.loads((own / _CHOICE).read_text(encoding="utf-8")))
        return load_backbone(own, name=original.name).to(next(original.parameters()).device), choice
    wanted = original if config.stride in (None, original.patch_size) else with_stride(original, config.stride)
    start, choice = choose_closed_form(
        wanted,
        images,
        recipe.views,
        blocks=config.blocks,
        power=config.power,
        dims=config.dims,
        progress=progress,
    )
    save_backbone(start, own)
    write_json(own / _CHOICE, asdict(choice))
    return start, choice


def _described(choice: Choice) -> str:
    where = "" if choice.blocks is None else f"block {choice.blocks}, "
    how = "no whitening" if choice.power is None else f"whitening with power {choice.power:g}"
    return (
        f"closed form: {where}{how}; neighbour agreement across views {choice.agreement:.0%} "
        f"(before: {choice.before:.0%})"
    )


def _with_start(run: Run, start: Backbone, share: float) -> Backbone:
    """Average the trained weights with those of the closed form."""
    trained = run.backbone()
    # Training resizes the position embedding to the size of the views. Export it only if it was trained.
    planned = read_run_config(run.folder)
    if planned.backbone.train_blocks is None and planned.backbone.lora is None:
        return averaged(trained, start, 1 - share)
    return averaged(start, trained, share)


def planned_training(
    config: AdaptConfig,
    recipe: PretrainConfig,
    start: Backbone,
    images: ImageFiles,
    folder: Path,
    seconds: float,
) -> PretrainConfig:
    """Adjust the recipe to the images, the network and the speed of the machine.

    Raises:
        TooShort: the time does not suffice for ten steps.
    """
    adjusted = _for_network(config, recipe, start, images)
    return plan_training(adjusted, config, images, folder, seconds, most=MOST_STEPS)


def _for_network(config: AdaptConfig, recipe: PretrainConfig, start: Backbone, images: ImageFiles) -> PretrainConfig:
    """Adjust the recipe to the network and the number of images."""
    recipe = fit_batch(recipe, len(images))
    group = min(recipe.objects.group_size, recipe.optim.batch_size)
    train_blocks = recipe.backbone.train_blocks
    if start.depth > 1:
        train_blocks = min(train_blocks or start.depth, start.depth)
    elif _TRAIN_BLOCKS not in config.training:
        train_blocks = None  # the value of the preset applies to vision transformers
    return replace(
        recipe,
        backbone=replace(recipe.backbone, name=start.name, args=start.args, train_blocks=train_blocks),
        objects=replace(recipe.objects, group_size=group),
        runtime=replace(recipe.runtime, precision=config.training.get(_PRECISION) or fast_precision(start)),
    )
