"""A custom objective whose samples have two images: a mixture must be similar to both of its images.

    python examples/own_mixture.py

`image.other(index)` is another image of the collection, by its index. It is decoded when it is read, as the image
itself; if it cannot be read, the whole sample is replaced, and the report names the image.
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


class TwoImages:
    """Transform of an image into a view of it and a view of a random other image: `views` (B, 2, 3, S, S).

    Args:
        recipe: size, area, aspect and flip of the views.
        num_images: number of images in the collection.
    """

    def __init__(self, recipe: ViewRecipe, num_images: int) -> None:
        self.recipe, self.num_images = recipe, num_images

    def __call__(self, image: LazyImage, generator: torch.Generator) -> Sample:
        """Draw the other image, and cut a view from each."""
        other = image.other(int(torch.randint(self.num_images, (), generator=generator)))

        def draw(height: int, width: int) -> list[tuple[Crops, int]]:
            pair = sample_crops(height, width, self.recipe, generator=generator)
            return [(Crops(pair.boxes[:1], pair.flips[:1]), self.recipe.size)]

        views = []
        for each in (image, other):
            pixels, (crop,), _ = load_for_crops(each, draw)  # decoded at a reduced size where the crop allows it
            views.append(cut_views(pixels, crop, self.recipe.size))
        return {"views": torch.cat(views)}


class Mixture(Objective):
    """The features of the mean of two images must predict those of both."""

    columns = Columns(labels={"mixture": "negative cosine"})

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.backbone = setting.build_backbone()
        dim = self.backbone.embed_dim
        self.predictor = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def samples(self) -> TwoImages:
        """Return the transform to views of two images."""
        return TwoImages(self.options.views, self.setting.num_images)

    def forward(self, batch: Batch, step: Step) -> Output:
        """Return the negative cosine between the predicted and the images' features, mean over the batch."""
        views: Float[Tensor, "b 2 3 s s"] = batch["views"].float() / 255
        views = normalise(views, mean=self.backbone.mean, std=self.backbone.std)
        with torch.no_grad():
            targets = self.backbone(views.flatten(0, 1)).global_token.unflatten(0, (-1, 2))
        predicted = self.predictor(self.backbone(views.mean(dim=1)).global_token)
        return Output({"mixture": -F.cosine_similarity(predicted[:, None], targets, dim=-1).mean()})

    def exported(self) -> Backbone:
        """Return the backbone to export and score."""
        return self.backbone


if __name__ == "__main__":
    torch.set_num_threads(2)
    run = cribo.pretrain(
        "quickstart",
        out=sys.argv[1] if len(sys.argv) > 1 else "runs",
        default_name="own-mixture",
        overrides={
            "objective": f"{Path(__file__).stem}.Mixture",
            "data.scenes.count": 128,
            "data.workers": 0,
            "optim.epochs": 2,
            "score.root": None,
        },
    )
    print(run.folder, run.summary["shown"])
