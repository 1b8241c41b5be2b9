"""A custom objective whose samples are clips: the features of a frame must predict those of a later one.

    python examples/own_clip.py

With `clip_frames`, the items of an epoch are clips, and `image.frames` are the frames of one in temporal order, each
decoded when it is read. `data.root` is a folder with a folder of numbered frames for each video, tar shards of these,
or video files; `scenes` are moving scenes. `data.video` sets the length of the clips.
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

import cribo
from cribo.data.samples import Batch, LazyImage, Sample
from cribo.method import Crops, ViewRecipe, cut_views, sample_crops
from cribo.models import Backbone, normalise
from cribo.objectives import Columns, Objective, Output, Setting, Step
from cribo.objectives.crops import load_for_crops


class TwoFrames:
    """Transform of a clip into the same crop of two of its frames: `frames` (B, 2, 3, S, S).

    Args:
        recipe: size, area, aspect and flip of the crop.
    """

    def __init__(self, recipe: ViewRecipe) -> None:
        self.recipe = recipe

    def __call__(self, image: LazyImage, generator: torch.Generator) -> Sample:
        """Draw two frames and one crop; the frames of a clip must have one size."""
        clip = image.frames
        crops: list[Crops] = []

        def draw(height: int, width: int) -> list[tuple[Crops, int]]:
            if not crops:
                pair = sample_crops(height, width, self.recipe, generator=generator)
                crops.append(Crops(pair.boxes[:1], pair.flips[:1]))
            return [(crops[0], self.recipe.size)]

        frames = []
        for place in sorted(torch.randperm(len(clip), generator=generator)[:2].tolist()):
            pixels, (crop,), _ = load_for_crops(clip[place], draw)
            frames.append(cut_views(pixels, crop, self.recipe.size))
        return {"frames": torch.cat(frames)}


class NextFrame(Objective):
    """The patches of a frame must predict the patch at the same place of a later frame."""

    columns = Columns(labels={"next": "negative cosine"})
    clip_frames = 2  # shorter clips are an error before training

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.backbone = setting.build_backbone()
        dim = self.backbone.embed_dim
        self.predictor = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def samples(self) -> TwoFrames:
        """Return the transform to two frames."""
        return TwoFrames(self.options.views)

    def forward(self, batch: Batch, step: Step) -> Output:
        """Return the negative cosine between predicted and later patches, mean over patches and clips."""
        frames: Float[Tensor, "b 2 3 s s"] = batch["frames"].float() / 255
        earlier, later = normalise(frames, mean=self.backbone.mean, std=self.backbone.std).unbind(dim=1)
        with torch.no_grad():
            targets = self.backbone(later).tokens
        predicted = self.predictor(self.backbone(earlier).tokens)
        return Output({"next": -F.cosine_similarity(predicted, targets, dim=-1).mean()})

    def exported(self) -> Backbone:
        """Return the backbone to export and score."""
        return self.backbone


if __name__ == "__main__":
    torch.set_num_threads(2)
    run = cribo.pretrain(
        "quickstart",
        out=sys.argv[1] if len(sys.argv) > 1 else "runs",
        default_name="own-clip",
        overrides={
            "objective": f"{Path(__file__).stem}.NextFrame",
            "data.scenes.count": 128,
            "data.workers": 0,
            "optim.epochs": 2,
            "score.root": None,
        },
    )
    print(run.folder, run.summary["shown"])
