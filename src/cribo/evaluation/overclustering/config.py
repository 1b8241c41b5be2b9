"""Settings of overclustering. This module does not import torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Self

from cribo.base.bounds import at_least, require_distinct_numbers
from cribo.base.errors import InputError
from cribo.base.packages import require_packages
from cribo.evaluation.config import QUICK_SIDE, UNDECIDED, Decided, Settings, Side, require_whole_patches, square
from cribo.features.config import FeaturePrecision
from cribo.method.config import Interpolation

CLUSTERS = (300, 500)
"""Numbers of clusters reported in papers, in addition to the number of classes."""

_SIDE = 448  # side of the square images in Leopart, TimeT and NeCo


@dataclass(frozen=True, kw_only=True)
class OverclusteringSettings(Settings):
    """Unsupervised segmentation by k-means, as in Leopart, TimeT and NeCo.

    Attributes:
        clusters: K, number of clusters, one row of results each. If K equals the number of classes, clusters and
            classes are matched one to one (Hungarian algorithm); otherwise each cluster is assigned its most frequent
            class. [number of classes,300,500, limited by the number of patches]
        draws: number of k-means runs with different seeds; the score is the mean.
        seed: seed of the first draw.
        foreground: cluster and score objects only; background (class 0) is excluded according to the labels.
        dims: number of principal components of the standardised features to cluster, limited by their channels.
        iterations: number of k-means iterations.
        restarts: number of k-means restarts per draw; the clustering with the lowest error is used.
        patches_per_cluster: number of patches sampled per cluster to compute the centres, as in faiss; all patches are
            then assigned to the nearest centre.
        mask_size: side in pixels to which labels and clusters are resized for scoring.
        size: height,width of all images, or a single number for squares. [448, or the multiple of the patch size below]
        interpolation: interpolation of resized images.
        precision: precision of the stored features; float16 halves their size.

    Raises:
        InputError: a value is out of range.
    """

    name: ClassVar[str] = "overclustering"
    title: ClassVar[str] = "Overclustering"
    metrics: ClassVar[tuple[str, ...]] = ("miou",)
    varies: ClassVar[str] = "clusters"
    less_memory: ClassVar[str] = "lower --runtime.batch_size, or use fewer images (--limit)"
    description: ClassVar[str] = """\
Unsupervised segmentation: the patches of the validation images are clustered by k-means, clusters are matched with
classes, and the result is scored as a segmentation (mIoU). Nothing is trained; labels are used for matching only.

  cribo evaluate overclustering --backbone checkpoint.pth --data VOCdevkit/VOC2012
  cribo evaluate overclustering --backbone runs/mine --data MINE --clusters 50,100
  cribo evaluate overclustering --backbone runs/mine --data VOCdevkit/VOC2012 --foreground

Features are cached on disk. For a quick trial: --limit 50 --clusters 50 --draws 2
Requires the extra evaluation (README.md, Install).
"""

    clusters: Decided[tuple[Annotated[int, at_least(1)], ...]] = UNDECIDED
    draws: Annotated[int, at_least(1)] = 5
    seed: Annotated[int, at_least(0)] = 0
    foreground: bool = False
    dims: Annotated[int, at_least(1)] = 50
    iterations: Annotated[int, at_least(1)] = 100
    restarts: Annotated[int, at_least(1)] = 5
    patches_per_cluster: Annotated[int, at_least(1)] = 256
    mask_size: Annotated[int, at_least(1)] = 100
    size: Decided[tuple[Side, Side]] = UNDECIDED
    interpolation: Interpolation = "bilinear"
    precision: FeaturePrecision = "float32"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_distinct_numbers("clusters", self.clusters, "21,300,500")

    def for_data(self, patch_size: int, classes: Sequence[str], images: int, image_size: int | None = None) -> Self:
        """Return a copy in which all settings are set.

        Args:
            patch_size: patch size of the backbone in pixels.
            classes: classes of the data.
            images: number of images to cluster.
            image_size: fixed input size of the backbone in pixels; None if it accepts any size.

        Raises:
            InputError: a size that is not a multiple of the patch size, more clusters than patches, or `foreground`
                for classes that do not begin with a background.

        Example:
            >>> OverclusteringSettings().for_data(14, ["background", "cat"], images=2).clusters
            (2, 300, 500)
        """
        if self.foreground and (classes[0].lower() != "background" or len(classes) < 2):
            raise InputError(f"foreground requires background as class 0, got {classes[0]!r}: omit --foreground")
        settings = self.decided({"size": square(image_size or _SIDE, patch_size)})
        require_whole_patches(settings.size, patch_size)
        height, width = settings.size
        patches = images * (height // patch_size) * (width // patch_size)
        objects = len(classes) - self.foreground
        most = tuple(dict.fromkeys(k for k in (objects, *CLUSTERS) if k <= patches)) or (patches,)
        settings = settings.decided({"clusters": most})
        require_patches(settings.clusters, patches)
        return settings

    @classmethod
    def quick(cls, patch_size: int, image_size: int | None) -> Self:
        """Return the protocol with one draw and small images."""
        return cls(draws=1, restarts=1, size=square(image_size or QUICK_SIDE, patch_size))

    def check_packages(self) -> None:
        """Check that faiss is installed."""
        require_packages("overclustering", "faiss", extra="evaluation")


def require_patches(clusters: Sequence[int], patches: int, of: str = "patches") -> None:
    """Check that there are enough patches to cluster.

    Raises:
        InputError: more clusters than patches.
    """
    if max(clusters) > patches:
        raise InputError(
            f"clusters must be at most the number of {of}, {patches}, got {max(clusters)}: use fewer clusters, or more "
            "or larger images"
        )
