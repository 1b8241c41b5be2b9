"""Distillation: a network learns the dense features of another one, of any architecture and patch size.

The losses are those of AM-RADIO (Ranzinger et al. 2024) for one teacher. Not in the paper.
"""

from typing import Annotated, Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from cribo.base.bounds import at_least
from cribo.base.errors import ConfigError
from cribo.data.samples import Batch
from cribo.method.precision import at_least_float32, in_float32
from cribo.models import Backbone, Features, inflate, load_backbone, normalise
from cribo.models.config import CompileMode
from cribo.models.licences import with_teacher
from cribo.objectives.base import Columns, Objective, Output, Setting, Step, sum_over_ranks
from cribo.objectives.crops import augmented
from cribo.objectives.mlp import seeded_weights
from cribo.objectives.views import ViewPairs, drop_path_noise

_SLOWEST = 0.01  # minimum weight of a step in the moving averages
_LEAST_VARIANCE = 1e-6
_LEVELS = ("global", "patch")


class Distill(Objective):
    """Cosine distance and smooth L1 between the features of a teacher and those of a student.

    A linear layer maps the student's global token to the teacher's, and another one its patches. The second one is left
    out if both networks have the same width: then the exported features themselves are the teacher's.

    Teacher and student see the same views, each at the size at which it has the student's grid of patches. At equal
    numbers of pixels, a network with larger patches than the teacher would see objects at fewer patches than in use.
    If the teacher's size is fixed, both grids are resampled to the fewer rows and columns.

    The teacher's features are centred by a moving average of their mean, because a direction that all patches share
    would dominate the cosine. They are divided by one number, their standard deviation over all channels, so that the
    losses do not depend on the teacher's scale, and channels keep their relative variances.

    Reads `views`, `backbone` (the student) and `optim`. The exported network is the student without the linear layers.
    Checkpoints do not contain the teacher, which is loaded again.

    Args:
        setting: the run.
        teacher: source of the teacher: a run, a file, an adapted network, a timm name, or
            hf://owner/name (`load_backbone`).
        teacher_network: import path of the teacher's network if it is a custom one.
        global_token: weight of the loss on the global token.
        patches: weight of the loss on the patches.
        cosine: weight of the cosine distance in both.
        smooth_l1: weight of smooth L1 in both.

    Raises:
        ConfigError: the teacher cannot be loaded, or a value is out of range.
    """

    columns = Columns(
        labels={
            "global_cosine": "1 - cosine, global token",
            "global_smooth_l1": "smooth L1, global token",
            "patch_cosine": "1 - cosine, patches",
            "patch_smooth_l1": "smooth L1, patches",
        }
    )

    def __init__(
        self,
        setting: Setting,
        *,
        teacher: str,
        teacher_network: str | None = None,
        global_token: Annotated[float, at_least(0)] = 1.0,
        patches: Annotated[float, at_least(0)] = 1.0,
        cosine: Annotated[float, at_least(0)] = 0.9,
        smooth_l1: Annotated[float, at_least(0)] = 0.1,
    ) -> None:
        super().__init__(setting)
        given = {"global_token": global_token, "patches": patches, "cosine": cosine, "smooth_l1": smooth_l1}
        by_level = dict(zip(_LEVELS, (global_token, patches), strict=True))
        self.weights = {
            f"{level}_{kind}": weight * given[kind]
            for level, weight in by_level.items()
            for kind in ("cosine", "smooth_l1")
            if weight * given[kind]
        }
        self.uses_all_parameters = all(by_level.values())
        if not self.weights:
            raise ConfigError("all weights in objective.args are 0: set patches and cosine to 1, for example")
        try:
            loaded = inflate(load_backbone(teacher, name=teacher_network), setting.reading.in_chans)
        except (OSError, ValueError) as error:
            raise ConfigError(f"objective.args.teacher: {error}") from error
        self.teacher_source = teacher
        # Not a submodule: its weights belong neither to checkpoints nor to the optimiser.
        self._teacher = [loaded.eval().requires_grad_(False)]
        self._fingerprint = loaded.fingerprint()  # before its conversion to the student's precision
        self.student = nn.ModuleDict({"backbone": setting.build_backbone()})
        student = self.exported()
        student.licences = with_teacher(student.licences, loaded.licences)
        rows = setting.options.views.size // self.exported().patch_size
        self.teacher_size = loaded.fixed_size or rows * loaded.patch_size
        with seeded_weights(setting.options.seed):
            widths = self.exported().embed_dim, loaded.embed_dim
            heads = {"global": nn.Linear(*widths)}
            if widths[0] != widths[1]:
                heads["patch"] = nn.Linear(*widths)
            self.student["head"] = nn.ModuleDict(heads)
        for level in _LEVELS:
            self.register_buffer(f"{level}_mean", torch.zeros(loaded.embed_dim))
            self.register_buffer(f"{level}_variance", torch.ones(()))
        # Per micro-batch: for each level the sum of centred features, that of their mean squares, and their number.
        self._sums: list[Float[Tensor, " levels*(d+2)"]] = []

    @property
    def teacher(self) -> Backbone:
        """The teacher, on the device and in the precision of the student."""
        return self._teacher[0].to(next(self.student.parameters()))

    def samples(self) -> ViewPairs:
        """Return the transform to view pairs, whose two views are independent samples."""
        return ViewPairs(
            self.options.views, grid=(1, 1), num_objects=0, drop_path_sites=self.exported().num_drop_path_sites
        )

    def trainable(self) -> nn.Module:
        """Return the student with its linear layers."""
        return self.student

    def exported(self) -> Backbone:
        """Return the student's backbone."""
        backbone = self.student["backbone"]
        assert isinstance(backbone, Backbone)
        return backbone

    def forward(self, batch: Batch, step: Step) -> Output:
        """Compute the losses, means over views and positions."""
        student, teacher = self.exported(), self.teacher
        views = augmented(batch, "views", self.options.views).flatten(0, 1)
        with torch.no_grad():
            size = (self.teacher_size, self.teacher_size)
            seen = views if views.shape[2:] == size else F.interpolate(views, size, mode="bicubic", antialias=True)
            targets = teacher(normalise(seen, mean=teacher.mean, std=teacher.std))
        features = student(normalise(views, mean=student.mean, std=student.std), drop_path_noise=drop_path_noise(batch))
        own, wanted = at_common_grid(features, targets)
        pairs = {
            "global": (features.global_token, targets.global_token),
            "patch": (own.flatten(0, 1), wanted.flatten(0, 1)),
        }
        heads = dict(self.student.get_submodule("head").named_children())
        losses, sums = {}, []
        for level, (student_features, target) in pairs.items():
            mean, variance = (self.get_buffer(f"{level}_{moment}") for moment in ("mean", "variance"))
            centred = at_least_float32(target) - mean
            count = mean.new_full((), len(centred))
            sums += [centred.sum(dim=0), torch.stack((centred.square().mean(dim=1).sum(), count))]
            scale = (variance + _LEAST_VARIANCE).sqrt()
            head = heads.get(level)
            predicted = (at_least_float32(student_features) - mean) / scale if head is None else head(student_features)
            losses[f"{level}_cosine"], losses[f"{level}_smooth_l1"] = distances(predicted, centred / scale)
        self._sums.append(torch.cat(sums))
        return Output({name: loss for name, loss in losses.items() if name in self.weights})

    @torch.no_grad()
    def after_step(self, step: Step) -> None:
        """Update the moments of the teacher's features with the whole batch."""
        total, _ = sum_over_ranks(torch.stack(self._sums), step)
        self._sums = []
        share = max(1 / (step.number + 1), _SLOWEST)  # the plain mean over the first steps
        for level, own in zip(_LEVELS, total.chunk(len(_LEVELS)), strict=True):
            *_, squares, count = own
            shift = own[:-2] / count
            self.get_buffer(f"{level}_mean").add_(share * shift)
            self.get_buffer(f"{level}_variance").lerp_(squares / count - shift.square().mean(), share)

    def compile_parts(self, mode: CompileMode) -> None:
        """Compile both networks."""
        self.exported().compile(mode)
        self.teacher.compile(mode)

    def get_extra_state(self) -> dict[str, Any]:
        """Return the fingerprint of the teacher."""
        return {"teacher": self._fingerprint}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Check that the teacher is the one that the run was started with.

        Raises:
            ConfigError: it is another network.
        """
        if state["teacher"] != self._fingerprint:
            raise ConfigError(
                f"objective.args.teacher {self.teacher_source} has changed since the run was started: restore it, or "
                "start a new run"
            )


@in_float32
def distances(predicted: Float[Tensor, "r d"], target: Float[Tensor, "r d"]) -> tuple[Tensor, Tensor]:
    """Return the mean cosine distance of the rows, and the mean smooth L1 distance of the entries."""
    return 1 - F.cosine_similarity(predicted, target, dim=1).mean(), F.smooth_l1_loss(predicted, target)


def at_common_grid(a: Features, b: Features) -> tuple[Float[Tensor, "b n d"], Float[Tensor, "b n e"]]:
    """Return the tokens of two networks, both resampled to the fewer rows and the fewer columns of their grids."""
    height, width = (min(sides) for sides in zip(a.grid, b.grid, strict=True))
    first, second = (resample(each.tokens, each.grid, (height, width)) for each in (a, b))
    return first, second


def resample(tokens: Float[Tensor, "b n d"], grid: tuple[int, int], target: tuple[int, int]) -> Float[Tensor, "b m d"]:
    """Resample tokens (B, h * w, D) of a grid to another grid, (B, h' * w', D): bilinear, antialiased.

    Example:
        >>> resample(torch.rand(1, 256, 8), (16, 16), (7, 7)).shape
        torch.Size([1, 49, 8])
    """
    if grid == target:
        return tokens
    maps = tokens.mT.unflatten(2, grid)
    return F.interpolate(maps, target, mode="bilinear", antialias=True).flatten(2).mT
