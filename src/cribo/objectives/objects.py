"""Objects of view pairs, with the configured clustering and matching criterion."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cribo.base.errors import ConfigError, InputError
from cribo.base.trust import import_by_path
from cribo.data.samples import Batch
from cribo.method import cluster_tokens, cluster_tokens_kmeans, pool_objects
from cribo.objectives.config import ObjectiveOptions, ObjectsConfig

Clustering = Callable[..., Int[Tensor, "b t"]]
"""(tokens (B, T, D), coordinates (B, T, 2), num_objects=K, initial_tokens (B, K)=...) -> labels (B, T) in [0, K)."""


def find_clustering(config: ObjectsConfig) -> Clustering:
    """Return the configured clustering, with its options.

    Raises:
        ConfigError: the import path does not name a function.
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
    """Return the configured criterion for positive pairs, as accepted by `MemoryBank.match`.

    Raises:
        ConfigError: the import path does not name a function.
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
        tokens: (B, 2, N, D) the teacher's tokens.
        batch: view pairs.
        config: options of the clustering.
        cluster: result of `find_clustering`, which is called by default.

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
        raise InputError(
            f"objects.clustering {config.clustering} must return integer labels of shape (B, 2N) = {expected}, got "
            f"{labels.dtype} of {tuple(labels.shape)}"
        )
    return labels.view(tokens.shape[:3])


@dataclass
class RowPairs:
    """Teacher features of the same objects or points in both views: R rows, image after image.

    Attributes:
        teacher: (2, R, D) features of each view.
        images: (R,) index of the row's image in the collection.
        counts: number of rows of each image of the batch.
    """

    teacher: Float[Tensor, "2 r d"]
    images: Int[Tensor, " r"]
    counts: list[int]

    def groups(self, group_size: int) -> list[slice]:
        """Return the rows of each group of `group_size` images; a group's losses and cycles use only its own rows."""
        return rows_of_groups(self.counts, group_size)


@dataclass
class Objects(RowPairs):
    """Objects of a batch.

    Attributes:
        labels: (B, 2, N) cluster of each token.
        rows: (R,) index of each object's image within the batch.
        clusters: (R,) cluster of each object.
        num_objects: K.
    """

    labels: Int[Tensor, "b 2 n"]
    rows: Int[Tensor, " r"]
    clusters: Int[Tensor, " r"]
    num_objects: int

    def features(self, tokens: Float[Tensor, "b 2 n d"]) -> Float[Tensor, "2 r d"]:
        """Pool another network's tokens to the same objects."""
        pooled, _ = pool_objects(tokens, self.labels, self.num_objects)
        return pooled[self.rows, :, self.clusters].transpose(0, 1)


def find_objects(
    pooled: Float[Tensor, "b 2 k d"], kept: Bool[Tensor, "b k"], labels: Int[Tensor, "b 2 n"], images: Int[Tensor, " b"]
) -> Objects:
    """Select from the result of `pool_objects` the clusters with tokens in both views.

    Synchronises with the device to read the counts: the shapes of the result depend on the data.
    """
    counts: list[int] = kept.sum(dim=1).tolist()
    rows, clusters = torch.nonzero_static(kept, size=sum(counts)).unbind(dim=1)
    teacher = pooled[rows, :, clusters].transpose(0, 1)
    return Objects(teacher, images[rows], counts, labels, rows, clusters, kept.shape[1])


def rows_of_groups(counts: Sequence[int], group_size: int) -> list[slice]:
    """Return the rows of each group of `group_size` images, from the number of rows of each image."""
    ends = [sum(counts[:end]) for end in range(0, len(counts) + 1, group_size)]
    return [slice(*rows) for rows in pairwise(ends)]


def mean_over_groups(groups: Sequence[slice], loss: Callable[[slice], Float[Tensor, ""]]) -> Float[Tensor, ""]:
    """Compute a loss for the rows of each group of images, and return the mean."""
    return torch.stack([loss(rows) for rows in groups]).mean()


def check_objects(options: ObjectiveOptions, *, tokens: int, with_bank: bool) -> None:
    """Check that views can be clustered and that a batch fits into the bank.

    Args:
        options: options of the run.
        tokens: number of tokens of both views.
        with_bank: whether a loss reads the bank of objects.

    Raises:
        ConfigError: options that cannot be combined.
    """
    objects, optim = options.objects, options.optim
    if objects.clustering == "kmeans" and objects.position_weight != 0:
        raise ConfigError(
            f"objects.clustering kmeans has no positional cue: set objects.position_weight to 0, "
            f"not {objects.position_weight}"
        )
    if with_bank and objects.bank_images is not None and objects.bank_images < optim.batch_size:
        raise ConfigError(
            f"objects.bank_images must hold at least one batch of {optim.batch_size} images, "
            f"got {objects.bank_images}: use a larger bank or a smaller optim.batch_size"
        )
    if objects.num_objects > tokens:
        raise ConfigError(
            f"objects.num_objects must be at most {tokens}, the patches of both views, got "
            f"{objects.num_objects}: use fewer clusters, larger views.size or smaller patches"
        )
