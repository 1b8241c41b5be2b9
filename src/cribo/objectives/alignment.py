"""View alignment: match the student's features of one view with the teacher's of the other, without heads.

The simplest way to adapt a pretrained backbone. By default, features are matched at the same points of the image; the
other losses are CrIBo's, computed on features, and soft neighbours. It is not in the paper; docs/adapting.md compares
it with CrIBo.
"""

from typing import Annotated, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from cribo.base.bounds import at_least
from cribo.base.errors import ConfigError
from cribo.data.samples import Batch
from cribo.method import pool_objects
from cribo.models import Backbone
from cribo.models.config import CompileMode
from cribo.models.lora import plain_copy
from cribo.objectives.banks import PatchBank, object_bank
from cribo.objectives.base import Columns, Objective, Output, Setting, Step, move_towards
from cribo.objectives.config import ObjectiveOptions
from cribo.objectives.extras import LABELS, Anchor, StepFeatures, make_extras
from cribo.objectives.headfree import cosine_distance, mean_or_zero
from cribo.objectives.objects import (
    Objects,
    check_objects,
    find_clustering,
    find_criterion,
    find_objects,
    label_tokens,
    mean_over_groups,
)
from cribo.objectives.points import GRID, Points, find_points
from cribo.objectives.trunk import encode, inputs_of
from cribo.objectives.views import ViewPairs, drop_path_noise, view_pairs


class Alignment(Objective):
    """Weighted losses on features; those with weight 0 are not computed.

    Reads `views`, `backbone`, `objects`, `optim`, and from `losses` the options of soft neighbours and of the anchor.
    Batch norms use the statistics of the pretrained weights and do not update them.

    Args:
        setting: the run.
        grid: P; features are compared at P x P points of the overlap of both views, interpolated between patches.
        points: weight of the cosine distance between student and teacher at these points.
        cross_view: weight of the cosine distance between an object in the student's view and in the teacher's other
            view.
        cross_image: weight of the cosine distance between an object and its match in the bank (`objects.criterion`).
        object_neighbours: weight of the soft-neighbour loss of objects.
        patch_neighbours: weight of the soft-neighbour loss of features at the points.

    Raises:
        ConfigError: a value out of range, or options that cannot be combined.
    """

    columns = Columns(
        labels={
            "points": "1 - cosine at points",
            "cross_view": "1 - cosine of objects across views",
            "cross_image": "1 - cosine of objects across images",
            **LABELS,
            "bootstrapping_ratio": "objects with a valid match",
        },
        progress={"overlapping": "overlapping {:.0%}", "bootstrapping_ratio": "bootstrapped {:.0%}"},
    )

    def __init__(
        self,
        setting: Setting,
        *,
        grid: Annotated[int, at_least(1)] = GRID,
        points: Annotated[float, at_least(0)] = 1.0,
        cross_view: Annotated[float, at_least(0)] = 0.0,
        cross_image: Annotated[float, at_least(0)] = 0.0,
        object_neighbours: Annotated[float, at_least(0)] = 0.0,
        patch_neighbours: Annotated[float, at_least(0)] = 0.0,
    ) -> None:
        super().__init__(setting)
        options = setting.options
        weights = {
            "points": points,
            "cross_view": cross_view,
            "cross_image": cross_image,
            "object_neighbours": object_neighbours,
            "patch_neighbours": patch_neighbours,
        }
        _check(weights, options)
        self.weights = {name: weight for name, weight in weights.items() if weight}
        self.side = grid
        self.student = nn.ModuleDict({"backbone": setting.build_backbone()})
        self.teacher = plain_copy(self.student).requires_grad_(False)
        patches = options.views.size // self.exported().patch_size
        self.grid = (patches, patches)
        self.finds_points = bool(points or patch_neighbours)
        self.finds_objects = bool(cross_view or cross_image or object_neighbours)
        if self.finds_objects:
            check_objects(options, tokens=2 * patches**2, with_bank=bool(cross_image or object_neighbours))
            self.images_per_group = options.objects.group_size
        self.cluster = find_clustering(options.objects)
        self.criterion = find_criterion(options.objects)
        self.object_bank = object_bank(options, setting.num_images)
        self.patch_bank = PatchBank(options, on=bool(patch_neighbours))
        self.anchor: Anchor | None = None
        if options.losses.anchor:
            self.weights["anchor"] = options.losses.anchor
            self.anchor = Anchor(self.exported(), options.losses.anchor_kind)
        self.extras = make_extras(
            self.weights,
            options.losses,
            object_bank=self.object_bank,
            patch_bank=self.patch_bank,
            anchor=self.anchor,
            group_size=self.images_per_group,
        )
        self._images: list[Tensor] = []  # this and the next two: one entry per micro-batch of the step so far
        self._points: list[Points] = []
        self._objects: list[Objects] = []

    def samples(self) -> ViewPairs:
        """Return the transform to view pairs."""
        clusters = self.options.objects.num_objects if self.finds_objects else 0
        return view_pairs(self.options.views, self._backbone(self.student), num_objects=clusters)

    def trainable(self) -> nn.Module:
        """Return the student."""
        return self.student

    def exported(self) -> Backbone:
        """Return the teacher."""
        return self._backbone(self.teacher)

    def _backbone(self, network: nn.Module) -> Backbone:
        backbone = network.get_submodule("backbone")
        assert isinstance(backbone, Backbone)
        return backbone

    def forward(self, batch: Batch, step: Step) -> Output:
        """Compute the losses, each the mean over both directions."""
        student, teacher = self._backbone(self.student), self._backbone(self.teacher)
        for module in self.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.eval()  # in every step, because scoring sets the whole teacher back to training mode
        inputs = inputs_of(batch, teacher, self.options)
        with torch.no_grad():
            targets = encode(teacher, inputs).tokens.unflatten(0, (-1, 2))
        tokens = encode(student, inputs, drop_path_noise=drop_path_noise(batch)).tokens.unflatten(0, (-1, 2))
        self._images.append(batch.images)
        output = Output({})
        pairs: dict[str, Any] = {}
        if self.finds_points:
            points = find_points(targets, batch, grid=self.grid, side=self.side)
            self._points.append(points)
            pairs["points"] = points, points.features(tokens)
            output.metrics["overlapping"] = len(points.rows), len(batch)
        if self.finds_objects:
            with torch.no_grad():
                labels = label_tokens(targets, batch, self.options.objects, self.cluster)
                pooled, kept = pool_objects(targets, labels, self.options.objects.num_objects)
                objects = find_objects(pooled, kept, labels, batch.images)
            self._objects.append(objects)
            pairs["objects"] = objects, objects.features(tokens)
            self._add_object_losses(output, *pairs["objects"])
        features = StepFeatures(inputs, tokens, pairs)
        output.losses |= {name: extra(features, step) for name, extra in self.extras.items()}
        return output

    def _add_object_losses(self, output: Output, objects: Objects, student: Float[Tensor, "2 r d"]) -> None:
        """Add the losses of objects across views and across images, averaged over groups."""
        groups = objects.groups(self.images_per_group)
        if "cross_view" in self.weights:
            distance = cosine_distance(student.flip(0), objects.teacher)
            output.losses["cross_view"] = mean_over_groups(groups, lambda rows: mean_or_zero(distance[:, rows]))
        if "cross_image" in self.weights:
            bank = self.object_bank.allocate(objects.teacher)
            matches = self.object_bank.match(objects, group_size=self.images_per_group, criterion=self.criterion)

            def cross_image(rows: slice) -> Float[Tensor, ""]:
                means: list[Tensor] = []
                for view in (0, 1):
                    valid, nearest = matches.valid[view, rows], matches.nearest[view, rows]
                    neighbours = bank.objects(view, nearest[valid])
                    means.append(mean_or_zero(cosine_distance(student[1 - view, rows][valid], neighbours)))
                return torch.stack(means).mean()

            output.losses["cross_image"] = mean_over_groups(groups, cross_image)
            output.metrics["bootstrapping_ratio"] = matches.valid.sum(), matches.valid.numel()

    def schedules(self, step: Step) -> dict[str, float]:
        """Return the teacher's momentum."""
        return {"momentum": step.cosine(*self.options.optim.momentum)}

    def after_step(self, step: Step) -> None:
        """Update the teacher, and push the step's objects and patches to their banks."""
        move_towards(self.teacher, self.student, self.schedules(step)["momentum"])
        images = torch.cat(self._images)
        self.object_bank.push(self._objects, images, step)
        self.patch_bank.push_points(self._points, images, step)
        self._images, self._objects, self._points = [], [], []

    def compile_parts(self, mode: CompileMode) -> None:
        """Compile both backbones and the clustering."""
        self._backbone(self.student).compile(mode)
        self._backbone(self.teacher).compile(mode)
        self.cluster = torch.compile(self.cluster)

    def get_extra_state(self) -> dict[str, Any]:
        """Return the banks' states. Banks are not buffers because distributed wrappers must not broadcast them."""
        return {"bank": self.object_bank.state_dict(), "patch_bank": self.patch_bank.state_dict()}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Store the banks' states, to be restored when the banks are allocated."""
        self.object_bank.load_state_dict(state["bank"])
        self.patch_bank.load_state_dict(state["patch_bank"])


def _check(weights: dict[str, float], options: ObjectiveOptions) -> None:
    if not any(weights.values()):
        raise ConfigError(f"all weights in objective.args are 0: set one of {', '.join(weights)}, such as points 1")
    for name in ("object_neighbours", "patch_neighbours"):
        if value := getattr(options.losses, name):
            raise ConfigError(f"losses.{name} is for CrIBo only, got {value}: set objective.args.{name} instead")
