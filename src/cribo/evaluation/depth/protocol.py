"""Depth from frozen features protocol: data and measurement."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from cribo.base.bounds import above, at_least, check_bounds
from cribo.data.config import spread
from cribo.evaluation.data import Splits, about_splits, absolute
from cribo.evaluation.depth.settings import DepthSettings
from cribo.evaluation.protocol import Outcome, PatchProtocol
from cribo.evaluation.settings import require_whole_patches, square

if TYPE_CHECKING:
    from cribo.evaluation.run import Run


@dataclass
class DepthData:
    """Images with depth maps.

    Attributes:
        root: NYU-Depth v2 (nyu_train.txt and nyu_test.txt, or BTS's lists), or your own folder with images/train,
            images/val, depth/train and depth/val (16-bit PNG, 0 for no measurement).
        scale: units of the depth maps per metre: 1000 for millimetres, 256 for KITTI.
        max_depth: in metres; depths above it are ignored, and predictions are limited to it: 10 for NYU-Depth v2, 80
            for KITTI.
        partial: accept missing images and depth maps. The scores are not comparable with published ones.
        limit: maximum number of images per split, evenly spaced, for a quick trial.
    """

    layout: ClassVar[str] = "images/<split> and depth/<split>, or the lists of NYU-Depth v2"

    root: str
    scale: Annotated[float, above(0)] = 1000.0
    max_depth: Annotated[float, above(0)] = 10.0
    partial: bool = False
    limit: Annotated[int, at_least(1)] | None = None

    def __post_init__(self) -> None:
        check_bounds(self, "data.")

    @classmethod
    def find(cls, folder: Path) -> Self | None:
        """Return the data set in a folder with depth maps, None if there are none."""
        from cribo.data.labelled.depth import is_nyu

        return cls(str(folder)) if is_nyu(folder) or (folder / "depth").is_dir() else None

    def open(self) -> Splits:
        """Open both splits.

        Raises:
            MissingData: a folder, list, image or depth map does not exist.
            DataError: another layout, no images, or depth maps in another format or unit.
        """
        from cribo.data.labelled.depth import is_nyu, open_depth

        train, val = open_depth(self.root, scale=self.scale, max_depth=self.max_depth, partial=self.partial)
        if self.limit is not None:
            train, val = (images.subset(spread(len(images), self.limit)) for images in (train, val))
        name = "nyu" if is_nyu(self.root) else absolute(self.root).name
        return Splits(train, val, name, about_splits(self, self.root, train, "train", val, "val", name=name))


@dataclass(frozen=True, kw_only=True)
class Depth(DepthSettings, PatchProtocol):
    """Depth prediction from frozen features, by nearest patches and by a linear probe."""

    title: ClassVar[str] = "Depth"
    metrics: ClassVar[tuple[str, ...]] = ("delta1", "rmse", "abs_rel")
    varies: ClassVar[str] = "method"
    data_type: ClassVar[type[Any]] = DepthData
    description: ClassVar[str] = """\
Depth prediction from frozen features: the depth of each patch is predicted from its most similar training patches and
by ridge regression, and scored per pixel (fraction within a factor of 1.25, RMSE). No network is trained.

  cribo evaluate depth --backbone vit_small_patch16_224.dino --data NYU
  cribo evaluate depth --backbone runs/mine --data MINE --data.scale 1000 --data.max_depth 30

Features are cached on disk. For a quick trial: --limit 50
"""

    def prepare(self, run: "Run") -> Self:
        """Set the image size."""
        backbone = run.backbone
        only = {} if backbone.takes_any_size else {"size": square(backbone.image_size, backbone.patch_size)}
        settings = self.decided(only)
        if settings.size is not None:
            require_whole_patches(settings.size, backbone.patch_size)
        return settings

    def measure(self, run: "Run") -> Outcome:
        """Predict the depth of val by each method, and score it."""
        from cribo.base.console import Phases
        from cribo.evaluation.depth.pictures import draw_depths
        from cribo.evaluation.depth.prediction import predict
        from cribo.evaluation.depth.scoring import row, score_images
        from cribo.evaluation.pages import write_pages

        train, val = run.data.train, run.data.val
        encode = partial(
            run.patches, size=self.size, interpolation=self.interpolation, precision=self.precision, unit=False
        )
        train_features, val_features = encode(train), encode(val)
        with Phases(run.console) as progress:
            found = predict(
                train_features, train, val_features, self, machine=run.machine(run.encoder.identity), progress=progress
            )
            scores = score_images(found, val, progress=progress)
        draw = partial(draw_depths, found=found, scores=scores, images=val)
        return Outcome(
            rows=[row(method, scores[method]) for method in self.methods],
            classes=(),
            data={"train_patches": train_features.patches, "val_patches": val_features.patches},
            write=lambda _, folder: write_pages(folder, "depth", range(len(val)), draw, number=run.num_pictures),
        )
