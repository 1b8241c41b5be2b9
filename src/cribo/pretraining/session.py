"""Set up a run or a profile: images, network, trainer and loader."""

import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins import DoublePrecision
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch.nn.modules.batchnorm import _BatchNorm

from cribo.base.devices import multiplies_bfloat16
from cribo.base.errors import ConfigError, DataError
from cribo.base.packages import require_packages
from cribo.base.wording import counted
from cribo.data import ImageSource, open_collection
from cribo.data.loading import BatchLoader
from cribo.data.samples import SampleDataset, StepBatchSampler
from cribo.data.scenes import Scenes
from cribo.data.sources.cache import CachedImages
from cribo.data.sources.clips import Clips
from cribo.data.sources.images import EncodedImages, has_images, require_readable
from cribo.data.sources.video_files import has_video_files, open_video_files
from cribo.data.survey import surveyed
from cribo.models.backbone import RGB
from cribo.objectives.base import BUILT_IN, Stages, objective_class
from cribo.objectives.trunk_cache import fill
from cribo.pretraining.batches import advice_for_few, advice_for_groups
from cribo.pretraining.config import PretrainConfig
from cribo.pretraining.module import PretrainingModule
from cribo.pretraining.score import open_score_data, split_held_out
from cribo.training.lightning import make_trainer, require_launched
from cribo.training.loggers import require_loggers

# Rendering a scene takes longer than cropping it; each worker caches this many bytes.
_SCENE_CACHE_BYTES = 256 * 2**20
# Training starts if one of this many first images is readable.
_IMAGES_TRIED = 100

log = logging.getLogger("cribo")


def check_packages(config: PretrainConfig) -> None:
    """Check that the optional packages of a configuration are installed.

    Raises:
        ConfigError: the objective does not exist.
        MissingPackage: a package is not installed.
    """
    objective_class(config.objective.name).check_packages()
    if config.backbone.lora is not None:
        require_packages("backbone.lora", "peft", extra="lora", otherwise=", or remove backbone.lora")
    require_loggers(config.runtime.logger)


class Session:
    """Images, network and trainer of a configuration; checks the configuration before training.

    Args:
        config: configuration of the run.

    Attributes:
        config: configuration of the run.
        source: the images.
        score_data: the labelled images of the score; None without a score.
        held_out: images for neighbour agreement that are not trained on; None if there are none.
        dataset: the samples.
        module: the Lightning module.
        workers: number of worker processes.
        probe: a trainer with the run's devices.

    Raises:
        ValueError: the configuration, the data or the backbone cannot be used.
        MissingPackage: an optional package of the objective, LoRA, the data or a logger is not installed.
    """

    def __init__(self, config: PretrainConfig) -> None:
        self.config = config
        check_packages(config)
        require_launched(config.runtime.devices, config.runtime.num_nodes)
        on_cpu = self._accelerator() == "cpu"
        self.score_data = open_score_data(config)
        self.source, self.held_out = _open_sources(config)
        if isinstance(files := getattr(self.source, "images", self.source), EncodedImages):
            self.config = config = replace(config, data=replace(config.data, range=files.reading.range))
        _require_precision(config.runtime.precision, on_cpu=on_cpu)
        self.workers = loading_workers(config)
        if len(self.source) < config.optim.batch_size:
            processes = local_processes(config.runtime.devices) * config.runtime.num_nodes
            advice = advice_for_few(config, len(self.source), processes)
            what = f"has {counted(len(self.source), 'image')}"
            if isinstance(self.source, Clips):
                what = f"has videos with {counted(len(self.source), 'clip')} of up to {self.source.most} frames"
                advice = f"lower data.video.frames, {advice}"
            raise DataError(f"data.root {what}, fewer than one batch of {config.optim.batch_size}: {advice}")
        require_readable(self.source, "data.root", most=_IMAGES_TRIED)
        try:
            self.module = self.make_module()
        except ValueError as error:
            if str(error).startswith("image size"):
                raise ConfigError(f"views.size: {error}") from error
            raise
        if isinstance(self.source, Clips):
            self.source.require_frames(self.module.objective.clip_frames)
        self.probe = self.trainer(None, [], 1)
        devices = self.probe.world_size
        _require_shareable(config, len(self.source), self.module.objective.images_per_group, devices)
        backbone = self.module.objective.exported()
        if devices > 1 and on_cpu and any(isinstance(m, _BatchNorm) for m in backbone.modules()):
            log.warning(
                "batch norms are synchronised on GPUs only: each of %d CPU processes uses the statistics of its own "
                "share of the batch, so the run differs from one with a single process",
                devices,
            )
        if self.score_data is not None and any(length % backbone.patch_size for length in config.score.size or ()):
            raise ConfigError(
                f"score.size must be multiples of the patch size {backbone.patch_size}, got {config.score.size}"
            )
        if config.backbone.cache_trunk is not None and devices > 1:
            raise ConfigError(f"backbone.cache_trunk supports a single device only, got {devices}: remove it")
        self.dataset = SampleDataset(self.source, self.module.objective.samples(), seed=config.seed)
        self._trained_on = self.dataset

    @property
    def num_files(self) -> int:
        """Number of images, or of the frames of all clips."""
        return len(self.source.images if isinstance(self.source, Clips) else self.source)

    def prepare(self, stages: Stages) -> None:
        """Run the objective's earlier stages, then create its samples."""
        self.module.objective.prepare(stages)
        self.dataset = SampleDataset(self.source, self.module.objective.samples(), seed=self.config.seed)
        self._trained_on = self.dataset

    def cache_trunk(self, folder: Path, progress: Callable[[int, int], None]) -> None:
        """Cache the output of the frozen blocks for `backbone.cache_trunk` view pairs per image, and train on it.

        Args:
            folder: folder of the cache.
            progress: called with the number of images done and their total.

        Raises:
            ConfigError: see `trunk_cache.fill`.
        """
        samples = fill(self.module.objective, self.source, folder, workers=self.workers, progress=progress)
        self._trained_on = SampleDataset(self.source, samples, seed=self.config.seed)

    def make_module(self) -> PretrainingModule:
        """Create a new module for the current configuration."""
        module = PretrainingModule(
            self.config,
            num_images=len(self.source),
            steps_per_epoch=len(self.source) // self.config.optim.batch_size,
        )
        # Lightning would convert the weights only after restoring a checkpoint, which would round them.
        return module.double() if self.config.runtime.precision == "64-true" else module

    def trainer(
        self, folder: Path | None, callbacks: Sequence[Callback], max_steps: int, loggers: Sequence[Logger] = ()
    ) -> L.Trainer:
        """Create a trainer that stops after `max_steps`, for a run folder or for timing."""
        runtime = self.config.runtime
        double = runtime.precision == "64-true"
        return make_trainer(
            folder,
            callbacks,
            max_steps,
            accelerator=self._accelerator(),
            threads=runtime.threads,
            loggers=loggers,
            devices=runtime.devices,
            num_nodes=runtime.num_nodes,
            strategy=self._strategy(),
            precision=None if double else runtime.precision,
            plugins=[_Double()] if double else [],
            log_every_n_steps=runtime.log_every,
            benchmark=True,
        )

    def loader(self, trainer: L.Trainer) -> BatchLoader:
        """Create a loader for the trainer's rank, from its current step on; close it to end its workers."""
        sampler = StepBatchSampler(
            self.source,
            self.config.optim.batch_size,
            self.config.seed,
            position=lambda: trainer.global_step,
            rank=trainer.global_rank,
            world_size=trainer.world_size,
        )
        device = trainer.strategy.root_device
        return BatchLoader(
            self._trained_on,
            sampler,
            workers=self.workers,
            pin_memory=device.type == "cuda",
            device=device if device.type == "cuda" else None,
            timeout=self.config.data.timeout,
            max_restarts=self.config.data.max_restarts,
        )

    def _accelerator(self) -> str:
        accelerator = self.config.runtime.accelerator
        return ("gpu" if torch.cuda.is_available() else "cpu") if accelerator == "auto" else accelerator

    def _strategy(self) -> str | Strategy:
        runtime = self.config.runtime
        if runtime.devices in (1, "1") and runtime.num_nodes == 1:
            return "auto"
        unused = not self.module.objective.uses_all_parameters
        return DDPStrategy(find_unused_parameters=unused, broadcast_buffers=False)


def open_source(config: PretrainConfig) -> ImageSource:
    """Open the images of a configuration, or the clips if its objective reads clips.

    Raises:
        DataError: images are missing or invalid.
    """
    return _open_sources(config)[0]


def _open_sources(config: PretrainConfig) -> tuple[ImageSource, ImageSource | None]:
    """Open the images or clips to train on, and the images that are held out for neighbour agreement."""
    data = config.data
    reads_clips = objective_class(config.objective.name).clip_frames > 0
    if data.root == "scenes":
        if data.reading.in_chans != RGB:
            raise ConfigError(f"data.root scenes are RGB, got {data.reading.in_chans} of data.channels: remove it")
        frames = data.scenes.frames if reads_clips else 1
        scenes = Scenes(data.scenes.count, size=data.scenes.size, seed=data.scenes.seed, frames=frames)
        images: ImageSource = CachedImages(scenes, limit_bytes=_SCENE_CACHE_BYTES)
    elif reads_clips and has_video_files(path := Path(data.root).expanduser() / data.images):
        if has_images(path):
            raise DataError(f"{path} contains both video files and images: choose one with data.images SUBFOLDER")
        images = open_video_files(path, reading=data.reading)
    else:
        images = open_collection(
            data.root,
            data.images,
            reading=data.reading,
            inside=data.inside,
            cache_dir=data.cache_dir,
            cache_gib=data.cache_gib,
        )
        if isinstance(images, EncodedImages):
            images.reading = surveyed(images)
    if reads_clips:
        return Clips(images, most=data.video.frames, stride=data.video.stride), None
    return split_held_out(images, config)


def _require_precision(precision: str, *, on_cpu: bool) -> None:
    if precision == "64-true" and not on_cpu:
        raise ConfigError(
            "runtime.precision 64-true is for comparing runs on a CPU: set runtime.accelerator cpu, or use 32-true"
        )
    if precision == "bf16-mixed" and on_cpu and not multiplies_bfloat16():
        log.warning(
            "runtime.precision bf16-mixed: this processor does not support bfloat16 products (AVX512-BF16 or AMX), so "
            "this is slower than float32: use --runtime.precision 32-true"
        )


def _require_shareable(config: PretrainConfig, num_images: int, images_per_group: int, devices: int) -> None:
    """Check that a batch can be split into whole groups on each device."""
    sizes = (images_per_group, config.optim.micro_batches, devices)
    if config.optim.batch_size % math.prod(sizes):
        of_objects = config.objective.name in BUILT_IN and images_per_group == config.objects.group_size
        group = "objects.group_size" if of_objects else "the objective's images_per_group"
        advice = advice_for_groups(config, num_images, None if of_objects else images_per_group, devices)
        raise ConfigError(
            f"optim.batch_size must be a multiple of {group} x optim.micro_batches x devices = "
            f"{sizes[0]} x {sizes[1]} x {sizes[2]} = {math.prod(sizes)}, got {config.optim.batch_size}: {advice}"
        )


def loading_workers(config: PretrainConfig) -> int:
    """Return the number of data loading workers of each process: `data.workers`, by default one less than its cores."""
    if config.data.workers is not None:
        return config.data.workers
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(16, cores // local_processes(config.runtime.devices) - 1))


def local_processes(devices: int | str) -> int:
    """Return the number of processes of the run on this machine."""
    if "LOCAL_WORLD_SIZE" in os.environ:
        return max(1, int(os.environ["LOCAL_WORLD_SIZE"]))
    if str(devices).isdecimal():
        return max(1, int(devices))
    return max(1, torch.cuda.device_count())  # auto


class Forever:
    """Endless iteration over a loader, for timing more than an epoch."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from self.loader


class _Double(DoublePrecision):
    """Precision plugin for float64 weights; the network converts batches itself."""

    def convert_input(self, data: Any) -> Any:
        return data
