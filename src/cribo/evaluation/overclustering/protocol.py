"""Overclustering protocol: settings and measurement."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from cribo.checks import require_least, require_packages
from cribo.errors import InputError
from cribo.evaluation.protocol import (
    QUICK_SIDE,
    UNDECIDED,
    Decided,
    Outcome,
    PatchProtocol,
    require_whole_patches,
    square,
)
from cribo.retrieval.choices import FeaturePrecision, Interpolation

if TYPE_CHECKING:
    from cribo.evaluation.runner import Run

CLUSTERS = (300, 500)
"""Numbers of clusters reported in papers, in addition to the number of classes."""

_SIDE = 448  # side of the square images in Leopart, TimeT and NeCo


@dataclass(frozen=True, kw_only=True)
class Overclustering(PatchProtocol):
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
Requires: pip install "cribo-ssl[evaluation]"
"""

    clusters: Decided[tuple[int, ...]] = UNDECIDED
    draws: int = 5
    seed: int = 0
    foreground: bool = False
    dims: int = 50
    iterations: int = 100
    restarts: int = 5
    patches_per_cluster: int = 256
    mask_size: int = 100
    size: Decided[tuple[int, int]] = UNDECIDED
    interpolation: Interpolation = "bilinear"
    precision: FeaturePrecision = "float32"

    def __post_init__(self) -> None:
        positive = ("draws", "dims", "iterations", "restarts", "patches_per_cluster", "mask_size")
        require_least(self, {"seed": 0, **dict.fromkeys(positive, 1)})
        if self.is_decided("clusters") and (
            not self.clusters or min(self.clusters) < 1 or len(set(self.clusters)) < len(self.clusters)
        ):
            raise InputError(f"clusters must be distinct numbers >= 1, such as 21,300,500, got {self.clusters}")

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
            >>> Overclustering().for_data(14, ["background", "cat"], images=2).clusters
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

    def prepare(self, run: "Run") -> Self:
        """Set all settings that are None, and check that the packages are installed."""
        require_packages("overclustering", "faiss", "scipy", extra="evaluation")
        backbone, val = run.backbone, run.data.val
        image_size = backbone.fixed_size
        return self.for_data(backbone.patch_size, val.classes, len(val), image_size)

    def measure(self, run: "Run") -> Outcome:
        """Cluster and score the patches of val."""
        import faiss
        import scipy

        from cribo.console import Phases
        from cribo.evaluation.overclustering.clustering import overclustering

        val = run.data.val
        found = run.patches(val, size=self.size, interpolation=self.interpolation, precision=self.precision, unit=False)
        with Phases(run.console) as progress:
            scores, panels = overclustering(found, val, self, pictures=run.num_pictures, progress=progress)
        return Outcome(
            rows=[score.row(val.classes) for score in scores],
            classes=val.classes,
            panels=panels,
            palette=val.palette,
            data={"patches": found.patches},
            packages={"faiss": faiss.__version__, "scipy": scipy.__version__},
        )


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
