"""Contextual pretraining: patches attend to earlier images before they are pooled and contrasted.

Our interpretation of Hummingbird (Balazevic et al. 2023, sections 3.2 and 3.3), of which neither code nor weights are
public: it is not Hummingbird, and its results are not Hummingbird's. The formulas are restated from memory. The paper's
temperatures, widths, number of pooling queries, negatives and keys of the memory are unknown; all of these are ours.

Each patch retrieves from a memory of earlier images what resembles it, and is mixed with it. Learned masks pool the
mixed patches to one vector, and this vector must be closest to that of the same image's other view among the images
of the batch.
"""

import math
from typing import Annotated

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from cribo.base.bounds import at_least
from cribo.base.errors import ConfigError
from cribo.data.samples import Batch
from cribo.method.blocks import in_blocks, rows_per_block
from cribo.method.config import UnitInterval
from cribo.method.precision import at_least_float32, in_float32
from cribo.models import Backbone
from cribo.objectives.banks import RowQueue
from cribo.objectives.base import Columns, Output, Setting, Step
from cribo.objectives.config import HeadConfig, Temperature
from cribo.objectives.mlp import make_head, seeded_weights
from cribo.objectives.self_distillation import StudentNetwork, StudentTeacher
from cribo.objectives.trunk import encode, inputs_of
from cribo.objectives.views import ViewPairs, drop_path_noise, view_pairs

_MEMORY_IMAGES = 153_600
_MARGIN = 1e-5  # of cosine similarities, which differ by rounding


@in_float32
def attend(
    patches: Float[Tensor, "p d"],
    memory: Float[Tensor, "m d"],
    values: Float[Tensor, "m d"],
    *,
    temperature: float,
) -> tuple[Float[Tensor, "p d"], Float[Tensor, " p"]]:
    """Average the values of the memory, weighted by a softmax over each patch's cosine similarity to its rows.

    The attention is computed in blocks of patches, and again in the backward pass.

    Args:
        patches: (P, D) patch features h_j, any scale.
        memory: (M, D) pooled features h_i of earlier images, any scale, without gradients.
        values: (M, D) value phi(h_i) of each row.
        temperature: beta, of the softmax over rows.

    Returns:
        The averages v_j (P, D), and the entropy of each patch's attention (P,) in nats, without gradients.

    Source: our interpretation of Hummingbird, section 3.2.

    Example:
        >>> retrieved, entropy = attend(torch.randn(5, 8), torch.randn(20, 8), torch.randn(20, 8), temperature=0.1)
        >>> retrieved.shape, entropy.shape
        (torch.Size([5, 8]), torch.Size([5]))
    """
    keys = F.normalize(memory, dim=-1)

    def of_block(block: Float[Tensor, "block d"]) -> tuple[Tensor, Tensor]:
        attention = (F.normalize(block, dim=-1) @ keys.T / temperature).softmax(dim=-1)
        return attention @ values, torch.special.entr(attention.detach()).sum(dim=-1)

    size = rows_per_block(len(keys), keys.device)
    retrieved, entropy = map(torch.cat, zip(*in_blocks(of_block, patches, size=size), strict=True))
    return retrieved, entropy


@in_float32
def mix(patches: Float[Tensor, "*p d"], retrieved: Float[Tensor, "*p d"], weight: float) -> Float[Tensor, "*p d"]:
    """Mix directions of patches and of what they retrieved: (1 - lambda) unit(h_j) + lambda unit(v_j).

    Source: our interpretation of Hummingbird, section 3.2.
    """
    return (1 - weight) * F.normalize(patches, dim=-1) + weight * F.normalize(retrieved, dim=-1)


@in_float32
def pool(patches: Float[Tensor, "b n d"], queries: Float[Tensor, "q d"]) -> Float[Tensor, "b qd"]:
    """Pool the patches of each image by a mask for each query, c = sum_j m_j c_j, and concatenate the results.

    Args:
        patches: (B, N, D) patches c_j.
        queries: (Q, D) learned queries; a mask m is the softmax over patches of their products with a query.

    Source: our interpretation of Hummingbird, section 3.3.

    Example:
        >>> pool(torch.randn(2, 49, 8), torch.randn(3, 8)).shape
        torch.Size([2, 24])
    """
    masks = (patches @ queries.T).softmax(dim=1)
    return (masks.mT @ patches).flatten(1)


@in_float32
def contrast(
    predicted: Float[Tensor, "b e"], targets: Float[Tensor, "b e"], keys: Float[Tensor, "z e"], *, temperature: float
) -> tuple[Float[Tensor, " b"], Bool[Tensor, " b"]]:
    """InfoNCE of each image's prediction with its other view, among the other views of all images.

    Args:
        predicted: (B, E) the student's predictions q(z_1), of unit length.
        targets: (B, E) the teacher's embedding z'_2 of each image's other view, of unit length.
        keys: (Z, E) the teacher's embeddings of the other views of all images, which include the targets.
        temperature: tau, of the softmax over images.

    Returns:
        (B,) cross-entropies, and whether the own view is closer than that of every other image. If all embeddings
        are equal, none is.

    Source: our interpretation of Hummingbird, section 3.3.

    Example:
        >>> views = torch.eye(4, 8)
        >>> losses, nearest = contrast(views, views, views, temperature=0.1)
        >>> nearest.tolist()
        [True, True, True, True]
    """
    similarities = predicted @ keys.T
    own = (predicted * targets).sum(dim=-1)
    losses = (similarities / temperature).logsumexp(dim=-1) - own / temperature
    return losses, (similarities > own[:, None] - _MARGIN).sum(dim=-1) == 1


class SpatialPooling(nn.Module):
    """Pooling of patches by learned queries; see `pool`.

    Args:
        dim: D, channels of a patch.
        queries: Q, number of queries, drawn from a standard normal distribution.
    """

    def __init__(self, dim: int, queries: int) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(queries, dim))

    def forward(self, patches: Float[Tensor, "b n d"]) -> Float[Tensor, "b qd"]:
        """Pool the patches of each image."""
        return pool(patches, self.queries)


class ContextNetwork(StudentNetwork):
    """Backbone, attention to the memory, pooling, projector, and the student's predictor.

    Projector and predictor begin with a layer norm, because their inputs have the scale of unit vectors.

    Args:
        backbone: network that encodes the patches.
        config: sizes of the MLPs: `hidden_dim` is also the hidden width of phi.
        queries: number of pooling queries.
        seed: the only source of the random weights.
    """

    student_only = "predictor"

    def __init__(self, backbone: Backbone, config: HeadConfig, *, queries: int, seed: int) -> None:
        super().__init__(backbone)
        self.hidden_dim = config.hidden_dim
        dim, embedding = backbone.embed_dim, config.bottleneck_dim
        with seeded_weights(seed):
            self.values = make_head(dim, config, outputs=dim, layers=2).mlp  # phi
            self.context = nn.Linear(dim, dim)  # psi
            self.pooling = SpatialPooling(dim, queries)
            self.projector = nn.Sequential(nn.LayerNorm(queries * dim), make_head(queries * dim, config))
            self.predictor: nn.Module = nn.Sequential(nn.LayerNorm(embedding), make_head(embedding, config))

    def retrieve(
        self, tokens: Float[Tensor, "b n d"], memory: Float[Tensor, "m d"], *, temperature: float
    ) -> tuple[Float[Tensor, "b n d"], Float[Tensor, "b n"]]:
        """Return what each patch retrieves from the memory, and the entropy of its attention in nats."""
        size = rows_per_block(self.hidden_dim, memory.device)
        values = torch.cat(in_blocks(self.values, memory, size=size))
        retrieved, entropy = attend(tokens.flatten(0, 1), memory, values, temperature=temperature)
        return retrieved.unflatten(0, tokens.shape[:2]), entropy.unflatten(0, tokens.shape[:2])

    def embed(self, mixed: Float[Tensor, "b n d"]) -> Float[Tensor, "b e"]:
        """Return the embedding z of each image, of unit length, from its patches mixed with their context."""
        return self.projector(self.pooling(self.context(mixed)))


class Contextual(StudentTeacher):
    """Contrast of two views of an image, whose patches attend to a memory of earlier images.

    Our interpretation of Hummingbird (Balazevic et al. 2023), of which neither code nor weights are public. Reads
    `views`, `backbone`, `head` (MLPs of values, projector and predictor; no prototypes) and `optim`.

    What the paper leaves open, to our knowledge, and what is done here:

    - The memory holds one row per image: the mean over the patches of both views of the teacher's features. Keys and
      values of student and teacher come from these rows; values pass through each network's own phi.
    - A patch attends to all rows, also to that of its own image from the previous epoch.
    - In the first step the memory is empty, so patches are not mixed with a context.
    - The negatives of an image are the teacher's embeddings of the other view of all other images of the batch, on all
      ranks, and not a queue or a group: the number of negatives is what large batches are for in contrastive learning.
      Therefore, micro-batches are rejected.
    - The loss is the mean of both directions. Batch norms are not used in the MLPs.

    Args:
        setting: the run.
        memory_images: M, number of images in the memory; min(153600, half the data set) by default, but at least one
            batch.
        context_weight: lambda, share of the context in a patch; 0 for none.
        context_temperature: beta, of the attention to the memory.
        temperature: tau, of the contrastive loss.
        pooling_queries: number of learned masks; the pooled vectors are concatenated.

    Raises:
        ConfigError: a value out of range, or a memory smaller than a batch.
    """

    columns = Columns(
        labels={
            "contrast": "contrast with context (our interpretation of Hummingbird)",
            "accuracy": "share of images closest to their own other view",
            "context_entropy": "entropy of the attention to the memory, of 1",
        },
        progress={"accuracy": "{:.0%} accurate", "context_entropy": "context entropy {:.2f}"},
    )
    whole_batch = True

    student: ContextNetwork
    teacher: ContextNetwork

    def __init__(
        self,
        setting: Setting,
        *,
        memory_images: Annotated[int, at_least(1)] | None = None,
        context_weight: UnitInterval = 0.2,
        context_temperature: Temperature = 0.1,
        temperature: Temperature = 0.2,
        pooling_queries: Annotated[int, at_least(1)] = 1,
    ) -> None:
        super().__init__(setting)
        options, batch_size = setting.options, setting.options.optim.batch_size
        if memory_images is None:
            memory_images = max(min(_MEMORY_IMAGES, setting.num_images // 2), batch_size)
        if memory_images < batch_size:
            raise ConfigError(
                f"objective.args.memory_images must hold at least one batch of {batch_size} images, got "
                f"{memory_images}: use a larger memory or a smaller optim.batch_size"
            )
        self.context_weight, self.context_temperature = context_weight, context_temperature
        self.temperature = temperature
        self.student = ContextNetwork(
            setting.build_backbone(), options.head, queries=pooling_queries, seed=options.seed
        )
        self.teacher = self.student.make_teacher()
        self.memory = RowQueue(memory_images, self.teacher.backbone.embed_dim)
        self._pooled: Float[Tensor, "b d"]  # of the teacher in this step, which has no micro-batches

    def samples(self) -> ViewPairs:
        """Return the transform to two views."""
        return view_pairs(self.options.views, self.student.backbone)

    def forward(self, batch: Batch, step: Step) -> Output:
        """Compute the loss, the mean over images and both directions."""
        inputs = inputs_of(batch, self.teacher.backbone, self.options)
        with torch.no_grad():
            tokens = encode(self.teacher.backbone, inputs).tokens
            self._pooled = at_least_float32(tokens).unflatten(0, (-1, 2)).mean(dim=(1, 2))
            targets = self._embed(self.teacher, tokens)[0].unflatten(0, (-1, 2)).transpose(0, 1)
        tokens = encode(self.student.backbone, inputs, drop_path_noise=drop_path_noise(batch)).tokens
        embeddings, metrics = self._embed(self.student, tokens)
        predicted = self.student.predictor(embeddings).unflatten(0, (-1, 2)).transpose(0, 1)  # (2, B, E)
        keys = step.gather(targets).transpose(0, 1).flatten(1, 2)  # (2, B of all ranks, E)
        losses, nearest = zip(
            *(contrast(predicted[v], targets[1 - v], keys[1 - v], temperature=self.temperature) for v in (0, 1)),
            strict=True,
        )
        accuracy = (torch.cat(nearest).sum(), 2 * len(batch))
        return Output({"contrast": torch.cat(losses).mean()}, {"accuracy": accuracy, **metrics})

    def _embed(
        self, network: ContextNetwork, tokens: Float[Tensor, "2b n d"]
    ) -> tuple[Float[Tensor, "2b e"], dict[str, Tensor]]:
        """Return the embedding of each view, and the entropy of its attention as a fraction of its maximum, if any."""
        rows, metrics, retrieved = self.memory.read(), {}, tokens
        if len(rows) and self.context_weight:
            retrieved, entropy = network.retrieve(tokens, rows, temperature=self.context_temperature)
            metrics["context_entropy"] = entropy.mean() / math.log(max(len(rows), 2))
        return network.embed(mix(tokens, retrieved, self.context_weight)), metrics

    @torch.no_grad()
    def after_step(self, step: Step) -> None:
        """Add the images of all ranks to the memory, in the order of the batch, and update the teacher."""
        self.memory.push(step.gather(self._pooled).flatten(0, 1))
        self.move_teacher(step)
