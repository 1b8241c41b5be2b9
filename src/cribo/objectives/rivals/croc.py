"""CrOC: online clustering of two views together (Stegmueller et al., CVPR 2023)."""

from dataclasses import asdict, replace
from functools import partial
from typing import Annotated, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from cribo.base.bounds import above, at_least
from cribo.base.errors import ConfigError
from cribo.data.samples import Batch
from cribo.method import Centre, SelfDistillation
from cribo.models.config import CompileMode
from cribo.objectives.base import Columns, Output, Setting, Step
from cribo.objectives.objects import rows_of_groups
from cribo.objectives.rivals.joint_clustering import (
    Clusters,
    JointClustering,
    cls_similarity,
    draw_clusters,
    pool_clusters,
)
from cribo.objectives.self_distillation import Distillation
from cribo.objectives.trunk import Inputs, encode, encode_with_keys, inputs_of
from cribo.objectives.views import ViewPairs, drop_path_noise, split_views, view_pairs

CostRange = Literal["group", "image"]


class HeadObjects:
    """Objects of a batch: the clusters with tokens in both views, R rows in the order of images and heads.

    Synchronises with the device to read the counts: the shapes of the result depend on the data.

    Args:
        clusters: the teacher's clusters of B images.
        images_per_norm: number of successive images over which the norm of [CLS] is averaged.

    Attributes:
        clusters: the clusters.
        counts: number of objects of each image.
        places: (R, 3) image in the batch, head and cluster of each object.
    """

    def __init__(self, clusters: Clusters, *, images_per_norm: int) -> None:
        kept = clusters.kept
        self.clusters = clusters
        self.images_per_norm = images_per_norm
        self.counts: list[int] = kept.sum(dim=(1, 2)).tolist()
        self.places = torch.nonzero_static(kept, size=sum(self.counts))

    def pool(self, tokens: Float[Tensor, "b 2 n d"], global_tokens: Float[Tensor, "2 b d"]) -> Float[Tensor, "2 r d"]:
        """Pool a network's tokens to the objects; see `pool_clusters`."""
        weights = self.clusters.weights
        pooled = pool_clusters(tokens, global_tokens, weights, images_per_norm=self.images_per_norm)
        return pooled[self.places.unbind(dim=1)].transpose(0, 1)


class CrOC(Distillation):
    """Self-distillation across views of images, and of objects found by clustering both views together.

    Each attention head clusters the patches of both views of an image, starting from K_start patches and merging the
    most similar clusters; the K with the least transport cost is chosen. Reads `views`, `backbone`, `head`
    (`prototypes` is the number at image level), `losses` (weights `image` and `cross_view`, temperatures, centring),
    `optim`, and of `objects` only `position_weight`, `marginals`, `sinkhorn_iterations`, `sharpness` and `group_size`.

    The released code scales costs and norms, and averages the loss of objects, over the batch of a device; here a group
    of `objects.group_size` images stands for it, so that results do not depend on micro-batches and devices.

    Args:
        setting: the run.
        k_start: K_start, number of clusters before any merge.
        k_max: K_max, largest number of clusters to choose; the smallest is 2.
        object_prototypes: number of prototypes at object level.
        object_temperature: (start, end) of the teacher's temperature at object level; `losses.teacher_temperature` by
            default.
        cost_range: scale the costs to [0, 1] over each `group` of images, as in the released code, or over each
            `image`, whose clusters then do not depend on other images.

    Raises:
        ConfigError: the network has no [CLS] or no keys, or a value out of range.
    """

    columns = Columns(
        labels={
            "image": "image level",
            "cross_view": "objects across views",
            "chosen_k": "chosen number of clusters",
            "objects_per_image": "objects per image, all heads",
        },
        progress={"chosen_k": "K {:.1f}"},
    )

    image_centre: Centre
    object_centre: Centre

    def __init__(
        self,
        setting: Setting,
        *,
        k_start: int = 12,
        k_max: int = 4,
        object_prototypes: Annotated[int, at_least(2)] = 8192,
        object_temperature: tuple[Annotated[float, above(0)], Annotated[float, above(0)]] | None = None,
        cost_range: CostRange = "group",
    ) -> None:
        options, losses = setting.options, setting.options.losses
        super().__init__(setting, levels={"image": options.head.prototypes, "object": object_prototypes})
        backbone = self.student.backbone
        heads = backbone.key_heads
        if heads is None or not backbone.has_class_token:
            raise ConfigError(
                "CrOC requires a vision transformer whose global token is [CLS], with attention in its last block "
                f"(timm's VisionTransformer), not {options.backbone.name}: use vit_small_patch16_224, for example"
            )
        side = options.views.size // backbone.patch_size
        tokens = 2 * side * side
        if not 2 <= k_start <= tokens:
            raise ConfigError(
                f"objective.args.k_start must be 2 to {tokens}, the patches of both views, got {k_start}: use fewer "
                "clusters, larger views.size or smaller patches"
            )
        if not 2 <= k_max <= k_start:
            raise ConfigError(
                f"objective.args.k_max must be 2 to {k_start}, the number of clusters before merging "
                f"(objective.args.k_start), got {k_max}"
            )
        self.object_temperature = losses.teacher_temperature if object_temperature is None else object_temperature
        if not losses.cross_view:
            raise ConfigError(
                "losses.cross_view must be > 0 for CrOC: it is the weight of the loss of objects; use the objective "
                "dino to train without objects"
            )
        self.k_start = k_start
        self.weights = {"cross_view": losses.cross_view}
        if losses.image:
            self.weights["image"] = losses.image
        # A last layer without its loss gets no gradient.
        self.uses_all_parameters = self.uses_all_parameters and bool(losses.image)
        self.images_per_group = options.objects.group_size
        # `token_noise` (B, H, 2N): each head draws its initial tokens from it.
        self.views = view_pairs(options.views, backbone, numbers={"token_noise": partial(torch.rand, (heads, tokens))})
        self.encode_teacher = encode_with_keys
        self.cluster = JointClustering(
            k_max=k_max,
            position_weight=options.objects.position_weight,
            marginals=options.objects.marginals,
            sinkhorn_iterations=options.objects.sinkhorn_iterations,
            sharpness=options.objects.sharpness,
            images_per_range=self.images_per_group if cost_range == "group" else 1,
        )

    def samples(self) -> ViewPairs:
        """Return the transform to view pairs."""
        return self.views

    def forward(self, batch: Batch, step: Step) -> Output:
        """Compute the loss of [CLS] and that of objects, both across views.

        Args:
            batch: B view pairs, a whole number of groups.
            step: sets the temperatures, and whether gradients reach the backbone.

        Raises:
            ValueError: the batch is not a whole number of groups.
        """
        image_rows = self.image_groups(len(batch))
        inputs = inputs_of(batch, self.teacher.backbone, self.options)
        objects, teacher = self._teach(inputs, batch)
        with torch.set_grad_enabled(step.epoch >= self.options.optim.freeze_backbone_epochs):
            features = encode(self.student.backbone, inputs, drop_path_noise=drop_path_noise(batch))
        global_tokens, tokens = split_views(features)
        student = self.student.head(objects.pool(tokens, global_tokens))
        object_rows = rows_of_groups(objects.counts, self.images_per_group)
        losses = {"cross_view": self.cross_view("object", student, teacher["object"], object_rows, step)}
        if "image" in self.weights:
            images = self.student.head(global_tokens)
            losses["image"] = self.cross_view("image", images, teacher["image"], image_rows, step)
        chosen = objects.clusters.chosen
        metrics = {
            "chosen_k": (chosen.sum(), chosen.numel()),
            "objects_per_image": (sum(objects.counts), len(batch)),
        }
        return Output(losses, metrics)

    @torch.no_grad()
    def _teach(self, inputs: Inputs, batch: Batch) -> tuple[HeadObjects, dict[str, Float[Tensor, "2 r e"]]]:
        """Run the teacher: objects, and the embeddings that the student must predict, by level."""
        features, keys = self.encode_teacher(self.teacher.backbone, inputs)
        global_tokens, tokens = split_views(features)
        objects = HeadObjects(self.find_clusters(keys, batch), images_per_norm=self.images_per_group)
        embeddings = {
            "image": self.teacher.head(global_tokens),
            "object": self.teacher.head(objects.pool(tokens, global_tokens)),
        }
        for name, rows in embeddings.items():
            self.embeddings[name].append(rows)
        return objects, embeddings

    @torch.no_grad()
    def find_clusters(self, keys: Float[Tensor, "two_b h t d"], batch: Batch) -> Clusters:
        """Cluster the tokens of both views of each image for each head.

        Args:
            keys: (2B, H, T, d) the teacher's keys, view pair after view pair; [CLS] first, patches last.
            batch: view pairs.
        """
        keys = keys.unflatten(0, (-1, 2)).transpose(1, 2)  # (B, H, 2, T, d)
        of_cls, of_patches = keys[..., 0, :], keys[..., self.teacher.backbone.model.num_prefix_tokens :, :]
        similarity = cls_similarity(of_patches, of_cls)
        marginals = self.options.objects.marginals
        initial = draw_clusters(similarity, batch["token_noise"], self.k_start, marginals=marginals)
        return self.cluster(of_patches, of_cls, batch["coordinates"], initial)

    def level(self, name: str, step: Step) -> SelfDistillation:
        """Return the prototypes, the centre and the temperatures of a level at a step."""
        level = super().level(name, step)
        if name == "object":
            return replace(level, teacher_temperature=self.schedules(step)["object_temperature"])
        return level

    def schedules(self, step: Step) -> dict[str, float]:
        """Return the teacher's momentum and temperatures."""
        temperature = step.linear(*self.object_temperature, self.options.losses.teacher_temperature_epochs)
        return {**super().schedules(step), "object_temperature": temperature}

    def compile_parts(self, mode: CompileMode) -> None:
        """Compile both backbones, the cross-entropy, and a round of the clustering."""
        super().compile_parts(mode)
        # In the default mode, because a CUDA graph's outputs are overwritten by its next replay.
        self.encode_teacher = torch.compile(encode_with_keys)

        class Compiled(JointClustering):
            # The number of clusters changes from round to round.
            solve = torch.compile(JointClustering.solve, dynamic=True)

        self.cluster = Compiled(**asdict(self.cluster))
