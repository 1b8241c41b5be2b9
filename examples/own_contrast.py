"""A custom objective that needs the whole batch: MoCo v3 (Chen et al. 2021) without its projector, trained with LARS.

    python examples/own_contrast.py

It shows what the interface offers besides the losses of single images:

- negatives from all images of the batch, on all devices (`step.gather`, `whole_batch`);
- a learning rate for a part of the network (`lr_factors`);
- another optimiser, and gradients clipped by their global norm (`optim.name`, `optim.clip_norm`).
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

import cribo
from cribo.data.samples import Batch
from cribo.models import Backbone
from cribo.models.lora import plain_copy
from cribo.objectives import Columns, Objective, Output, Setting, Step
from cribo.objectives.base import move_towards
from cribo.objectives.views import ViewPairs, normalised_views


class Contrast(Objective):
    """Tell the other view of an image from the views of all other images of the batch.

    Args:
        setting: the configuration and the number of images.
        temperature: temperature of the softmax over the batch.
    """

    columns = Columns(labels={"contrast": "InfoNCE"})
    whole_batch = True  # micro-batches are rejected: each would see only its own negatives
    lr_factors = {"predictor.": 10.0}  # the default of optim.lr_factors

    def __init__(self, setting: Setting, *, temperature: float = 0.2) -> None:
        super().__init__(setting)
        self.temperature = temperature
        self.student = nn.ModuleDict({"backbone": setting.build_backbone()})
        self.teacher = plain_copy(self.student).requires_grad_(False)
        dim = self.exported().embed_dim
        self.student["predictor"] = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def samples(self) -> ViewPairs:
        """Return the transform to two views."""
        return ViewPairs(self.options.views, grid=(1, 1), num_objects=0, drop_path_sites=0)

    def trainable(self) -> nn.Module:
        """Return the network to train; names in `lr_factors` begin here."""
        return self.student

    def forward(self, batch: Batch, step: Step) -> Output:
        """Return the loss, the mean over the images of this device; the trainer averages over devices."""
        views = normalised_views(batch, self.options.views, self.exported())
        with torch.no_grad():
            keys = F.normalize(self.teacher["backbone"](views).global_token, dim=1).unflatten(0, (-1, 2))
        queries = self.student["predictor"](self.student["backbone"](views).global_token)
        queries = F.normalize(queries, dim=1).unflatten(0, (-1, 2)) / self.temperature
        everywhere: Float[Tensor, "ranks b 2 d"] = step.gather(keys)
        losses = []
        for view in (0, 1):
            negatives = everywhere[:, :, 1 - view].flatten(0, 1)
            positive = (queries[:, view] * keys[:, 1 - view]).sum(dim=1)
            losses.append((queries[:, view] @ negatives.T).logsumexp(dim=1) - positive)
        return Output({"contrast": torch.stack(losses).mean()})

    def after_step(self, step: Step) -> None:
        """Update the teacher."""
        move_towards(self.teacher, nn.ModuleDict({"backbone": self.student["backbone"]}), 0.99)

    def exported(self) -> Backbone:
        """Return the backbone to export and score."""
        backbone = self.teacher["backbone"]
        assert isinstance(backbone, Backbone)
        return backbone


if __name__ == "__main__":
    torch.set_num_threads(2)
    run = cribo.pretrain(
        "quickstart",
        out=sys.argv[1] if len(sys.argv) > 1 else "runs",
        default_name="own-contrast",
        overrides={
            "objective": f"{Path(__file__).stem}.Contrast",
            "optim.name": "lars",
            "optim.lr": 8.0,
            "optim.weight_decay": [1e-5, 1e-5],
            "optim.clip": 1.0,
            "optim.clip_norm": "global",
            "data.scenes.count": 128,
            "data.workers": 0,
            "optim.epochs": 3,
            "score.root": None,
        },
    )
    print(run.folder, run.summary["shown"])
