"""Configuration of a pretraining run, typed and checked before it starts."""

import re
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from cribo.base.bounds import above, at_least, between, check_bounds
from cribo.base.errors import InputError
from cribo.data.config import MAX_PIXELS, PIXEL_OPTIONS, Reading
from cribo.data.labelled.sets import HELD_OUT_SCENES
from cribo.models.config import CUDA_GRAPH_MODES, CompileMode
from cribo.objectives.config import ObjectiveOptions
from cribo.training.loggers import TENSORBOARD, require_known

Compile = Literal["auto", "none"] | CompileMode
Precision = Literal["64-true", "32-true", "bf16-mixed", "16-mixed"]


@dataclass
class ScenesConfig:
    """Synthetic scenes, used when data.root is `scenes`.

    Attributes:
        count: number of different scenes to train on.
        size: side of a scene in pixels.
        seed: seed of the scenes.
        frames: number of frames of a moving scene, for objectives that read clips.
    """

    count: Annotated[int, between(1, 2**31)] = 4000
    size: Annotated[int, between(16, 1024)] = 96
    seed: Annotated[int, between(0, 2**31)] = 0
    frames: Annotated[int, between(1, 1000)] = 8


@dataclass
class VideoConfig:
    """Videos, for objectives that read clips, such as `timet`.

    A video is a file, or the images of a folder whose names differ in their last number only. Each epoch reads every
    clip once.

    Attributes:
        frames: maximum number of frames of a clip; longer videos are cut into clips.
        stride: use one in this many frames, such as 5 at 30 frames per second.
    """

    frames: Annotated[int, between(1, 2**31)] = 32
    stride: Annotated[int, between(1, 2**31)] = 1


@dataclass
class DataConfig:
    """Training images and their loading.

    Attributes:
        root: a folder of images (may be nested), a text file that lists images, a folder of tar shards or its URL,
            such as s3://bucket/prefix, or `scenes`. For objectives that read clips, also video files.
        images: sub-folder of root to read, such as train2017; root itself if empty.
        workers: number of processes that decode and crop; by default, depends on the number of cores. Increase it as
            long as images/s grows.
        max_unreadable: share of images that may be unreadable before training stops; unreadable images are skipped,
            counted and listed in the run folder.
        timeout: seconds without a batch after which workers are considered hung and are restarted. Raise it if loading
            a batch, or its shards, may take longer.
        max_restarts: maximum number of worker restarts for one batch, after they were killed or hung.
        max_pixels: larger images count as unreadable, since a small file can expand to more pixels than fit into
            memory. Raise it for larger images.
        range: LOW,HIGH, the values that become black and white in images with more than 8 bits per channel, such as
            0,4095 for a camera of 12 bits; or LOW,HIGH for each of `channels`. Give it if images are too dark or
            too bright. [the range that the file states, else
            the percentiles 0.1 and 99.9 of the collection]
        channels: numbers, from 0, of the channels to read. Three become red, green and blue, one becomes grey; for any
            other number, the first layer of an RGB network is inflated to take them. Required for images with other
            numbers of channels. [all of grey and RGB images]
        page: number, from 0, of the one page of each stack to read, such as a plane, a time or a depth. [every page is
            an image of its own]
        pixel_size: side of a pixel to which images are resized: in micrometres for slides, OME-TIFF and other TIFFs
            that state their resolution, in units of the map, such as metres, for GeoTIFF. Of a pyramid, the level that
            is just as fine or finer is read. 0 is full resolution, whatever a backbone states. [full resolution]
        inside: reject lists and links that lead to image files outside root's folder.
        cache_dir: folder on this machine in which shards from a URL are cached.
        cache_gib: size of the cache in GiB; the least recently used shards are removed first. If not all shards fit,
            every machine downloads each of them once per epoch.
        scenes: options of synthetic scenes.
        video: options of videos.
    """

    root: str = "scenes"
    images: str = ""
    workers: Annotated[int, between(0, 1024)] | None = None
    max_unreadable: Annotated[float, between(0, 1)] = 0.01
    timeout: Annotated[float, above(0)] = 420.0
    max_restarts: Annotated[int, between(0, 1000)] = 3
    max_pixels: Annotated[int, at_least(4)] = MAX_PIXELS
    range: tuple[float, ...] | None = None
    channels: tuple[int | str, ...] | None = None
    page: Annotated[int, at_least(0)] | None = None
    pixel_size: Annotated[float, at_least(0)] | None = None
    inside: bool = False
    cache_dir: str = "~/.cache/cribo/shards"
    cache_gib: Annotated[float, above(0)] = 100.0
    scenes: ScenesConfig = field(default_factory=ScenesConfig)
    video: VideoConfig = field(default_factory=VideoConfig)

    @property
    def reading(self) -> Reading:
        """How the images are read."""
        options = {name: getattr(self, name) for name in PIXEL_OPTIONS}
        return Reading(max_pixels=self.max_pixels, **options)


@dataclass
class ObjectiveConfig:
    """Training objective.

    Attributes:
        name: `cribo`, `croc`, `slotcon`, `orl`, `byol`, `dino`, `ibot`, `mae`, `loca`, `contextual`, `neco`, `paka`,
            `timet`, `alignment`, `distill`, or the import path of a custom Objective, such as my_package.MyObjective
            (docs/extending.md). `--objective NAME` and `--objective.class_path` are aliases.
        args: arguments of the objective, such as {local_crops: 6}; `--objective.init_args` is an alias.
    """

    name: str = "cribo"
    args: dict[str, Any] = field(default_factory=dict)


@dataclass
class ScoreConfig:
    """Dense retrieval on labelled images during training, by default as in `cribo evaluate dense-nn --ratios 1`.

    Labels are never used for training.

    Attributes:
        root: folder with images/{train,val}, labels/{train,val} and classes.txt; `scenes` for held-out scenes;
            `data` for data.root itself; no score by default.
        every_epochs: epochs between scores; scores are also computed before and after training.
        size: (height, width) to which images are resized; the closest multiple of the patch size by default.
        neighbours: k, number of nearest neighbours.
        memory_ratio: n, to use one in n of the memory images.
        images: (memory, query) numbers of held-out scenes, for `scenes`; as in `cribo evaluate --data scenes` by
            default.
        held_out: most images of data.root, where these are files, that are left out of training; neighbour agreement on
            them shows without labels whether the features improve. At most a tenth of the images, and never so many
            that a batch cannot be filled: if fewer than two remain, nothing is left out, and images that are trained
            on are used. 0 disables it; ignored with labelled images of your own (root) and for clips.
    """

    root: str | None = None
    every_epochs: Annotated[int, at_least(1)] = 10
    size: tuple[Annotated[int, between(1, 8192)], Annotated[int, between(1, 8192)]] | None = None
    neighbours: Annotated[int, between(1, 10_000)] = 50
    memory_ratio: Annotated[int, between(1, 2**31)] = 1
    images: tuple[Annotated[int, between(1, 2**31)], Annotated[int, between(1, 2**31)]] = HELD_OUT_SCENES
    held_out: Annotated[int, between(0, 2**31)] = 0


@dataclass
class RuntimeConfig:
    """Devices, precision, logging and checkpoints.

    Attributes:
        accelerator: accelerator of the Lightning Trainer: auto, cpu, gpu, ...
        devices: number of devices, or auto.
        num_nodes: number of machines.
        precision: use bf16-mixed on GPUs, or 16-mixed on old ones. On CPUs use 32-true, or bf16-mixed for vision
            transformers if the processor supports bfloat16 products (AVX512-BF16, AMX); otherwise it is slower.
            64-true, on CPUs only, is for comparing runs.
        compile: mode of torch.compile: a minute or two at the start, then faster steps on GPUs. `auto` is `default` for
            long runs on one GPU, else `none`. `reduce-overhead` replays CUDA graphs, for small networks and batches,
            whose kernels are shorter than their launch; `max-autotune` also tunes the kernels of products;
            `max-autotune-no-cudagraphs` does so without CUDA graphs. `none` disables compilation. True and false mean
            default and none.
        threads: number of PyTorch's CPU threads; by default one on a GPU, otherwise PyTorch's default.
        logger: where numbers are logged besides metrics.csv: tensorboard, wandb, mlflow, trackio, or several of them,
            such as tensorboard,wandb (docs/logging.md).
        log_every: steps between logged rows.
        checkpoint_every: steps between checkpoints; another is written at the end of the run.
        keep_checkpoints: number of the latest checkpoints to keep.
    """

    accelerator: str = "auto"
    devices: int | str = 1
    num_nodes: Annotated[int, between(1, 65536)] = 1
    precision: Precision = "bf16-mixed"
    compile: Compile | bool = "auto"
    threads: Annotated[int, between(1, 1024)] | None = None
    logger: tuple[str, ...] = (TENSORBOARD,)
    log_every: Annotated[int, at_least(1)] = 10
    checkpoint_every: Annotated[int, at_least(1)] = 1000
    keep_checkpoints: Annotated[int, between(1, 1000)] = 2

    def __post_init__(self) -> None:
        if isinstance(self.compile, bool):  # in older configurations
            self.compile = "default" if self.compile else "none"


@dataclass
class PretrainConfig(ObjectiveOptions):
    """Configuration of a pretraining run.

    Attributes:
        seed: seed of all random draws: the same seed gives the same run.
        views: distribution of the two views of an image.
        backbone: network to train.
        objects: clustering and matching.
        head: projection head and last layers.
        losses: weights and temperatures of the losses.
        optim: optimiser and schedules.
        objective: training objective.
        data: training images and their loading.
        score: dense retrieval during training.
        runtime: devices, precision, logging and checkpoints.
    """

    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    data: DataConfig = field(default_factory=DataConfig)
    score: ScoreConfig = field(default_factory=ScoreConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)

    def __post_init__(self) -> None:
        check_bounds(self)
        _check_combinations(self)


def _check_combinations(config: PretrainConfig) -> None:
    optim = config.optim
    require_known(config.runtime.logger)
    if not re.fullmatch(r"auto|-1|\d+(,\d+)*,?", str(config.runtime.devices)):
        raise InputError(
            f"runtime.devices must be a number >= 1, auto, or a list such as 0,2, got {config.runtime.devices!r}"
        )
    if config.runtime.compile in CUDA_GRAPH_MODES and optim.micro_batches > 1:
        # Replaying the graph for the next micro-batch would overwrite the gradients.
        raise InputError(
            f"runtime.compile {config.runtime.compile} replays CUDA graphs, whose gradients cannot be accumulated over "
            f"optim.micro_batches, got {optim.micro_batches}: use runtime.compile default, or 1 micro-batch with "
            "backbone.checkpointing selective"
        )
    if optim.batch_size % optim.micro_batches:
        raise InputError(
            f"optim.batch_size must be a multiple of optim.micro_batches {optim.micro_batches}, got {optim.batch_size}"
        )
