"""Everything that decides a pretraining run, typed and checked before any work is done."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from cribo.method import ViewRecipe
from cribo.method.bank import Criterion
from cribo.method.clustering import Marginals
from cribo.models.modes import CUDA_GRAPH_MODES, Checkpointing, CompileMode

ClusteringName = Literal["sinkhorn", "kmeans"]
Centring = Literal["mean", "sinkhorn"]
Compile = Literal["none"] | CompileMode
OnNonFinite = Literal["skip", "rollback", "stop"]
Strategy = Literal["ddp", "fsdp"]
Precision = Literal["64-true", "32-true", "bf16-mixed", "16-mixed"]


@dataclass
class ScenesConfig:
    """The scenes that the program makes itself, used when data.root is `scenes`.

    Attributes:
        count: how many different scenes to train on.
        size: their side in pixels.
        seed: which scenes they are; another seed gives another collection.
    """

    count: int = 4000
    size: int = 96
    seed: int = 0


@dataclass
class DataConfig:
    """Where the images come from.

    Attributes:
        root: a folder of images (nested or not), a text file that lists images, a folder of tar shards or the URL
            of one, such as s3://bucket/prefix, or `scenes`.
        images: sub-folder of root to read, such as train2017; the root itself when empty.
        workers: processes that decode and crop; chosen from the number of cores when not given. More help when
            images/s grows with them.
        max_unreadable: share of the images that may be unreadable before training stops; each is skipped,
            counted and listed in the run folder.
        timeout: seconds without a sign of life after which the workers that a batch is waited for from count as hung:
            they are killed and begun anew. Raise it if a single image, or the shards of a batch, may take longer.
        max_restarts: of the workers for one batch, after they were killed or hung; one more stops training, as do more
            than three times as many within a hundred batches.
        max_pixels: larger images are refused unread: they are more likely a decompression bomb than a picture.
        inside: refuse image files outside of root's folder that a list or a link leads to.
        cache_dir: where shards from a URL are kept on this machine.
        cache_gib: how much of them together; what was used longest ago makes room. Each shard is fetched once an
            epoch if not all of them fit, by every machine.
        scenes: the made-up scenes.
    """

    root: str = "scenes"
    images: str = ""
    workers: int | None = None
    max_unreadable: float = 0.01
    timeout: float = 420.0
    max_restarts: int = 3
    max_pixels: int = 178_956_970
    inside: bool = False
    cache_dir: str = "~/.cache/cribo/shards"
    cache_gib: float = 100.0
    scenes: ScenesConfig = field(default_factory=ScenesConfig)


@dataclass
class BackboneConfig:
    """The network that is trained.

    Attributes:
        name: a timm model: a vision transformer, or a network whose last features are a map.
        args: further arguments of timm's model, such as {depth: 6}.
        pretrained: weights to start from: a file (.safetensors, .pth), a timm name with its tag, such as
            vit_small_patch16_224.dino, or `timm` for the default ones of the model's name.
        drop_path: rate of stochastic depth in the last block, in the student only.
        checkpointing: less memory for the same result, in vision transformers: `selective` computes all but products
            and attention a second time in the backward pass, `blocks` whole blocks. Try it before more micro-batches.
    """

    name: str = "vit_small_patch16_224"
    args: dict[str, Any] = field(default_factory=dict)
    pretrained: str | None = None
    drop_path: float = 0.1
    checkpointing: Checkpointing = "none"


@dataclass
class ObjectsConfig:
    """Clustering and matching (paper sections 3.2.1 and 3.2.2).

    Attributes:
        num_objects: K, clusters an image. Many small ones find better matches than few large ones.
        position_weight: lambda_pos: larger gives compacter clusters; 1 to 2 is best in the paper.
        clustering: `sinkhorn` is the paper's; `kmeans` its baseline (needs position_weight 0).
        marginals: of the transport plan: `adaptive` as in the published checkpoints, `uniform` as in the text.
        iterations: rounds of assignment and centroid update.
        sinkhorn_iterations: rounds of scaling inside each.
        sharpness: inverse entropic regularisation.
        bank_images: S, images that the memory bank remembers; min(25000, half the data set) when not given.
        criterion: which matches are used: `cycle` for cycle-consistent ones, `none` for all.
        group_size: images that share a group: the cycle is checked inside it and losses are averaged over it.
            A device holds a whole number of groups; the result does not depend on how they are spread.
    """

    num_objects: int = 32
    position_weight: float = 1.0
    clustering: ClusteringName = "sinkhorn"
    marginals: Marginals = "adaptive"
    iterations: int = 5
    sinkhorn_iterations: int = 5
    sharpness: float = 20.0
    bank_images: int | None = None
    criterion: Criterion = "cycle"
    group_size: int = 32


@dataclass
class HeadConfig:
    """Projection head and last layers.

    Attributes:
        hidden_dim: width of the MLP.
        bottleneck_dim: channels of the embeddings.
        layers: of the MLP.
        bias: whether its layers have one.
        init_std: of its random weights; narrow heads learn sooner with about 1 / sqrt(hidden_dim).
        prototypes: L, for images and for objects alike. Small data sets want fewer.
        train_gain: train the weight-norm gain of the last layers; freeze it for ViT-B and larger.
    """

    hidden_dim: int = 2048
    bottleneck_dim: int = 256
    layers: int = 3
    bias: bool = True
    init_std: float = 0.02
    prototypes: int = 65536
    train_gain: bool = True


@dataclass
class LossConfig:
    """The three losses (paper section 3.2.3); the total is their sum.

    Attributes:
        image: L_cv^g, image level across views.
        cross_view: L_cv^o, object level across views.
        cross_image: L_ci^o, object level across images.
        cross_image_from_epoch: first epoch (from 0) that uses L_ci^o: neighbours of a random network say nothing.
        student_temperature: tau_s.
        teacher_temperature: (start, end) of tau_t. Lower the end if the losses stay at their first value.
        teacher_temperature_epochs: over which it rises, one step an epoch.
        centring: `mean` is the paper's moving average; `sinkhorn` spreads every group evenly over the
            prototypes, which starts sooner with small batches and short runs.
        centre_momentum: of the moving average.
    """

    image: bool = True
    cross_view: bool = True
    cross_image: bool = True
    cross_image_from_epoch: int = 1
    student_temperature: float = 0.1
    teacher_temperature: tuple[float, float] = (0.04, 0.07)
    teacher_temperature_epochs: int = 30
    centring: Centring = "mean"
    centre_momentum: float = 0.9


@dataclass
class OptimConfig:
    """Optimiser and schedules (docs/method.md, "Recipe").

    Attributes:
        epochs: passes over the data.
        batch_size: images of one optimiser step, over all devices.
        micro_batches: parts that a device's batch is computed in: changes nothing but memory,
            unless the network has batch norms, which see one part at a time.
        lr: peak learning rate for 256 images; scaled linearly with batch_size.
        final_lr: learning rate of the last step, not scaled.
        warmup_epochs: of linear learning-rate warm-up.
        weight_decay: (start, end) of a cosine; none on biases and other 1-D parameters.
        momentum: (start, end) of the teacher's moving average, a cosine. Start lower for short runs.
        clip: largest gradient norm of each parameter tensor; none when not given.
        freeze_last_layers_epochs: epochs in which the last layers are not trained.
        freeze_backbone_epochs: epochs in which only the head is trained, to spare pretrained weights.
        layer_decay: learning-rate factor from each block to the one below; below 1 for pretrained weights.
    """

    epochs: int = 100
    batch_size: int = 256
    micro_batches: int = 1
    lr: float = 5e-4
    final_lr: float = 1e-5
    warmup_epochs: int = 10
    weight_decay: tuple[float, float] = (0.04, 0.4)
    momentum: tuple[float, float] = (0.996, 1.0)
    clip: float | None = None
    freeze_last_layers_epochs: int = 1
    freeze_backbone_epochs: int = 0
    layer_decay: float = 1.0


@dataclass
class ScoreConfig:
    """Dense retrieval on labelled images while training; labels are never trained on.

    Attributes:
        root: folder with images/{train,val}, labels/{train,val} and classes.txt; `scenes` for held-out scenes;
            `data` for data.root itself; no score when not given.
        every_epochs: how often; the score is always taken before the first and after the last step.
        size: (height, width) that images are resized to; the closest multiple of the patch size when not given.
        neighbours: k of the k-NN.
        memory_ratio: one memory image out of this many is used.
        images: (memory, query) scenes held out, for `scenes`.
    """

    root: str | None = None
    every_epochs: int = 10
    size: tuple[int, int] | None = None
    neighbours: int = 50
    memory_ratio: int = 1
    images: tuple[int, int] = (400, 100)


@dataclass
class RuntimeConfig:
    """How and where it runs.

    Attributes:
        accelerator: of the Lightning Trainer: auto, cpu, gpu, ...
        devices: how many, or auto.
        num_nodes: how many machines.
        precision: bf16-mixed for training on GPUs; 16-mixed for old ones. On CPUs 32-true, or bf16-mixed where the
            processor multiplies bfloat16 itself (AVX512-BF16, AMX), for vision transformers above all; others are
            slowed down by it. 64-true, on CPUs only, is for comparing runs.
        compile: torch.compile the backbones: a minute or two at the start, then faster steps on GPUs. `default`;
            `reduce-overhead` replays CUDA graphs, for small networks and batches, whose kernels end sooner than they
            are launched; `max-autotune` also tries several kernels for each product; `max-autotune-no-cudagraphs`
            only that. `none` compiles nothing; true and false stand for default and none.
        strategy: of several devices, `ddp`: each holds both networks; `fsdp`: each holds a share of student, teacher,
            gradients and moments, and gathers a block's weights when it computes. For networks that do not fit
            otherwise; the run and its checkpoints are the same, with more exchange between devices.
        on_nonfinite: what follows a step whose losses or gradients are infinite or not a number; its update is left out
            in any case. `skip` goes on, with a warning; `rollback` takes weights, optimiser, centres and bank from the
            last checkpoint, and goes on with the next images; `stop` ends the run. Fifty such steps in a row, or a
            fourth return to one checkpoint, always end it.
        threads: of a CPU run; torch's choice when not given.
        log_every: steps between two logged rows.
        checkpoint_every: steps between two checkpoints; one is also written at the end of the run.
        keep_checkpoints: how many of the last to keep.
    """

    accelerator: str = "auto"
    devices: int | str = 1
    num_nodes: int = 1
    precision: Precision = "bf16-mixed"
    compile: Compile | bool = "none"
    strategy: Strategy = "ddp"
    on_nonfinite: OnNonFinite = "skip"
    threads: int | None = None
    log_every: int = 10
    checkpoint_every: int = 1000
    keep_checkpoints: int = 2

    def __post_init__(self) -> None:
        if isinstance(self.compile, bool):  # as configurations before there were modes have it
            self.compile = "default" if self.compile else "none"

    @property
    def compile_mode(self) -> CompileMode | None:
        """The mode of torch.compile; None where nothing is compiled."""
        return None if isinstance(self.compile, bool) or self.compile == "none" else self.compile


@dataclass
class PretrainConfig:
    """One pretraining run.

    Attributes:
        seed: every draw is keyed by it: the same seed gives the same run.
        data: where the images come from.
        views: how the two views of an image are drawn.
        backbone: the network that is trained.
        objects: clustering and matching.
        head: projection head and last layers.
        losses: the three losses.
        optim: optimiser and schedules.
        score: dense retrieval while training.
        runtime: devices, precision, logging.
    """

    seed: int = 0
    data: DataConfig = field(default_factory=DataConfig)
    views: ViewRecipe = field(default_factory=ViewRecipe)
    backbone: BackboneConfig = field(default_factory=BackboneConfig)
    objects: ObjectsConfig = field(default_factory=ObjectsConfig)
    head: HeadConfig = field(default_factory=HeadConfig)
    losses: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    score: ScoreConfig = field(default_factory=ScoreConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)

    def __post_init__(self) -> None:
        _check_ranges(self)
        _check_combinations(self)

    @property
    def needs_objects(self) -> bool:
        """Whether any loss works on objects; without one, clustering and matching are left out."""
        return self.losses.cross_view or self.losses.cross_image


def resolve_bank_images(config: PretrainConfig, num_images: int) -> int:
    """S: as configured, else min(25000, half the data set), and never less than one batch.

    Raises:
        ValueError: a configured bank that one batch would overflow.
    """
    configured = config.objects.bank_images
    if configured is None:
        return max(min(25_000, num_images // 2), config.optim.batch_size)
    return configured


# (low, high, low is allowed, high is allowed) of every number; a pair is checked number by number.
_RANGES: dict[str, tuple[float, float, bool, bool]] = {
    "seed": (0, 2**63 - 1, True, True),
    "data.workers": (0, 1024, True, True),
    "data.max_unreadable": (0, 1, True, True),
    "data.timeout": (0, math.inf, False, False),
    "data.max_restarts": (0, 1000, True, True),
    "data.max_pixels": (1, math.inf, True, False),
    "data.cache_gib": (0, math.inf, False, False),
    "data.scenes.count": (1, 2**31, True, True),
    "data.scenes.size": (16, 1024, True, True),
    "data.scenes.seed": (0, 2**31, True, True),
    "backbone.drop_path": (0, 1, True, False),
    "objects.num_objects": (1, 65536, True, True),
    "objects.position_weight": (0, math.inf, True, False),
    "objects.iterations": (1, 100, True, True),
    "objects.sinkhorn_iterations": (1, 1000, True, True),
    "objects.sharpness": (0, 100, False, True),
    "objects.bank_images": (1, 2**31, True, True),
    "objects.group_size": (1, 65536, True, True),
    "head.hidden_dim": (1, 65536, True, True),
    "head.bottleneck_dim": (1, 65536, True, True),
    "head.layers": (1, 16, True, True),
    "head.init_std": (0, 1, False, True),
    "head.prototypes": (2, 2**22, True, True),
    "losses.cross_image_from_epoch": (0, math.inf, True, False),
    "losses.student_temperature": (0, 10, False, True),
    "losses.teacher_temperature": (0, 10, False, True),
    "losses.teacher_temperature_epochs": (0, math.inf, True, False),
    "losses.centre_momentum": (0, 1, True, False),
    "optim.epochs": (1, math.inf, True, False),
    "optim.batch_size": (1, 2**20, True, True),
    "optim.micro_batches": (1, 2**20, True, True),
    "optim.lr": (0, 10, False, True),
    "optim.final_lr": (0, 10, True, True),
    "optim.warmup_epochs": (0, math.inf, True, False),
    "optim.weight_decay": (0, 10, True, True),
    "optim.momentum": (0, 1, True, True),
    "optim.clip": (0, math.inf, False, False),
    "optim.freeze_last_layers_epochs": (0, math.inf, True, False),
    "optim.freeze_backbone_epochs": (0, math.inf, True, False),
    "optim.layer_decay": (0, 1, False, True),
    "score.every_epochs": (1, math.inf, True, False),
    "score.size": (1, 8192, True, True),
    "score.neighbours": (1, 10_000, True, True),
    "score.memory_ratio": (1, 2**31, True, True),
    "score.images": (1, 2**31, True, True),
    "runtime.num_nodes": (1, 65536, True, True),
    "runtime.threads": (1, 1024, True, True),
    "runtime.log_every": (1, math.inf, True, False),
    "runtime.checkpoint_every": (1, math.inf, True, False),
    "runtime.keep_checkpoints": (1, 1000, True, True),
}


def _check_ranges(config: PretrainConfig) -> None:
    for name, (low, high, low_allowed, high_allowed) in _RANGES.items():
        value: Any = config
        for part in name.split("."):
            value = getattr(value, part)
        if value is None:
            continue
        for number in value if isinstance(value, (tuple, list)) else (value,):
            above = number >= low if low_allowed else number > low
            below = number <= high if high_allowed else number < high
            if not (above and below):
                low_text = f"{'>=' if low_allowed else '>'} {low:g}"
                high_text = "" if math.isinf(high) else f" and {'<=' if high_allowed else '<'} {high:g}"
                raise ValueError(f"{name} must be {low_text}{high_text}, got {value}")


def _check_combinations(config: PretrainConfig) -> None:
    losses, objects, optim = config.losses, config.objects, config.optim
    if not (losses.image or losses.cross_view or losses.cross_image):
        raise ValueError("all of losses.image, losses.cross_view and losses.cross_image are off: leave one on")
    if objects.clustering == "kmeans" and objects.position_weight != 0:
        raise ValueError(
            f"objects.clustering kmeans has no positional cue: set objects.position_weight to 0, "
            f"not {objects.position_weight}"
        )
    if config.runtime.strategy == "fsdp" and config.runtime.precision == "16-mixed":
        # Its loss scaling looks for what is not finite in the shares of one device.
        raise ValueError(
            "runtime.precision 16-mixed does not go with runtime.strategy fsdp: use --runtime.precision bf16-mixed, or "
            "32-true where the devices have no bfloat16"
        )
    if config.runtime.strategy == "fsdp" and config.runtime.compile in CUDA_GRAPH_MODES:
        raise ValueError(
            f"runtime.compile {config.runtime.compile} replays CUDA graphs, which need weights that stay where they "
            "are, and runtime.strategy fsdp gathers them anew: use --runtime.compile default"
        )
    if config.runtime.compile in CUDA_GRAPH_MODES and optim.micro_batches > 1:
        # The gradients of one micro-batch would lie in the memory that the next one's replay overwrites.
        raise ValueError(
            f"runtime.compile {config.runtime.compile} replays CUDA graphs, whose gradients cannot be added up over "
            f"optim.micro_batches, got {optim.micro_batches}: use runtime.compile default, or 1 micro-batch with "
            "backbone.checkpointing selective"
        )
    part = objects.group_size * optim.micro_batches
    if optim.batch_size % part:
        raise ValueError(
            f"optim.batch_size must be a multiple of objects.group_size x optim.micro_batches = "
            f"{objects.group_size} x {optim.micro_batches} = {part}, got {optim.batch_size}"
        )
    if objects.bank_images is not None and losses.cross_image and objects.bank_images < optim.batch_size:
        raise ValueError(
            f"objects.bank_images must hold at least one batch of {optim.batch_size} images, "
            f"got {objects.bank_images}: use a larger bank or a smaller optim.batch_size"
        )
