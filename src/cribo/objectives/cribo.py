"""CrIBo: L_cv^g, L_cv^o and L_ci^o of view pairs, in the order of the paper's section 3 (docs/method.md)."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from cribo.arguments import ConfigError
from cribo.data.samples import Batch, SampleDataset
from cribo.errors import InputError
from cribo.method import (
    Centre,
    Matches,
    MemoryBank,
    SelfDistillation,
    cross_image_loss,
    cross_view_loss,
    pool_objects,
    sinkhorn_centre,
)
from cribo.method.losses import cross_entropy
from cribo.models.modes import CompileMode
from cribo.objectives.anchor import Anchor
from cribo.objectives.banks import PatchBank, neighbour_loss, object_bank
from cribo.objectives.base import Columns, Output, Setting, Step
from cribo.objectives.collapse import collapse_advice, measure_collapse
from cribo.objectives.distillation import Distillation
from cribo.objectives.objects import (
    Objects,
    check_objects,
    find_clustering,
    find_criterion,
    find_objects,
    label_tokens,
)
from cribo.objectives.options import ObjectiveOptions
from cribo.objectives.points import GRID, Points, find_points
from cribo.objectives.trunk import Inputs, encode, inputs_of
from cribo.objectives.views import ViewPairs, drop_path_noise

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger("cribo")

_BEYOND_THE_PAPER = ("object_neighbours", "patch_neighbours", "anchor")


@dataclass
class Result:
    """Teacher outputs for a batch, and the student's losses.

    Attributes:
        batch_images: (B,) index of each image in the collection.
        tokens: (B, 2, N, D) the teacher's tokens.
        teacher_images: (2, B, E) the teacher's image-level embeddings.
        teacher_objects: (2, R, E) the teacher's object-level embeddings; R is 0 if no loss uses objects.
        objects: the objects; None if no loss uses them.
        matches: matches of the objects; None while L_ci^o is off.
        points: points of the views' overlap; None without soft neighbours of patches.
        losses: detached means over the batch's groups. `image`, `cross_view` and `cross_image` are 0 if off; losses
            that are not in the paper are present only if on.
    """

    batch_images: Int[Tensor, " b"]
    tokens: Float[Tensor, "b 2 n d"]
    teacher_images: Float[Tensor, "2 b e"]
    teacher_objects: Float[Tensor, "2 r e"]
    objects: Objects | None = None
    matches: Matches | None = None
    points: Points | None = None
    losses: dict[str, Tensor] = field(default_factory=dict)


class CrIBo(Distillation):
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
            "object_neighbours": "soft neighbours of objects",
            "patch_neighbours": "soft neighbours of patches",
            "anchor": "distance from the starting weights",
        },
        progress={"bootstrapping_ratio": "bootstrapped {:.0%}"},
    )

    image_centre: Centre
    object_centre: Centre

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting, levels=("image", "object"))
        options, losses = setting.options, setting.options.losses
        side = options.views.size // self.student.backbone.patch_size
        _check(options, tokens=2 * side * side)
        self.weights = {"image": losses.image, "cross_view": losses.cross_view, "cross_image": losses.cross_image}
        self.weights |= {name: weight for name in _BEYOND_THE_PAPER if (weight := getattr(losses, name))}
        self.images_per_group = options.objects.group_size
        # A last layer without its loss gets no gradient.
        self.uses_all_parameters = self.uses_all_parameters and bool(losses.image and losses.cross_view)
        self.grid = (side, side)
        self.object_bank = object_bank(options, setting.num_images)
        self.patch_bank = PatchBank(options, on=bool(losses.patch_neighbours))
        self.bank_images = self.object_bank.num_images
        self.anchor = Anchor(self.teacher.backbone, losses.anchor_kind) if losses.anchor else None
        self.cluster = find_clustering(options.objects)
        self.criterion = find_criterion(options.objects)
        self._cross_entropy = cross_entropy
        self._results: list[Result] = []  # one per micro-batch of the step so far
        self.last_result: Result | None = None

    @property
    def bank(self) -> MemoryBank | None:
        """The bank of objects; None before the first batch, or if no loss reads it."""
        return self.object_bank.bank

    def samples(self) -> ViewPairs:
        """Return the transform to view pairs."""
        return ViewPairs(
            self.options.views,
            grid=self.grid,
            num_objects=self.options.objects.num_objects if self.options.needs_objects else 0,
            drop_path_sites=self.student.backbone.num_drop_path_sites,
        )

    def forward(self, batch: Batch, step: Step) -> Output:
        """Compute the paper's three losses, whose weighted sum is equation 11, and the additional losses that are on.

        Args:
            batch: B view pairs, a whole number of groups.
            step: sets the temperature, whether the bank is read, and whether gradients reach the backbone.

        Raises:
            ValueError: the batch is not a whole number of groups.
        """
        if len(batch) % self.images_per_group or not len(batch):
            raise InputError(
                f"a batch must be a whole number of groups of {self.images_per_group} images, got {len(batch)}"
            )
        inputs = inputs_of(batch, self.teacher.backbone, self.options, step)
        result = self._teach(inputs, batch, step)
        with torch.set_grad_enabled(step.epoch >= self.options.optim.freeze_backbone_epochs):
            noise = drop_path_noise(batch)
            global_tokens, tokens, _ = encode(self.student.backbone, inputs, drop_path_noise=noise)
        step.lap("student backbone")
        images = self.student.head(_by_view(global_tokens))
        step.lap("image projections")
        step.lap.at_gradient(global_tokens, "image projections, backward")
        # Losses that are off or have no objects are 0, but attached to the graph.
        zero: Tensor = 0 * images.sum()
        losses = dict.fromkeys(self.weights, zero)
        if self.weights["image"]:
            losses["image"] = self._image_loss(images, result, step)
            step.lap("image loss")
            step.lap.at_gradient(images, "image loss, backward")
        metrics: dict[str, Any] = {}
        if result.objects is not None:
            losses |= self._object_losses(tokens.unflatten(0, (-1, 2)), result.objects, result, step)
            step.lap.at_gradient(losses["image"], "pooling, backward")
            metrics["objects_per_image"] = sum(result.objects.counts), len(batch)
        losses |= self._patch_losses(tokens, inputs, result, step)
        if result.matches is not None:
            metrics["bootstrapping_ratio"] = result.matches.valid.sum(), result.matches.valid.numel()
        result.losses = {name: loss.detach() for name, loss in losses.items()}
        self.last_result = result
        self._results.append(result)
        return Output(losses, metrics)

    # --------------------------------------------------- 3.2.1 coherent image regions, 3.2.2 cross-image matchings

    @torch.no_grad()
    def _teach(self, inputs: Inputs, batch: Batch, step: Step) -> Result:
        """Run the teacher: objects, their matches, and the embeddings that the student must predict."""
        options = self.options
        global_tokens, tokens, _ = encode(self.teacher.backbone, inputs)
        tokens = tokens.unflatten(0, (-1, 2))
        step.lap("teacher backbone")
        images = self.teacher.head(_by_view(global_tokens))
        step.lap("image projections")
        points = None
        if options.losses.patch_neighbours:
            points = find_points(tokens, batch, grid=self.grid, side=GRID)
            step.lap("patch losses")
        if not options.needs_objects:
            return Result(batch.images, tokens, images, images[:, :0], points=points)
        labels = self.label_tokens(tokens, batch)
        step.lap("clustering")
        objects = find_objects(*pool_objects(tokens, labels, options.objects.num_objects), labels, batch.images)
        step.lap("pooling")
        matches = None
        if options.needs_bank:
            self.object_bank.allocate(objects.teacher)
            if options.losses.cross_image and self._reads_banks(step):
                matches = self.match(objects.teacher, objects.images, objects.group_rows(self.images_per_group))
        step.lap("retrieval")
        embeddings = self.teacher.head(objects.teacher) if self._projects_objects else images[:, :0]
        step.lap("object projections")
        return Result(batch.images, tokens, images, embeddings, objects, matches, points)

    def label_tokens(self, tokens: Float[Tensor, "b 2 n d"], batch: Batch) -> Int[Tensor, "b 2 n"]:
        """Return the cluster of each of the teacher's tokens."""
        return label_tokens(tokens, batch, self.options.objects, self.cluster)

    def match(self, objects: Float[Tensor, "2 r d"], images: Int[Tensor, " r"], group_rows: Sequence[int]) -> Matches:
        """Return the nearest neighbours of objects in the bank, and whether they are positive pairs."""
        assert self.bank is not None
        return self.bank.match(objects, images, group_rows=group_rows, criterion=self.criterion)

    # --------------------------------------------------------------------------------- 3.2.3 training objectives

    def _image_loss(self, images: Float[Tensor, "2 b e"], result: Result, step: Step) -> Float[Tensor, ""]:
        """L_cv^g of the student's image-level embeddings."""
        rows = [self.images_per_group] * (images.shape[1] // self.images_per_group)
        level = self._level("image", result.teacher_images, rows, step)
        return cross_view_loss(images, result.teacher_images, level, rows, formula=self._cross_entropy)

    def _object_losses(
        self, tokens: Float[Tensor, "b 2 n d"], objects: Objects, result: Result, step: Step
    ) -> dict[str, Float[Tensor, ""]]:
        """L_cv^o, L_ci^o and soft neighbours of the student's tokens, pooled with the teacher's labels."""
        pooled = objects.pool(tokens, self.options.objects.num_objects)
        step.lap("pooling")
        losses: dict[str, Tensor] = {}
        if "object_neighbours" in self.weights and self._reads_banks(step):
            bank, config = self.object_bank, self.options.losses
            losses["object_neighbours"] = neighbour_loss(pooled, objects, bank, self.images_per_group, config)
            step.lap("object losses")
        if not self._projects_objects:
            return losses
        student = self.student.head(pooled)
        step.lap("object projections")
        step.lap.at_gradient(student, "object losses, backward")
        step.lap.at_gradient(pooled, "object projections, backward")
        rows = objects.group_rows(self.images_per_group)
        level = self._level("object", result.teacher_objects, rows, step)
        formula = self._cross_entropy
        if self.weights["cross_view"]:
            losses["cross_view"] = cross_view_loss(student, result.teacher_objects, level, rows, formula=formula)
        step.lap("object losses")
        if result.matches is not None:
            neighbours = self._embed_neighbours(result.matches)
            step.lap("object projections")
            valid = result.matches.valid
            losses["cross_image"] = cross_image_loss(student, neighbours, valid, level, rows, formula=formula)
        step.lap("object losses")
        return losses

    def _patch_losses(
        self, tokens: Float[Tensor, "two_b n d"], inputs: Inputs, result: Result, step: Step
    ) -> dict[str, Float[Tensor, ""]]:
        """Soft neighbours of patches, and the distance from the starting weights."""
        losses: dict[str, Tensor] = {}
        if result.points is not None:
            points, bank, config = result.points, self.patch_bank, self.options.losses
            bank.allocate(points.teacher)
            if self._reads_banks(step):
                student = points.sample(tokens.unflatten(0, (-1, 2)))
                losses["patch_neighbours"] = neighbour_loss(student, points, bank, self.images_per_group, config)
        if self.anchor is not None:
            losses["anchor"] = self.anchor(tokens, inputs)
        if losses:
            step.lap("patch losses")
        return losses

    @property
    def _projects_objects(self) -> bool:
        return bool(self.weights["cross_view"] or self.weights["cross_image"])

    def _reads_banks(self, step: Step) -> bool:
        return step.epoch >= self.options.losses.cross_image_from_epoch

    @torch.no_grad()
    def _embed_neighbours(self, matches: Matches) -> Float[Tensor, "z e"]:
        """Return the teacher's embeddings of the valid neighbours; the head computes no others."""
        assert self.bank is not None
        views, rows = matches.valid.nonzero(as_tuple=True)
        return self.teacher.head(self.bank.objects(views, matches.nearest[views, rows]))

    def _level(
        self, name: str, embeddings: Float[Tensor, "2 r e"], group_rows: list[int], step: Step
    ) -> SelfDistillation:
        """Return prototypes, centre and temperatures of a level; each group has its own Sinkhorn centre."""
        losses, temperature = self.options.losses, self.schedules(step)["teacher_temperature"]
        student, teacher = (network.prototypes(name).weight for network in (self.student, self.teacher))
        centre = self.centre(name).value
        if losses.centring == "sinkhorn":
            groups = [rows.flatten(0, 1) for rows in embeddings.split(group_rows, dim=1)]
            centre = torch.stack([sinkhorn_centre(rows, teacher, temperature=temperature) for rows in groups])
        return SelfDistillation(student, teacher, centre, losses.student_temperature, temperature)

    # ------------------------------------------------------------------------------ update after a step, checkpoints

    @torch.no_grad()
    def after_step(self, step: Step) -> None:
        """Update centres and teacher, and push the step's objects and patches to their banks."""
        results, self._results = self._results, []
        images, objects = zip(*((result.teacher_images, result.teacher_objects) for result in results), strict=True)
        self.move_teacher(step, {"image": images, "object": objects})
        batch_images = torch.cat([result.batch_images for result in results])
        found = [result.objects for result in results if result.objects is not None]
        self.object_bank.push(found, batch_images, step)
        points = [result.points for result in results if result.points is not None]
        self.patch_bank.push_points(points, batch_images, step)
        step.lap("bank update")

    def compile_parts(self, mode: CompileMode) -> None:
        """Compile both backbones, the clustering, and the cross-entropy."""
        super().compile_parts(mode)
        self.cluster = torch.compile(self.cluster)
        # The number of objects changes from step to step.
        self._cross_entropy = torch.compile(cross_entropy, dynamic=True)

    def get_extra_state(self) -> dict[str, Any]:
        """Return the banks' states. Banks are not buffers because distributed wrappers must not broadcast them."""
        return {"bank": self.object_bank.state_dict(), "patch_bank": self.patch_bank.state_dict()}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Store the banks' states, to be restored when the banks are allocated."""
        self.object_bank.load_state_dict(state["bank"])
        self.patch_bank.load_state_dict(state.get("patch_bank"))  # older checkpoints have none

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
            name: (rows, self._level(name, rows, [rows.shape[1]], step))
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

        return object_figures(self, rows, dataset)

    def callbacks(self, folder: Path, dataset: SampleDataset) -> Iterable[Callback]:
        """Return the callback that records clusters."""
        if not self.options.needs_objects:
            return ()
        from cribo.objectives.cluster_record import ClusterRecord

        return (ClusterRecord(folder, dataset.source, self.options),)


def _by_view(tokens: Float[Tensor, "two_b d"]) -> Float[Tensor, "2 b d"]:
    return tokens.unflatten(0, (-1, 2)).transpose(0, 1)


def _check(options: ObjectiveOptions, *, tokens: int) -> None:
    losses, optim = options.losses, options.optim
    if not (losses.image or options.needs_objects or losses.patch_neighbours):
        raise ConfigError("all of losses.image, losses.cross_view and losses.cross_image are 0: set at least one")
    if options.needs_objects:
        check_objects(options, tokens=tokens, with_bank=options.needs_bank)
    if losses.cross_image and losses.cross_image_from_epoch >= optim.epochs:
        log.warning(
            "losses.cross_image_from_epoch %d is beyond optim.epochs %d: the run does not use L_ci^o",
            losses.cross_image_from_epoch,
            optim.epochs,
        )
