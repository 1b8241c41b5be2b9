"""Settings and data of semantic correspondence. This module does not import torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from cribo.base.bounds import above, at_least, at_most, require_distinct_numbers
from cribo.evaluation.config import QUICK_SIDE, UNDECIDED, Decided, Settings, Side, square
from cribo.evaluation.data import LabelledData, Splits, absolute, described
from cribo.features.config import FeaturePrecision
from cribo.method.config import Interpolation


@dataclass
class CorrespondenceData(LabelledData):
    """Pairs of images with keypoints: SPair-71k, or a folder with files in its format.

    Attributes:
        root: SPair-71k (PairAnnotation, JPEGImages), or your own folder with images, and pairs/*.json in the
            format of SPair-71k.
        split: split of SPair-71k: trn, val or test. [test]
        partial: accept SPair-71k with missing pairs. Its scores are not comparable with published ones.
        limit: maximum number of pairs, evenly spaced, for a quick trial.
    """

    layout: ClassVar[str] = "pairs/*.json with images, or PairAnnotation of SPair-71k"

    root: str
    split: str | None = None
    partial: bool = False
    limit: Annotated[int, at_least(1)] | None = None

    @classmethod
    def recognises(cls, folder: Path) -> bool:
        """Whether a folder has pairs."""
        return any((folder / name).is_dir() for name in ("PairAnnotation", "pairs"))

    def open(self) -> Splits:
        """Open the pairs.

        Raises:
            DataError: see `open_pairs`.
        """
        from cribo.data.labelled.correspondence import open_pairs

        images = open_pairs(self.root, self.split, partial=self.partial, limit=self.limit)
        root = absolute(self.root)
        is_spair = (root / "PairAnnotation").is_dir()
        about = described(
            self,
            root,
            name="spair" if is_spair else root.name,
            split=self.split or ("test" if is_spair else None),
            images=len(images),
            pairs=len(images.pairs),
            points=sum(len(pair.source_points) for pair in images.pairs),
        )
        return Splits(images, images, about["name"], about)


@dataclass(frozen=True, kw_only=True)
class CorrespondenceSettings(Settings):
    """Semantic correspondence by nearest features, as in DIFT's `eval_spair.py`.

    Attributes:
        alphas: maximum distance of a correct point, relative to the longer side of the object's box; one row each.
        size: height,width of all images, or a single number for squares. [768, or the multiple of the patch size below]
        interpolation: interpolation of resized images.
        precision: precision of the stored features; float16 halves their size.

    Raises:
        InputError: a value is out of range.
    """

    name: ClassVar[str] = "correspondence"
    title: ClassVar[str] = "Semantic correspondence"
    metrics: ClassVar[tuple[str, ...]] = ("pck_image", "pck_point")
    varies: ClassVar[str] = "alpha"
    class_metric: ClassVar[str] = "PCK per image"
    data_type: ClassVar[type[Any]] = CorrespondenceData
    pictures: ClassVar[str] = "pairs for which the points are drawn"
    less_memory: ClassVar[str] = "lower --runtime.batch_size or --size"
    description: ClassVar[str] = """\
Semantic correspondence: each keypoint of an image is matched with the pixel of another image that has the most similar
feature, and the percentage of correct keypoints is scored (PCK, per image and per point). Nothing is trained.

  cribo evaluate correspondence --backbone vit_small_patch16_224.dino --data SPair-71k
  cribo evaluate correspondence --backbone runs/mine --data MINE --alphas 0.05,0.1

Features are cached on disk. For a quick trial: --limit 50 --size 448
"""

    alphas: tuple[Annotated[float, above(0) & at_most(1)], ...] = (0.1,)
    size: Decided[tuple[Side, Side]] = UNDECIDED
    interpolation: Interpolation = "bilinear"
    precision: FeaturePrecision = "float32"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_distinct_numbers("alphas", self.alphas, "0.05,0.1")

    @classmethod
    def quick(cls, patch_size: int, image_size: int | None) -> Self:
        """Return the protocol with small images."""
        return cls(size=square(image_size or 2 * QUICK_SIDE, patch_size))
