"""Configuration sections shared by all objectives; options of a single objective are in `objective.args`."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from cribo.base.bounds import above, at_least, at_most, below, between
from cribo.method.config import HeadWeights, Marginals, UnitInterval, ViewRecipe
from cribo.models.config import Checkpointing, Resizing

Centring = Literal["mean", "sinkhorn"]
AnchorKind = Literal["gram", "cosine"]
Optimiser = Literal["adamw", "sgd", "lars"]
ClipNorm = Literal["tensor", "global"]
Temperature = Annotated[float, above(0) & at_most(10)]


@dataclass
class BackboneConfig:
    """Network to train.

    Attributes:
        name: timm model: a vision transformer, or a network whose last features are a map.
        args: further arguments of timm's model, such as {depth: 6}.
        pretrained: initial weights: a file (.safetensors, .pth), a timm name with its tag, such as
            vit_small_patch16_224.dino, hf://owner/name, or `timm` for the default weights of the model.
        drop_path: rate of stochastic depth in the last block, in the student; in LOCA, also in the teacher.
        train_blocks: number of last blocks to train, with the final norm, or of last stages of a convolutional network;
            all by default. In timm's VisionTransformer, student and teacher share the frozen blocks. For images of
            other than three channels, the first layer is trained, too, and nothing is shared.
        lora: rank of LoRA: the weights of the backbone are frozen, and only low-rank additions to the linear layers of
            its blocks (the last `train_blocks` of them) are trained. Requires the extra `lora`. 8 is a good start; use
            a larger learning rate than for full training.
        cache_trunk: number of view pairs per image whose output of the frozen blocks is cached in the run folder during
            training. Epochs then run only the trained blocks, but view pairs repeat. The disk space needed is logged
            first; single device only.
        positions: resizing of the position embedding to crops of other sizes than the views: by default as in the
            project of the pretrained weights, otherwise as in timm. DINO, iBOT and NeCo have `bicubic_offset`.
        checkpointing: recompute activations in the backward pass to save memory, in vision transformers: everything
            but matrix products and attention (`selective`), or whole blocks (`blocks`). The result is the same. Try it
            before increasing micro_batches.
    """

    name: str = "vit_small_patch16_224"
    args: dict[str, Any] = field(default_factory=dict)
    pretrained: str | None = None
    drop_path: Annotated[float, at_least(0) & below(1)] = 0.1
    positions: Resizing | None = None
    checkpointing: Checkpointing = "none"
    train_blocks: Annotated[int, between(1, 1024)] | None = None
    cache_trunk: Annotated[int, between(1, 65536)] | None = None
    lora: Annotated[int, between(1, 65536)] | None = None

    def frozen_blocks(self, depth: int) -> int:
        """Return the number of first blocks of a network that are not trained."""
        return 0 if self.train_blocks is None else depth - self.train_blocks


@dataclass
class ObjectsConfig:
    """Clustering and matching (paper sections 3.2.1 and 3.2.2).

    Attributes:
        num_objects: K, number of clusters per image. Many small clusters match better than few large ones.
        position_weight: lambda_pos, weight of the positional cost: larger values give more compact clusters; 1 to 2 is
            best in the paper.
        clustering: `sinkhorn`, the paper's; `kmeans`, its baseline (requires position_weight 0); or the import path of
            a custom function (docs/extending.md).
        marginals: cluster masses of the transport plan: `adaptive` as in the published checkpoints, `uniform` as in the
            paper's text.
        iterations: rounds of assignment and centroid update.
        sinkhorn_iterations: rounds of row and column scaling inside each.
        sharpness: inverse of the entropic regularisation.
        bank_images: S, number of images in the memory bank; min(25000, half the data set) by default.
        criterion: matches to use: `cycle` for cycle-consistent ones, `none` for all, or the import path of a custom
            function (docs/extending.md).
        group_size: images per group: cycles are checked inside a group, and losses are averaged over it. Each device
            processes a whole number of groups; results do not depend on how groups are distributed over devices.
    """

    num_objects: Annotated[int, between(1, 65536)] = 32
    position_weight: Annotated[float, at_least(0)] = 1.0
    clustering: str = "sinkhorn"
    marginals: Marginals = "adaptive"
    iterations: Annotated[int, between(1, 100)] = 5
    sinkhorn_iterations: Annotated[int, between(1, 1000)] = 5
    sharpness: Annotated[float, above(0) & at_most(100)] = 20.0
    bank_images: Annotated[int, between(1, 2**31)] | None = None
    criterion: str = "cycle"
    group_size: Annotated[int, between(1, 65536)] = 32


@dataclass
class HeadConfig:
    """Projection head and last layers.

    Attributes:
        hidden_dim: width of the MLP.
        bottleneck_dim: channels of the embeddings.
        layers: number of layers of the MLP.
        bias: whether the MLP's layers have biases.
        init_std: standard deviation of the initial weights; narrow heads learn faster with about 1 / sqrt(hidden_dim).
            `kaiming` is sqrt(2 / inputs) in each layer (He et al. 2015), `lecun` 1 / sqrt(inputs), as in Flax, and
            `pytorch` the default of nn.Linear, with random biases.
        prototypes: L, number of prototypes at image level and at object level. Use fewer for small data sets.
        train_gain: whether to train the weight-norm gain of the last layers; freeze it for ViT-B and larger.
    """

    hidden_dim: Annotated[int, between(1, 65536)] = 2048
    bottleneck_dim: Annotated[int, between(1, 65536)] = 256
    layers: Annotated[int, between(1, 16)] = 3
    bias: bool = True
    init_std: Annotated[float, above(0) & at_most(1)] | HeadWeights = 0.02
    prototypes: Annotated[int, between(2, 2**22)] = 65536
    train_gain: bool = True


@dataclass
class LossConfig:
    """Losses; the total is their weighted sum. The first three are the paper's (section 3.2.3).

    Attributes:
        image: weight of L_cv^g, image level across views; 0 or false disables it.
        cross_view: weight of L_cv^o, object level across views.
        cross_image: weight of L_ci^o, object level across images.
        cross_image_from_epoch: first epoch (from 0) that uses L_ci^o and soft neighbours: neighbours are random in an
            untrained network.
        student_temperature: tau_s, temperature of the student's softmax.
        teacher_temperature: (start, end) of tau_t. Lower the end if the losses stay at their initial value.
        teacher_temperature_epochs: epochs over which tau_t changes, one step per epoch.
        centring: `mean` is the paper's moving average; `sinkhorn` balances the prototypes within each group, which
            learns faster with small batches and in short runs.
        centre_momentum: momentum of the moving average.
        object_neighbours: weight in CrIBo of the soft-neighbour loss of objects, without heads: student and teacher
            must be similar to the same objects of the bank. Not in the paper.
        patch_neighbours: weight in CrIBo of the soft-neighbour loss of patches, sampled at points of the views'
            overlap. Not in the paper.
        neighbours: m, number of nearest rows of the bank in the target of soft neighbours.
        neighbour_temperature: (student, teacher) temperatures of soft neighbours.
        patch_bank: number of patches in the bank of `patch_neighbours`, both views together.
        anchor: weight in CrIBo and alignment of the distance of patch features from those of the starting weights. Not
            in the paper.
        anchor_kind: `gram` preserves the similarities between the patches of a view, as DINOv3 does; `cosine` preserves
            the features.
    """

    image: Annotated[float, at_least(0)] | bool = 1.0
    cross_view: Annotated[float, at_least(0)] | bool = 1.0
    cross_image: Annotated[float, at_least(0)] | bool = 1.0
    cross_image_from_epoch: Annotated[int, at_least(0)] = 1
    student_temperature: Temperature = 0.1
    teacher_temperature: tuple[Temperature, Temperature] = (0.04, 0.07)
    teacher_temperature_epochs: Annotated[int, at_least(0)] = 30
    centring: Centring = "mean"
    centre_momentum: Annotated[float, at_least(0) & below(1)] = 0.9
    object_neighbours: Annotated[float, at_least(0)] = 0.0
    patch_neighbours: Annotated[float, at_least(0)] = 0.0
    neighbours: Annotated[int, between(1, 65536)] = 64
    neighbour_temperature: tuple[Temperature, Temperature] = (0.1, 0.05)
    patch_bank: Annotated[int, between(2, 2**31)] = 8192
    anchor: Annotated[float, at_least(0)] = 0.0
    anchor_kind: AnchorKind = "gram"

    def __post_init__(self) -> None:
        # Older configurations have true or false instead of weights.
        self.image, self.cross_view, self.cross_image = map(float, (self.image, self.cross_view, self.cross_image))


@dataclass
class OptimConfig:
    """Optimiser and schedules (docs/method.md, "Recipe").

    Attributes:
        name: `adamw`; `sgd`; or `lars` (You et al. 2017) for convolutional networks in large batches, which scales each
            update to the norm of its weights. LARS neither scales nor decays biases and other 1-D parameters.
        epochs: number of passes over the data.
        batch_size: images per optimiser step, over all devices.
        micro_batches: number of parts into which each device splits its batch to save memory; the result changes only
            if the network has batch norms, whose statistics are computed per part.
        lr: peak learning rate for 256 images; scaled linearly with batch_size.
        final_lr: learning rate of the last step, not scaled.
        warmup_epochs: epochs of linear learning-rate warm-up; may be a fraction.
        weight_decay: (start, end) of a cosine schedule; not applied to biases and other 1-D parameters.
        momentum: (start, end) of a cosine schedule of the teacher's moving average. Start lower for short runs.
        gradient_momentum: momentum of the gradients in SGD and LARS.
        beta2: decay of the mean squared gradients in AdamW.
        clip: maximum gradient norm; no clipping by default.
        clip_norm: norm that `clip` limits: that of each parameter `tensor`, as in DINO, or the `global` norm of all.
        freeze_last_layers_epochs: epochs in which the last layers are not trained.
        freeze_backbone_epochs: epochs in which only the head is trained, to protect pretrained weights.
        layer_decay: learning-rate factor from each block to the one below; below 1 for pretrained weights.
        lr_factors: further learning-rate factors of parameters by the prefix of their names, such as {backbone.: 0.1};
            the longest matching prefix applies. By default, those of the objective.
    """

    name: Optimiser = "adamw"
    epochs: Annotated[int, at_least(1)] = 100
    batch_size: Annotated[int, between(1, 2**20)] = 256
    micro_batches: Annotated[int, between(1, 2**20)] = 1
    lr: Annotated[float, above(0) & at_most(10)] = 5e-4
    final_lr: Annotated[float, between(0, 10)] = 1e-5
    warmup_epochs: Annotated[float, at_least(0)] = 10
    weight_decay: tuple[Annotated[float, between(0, 10)], Annotated[float, between(0, 10)]] = (0.04, 0.4)
    momentum: tuple[UnitInterval, UnitInterval] = (0.996, 1.0)
    gradient_momentum: Annotated[float, at_least(0) & below(1)] = 0.9
    beta2: Annotated[float, at_least(0) & below(1)] = 0.999
    clip: Annotated[float, above(0)] | None = None
    clip_norm: ClipNorm = "tensor"
    freeze_last_layers_epochs: Annotated[int, at_least(0)] = 1
    freeze_backbone_epochs: Annotated[int, at_least(0)] = 0
    layer_decay: Annotated[float, above(0) & at_most(1)] = 1.0
    lr_factors: dict[str, Annotated[float, at_least(0)]] | None = None


@dataclass
class ObjectiveOptions:
    """Part of a configuration that objectives read.

    Attributes:
        seed: seed of all random draws: the same seed gives the same run.
        views: distribution of the views.
        backbone: network to train.
        objects: clustering and matching.
        head: projection head and last layers.
        losses: weights and temperatures.
        optim: optimiser and schedules.
    """

    seed: Annotated[int, between(0, 2**63 - 1)] = 0
    views: ViewRecipe = field(default_factory=ViewRecipe)
    backbone: BackboneConfig = field(default_factory=BackboneConfig)
    objects: ObjectsConfig = field(default_factory=ObjectsConfig)
    head: HeadConfig = field(default_factory=HeadConfig)
    losses: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)

    @property
    def needs_objects(self) -> bool:
        """Whether a loss of CrIBo uses objects; if not, clustering and matching are skipped."""
        return self.losses.cross_view > 0 or self.needs_bank

    @property
    def needs_bank(self) -> bool:
        """Whether a loss of CrIBo reads the bank of objects."""
        return self.losses.cross_image > 0 or self.losses.object_neighbours > 0
