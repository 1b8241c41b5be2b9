"""Overclustering: k-means on patches, and matching of clusters with classes (Ziegler and Asano 2022)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from jaxtyping import Float32, Int, Int64, UInt8
from torch import Tensor

from cribo.base.console import Phases, Progress, no_progress
from cribo.base.errors import InputError
from cribo.data import LabelledImages
from cribo.data.config import spread
from cribo.data.labelled.crops import resize_labels
from cribo.evaluation.overclustering.config import OverclusteringSettings, require_patches
from cribo.evaluation.pictures import Panel, panel_of
from cribo.evaluation.protocol import Outcome, PatchProtocol
from cribo.evaluation.run import Run
from cribo.features.extraction import EncodedView, PatchFeatures
from cribo.features.scores import count_confusion, iou, iou_row, pairwise_iou
from cribo.features.whitening import Moments


@dataclass(frozen=True, kw_only=True)
class Overclustering(OverclusteringSettings, PatchProtocol):
    """Unsupervised segmentation by k-means, as in Leopart, TimeT and NeCo."""

    def prepare(self, run: Run) -> Self:
        """Set all settings that are None."""
        backbone, val = run.backbone, run.data.val
        image_size = backbone.fixed_size
        return self.for_data(backbone.patch_size, val.classes, len(val), image_size)

    def measure(self, run: Run) -> Outcome:
        """Cluster and score the patches of val."""
        import faiss
        import scipy

        val = run.data.val
        found = run.patches(val, size=self.size, interpolation=self.interpolation, precision=self.precision, unit=False)
        with Phases(run.console) as progress:
            rows, panels = overclustering(found, val, self, pictures=run.num_pictures, progress=progress)
        return Outcome(
            rows=rows,
            classes=val.classes,
            panels=panels,
            palette=val.palette,
            data={"patches": found.patches},
            packages={"faiss": faiss.__version__, "scipy": scipy.__version__},
        )


def overclustering(
    features: PatchFeatures,
    images: LabelledImages,
    settings: OverclusteringSettings,
    *,
    pictures: int = 0,
    progress: Progress = no_progress,
) -> tuple[list[dict[str, Any]], list[Panel]]:
    """Cluster the patches of images, and score the clusters as a segmentation.

    Args:
        features: patch features of the images, all encoded at the same size.
        images: images with the labels for matching and scoring.
        settings: settings of the protocol after `prepare`.
        pictures: number of images to return as panels, with the first number of clusters.
        progress: progress callback.

    Returns:
        A row for each number of clusters (`EvaluationResult.results`), and the panels.

    Raises:
        InputError: no labels to score, more clusters than patches, or features that are not finite.
    """
    views = [EncodedView(index) for index in range(len(images))]
    ignore, classes = images.ignore_index, len(images.classes)
    size = settings.mask_size, settings.mask_size
    masks = [_mask(images, index, size, settings) for index in range(len(images))]
    labels = torch.stack(masks).flatten()
    if not (labels != ignore).any():
        raise InputError("no image can be scored: all labels are ignored")
    rows = principal_components(features, views, settings.dims)
    sample = rows[_foreground(features, views).numpy()] if settings.foreground else rows
    if settings.foreground:
        require_patches(settings.clusters, len(sample), "patches of the foreground")
    grid, objects = features.grid(views[0]), classes - settings.foreground
    shown = spread(len(images), pictures)
    results, panels = [], []
    for clusters in settings.clusters:
        matching = "hungarian" if clusters == objects else "greedy"
        confusions = []
        for draw in range(settings.draws):
            found = _kmeans(sample, rows, clusters, settings, settings.seed + draw)
            maps = torch.from_numpy(found).view(len(images), *grid)
            predicted = torch.stack([resize_labels(part, size) for part in maps]).flatten()
            labelled = labels != ignore
            counts = count_confusion(labels[labelled], predicted[labelled], classes, clusters)
            matched = match_clusters(counts[settings.foreground :], matching) + settings.foreground
            confusion = torch.zeros(classes, classes, dtype=torch.long).index_add_(1, matched, counts)
            confusions.append(confusion)
            if not panels:
                panels = [
                    panel_of(images, index, matched[maps[index]], _mask(images, index, None, settings))
                    for index in shown
                ]
            done = settings.clusters.index(clusters) * settings.draws + draw + 1
            progress("k-means", done, len(settings.clusters) * settings.draws)
        row = {"clusters": clusters, **iou_row(torch.stack(list(map(iou, confusions))), images.classes)}
        results.append({**row, "matching": matching, "confusion": torch.stack(confusions).sum(dim=0)})
    return results, panels


def principal_components(
    features: PatchFeatures, views: Sequence[EncodedView], dims: int
) -> Float32[np.ndarray, "n p"]:
    """Project standardised patch features on their first principal components.

    Channels are standardised over all patches. Only projections are kept in memory; features are read twice.

    Args:
        features: patch features.
        views: views of the returned patches, in order.
        dims: number of components; limited to the number of channels.

    Raises:
        InputError: features are not finite.
    """
    moments = Moments(features.dim)
    for view in views:
        moments.update(features.features(view))
    mean, covariance = moments.mean, moments.covariance
    if not covariance.isfinite().all():
        raise InputError("the features of the backbone are not finite and cannot be clustered")
    deviation = covariance.diagonal().clamp_min(0).sqrt()
    scale = torch.where(deviation > 1e-8, deviation, 1.0)  # constant channels stay 0
    components = torch.linalg.eigh(covariance / (scale[:, None] * scale)).eigenvectors.flip(1)[:, :dims]
    projection = components / scale[:, None]
    return torch.cat([((features.features(view).double() - mean) @ projection).float() for view in views]).numpy()


def match_clusters(counts: Int[Tensor, "c k"], matching: str) -> Int64[Tensor, " k"]:
    """Return the class of each cluster.

    Args:
        counts: pixel counts of each class in each cluster.
        matching: `hungarian` for the one-to-one assignment with the highest sum of IoUs, for equal numbers of clusters
            and classes; `greedy` for the most frequent class of each cluster, the first on ties.

    Example:
        >>> counts = torch.tensor([[5, 4], [0, 3]])
        >>> match_clusters(counts, "greedy").tolist(), match_clusters(counts, "hungarian").tolist()
        ([0, 0], [0, 1])
    """
    if matching == "greedy":
        return counts.argmax(dim=0)
    from scipy.optimize import linear_sum_assignment

    classes, clusters = linear_sum_assignment(pairwise_iou(counts).numpy(), maximize=True)
    matched = torch.zeros(counts.shape[1], dtype=torch.long)
    matched[torch.from_numpy(clusters)] = torch.from_numpy(classes)
    return matched


def _kmeans(
    sample: Float32[np.ndarray, "m p"],
    rows: Float32[np.ndarray, "n p"],
    clusters: int,
    settings: OverclusteringSettings,
    seed: int,
) -> Int64[np.ndarray, " n"]:
    """Fit k-means to a sample, and return the nearest centre of each row."""
    import faiss

    faiss.omp_set_num_threads(torch.get_num_threads())
    means = faiss.Kmeans(
        rows.shape[1],
        clusters,
        niter=settings.iterations,
        nredo=settings.restarts,
        seed=seed,
        min_points_per_centroid=1,  # avoids a warning of faiss
        max_points_per_centroid=settings.patches_per_cluster,
    )
    means.train(np.ascontiguousarray(sample))
    return means.assign(rows)[1]


def _foreground(features: PatchFeatures, views: Sequence[EncodedView]) -> Tensor:
    """Return whether objects have more pixels than background and unlabelled pixels, for each patch."""
    counts = np.concatenate([features.counts[view].toarray() for view in views])
    return torch.from_numpy(counts[:, 1:-1].sum(axis=1) > np.maximum(counts[:, 0], counts[:, -1]))


def _mask(
    images: LabelledImages, index: int, size: tuple[int, int] | None, settings: OverclusteringSettings
) -> UInt8[Tensor, "h w"]:
    """Return the labels to score, resized unless `size` is None."""
    labels = images.labels(index)
    labels = labels if size is None else resize_labels(labels, size)
    return torch.where(labels == 0, images.ignore_index, labels) if settings.foreground else labels
