"""Settings and data of depth prediction. This module does not import torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from cribo.base.bounds import above, at_least, require_distinct
from cribo.data.config import spread
from cribo.evaluation.config import Settings, Side
from cribo.evaluation.data import LabelledData, Splits, about_splits, absolute
from cribo.features.config import FeaturePrecision, Vote
from cribo.method.config import Interpolation

METHODS = ("neighbours", "linear")


@dataclass
class DepthData(LabelledData):
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

    @classmethod
    def recognises(cls, folder: Path) -> bool:
        """Whether a folder has depth maps."""
        from cribo.data.labelled.depth import is_nyu

        return is_nyu(folder) or (folder / "depth").is_dir()

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
class DepthSettings(Settings):
    """Depth prediction from frozen features, by nearest patches and by a linear probe.

    Attributes:
        methods: neighbours (the weighted mean depth of the nearest patches, as in Balazevic et al. 2023) or linear
            (ridge regression on the features); one row of results each.
        neighbours: k, the number of nearest patches.
        vote: weight of a neighbour: majority (equal weights), similarity (its cosine) or attention (softmax of
            cosine / temperature).
        temperature: temperature of the attention.
        ridge: L2 penalty of the linear probe on the weights of standardised channels.
        size: height,width of all images, or a single number for squares. [each image's own, rounded to the patch size,
            or the fixed input size of the network]
        interpolation: interpolation of resized images.
        precision: precision of the stored features; float16 halves their size.

    Raises:
        InputError: a value is out of range.
    """

    name: ClassVar[str] = "depth"
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

    methods: tuple[str, ...] = METHODS
    neighbours: Annotated[int, at_least(1)] = 30
    vote: Vote = "attention"
    temperature: Annotated[float, above(0)] = 0.02
    ridge: Annotated[float, above(0)] = 1e-3
    size: tuple[Side, Side] | None = None
    interpolation: Interpolation = "bicubic"
    precision: FeaturePrecision = "float32"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_distinct("methods", self.methods, METHODS)
