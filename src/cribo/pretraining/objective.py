"""The losses of a batch: from view pairs to L_cv^g, L_cv^o and L_ci^o (paper section 3; docs/method.md)."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from cribo.data.pairs import ViewPairs
from cribo.method import (
    Centre,
    Matches,
    MemoryBank,
    SelfDistillation,
    apply_photometric,
    cluster_tokens,
    cluster_tokens_kmeans,
    cross_image_loss,
    cross_view_loss,
    pool_objects,
    sinkhorn_centre,
)
from cribo.method.losses import cross_entropy
from cribo.models import normalise
from cribo.pretraining.config import ObjectsConfig, PretrainConfig
from cribo.pretraining.laps import Laps
from cribo.pretraining.network import Network

LOSSES = ("image", "cross_view", "cross_image")


@dataclass
class Objects:
    """The kept objects of a batch, compacted: R rows, image after image.

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


@dataclass
class Result:
    """What one batch gives: the losses, and what the step needs afterwards.

    Attributes:
        losses: image, cross_view, cross_image: scalars, means over the batch's groups; 0 where off.
        objects: the kept objects; None when no loss works on objects.
        matches: their matches; None while L_ci^o is off.
        teacher_images: (2B, E) the teacher's image-level embeddings.
        teacher_objects: (2R, E) its object-level embeddings.
        tokens: (B, 2, N, D) the teacher's tokens, for the collapse watch.
    """

    losses: dict[str, Tensor]
    objects: Objects | None
    matches: Matches | None
    teacher_images: Float[Tensor, "2b e"]
    teacher_objects: Float[Tensor, "2r e"]
    tokens: Float[Tensor, "b 2 n d"]


class _Targets(NamedTuple):
    """What the teacher gives the student to predict: embeddings (2, B, E) and (2, R, E), and where they come from."""

    images: Float[Tensor, "2 b e"]
    objects: Float[Tensor, "2 r e"]
    tokens: Float[Tensor, "b 2 n d"]
    found: Objects | None
    matches: Matches | None


Labelling = Callable[[Float[Tensor, "b 2 n d"], ViewPairs], Int[Tensor, "b 2 n"]]
"""Clusters of the teacher's tokens of a batch."""

Matching = Callable[..., Matches]
"""`MemoryBank.match`."""


class Objective:
    """Computes the losses of a batch with the student, the teacher, the banks and the centres as they are.

    Nothing is updated here: the same objective serves all micro-batches of a step.
    """

    def __init__(
        self,
        config: PretrainConfig,
        *,
        student: Network,
        teacher: Network,
        image_centre: Centre,
        object_centre: Centre,
        bank: MemoryBank | None,
        laps: Laps | None = None,
    ) -> None:
        self.config = config
        self.student = student
        self.teacher = teacher
        self.image_centre = image_centre
        self.object_centre = object_centre
        self.bank = bank
        self.laps = laps or Laps()
        compiles = config.runtime.compile_mode is not None
        cluster = torch.compile(cluster_tokens) if compiles else cluster_tokens
        self.label_tokens: Labelling = partial(label_tokens, config=config.objects, cluster=cluster)
        self.match: Matching | None = bank.match if bank is not None else None
        # The number of objects differs from step to step.
        formula = torch.compile(cross_entropy, dynamic=True) if compiles else cross_entropy
        self._cross_view_loss = partial(cross_view_loss, formula=formula)
        self._cross_image_loss = partial(cross_image_loss, formula=formula)

    def __call__(self, batch: ViewPairs, *, epoch: int, teacher_temperature: float, train_backbone: bool) -> Result:
        """The losses of a batch.

        Args:
            batch: B view pairs, a whole number of groups.
            epoch: from 0; decides whether L_ci^o is on.
            teacher_temperature: tau_t.
            train_backbone: whether gradients reach the backbone.

        Raises:
            ValueError: a batch that is not a whole number of groups.
        """
        group_size, backbone = self.config.objects.group_size, self.student.backbone
        if len(batch) % group_size or not len(batch):
            raise ValueError(f"a batch must be a whole number of groups of {group_size} images, got {len(batch)}")
        threshold = self.config.views.solarise_threshold
        views = apply_photometric(batch.views.flatten(0, 1), batch.photometric, solarise_threshold=threshold)
        views = normalise(views, mean=backbone.mean, std=backbone.std)
        self.laps("photometric")
        targets = self._teach(views, batch, with_neighbours=epoch >= self.config.losses.cross_image_from_epoch)
        with torch.set_grad_enabled(train_backbone):
            noise = batch.drop_path_noise.flatten(0, 1) if batch.drop_path_noise.shape[2] else None
            global_tokens, tokens, _ = backbone(views, drop_path_noise=noise)
        self.laps("student backbone")
        images = self.student.head(_by_view(global_tokens))
        self.laps("image projections")
        self.laps.at_gradient(global_tokens, "image projections, backward")
        # Losses that are off or have no objects are 0 and attached to the graph.
        losses: dict[str, Tensor] = dict.fromkeys(LOSSES, 0 * images.sum())
        if self.config.losses.image:
            losses["image"] = self._image_loss(images, targets, teacher_temperature)
            self.laps("image loss")
            self.laps.at_gradient(images, "image loss, backward")
        if targets.found is not None:
            tokens = tokens.unflatten(0, (-1, 2))
            losses |= self._object_losses(tokens, targets, targets.found, teacher_temperature)
            self.laps.at_gradient(losses["image"], "pooling, backward")
        return Result(
            losses=losses,
            objects=targets.found,
            matches=targets.matches,
            teacher_images=targets.images.flatten(0, 1),
            teacher_objects=targets.objects.flatten(0, 1),
            tokens=targets.tokens,
        )

    @torch.no_grad()
    def _teach(self, views: Float[Tensor, "2b 3 h w"], batch: ViewPairs, *, with_neighbours: bool) -> _Targets:
        """The teacher's pass: objects, their matches, and the embeddings that the student is to predict."""
        objects = self.config.objects
        global_tokens, tokens, _ = self.teacher.backbone(views)
        tokens = tokens.unflatten(0, (-1, 2))
        self.laps("teacher backbone")
        images = self.teacher.head(_by_view(global_tokens))
        self.laps("image projections")
        if not self.config.needs_objects:
            return _Targets(images, images[:, :0], tokens, None, None)
        labels = self.label_tokens(tokens, batch)
        self.laps("clustering")
        found = find_objects(tokens, labels, batch, objects.num_objects)
        self.laps("pooling")
        matches = None
        if self.match is not None and with_neighbours:
            rows = found.group_rows(objects.group_size)
            matches = self.match(found.teacher, found.images, group_rows=rows, criterion=objects.criterion)
        self.laps("retrieval")
        embeddings = self.teacher.head(found.teacher)
        self.laps("object projections")
        return _Targets(images, embeddings, tokens, found, matches)

    def _image_loss(
        self, images: Float[Tensor, "2 b e"], targets: _Targets, teacher_temperature: float
    ) -> Float[Tensor, ""]:
        """L_cv^g of the student's image-level embeddings."""
        group_size = self.config.objects.group_size
        rows = [group_size] * (images.shape[1] // group_size)
        level = self._level("image", targets.images, rows, teacher_temperature)
        return self._cross_view_loss(images, targets.images, level, rows)

    def _object_losses(
        self, tokens: Float[Tensor, "b 2 n d"], targets: _Targets, found: Objects, teacher_temperature: float
    ) -> dict[str, Float[Tensor, ""]]:
        """L_cv^o and L_ci^o of the student's tokens, which are pooled with the teacher's labels."""
        objects, _ = pool_objects(tokens, found.labels, self.config.objects.num_objects)
        objects = objects[found.rows, :, found.clusters].transpose(0, 1)
        self.laps("pooling")
        embeddings = self.student.head(objects)
        self.laps("object projections")
        self.laps.at_gradient(embeddings, "object losses, backward")
        self.laps.at_gradient(objects, "object projections, backward")
        rows = found.group_rows(self.config.objects.group_size)
        level = self._level("object", targets.objects, rows, teacher_temperature)
        losses: dict[str, Tensor] = {}
        if self.config.losses.cross_view:
            losses["cross_view"] = self._cross_view_loss(embeddings, targets.objects, level, rows)
        self.laps("object losses")
        if targets.matches is not None:
            neighbours = self._embed_neighbours(targets.matches)
            self.laps("object projections")
            valid = targets.matches.valid
            losses["cross_image"] = self._cross_image_loss(embeddings, neighbours, valid, level, rows)
        self.laps("object losses")
        return losses

    @torch.no_grad()
    def _embed_neighbours(self, matches: Matches) -> Float[Tensor, "z e"]:
        """The teacher's embeddings of the valid neighbours: no others go through the head."""
        assert self.bank is not None
        views, rows = matches.valid.nonzero(as_tuple=True)
        return self.teacher.head(self.bank.objects(views, matches.nearest[views, rows]))

    def watched_levels(
        self, result: Result, teacher_temperature: float
    ) -> Iterator[tuple[str, Float[Tensor, "r e"], SelfDistillation]]:
        """Name, teacher embeddings and distillation of each level that has rows in a result."""
        config = self.config
        for name, embeddings, used in (
            ("image", result.teacher_images, config.losses.image),
            ("object", result.teacher_objects, config.needs_objects),
        ):
            if not used:
                continue
            # Also without rows: other ranks may have some, and all are needed to gather sharded prototypes.
            level = self._level(name, embeddings[None], [len(embeddings)], teacher_temperature)
            if embeddings.shape[0]:
                yield name, embeddings, level

    def _level(
        self, name: str, targets: Float[Tensor, "views r e"], group_rows: list[int], teacher_temperature: float
    ) -> SelfDistillation:
        """What turns embeddings of images or of objects into losses; a Sinkhorn centre is each group's own."""
        losses = self.config.losses
        centre: Centre = getattr(self, f"{name}_centre")
        student, teacher = (getattr(network, f"{name}_prototypes").weight for network in (self.student, self.teacher))
        value = centre.value
        if losses.centring == "sinkhorn":
            groups = [rows.flatten(0, 1) for rows in targets.split(group_rows, dim=1)]
            value = torch.stack([sinkhorn_centre(rows, teacher, temperature=teacher_temperature) for rows in groups])
        return SelfDistillation(student, teacher, value, losses.student_temperature, teacher_temperature)


def label_tokens(
    tokens: Float[Tensor, "b 2 n d"],
    batch: ViewPairs,
    config: ObjectsConfig,
    cluster: Callable[..., Int[Tensor, "b t"]] = cluster_tokens,
) -> Int[Tensor, "b 2 n"]:
    """Cluster the teacher's tokens of both views of each image."""
    options = {
        "num_objects": config.num_objects,
        "iterations": config.iterations,
        "initial_tokens": batch.initial_tokens,
    }
    joint = tokens.flatten(1, 2), batch.coordinates.flatten(1, 2)
    if config.clustering == "kmeans":
        labels = cluster_tokens_kmeans(*joint, **options)
    else:
        labels = cluster(
            *joint,
            **options,
            position_weight=config.position_weight,
            marginals=config.marginals,
            sinkhorn_iterations=config.sinkhorn_iterations,
            sharpness=config.sharpness,
        )
    return labels.view(tokens.shape[:3])


def find_objects(
    tokens: Float[Tensor, "b 2 n d"], labels: Int[Tensor, "b 2 n"], batch: ViewPairs, num_objects: int
) -> Objects:
    """Pool the teacher's tokens, and compact the clusters that both views have.

    The counts are read from the device here; after it, shapes depend on the data.
    """
    objects, kept = pool_objects(tokens, labels, num_objects)
    counts: list[int] = kept.sum(dim=1).tolist()
    rows, clusters = torch.nonzero_static(kept, size=sum(counts)).unbind(dim=1)
    return Objects(
        teacher=objects[rows, :, clusters].transpose(0, 1),
        labels=labels,
        rows=rows,
        clusters=clusters,
        images=batch.images[rows],
        counts=counts,
    )


def prototype_entropy(
    embeddings: Float[Tensor, "r e"], level: SelfDistillation
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Entropy of the mean teacher distribution, and mean entropy of the distributions, as shares of ln L.

    The first near 0: all rows share one prototype. The second near 1: every row is uniform. Both are collapse.
    """
    logits = F.linear(embeddings, level.teacher_prototypes) - level.centre
    p = (logits / level.teacher_temperature).softmax(dim=-1)
    scale = 1 / torch.log(torch.tensor(float(p.shape[1])))
    mean = p.mean(dim=0)
    of_mean = -(mean * mean.clamp_min(1e-12).log()).sum() * scale
    mean_of = -(p * p.clamp_min(1e-12).log()).sum(dim=1).mean() * scale
    return of_mean, mean_of


def _by_view(tokens: Float[Tensor, "two_b d"]) -> Float[Tensor, "2 b d"]:
    return tokens.unflatten(0, (-1, 2)).transpose(0, 1)
