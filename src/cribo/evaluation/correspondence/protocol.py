"""Semantic correspondence protocol: data and measurement."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from cribo.base.bounds import at_least, check_bounds
from cribo.evaluation.correspondence.settings import CorrespondenceSettings
from cribo.evaluation.data import Splits, absolute, described
from cribo.evaluation.protocol import Outcome, PatchProtocol
from cribo.evaluation.settings import QUICK_SIDE, require_whole_patches, square

if TYPE_CHECKING:
    from cribo.evaluation.run import Run

_SIDE = 768  # of the square images in DIFT


@dataclass
class CorrespondenceData:
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

    def __post_init__(self) -> None:
        check_bounds(self, "data.")

    @classmethod
    def find(cls, folder: Path) -> Self | None:
        """Return the pairs in a folder, None if there are none."""
        has_pairs = any((folder / name).is_dir() for name in ("PairAnnotation", "pairs"))
        return cls(str(folder)) if has_pairs else None

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
class Correspondence(CorrespondenceSettings, PatchProtocol):
    """Semantic correspondence by nearest features, as in DIFT's `eval_spair.py`."""

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

    @classmethod
    def quick(cls, patch_size: int, image_size: int | None) -> Self:
        """Return the protocol with small images."""
        return cls(size=square(image_size or 2 * QUICK_SIDE, patch_size))

    def prepare(self, run: "Run") -> Self:
        """Set the image size."""
        backbone = run.backbone
        side = _SIDE if backbone.takes_any_size else backbone.image_size
        settings = self.decided({"size": square(side, backbone.patch_size)})
        require_whole_patches(settings.size, backbone.patch_size)
        return settings

    def measure(self, run: "Run") -> Outcome:
        """Match and score the keypoints of all pairs."""
        from cribo.base.console import Phases
        from cribo.evaluation.correspondence.matching import match_pairs, row
        from cribo.evaluation.correspondence.pictures import draw_pairs
        from cribo.evaluation.pages import write_pages

        images = run.data.val
        features = run.patches(
            images, size=self.size, interpolation=self.interpolation, precision=self.precision, unit=False
        )
        with Phases(run.console) as progress:
            matches = match_pairs(features, images, device=run.devices[0], progress=progress)
        draw = partial(draw_pairs, matches=matches, images=images, alpha=self.alphas[0])
        return Outcome(
            rows=[row(matches, images, alpha) for alpha in self.alphas],
            classes=images.categories,
            write=lambda _, folder: write_pages(
                folder, "pairs", range(len(images.pairs)), draw, number=run.num_pictures
            ),
        )
