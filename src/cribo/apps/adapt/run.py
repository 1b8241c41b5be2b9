"""Steps of `cribo adapt`: closed form, training, closed form of the trained weights, verdict, and export."""

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
from cribo.apps.adapt.planning import fast_precision, inflation_of, open_for, plan_training
from cribo.apps.adapt.sequence import Exported, Start, Steps, run_steps
from cribo.apps.adapt.verdict import ADAPTATION, Candidate, Verdict, judge
from cribo.base.console import Progress
from cribo.base.drawing import write_figure
from cribo.base.errors import ConfigError
from cribo.data import ImageFiles
from cribo.models import Backbone
from cribo.models.building import with_stride
from cribo.pretraining.batches import fit_batch
from cribo.pretraining.config import PretrainConfig
from cribo.pretraining.recorded import read_run_config
from cribo.pretraining.run import Run

PICTURE = "neighbours.png"

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
    folder, kept, verdict = run_steps(
        Adaptation, config, out=out, name=name, resume=resume, overwrite=overwrite, console=console
    )
    return Adapted(folder, kept.name, verdict)


class Adaptation(Steps[AdaptConfig, Verdict]):
    """Closed form of the block to read and its whitening, training, and closed form of the trained weights."""

    kind = "adaptation"
    suffix = "adapted"
    otherwise = "or --minutes 1 for the closed form only"

    def __init__(self, config: AdaptConfig, images: ImageFiles) -> None:
        super().__init__(config, images)
        self.second = None if config.second is None else open_labelled(config.second, reading=config.reading)
        self.original = open_for(config.backbone, config.reading).to(self.device)
        self.networks = (self.original,)
        _check_network(config, self.original)

    def adjusted(self, network: Backbone, folder: Path) -> PretrainConfig:
        """Adjust the recipe to the network and the number of images."""
        given = self.config.training
        recipe = fit_batch(self.recipe, len(self.images))
        group = min(recipe.objects.group_size, recipe.optim.batch_size)
        train_blocks = recipe.backbone.train_blocks
        if network.depth > 1:
            train_blocks = min(train_blocks or network.depth, network.depth)
        elif _TRAIN_BLOCKS not in given:
            train_blocks = None  # the value of the preset applies to vision transformers
        return replace(
            recipe,
            backbone=replace(recipe.backbone, name=network.name, args=network.args, train_blocks=train_blocks),
            objects=replace(recipe.objects, group_size=group),
            runtime=replace(recipe.runtime, precision=given.get(_PRECISION) or fast_precision(network)),
        )

    def fit(self, progress: Progress) -> Start:
        """Choose the block and the whitening."""
        config, wanted = self.config, self.original
        if config.stride not in (None, wanted.patch_size):
            wanted = with_stride(wanted, config.stride)
        start, choice = choose_closed_form(
            wanted,
            self.images,
            self.recipe.views,
            blocks=config.blocks,
            power=config.power,
            dims=config.dims,
            progress=progress,
        )
        return Start(start, asdict(choice))

    def describe(self, start: Start) -> str:
        """Return the choice and its neighbour agreement."""
        choice = Choice(**start.account)
        where = "" if choice.blocks is None else f"block {choice.blocks}, "
        how = "no whitening" if choice.power is None else f"whitening with power {choice.power:g}"
        return f"{where}{how}; neighbour agreement across views {choice.agreement:.0%} (before: {choice.before:.0%})"

    def plan(self, start: Backbone, folder: Path, seconds: float) -> PretrainConfig:
        """Return the configuration of the training, of at most 500 steps if the time decides."""
        recipe = self.adjusted(start, folder)
        return plan_training(recipe, self.config, self.images, folder, seconds, most=MOST_STEPS)

    def judge(self, start: Start, run: Run | None, folder: Path, progress: Progress) -> tuple[Verdict, Backbone]:
        """Compare the given network, the closed form and the trained weights, and draw neighbours of some patches."""
        candidates = [Candidate("starting weights", self.original), Candidate("closed form", start.backbone)]
        if run is not None:
            trained = _with_start(run, start.backbone, self.config.trained_share).to(self.device)
            if (power := Choice(**start.account).power) is not None:
                refitting = partial(progress, "closed form of the adapted weights")
                refit_whitening(trained, self.images, power=power, dims=self.config.dims, progress=refitting)
            candidates.append(Candidate("adapted weights", trained))
        indicators = {
            each.name: asdict(
                measure_indicators(
                    each.backbone, self.images, self.recipe.views, partial(progress, f"indicators of the {each.name}")
                )
            )
            for each in candidates
        }
        verdict = judge(
            candidates,
            indicators,
            self.labelled,
            self.second,
            keep_last=self.config.keep == "adapted",
            process=ADAPTATION,
            progress=progress,
        )
        inflation = inflation_of(self.original, trained=run is not None)
        verdict = replace(verdict, sentences=[*verdict.sentences, *inflation])
        write_figure(folder / PICTURE, draw_neighbours(candidates[0], candidates[-1], self.images, progress))
        return verdict, next(each.backbone for each in candidates if each.name == verdict.kept)


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


def _with_start(run: Run, start: Backbone, share: float) -> Backbone:
    """Average the trained weights with those of the closed form."""
    trained = run.backbone()
    # Training resizes the position embedding to the size of the views. Export it only if it was trained.
    planned = read_run_config(run.folder)
    if planned.backbone.train_blocks is None and planned.backbone.lora is None:
        return averaged(trained, start, 1 - share)
    return averaged(start, trained, share)
