"""Joint-space clustering: the tokens of both views of an image, partitioned into K clusters at once.

Paper section 3.2.1, "Joint-space clustering", and appendix "Clustering algorithm".
"""

from collections.abc import Callable
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from cribo.method.kernels import Accelerated
from cribo.method.precision import at_least_float32

Marginals = Literal["adaptive", "uniform"]

# Keeps the share of an empty cluster above zero in the adaptive marginals, so that it can win tokens back.
EMPTY_CLUSTER_SIZE = 0.01

# Distances between tokens that are held at a time, images beyond them waiting for their turn: on a CPU what its
# caches have room for, elsewhere 1 GiB.
_DISTANCES_AT_ONCE = {"cpu": 640_000}
_DISTANCES_AT_ONCE_ELSEWHERE = 2**28


@torch.no_grad()
def cluster_tokens(
    tokens: Float[Tensor, "b t d"],
    coordinates: Float[Tensor, "b t 2"],
    *,
    num_objects: int,
    position_weight: float,
    marginals: Marginals = "adaptive",
    iterations: int = 5,
    sinkhorn_iterations: int = 5,
    sharpness: float = 20.0,
    initial_tokens: Int[Tensor, "b k"] | None = None,
    generator: torch.Generator | None = None,
) -> Int[Tensor, "b t"]:
    """Assign each token to one of `num_objects` clusters by optimal transport with positional cues.

    Every image is clustered on its own: its labels do not depend on the images that share its batch.

    Args:
        tokens: (B, T, D) tokens of both views, one after the other (T = 2N); any scale, normalised here.
        coordinates: (B, T, 2) patch centres (x, y) in pixels of the source image.
        num_objects: K, the number of clusters; some may end up empty.
        position_weight: lambda_pos, the weight of the positional cost against the semantic one.
        marginals: mass of the clusters in the transport plan: `uniform` gives each 1/K (the paper's text);
            `adaptive` gives each a share that follows its size in the previous round (the released recipe).
        iterations: rounds of assignment and centroid update.
        sinkhorn_iterations: rounds of row and column scaling inside each.
        sharpness: inverse of the entropic regularisation: the plan starts from exp(-sharpness * cost).
        initial_tokens: (B, K) indices into T of the tokens to start from; drawn when not given.
        generator: source of that draw; torch's default when not given.

    Returns:
        (B, T) int64 labels in [0, K).

    Raises:
        ValueError: a value is out of range, or shapes do not agree.

    Example:
        >>> tokens, coordinates = torch.randn(2, 98, 16), torch.rand(2, 98, 2) * 224
        >>> labels = cluster_tokens(tokens, coordinates, num_objects=6, position_weight=1.0)
        >>> labels.shape
        torch.Size([2, 98])
    """
    if marginals not in get_args(Marginals):
        raise ValueError(f"marginals must be one of {', '.join(get_args(Marginals))}, got {marginals!r}")
    if position_weight < 0:
        raise ValueError(f"position_weight must be >= 0, got {position_weight}")
    if not 0 < sharpness <= 100:  # beyond, exp(-sharpness) is no float32
        raise ValueError(f"sharpness must be > 0 and <= 100, got {sharpness}")
    if sinkhorn_iterations < 1:
        raise ValueError(f"sinkhorn_iterations must be >= 1, got {sinkhorn_iterations}")
    initial_tokens = _initial_tokens(tokens, coordinates, num_objects, iterations, initial_tokens, generator)

    return _TRANSPORT_LABELS.on(tokens.device)(
        tokens,
        coordinates,
        initial_tokens,
        position_weight=position_weight,
        marginals=marginals,
        iterations=iterations,
        sinkhorn_iterations=sinkhorn_iterations,
        sharpness=sharpness,
    )


@torch.no_grad()
def cluster_tokens_kmeans(
    tokens: Float[Tensor, "b t d"],
    coordinates: Float[Tensor, "b t 2"],
    *,
    num_objects: int,
    position_weight: float = 0.0,
    iterations: int = 5,
    initial_tokens: Int[Tensor, "b k"] | None = None,
    generator: torch.Generator | None = None,
) -> Int[Tensor, "b t"]:
    """Assign each token to its nearest centroid by cosine (spherical k-means), the paper's baseline.

    Same shapes and errors as `cluster_tokens`. `coordinates` are accepted for the common interface; k-means
    has no positional cue, so `position_weight` must be 0. An empty cluster keeps a zero centroid.

    Source: paper appendix "Clustering algorithm", table "Ablation study on the clustering algorithm".

    Example:
        >>> tokens, coordinates = torch.randn(2, 98, 16), torch.rand(2, 98, 2) * 224
        >>> cluster_tokens_kmeans(tokens, coordinates, num_objects=6).shape
        torch.Size([2, 98])
    """
    if position_weight != 0:
        raise ValueError(
            f"k-means has no positional cue: position_weight must be 0, got {position_weight}; "
            "use cluster_tokens for positional cues"
        )
    initial_tokens = _initial_tokens(tokens, coordinates, num_objects, iterations, initial_tokens, generator)
    with torch.autocast(tokens.device.type, enabled=False):
        tokens = F.normalize(at_least_float32(tokens), dim=-1)
        labels = _first_largest(_gather_rows(tokens, initial_tokens) @ tokens.mT)
        for _ in range(iterations - 1):
            centroids, _ = _centroids(tokens, labels, num_objects)
            labels = _first_largest(centroids @ tokens.mT)
    return labels


def draw_initial_tokens(
    num_tokens: int, num_objects: int, *, generator: torch.Generator | None = None
) -> Int[Tensor, " k"]:
    """Draw the tokens that start the clusters of one image: uniformly, without replacement.

    Drawing per image, from a generator keyed by the image, keeps its clusters independent of its batch.

    Raises:
        ValueError: more clusters than tokens.
    """
    _check_num_objects(num_objects, num_tokens)
    device = generator.device if generator is not None else None
    return torch.randperm(num_tokens, generator=generator, device=device)[:num_objects]


def _check_num_objects(num_objects: int, num_tokens: int) -> None:
    if not 1 <= num_objects <= num_tokens:
        raise ValueError(
            f"num_objects must be between 1 and the number of tokens of both views ({num_tokens}), "
            f"got {num_objects}: use fewer clusters, larger images or smaller patches"
        )


def _initial_tokens(
    tokens: Tensor,
    coordinates: Tensor,
    num_objects: int,
    iterations: int,
    initial_tokens: Tensor | None,
    generator: torch.Generator | None,
) -> Int[Tensor, "b k"]:
    """Check the arguments that every clustering shares, and draw the initial tokens if none are given."""
    if tokens.ndim != 3:
        raise ValueError(f"tokens must have the shape (B, T, D), got {tuple(tokens.shape)}")
    batch, num_tokens, _ = tokens.shape
    if coordinates.shape != (batch, num_tokens, 2):
        raise ValueError(f"coordinates must have the shape ({batch}, {num_tokens}, 2), got {tuple(coordinates.shape)}")
    _check_num_objects(num_objects, num_tokens)
    if iterations < 1:
        raise ValueError(f"iterations must be >= 1, got {iterations}")
    if initial_tokens is None:
        draws = [draw_initial_tokens(num_tokens, num_objects, generator=generator) for _ in range(batch)]
        return torch.stack(draws).to(tokens.device) if draws else tokens.new_zeros((0, num_objects)).long()
    if initial_tokens.shape != (batch, num_objects):
        raise ValueError(
            f"initial_tokens must have the shape ({batch}, {num_objects}), got {tuple(initial_tokens.shape)}"
        )
    return initial_tokens.long()


def transport_labels(
    tokens: Float[Tensor, "b t d"],
    coordinates: Float[Tensor, "b t 2"],
    initial_tokens: Int[Tensor, "b k"],
    *,
    position_weight: float,
    marginals: Marginals,
    iterations: int,
    sinkhorn_iterations: int,
    sharpness: float,
) -> Int[Tensor, "b t"]:
    """`cluster_tokens` of checked arguments, in plain PyTorch, as many images at a time as their distances allow."""
    distances = _DISTANCES_AT_ONCE.get(tokens.device.type, _DISTANCES_AT_ONCE_ELSEWHERE)
    images = max(1, distances // tokens.shape[1] ** 2)
    parts = zip(tokens.split(images), coordinates.split(images), initial_tokens.split(images), strict=True)
    with torch.autocast(tokens.device.type, enabled=False):
        labels = [
            _transport_images(*part, position_weight, marginals, iterations, sinkhorn_iterations, sharpness)
            for part in parts
        ]
    return labels[0] if len(labels) == 1 else torch.cat(labels)


def _transport_images(
    tokens: Float[Tensor, "b t d"],
    coordinates: Float[Tensor, "b t 2"],
    initial_tokens: Int[Tensor, "b k"],
    position_weight: float,
    marginals: Marginals,
    iterations: int,
    sinkhorn_iterations: int,
    sharpness: float,
) -> Int[Tensor, "b t"]:
    """The rounds; matrices lie as (B, K, T), the order in which they are read fastest."""
    batch, num_objects = initial_tokens.shape
    tokens = F.normalize(at_least_float32(tokens), dim=-1)
    centroids = _gather_rows(tokens, initial_tokens)
    squares = _squared_distances(coordinates.to(tokens.dtype)) if position_weight > 0 else None
    cluster_mass = tokens.new_full((batch, num_objects), 1 / num_objects)
    labels = initial_tokens  # replaced in the first round; here for the type checker
    for iteration in range(iterations):
        cost = (centroids @ tokens.mT).neg_()  # of unit length: cosines
        if squares is not None:
            nearest = (
                _gather_rows(squares, initial_tokens).sqrt_()
                if iteration == 0
                else _nearest_member(squares, labels, num_objects)
            )
            cost.add_(_positional_cost(nearest), alpha=position_weight)
        labels = _transport(_scale_to_unit(cost), cluster_mass, sinkhorn_iterations, sharpness)
        if iteration < iterations - 1:
            centroids, sizes = _centroids(tokens, labels, num_objects)
            if marginals == "adaptive":
                mass = sizes + EMPTY_CLUSTER_SIZE
                cluster_mass = mass / mass.sum(dim=1, keepdim=True)
    return labels


def _gather_rows(matrix: Float[Tensor, "b t d"], rows: Int[Tensor, "b k"]) -> Float[Tensor, "b k d"]:
    return matrix.gather(1, rows[..., None].expand(-1, -1, matrix.shape[-1]))


def _first_largest(values: Float[Tensor, "b k t"]) -> Int[Tensor, "b t"]:
    """The first cluster with the largest value of each token; `argmax` is slower along this dimension."""
    return values.max(dim=1).indices


def _squared_distances(coordinates: Float[Tensor, "b t 2"]) -> Float[Tensor, "b t t"]:
    """Squared distances between tokens, infinite where they are exactly 0, for those never count.

    Direct differences: distances by a matrix product leave a token slightly off itself. On a CPU one image after the
    other, so that it stays in the cache between the passes.
    """
    batch, num_tokens, _ = coordinates.shape
    squares = coordinates.new_empty((batch, num_tokens, num_tokens))
    images = 1 if coordinates.device.type == "cpu" else max(1, batch)
    for places, square in zip(coordinates.split(images), squares.split(images), strict=True):
        x, y = places.mT.contiguous().unbind(dim=1)
        torch.sub(x[:, :, None], x[:, None], out=square)
        vertical = y[:, :, None] - y[:, None]
        square.square_().addcmul_(vertical, vertical)
        torch.threshold_(square, 0.0, torch.inf)
    return squares


def _nearest_member(
    squares: Float[Tensor, "b t t"], labels: Int[Tensor, "b t"], num_objects: int
) -> Float[Tensor, "b k t"]:
    """Distance from each token to the nearest member of each cluster; infinite without such a member.

    A scatter-minimum over members: nothing of the size (B, T, T, K) is formed. Distances are symmetric, so rows are
    scattered whole, which keeps both reads and writes contiguous.
    """
    batch, num_tokens, _ = squares.shape
    nearest = squares.new_full((batch * num_objects, num_tokens), torch.inf)
    clusters = _clusters_of_batch(labels, num_objects)[:, None].expand(-1, num_tokens)
    nearest.scatter_reduce_(0, clusters, squares.flatten(0, 1), "amin")
    return nearest.sqrt_().view(batch, num_objects, num_tokens)


def _positional_cost(nearest: Float[Tensor, "b k t"]) -> Float[Tensor, "b k t"]:
    """Fill the entries without a nearest member with the image's mean, and scale by the image's maximum."""
    cost = nearest.nan_to_num(posinf=0.0)
    mean = cost.mean(dim=(1, 2), keepdim=True)  # the zeros count, as in the released recipe
    missing = torch.eq(cost, 0, out=torch.empty_like(cost))  # as numbers: a selection by a mask takes far longer
    cost.addcmul_(missing, mean)
    # All coordinates equal: there is no cue, and no division by zero.
    return cost.div_(cost.amax(dim=(1, 2), keepdim=True).clamp_min(torch.finfo(cost.dtype).tiny))


def _scale_to_unit(cost: Float[Tensor, "b k t"]) -> Float[Tensor, "b k t"]:
    lowest = cost.amin(dim=(1, 2), keepdim=True)
    highest = cost.amax(dim=(1, 2), keepdim=True)
    return (cost - lowest).div_((highest - lowest).clamp_min(torch.finfo(cost.dtype).tiny))


def _transport(
    cost: Float[Tensor, "b k t"], cluster_mass: Float[Tensor, "b k"], iterations: int, sharpness: float
) -> Int[Tensor, "b t"]:
    """Cluster of each token with the most mass in the Sinkhorn-Knopp plan (paper equation of `Q*`)."""
    kernel = (-sharpness * cost).exp_()
    _, column = _scale_to_marginals(kernel, cluster_mass, iterations)
    # The scaling of its row cannot change where a token has the most mass.
    return _first_largest(kernel * column)


def _scale_to_marginals(
    kernel: Float[Tensor, "b k t"], cluster_mass: Float[Tensor, "b k"], iterations: int
) -> tuple[Float[Tensor, "b 1 t"], Float[Tensor, "b k 1"]]:
    """Vectors that make the plan row * kernel * column have the marginals; tokens (rows of the plan) scaled first.

    Scaling two vectors instead of the matrix costs two passes over it a round.
    """
    token_mass = 1 / kernel.shape[2]
    cluster_mass = cluster_mass[..., None]
    row, column = torch.ones_like(kernel[:, :1]), torch.ones_like(cluster_mass)
    for _ in range(iterations):
        row = token_mass / (column.mT @ kernel)
        column = cluster_mass / (kernel * row).sum(dim=2, keepdim=True)
    return row, column


def _centroids(
    tokens: Float[Tensor, "b t d"], labels: Int[Tensor, "b t"], num_objects: int
) -> tuple[Float[Tensor, "b k d"], Float[Tensor, "b k"]]:
    """Normalised sum of each cluster's tokens, zero for an empty cluster, and the clusters' sizes."""
    batch, _, dim = tokens.shape
    sums = tokens.new_zeros((batch * num_objects, dim))
    sums = sums.index_add_(0, _clusters_of_batch(labels, num_objects), tokens.flatten(0, 1))
    sums = sums.view(batch, num_objects, dim)
    sizes = tokens.new_zeros((batch, num_objects)).scatter_add_(1, labels, torch.ones_like(tokens[..., 0]))
    return F.normalize(sums, dim=-1), sizes


def _clusters_of_batch(labels: Int[Tensor, "b t"], num_objects: int) -> Int[Tensor, " b*t"]:
    """Labels numbered through the images of the batch: whole rows are scattered fastest along dimension 0."""
    first = num_objects * torch.arange(labels.shape[0], device=labels.device)
    return (labels + first[:, None]).flatten()


def _try(fused: Callable[..., Tensor], device: torch.device) -> None:
    """Cluster a small made-up batch by the fused version: all but a few labels have to be the plain one's."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(3, 50, 40, generator=generator).to(device)
    coordinates = (16.0 * torch.randint(8, (3, 50, 2), generator=generator)).to(device)
    initial_tokens = torch.stack([draw_initial_tokens(50, 7, generator=generator) for _ in tokens]).to(device)
    for marginals in get_args(Marginals):
        options = {"marginals": marginals, "iterations": 3, "sinkhorn_iterations": 5, "sharpness": 20.0}
        labels, expected = (
            version(tokens, coordinates, initial_tokens, position_weight=1.0, **options)
            for version in (fused, transport_labels)
        )
        agreement = (labels == expected).float().mean().item()
        if agreement < 0.95:
            raise ArithmeticError(f"{agreement:.0%} of its labels agree with the plain version")


def _make_fused() -> Callable[..., Tensor]:
    from cribo.method.kernels import clustering

    return clustering.transport_labels


_TRANSPORT_LABELS = Accelerated("clustering", plain=transport_labels, fused=_make_fused, trial=_try)
