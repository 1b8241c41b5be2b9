"""Joint clustering of two views, which chooses the number of clusters by transport cost (CrOC).

Each pair of an image and an attention head is clustered by itself: the T = 2N tokens of both views, view 1 first, by
the head's keys. Tensors are indexed (image, head), which is "b h" in the shapes. No shape depends on the data, so that
the loop over K compiles.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cribo.base.errors import InputError
from cribo.method.config import Marginals
from cribo.method.precision import in_float32

MARGINAL_TEMPERATURE = 2.0
"""Temperature of the softmax over similarities to [CLS] that gives the marginals (released code)."""


class Round(NamedTuple):
    """Transport problem of one K, and its solution.

    Attributes:
        cost: (B, H, T, K) in [0, 1].
        token_mass: (B, H, T) row marginals; they sum to 1.
        cluster_mass: (B, H, K) column marginals; they sum to 1.
        plan: (B, H, T, K) transport plan.
    """

    cost: Float[Tensor, "b h t k"]
    token_mass: Float[Tensor, "b h t"]
    cluster_mass: Float[Tensor, "b h k"]
    plan: Float[Tensor, "b h t k"]

    @property
    def total_cost(self) -> Float[Tensor, "b h"]:
        """Total cost of the transport plan."""
        return (self.plan * self.cost).sum(dim=(2, 3))


class Clusters(NamedTuple):
    """Clusters of the tokens of both views.

    Attributes:
        weights: (B, H, 2, N, K_max) weight of each token in its own cluster, 0 in all others. Where fewer than K_max
            clusters were chosen, the last columns are 0.
        chosen: (B, H) the chosen number of clusters.
    """

    weights: Float[Tensor, "b h 2 n k"]
    chosen: Int[Tensor, "b h"]

    @property
    def kept(self) -> Bool[Tensor, "b h k"]:
        """Whether a cluster has a token in both views. Only these are objects."""
        return (self.weights > 0).any(dim=3).all(dim=2)


@torch.no_grad()
@in_float32
def cls_similarity(keys: Float[Tensor, "b h 2 n d"], cls_keys: Float[Tensor, "b h 2 d"]) -> Float[Tensor, "b h 2*n"]:
    """Cosine similarity of each token's key to that of [CLS] in the same view.

    Args:
        keys: (B, H, 2, N, d) keys of the tokens of both views.
        cls_keys: (B, H, 2, d) keys of [CLS].
    """
    return torch.einsum("bhvnd,bhvd->bhvn", F.normalize(keys, dim=-1), F.normalize(cls_keys, dim=-1)).flatten(2)


@torch.no_grad()
@in_float32
def draw_clusters(
    similarity: Float[Tensor, "b h t"], noise: Float[Tensor, "b h t"], k_start: int, *, marginals: Marginals
) -> Int[Tensor, "b h k"]:
    """Draw the initial tokens of K_start clusters without replacement.

    With adaptive marginals, the probabilities are softmax(similarity / 2); uniform ones are equal. The tokens with the
    largest log-probability plus Gumbel noise have the distribution of successive draws (Kool et al. 2019).

    Args:
        similarity: (B, H, T) result of `cls_similarity`.
        noise: (B, H, T) uniform numbers in [0, 1).
        k_start: number of clusters.
        marginals: `adaptive` or `uniform`.
    """
    gumbel = -(-noise.to(similarity.dtype).log()).log()
    scores = gumbel if marginals == "uniform" else similarity / MARGINAL_TEMPERATURE + gumbel
    return scores.topk(k_start, dim=-1).indices


@dataclass(frozen=True)
class JointClustering:
    """Clustering of the tokens of both views of each image for each head, into 2 to `k_max` clusters.

    Starts from K_start tokens. Each round solves a transport problem between tokens and clusters, and merges the two
    most similar clusters, down to K = 2; then the K of least cost is chosen.

    Attributes:
        k_max: largest number of clusters to choose.
        position_weight: weight of the distance to a cluster's position relative to the similarity.
        marginals: masses of tokens and clusters in the transport plan: `adaptive`, by their similarity to [CLS], or
            `uniform`.
        sinkhorn_iterations: rounds of row and column scaling.
        sharpness: inverse of the entropic regularisation.
        images_per_range: number of successive images over which costs are scaled together to [0, 1].

    Source: CrOC (Stegmueller et al. 2023), as in the released code.

    Example:
        >>> keys, cls_keys, positions = torch.randn(4, 3, 2, 49, 16), torch.randn(4, 3, 2, 16), torch.rand(4, 2, 49, 2)
        >>> start = draw_clusters(cls_similarity(keys, cls_keys), torch.rand(4, 3, 98), 6, marginals="adaptive")
        >>> clusters = JointClustering(k_max=4, position_weight=4.0)(keys, cls_keys, positions, start)
        >>> clusters.weights.shape, clusters.chosen.shape
        (torch.Size([4, 3, 2, 49, 4]), torch.Size([4, 3]))
    """

    k_max: int
    position_weight: float
    marginals: Marginals = "adaptive"
    sinkhorn_iterations: int = 5
    sharpness: float = 20.0
    images_per_range: int = 1

    def __call__(
        self,
        keys: Float[Tensor, "b h 2 n d"],
        cls_keys: Float[Tensor, "b h 2 d"],
        positions: Float[Tensor, "b 2 n 2"],
        initial_tokens: Int[Tensor, "b h k"],
    ) -> Clusters:
        """Cluster the tokens.

        Args:
            keys: (B, H, 2, N, d) keys of the tokens of both views; any scale, normalised here.
            cls_keys: (B, H, 2, d) keys of [CLS].
            positions: (B, 2, N, 2) patch centres (x, y) in pixels of the source image.
            initial_tokens: (B, H, K_start) indices of the initial tokens, in [0, 2N); see `draw_clusters`.

        Raises:
            ValueError: not 2 <= k_max <= K_start, or B is not a multiple of `images_per_range`.
        """
        return choose_clusters(self.rounds(keys, cls_keys, positions, initial_tokens), self.k_max)

    @torch.no_grad()
    @in_float32
    def rounds(
        self,
        keys: Float[Tensor, "b h 2 n d"],
        cls_keys: Float[Tensor, "b h 2 d"],
        positions: Float[Tensor, "b 2 n 2"],
        initial_tokens: Int[Tensor, "b h k"],
    ) -> list[Round]:
        """Return the rounds with K = K_start, ..., 2 clusters; takes the arguments of `__call__`.

        A merged cluster is the last one of its round.
        """
        similarity = cls_similarity(keys, cls_keys) / MARGINAL_TEMPERATURE
        if self.marginals == "uniform":
            similarity = torch.zeros_like(similarity)
        token_mass, cluster_mass = similarity.softmax(dim=-1), similarity.gather(2, initial_tokens).softmax(dim=-1)
        tokens = F.normalize(keys, dim=-1).flatten(2, 3)
        places = positions.to(tokens.dtype).flatten(1, 2)[:, None].expand(-1, tokens.shape[1], -1, -1)
        centres, centre_places = (_take_rows(rows, initial_tokens) for rows in (tokens, places))
        rounds = [self.solve(tokens, places, centres, centre_places, token_mass, cluster_mass)]
        while rounds[-1].plan.shape[3] > 2:
            centres, centre_places, cluster_mass = merge_most_similar(rounds[-1].plan, tokens, places, token_mass)
            rounds.append(self.solve(tokens, places, centres, centre_places, token_mass, cluster_mass))
        return rounds

    def solve(
        self,
        tokens: Float[Tensor, "b h t d"],
        places: Float[Tensor, "b h t 2"],
        centres: Float[Tensor, "b h k d"],
        centre_places: Float[Tensor, "b h k 2"],
        token_mass: Float[Tensor, "b h t"],
        cluster_mass: Float[Tensor, "b h k"],
    ) -> Round:
        """Solve the transport problem between tokens and clusters."""
        # From differences: the rounding of a matrix product changes which clusters are merged.
        distance = torch.linalg.vector_norm(places[:, :, :, None] - centre_places[:, :, None], dim=-1)
        furthest = distance.amax(dim=(2, 3), keepdim=True).clamp_min(torch.finfo(distance.dtype).tiny)
        cost = self.position_weight * distance / furthest - tokens @ F.normalize(centres, dim=-1).mT
        cost = _to_unit_range(cost, self.images_per_range)
        plan = _transport_plan(cost, token_mass, cluster_mass, self.sinkhorn_iterations, self.sharpness)
        return Round(cost, token_mass, cluster_mass, plan)


def merge_most_similar(
    plan: Float[Tensor, "b h t k"],
    tokens: Float[Tensor, "b h t d"],
    places: Float[Tensor, "b h t 2"],
    token_mass: Float[Tensor, "b h t"],
) -> tuple[Float[Tensor, "b h k_less_1 d"], Float[Tensor, "b h k_less_1 2"], Float[Tensor, "b h k_less_1"]]:
    """Merge the two clusters whose centres have the largest inner product.

    Returns:
        Centres, positions and masses of the remaining clusters; the merged one is the last.
    """
    k = plan.shape[3]
    centres = _shares(plan).mT @ tokens
    above = torch.ones((k, k), dtype=torch.bool, device=plan.device).triu(diagonal=1)
    pair = (centres @ centres.mT).masked_fill(~above, -torch.inf).flatten(2).argmax(dim=-1, keepdim=True)
    first, second = pair // k, pair % k
    columns = torch.arange(k, device=plan.device)
    target = columns - (columns > first).long() - (columns > second).long()
    target = target.masked_fill((columns == first) | (columns == second), k - 2)
    merged = torch.zeros_like(plan[..., 1:]).scatter_add(3, target[:, :, None].expand_as(plan), plan)
    shares = _shares(merged)
    cluster_mass = (token_mass[:, :, None] @ shares)[:, :, 0]
    return shares.mT @ tokens, shares.mT @ places, cluster_mass / cluster_mass.sum(dim=-1, keepdim=True)


def choose_clusters(rounds: Sequence[Round], k_max: int) -> Clusters:
    """Choose the round with the lowest cost among those with at most `k_max` clusters.

    Of rounds with equal costs, the one with the most clusters is chosen.

    Each token belongs to the cluster of its largest weight: the plan divided by the cluster's mass in the token's view.

    Args:
        rounds: those of K_start, ..., 2 clusters.
        k_max: largest number of clusters.

    Raises:
        ValueError: `k_max` is out of range.
    """
    if not 2 <= k_max <= len(rounds) + 1:
        raise InputError(f"k_max must be 2 to {len(rounds) + 1}, the initial number of clusters, got {k_max}")
    candidates = rounds[-(k_max - 1) :]
    best = torch.stack([candidate.total_cost for candidate in candidates], dim=-1).argmin(dim=-1)
    plans = torch.stack([F.pad(candidate.plan, (0, k_max - candidate.plan.shape[3])) for candidate in candidates])
    plan = plans.gather(0, best[None, :, :, None, None].expand(1, *plans.shape[1:]))[0]
    plan = plan.unflatten(2, (2, -1))
    weights = plan / plan.sum(dim=3, keepdim=True).clamp_min(torch.finfo(plan.dtype).tiny)
    largest = F.one_hot(weights.argmax(dim=-1), k_max).to(weights.dtype)
    return Clusters(weights * largest, k_max - best)


@in_float32
def pool_clusters(
    tokens: Float[Tensor, "b 2 n d"],
    global_tokens: Float[Tensor, "2 b d"],
    weights: Float[Tensor, "b h 2 n k"],
    *,
    images_per_norm: int = 1,
) -> Float[Tensor, "b h k 2 d"]:
    """Compute the weighted sum of each cluster's tokens, rescaled to the mean norm of [CLS].

    Args:
        tokens: (B, 2, N, D) tokens of both views, from the student or the teacher.
        global_tokens: (2, B, D) [CLS] of both views of the same network, which gets a gradient through its norm.
        weights: (B, H, 2, N, K) weights of the teacher's clusters.
        images_per_norm: number of successive images over which the norm of [CLS] is averaged.

    Raises:
        ValueError: B is not a multiple of `images_per_norm`.
    """
    directions = F.normalize(torch.einsum("bhvnk,bvnd->bhkvd", weights.to(tokens.dtype), tokens), dim=-1)
    norms = _in_groups(global_tokens.norm(dim=-1).mean(dim=0), images_per_norm).mean(dim=1)
    return directions * norms.repeat_interleave(images_per_norm)[:, None, None, None, None]


def _in_groups(values: Float[Tensor, "b *rest"], images: int) -> Float[Tensor, "groups images *rest"]:
    if len(values) % images:
        raise InputError(f"the number of images must be a multiple of {images}, got {len(values)}")
    return values.unflatten(0, (-1, images))


def _take_rows(rows: Float[Tensor, "b h t d"], index: Int[Tensor, "b h k"]) -> Float[Tensor, "b h k d"]:
    return rows.gather(2, index[..., None].expand(-1, -1, -1, rows.shape[3]))


def _to_unit_range(cost: Float[Tensor, "b h t k"], images: int) -> Float[Tensor, "b h t k"]:
    """Scale the costs of each group of `images` images affinely to [0, 1]."""
    groups = _in_groups(cost, images)
    lowest, highest = (reduce(groups, dim=(1, 2, 3, 4), keepdim=True) for reduce in (torch.amin, torch.amax))
    return ((groups - lowest) / (highest - lowest).clamp_min(torch.finfo(cost.dtype).tiny)).flatten(0, 1)


def _transport_plan(
    cost: Float[Tensor, "b h t k"],
    token_mass: Float[Tensor, "b h t"],
    cluster_mass: Float[Tensor, "b h k"],
    iterations: int,
    sharpness: float,
) -> Float[Tensor, "b h t k"]:
    """Sinkhorn-Knopp on exp(-sharpness * cost): rows to the tokens' mass, then columns to the clusters'.

    The plan is token_scale * kernel * cluster_scale: two vectors are scaled instead of the matrix.
    """
    kernel = (-sharpness * cost).exp()
    token_mass, cluster_mass = token_mass[..., None], cluster_mass[..., None]
    token_scale, cluster_scale = torch.ones_like(token_mass), torch.ones_like(cluster_mass)
    for _ in range(iterations):
        token_scale = token_mass / (kernel @ cluster_scale)
        cluster_scale = cluster_mass / (kernel.mT @ token_scale)
    return token_scale * kernel * cluster_scale.mT


def _shares(plan: Float[Tensor, "b h t k"]) -> Float[Tensor, "b h t k"]:
    """Divide a plan by its clusters' masses."""
    return plan / plan.sum(dim=2, keepdim=True).clamp_min(torch.finfo(plan.dtype).tiny)
