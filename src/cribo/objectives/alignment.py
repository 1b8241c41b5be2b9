"""View alignment: the student's features of one view match the teacher's of the other at the same places of the image.

The simplest way to adapt a pretrained backbone: no head, no bank, no centring. It is not in the paper; docs/adapting.md
compares it with CrIBo.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from cribo.arguments import ConfigError
from cribo.data.samples import Batch
from cribo.models import Backbone
from cribo.models.lora import plain_copy
from cribo.models.modes import CompileMode
from cribo.objectives.base import Columns, Objective, Output, Setting, Step, move_towards
from cribo.objectives.views import ViewPairs, normalised_views


class Alignment(Objective):
    """1 - cosine of student and teacher at points of the views' overlap. Reads `views`, `backbone` and `optim`.

    Args:
        setting: what it is made for.
        points: P; features are sampled bilinearly at P x P points of the overlap.

    Raises:
        ConfigError: a value out of range.
    """

    columns = Columns(
        labels={"alignment": "1 - cosine of student and teacher"}, progress={"overlapping": "overlapping {:.0%}"}
    )

    def __init__(self, setting: Setting, *, points: int = 8) -> None:
        super().__init__(setting)
        if points < 1:
            raise ConfigError(f"objective.args.points must be at least 1, got {points}")
        self.points = points
        self.student = nn.ModuleDict({"backbone": setting.build_backbone()})
        self.teacher = plain_copy(self.student).requires_grad_(False)
        side = self.options.views.size // self.exported().patch_size
        self.grid = (side, side)

    def samples(self) -> ViewPairs:
        """View pairs."""
        sites = self._backbone(self.student).num_drop_path_sites
        return ViewPairs(self.options.views, grid=self.grid, num_objects=0, drop_path_sites=sites)

    def trainable(self) -> nn.Module:
        """The student."""
        return self.student

    def exported(self) -> Backbone:
        """The teacher."""
        return self._backbone(self.teacher)

    def _backbone(self, network: nn.Module) -> Backbone:
        backbone = network.get_submodule("backbone")
        assert isinstance(backbone, Backbone)
        return backbone

    def forward(self, batch: Batch, step: Step) -> Output:
        """The loss over both directions, the mean of the images whose views overlap."""
        student, teacher = self._backbone(self.student), self._backbone(self.teacher)
        views = normalised_views(batch, self.options.views, student)
        noise = batch["drop_path_noise"].flatten(0, 1) if batch["drop_path_noise"].shape[2] else None
        places, overlapping = overlap_points(batch["coordinates"], self.points)
        frozen = self.options.backbone.frozen_blocks(student.depth)
        if frozen:
            with torch.no_grad():
                trunk = student.encode_trunk(views, frozen)
                targets = teacher.encode_rest(trunk).tokens
            tokens = student.encode_rest(trunk, drop_path_noise=noise).tokens
        else:
            with torch.no_grad():
                targets = teacher(views).tokens
            tokens = student(views, drop_path_noise=noise).tokens
        predicted, wanted = (sample_tokens(each.unflatten(0, (-1, 2)), self.grid, places) for each in (tokens, targets))
        distance = 1 - F.cosine_similarity(predicted.float(), wanted.flip(1).float(), dim=-1)  # (B, 2, P * P)
        weight = overlapping.to(distance) / overlapping.sum().clamp(min=1)
        loss = (distance.mean(dim=(1, 2)) * weight).sum()
        return Output({"alignment": loss}, {"overlapping": (overlapping.sum(), len(batch))})

    def schedules(self, step: Step) -> dict[str, float]:
        """The teacher's momentum."""
        return {"momentum": step.cosine(*self.options.optim.momentum)}

    def after_step(self, step: Step) -> None:
        """Move the teacher."""
        move_towards(self.teacher, self.student, self.schedules(step)["momentum"])

    def compile_parts(self, mode: CompileMode) -> None:
        """Compile both backbones."""
        self._backbone(self.student).compile(mode)
        self._backbone(self.teacher).compile(mode)


def overlap_points(
    coordinates: Float[Tensor, "b 2 n 2"], points: int
) -> tuple[Float[Tensor, "b 2 p 2"], Bool[Tensor, " b"]]:
    """Points on a regular grid over what two views both show.

    Args:
        coordinates: centres (x, y) of the patches of both views in the source image, row by row.
        points: along each side.

    Returns:
        The points in each view, from -1 to 1 between the centres of its outermost patches, as `grid_sample` counts with
        `align_corners`; and which images have an overlap.

    Example:
        >>> from cribo.method import patch_coordinates
        >>> boxes, flips = torch.tensor([[0, 0, 40, 40], [0, 10, 40, 40]]), torch.tensor([False, True])
        >>> points, overlapping = overlap_points(patch_coordinates(boxes, flips, (4, 4))[None], 1)
        >>> points[0, :, 0], overlapping
        (tensor([[0.3333, 0.0000],
                [0.3333, 0.0000]]), tensor([True]))
    """
    first, last = coordinates[:, :, 0], coordinates[:, :, -1]  # (B, 2, 2); a mirrored view runs backwards in x
    low = torch.minimum(first, last).amax(dim=1)
    high = torch.maximum(first, last).amin(dim=1)
    steps = (torch.arange(points, device=low.device, dtype=low.dtype) + 0.5) / points
    places = torch.stack(torch.meshgrid(steps, steps, indexing="xy"), dim=-1).flatten(0, 1)
    places = low[:, None] + (high - low)[:, None] * places  # (B, P * P, 2) in the source image
    relative = (places[:, None] - first[:, :, None]) / (last - first)[:, :, None]
    return 2 * relative - 1, (high > low).all(dim=1)


def sample_tokens(
    tokens: Float[Tensor, "b 2 n d"], grid: tuple[int, int], places: Float[Tensor, "b 2 p 2"]
) -> Float[Tensor, "b 2 p d"]:
    """Features at points of each view, interpolated bilinearly between patches."""
    maps = tokens.flatten(0, 1).mT.unflatten(2, grid)
    sampled = F.grid_sample(maps, places.flatten(0, 1)[:, None].to(maps), align_corners=True, padding_mode="border")
    return sampled.squeeze(2).mT.unflatten(0, (-1, 2))
