"""A custom objective: SimSiam (Chen and He 2021) on patches.

    python examples/own_objective.py

The command line refers to it by import path, with its arguments:

    cd examples && cribo pretrain --objective own_objective.DenseSimSiam --objective.args.width 128

The trainer provides data loading, optimiser, schedules, precision, devices, checkpoints, progress, metrics.csv,
TensorBoard, score and report, with the names of losses and metrics defined here.
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cribo
from cribo.data import sample_photometric
from cribo.data.samples import Batch, LazyImage, Sample
from cribo.method import cut_views, sample_crops
from cribo.models import Backbone
from cribo.objectives import Columns, Objective, Output, Setting, Step
from cribo.objectives.views import normalised_views


class TwoViews:
    """Sample transform, run in the workers, that returns two views. All random numbers come from the generator."""

    def __init__(self, setting: Setting) -> None:
        self.recipe = setting.options.views

    def __call__(self, image: LazyImage, generator: torch.Generator) -> Sample:
        """Return tensors of the same shape for every image, which are stacked to a batch."""
        pixels = image.load()  # (3, h, w), uint8
        crops = sample_crops(pixels.shape[1], pixels.shape[2], self.recipe, generator=generator)
        return {
            "views": cut_views(pixels, crops, self.recipe.size),
            "photometric": sample_photometric(self.recipe, generator=generator),  # applied on the device
        }


class DenseSimSiam(Objective):
    """Prediction of a view's mean token from the other view, without teacher or negatives.

    Args:
        setting: the configuration and the number of images.
        width: hidden width of the predictor.
    """

    columns = Columns(labels={"similarity": "negative cosine"}, progress={"spread": "spread {:.2f}"})

    def __init__(self, setting: Setting, *, width: int = 64) -> None:
        super().__init__(setting)
        self.backbone = setting.build_backbone()
        dim = self.backbone.embed_dim
        self.predictor = nn.Sequential(nn.Linear(dim, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, dim))

    def samples(self) -> TwoViews:
        """Return the sample transform."""
        return TwoViews(self.setting)

    def forward(self, batch: Batch, step: Step) -> Output:
        """Return losses and metrics by name; losses could be weighted by `self.weights`."""
        features = self.backbone(normalised_views(batch, self.options.views, self.backbone)).tokens.mean(dim=1)
        first, second = features.unflatten(0, (-1, 2)).unbind(dim=1)  # (B, D) each

        def loss(from_: Tensor, to: Tensor) -> Tensor:
            return -F.cosine_similarity(self.predictor(from_), to.detach(), dim=1).mean()

        directions = F.normalize(features.detach(), dim=1)
        spread = directions.std(dim=0).mean() * directions.shape[1] ** 0.5  # 0 if all features are equal
        return Output({"similarity": (loss(first, second) + loss(second, first)) / 2}, {"spread": spread})

    def exported(self) -> Backbone:
        """Return the backbone to export and score."""
        return self.backbone


if __name__ == "__main__":
    torch.set_num_threads(2)
    run = cribo.pretrain(
        "quickstart",
        out=sys.argv[1] if len(sys.argv) > 1 else "runs",
        default_name="own-objective",
        overrides={
            "objective": {"class_path": f"{Path(__file__).stem}.DenseSimSiam", "init_args": {"width": 32}},
            "data.scenes.count": 128,
            "data.workers": 0,
            "optim.epochs": 3,
            "score.root": None,
        },
    )
    print(run.folder, run.summary["shown"])
