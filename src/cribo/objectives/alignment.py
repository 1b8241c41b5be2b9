"""View alignment: match the student's features of one view with the teacher's of the other, without heads.

The simplest way to adapt a pretrained backbone. By default, features are matched at the same points of the image; the
other losses are CrIBo's, computed on features, and soft neighbours. It is not in the paper; docs/adapting.md compares
it with CrIBo.
"""

from collections.abc import Iterable
from typing import Annotated, Any

import torch
from torch import nn

from cribo.base.bounds import at_least
from cribo.base.errors import ConfigError
from cribo.data.samples import Batch
from cribo.objectives.base import Columns, Output, Setting, Step
from cribo.objectives.config import ObjectiveOptions
from cribo.objectives.pairs import Found, PairObjective
from cribo.objectives.points import GRID
from cribo.objectives.self_distillation import StudentNetwork
from cribo.objectives.terms import LABELS, StepFeatures
from cribo.objectives.trunk import encode, inputs_of
from cribo.objectives.views import drop_path_noise


class Alignment(PairObjective):
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
        if options.losses.anchor:
            self.weights["anchor"] = options.losses.anchor
        self.student = StudentNetwork(setting.build_backbone())
        self.teacher = self.student.make_teacher()
        if cross_view or cross_image or object_neighbours:
            self.images_per_group = options.objects.group_size
        self.use_pairs(self.weights, points=grid)

    def frozen(self, step: Step) -> Iterable[nn.Parameter]:
        """Return nothing: there is no head to train first."""
        return ()

    def forward(self, batch: Batch, step: Step) -> Output:
        """Compute the losses, each the mean over both directions."""
        for module in self.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.eval()  # in every step, because scoring sets the whole teacher back to training mode
        inputs = inputs_of(batch, self.teacher.backbone, self.options)
        with torch.no_grad():
            targets = encode(self.teacher.backbone, inputs).tokens.unflatten(0, (-1, 2))
        noise = drop_path_noise(batch)
        tokens = encode(self.student.backbone, inputs, drop_path_noise=noise).tokens.unflatten(0, (-1, 2))
        found = Found(batch.images)
        self.find(found, targets, batch, step)
        pairs: dict[str, Any] = {}
        metrics: dict[str, Any] = {}
        if found.points is not None:
            pairs["points"] = found.points, found.points.features(tokens)
            metrics["overlapping"] = len(found.points.rows), len(batch)
        if found.objects is not None:
            pairs["objects"] = found.objects, found.objects.features(tokens)
        if found.matches is not None:
            metrics["bootstrapping_ratio"] = found.matches.valid.sum(), found.matches.valid.numel()
        features = StepFeatures(inputs, tokens, pairs, found.matches)
        return Output({name: term(features, step) for name, term in self.terms.items()}, metrics)


def _check(weights: dict[str, float], options: ObjectiveOptions) -> None:
    if not any(weights.values()):
        raise ConfigError(f"all weights in objective.args are 0: set one of {', '.join(weights)}, such as points 1")
    for name in ("object_neighbours", "patch_neighbours"):
        if value := getattr(options.losses, name):
            raise ConfigError(f"losses.{name} is for CrIBo only, got {value}: set objective.args.{name} instead")
