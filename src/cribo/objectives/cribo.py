"""CrIBo: L_cv^g, L_cv^o and L_ci^o of view pairs, in the order of the paper's section 3 (docs/method.md)."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from cribo.base.devices import HostCopy
from cribo.base.errors import ConfigError
from cribo.data.samples import Batch, SampleDataset
from cribo.method import Centre, MemoryBank, cross_image_loss
from cribo.objectives.base import Columns, Output, Setting, Step
from cribo.objectives.collapse import collapse_advice, measure_collapse
from cribo.objectives.pairs import Found, PairObjective
from cribo.objectives.self_distillation import Distillation
from cribo.objectives.terms import LABELS, StepFeatures
from cribo.objectives.trunk import Inputs, encode, inputs_of
from cribo.objectives.views import drop_path_noise, split_views
from cribo.training.timing import backward_part, part

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger("cribo")


@dataclass
class Result(Found):
    """Teacher outputs for a batch, and the student's losses.

    Attributes:
        tokens: (B, 2, N, D) the teacher's tokens.
        teacher_images: (2, B, E) the teacher's image-level embeddings.
        teacher_objects: (2, R, E) the teacher's object-level embeddings; R is 0 if no loss uses objects.
        pairs: (groups,) numbers of positive pairs; None without matches.
        losses: detached means over the batch's groups. `image`, `cross_view` and `cross_image` are 0 if off; losses
            that are not in the paper are present only if on.
    """

    tokens: Float[Tensor, "b 2 n d"] = field(kw_only=True)
    teacher_images: Float[Tensor, "2 b e"] = field(kw_only=True)
    teacher_objects: Float[Tensor, "2 r e"] = field(kw_only=True)
    pairs: HostCopy | None = None
    losses: dict[str, Tensor] = field(default_factory=dict)


class CrIBo(PairObjective, Distillation):
    """Cross-image object-level bootstrapping.

    Contains student, teacher, memory bank and centres. `forward` does not modify them, so all micro-batches of a step
    use the same state; `after_step` updates them once.

    Raises:
        ConfigError: options that cannot be combined.
    """

    columns = Columns(
        labels={
            "image": r"image level $\mathcal{L}_{cv}^{g}$",
            "cross_view": r"cross-view objects $\mathcal{L}_{cv}^{o}$",
            "cross_image": r"cross-image objects $\mathcal{L}_{ci}^{o}$",
            "bootstrapping_ratio": "objects with a valid match",
            "objects_per_image": "objects per image",
            **LABELS,
        },
        progress={"bootstrapping_ratio": "bootstrapped {:.0%}"},
    )

    image_centre: Centre
    object_centre: Centre

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting, levels=dict.fromkeys(("image", "object"), setting.options.head.prototypes))
        options, losses = setting.options, setting.options.losses
        if not (losses.image or options.needs_objects or losses.patch_neighbours):
            raise ConfigError("all of losses.image, losses.cross_view and losses.cross_image are 0: set at least one")
        self.images_per_group = options.objects.group_size
        # A last layer without its loss gets no gradient.
        self.uses_all_parameters = self.uses_all_parameters and bool(losses.image and losses.cross_view)
        terms = [name for name in LABELS if getattr(losses, name)]
        reads = ["objects"] if losses.cross_view else []
        reads += ["objects", "object_bank", "matches"] if losses.cross_image else []
        self.use_pairs(terms, reads=reads, from_epoch=losses.cross_image_from_epoch)
        self.bank_images = self.object_bank.num_images
        self.weights = {name: getattr(losses, name) for name in ("image", "cross_view", "cross_image", *self.terms)}
        if losses.cross_image and losses.cross_image_from_epoch >= options.optim.epochs:
            log.warning(
                "losses.cross_image_from_epoch %d is beyond optim.epochs %d: the run does not use L_ci^o",
                losses.cross_image_from_epoch,
                options.optim.epochs,
            )
        self.last_result: Result | None = None

    @property
    def bank(self) -> MemoryBank | None:
        """The bank of objects; None before the first batch, or if no loss reads it."""
        return self.object_bank.bank

    def forward(self, batch: Batch, step: Step) -> Output:
        """Compute the paper's three losses, whose weighted sum is equation 11, and the additional losses that are on.

        Args:
            batch: B view pairs, a whole number of groups.
            step: sets the temperature, whether the bank is read, and whether gradients reach the backbone.

        Raises:
            ValueError: the batch is not a whole number of groups.
        """
        self.image_groups(len(batch))  # raises an error about the size of the batch before any work
        inputs = inputs_of(batch, self.teacher.backbone, self.options)
        result = self._teach(inputs, batch, step)
        with part("student backbone"), torch.set_grad_enabled(step.epoch >= self.options.optim.freeze_backbone_epochs):
            features = encode(self.student.backbone, inputs, drop_path_noise=drop_path_noise(batch))
            global_tokens, tokens = split_views(features)
        with part("image projections"):
            images = self.student.head(global_tokens)
        # The last operation of the forward pass is the first one of the backward pass.
        backward_part("image projections, backward", until=global_tokens)
        backward_part("image loss, backward", until=images)
        # Losses that are off or have no objects are 0, but attached to the graph.
        none: Tensor = 0 * images.sum()
        losses: dict[str, Tensor] = dict.fromkeys(self.weights, none)
        if self.weights["image"]:  # L_cv^g (equation 10)
            with part("image loss"):
                groups = self.image_groups(images.shape[1])
                losses["image"] = self.cross_view("image", images, result.teacher_images, groups, step)
            backward_part("pooling, backward", until=losses["image"])
        pairs: dict[str, Any] = {}
        metrics: dict[str, Any] = {}
        if result.objects is not None:
            with part("pooling"):
                pooled = result.objects.features(tokens)
            pairs["objects"] = result.objects, pooled
            metrics["objects_per_image"] = sum(result.objects.counts), len(batch)
            if self._projects_objects:
                with part("object projections"):
                    student = self.student.head(pooled)
                backward_part("object projections, backward", until=pooled)
                backward_part("object losses, backward", until=student)
                losses |= self.object_losses(student, result, step)
        if result.matches is not None:
            metrics["bootstrapping_ratio"] = result.matches.valid.sum(), result.matches.valid.numel()
        if result.points is not None:
            pairs["points"] = result.points, result.points.features(tokens)
        with part("patch losses"):
            features = StepFeatures(inputs, tokens, pairs, result.matches)
            losses |= {name: term(features, step) for name, term in self.terms.items()}
        result.losses = {name: loss.detach() for name, loss in losses.items()}
        self.last_result = result
        return Output(losses, metrics)

    @torch.no_grad()
    def _teach(self, inputs: Inputs, batch: Batch, step: Step) -> Result:
        """Run the teacher: objects, their matches, and the embeddings that the student must predict."""
        with part("teacher backbone"):
            global_tokens, tokens = split_views(encode(self.teacher.backbone, inputs))
        with part("image projections"):
            images = self.teacher.head(global_tokens)
        result = Result(batch.images, tokens=tokens, teacher_images=images, teacher_objects=images[:, :0])
        self.find(result, tokens, batch, step)  # sections 3.2.1 and 3.2.2
        if result.objects is not None and result.matches is not None:
            groups = result.objects.groups(self.images_per_group)
            result.pairs = HostCopy(torch.stack([result.matches.valid[:, rows].sum() for rows in groups]))
        if result.objects is not None and self._projects_objects:
            with part("object projections"):
                result.teacher_objects = self.teacher.head(result.objects.teacher)
        self.embeddings["image"].append(images)
        self.embeddings["object"].append(result.teacher_objects)
        return result

    # --------------------------------------------------------------------------------- 3.2.3 training objectives

    @part("object losses")
    def object_losses(
        self, student: Float[Tensor, "2 r e"], result: Result, step: Step
    ) -> dict[str, Float[Tensor, ""]]:
        """L_cv^o (equation 6) and L_ci^o (equation 8)."""
        assert result.objects is not None
        teacher, matches = result.teacher_objects, result.matches
        groups = result.objects.groups(self.images_per_group)
        losses: dict[str, Tensor] = {}
        if self.weights["cross_view"]:
            losses["cross_view"] = self.cross_view("object", student, teacher, groups, step)
        if matches is not None:
            assert result.pairs is not None
            pairs, parts = result.pairs.read(), self.share_centres("object", teacher, groups, step)
            counts = pairs if len(parts) == len(pairs) else [sum(pairs)]
            of_parts = []
            for (level, rows, own), count in zip(parts, counts, strict=True):
                valid = matches.valid[:, rows]
                neighbours = self.embed_neighbours(matches.nearest[:, rows], valid, count)
                of_parts.append(cross_image_loss(student[:, rows], neighbours, valid, level, groups=own))
            losses["cross_image"] = torch.stack(of_parts).mean()
        return losses

    @torch.no_grad()
    def embed_neighbours(
        self, nearest: Int[Tensor, "2 r"], valid: Bool[Tensor, "2 r"], count: int
    ) -> Float[Tensor, "z e"]:
        """Return the teacher's embeddings of the `count` valid neighbours; the head computes no others."""
        assert self.bank is not None
        views, rows = torch.nonzero_static(valid, size=count).unbind(dim=1)
        neighbours = self.bank.objects(views, nearest[views, rows])
        with part("object projections"):
            return self.teacher.head(neighbours)

    @property
    def _projects_objects(self) -> bool:
        return bool(self.weights["cross_view"] or self.weights["cross_image"])

    # ------------------------------------------------------------------------------------------ records of a run

    @torch.no_grad()
    def watch(self, step: Step) -> dict[str, float]:
        """Measure collapse on the last micro-batch."""
        result, options = self.last_result, self.options
        if result is None:
            return {}
        embeddings = {"image": result.teacher_images} if options.losses.image else {}
        if options.needs_objects:
            embeddings["object"] = result.teacher_objects
        levels = {
            name: (rows, self.centred(self.level(name, step), rows))
            for name, rows in embeddings.items()
            if rows.shape[1]
        }
        return measure_collapse(result.tokens, result.matches, levels)

    def advice(self, row: Mapping[str, float]) -> dict[str, str]:
        """Return advice on collapse, and on losses without signal."""
        losses = self.options.losses
        return collapse_advice(
            row,
            cross_image=bool(losses.cross_image) and row["epoch"] > losses.cross_image_from_epoch,
            needs_objects=self.options.needs_objects,
            prototypes=self.options.head.prototypes,
        )

    def figures(self, rows: Sequence[dict[str, float]], dataset: SampleDataset) -> dict[str, "Figure"]:
        """Draw the bootstrapping ratio, clusters on view pairs, and matches across images."""
        from cribo.objectives.pictures import object_figures

        return object_figures(self.exported(), self.options, rows, dataset)

    def callbacks(self, folder: Path, dataset: SampleDataset) -> Iterable[Callback]:
        """Return the callback that records clusters."""
        if not self.options.needs_objects:
            return ()
        from cribo.objectives.cluster_record import ClusterRecord

        return (ClusterRecord(folder, dataset.source, self.options),)
