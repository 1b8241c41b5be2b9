"""A pretraining run from its configuration to the folder that it leaves."""

import dataclasses
import json
import logging
import math
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
import yaml
from lightning.pytorch.callbacks import Callback
from rich.console import Console

from cribo.arguments import ConfigError
from cribo.files import FolderError, remove_parts, write_json, write_text
from cribo.models import Backbone, load_backbone, save_backbone
from cribo.pretraining.config import PretrainConfig
from cribo.pretraining.files import CONFIG, REPORT, SUMMARY, claim_run_folder
from cribo.pretraining.footprint import peak_rss_bytes
from cribo.pretraining.monitoring import LoadingFaults, Metrics, Watch
from cribo.pretraining.presets import DEFAULT_PRESET, config_name, differing, dump_config, load_config
from cribo.pretraining.progress import RunProgress, progress_text
from cribo.pretraining.report import write_report
from cribo.pretraining.score import RetrievalScore
from cribo.pretraining.session import Forever, Session
from cribo.processes import LAUNCHER, end_with_launcher
from cribo.training.checkpoints import Checkpoints, checkpoint_files, resume_point
from cribo.training.interruption import Interrupted, Interruption
from cribo.training.lightning import interruptible, quiet_lightning
from cribo.training.lock import is_barely_begun, run_lock

log = logging.getLogger("cribo")

# What may change beside runtime.* when a run is resumed.
_OF_READING = (
    *("data.root", "data.workers", "data.cache_dir", "data.cache_gib"),
    *("data.max_unreadable", "data.timeout", "data.max_restarts"),
)
# Tells the processes that Lightning starts for further devices which run folder is theirs.
_CLAIMED = "CRIBO_RUN_FOLDER"
# Steps that are timed, after as many to warm up, to find how many epochs fit into --minutes.
_TIMED_STEPS = 8


@dataclass(frozen=True)
class Run:
    """What a run left.

    Attributes:
        folder: the run folder.
        summary: what `summary.json` holds.
    """

    folder: Path
    summary: dict[str, Any] = field(repr=False)

    def backbone(self) -> Backbone:
        """What the run has trained."""
        return load_backbone(self.folder)


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
    console: Console | None = None,
) -> Run:
    """Pretrain a backbone and leave a run folder; the same as `cribo pretrain`.

    Args:
        config: a preset's name, a YAML file, or a configuration.
        data: data.root, for short.
        out: folder of run folders.
        name: of this run; it must be new unless `overwrite` or `continue_run` is set.
        default_name: numbered, it names the run when `name` is not given; the configuration's name by default.
        minutes: about how long to train on this machine: sets the number of epochs by a short timing, and ends the run
            at twice the time if the machine becomes slower.
        overwrite: replace a run of the same name.
        continue_run: go on with the run of the same name, if there is one, from its last checkpoint: for schedulers
            that start the same command again. A finished run is left as it is.
        overrides: dotted names and values on top of the configuration.
        callbacks: further Lightning callbacks.
        console: where progress is shown; silent when not given.

    Returns:
        the run.

    Raises:
        ValueError: the configuration, the data, the backbone or the run folder cannot be used.
        NonFiniteLoss: training diverged; the last checkpoint is sound.
        Interrupted: SIGTERM or SIGUSR1 came; a checkpoint was written. (Ctrl-C is a KeyboardInterrupt.)
        TooManyUnreadable: the data is broken.
        WorkersFailed: processes that load were killed or hung too often.

    Example::

        run = cribo.pretrain("adapt", data="my/images", overrides={"optim.epochs": 10})
        features = run.backbone().encode(images)
    """
    overrides = dict(overrides or {})
    if data is not None:
        overrides["data.root"] = str(data)
    if isinstance(config, PretrainConfig):
        if overrides:
            raise ConfigError("overrides go with a preset or a file: set the values of the PretrainConfig")
    else:
        default_name = default_name or config_name(config)
        config = load_config(config, overrides)
    training = _Training(config, console=console, callbacks=callbacks)
    if continue_run:
        if name is None or overwrite:
            what = "does not go with --overwrite" if name is not None else "needs the --name of the run"
            raise ConfigError(f"--continue {what}: it goes on with the run of a name, or begins it")
        return training.go_on(Path(out), name, minutes=minutes)
    return training.start(Path(out), name, default_name or "run", minutes=minutes, overwrite=overwrite)


def resume(
    folder: str | Path,
    *,
    overrides: Mapping[str, Any] | None = None,
    callbacks: Sequence[Callback] = (),
    console: Console | None = None,
) -> Run:
    """Continue a run from its last checkpoint.

    Args:
        folder: the run folder.
        overrides: of what does not change the run: `runtime.*`, and where and how images are read.
        callbacks: further Lightning callbacks.
        console: where progress is shown; silent when not given.

    Raises:
        FolderError: no run there.
        ConfigError: an override that would make it another run.
    """
    folder = Path(folder)
    if not (folder / CONFIG).is_file():
        raise FolderError(f"{folder} holds no {CONFIG}, so there is no run to resume")
    for name in overrides or {}:
        if not _may_change(name):
            raise ConfigError(
                f"{name} cannot change when a run is resumed; only runtime.* and {', '.join(_OF_READING)} can: "
                "start a new run instead"
            )
    config = load_config(folder / CONFIG, overrides)
    return _Training(config, console=console, callbacks=callbacks).resume(folder)


def overrides_in(words: Sequence[str]) -> dict[str, Any]:
    """The values of the configuration among the words of a command line, by name."""
    found: dict[str, Any] = {}
    for position, word in enumerate(words):
        name, given, value = word.removeprefix("--").partition("=")
        if word.startswith("--") and name.split(".")[0] in PretrainConfig.__dataclass_fields__:
            found[name] = yaml.safe_load(value if given else words[position + 1])
    return found


def latest_run(out: str | Path) -> Path:
    """The run folder that was written to last.

    Raises:
        FolderError: there is none.
    """
    found = [path.parent for path in Path(out).glob(f"*/{CONFIG}")]
    if not found:
        raise FolderError(f"there is no run in {out} to resume: name its folder after --resume")
    return max(found, key=lambda folder: next(iter(checkpoint_files(folder)), folder / CONFIG).stat().st_mtime)


class _Training:
    """One process's part in a run."""

    def __init__(self, config: PretrainConfig, *, console: Console | None, callbacks: Sequence[Callback]) -> None:
        end_with_launcher()
        self.config = config
        self.console = console or Console(quiet=True)
        self.callbacks = callbacks
        self._limit = math.inf  # seconds of training

    # Everything that can be wrong with a configuration is found before a folder is made.

    def start(self, out: Path, name: str | None, default_name: str, *, minutes: float | None, overwrite: bool) -> Run:
        self._prepare(minutes)
        return self._run(partial(self._claim, out, name, default_name, overwrite=overwrite))

    def go_on(self, out: Path, name: str, *, minutes: float | None) -> Run:
        folder = out / name
        if minutes is not None and (folder / CONFIG).is_file():  # it was timed when it was begun
            self.config = with_epochs(self.config, load_config(folder / CONFIG).optim.epochs)
            minutes = None
        finished = _finished(folder)
        if finished is not None:
            _require_same(folder, self.config)
            return finished
        self._prepare(minutes)
        return self._run(partial(self._claim_or_reopen, out, name))

    def resume(self, folder: Path) -> Run:
        finished = _finished(folder)
        if finished is not None:
            return finished
        self._prepare(None)
        return self._run(partial(self._reopen, folder))

    def _prepare(self, minutes: float | None) -> None:
        if minutes is not None and minutes <= 0:
            raise ConfigError(f"minutes must be > 0, got {minutes}")
        self.session = Session(self.config)
        if minutes is not None:
            if self.config.runtime.devices not in (1, "1") or self.config.runtime.num_nodes > 1:
                raise ConfigError("--minutes times one device only: set optim.epochs instead")
            self._plan(minutes)

    def _run(self, open_folder: Callable[[ExitStack], tuple[Path, Path | None]]) -> Run:
        """Train in the folder and from the checkpoint that the first process opens."""
        claimed = os.environ.get(_CLAIMED)
        if claimed is not None:  # this process is a further device of a run that the first process has opened
            folder = Path(claimed)
            return self._train(folder, next(iter(checkpoint_files(folder)), None))
        with ExitStack() as held:
            folder, checkpoint = self.session.agree(partial(open_folder, held))
            for variable, value in ((_CLAIMED, str(folder)), (LAUNCHER, str(os.getpid()))):
                os.environ[variable] = value
                held.callback(os.environ.pop, variable)
            return self._train(folder, checkpoint)

    def _claim(
        self, out: Path, name: str | None, default_name: str, held: ExitStack, *, overwrite: bool
    ) -> tuple[Path, None]:
        folder = claim_run_folder(out, name, default_name, overwrite=overwrite)
        held.enter_context(run_lock(folder))
        write_text(folder / CONFIG, dump_config(self.config))
        return folder, None

    def _reopen(self, folder: Path, held: ExitStack) -> tuple[Path, Path | None]:
        held.enter_context(run_lock(folder))
        return self._go_on_from_last(folder)

    def _go_on_from_last(self, folder: Path) -> tuple[Path, Path | None]:
        remove_parts(folder / REPORT)
        checkpoint = resume_point(folder)
        if checkpoint is None:
            log.warning("%s has no checkpoint yet: starting from the beginning", folder)
        else:
            log.info("resuming from %s", checkpoint)
        return folder, checkpoint

    def _claim_or_reopen(self, out: Path, name: str, held: ExitStack) -> tuple[Path, Path | None]:
        folder = out / name
        if not ((folder / CONFIG).is_file() or is_barely_begun(folder)):
            claim_run_folder(out, name, name, overwrite=False)
        held.enter_context(run_lock(folder))  # the same command may be starting elsewhere
        if (folder / CONFIG).is_file():
            _require_same(folder, self.config)
            return self._go_on_from_last(folder)
        remove_parts(folder)
        write_text(folder / CONFIG, dump_config(self.config))
        return folder, None

    def _plan(self, minutes: float) -> None:
        """Time some steps of a throw-away copy, and set the number of epochs, and what depends on it, by them."""
        timer = _StepTimer(skip=_TIMED_STEPS)
        with quiet_lightning():
            trainer = self.session.trainer(None, [timer], 2 * _TIMED_STEPS)
            with interruptible(trainer), closing(self.session.loader(trainer)) as loader:
                trainer.fit(self.session.module, Forever(loader))
        seconds_per_epoch = timer.seconds_per_step * self.session.module.schedules.steps_per_epoch
        epochs = max(1, round(60 * minutes / seconds_per_epoch))
        self._limit = 2 * max(60 * minutes, seconds_per_epoch)
        log.info(
            "%.2f s per step on this machine: %d epochs of %d steps in about %.1f minutes",
            timer.seconds_per_step,
            epochs,
            self.session.module.schedules.steps_per_epoch,
            epochs * seconds_per_epoch / 60,
        )
        self.config = self.session.config = with_epochs(self.config, epochs)
        self.session.module = self.session.make_module()

    def _train(self, folder: Path, checkpoint: Path | None) -> Run:
        config, session, module = self.config, self.session, self.session.module
        metrics = Metrics(folder, every_steps=config.runtime.log_every, batch_size=config.optim.batch_size)
        faults = LoadingFaults(
            folder,
            num_images=len(session.source),
            max_share=config.data.max_unreadable,
            every_steps=config.runtime.log_every,
        )
        watch = Watch(metrics)
        score = RetrievalScore(session.score_data, config, metrics) if session.score_data is not None else None
        # Metrics before those that look at its latest row. Checkpoints last: they hold what the others did.
        checkpoints = Checkpoints(
            folder,
            every_steps=config.runtime.checkpoint_every,
            keep=config.runtime.keep_checkpoints,
            resume_from=checkpoint,
        )
        callbacks: list[Callback] = [metrics, faults, watch]
        callbacks += [score] if score is not None else []
        callbacks += module.objective.callbacks(folder, session.dataset)
        callbacks += [RunProgress(metrics, self.console), *self.callbacks]
        advice = f"continue with --resume {folder}"

        def save(trainer: L.Trainer) -> None:
            checkpoints.on_train_end(trainer, module)

        callbacks += [checkpoints, Interruption(save, advice=advice)]
        if self._limit < math.inf:
            callbacks.append(_TimeLimit(self._limit))
        with quiet_lightning():
            trainer = session.trainer(folder, callbacks, module.schedules.total_steps)
            try:
                with interruptible(trainer, advice=advice), closing(session.loader(trainer)) as loader:
                    faults.loader = loader
                    trainer.fit(module, loader, ckpt_path=checkpoint)
            except Interrupted as error:
                if error.signal != signal.SIGINT:
                    raise
                log.warning("%s", error)
                raise KeyboardInterrupt from error
        module.to(trainer.strategy.root_device)  # which Lightning has taken it from
        if score is not None:  # not yet taken if the run was stopped after its last step
            score.on_train_end(trainer, module)
        summary: dict[str, Any] = {
            "seconds": round(metrics.seconds, 2),
            "peak_rss_bytes": peak_rss_bytes(),
            "steps": trainer.global_step,
            "epochs": config.optim.epochs,
            "images": len(session.source),
            "images_per_second": _mean(metrics.rows, "images_per_second"),
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
            "versions": {"torch": torch.__version__, "lightning": L.__version__},
        }
        baselines = {}
        if score is not None:
            mean_colour = score.mean_colour(module)
            summary["dense_nn"] = {
                "before": score.curve[0][1],
                "after": score.curve[-1][1] if score.curve[-1][0] == trainer.global_step else None,
                "mean_color": mean_colour,
                "curve": [{"step": step, "miou": miou} for step, miou in score.curve],
            }
            baselines = {"before training": score.curve[0][1]}
            baselines |= {} if mean_colour is None else {"mean colour": mean_colour}
        if trainer.is_global_zero:
            save_backbone(module.objective.exported(), folder)
            write_report(folder, metrics.rows, module.schedules, module.objective, session.dataset, baselines=baselines)
            write_json(folder / SUMMARY, summary)
        return Run(folder, summary)


def _finished(folder: Path) -> Run | None:
    """The run in a folder, if it is finished."""
    summary = folder / SUMMARY
    if not summary.is_file():
        return None
    log.info("%s is finished already: nothing to resume", folder)
    return Run(folder, json.loads(summary.read_text(encoding="utf-8")))


def _may_change(name: str) -> bool:
    return name.startswith("runtime.") or name in _OF_READING


def _require_same(folder: Path, config: PretrainConfig) -> None:
    """Refuse to go on with a run under a configuration that would make it another."""
    for name, before, now in differing(load_config(folder / CONFIG), config):
        if not _may_change(name):
            raise ConfigError(
                f"{folder} was begun with {name} {before}, not {now}; only runtime.* and {', '.join(_OF_READING)} can "
                "change: leave it as it was, or choose another --name"
            )


def _mean(rows: Sequence[dict[str, float]], name: str) -> float:
    values = [row[name] for row in rows if name in row]
    return sum(values) / len(values) if values else 0.0


class _StepTimer(Callback):
    def __init__(self, *, skip: int) -> None:
        self.skip = skip
        self.seconds_per_step = 0.0

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self.skip:
            self._started = time.perf_counter()
        elif trainer.global_step > self.skip:
            elapsed = time.perf_counter() - self._started
            self.seconds_per_step = elapsed / (trainer.global_step - self.skip)


class _TimeLimit(Callback):
    """Ends a planned run early on a machine that has become far slower than it was when the run was planned."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._started = 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._started = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if time.perf_counter() - self._started > self.seconds and not trainer.should_stop:
            log.warning(
                "stopping at step %d of %d, after twice the time that was planned: the machine has become slower",
                trainer.global_step,
                trainer.max_steps,
            )
            trainer.should_stop = True


def with_epochs(config: PretrainConfig, epochs: int) -> PretrainConfig:
    """A run of another length, where what begins or ends at an epoch keeps its place in the run.

    Example:
        >>> shorter = with_epochs(load_config("imagenet_vits16"), 10)
        >>> shorter.optim.warmup_epochs
        1
    """
    factor = epochs / config.optim.epochs

    def placed(epoch: int) -> int:
        return epoch if epoch <= 1 else max(1, round(factor * epoch))

    optim, losses, score = config.optim, config.losses, config.score
    return dataclasses.replace(
        config,
        optim=dataclasses.replace(
            optim,
            epochs=epochs,
            warmup_epochs=placed(optim.warmup_epochs),
            freeze_last_layers_epochs=placed(optim.freeze_last_layers_epochs),
            freeze_backbone_epochs=placed(optim.freeze_backbone_epochs),
        ),
        losses=dataclasses.replace(
            losses,
            cross_image_from_epoch=placed(losses.cross_image_from_epoch),
            teacher_temperature_epochs=placed(losses.teacher_temperature_epochs),
        ),
        score=dataclasses.replace(score, every_epochs=placed(score.every_epochs)),
    )
