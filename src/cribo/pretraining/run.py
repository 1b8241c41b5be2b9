"""Pretraining runs, from the configuration to the run folder."""

import logging
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import yaml
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from rich.console import Console

from cribo.base.console import Phases
from cribo.base.errors import ConfigError, FolderError, if_interrupted
from cribo.base.files import read_json, remove_parts, write_json, write_text
from cribo.base.job import Job, describe_changes, flat, named_folder
from cribo.base.machine import end_with_launcher
from cribo.base.versions import versions
from cribo.base.wording import command_line
from cribo.features.reading import completed_for
from cribo.models import Backbone, load_backbone, save_backbone
from cribo.pretraining.config import PretrainConfig
from cribo.pretraining.files import CONFIG, REPORT, SUMMARY, TRUNK_CACHE
from cribo.pretraining.footprint import peak_rss_bytes
from cribo.pretraining.loading import DEFAULT_PRESET, config_name, dump_config, load_config
from cribo.pretraining.monitoring import LoadingFaults, Metrics, Watch
from cribo.pretraining.planning import TimeEstimate, plan, with_epochs
from cribo.pretraining.progress import progress_text, run_progress
from cribo.pretraining.recorded import check_run_config, read_run_config
from cribo.pretraining.report import write_report
from cribo.pretraining.score import AgreementScore, RetrievalScore, judges_without_labels, score_data_name
from cribo.pretraining.session import Session
from cribo.pretraining.stages import RunStages
from cribo.training.checkpoints import Checkpoints, checkpoint_files, resume_point
from cribo.training.events import open_loggers
from cribo.training.folder import open_on_all_ranks
from cribo.training.interruption import Interruption, interrupted_by_signals
from cribo.training.lightning import interruptible, quiet_lightning
from cribo.training.loggers import require_logins

log = logging.getLogger("cribo")

KIND = "pretraining"

# Options that may change when a run is resumed, in addition to runtime.*.
_OF_READING = (
    *("data.root", "data.workers", "data.cache_dir", "data.cache_gib"),
    *("data.max_unreadable", "data.timeout", "data.max_restarts"),
)
_MAY_CHANGE = f"Only runtime.* and {', '.join(_OF_READING)} can change: keep the old value, or choose another --name"


@dataclass(frozen=True)
class Run:
    """Finished run.

    Attributes:
        folder: the run folder.
        summary: the content of `summary.json`.
        network: `backbone.name` of the configuration.
    """

    folder: Path
    summary: dict[str, Any] = field(repr=False)
    network: str = field(repr=False)

    def backbone(self) -> Backbone:
        """Load the trained backbone."""
        return load_backbone(self.folder, name=self.network)


def pretrain(
    config: PretrainConfig | str | Path = DEFAULT_PRESET,
    *,
    data: str | Path | None = None,
    out: str | Path = "runs",
    name: str | None = None,
    default_name: str | None = None,
    minutes: float | None = None,
    overwrite: bool = False,
    continue_run: bool = False,
    overrides: Mapping[str, Any] | None = None,
    callbacks: Sequence[Callback] = (),
    advice: str | None = None,
    console: Console | None = None,
) -> Run:
    """Pretrain a backbone and write a run folder; the same as `cribo pretrain`.

    Args:
        config: a preset's name, a YAML file, or a configuration.
        data: shorthand for the override data.root.
        out: parent folder of run folders.
        name: name of the run; must be new unless `overwrite` or `continue_run` is set.
        default_name: base of the name if `name` is not given, to which a number is added; the configuration's name by
            default.
        minutes: approximate training time on this machine: a short timing sets the number of epochs.
        overwrite: replace a run of the same name.
        continue_run: resume the run of the same name, if it exists, from its last checkpoint, for schedulers that
            restart the same command. A finished run is not changed.
        overrides: dotted names and values on top of the configuration.
        callbacks: additional Lightning callbacks; not used in earlier stages of the run.
        advice: how to resume, for messages; by default `cribo pretrain --resume FOLDER`.
        console: console for the progress display; silent by default.

    Returns:
        The finished run.

    Raises:
        ValueError: the configuration, the data, the backbone or the run folder cannot be used.
        NonFiniteLoss: training diverged; the last checkpoint is valid.
        Interrupted: SIGTERM or SIGUSR1 was received; a checkpoint was written. (Ctrl-C is a KeyboardInterrupt.)
        MissingPackage: the package of a logger is not installed.
        TooManyUnreadable: too many images cannot be read.
        WorkersFailed: worker processes died or hung too often.

    Example::

        run = cribo.pretrain("coco_vits16", data="my/images", overrides={"optim.epochs": 10})
        features = run.backbone().encode(images)
    """
    overrides = dict(overrides or {})
    if data is not None:
        overrides["data.root"] = str(data)
    if isinstance(config, PretrainConfig):
        if overrides:
            raise ConfigError("overrides require a preset or a file: change the PretrainConfig itself")
    else:
        default_name = default_name or config_name(config)
        config = load_config(config, overrides)
    if continue_run and (name is None or overwrite):
        what = "cannot be combined with --overwrite" if name is not None else "requires the --name of the run"
        raise ConfigError(f"--continue {what}: it resumes the run of that name, or starts it")
    if config.backbone.pretrained is not None:
        reading = completed_for(config.backbone.pretrained, config.data.reading)
        config = replace(config, data=replace(config.data, **asdict(reading)))
    return _run(
        config,
        Path(out),
        name,
        default_name or "run",
        minutes=minutes,
        overwrite=overwrite,
        resume=continue_run,
        callbacks=callbacks,
        advice=advice,
        console=console,
    )


def resume(
    folder: str | Path,
    *,
    overrides: Mapping[str, Any] | None = None,
    trust: bool = False,
    callbacks: Sequence[Callback] = (),
    console: Console | None = None,
) -> Run:
    """Continue a run from its last checkpoint.

    Args:
        folder: the run folder.
        overrides: options that do not affect the results: `runtime.*`, and options of reading images. Others may be
            given with the value of the run, which allows the code or address that they name to be used.
        trust: use the custom code and the addresses that the run names. Only for runs from sources that you trust.
        callbacks: additional Lightning callbacks.
        console: console for the progress display; silent by default.

    Raises:
        FolderError: the folder does not contain a run.
        Untrusted: the run names code or an address, and neither `trust` nor the same name in `overrides` is given.
        ConfigError: an override would change the results.
    """
    folder = Path(folder)
    if not (folder / CONFIG).is_file():
        raise FolderError(f"{folder} has no {CONFIG}: it is not a run that can be resumed")
    overrides = dict(overrides or {})
    before = flat(yaml.safe_load(dump_config(read_run_config(folder))))
    for name, value in overrides.items():
        if not _may_change(name) and before.get(name) != value:
            raise ConfigError(
                f"{name} cannot change when a run is resumed; only runtime.* and {', '.join(_OF_READING)} can: "
                "start a new run instead"
            )
    config = read_run_config(folder, overrides)
    check_run_config(config, folder, trust=trust, given={str(value) for value in overrides.values()})
    return _run(config, folder.parent, folder.name, "", resume=True, callbacks=callbacks, console=console)


def overrides_in(words: Sequence[str]) -> dict[str, Any]:
    """Return the configuration options among command-line arguments, by name."""
    found: dict[str, Any] = {}
    for position, word in enumerate(words):
        name, given, value = word.removeprefix("--").partition("=")
        if word.startswith("--") and name.split(".")[0] in PretrainConfig.__dataclass_fields__:
            found[name] = yaml.safe_load(value if given else words[position + 1])
    return found


def latest_run(out: str | Path) -> Path:
    """Return the most recently written run folder.

    Raises:
        FolderError: `out` contains no run.
    """
    found = [path.parent for path in Path(out).glob(f"*/{CONFIG}")]
    if not found:
        raise FolderError(f"no run to resume in {out}: give its folder after --resume")

    def written(folder: Path) -> float:
        files = (folder / CONFIG, *folder.rglob("*.ckpt"), *folder.glob("*/*.safetensors"))  # of all stages
        return max(path.stat().st_mtime for path in files)

    return max(found, key=written)


def _run(
    config: PretrainConfig,
    out: Path,
    name: str | None,
    default_name: str,
    *,
    minutes: float | None = None,
    overwrite: bool = False,
    resume: bool,
    callbacks: Sequence[Callback],
    advice: str | None = None,
    console: Console | None,
) -> Run:
    """Train in `out/name`; an invalid configuration raises an error before the folder is created."""
    end_with_launcher()
    if resume and name is None:
        raise ConfigError("--continue requires --name, the run to continue")
    if resume and name is not None:
        folder = named_folder(out, name)
        if minutes is not None and (folder / CONFIG).is_file():  # epochs were set when the run started
            config, minutes = with_epochs(config, read_run_config(folder).optim.epochs), None
        if (folder / SUMMARY).is_file():
            _require_same(folder, config)
            log.info("%s is already finished: nothing to resume", folder)
            return Run(folder, read_json(folder / SUMMARY), config.backbone.name)
    session = Session(config)
    if minutes is not None:
        plan(session, minutes)

    def open_folder(held: ExitStack) -> Path:
        require_logins(config.runtime.logger)
        again = command_line("--resume", out / (name or ""))
        job = Job(
            named_folder(out, name or default_name),
            KIND,
            numbered=name is None,
            resume=resume,
            overwrite=overwrite,
            inputs=(config.data.root, config.backbone.pretrained),
            option="--name",
            advice=f"choose another --name, resume it with {again} or --continue, or --overwrite it",
        )
        held.enter_context(job.open(_fixed(session.config), advice=_MAY_CHANGE))
        _begin(job.path, session.config)
        jobs.append(job)
        return job.path

    jobs: list[Job] = []  # on rank 0
    with open_on_all_ranks(session.probe, open_folder) as folder:
        advice = advice or f"continue with {command_line('cribo', 'pretrain', '--resume', folder)}"
        with if_interrupted(lambda: advice):
            run = _train(session, folder, callbacks, advice, console or Console(quiet=True))
        for job in jobs:
            job.finish()
        return run


def _begin(folder: Path, config: PretrainConfig) -> None:
    """Write the configuration of a run, or of a stage of it, to its folder, or prepare it for being resumed."""
    if (folder / CONFIG).is_file():
        _require_same(folder, config)
        if not (folder / SUMMARY).is_file():
            _find_checkpoint(folder)
    else:
        folder.mkdir(exist_ok=True)
        remove_parts(folder)
        write_text(folder / CONFIG, dump_config(config))


def _find_checkpoint(folder: Path) -> None:
    remove_parts(folder / REPORT)
    checkpoint = resume_point(folder)
    if checkpoint is None and any(folder.glob(f"*/{CONFIG}")):
        log.info("resuming %s in an earlier stage", folder)
    elif checkpoint is None:
        log.warning("%s has no checkpoint yet: training starts from the beginning", folder)
    else:
        log.info("resuming from %s", checkpoint)


def _train(session: Session, folder: Path, callbacks: Sequence[Callback], advice: str, console: Console) -> Run:
    """Run the objective's earlier stages, then train."""
    config, module = session.config, session.module
    train = partial(_train, callbacks=(), advice=advice, console=console)
    stages = RunStages(session, folder, console, open_folder=_begin, train=train)
    with interrupted_by_signals(advice):
        session.prepare(stages)
    stages.log_seconds()
    if config.backbone.cache_trunk is not None:
        module.to(session.probe.strategy.root_device)
        with Phases(console) as progress:
            session.cache_trunk(folder / TRUNK_CACHE, partial(progress, "frozen blocks"))
    with open_loggers(config.runtime.logger, folder, settings=asdict(config), pictures=folder / REPORT) as loggers:
        return _fit(session, folder, stages.seconds, loggers, callbacks, advice, console)


def _fit(
    session: Session,
    folder: Path,
    seconds_of_stages: Mapping[str, float],
    loggers: Sequence[Logger],
    callbacks: Sequence[Callback],
    advice: str,
    console: Console,
) -> Run:
    """Train, and write what the run leaves."""
    config, module, runtime = session.config, session.module, session.config.runtime
    checkpoint = next(iter(checkpoint_files(folder)), None)
    metrics = Metrics(folder, every_steps=runtime.log_every, batch_size=config.optim.batch_size)
    faults = LoadingFaults(
        folder,
        num_images=session.num_files,
        max_share=config.data.max_unreadable,
        every_steps=runtime.log_every,
    )
    watch = Watch(metrics)
    score = RetrievalScore(session.score_data, config, metrics) if session.score_data is not None else None
    agreement = None
    if judges_without_labels(config):
        held_out = session.held_out is not None
        agreement = AgreementScore(session.held_out or session.source, config, metrics, held_out=held_out)
    checkpoints = Checkpoints(
        folder, every_steps=runtime.checkpoint_every, keep=runtime.keep_checkpoints, resume_from=checkpoint
    )
    interruption = Interruption(lambda trainer: checkpoints.on_train_end(trainer, module), advice=advice)
    # Metrics precede callbacks that read its latest row; checkpoints follow callbacks whose state they save.
    trainer = session.trainer(
        folder,
        [
            *(metrics, faults, watch),
            *(each for each in (agreement, score) if each is not None),
            *module.objective.callbacks(folder, session.dataset),
            *(run_progress(metrics, console), TimeEstimate(config), *callbacks),
            *(checkpoints, interruption),
        ],
        module.schedules.total_steps,
        loggers,
    )
    with quiet_lightning(), interruptible(trainer, advice=advice), closing(session.loader(trainer)) as loader:
        faults.loader = loader
        trainer.fit(module, loader, ckpt_path=checkpoint)
    seconds = metrics.seconds
    module.to(trainer.strategy.root_device)  # Lightning moved it to the CPU
    if score is not None:
        score.on_train_end(trainer, module)  # not yet computed if the run was stopped after its last step
    if agreement is not None:
        agreement.on_train_end(trainer, module)
    rows = metrics.rows
    summary: dict[str, Any] = {
        "seconds": round(seconds, 2),
        **({"stages": {**seconds_of_stages, "training": round(seconds, 2)}} if seconds_of_stages else {}),
        "peak_rss_bytes": peak_rss_bytes(),
        "steps": trainer.global_step,
        "epochs": config.optim.epochs,
        "images": len(session.source),
        "images_per_second": _mean(rows, "images_per_second"),
        "losses": {
            key.removeprefix("loss_"): value for key, value in metrics.latest.items() if key.startswith("loss_")
        },
        **{key: metrics.latest[key] for key in module.objective.columns.progress if key in metrics.latest},
        "shown": progress_text(
            {name: value for name, value in metrics.latest.items() if name != "images_per_second"},
            module.objective.columns.progress,
        ),
        "unreadable_images": len(faults.reasons),
        "retried_reads": faults.retried,
        "worker_restarts": faults.restarts,
        "warnings": [{"step": step, "text": text} for step, text in watch.warnings],
        "versions": {**versions(trainer.strategy.root_device), "lightning": L.__version__},
    }
    if agreement is not None:
        summary |= agreement.summary(trainer.global_step)
    baselines = {}
    if score is not None:
        mean_colour = score.mean_colour(module)
        summary["dense_nn"] = {
            "data": score_data_name(config),
            "before": score.curve[0][1],
            "after": score.curve[-1][1] if score.curve[-1][0] == trainer.global_step else None,
            "mean_color": mean_colour,
            "curve": [{"step": step, "miou": miou} for step, miou in score.curve],
        }
        baselines = {"before training": score.curve[0][1]}
        baselines |= {} if mean_colour is None else {"mean colour": mean_colour}
    if trainer.is_global_zero:
        save_backbone(module.objective.exported(), folder)
        write_report(
            folder,
            rows,
            module.schedules,
            module.objective,
            session.dataset,
            baselines=baselines,
            scored=score_data_name(config),
        )
        write_json(folder / SUMMARY, summary)
        shutil.rmtree(folder / TRUNK_CACHE, ignore_errors=True)
    return Run(folder, summary, config.backbone.name)


def _may_change(name: str) -> bool:
    return name.startswith("runtime.") or name in _OF_READING


def _fixed(config: PretrainConfig) -> dict[str, Any]:
    """Return the values of a configuration that affect the results, by dotted name."""
    values = flat(yaml.safe_load(dump_config(config)))
    return {name: value for name, value in values.items() if not _may_change(name)}


def _require_same(folder: Path, config: PretrainConfig) -> None:
    """Require that a resumed run has the configuration of the run, except for what does not affect its results."""
    if changes := [*describe_changes(_fixed(read_run_config(folder)), _fixed(config))]:
        raise FolderError(
            f"{folder} was created with different inputs and cannot be resumed: {'; '.join(changes)}. {_MAY_CHANGE}"
        )


def _mean(rows: Sequence[dict[str, float]], name: str) -> float:
    values = [row[name] for row in rows if name in row]
    return sum(values) / len(values) if values else 0.0
