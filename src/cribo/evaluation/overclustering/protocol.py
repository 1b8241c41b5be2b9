"""Overclustering protocol: help and measurement."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from cribo.base.packages import require_packages
from cribo.evaluation.overclustering.settings import OverclusteringSettings
from cribo.evaluation.protocol import Outcome, PatchProtocol
from cribo.evaluation.settings import QUICK_SIDE, square

if TYPE_CHECKING:
    from cribo.evaluation.run import Run


@dataclass(frozen=True, kw_only=True)
class Overclustering(OverclusteringSettings, PatchProtocol):
    """Unsupervised segmentation by k-means, as in Leopart, TimeT and NeCo."""

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

    @classmethod
    def quick(cls, patch_size: int, image_size: int | None) -> Self:
        """Return the protocol with one draw and small images."""
        return cls(draws=1, restarts=1, size=square(image_size or QUICK_SIDE, patch_size))

    def check_packages(self) -> None:
        """Check that faiss is installed."""
        require_packages("overclustering", "faiss", extra="evaluation")

    def prepare(self, run: "Run") -> Self:
        """Set all settings that are None."""
        backbone, val = run.backbone, run.data.val
        image_size = backbone.fixed_size
        return self.for_data(backbone.patch_size, val.classes, len(val), image_size)

    def measure(self, run: "Run") -> Outcome:
        """Cluster and score the patches of val."""
        import faiss
        import scipy

        from cribo.base.console import Phases
        from cribo.evaluation.overclustering.clustering import overclustering

        val = run.data.val
        found = run.patches(val, size=self.size, interpolation=self.interpolation, precision=self.precision, unit=False)
        with Phases(run.console) as progress:
            rows, panels = overclustering(found, val, self, pictures=run.num_pictures, progress=progress)
        return Outcome(
            rows=rows,
            classes=val.classes,
            panels=panels,
            palette=val.palette,
            data={"patches": found.patches},
            packages={"faiss": faiss.__version__, "scipy": scipy.__version__},
        )
