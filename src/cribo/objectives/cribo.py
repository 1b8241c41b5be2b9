"""CrIBo: L_cv^g, L_cv^o and L_ci^o from view pairs, and what happens after a step (paper section 3; docs/method.md)."""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from cribo.arguments import ConfigError, import_by_path
from cribo.data.samples import Batch, LazyImage, Sample, SampleDataset
from cribo.method import (
    NO_MATCH,
    Centre,
    Crops,
    Matches,
    MemoryBank,
    SelfDistillation,
    ViewRecipe,
    apply_photometric,
    cluster_tokens,
    cluster_tokens_kmeans,
    cross_image_loss,
    cross_view_loss,
    cut_views,
    draw_initial_tokens,
    patch_coordinates,
    pool_objects,
    sample_crops,
    sample_photometric,
    sinkhorn_centre,
)
from cribo.method.losses import cross_entropy
from cribo.method.views import largest_reduction, reduced_crops
from cribo.models import Backbone, normalise
from cribo.models.modes import CompileMode
from cribo.objectives.base import Columns, Objective, Output, Setting, Step, move_towards
from cribo.objectives.networks import Network
from cribo.objectives.options import ObjectiveOptions, ObjectsConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger("cribo")

# Rows that the collapse watch looks at: enough for a mean, few against the batch.
_WATCHED_ROWS = 256


class ViewPairs:
    """Two views of an image, and what is drawn for it: the sample of CrIBo.

    A batch of them holds `views` (B, 2, 3, H, W) in 8 bits, `coordinates` (B, 2, N, 2), the patch centres (x, y) in
    pixels of the source image, `initial_tokens` (B, K) of 2N that start the clusters, `drop_path_noise` (B, 2, sites)
    and `photometric` with parameters (B, 2).

    Args:
        recipe: how views are drawn.
        grid: (h, w) patches of a view.
        num_objects: K, initial tokens to draw; 0 for none.
        drop_path_sites: uniform numbers to draw per view, for the student's stochastic depth.
    """

    def __init__(self, recipe: ViewRecipe, *, grid: tuple[int, int], num_objects: int, drop_path_sites: int) -> None:
        self.recipe = recipe
        self.grid = grid
        self.num_objects = num_objects
        self.drop_path_sites = drop_path_sites

    def __call__(self, image: LazyImage, generator: torch.Generator) -> Sample:
        """Decode, cut, draw; the image is decoded reduced by as much as its two crops allow."""
        drawn: list[Crops] = []

        def reduction(height: int, width: int) -> int:
            drawn.append(sample_crops(height, width, self.recipe, generator=generator))
            return largest_reduction(drawn[0], self.recipe.size)

        pixels, reduced = image.load_reduced(reduction)
        crops = reduced_crops(drawn[0], reduced)
        photometric = sample_photometric(self.recipe, generator=generator)
        tokens = 2 * self.grid[0] * self.grid[1]
        initial = torch.zeros(0, dtype=torch.long)
        if self.num_objects:
            initial = draw_initial_tokens(tokens, self.num_objects, generator=generator)
        return {
            "views": cut_views(pixels, crops, self.recipe.size),
            "coordinates": patch_coordinates(crops.boxes * reduced, crops.flips, self.grid),
            "initial_tokens": initial,
            "drop_path_noise": torch.rand((2, self.drop_path_sites), generator=generator),
            "photometric": photometric,
        }


def normalised_views(batch: Batch, recipe: ViewRecipe, backbone: Backbone) -> Float[Tensor, "2b 3 h w"]:
    """The views of a batch as a network takes them, after the photometric operations; image after image."""
    views = apply_photometric(
        batch["views"].flatten(0, 1), batch["photometric"].flatten(), solarise_threshold=recipe.solarise_threshold
    )
    return normalise(views, mean=backbone.mean, std=backbone.std)


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
        batch_images: (B,) index of each image in the collection.
        objects: the kept objects; None when no loss works on objects.
        matches: their matches; None while L_ci^o is off.
        teacher_images: (2B, E) the teacher's image-level embeddings.
        teacher_objects: (2R, E) its object-level embeddings.
        tokens: (B, 2, N, D) the teacher's tokens, for the collapse watch.
    """

    losses: dict[str, Tensor]
    batch_images: Int[Tensor, " b"]
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


class CrIBo(Objective):
    """Cross-image object-level bootstrapping.

    Student and teacher, the memory bank and the centres. Inside a step nothing of this changes, so that
    micro-batches see the same; `after_step` updates all of it once.

    Raises:
        ConfigError: options that do not go together.
    """

    columns = Columns(
        labels={
            "image": r"image level $\mathcal{L}_{cv}^{g}$",
            "cross_view": r"cross-view objects $\mathcal{L}_{cv}^{o}$",
            "cross_image": r"cross-image objects $\mathcal{L}_{ci}^{o}$",
            "bootstrapping_ratio": "objects with a valid match",
            "objects_per_image": "objects per image",
        },
        progress={"bootstrapping_ratio": "bootstrapped {:.0%}"},
    )

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        options, losses = setting.options, setting.options.losses
        _check(options)
        self.weights = {"image": losses.image, "cross_view": losses.cross_view, "cross_image": losses.cross_image}
        self.images_per_group = options.objects.group_size
        # Without a loss its last layer has no gradient, nor has a frozen backbone.
        self.uses_all_parameters = bool(losses.image and losses.cross_view) and not options.optim.freeze_backbone_epochs
        if losses.cross_image and losses.cross_image_from_epoch >= options.optim.epochs:
            log.warning(
                "losses.cross_image_from_epoch %d is not reached in optim.epochs %d: the run is without L_ci^o",
                losses.cross_image_from_epoch,
                options.optim.epochs,
            )
        backbone = setting.build_backbone()
        side = options.views.size // backbone.patch_size
        if options.needs_objects and options.objects.num_objects > 2 * side * side:
            raise ConfigError(
                f"objects.num_objects must be at most {2 * side * side}, the patches of both views, got "
                f"{options.objects.num_objects}: use fewer clusters, larger views.size or smaller patches"
            )
        self.student = Network(backbone, options.head, levels=("image", "object"), seed=options.seed)
        self.teacher = self.student.make_teacher()
        self.image_centre = Centre(options.head.prototypes, momentum=losses.centre_momentum)
        self.object_centre = Centre(options.head.prototypes, momentum=losses.centre_momentum)
        self.grid = (side, side)
        self.bank: MemoryBank | None = None
        self.bank_images = resolve_bank_images(options, setting.num_images)
        self._restored_bank: dict[str, Any] | None = None
        self.cluster = find_clustering(options.objects)
        self.criterion = find_criterion(options.objects)
        self._cross_entropy = cross_entropy
        self._results: list[Result] = []
        self.last_result: Result | None = None
        # `cribo profile` puts others in their place, to fix the number of objects and of matches.
        self.label_tokens: Callable[..., Int[Tensor, "b 2 n"]] = self._label_tokens
        self.match: Callable[..., Matches] = self._match

    # ------------------------------------------------------------------------------------------------ interface

    def samples(self) -> ViewPairs:
        """View pairs."""
        return ViewPairs(
            self.options.views,
            grid=self.grid,
            num_objects=self.options.objects.num_objects if self.options.needs_objects else 0,
            drop_path_sites=self.student.backbone.num_drop_path_sites,
        )

    def trainable(self) -> Network:
        """The student."""
        return self.student

    def exported(self) -> Backbone:
        """The teacher's backbone."""
        return self.teacher.backbone

    def frozen(self, step: Step) -> Iterable[nn.Parameter]:
        """The last layers, and the backbone, in the first epochs."""
        optim = self.options.optim
        if step.epoch < optim.freeze_last_layers_epochs:
            yield from self.student.last_layers
        if step.epoch < optim.freeze_backbone_epochs:
            yield from self.student.backbone.parameters()

    def schedules(self, step: Step) -> dict[str, float]:
        """The teacher's momentum and temperature."""
        losses = self.options.losses
        return {
            "momentum": step.cosine(*self.options.optim.momentum),
            "teacher_temperature": step.linear(*losses.teacher_temperature, losses.teacher_temperature_epochs),
        }

    def compile_parts(self, mode: CompileMode) -> None:
        """Compile both backbones, the clustering and the losses' formula."""
        self.student.backbone.compile(mode)
        self.teacher.backbone.compile(mode)
        self.cluster = torch.compile(self.cluster)
        # The number of objects differs from step to step.
        self._cross_entropy = torch.compile(cross_entropy, dynamic=True)

    def forward(self, batch: Batch, step: Step) -> Output:
        """The three losses.

        Args:
            batch: B view pairs, a whole number of groups.
            step: decides temperature, whether L_ci^o is on, and whether gradients reach the backbone.

        Raises:
            ValueError: a batch that is not a whole number of groups.
        """
        result = self.compute(
            batch,
            step,
            teacher_temperature=self.schedules(step)["teacher_temperature"],
            cross_image=step.epoch >= self.options.losses.cross_image_from_epoch,
            train_backbone=step.epoch >= self.options.optim.freeze_backbone_epochs,
        )
        self._results.append(result)
        metrics: dict[str, Any] = {}
        if result.objects is not None:
            metrics["objects_per_image"] = sum(result.objects.counts), len(batch)
        if result.matches is not None:
            metrics["bootstrapping_ratio"] = result.matches.valid.sum(), result.matches.valid.numel()
        return Output(result.losses, metrics)

    def compute(
        self,
        batch: Batch,
        step: Step,
        *,
        teacher_temperature: float,
        cross_image: bool = True,
        train_backbone: bool = True,
    ) -> Result:
        """The losses of a batch with networks, bank and centres as they are."""
        group_size, backbone = self.images_per_group, self.student.backbone
        if len(batch) % group_size or not len(batch):
            raise ValueError(f"a batch must be a whole number of groups of {group_size} images, got {len(batch)}")
        self._make_bank(batch)
        views = normalised_views(batch, self.options.views, backbone)
        step.lap("photometric")
        targets = self._teach(views, batch, step, with_neighbours=cross_image)
        with torch.set_grad_enabled(train_backbone):
            noise = batch["drop_path_noise"].flatten(0, 1) if batch["drop_path_noise"].shape[2] else None
            global_tokens, tokens, _ = backbone(views, drop_path_noise=noise)
        step.lap("student backbone")
        images = self.student.head(_by_view(global_tokens))
        step.lap("image projections")
        step.lap.at_gradient(global_tokens, "image projections, backward")
        # Losses that are off or have no objects are 0 and attached to the graph.
        nothing: Tensor = 0 * images.sum()
        losses = dict.fromkeys(self.weights, nothing)
        if self.options.losses.image:
            losses["image"] = self._image_loss(images, targets, teacher_temperature)
            step.lap("image loss")
            step.lap.at_gradient(images, "image loss, backward")
        if targets.found is not None:
            tokens = tokens.unflatten(0, (-1, 2))
            losses |= self._object_losses(tokens, targets, targets.found, teacher_temperature, step)
            step.lap.at_gradient(losses["image"], "pooling, backward")
        self.last_result = Result(
            losses=losses,
            batch_images=batch.images,
            objects=targets.found,
            matches=targets.matches,
            teacher_images=targets.images.flatten(0, 1),
            teacher_objects=targets.objects.flatten(0, 1),
            tokens=targets.tokens,
        )
        return self.last_result

    @torch.no_grad()
    def after_step(self, step: Step) -> None:
        """Move centres and teacher, and push the step's objects to the bank."""
        results, self._results = self._results, []
        for result in results:
            result.losses = {name: loss.detach() for name, loss in result.losses.items()}
        if self.options.losses.centring == "mean":
            self._update_centres(results, step)
        step.lap("centres")
        move_towards(self.teacher, self.student, self.schedules(step)["momentum"])
        step.lap("moving average")
        if self.bank is not None:
            self.bank.push(*_gather_objects(results, step))
        step.lap("bank update")

    # --------------------------------------------------------------------------------------------------- losses

    @torch.no_grad()
    def _teach(self, views: Float[Tensor, "2b 3 h w"], batch: Batch, step: Step, *, with_neighbours: bool) -> _Targets:
        """The teacher's pass: objects, their matches, and the embeddings that the student is to predict."""
        objects = self.options.objects
        global_tokens, tokens, _ = self.teacher.backbone(views)
        tokens = tokens.unflatten(0, (-1, 2))
        step.lap("teacher backbone")
        images = self.teacher.head(_by_view(global_tokens))
        step.lap("image projections")
        if not self.options.needs_objects:
            return _Targets(images, images[:, :0], tokens, None, None)
        labels = self.label_tokens(tokens, batch)
        step.lap("clustering")
        found = find_objects(tokens, labels, batch, objects.num_objects)
        step.lap("pooling")
        matches = None
        if self.bank is not None and with_neighbours:
            matches = self.match(found.teacher, found.images, found.group_rows(objects.group_size))
        step.lap("retrieval")
        embeddings = self.teacher.head(found.teacher)
        step.lap("object projections")
        return _Targets(images, embeddings, tokens, found, matches)

    def _image_loss(
        self, images: Float[Tensor, "2 b e"], targets: _Targets, teacher_temperature: float
    ) -> Float[Tensor, ""]:
        """L_cv^g of the student's image-level embeddings."""
        group_size = self.options.objects.group_size
        rows = [group_size] * (images.shape[1] // group_size)
        level = self._level("image", targets.images, rows, teacher_temperature)
        return cross_view_loss(images, targets.images, level, rows, formula=self._cross_entropy)

    def _object_losses(
        self,
        tokens: Float[Tensor, "b 2 n d"],
        targets: _Targets,
        found: Objects,
        teacher_temperature: float,
        step: Step,
    ) -> dict[str, Float[Tensor, ""]]:
        """L_cv^o and L_ci^o of the student's tokens, which are pooled with the teacher's labels."""
        objects, _ = pool_objects(tokens, found.labels, self.options.objects.num_objects)
        objects = objects[found.rows, :, found.clusters].transpose(0, 1)
        step.lap("pooling")
        embeddings = self.student.head(objects)
        step.lap("object projections")
        step.lap.at_gradient(embeddings, "object losses, backward")
        step.lap.at_gradient(objects, "object projections, backward")
        rows = found.group_rows(self.options.objects.group_size)
        level = self._level("object", targets.objects, rows, teacher_temperature)
        losses: dict[str, Tensor] = {}
        if self.options.losses.cross_view:
            losses["cross_view"] = cross_view_loss(
                embeddings, targets.objects, level, rows, formula=self._cross_entropy
            )
        step.lap("object losses")
        if targets.matches is not None:
            neighbours = self._embed_neighbours(targets.matches)
            step.lap("object projections")
            valid = targets.matches.valid
            losses["cross_image"] = cross_image_loss(
                embeddings, neighbours, valid, level, rows, formula=self._cross_entropy
            )
        step.lap("object losses")
        return losses

    @torch.no_grad()
    def _embed_neighbours(self, matches: Matches) -> Float[Tensor, "z e"]:
        """The teacher's embeddings of the valid neighbours: no others go through the head."""
        assert self.bank is not None
        views, rows = matches.valid.nonzero(as_tuple=True)
        return self.teacher.head(self.bank.objects(views, matches.nearest[views, rows]))

    def _level(
        self, name: str, targets: Float[Tensor, "views r e"], group_rows: list[int], teacher_temperature: float
    ) -> SelfDistillation:
        """What turns embeddings of images or of objects into losses; a Sinkhorn centre is each group's own."""
        losses = self.options.losses
        centre: Centre = getattr(self, f"{name}_centre")
        student, teacher = (network.prototypes(name).weight for network in (self.student, self.teacher))
        value = centre.value
        if losses.centring == "sinkhorn":
            groups = [rows.flatten(0, 1) for rows in targets.split(group_rows, dim=1)]
            value = torch.stack([sinkhorn_centre(rows, teacher, temperature=teacher_temperature) for rows in groups])
        return SelfDistillation(student, teacher, value, losses.student_temperature, teacher_temperature)

    # ------------------------------------------------------------------------------------------ what a step updates

    def _label_tokens(self, tokens: Float[Tensor, "b 2 n d"], batch: Batch) -> Int[Tensor, "b 2 n"]:
        return label_tokens(tokens, batch, self.options.objects, self.cluster)

    def _match(self, objects: Float[Tensor, "2 r d"], images: Int[Tensor, " r"], group_rows: Sequence[int]) -> Matches:
        assert self.bank is not None
        return self.bank.match(objects, images, group_rows=group_rows, criterion=self.criterion)

    def _update_centres(self, results: Sequence[Result], step: Step) -> None:
        sums = []
        for name in ("teacher_images", "teacher_objects"):
            embeddings = torch.cat([getattr(result, name) for result in results])
            count = embeddings.new_full((1,), len(embeddings))
            sums.append(torch.cat((embeddings.sum(dim=0), count)))
        centres = (
            (self.image_centre, self.teacher.prototypes("image")),
            (self.object_centre, self.teacher.prototypes("object")),
        )
        for (centre, layer), total in zip(centres, step.gather(torch.stack(sums)).sum(dim=0), strict=True):
            centre.update(total[:-1], total[-1], layer.weight)

    def _make_bank(self, batch: Batch) -> None:
        """Allocate the bank where the batch is, when the first one comes."""
        if self.bank is not None or not self.options.losses.cross_image:
            return
        on_gpu = batch.images.device.type == "cuda"
        self.bank = MemoryBank(
            num_images=self.bank_images,
            num_objects=self.options.objects.num_objects,
            dim=self.student.backbone.embed_dim,
            dtype=torch.float16 if on_gpu else self.image_centre.value.dtype,
            device=batch.images.device,
        )
        if self._restored_bank is not None:
            self.bank.load_state_dict(self._restored_bank)
            self._restored_bank = None

    def get_extra_state(self) -> dict[str, Any]:
        """The bank, which is no buffer: distributed wrappers must not broadcast it."""
        return {"bank": self.bank.state_dict() if self.bank is not None else self._restored_bank}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Keep the bank's state until there is a bank."""
        self.bank, self._restored_bank = None, state["bank"]

    # --------------------------------------------------------------------------------------------- what is recorded

    @torch.no_grad()
    def watch(self, step: Step) -> dict[str, float]:
        """Signs of collapse, on some rows of the last micro-batch."""
        result = self.last_result
        if result is None:
            return {}
        watched: dict[str, float] = {}
        for name, embeddings, level in self._watched_levels(result, self.schedules(step)["teacher_temperature"]):
            of_mean, mean_of = prototype_entropy(embeddings[:_WATCHED_ROWS], level)
            watched[f"{name}_entropy_of_mean"] = float(of_mean)
            watched[f"{name}_mean_entropy"] = float(mean_of)
        tokens = F.normalize(result.tokens.flatten(0, 2).float(), dim=-1)
        # 1 where directions are spread evenly, 0 where all tokens are one.
        watched["feature_std"] = float(tokens.std(dim=0).mean() * tokens.shape[1] ** 0.5)
        if result.matches is not None:
            matched = result.matches.nearest[result.matches.nearest != NO_MATCH]
            if matched.numel():
                watched["distinct_neighbours"] = matched.unique().numel() / matched.numel()
        return {name: value for name, value in watched.items() if math.isfinite(value)}

    def _watched_levels(
        self, result: Result, teacher_temperature: float
    ) -> Iterator[tuple[str, Float[Tensor, "r e"], SelfDistillation]]:
        """Name, teacher embeddings and distillation of each level that has rows in a result."""
        for name, embeddings, used in (
            ("image", result.teacher_images, self.options.losses.image),
            ("object", result.teacher_objects, self.options.needs_objects),
        ):
            if used and embeddings.shape[0]:
                level = self._level(name, embeddings[None], [len(embeddings)], teacher_temperature)
                yield name, embeddings, level

    def advice(self, row: Mapping[str, float]) -> dict[str, str]:
        """Signs of collapse or idleness."""
        losses = self.options.losses
        return signs_of_trouble(
            row,
            cross_image=bool(losses.cross_image) and row["epoch"] > losses.cross_image_from_epoch,
            needs_objects=self.options.needs_objects,
            prototypes=self.options.head.prototypes,
        )

    def figures(self, rows: Sequence[dict[str, float]], dataset: SampleDataset) -> dict[str, "Figure"]:
        """The bootstrapping ratio, clusters on view pairs, and matches across images."""
        from cribo.objectives.pictures import object_figures

        return object_figures(self, rows, dataset)

    def callbacks(self, folder: Path, dataset: SampleDataset) -> Iterable[Callback]:
        """The record of how clusters change."""
        if not self.options.needs_objects:
            return ()
        from cribo.objectives.cluster_record import ClusterRecord

        return (ClusterRecord(folder, dataset.source, self.options),)


# ---------------------------------------------------------------------------------------------------- its parts


def resolve_bank_images(options: ObjectiveOptions, num_images: int) -> int:
    """S: as configured, else min(25000, half the data set), and never less than one batch."""
    configured = options.objects.bank_images
    if configured is None:
        return max(min(25_000, num_images // 2), options.optim.batch_size)
    return configured


def _check(options: ObjectiveOptions) -> None:
    losses, objects, optim = options.losses, options.objects, options.optim
    if not (losses.image or losses.cross_view or losses.cross_image):
        raise ConfigError("all of losses.image, losses.cross_view and losses.cross_image are 0: leave one on")
    if objects.clustering == "kmeans" and objects.position_weight != 0:
        raise ConfigError(
            f"objects.clustering kmeans has no positional cue: set objects.position_weight to 0, "
            f"not {objects.position_weight}"
        )
    if objects.bank_images is not None and losses.cross_image and objects.bank_images < optim.batch_size:
        raise ConfigError(
            f"objects.bank_images must hold at least one batch of {optim.batch_size} images, "
            f"got {objects.bank_images}: use a larger bank or a smaller optim.batch_size"
        )


Clustering = Callable[..., Int[Tensor, "b t"]]
"""(tokens (B, T, D), coordinates (B, T, 2), num_objects=K, initial_tokens (B, K)=...) -> labels (B, T) in [0, K)."""


def find_clustering(config: ObjectsConfig) -> Clustering:
    """The clustering that a configuration names, with its options.

    Raises:
        ConfigError: it is no function.
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
    return _function(config.clustering, "objects.clustering", ("sinkhorn", "kmeans"))


def find_criterion(config: ObjectsConfig) -> Any:
    """Which matches are positive pairs, as `MemoryBank.match` takes it.

    Raises:
        ConfigError: it is no function.
    """
    if config.criterion in ("cycle", "none"):
        return config.criterion
    return _function(config.criterion, "objects.criterion", ("cycle", "none"))


def _function(path: str, option: str, known: Sequence[str]) -> Callable[..., Any]:
    found = import_by_path(path, option, known=known)
    if not callable(found):
        raise ConfigError(f"{option} {path} is no function but {found!r}")
    return found


def label_tokens(
    tokens: Float[Tensor, "b 2 n d"], batch: Batch, config: ObjectsConfig, cluster: Clustering | None = None
) -> Int[Tensor, "b 2 n"]:
    """Cluster the teacher's tokens of both views of each image.

    Raises:
        ValueError: a clustering of the user's own gives other than one label in [0, K) for each token.
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
            f"objects.clustering {config.clustering} must give integer labels of the shape (B, 2N) = {expected}, got "
            f"{labels.dtype} of {tuple(labels.shape)}"
        )
    return labels.view(tokens.shape[:3])


def find_objects(
    tokens: Float[Tensor, "b 2 n d"], labels: Int[Tensor, "b 2 n"], batch: Batch, num_objects: int
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


def _gather_objects(
    results: Sequence[Result], step: Step
) -> tuple[Float[Tensor, "2 r d"], Int[Tensor, " r"], list[int]]:
    """The objects of all ranks in the order of the whole batch, so that every bank is given the same.

    Returns:
        the objects, the image of each, and how many each image of the whole batch has.
    """
    found = [result.objects for result in results if result.objects is not None]
    images = torch.cat([result.batch_images for result in results])
    objects = torch.cat([part.teacher for part in found], dim=1)
    counts = torch.tensor([count for part in found for count in part.counts], device=images.device)
    counts, images = step.gather(torch.stack((counts, images))).cpu().unbind(dim=1)  # (ranks, B) each
    rows: list[int] = counts.sum(dim=1).tolist()
    padded = F.pad(objects, (0, 0, 0, max(rows) - objects.shape[1]))
    parts = step.gather(padded) if max(rows) else padded[None]
    objects = torch.cat([part[:, :length] for part, length in zip(parts, rows, strict=False)], dim=1)
    counts = counts.flatten()
    return objects, images.flatten().repeat_interleave(counts).to(objects.device), counts.tolist()


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


def signs_of_trouble(
    row: Mapping[str, float], *, cross_image: bool, needs_objects: bool, prototypes: int
) -> dict[str, str]:
    """Name and advice of each sign of collapse or idleness in a row of metrics.

    Args:
        row: one row of training numbers.
        cross_image: whether L_ci^o should be at work by now.
        needs_objects: whether any loss works on objects.
        prototypes: L.
    """
    troubles = {}
    few = 1.5 / math.log(prototypes)  # entropy of about four prototypes, as a share of ln L
    for level in ("image", "object"):
        if row.get(f"{level}_entropy_of_mean", 1.0) < few:
            troubles[f"{level} prototypes"] = (
                f"collapse: the teacher puts nearly all {level}s on a handful of prototypes. Raise optim.momentum, "
                "lower optim.lr, or try losses.centring sinkhorn"
            )
        elif row.get(f"{level}_mean_entropy", 0.0) > 0.99:
            troubles[f"{level} uniform"] = (
                f"the teacher's {level} distributions are uniform, so the loss teaches nothing. Lower "
                "losses.teacher_temperature, raise optim.lr, or try losses.centring sinkhorn"
            )
    if row.get("feature_std", 1.0) < 0.05:
        troubles["features"] = (
            f"collapse: all patches have nearly the same feature (spread {row['feature_std']:.3f} of 1). Lower "
            "optim.lr or lengthen optim.warmup_epochs; a frozen last layer (optim.freeze_last_layers_epochs) helps too"
        )
    if row.get("distinct_neighbours", 1.0) < 0.02:
        troubles["neighbours"] = (
            f"collapse: all objects have the same few neighbours ({row['distinct_neighbours']:.1%} distinct). "
            "Use a larger objects.bank_images, or start losses.cross_image_from_epoch later"
        )
    if needs_objects and row.get("objects_per_image", 1.0) == 0:
        troubles["no objects"] = (
            "no cluster has tokens in both views, so there is no object to learn from. Raise the lower end of "
            "views.area, lower objects.num_objects, or lower objects.position_weight"
        )
    elif cross_image and row.get("bootstrapping_ratio", 1.0) == 0:
        troubles["no bootstrapping"] = (
            "no match is cycle-consistent: the bootstrapping ratio stays at 0. Lower objects.num_objects or "
            "objects.group_size, enlarge objects.bank_images, or train longer before judging"
        )
    return troubles
