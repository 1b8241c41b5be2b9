"""Image-level nearest neighbours protocol: help and measurement."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from cribo.base.errors import ConfigError
from cribo.evaluation.data import ImageData
from cribo.evaluation.image_neighbours.settings import PUBLISHED, ImageNNSettings
from cribo.evaluation.protocol import Outcome, Protocol
from cribo.features.config import BackboneSource

if TYPE_CHECKING:
    from cribo.evaluation.results import EvaluationResult
    from cribo.evaluation.run import Run
    from cribo.models import Backbone


_SHOWN_PAIRS = 10


@dataclass(frozen=True, kw_only=True)
class ImageNN(ImageNNSettings, Protocol):
    """Image-level nearest-neighbour classification, as in DINO's `eval_knn.py`."""

    title: ClassVar[str] = "Image nearest-neighbour classification"
    metrics: ClassVar[tuple[str, ...]] = ("top1", "top5")
    varies: ClassVar[str] = "neighbours"
    class_metric: ClassVar[str] = "accuracy"
    data_type: ClassVar[type[Any]] = ImageData
    runtime_defaults: ClassVar[Mapping[str, Any]] = {"batch_size": 64}
    pictures: ClassVar[str] = "images for which the nearest ones are drawn"
    quick_limit: ClassVar[int] = 240
    description: ClassVar[str] = """\
Image-level nearest neighbours: each image is classified by a vote of the training images with the most similar global
tokens, as in DINO, and the predictions are scored (top-1, top-5). Nothing is trained.

  cribo evaluate image-nn --backbone runs/imagenet --data ILSVRC2012
  cribo evaluate image-nn --backbone vit_small_patch16_224.dino --data MINE
  cribo evaluate image-nn --backbone mean-colour --data MINE

A folder contains train/<class>/* and val/<class>/*, or, without splits, <class>/*, where each image is classified by
all others. For related images (frames of one film, crops of one photograph), provide splits that keep them together;
otherwise images are classified by their relatives, and the score is too high.

Features are cached on disk and reused when an interrupted evaluation is repeated, and by further evaluations of the
same backbone and images. For a quick trial: --limit 200
"""

    def check_backbone(self, source: BackboneSource) -> None:
        """Raise ConfigError for features of several layers."""
        if source.layers != 1:
            raise ConfigError(
                f"layers must be 1, since the global token is that of the last block, got {source.layers}"
            )

    def _check_crop(self, backbone: "Backbone") -> None:
        """Raise ConfigError if the network does not support images of this size."""
        patch_size, name = backbone.patch_size, backbone.name
        if self.crop % patch_size:
            near = max(patch_size, round(self.crop / patch_size) * patch_size)
            raise ConfigError(
                f"crop must be a multiple of {patch_size}, the patch size of {name}, got {self.crop}: use {near}"
            )
        if not backbone.takes_any_size and self.crop != backbone.image_size:
            raise ConfigError(f"crop must be {backbone.image_size}, the fixed input size of {name}, got {self.crop}")

    def prepare(self, run: "Run") -> Self:
        """Set the numbers of neighbours."""
        return self.for_data(len(run.data.train), leave_one_out=run.data.val is None)

    def used(self, run: "Run") -> dict[str, Any]:
        """Return the settings, and whether images are classified leave-one-out."""
        return {**dataclasses.asdict(self), "leave_one_out": run.data.val is None}

    def measure(self, run: "Run") -> Outcome:
        """Classify the images of val, or each training image by the others."""
        from cribo.base.console import Phases
        from cribo.evaluation.image_neighbours.pictures import write_neighbours
        from cribo.evaluation.image_neighbours.retrieval import image_nn
        from cribo.features.encoder import encoders_on

        train, val = run.data.train, run.data.val
        queries = train if val is None else val
        self._check_crop(run.backbone)
        encoders = encoders_on(run.backbone, run.devices)
        machine = run.machine(encoders[0].global_identity)
        with Phases(run.console) as progress:
            found = image_nn(encoders, train, val, self, machine=machine, progress=progress)
        return Outcome(
            rows=found.rows,
            classes=train.classes,
            write=lambda result, folder: write_neighbours(found, train, queries, folder, number=run.num_pictures),
        )

    def report(self, result: "EvaluationResult") -> list[Any]:
        """Return a table of the most frequently confused classes."""
        from cribo.base.tables import Table, numbers, texts

        row = next((row for row in result.results if row["neighbours"] == PUBLISHED), result.results[0])
        if not row["confused"]:
            return []
        shown = row["confused"][:_SHOWN_PAIRS]
        rows = [[pair["label"], pair["prediction"], f"{pair['images']:,}"] for pair in shown]
        title = f"Most frequently confused classes, neighbours {row['neighbours']}"
        return [Table([*texts("class", "classified as"), *numbers("images")], [rows], title)]
