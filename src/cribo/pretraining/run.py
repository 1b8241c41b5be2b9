"""A pretraining run from its configuration to the folder that it leaves."""

import dataclasses
import json
import logging
import math
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins import LayerSync
from lightning.pytorch.strategies import DDPStrategy
from rich.console import Console
from timm.layers.norm_act import convert_sync_batchnorm
from torch.nn import Module

from cribo.arguments import ConfigError
from cribo.data import ImageSource, UnreadableImage, open_images
from cribo.data.cache import CachedImages
from cribo.data.pairs import StepBatchSampler, ViewPairDataset, pair_loader
from cribo.data.scenes import Scenes
from cribo.files import FolderError, write_json, write_text
from cribo.models import Backbone, load_backbone, save_backbone
from cribo.pretraining.allocator import keep_freed_memory
from cribo.pretraining.checkpoints import Checkpoints, WholeFileCheckpointIO, last_checkpoint
from cribo.pretraining.config import PretrainConfig
from cribo.pretraining.files import (
    CONFIG,
    SUMMARY,
    claim_run_folder,
)
from cribo.pretraining.module import PretrainingModule
from cribo.pretraining.monitoring import Metrics, UnreadableImages, Watch
from cribo.pretraining.presets import DEFAULT_PRESET, config_name, dump_config, load_config
from cribo.pretraining.progress import RunProgress
from cribo.pretraining.report import write_report
from cribo.pretraining.score import RetrievalScore, open_score_data

try:
    import resource
except ImportError:  # Windows
    resource = None

log = logging.getLogger("cribo")

# Tells the processes that Lightning starts for further devices which run folder is theirs.
_CLAIMED = "CRIBO_RUN_FOLDER"
# Composing a scene costs more than its crops; a worker keeps this much of them.
_SCENE_CACHE_BYTES = 256 * 2**20
# One readable image among this many is enough to start.
_IMAGES_TRIED = 100
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
        """The teacher's backbone, trained."""
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
    overrides: Mapping[str, Any] | None = None,
    callbacks: Sequence[Callback] = (),
    console: Console | None = None,
) -> Run:
    """Pretrain a backbone and leave a run folder; the same as `cribo pretrain`.

    Args:
        config: a preset's name, a YAML file, or a configuration.
        data: data.root, for short.
        out: folder of run folders.
        name: of this run; it must be new unless `overwrite` is set.
        default_name: numbered, it names the run when `name` is not given; the configuration's name by default.
        minutes: about how long to train on this machine: sets the number of epochs by a short timing.
        overwrite: replace a run of the same name.
        overrides: dotted names and values on top of the configuration.
        callbacks: further Lightning callbacks.
        console: where progress is shown; silent when not given.

    Returns:
        the run.

    Raises:
        ValueError: the configuration, the data, the backbone or the run folder cannot be used.
        NonFiniteLoss: training diverged; the last good checkpoint is kept.
        TooManyUnreadable: the data is broken.

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
    session = _Session(config, console=console, callbacks=callbacks)
    return session.start(Path(out), name, default_name or "run", minutes=minutes, overwrite=overwrite)


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
        overrides: of what does not change the run: `runtime.*`, `data.root`, `data.workers`.
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
        if not (name.startswith("runtime.") or name in ("data.root", "data.workers")):
            raise ConfigError(
                f"{name} cannot change when a run is resumed; only runtime.*, data.root and data.workers can: "
                "start a new run instead"
            )
    config = load_config(folder / CONFIG, overrides)
    return _Session(config, console=console, callbacks=callbacks).resume(folder)


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
    return max(found, key=lambda folder: (last_checkpoint(folder) or folder / CONFIG).stat().st_mtime)


class _Session:
    """One process's part in a run."""

    def __init__(self, config: PretrainConfig, *, console: Console | None, callbacks: Sequence[Callback]) -> None:
        self.config = config
        self.console = console or Console(quiet=True)
        self.callbacks = callbacks

    def start(self, out: Path, name: str | None, default_name: str, *, minutes: float | None, overwrite: bool) -> Run:
        # Everything that can be wrong is found before the folder is made.
        if minutes is not None and minutes <= 0:
            raise ConfigError(f"minutes must be > 0, got {minutes}")
        self._prepare()
        if minutes is not None:
            if self.config.runtime.devices not in (1, "1") or self.config.runtime.num_nodes > 1:
                raise ConfigError("--minutes times one device only: set optim.epochs instead")
            self._fit_epochs_into(60 * minutes)
        claimed = os.environ.get(_CLAIMED)
        if claimed is not None:  # this process is a further device of a run that the first process began
            return self._train(Path(claimed), None)
        folder = claim_run_folder(out, name, default_name, overwrite=overwrite)
        write_text(folder / CONFIG, dump_config(self.config))
        os.environ[_CLAIMED] = str(folder)
        try:
            return self._train(folder, None)
        finally:
            del os.environ[_CLAIMED]

    def resume(self, folder: Path) -> Run:
        summary = folder / SUMMARY
        if summary.is_file():
            log.info("%s is finished already: nothing to resume", folder)
            return Run(folder, json.loads(summary.read_text(encoding="utf-8")))
        checkpoint = last_checkpoint(folder)
        self._prepare()
        if checkpoint is None:
            log.warning("%s has no checkpoint yet: starting from the beginning", folder)
        else:
            log.info("resuming from %s", checkpoint)
        return self._train(folder, checkpoint)

    def _prepare(self) -> None:
        config = self.config
        if self._accelerator() == "cpu":
            keep_freed_memory()
        if config.runtime.threads is not None:
            torch.set_num_threads(config.runtime.threads)
        self.score_data = open_score_data(config)
        self.source = open_source(config)
        self.workers = _workers(config)
        # Checked here, where the message comes before any work; the trainer makes its own.
        StepBatchSampler(len(self.source), config.optim.batch_size, config.seed, position=lambda: 0)
        _require_readable(self.source)
        try:
            self.module = self._make_module()
            with _quiet_lightning():
                self._trainer(None, [], 1)  # refuses devices that are not there
        except MisconfigurationException as error:
            raise ConfigError(f"runtime.accelerator {config.runtime.accelerator}: {error}") from error
        except ValueError as error:
            if str(error).startswith("image size"):
                raise ConfigError(f"views.size: {error}") from error
            raise
        backbone = self.module.student.backbone
        side = config.views.size // backbone.patch_size
        tokens = 2 * side * side
        if self.score_data is not None and any(length % backbone.patch_size for length in config.score.size or ()):
            raise ConfigError(
                f"score.size must be multiples of the patch size {backbone.patch_size}, got {config.score.size}"
            )
        if config.needs_objects and config.objects.num_objects > tokens:
            raise ConfigError(
                f"objects.num_objects must be at most {tokens}, the patches of both views, got "
                f"{config.objects.num_objects}: use fewer clusters, larger views.size or smaller patches"
            )
        self.dataset = ViewPairDataset(
            self.source,
            config.views,
            grid=(side, side),
            num_objects=config.objects.num_objects if config.needs_objects else 0,
            drop_path_sites=backbone.num_drop_path_sites,
            seed=config.seed,
        )

    def _make_module(self) -> PretrainingModule:
        return PretrainingModule(
            self.config,
            num_images=len(self.source),
            steps_per_epoch=len(self.source) // self.config.optim.batch_size,
        )

    def _trainer(self, folder: Path | None, callbacks: list[Callback], max_steps: int) -> L.Trainer:
        runtime = self.config.runtime
        return L.Trainer(
            accelerator=self._accelerator(),
            devices=runtime.devices,
            num_nodes=runtime.num_nodes,
            strategy=self._strategy(),
            precision=runtime.precision,
            max_steps=max_steps,
            max_epochs=-1,
            callbacks=callbacks,
            logger=TensorBoardLogger(folder, name="", version="tensorboard") if folder else False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            use_distributed_sampler=False,
            log_every_n_steps=runtime.log_every,
            plugins=[WholeFileCheckpointIO(), *([_SyncBatchNorm()] if self._accelerator() == "gpu" else [])],
            default_root_dir=folder,
            benchmark=True,
        )

    def _accelerator(self) -> str:
        accelerator = self.config.runtime.accelerator
        return ("gpu" if torch.cuda.is_available() else "cpu") if accelerator == "auto" else accelerator

    def _strategy(self) -> str | DDPStrategy:
        runtime, losses = self.config.runtime, self.config.losses
        if runtime.devices in (1, "1") and runtime.num_nodes == 1:
            return "auto"
        # Without a loss its last layer has no gradient, nor has a frozen backbone.
        unused = not (losses.image and losses.cross_view) or self.config.optim.freeze_backbone_epochs > 0
        return DDPStrategy(find_unused_parameters=unused, broadcast_buffers=False)

    def _loader(self, trainer: L.Trainer, workers: int) -> Any:
        sampler = StepBatchSampler(
            len(self.source),
            self.config.optim.batch_size,
            self.config.seed,
            position=lambda: trainer.global_step,
            rank=trainer.global_rank,
            world_size=trainer.world_size,
        )
        sizes = (self.config.objects.group_size, self.config.optim.micro_batches, trainer.world_size)
        if self.config.optim.batch_size % math.prod(sizes):
            raise ConfigError(
                "optim.batch_size must be a multiple of objects.group_size x optim.micro_batches x devices = "
                f"{sizes[0]} x {sizes[1]} x {sizes[2]} = {math.prod(sizes)}, got {self.config.optim.batch_size}: "
                "use fewer micro-batches or devices, or a larger batch"
            )
        on_gpu = trainer.strategy.root_device.type == "cuda"
        return pair_loader(self.dataset, sampler, workers=workers, pin_memory=on_gpu)

    def _fit_epochs_into(self, seconds: float) -> None:
        """Time some steps of a throw-away copy and set the number of epochs by them."""
        timer = _StepTimer(skip=_TIMED_STEPS)
        with _quiet_lightning():
            trainer = self._trainer(None, [timer], 2 * _TIMED_STEPS)
            trainer.fit(self.module, _ForeverLoader(self._loader(trainer, self.workers)))
        seconds_per_epoch = timer.seconds_per_step * self.module.schedules.steps_per_epoch
        epochs = max(1, round(seconds / seconds_per_epoch))
        log.info(
            "%.2f s per step on this machine: %d epochs in about %.1f minutes",
            timer.seconds_per_step,
            epochs,
            epochs * seconds_per_epoch / 60,
        )
        if epochs <= self.config.optim.warmup_epochs:
            log.warning(
                "%d epochs are no more than optim.warmup_epochs %d: allow more minutes, or use a smaller preset",
                epochs,
                self.config.optim.warmup_epochs,
            )
        self.config = dataclasses.replace(self.config, optim=dataclasses.replace(self.config.optim, epochs=epochs))
        self.module = self._make_module()

    def _train(self, folder: Path, checkpoint: Path | None) -> Run:
        config, module = self.config, self.module
        if config.losses.cross_image and config.losses.cross_image_from_epoch >= config.optim.epochs:
            log.warning(
                "losses.cross_image_from_epoch %d is not reached in optim.epochs %d: the run is without L_ci^o",
                config.losses.cross_image_from_epoch,
                config.optim.epochs,
            )
        metrics = Metrics(folder, every_steps=config.runtime.log_every, batch_size=config.optim.batch_size)
        unreadable = UnreadableImages(folder, num_images=len(self.source), max_share=config.data.max_unreadable)
        watch = Watch(metrics, config)
        score = RetrievalScore(self.score_data, config, metrics) if self.score_data is not None else None
        # Metrics first: the others look at its latest row. Checkpoints last: they hold what the others did.
        callbacks: list[Callback] = [metrics, unreadable, watch]
        callbacks += [score] if score is not None else []
        callbacks += [RunProgress(metrics, self.console), *self.callbacks]
        callbacks.append(
            Checkpoints(folder, every_steps=config.runtime.checkpoint_every, keep=config.runtime.keep_checkpoints)
        )
        with _quiet_lightning():
            trainer = self._trainer(folder, callbacks, module.schedules.total_steps)
            with _interruptible(trainer, folder):
                trainer.fit(module, self._loader(trainer, self.workers), ckpt_path=checkpoint)
        module.to(trainer.strategy.root_device)  # which Lightning has taken it from
        if score is not None:  # not yet taken if the run was stopped after its last step
            score.on_train_end(trainer, module)
        summary: dict[str, Any] = {
            "seconds": round(metrics.seconds, 2),
            "peak_rss_bytes": peak_rss_bytes(),
            "steps": trainer.global_step,
            "epochs": config.optim.epochs,
            "images": len(self.source),
            "images_per_second": _mean(metrics.rows, "images_per_second"),
            "losses": {
                key.removeprefix("loss_"): value for key, value in metrics.latest.items() if key.startswith("loss_")
            },
            "bootstrapping_ratio": metrics.latest.get("bootstrapping_ratio", 0.0),
            "unreadable_images": len(unreadable.reasons),
            "warnings": [{"step": step, "text": text} for step, text in watch.warnings],
            "versions": {"torch": torch.__version__, "lightning": L.__version__},
        }
        baselines = {}
        if score is not None:
            mean_colour = score.mean_colour(module)
            summary["dense_nn"] = {
                "before": score.curve[0][1],
                "after": score.curve[-1][1],
                "mean_color": mean_colour,
                "curve": [{"step": step, "miou": miou} for step, miou in score.curve],
            }
            baselines = {"before training": score.curve[0][1], "mean colour": mean_colour}
        if trainer.is_global_zero:
            save_backbone(module.teacher.backbone, folder)
            write_report(
                folder,
                config,
                metrics.rows,
                module.schedules,
                module.teacher,
                self.dataset,
                baselines=baselines,
            )
            write_json(folder / SUMMARY, summary)
        return Run(folder, summary)


@contextmanager
def _interruptible(trainer: L.Trainer, folder: Path) -> Iterator[None]:
    """Let Ctrl-C end the training as it ends anything else in Python.

    Lightning makes it an exit of the whole program, deaf to further ones.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    except SystemExit as error:
        if not trainer.interrupted:
            raise
        if in_main_thread:
            signal.signal(signal.SIGINT, handler)
        log.warning("interrupted at step %d: continue with --resume %s", trainer.global_step, folder)
        raise KeyboardInterrupt from error


def open_source(config: PretrainConfig) -> ImageSource:
    """The images that a configuration names.

    Raises:
        DataError: missing, empty, or not what it seems.
    """
    data = config.data
    if data.root == "scenes":
        scenes = Scenes(data.scenes.count, size=data.scenes.size, seed=data.scenes.seed)
        return CachedImages(scenes, limit_bytes=_SCENE_CACHE_BYTES)
    return open_images(data.root, data.images, max_pixels=data.max_pixels)


def _require_readable(source: ImageSource) -> None:
    """Refuse a collection whose first images all are broken, before any work."""
    first: UnreadableImage | None = None
    tried = min(len(source), _IMAGES_TRIED)
    for index in range(tried):
        try:
            source.load(index)
            return
        except UnreadableImage as error:
            first = first or error
    raise ConfigError(f"none of the first {tried} images of data.root can be read: {first}")


def peak_rss_bytes() -> int:
    """The most memory that this process held plus the most that one of its workers did, in bytes; 0 if unknown."""
    if resource is None:
        return 0
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * (own + children)


def _workers(config: PretrainConfig) -> int:
    if config.data.workers is not None:
        return config.data.workers
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(16, cores - 1))


def _mean(rows: list[dict[str, float]], name: str) -> float:
    values = [row[name] for row in rows if name in row]
    return sum(values) / len(values) if values else 0.0


class _SyncBatchNorm(LayerSync):
    """Batch norms over all GPUs; timm's conversion keeps the activations inside its own norms."""

    def apply(self, model: Module) -> Module:
        return convert_sync_batchnorm(model)

    def revert(self, model: Module) -> Module:
        return model


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


class _ForeverLoader:
    """A loader again and again, for a data set whose epoch is shorter than what is timed."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from self.loader


@contextmanager
def _quiet_lightning() -> Iterator[None]:
    """Leave out what Lightning says about choices that were made on purpose."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            for text in (
                ".*does not have many workers.*",
                ".*GPU available but not used.*",
                ".*tensorboardX.*",
                ".*is smaller than the logging interval.*",
                # The order of the data is a function of the step: StepBatchSampler.
                ".*your dataloader is not resumable.*",
                ".*torch.distributed.nn.functional.all_gather is deprecated.*",
                ".*LeafSpec.*is deprecated.*",
            ):
                warnings.filterwarnings("ignore", text)
            yield
    finally:
        logger.setLevel(level)
