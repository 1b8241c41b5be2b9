"""Objectives that tests import by path."""

from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cribo.base.bounds import above
from cribo.data.samples import Batch, LazyImage, Sample
from cribo.models import Backbone
from cribo.objectives import Columns, Objective, Output, Setting, Step


class Flatten(Objective):
    """Fits the tokens' mean to a value, with two losses, a weight, a metric and a schedule."""

    columns = Columns(labels={"mean": "mean of the tokens"}, progress={"norm": "norm {:.2f}"})

    def __init__(self, setting: Setting, *, value: float = 0.5, spread_weight: float = 2.0) -> None:
        super().__init__(setting)
        self.backbone = setting.build_backbone()
        self.value = value
        self.weights = {"spread": spread_weight}
        self.register_buffer("steps", torch.zeros(()))

    def samples(self) -> Any:
        return self.sample

    def sample(self, image: LazyImage, generator: torch.Generator) -> Sample:
        size = self.options.views.size
        return {"image": F.interpolate(image.load()[None].float(), (size, size))[0] / 255}

    def forward(self, batch: Batch, step: Step) -> Output:
        tokens = self.backbone(batch["image"]).tokens
        losses: dict[str, Tensor] = {"mean": (tokens.mean() - self.value) ** 2, "spread": tokens.var()}
        return Output(losses, {"norm": tokens.norm(dim=-1).mean(), "share": (tokens.gt(0).sum(), tokens.numel())})

    def after_step(self, step: Step) -> None:
        self.get_buffer("steps").add_(1)

    def schedules(self, step: Step) -> dict[str, float]:
        return {"tempo": step.cosine(1.0, 0.0)}

    def exported(self) -> Backbone:
        return self.backbone


class Uneven(Flatten):
    """An objective whose samples have random sizes."""

    def sample(self, image: LazyImage, generator: torch.Generator) -> Sample:
        side = int(torch.randint(8, 64, (), generator=generator))
        return {"image": torch.zeros(3, side, side)}


class Bounded(Flatten):
    """An objective whose argument has bounds."""

    def __init__(self, setting: Setting, *, rate: Annotated[float, above(0)] = 1.0, value: float = 0.5) -> None:
        super().__init__(setting, value=value / rate)


class NoNumber(Flatten):
    def forward(self, batch: Batch, step: Step) -> Output:
        output = super().forward(batch, step)
        return Output(output.losses, {"norm": batch["image"]})


class NameTwice(Flatten):
    def forward(self, batch: Batch, step: Step) -> Output:
        output = super().forward(batch, step)
        return Output(output.losses, {"loss_mean": output.losses["mean"]})


class TrainersName(Flatten):
    def forward(self, batch: Batch, step: Step) -> Output:
        output = super().forward(batch, step)
        return Output(output.losses, {"lr": output.losses["mean"]})


class NotANumber(Flatten):
    """An objective whose metric is NaN in the first two steps."""

    def forward(self, batch: Batch, step: Step) -> Output:
        output = super().forward(batch, step)
        if step.number < 2:
            output.metrics["norm"] = torch.tensor(torch.nan)
        return output


class NoLoss(Flatten):
    def forward(self, batch: Batch, step: Step) -> Output:
        return Output({})


class WeightOfNothing(Flatten):
    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.weights = {"elsewhere": 1.0}


def function() -> None:
    """Not a class."""
