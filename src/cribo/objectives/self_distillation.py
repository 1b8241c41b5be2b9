"""Student and teacher networks, shared by most objectives."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import torch
from jaxtyping import Float
from torch import Tensor, nn

from cribo.method import Centre, PrototypeLayer, SelfDistillation, cross_view_loss
from cribo.models import Backbone
from cribo.models.config import CompileMode
from cribo.models.lora import plain_copy
from cribo.objectives.base import Objective, Setting, Step, move_towards, sum_over_ranks
from cribo.objectives.config import HeadConfig
from cribo.objectives.mlp import make_head, seeded_weights
from cribo.objectives.sinkhorn import sinkhorn_centre
from cribo.training.timing import part


class StudentNetwork(nn.Module):
    """Base of networks that a student trains and its teacher follows.

    Args:
        backbone: the backbone, whose features are exported.

    Attributes:
        student_only: name of a child module that the teacher does not have, such as a predictor.
        last_layers: parameters that are frozen in the first epochs; none by default.
    """

    student_only: str | None = None
    last_layers: Sequence[nn.Parameter] = ()

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.backbone = backbone

    def make_teacher(self) -> Self:
        """Return a copy without gradients and without what only the student has.

        It stays in training mode: batch norms use the statistics of their batch, and stochastic depth is off because
        the teacher gets no noise.
        """
        teacher = plain_copy(self).requires_grad_(False)
        if self.student_only is not None:
            setattr(teacher, self.student_only, nn.Identity())
        return teacher

    def follow(self, student: nn.Module, momentum: float) -> None:
        """Update the moving average of the student's parameters."""
        if self.student_only is None:
            move_towards(self, student, momentum)
            return
        for name, child in self.named_children():
            if name != self.student_only:
                move_towards(child, student.get_submodule(name), momentum)


class Network(StudentNetwork):
    """Backbone f, shared projection head h, and a last layer for each level, such as `image_prototypes`.

    Args:
        backbone: f, the backbone.
        config: sizes of the head.
        levels: number of prototypes of each last layer, by name.
        seed: the only source of the head's random weights.
    """

    def __init__(self, backbone: Backbone, config: HeadConfig, *, levels: Mapping[str, int], seed: int) -> None:
        super().__init__(backbone)
        with seeded_weights(seed):
            self.head = make_head(backbone.embed_dim, config)
            self.levels = tuple(levels)
            for level, prototypes in levels.items():
                layer = PrototypeLayer(config.bottleneck_dim, prototypes, train_gain=config.train_gain)
                self.add_module(f"{level}_prototypes", layer)

    @property
    def last_layers(self) -> list[nn.Parameter]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Return the parameters of the last layers."""
        return [parameter for level in self.levels for parameter in self.prototypes(level).parameters()]

    def prototypes(self, level: str) -> PrototypeLayer:
        """Return the last layer of a level."""
        layer = getattr(self, f"{level}_prototypes")
        assert isinstance(layer, PrototypeLayer)
        return layer


class StudentTeacher(Objective):
    """Base of objectives with a student and its moving average as teacher, which is exported.

    Reads `optim` (momentum, frozen epochs), and if a loss has a teacher's temperature, that of `losses`.

    Attributes:
        student: the trained network, a `StudentNetwork`.
        teacher: the moving average, made by `StudentNetwork.make_teacher`.
    """

    student: Any
    teacher: Any

    def trainable(self) -> nn.Module:
        """Return the student."""
        return self.student

    def exported(self) -> Backbone:
        """Return the teacher's backbone."""
        return self.teacher.backbone

    def frozen(self, step: Step) -> Iterable[nn.Parameter]:
        """Return the last layers and the backbone in the epochs in which they are frozen."""
        optim = self.options.optim
        if step.epoch < optim.freeze_last_layers_epochs:
            yield from self.student.last_layers
        if step.epoch < optim.freeze_backbone_epochs:
            yield from self.student.backbone.parameters()

    def schedules(self, step: Step) -> dict[str, float]:
        """Return the teacher's momentum."""
        return {"momentum": step.cosine(*self.options.optim.momentum)}

    def teacher_temperature(self, step: Step) -> float:
        """Return tau_t at a step."""
        losses = self.options.losses
        return step.linear(*losses.teacher_temperature, losses.teacher_temperature_epochs)

    def after_step(self, step: Step) -> None:
        """Update the teacher."""
        self.move_teacher(step)

    @part("moving average")
    @torch.no_grad()
    def move_teacher(self, step: Step) -> None:
        """Update the teacher with the student."""
        self.teacher.follow(self.student, self.schedules(step)["momentum"])

    def compile_parts(self, mode: CompileMode) -> None:
        """Compile both backbones."""
        self.student.backbone.compile(mode)
        self.teacher.backbone.compile(mode)


class Distillation(StudentTeacher):
    """Base of objectives with a student, its moving average as teacher, and a centre of the teacher logits per level.

    Reads `backbone`, `head`, `losses` (temperatures, centring) and `optim`.

    Args:
        setting: the run.
        levels: number of prototypes of each last layer, by name.

    Attributes:
        embeddings: the teacher's embeddings of each level in this step, which `forward` appends for the centres.
    """

    student: Network
    teacher: Network

    def __init__(self, setting: Setting, *, levels: Mapping[str, int]) -> None:
        super().__init__(setting)
        options = setting.options
        self.student = Network(setting.build_backbone(), options.head, levels=levels, seed=options.seed)
        self.teacher = self.student.make_teacher()
        for level, prototypes in levels.items():
            self.add_module(f"{level}_centre", Centre(prototypes, momentum=options.losses.centre_momentum))
        self.uses_all_parameters = not options.optim.freeze_backbone_epochs
        self.self_distillation = SelfDistillation
        # The teacher's (..., E) in this step, one tensor per micro-batch.
        self.embeddings: dict[str, list[Float[Tensor, ...]]] = {level: [] for level in levels}

    def schedules(self, step: Step) -> dict[str, float]:
        """Return the teacher's momentum and temperature."""
        return {**super().schedules(step), "teacher_temperature": self.teacher_temperature(step)}

    def centre(self, level: str) -> Centre:
        """Return the centre of a level."""
        centre = getattr(self, f"{level}_centre")
        assert isinstance(centre, Centre)
        return centre

    def level(self, name: str, step: Step) -> SelfDistillation:
        """Return the prototypes, the moving-average centre and the temperatures of a level at a step."""
        return self.self_distillation(
            self.student.prototypes(name).weight,
            self.teacher.prototypes(name).weight,
            self.centre(name).value,
            self.options.losses.student_temperature,
            self.schedules(step)["teacher_temperature"],
        )

    def centred(self, level: SelfDistillation, embeddings: Float[Tensor, "..."]) -> SelfDistillation:
        """Return a level with the centre of a group: the moving average, or one computed from its embeddings."""
        if self.options.losses.centring == "mean":
            return level
        rows, temperature = embeddings.flatten(0, -2), level.teacher_temperature
        return replace(level, centre=sinkhorn_centre(rows, level.teacher_prototypes, temperature=temperature))

    def share_centres(
        self, name: str, teacher: Float[Tensor, "2 r e"], groups: Sequence[slice], step: Step
    ) -> list[tuple[SelfDistillation, slice, Sequence[slice] | None]]:
        """Return rows that share a centre: all of them with the moving average, else those of each group.

        Args:
            name: the level.
            teacher: (2, R, E) the teacher's embeddings.
            groups: the rows of each group of images.
            step: sets the temperatures.

        Returns:
            The level with its centre, the rows, and the groups they consist of, as in `cross_view_loss`.
        """
        level = self.level(name, step)
        if self.options.losses.centring == "mean":
            return [(level, slice(0, teacher.shape[1]), groups)]
        return [(self.centred(level, teacher[:, rows]), rows, None) for rows in groups]

    def cross_view(
        self,
        name: str,
        student: Float[Tensor, "2 r e"],
        teacher: Float[Tensor, "2 r e"],
        groups: Sequence[slice],
        step: Step,
    ) -> Float[Tensor, ""]:
        """Return the mean over groups of the cross-entropy between the teacher's view and the student's other view.

        Args:
            name: the level.
            student: (2, R, E) the student's embeddings of both views.
            teacher: (2, R, E) the teacher's embeddings of the same rows.
            groups: the rows of each group of images.
            step: sets the temperatures.
        """
        losses = [
            cross_view_loss(student[:, rows], teacher[:, rows], level, groups=parts)
            for level, rows, parts in self.share_centres(name, teacher, groups, step)
        ]
        return torch.stack(losses).mean()

    def compile_parts(self, mode: CompileMode) -> None:
        """Compile backbones, heads and the cross-entropy."""
        super().compile_parts(mode)
        for network in (self.student, self.teacher):
            network.head.compile(dynamic=True)

        class Compiled(SelfDistillation):
            # The number of objects changes from step to step.
            cross_entropy = torch.compile(SelfDistillation.cross_entropy, dynamic=True)

        self.self_distillation = Compiled

    def after_step(self, step: Step) -> None:
        """Update the centres and the teacher."""
        self.update_centres(step)
        super().after_step(step)

    @part("centres")
    @torch.no_grad()
    def update_centres(self, step: Step) -> None:
        """Update the centres with the mean logits of the whole batch."""
        embeddings, self.embeddings = self.embeddings, {level: [] for level in self.embeddings}
        if self.options.losses.centring == "sinkhorn":
            return
        for name, parts in embeddings.items():
            rows = torch.cat([each.flatten(0, -2) for each in parts])
            self.centre(name).update(*sum_over_ranks(rows, step), self.level(name, step).teacher_prototypes)
