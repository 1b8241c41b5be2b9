"""Objects of view pairs, with the configured clustering and matching criterion."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cribo.arguments import ConfigError, import_by_path
from cribo.data.samples import Batch
from cribo.method import cluster_tokens, cluster_tokens_kmeans
from cribo.objectives.options import ObjectsConfig

Clustering = Callable[..., Int[Tensor, "b t"]]
"""(tokens (B, T, D), coordinates (B, T, 2), num_objects=K, initial_tokens (B, K)=...) -> labels (B, T) in [0, K)."""


def find_clustering(config: ObjectsConfig) -> Clustering:
    """The configured clustering, with its options.

    Raises:
        ConfigError: it is not a function.
    """
    if config.clustering == "sinkhorn":
        return partial(
            cluster_tokens,
            position_weight=config.position_weight,
            marginals=config.marginals,
            iterations=config.iterations,
            sinkhorn_iterations=config.sinkhorn_iterations,
            sharpness=config.sharpness,
        )
    if config.clustering == "kmeans":
        return partial(cluster_tokens_kmeans, iterations=config.iterations)
    return _import_function(config.clustering, "objects.clustering", ("sinkhorn", "kmeans"))


def find_criterion(config: ObjectsConfig) -> Any:
    """The configured criterion for positive pairs, as `MemoryBank.match` accepts it.

    Raises:
        ConfigError: it is not a function.
    """
    if config.criterion in ("cycle", "none"):
        return config.criterion
    return _import_function(config.criterion, "objects.criterion", ("cycle", "none"))


def _import_function(path: str, option: str, known: Sequence[str]) -> Callable[..., Any]:
    found = import_by_path(path, option, known=known)
    if not callable(found):
        raise ConfigError(f"{option} {path} is not a function: {found!r}")
    return found


def label_tokens(
    tokens: Float[Tensor, "b 2 n d"], batch: Batch, config: ObjectsConfig, cluster: Clustering | None = None
) -> Int[Tensor, "b 2 n"]:
    """Cluster the teacher's tokens of both views of each image (paper section 3.2.1).

    Args:
        tokens: (B, 2, N, D).
        batch: of view pairs.
        config: of the clustering.
        cluster: the clustering, if `find_clustering` has been called already.

    Raises:
        ValueError: the clustering does not return one integer label per token.
    """
    cluster = cluster or find_clustering(config)
    labels = cluster(
        tokens.flatten(1, 2),
        batch["coordinates"].flatten(1, 2),
        num_objects=config.num_objects,
        initial_tokens=batch["initial_tokens"],
    )
    expected = (tokens.shape[0], 2 * tokens.shape[2])
    if tuple(labels.shape) != expected or labels.is_floating_point():
        raise ValueError(
            f"objects.clustering {config.clustering} must return integer labels of shape (B, 2N) = {expected}, got "
            f"{labels.dtype} of {tuple(labels.shape)}"
        )
    return labels.view(tokens.shape[:3])


@dataclass
class Objects:
    """The objects of a batch: R rows, image after image.

    Attributes:
        teacher: (2, R, D) the teacher's representations.
        labels: (B, 2, N) cluster of each token.
        rows: (R,) image within the batch of each object.
        clusters: (R,) its cluster.
        images: (R,) its image's index in the collection.
        counts: objects of each image of the batch.
    """

    teacher: Float[Tensor, "2 r d"]
    labels: Int[Tensor, "b 2 n"]
    rows: Int[Tensor, " r"]
    clusters: Int[Tensor, " r"]
    images: Int[Tensor, " r"]
    counts: list[int]

    def group_rows(self, group_size: int) -> list[int]:
        """Objects of each group of `group_size` images."""
        return [sum(self.counts[start : start + group_size]) for start in range(0, len(self.counts), group_size)]


def find_objects(
    pooled: Float[Tensor, "b 2 k d"], kept: Bool[Tensor, "b k"], labels: Int[Tensor, "b 2 n"], images: Int[Tensor, " b"]
) -> Objects:
    """Select from the result of `pool_objects` the clusters with tokens in both views.

    Reads the counts from the device; from here on, shapes depend on the data.
    """
    counts: list[int] = kept.sum(dim=1).tolist()
    rows, clusters = torch.nonzero_static(kept, size=sum(counts)).unbind(dim=1)
    return Objects(pooled[rows, :, clusters].transpose(0, 1), labels, rows, clusters, images[rows], counts)
