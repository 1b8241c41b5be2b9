"""What an evaluation can be asked for, typed: the command line and Python share it."""

import os
from dataclasses import dataclass, field
from typing import Literal

import torch

from cribo.arguments import ConfigError
from cribo.evaluation.features import Precision
from cribo.evaluation.patches import Interpolation, Unlabelled
from cribo.evaluation.protocols import PatchLabels, Protocol, ScoreLevel, Search, Vote

_MAX_WORKERS = 16
_THREADS_PER_WORKER = 2  # a worker keeps a core busy; others are needed for the network


@dataclass
class BackboneConfig:
    """Whose features are evaluated.

    Attributes:
        source: a run folder or backbone.safetensors of ours; a timm name (vit_small_patch16_224.dino); a
            checkpoint of another project (CrOC, DINO, iBOT, MAE, MoCo v3, DINOv2, TimeT, SlotCon, ...); or
            mean-colour, the baseline that knows the mean colour of a patch of 16 pixels.
        pretrained: of a timm name, load its weights, from timm's cache or the network; false for random ones.
        network: of a checkpoint that holds two, the teacher (momentum network) or the student.
        architecture: timm's name of a checkpoint's network, where its weights do not show it (any but ViT,
            DINOv3 and ResNet).
        heads: attention heads, where a checkpoint does not say and they do not have 64 channels each.
        trust: run the code that a checkpoint of Python objects holds. Only for files whose maker you trust.
        layers: how many of the last blocks give features, concatenated.
        seed: of random weights.
    """

    source: str
    pretrained: bool = True
    network: Literal["teacher", "student"] = "teacher"
    architecture: str | None = None
    heads: int | None = None
    trust: bool = False
    layers: int = 1
    seed: int = 0


@dataclass
class DataConfig:
    """Labelled images.

    Attributes:
        name: voc, pascal-context, pascal-context-60, coco-stuff, ade20k, cityscapes, camvid, or folder for
            images/<split> and labels/<split> (PNG indices, 255 for none), with or without classes.txt; or scenes,
            which the program makes itself.
        root: the folder that the set was unpacked to.
        memory: split whose patches are searched; the training images when not given (trainaug of voc, where it
            is there).
        queries: split that is labelled and scored; the validation images when not given.
        partial: accept a set of which images are missing. Its figures cannot be compared with published ones.
        limit: use so many images of each split only, evenly spread, to try things out.
    """

    name: str
    root: str | None = None
    memory: str | None = None
    queries: str | None = None
    partial: bool = False
    limit: int | None = None

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"data.limit must be >= 1, got {self.limit}")


@dataclass
class RuntimeConfig:
    """Where and how it is computed; results do not depend on it beyond rounding.

    Attributes:
        devices: such as cuda:0,cuda:1 or cpu. The first one encodes, all share the search. All GPUs, or the CPU
            where there is none, when not given.
        batch_size: images encoded at once, where they are of one size. Lower it if the device runs out of memory.
        workers: processes that read images; when not given, half of the cores.
        memory_gib: what the search may use on each device; half of what is free when not given. Less of it means
            reading the keys more often, with the same result.
        cache: folder that keeps features for the next evaluation of this backbone; none to hold them in memory.
    """

    devices: tuple[str, ...] | None = None
    batch_size: int = 16
    workers: int | None = None
    memory_gib: float | None = None
    cache: str = "~/.cache/cribo/features"

    def __post_init__(self) -> None:
        for name, least in (("batch_size", 1), ("workers", 0)):
            if (value := getattr(self, name)) is not None and value < least:
                raise ConfigError(f"runtime.{name} must be >= {least}, got {value}")
        if self.memory_gib is not None and self.memory_gib <= 0:
            raise ConfigError(f"runtime.memory_gib must be > 0, got {self.memory_gib}")

    def resolved_devices(self) -> tuple[str, ...]:
        """The devices to use.

        Raises:
            ConfigError: one of them is not there, they are of several kinds, or there are none.
        """
        if self.devices is None:
            return tuple(f"cuda:{number}" for number in range(torch.cuda.device_count())) or ("cpu",)
        for name in self.devices:
            try:
                torch.empty(1, device=name)
            except Exception as error:  # each backend has its own for a device that is not there
                reason = str(error).partition("\n")[0]
                raise ConfigError(f"runtime.devices: {name!r} cannot be used ({reason}): use cpu") from error
        if len({torch.device(name).type for name in self.devices}) != 1:
            raise ConfigError(f"runtime.devices must be of one kind, at least one, got {','.join(self.devices)!r}")
        return tuple(self.devices)

    def resolved_workers(self) -> int:
        """The number of processes to use."""
        if self.workers is not None:
            return self.workers
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return min(_MAX_WORKERS, cores // _THREADS_PER_WORKER)


@dataclass
class DenseNNConfig:
    """Dense nearest-neighbour retrieval.

    Attributes:
        backbone: whose features.
        data: labelled images.
        protocol: paper (CrIBo, section 4.1) or hummingbird (Balazevic et al. 2023, as public toolkits run it). It
            decides whatever of the following is not given, in [brackets].
        ratios: share of the memory's images, a row of results each: 1,8,64,128 for all, one in 8, ...
        draws: how often the images of a share are drawn; the score is the mean of them.
        seed: of the draws and the augmentations.
        neighbours: k, how many nearest patches vote. [50, hummingbird: 30]
        vote: weight of a neighbour: majority (all alike), similarity (its cosine) or attention (softmax of
            cosine / temperature). The paper is silent. [majority, hummingbird: attention]
        temperature: of the attention. [0.02]
        patch_labels: hard, the class of most pixels of a patch, or soft, the share of each. [hard, hummingbird: soft]
        unlabelled: pixels without class in the memory: drop patches where they are most, outvote them by any
            labelled pixel, have them be a class that is never right, or background. The paper is silent. [drop,
            hummingbird: background if the first class is that, class otherwise]
        score: what is counted: every patch, by the class of most of its pixels, every pixel of the labels on disk,
            or every pixel of the resized labels. The paper is silent. [patch, hummingbird: resized]
        size: height,width of all images. [for each image its own, rounded to the patch size; hummingbird: square,
            512 or the multiple of the patch size below]
        interpolation: of images. The paper is silent. [bicubic, hummingbird: bilinear]
        augmentations: augmented views of each image in the memory, 0 for the image as it is. [0, hummingbird: 1]
        memory_patches: bound of the memory, patches of rare classes first; 0 for none. [0]
        search: exact, or faiss for an approximate index (its recall is printed).
        probes: lists that the approximate index looks through: more are slower and find more.
        precision: of the kept features: float16 takes half the room.
        runtime: where and how it is computed.
    """

    backbone: BackboneConfig
    data: DataConfig
    protocol: Protocol = "paper"
    ratios: tuple[int, ...] = (1, 8, 64, 128)
    draws: int = 5
    seed: int = 0
    neighbours: int | None = None
    vote: Vote | None = None
    temperature: float | None = None
    patch_labels: PatchLabels | None = None
    unlabelled: Unlabelled | None = None
    score: ScoreLevel | None = None
    size: tuple[int, int] | None = None
    interpolation: Interpolation | None = None
    augmentations: int | None = None
    memory_patches: int | None = None
    search: Search = "exact"
    probes: int = 32
    precision: Precision = "float32"
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
