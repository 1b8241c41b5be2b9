"""Configuration sections shared by all objectives; those of a single one are in `objective.args`."""

from dataclasses import dataclass, field
from typing import Any, Literal

from cribo.method.recipe import Marginals, ViewRecipe
from cribo.models.modes import Checkpointing

Centring = Literal["mean", "sinkhorn"]
AnchorKind = Literal["gram", "cosine"]


@dataclass
class BackboneConfig:
    """The network that is trained.

    Attributes:
        name: a timm model: a vision transformer, or a network whose last features are a map.
        args: further arguments of timm's model, such as {depth: 6}.
        pretrained: weights to start from: a file (.safetensors, .pth), a timm name with its tag, such as
            vit_small_patch16_224.dino, or `timm` for the default ones of the model's name.
        drop_path: rate of stochastic depth in the last block, in the student only.
        train_blocks: number of last blocks (of a convolutional network, stages) to train, with the final norm; all by
            default. Student and teacher share the others in timm's VisionTransformer.
        lora: rank of LoRA; all weights of the backbone are frozen, and only a low-rank addition to the linear
            layers of its blocks (of the last `train_blocks` of them) is trained. Needs the extra `lora`. 8 is a good
            start; use a larger learning rate than for all weights.
        cache_trunk: number of view pairs of each image for which the output of the frozen blocks is cached in the run
            folder: epochs run only the trained blocks, and views repeat. The size is printed first; one device only.
        checkpointing: less memory for the same result, in vision transformers: the backward pass recomputes everything
            but products and attention (`selective`), or whole blocks (`blocks`). Try it before more micro-batches.
    """

    name: str = "vit_small_patch16_224"
    args: dict[str, Any] = field(default_factory=dict)
    pretrained: str | None = None
    drop_path: float = 0.1
    checkpointing: Checkpointing = "none"
    train_blocks: int | None = None
    cache_trunk: int | None = None
    lora: int | None = None

    def frozen_blocks(self, depth: int) -> int:
        """How many of the first blocks of a network are not trained."""
        return 0 if self.train_blocks is None else depth - self.train_blocks


@dataclass
class ObjectsConfig:
    """Clustering and matching (paper sections 3.2.1 and 3.2.2).

    Attributes:
        num_objects: K, clusters per image. Many small ones find better matches than few large ones.
        position_weight: lambda_pos: larger values give more compact clusters; 1 to 2 is best in the paper.
        clustering: `sinkhorn` is the paper's; `kmeans` its baseline (needs position_weight 0); or the import path of
            a function of your own (docs/extending.md).
        marginals: of the transport plan: `adaptive` as in the published checkpoints, `uniform` as in the text.
        iterations: rounds of assignment and centroid update.
        sinkhorn_iterations: rounds of scaling inside each.
        sharpness: inverse entropic regularisation.
        bank_images: S, images in the memory bank; min(25000, half the data set) when not given.
        criterion: which matches are used: `cycle` for cycle-consistent ones, `none` for all, or the import path of a
            function of your own (docs/extending.md).
        group_size: images per group: the cycle is checked inside a group, and losses are averaged over it. A device
            holds a whole number of groups; results do not depend on their distribution over devices.
    """

    num_objects: int = 32
    position_weight: float = 1.0
    clustering: str = "sinkhorn"
    marginals: Marginals = "adaptive"
    iterations: int = 5
    sinkhorn_iterations: int = 5
    sharpness: float = 20.0
    bank_images: int | None = None
    criterion: str = "cycle"
    group_size: int = 32


@dataclass
class HeadConfig:
    """Projection head and last layers.

    Attributes:
        hidden_dim: width of the MLP.
        bottleneck_dim: channels of the embeddings.
        layers: number of layers of the MLP.
        bias: whether these layers have biases.
        init_std: standard deviation of the initial weights; narrow heads learn faster with about 1 / sqrt(hidden_dim).
        prototypes: L, the same for images and objects. Use fewer for small data sets.
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
    """Losses; the total is their sum, with these weights. The first three are the paper's (section 3.2.3).

    Attributes:
        image: weight of L_cv^g, image level across views; 0 or false leaves it out.
        cross_view: weight of L_cv^o, object level across views.
        cross_image: weight of L_ci^o, object level across images.
        cross_image_from_epoch: first epoch (from 0) that uses L_ci^o and soft neighbours: neighbours in an untrained
            network are random.
        student_temperature: tau_s.
        teacher_temperature: (start, end) of tau_t. Lower the end if the losses stay at their initial value.
        teacher_temperature_epochs: epochs over which it rises, one step per epoch.
        centring: `mean` is the paper's moving average; `sinkhorn` spreads every group evenly over the
            prototypes, which learns sooner with small batches and in short runs.
        centre_momentum: of the moving average.
        object_neighbours: weight in CrIBo of soft neighbours of objects, without heads: student and teacher must be
            similar to the same objects of the bank. Beyond the paper.
        patch_neighbours: likewise for patches, sampled at points of the views' overlap. Beyond the paper.
        neighbours: m, the nearest rows of the bank that make up the target of soft neighbours.
        neighbour_temperature: (student, teacher) of soft neighbours.
        patch_bank: patches in the bank of `patch_neighbours`, of both views together.
        anchor: weight in CrIBo and alignment of the distance of patch features from those of the starting weights.
            Beyond the paper.
        anchor_kind: `gram` keeps the similarities between the patches of a view, as DINOv3 does; `cosine` keeps the
            features themselves.
    """

    image: float | bool = 1.0
    cross_view: float | bool = 1.0
    cross_image: float | bool = 1.0
    cross_image_from_epoch: int = 1
    student_temperature: float = 0.1
    teacher_temperature: tuple[float, float] = (0.04, 0.07)
    teacher_temperature_epochs: int = 30
    centring: Centring = "mean"
    centre_momentum: float = 0.9
    object_neighbours: float = 0.0
    patch_neighbours: float = 0.0
    neighbours: int = 64
    neighbour_temperature: tuple[float, float] = (0.1, 0.05)
    patch_bank: int = 8192
    anchor: float = 0.0
    anchor_kind: AnchorKind = "gram"

    def __post_init__(self) -> None:
        # Older configurations contain true or false instead of weights.
        self.image, self.cross_view, self.cross_image = map(float, (self.image, self.cross_view, self.cross_image))


@dataclass
class OptimConfig:
    """Optimiser and schedules (docs/method.md, "Recipe").

    Attributes:
        epochs: passes over the data.
        batch_size: images of one optimiser step, over all devices.
        micro_batches: parts into which a device splits its batch to save memory; the result changes only if the network
            has batch norms, whose statistics are computed per part.
        lr: peak learning rate for 256 images; scaled linearly with batch_size.
        final_lr: learning rate of the last step, not scaled.
        warmup_epochs: epochs of linear learning-rate warm-up; may be a fraction.
        weight_decay: (start, end) of a cosine schedule; not applied to biases and other 1-D parameters.
        momentum: (start, end) of a cosine schedule of the teacher's moving average. Start lower for short runs.
        clip: largest gradient norm of each parameter tensor; no clipping when not given.
        freeze_last_layers_epochs: epochs in which the last layers are not trained.
        freeze_backbone_epochs: epochs in which only the head is trained, to spare pretrained weights.
        layer_decay: learning-rate factor from each block to the one below; below 1 for pretrained weights.
    """

    epochs: int = 100
    batch_size: int = 256
    micro_batches: int = 1
    lr: float = 5e-4
    final_lr: float = 1e-5
    warmup_epochs: float = 10
    weight_decay: tuple[float, float] = (0.04, 0.4)
    momentum: tuple[float, float] = (0.996, 1.0)
    clip: float | None = None
    freeze_last_layers_epochs: int = 1
    freeze_backbone_epochs: int = 0
    layer_decay: float = 1.0


@dataclass
class ObjectiveOptions:
    """The part of a configuration that objectives read.

    Attributes:
        seed: key of all random draws: the same seed gives the same run.
        views: how views are drawn.
        backbone: the network that is trained.
        objects: clustering and matching.
        head: projection head and last layers.
        losses: weights and temperatures.
        optim: optimiser and schedules.
    """

    seed: int = 0
    views: ViewRecipe = field(default_factory=ViewRecipe)
    backbone: BackboneConfig = field(default_factory=BackboneConfig)
    objects: ObjectsConfig = field(default_factory=ObjectsConfig)
    head: HeadConfig = field(default_factory=HeadConfig)
    losses: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)

    @property
    def needs_objects(self) -> bool:
        """Whether a loss of CrIBo works on objects; if not, clustering and matching are skipped."""
        return self.losses.cross_view > 0 or self.needs_bank

    @property
    def needs_bank(self) -> bool:
        """Whether a loss of CrIBo reads the bank of objects."""
        return self.losses.cross_image > 0 or self.losses.object_neighbours > 0
