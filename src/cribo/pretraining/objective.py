"""One step of the method: from a batch of view pairs to the three losses (METHOD sections 2 to 4)."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

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
    Targets,
    apply_photometric,
    cluster_tokens,
    cross_image_targets,
    cross_view_targets,
    prototype_losses,
    sinkhorn_centre,
)
from cribo.method.clustering import cluster_tokens_kmeans
from cribo.method.objects import kept_clusters, pool_kept_objects
from cribo.method.precision import float32_products
from cribo.method.transfer import OnItsWay, send
from cribo.pretraining.config import ObjectsConfig, PretrainConfig
from cribo.pretraining.laps import Laps
from cribo.pretraining.network import Network


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
        losses: image, cross_view, cross_image: float32 scalars, means over the batch's groups; 0 where off.
        objects: the kept objects; None when no loss works on objects.
        matches: their matches; None without L_ci^o.
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


@dataclass
class _Embeddings:
    """Unit-length embeddings (2, B, E) of images and (2, R, E) of objects, view first."""

    images: Float[Tensor, "2 b e"]
    objects: Float[Tensor, "2 r e"]


Labelling = Callable[[Float[Tensor, "b 2 n d"], ViewPairs], Int[Tensor, "b 2 n"]]
"""Clusters of the teacher's tokens of a batch."""

Matching = Callable[..., Matches]
"""`MemoryBank.match`."""

LOSSES = ("image", "cross_view", "cross_image")


class Objective:
    """Computes the losses of a batch with the student, the teacher, the banks and the centres as they stand.

    Nothing is updated here: the same objective serves any number of micro-batches of one step.
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
        self.label_tokens: Labelling = partial(label_tokens, config=config.objects)
        self.match: Matching | None = bank.match if bank is not None else None

    def __call__(self, batch: ViewPairs, *, epoch: int, teacher_temperature: float, train_backbone: bool) -> Result:
        """The losses of a batch.

        Args:
            batch: B view pairs, a whole number of groups.
            epoch: from 0; decides whether L_ci^o counts yet.
            teacher_temperature: tau_t.
            train_backbone: whether gradients reach the backbone.
        """
        config = self.config
        images = apply_photometric(
            batch.views.flatten(0, 1),
            batch.photometric,
            solarise_threshold=config.views.solarise_threshold,
            mean=self.student.backbone.mean,
            std=self.student.backbone.std,
        )
        self.laps("photometric")
        objects, matches, teacher, tokens = self._teach(images, batch)
        with_neighbours = epoch >= config.losses.cross_image_from_epoch
        valid = OnItsWay(matches.valid) if matches is not None and with_neighbours else None
        student = self._learn(images, batch, objects, train_backbone=train_backbone)
        in_tf32 = images.is_cuda and config.runtime.losses_in_tf32
        with float32_products("high") if in_tf32 else nullcontext():
            losses = self._losses(student, teacher, objects, matches, valid, teacher_temperature)
        return Result(
            losses=losses,
            objects=objects,
            matches=matches,
            teacher_images=teacher.images.flatten(0, 1),
            teacher_objects=teacher.objects.flatten(0, 1),
            tokens=tokens,
        )

    @torch.no_grad()
    def _teach(
        self, images: Float[Tensor, "2b 3 h w"], batch: ViewPairs
    ) -> tuple[Objects | None, Matches | None, _Embeddings, Float[Tensor, "b 2 n d"]]:
        """The teacher's pass: what the objects are, which neighbours they have, and the targets."""
        config, size = self.config, len(batch)
        global_tokens, tokens, _ = self.teacher.backbone(images)
        tokens = tokens.unflatten(0, (size, 2))
        self.laps("teacher backbone")
        targets = self.teacher.embed(_by_view(global_tokens, size))
        self.laps("image projections")
        if not config.needs_objects:
            return None, None, _Embeddings(targets, targets[:, :0]), tokens
        labels = self.label_tokens(tokens, batch)
        self.laps("clustering")
        objects = find_objects(tokens, labels, batch, config.objects.num_objects)
        self.laps("pooling")
        matches = None
        if self.match is not None:
            matches = self.match(
                objects.teacher,
                objects.images,
                group_rows=objects.group_rows(config.objects.group_size),
                criterion=config.objects.criterion,
            )
        self.laps("retrieval")
        embedded = self.teacher.embed(objects.teacher)
        self.laps("object projections")
        return objects, matches, _Embeddings(targets, embedded), tokens

    def _learn(
        self, images: Float[Tensor, "2b 3 h w"], batch: ViewPairs, objects: Objects | None, *, train_backbone: bool
    ) -> _Embeddings:
        """The student's pass, its tokens pooled by the teacher's labels."""
        size = len(batch)
        with torch.set_grad_enabled(train_backbone):
            global_tokens, tokens, _ = self.student.backbone(
                images, drop_path_noise=_noise_or_none(batch.drop_path_noise)
            )
        self.laps("student backbone")
        embedded = self.student.embed(_by_view(global_tokens, size))
        self.laps("image projections")
        self.laps.at_gradient(global_tokens, "image projections, backward")
        if objects is None:
            self.laps.at_gradient(embedded, "image loss, backward")
            return _Embeddings(embedded, embedded[:, :0])
        kept = pool_kept_objects(
            tokens.unflatten(0, (size, 2)),
            objects.labels,
            self.config.objects.num_objects,
            objects.rows,
            objects.clusters,
        )
        self.laps("pooling")
        learned = self.student.embed(kept)
        self.laps("object projections")
        # Backward, what was made last comes first: object losses, image loss, objects' head, pooling, images' head.
        self.laps.at_gradient(learned, f"{'image loss' if self.config.losses.image else 'object losses'}, backward")
        self.laps.at_gradient(kept, "object projections, backward")
        self.laps.at_gradient(embedded, "pooling, backward")
        return _Embeddings(embedded, learned)

    def _losses(
        self,
        student: _Embeddings,
        teacher: _Embeddings,
        objects: Objects | None,
        matches: Matches | None,
        valid: OnItsWay | None,
        teacher_temperature: float,
    ) -> dict[str, Float[Tensor, ""]]:
        """Each loss as the mean over groups of the group's own mean."""
        config = self.config
        group_size = config.objects.group_size
        groups, rest = divmod(student.images.shape[1], group_size)
        if rest or not groups:
            raise ValueError(
                f"a batch must be a whole number of groups of {group_size} images, got {student.images.shape[1]}"
            )
        # A loss that is off or not yet on is 0 and, like one without objects, still attached to the graph.
        losses = {name: 0 * student.images.sum() for name in LOSSES}
        if config.losses.image:
            rows = [group_size] * groups
            level = self._level("image", teacher.images, rows, teacher_temperature)
            targets = [cross_view_targets(teacher.images, rows)]
            losses["image"] = prototype_losses(student.images.flatten(0, 1), targets, level)[0]
            if objects is not None:
                self.laps.at_gradient(losses["image"], "object losses, backward")
        self.laps("image loss")
        if objects is None:
            return losses
        rows = objects.group_rows(group_size)
        of_losses = {}
        if config.losses.cross_view:
            of_losses["cross_view"] = cross_view_targets(teacher.objects, rows)
        if matches is not None and valid is not None:
            of_losses["cross_image"] = self._embed_neighbours(matches, valid, rows)
            self.laps("object projections")
        if of_losses:
            level = self._level("object", teacher.objects, rows, teacher_temperature)
            values = prototype_losses(student.objects.flatten(0, 1), list(of_losses.values()), level)
            losses |= zip(of_losses, values.unbind(), strict=True)
        self.laps("object losses")
        return losses

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
            # Without rows, too: other devices may have some, and prototypes that are shared take all to be gathered.
            level = self._level(name, embeddings[None], [len(embeddings)], teacher_temperature)
            if embeddings.shape[0]:
                yield name, embeddings, level

    @torch.no_grad()
    def _embed_neighbours(self, matches: Matches, on_its_way: OnItsWay, object_rows: list[int]) -> Targets:
        """The teacher's embeddings of the valid neighbours, and the student's rows that are to predict them.

        Only the neighbours that the loss uses go through the head. Which they are is read once, while the
        student's pass is under way.
        """
        assert self.bank is not None
        valid = on_its_way.read()
        neighbours = []
        for view in (0, 1):
            rows = send(valid[view].nonzero().flatten(), matches.nearest.device)
            neighbours.append(self.bank.objects(view, matches.nearest[view, rows]))
        embeddings = self.teacher.embed(torch.cat(neighbours)).split([len(part) for part in neighbours])
        return cross_image_targets((embeddings[0], embeddings[1]), valid, object_rows)

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


def label_tokens(tokens: Float[Tensor, "b 2 n d"], batch: ViewPairs, config: ObjectsConfig) -> Int[Tensor, "b 2 n"]:
    """Cluster the teacher's tokens of both views of each image."""
    joint, coordinates = tokens.flatten(1, 2), batch.coordinates.flatten(1, 2)
    if config.clustering == "kmeans":
        labels = cluster_tokens_kmeans(
            joint,
            coordinates,
            num_objects=config.num_objects,
            iterations=config.iterations,
            initial_tokens=batch.initial_tokens,
        )
    else:
        labels = cluster_tokens(
            joint,
            coordinates,
            num_objects=config.num_objects,
            position_weight=config.position_weight,
            marginals=config.marginals,
            iterations=config.iterations,
            sinkhorn_iterations=config.sinkhorn_iterations,
            sharpness=config.sharpness,
            initial_tokens=batch.initial_tokens,
        )
    return labels.view(tokens.shape[:3])


def find_objects(
    tokens: Float[Tensor, "b 2 n d"], labels: Int[Tensor, "b 2 n"], batch: ViewPairs, num_objects: int
) -> Objects:
    """Pool the teacher's tokens in the clusters that both views have, compacted.

    Reading how many there are is the one synchronisation after which shapes depend on the data.
    """
    kept = kept_clusters(labels, num_objects)
    counts: list[int] = kept.sum(dim=1).tolist()
    rows, clusters = torch.nonzero_static(kept, size=sum(counts)).unbind(dim=1)
    return Objects(
        teacher=pool_kept_objects(tokens, labels, num_objects, rows, clusters),
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


def _by_view(tokens: Float[Tensor, "two_b d"], size: int) -> Float[Tensor, "2 b d"]:
    return tokens.unflatten(0, (size, 2)).transpose(0, 1)


def _noise_or_none(noise: Float[Tensor, "b 2 sites"]) -> Float[Tensor, "two_b sites"] | None:
    return noise.flatten(0, 1) if noise.shape[2] else None
