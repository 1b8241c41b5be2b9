"""Joint-space clustering: partition the tokens of both views of an image into K clusters.

Paper section 3.2.1, "Joint-space clustering", and appendix "Clustering algorithm". Costs and plans have
the shape (B, K, T), the transpose of the paper's, so that one cluster's entries are contiguous.
"""

from typing import get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from cribo.base.bounds import above, at_least, at_most
from cribo.base.errors import InputError
from cribo.method.blocks import rows_per_block
from cribo.method.config import Marginals
from cribo.method.precision import in_float32

EMPTY_CLUSTER_SIZE = 0.01
"""Added to every cluster's size in the adaptive marginals, so that an empty cluster can regain tokens."""


@torch.no_grad()
@in_float32
def cluster_tokens(
    tokens: Float[Tensor, "b t d"],
    coordinates: Float[Tensor, "b t 2"],
    *,
    num_objects: int,
    initial_tokens: Int[Tensor, "b k"],
    position_weight: float,
    marginals: Marginals = "adaptive",
    iterations: int = 5,
    sinkhorn_iterations: int = 5,
    sharpness: float = 20.0,
) -> Int[Tensor, "b t"]:
    """Assign each token to one of `num_objects` clusters by optimal transport with positional cues.

    Images are clustered independently: labels do not depend on the other images of the batch.

    Args:
        tokens: (B, T, D) tokens of both views, one after the other (T = 2N); any scale, normalised here.
        coordinates: (B, T, 2) patch centres (x, y) in pixels of the source image.
        num_objects: K, the number of clusters; some may end up empty.
        initial_tokens: (B, K) indices of the clusters' initial tokens, in [0, T); see `draw_initial_tokens`.
        position_weight: lambda_pos, the weight of the positional cost relative to the semantic one.
        marginals: mass of the clusters in the transport plan. `uniform` gives each 1/K (the paper's text), `adaptive`
            a share based on its size in the previous round (the released recipe).
        iterations: rounds of assignment and centroid update.
        sinkhorn_iterations: rounds of row and column scaling inside each.
        sharpness: inverse of the entropic regularisation: the plan starts from exp(-sharpness * cost).

    Returns:
        (B, T) int64 labels in [0, K). Ties go to the first cluster.

    Raises:
        ValueError: a value is out of range, or shapes do not agree.

    Source: paper equations 12 to 17; docs/method.md, "Clustering".

    Example:
        >>> tokens, coordinates = torch.randn(2, 98, 16), torch.rand(2, 98, 2) * 224
        >>> start = torch.stack([draw_initial_tokens(98, 6) for _ in range(2)])
        >>> labels = cluster_tokens(tokens, coordinates, num_objects=6, initial_tokens=start, position_weight=1.0)
        >>> labels.shape
        torch.Size([2, 98])
    """
    if marginals not in get_args(Marginals):
        raise InputError(f"marginals must be one of {', '.join(get_args(Marginals))}, got {marginals!r}")
    at_least(0).check(position_weight=position_weight)
    (above(0) & at_most(100)).check(sharpness=sharpness)  # exp(-sharpness) must not underflow
    at_least(1).check(sinkhorn_iterations=sinkhorn_iterations)
    _check(tokens, coordinates, num_objects, initial_tokens, iterations)
    images = rows_per_block(2 * tokens.shape[1] ** 2, tokens.device)  # the distances and temporaries of the same size
    parts = zip(tokens.split(images), coordinates.split(images), initial_tokens.split(images), strict=True)
    options = position_weight, marginals, iterations, sinkhorn_iterations, sharpness
    return torch.cat([_cluster_images(*part, *options) for part in parts])


@torch.no_grad()
@in_float32
def cluster_tokens_kmeans(
    tokens: Float[Tensor, "b t d"],
    coordinates: Float[Tensor, "b t 2"],
    *,
    num_objects: int,
    initial_tokens: Int[Tensor, "b k"],
    iterations: int = 5,
) -> Int[Tensor, "b t"]:
    """Assign each token to its nearest centroid by cosine (spherical k-means), the paper's baseline.

    Same shapes and errors as `cluster_tokens`. `coordinates` are accepted for the common interface: k-means has no
    positional cue. An empty cluster keeps a zero centroid.

    Source: paper appendix "Clustering algorithm", table "Ablation study on the clustering algorithm".

    Example:
        >>> tokens, coordinates = torch.randn(2, 98, 16), torch.rand(2, 98, 2) * 224
        >>> start = torch.stack([draw_initial_tokens(98, 6) for _ in range(2)])
        >>> cluster_tokens_kmeans(tokens, coordinates, num_objects=6, initial_tokens=start).shape
        torch.Size([2, 98])
    """
    _check(tokens, coordinates, num_objects, initial_tokens, iterations)
    tokens = F.normalize(tokens, dim=-1)
    labels = _largest(_take_rows(tokens, initial_tokens) @ tokens.mT)
    for _ in range(iterations - 1):
        labels = _largest(_centroids(tokens, labels, num_objects) @ tokens.mT)
    return labels


def draw_initial_tokens(
    num_tokens: int, num_objects: int, *, generator: torch.Generator | None = None
) -> Int[Tensor, " k"]:
    """Draw the initial tokens of one image's clusters uniformly, without replacement.

    Drawing per image, from a generator keyed by the image, makes its clusters independent of the batch.

    Raises:
        ValueError: more clusters than tokens.
    """
    _check_num_objects(num_objects, num_tokens)
    device = generator.device if generator is not None else None
    return torch.randperm(num_tokens, generator=generator, device=device)[:num_objects]


def _check_num_objects(num_objects: int, num_tokens: int) -> None:
    if not 1 <= num_objects <= num_tokens:
        raise InputError(
            f"num_objects must be between 1 and the number of tokens of both views ({num_tokens}), "
            f"got {num_objects}: use fewer clusters, larger images or smaller patches"
        )


def _check(tokens: Tensor, coordinates: Tensor, num_objects: int, initial_tokens: Tensor, iterations: int) -> None:
    """Check the arguments common to both clusterings."""
    if tokens.ndim != 3:
        raise InputError(f"tokens must have the shape (B, T, D), got {tuple(tokens.shape)}")
    batch, num_tokens, _ = tokens.shape
    _check_num_objects(num_objects, num_tokens)
    for name, tensor, shape in (
        ("coordinates", coordinates, (batch, num_tokens, 2)),
        ("initial_tokens", initial_tokens, (batch, num_objects)),
    ):
        if tensor.shape != shape:
            raise InputError(f"{name} must have the shape {shape}, got {tuple(tensor.shape)}")
    at_least(1).check(iterations=iterations)


def _cluster_images(
    tokens: Float[Tensor, "b t d"],
    coordinates: Float[Tensor, "b t 2"],
    initial_tokens: Int[Tensor, "b k"],
    position_weight: float,
    marginals: Marginals,
    iterations: int,
    sinkhorn_iterations: int,
    sharpness: float,
) -> Int[Tensor, "b t"]:
    """Run the rounds of `cluster_tokens`: cost, transport plan, hard labels, new centroids."""
    batch, num_objects = initial_tokens.shape
    tokens = F.normalize(tokens, dim=-1)
    distances = _distances(coordinates.to(tokens.dtype))
    # In the first round each initial token is the only member of its cluster.
    centroids, nearest = _take_rows(tokens, initial_tokens), _take_rows(distances, initial_tokens)
    cluster_mass = tokens.new_full((batch, num_objects, 1), 1 / num_objects)
    labels = initial_tokens
    for iteration in range(iterations):
        if iteration > 0:
            centroids, nearest = _centroids(tokens, labels, num_objects), _nearest(distances, labels, num_objects)
            if marginals == "adaptive":
                sizes = torch.full_like(cluster_mass[..., 0], EMPTY_CLUSTER_SIZE)
                sizes.scatter_add_(1, labels, torch.ones_like(tokens[..., 0]))
                cluster_mass = (sizes / sizes.sum(dim=1, keepdim=True))[..., None]
        cost = -(centroids @ tokens.mT)  # paper equation 12
        if position_weight > 0:
            cost = cost + position_weight * _positional_cost(nearest)  # equation 16
        plan = _transport_plan(_rescale(cost), cluster_mass, sinkhorn_iterations, sharpness)
        labels = _largest(plan)
    return labels


def _take_rows(matrix: Float[Tensor, "b t d"], rows: Int[Tensor, "b k"]) -> Float[Tensor, "b k d"]:
    return matrix.gather(1, rows[..., None].expand(-1, -1, matrix.shape[-1]))


def _largest(values: Float[Tensor, "b k t"]) -> Int[Tensor, "b t"]:
    """Return each token's cluster of the largest value, the first on ties (`argmax` is slower along this dim)."""
    return values.max(dim=1).indices


def _distances(coordinates: Float[Tensor, "b t 2"]) -> Float[Tensor, "b t t"]:
    """Return the distances between tokens; zeros become infinite, so that they are ignored.

    Computed from differences: with a matrix product, a token's distance to itself would not be exactly 0.
    """
    x, y = coordinates.mT.contiguous().unbind(dim=1)
    # In place: the temporaries took a quarter of the whole clustering's time at B = 64, T = 392.
    distances = (x[:, :, None] - x[:, None]).square_().add_((y[:, :, None] - y[:, None]).square_()).sqrt_()
    return torch.threshold_(distances, 0.0, torch.inf)


def _nearest(distances: Float[Tensor, "b t t"], labels: Int[Tensor, "b t"], num_objects: int) -> Float[Tensor, "b k t"]:
    """Return each token's distance to the nearest other member of each cluster; infinite if none (equation 17).

    The minimum over rows with the same label: no tensor of the size (B, T, T, K) is formed.
    """
    batch, num_tokens, _ = distances.shape
    nearest = distances.new_full((batch * num_objects, num_tokens), torch.inf)
    rows = _clusters_of_batch(labels, num_objects)[:, None].expand(-1, num_tokens)
    return nearest.scatter_reduce_(0, rows, distances.flatten(0, 1), "amin").view(batch, num_objects, num_tokens)


def _positional_cost(nearest: Float[Tensor, "b k t"]) -> Float[Tensor, "b k t"]:
    """Fill entries without a nearest member with the image's mean (counting them as 0); scale the maximum to 1."""
    cost = nearest.nan_to_num(posinf=0.0)
    cost = cost.where(cost > 0, cost.mean(dim=(1, 2), keepdim=True))
    # Avoids a division by zero if all coordinates are equal: the cost is then 0.
    return cost / cost.amax(dim=(1, 2), keepdim=True).clamp_min(torch.finfo(cost.dtype).tiny)


def _rescale(cost: Float[Tensor, "b k t"]) -> Float[Tensor, "b k t"]:
    """Scale each image's cost affinely to [0, 1]."""
    lowest, highest = cost.amin(dim=(1, 2), keepdim=True), cost.amax(dim=(1, 2), keepdim=True)
    return (cost - lowest) / (highest - lowest).clamp_min(torch.finfo(cost.dtype).tiny)


def _transport_plan(
    cost: Float[Tensor, "b k t"], cluster_mass: Float[Tensor, "b k 1"], iterations: int, sharpness: float
) -> Float[Tensor, "b k t"]:
    """Sinkhorn-Knopp on exp(-sharpness * cost) (equations 13 and 14): tokens to 1/T, then clusters to their mass.

    The plan is token_scale * kernel * cluster_scale: two vectors are scaled instead of the matrix. The returned plan
    omits the token scale, which does not change a token's arg-max.
    """
    kernel = (-sharpness * cost).exp()
    token_mass, cluster_scale = 1 / kernel.shape[2], torch.ones_like(cluster_mass)
    for _ in range(iterations):
        token_scale = token_mass / (cluster_scale.mT @ kernel)  # (B, 1, T)
        cluster_scale = cluster_mass / (kernel @ token_scale.mT)  # (B, K, 1)
    return kernel * cluster_scale


def _centroids(tokens: Float[Tensor, "b t d"], labels: Int[Tensor, "b t"], num_objects: int) -> Float[Tensor, "b k d"]:
    """Return the normalised sum of each cluster's tokens, zero for an empty cluster (equation 15)."""
    batch, _, dim = tokens.shape
    sums = tokens.new_zeros((batch * num_objects, dim))
    sums = sums.index_add(0, _clusters_of_batch(labels, num_objects), tokens.flatten(0, 1))
    return F.normalize(sums.view(batch, num_objects, dim), dim=-1)


def _clusters_of_batch(labels: Int[Tensor, "b t"], num_objects: int) -> Int[Tensor, " b*t"]:
    """Offset labels by image, flattened: scattering whole rows along the first dimension is several times faster."""
    first = num_objects * torch.arange(len(labels), device=labels.device)
    return (labels + first[:, None]).flatten()
