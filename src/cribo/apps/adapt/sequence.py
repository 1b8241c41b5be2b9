"""The sequence of `cribo adapt` and `cribo distill`: closed form, training from it, verdict, and export."""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, TypeVar

from rich.console import Console

from cribo.apps.adapt.config import AdaptConfig, DistillConfig
from cribo.apps.adapt.labelled import open_labelled
from cribo.apps.adapt.planning import (
    CLOSED_FORM,
    TRAINING,
    load_recipe,
    open_listable,
    require_time,
    try_objective,
)
from cribo.base.console import Phases, Progress
from cribo.base.devices import resolve_devices
from cribo.base.errors import TooShort
from cribo.base.files import write_json
from cribo.base.job import Account, Changes, Job, describe_changes, named_folder
from cribo.base.wording import command_line
from cribo.data import ImageFiles
from cribo.data.sources.collection import sampled_hash
from cribo.features.config import backbone_name
from cribo.features.reading import completed_for
from cribo.models import Backbone, load_backbone, save_backbone
from cribo.pretraining.config import PretrainConfig
from cribo.pretraining.files import CONFIG
from cribo.pretraining.recorded import check_run_config, names_in, read_run_config
from cribo.pretraining.run import Run, pretrain

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

log = logging.getLogger("cribo")

VERDICT = "verdict.json"
_CONTENT = "images_content"
_OF_THE_MACHINE = ("logger", "workers", "device")

Config = TypeVar("Config", AdaptConfig, DistillConfig)
Judged = TypeVar("Judged", bound="DataclassInstance")


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


class Start(NamedTuple):
    """A closed form, from which the training starts.

    Attributes:
        backbone: the network, on the device of the command.
        account: how it was fitted, as JSON types.
    """

    backbone: Backbone
    account: Account


class Steps(ABC, Generic[Config, Judged]):
    """What `run_steps` does for one command.

    The constructor opens labelled images, recipe and networks, and checks the options.

    Args:
        config: options of the command.
        images: the images to train on.

    Attributes:
        kind: of the results.
        suffix: of the default name of the results.
        otherwise: the user's other choice if the closed form takes too long, for the error.
        networks: the networks that encode all images for the closed form, on the device; the last is to be trained.

    Raises:
        ConfigError: an option is invalid for the networks.
    """

    kind: ClassVar[str]
    suffix: ClassVar[str]
    otherwise: ClassVar[str]
    networks: Sequence[Backbone]

    def __init__(self, config: Config, images: ImageFiles) -> None:
        self.config, self.images = config, images
        self.labelled = None if config.labelled is None else open_labelled(config.labelled, reading=config.reading)
        self.device = resolve_devices(None if config.device is None else [config.device], "device")[0]
        self.recipe = load_recipe(config)

    def begin(self, folder: Path) -> None:
        """Write what the training reads to the folder of the results, or load it from there."""

    @abstractmethod
    def adjusted(self, network: Backbone, folder: Path) -> PretrainConfig:
        """Return the recipe, adjusted to a network and the images; `folder` is that of the results."""

    @abstractmethod
    def fit(self, progress: Progress) -> Start:
        """Fit the closed form."""

    @abstractmethod
    def describe(self, start: Start) -> str:
        """Return the closed form as text."""

    @abstractmethod
    def plan(self, start: Backbone, folder: Path, seconds: float) -> PretrainConfig:
        """Return the configuration of the training within some seconds; raises TooShort if they do not suffice."""

    @abstractmethod
    def judge(self, start: Start, run: Run | None, folder: Path, progress: Progress) -> tuple[Judged, Backbone]:
        """Return the verdict, and the network to export; `run` is None if nothing was trained."""


def run_steps(
    make: type[Steps[Config, Judged]],
    config: Config,
    *,
    out: str | Path,
    name: str | None,
    resume: bool,
    overwrite: bool,
    console: Console | None,
) -> tuple[Path, Backbone, Judged]:
    """Fit the closed form, train, judge and export; return the folder, the exported network and the verdict.

    For the arguments and errors, see `adapt` and `distill`.
    """
    started = time.perf_counter()
    console = console or Console(quiet=True)
    job = Job(
        named_folder(out, name or f"{backbone_name(config.backbone)}-{make.suffix}"),
        make.kind,
        numbered=name is None,
        resume=resume,
        overwrite=overwrite,
        option="--name",
        inputs=config.inputs,
    )
    config = replace(config, reading=completed_for(config.backbone, config.reading))
    images = open_listable(config.images, config.reading)
    steps = make(config, images)
    if config.trains:
        if CLOSED_FORM not in job.accounts:
            require_time(config, steps.networks, images, otherwise=make.otherwise)
        with TemporaryDirectory() as empty:
            steps.begin(Path(empty))
            try_objective(steps.adjusted(steps.networks[-1], Path(empty)), images)
    with job.open(_identity(config, images), changes=_changes_of(job), again=_again):
        folder = job.path
        steps.begin(folder)
        with Phases(console) as progress:
            start = _closed_form(steps, job, progress)
        log.info("closed form: %s", steps.describe(start))
        run = _train(steps, start.backbone, folder, started, console) if config.trains else None
        with Phases(console) as progress:
            verdict, kept = steps.judge(start, run, folder, progress)
        save_backbone(kept, folder)
        write_json(folder / VERDICT, asdict(verdict))
        job.finish()
    return folder, kept, verdict


def _again(folder: Path) -> str:
    """Return the options to repeat a command with, to continue it."""
    return command_line("--name", folder.name, "--resume")


def _identity(config: AdaptConfig | DistillConfig, images: ImageFiles) -> dict[str, Any]:
    """Return the options that affect the result, and a hash of images."""
    options = {name: value for name, value in asdict(config).items() if name not in _OF_THE_MACHINE}
    return {**options, _CONTENT: sampled_hash(images)}


def _changes_of(job: Job) -> Changes:
    """Return the description of changed options; the time can be changed until the training has begun."""

    def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
        free = () if (job.path / TRAINING).exists() else ("minutes", "steps")
        if before.get(_CONTENT) != now[_CONTENT]:
            yield f"the content of {now['images']} has changed"
        names = {*before, *now} - {*free, _CONTENT}
        yield from describe_changes(*({name: each.get(name) for name in sorted(names)} for each in (before, now)))

    return changes


def _closed_form(steps: Steps[Any, Any], job: Job, progress: Progress) -> Start:
    """Fit and save the closed form, or load a saved one."""
    own = job.path / CLOSED_FORM
    if CLOSED_FORM in job.accounts:
        saved = load_backbone(own, name=steps.networks[-1].name)
        return Start(saved.to(steps.device), job.accounts[CLOSED_FORM])
    start = steps.fit(progress)
    save_backbone(start.backbone, own)
    job.done(CLOSED_FORM, **start.account)
    return start


def _train(steps: Steps[Any, Any], start: Backbone, folder: Path, started: float, console: Console) -> Run | None:
    """Train in a run folder inside `folder`, or resume this run; return None if there is too little time for it."""
    if (folder / TRAINING / CONFIG).is_file():
        planned = read_run_config(folder / TRAINING, {"runtime.logger": list(steps.recipe.runtime.logger)})
        # A run that exists may name no code but that of the options.
        check_run_config(planned, folder / TRAINING, trust=False, given=names_in(steps.adjusted(start, folder)))
    else:
        try:
            # As much time as has passed is left for the verdict.
            planned = steps.plan(start, folder, 60 * steps.config.minutes - 2 * (time.perf_counter() - started))
        except TooShort as error:
            log.warning(
                "without training, only the closed form is judged: %s; to train, repeat the command with %s",
                error,
                _again(folder),
            )
            return None
    advice = f"to continue, repeat the command with {_again(folder)}"
    return pretrain(planned, out=folder, name=TRAINING, continue_run=True, advice=advice, console=console)
