"""Dense nearest-neighbour retrieval protocol: help and measurement."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from cribo.base.packages import require_packages
from cribo.evaluation.dense_neighbours.settings import DenseNNSettings
from cribo.evaluation.protocol import Outcome, Protocol
from cribo.evaluation.settings import QUICK_SIDE, square

if TYPE_CHECKING:
    from cribo.evaluation.run import Run


@dataclass(frozen=True, kw_only=True)
class DenseNN(DenseNNSettings, Protocol):
    """Dense nearest-neighbour retrieval (CrIBo, section 4.1; Balazevic et al. 2023)."""

    title: ClassVar[str] = "Dense nearest-neighbour retrieval"
    metrics: ClassVar[tuple[str, ...]] = ("miou",)
    varies: ClassVar[str] = "ratio"
    roles: ClassVar[Mapping[str, str]] = {
        "train": "memory",
        "val": "queries",
        "train_images": "memory_images",
        "val_images": "query_images",
    }
    aliases: ClassVar[Mapping[str, str]] = {"--data.memory": "--data.train", "--data.queries": "--data.val"}
    description: ClassVar[str] = """\
Dense nearest-neighbour retrieval: each patch of a validation image is labelled by the most similar patches of the
labelled training images, and the predictions are scored (mIoU). Nothing is trained.

  cribo evaluate dense-nn --backbone runs/camvid --data CAMVID
  cribo evaluate dense-nn --backbone checkpoint.pth --data VOCdevkit/VOC2012
  cribo evaluate dense-nn --backbone vit_small_patch16_224.dino --data MINE

--variant hummingbird follows the public toolkit for "Towards in-context scene understanding". Features are cached on
disk and reused by further evaluations of the same backbone and images. For a quick trial:
--data.limit 50 --ratios 1
"""

    @classmethod
    def quick(cls, patch_size: int, image_size: int | None) -> Self:
        """Return the protocol with the full memory and small images."""
        return cls(ratios=(1,), size=square(image_size or QUICK_SIDE, patch_size))

    def check_packages(self) -> None:
        """Check that faiss is installed if it searches."""
        if self.search == "faiss":
            require_packages("--search faiss", "faiss", extra="search", otherwise=", or use --search exact")

    def prepare(self, run: "Run") -> Self:
        """Set all settings that are None."""
        return self.for_data(run.backbone.patch_size, run.data.train.classes)

    def used(self, run: "Run") -> dict[str, Any]:
        """Return the settings, with the number of layers that provide features."""
        return {**self.effective(), "layers": run.source.layers}

    def measure(self, run: "Run") -> Outcome:
        """Label the patches of val by their nearest patches in train."""
        from cribo.base.console import Phases
        from cribo.evaluation.dense_neighbours.retrieval import dense_nn

        with Phases(run.console) as progress:
            return dense_nn(
                run.encoder,
                run.data.train,
                run.data.val,
                self,
                machine=run.machine(run.encoder.identity),
                pictures=run.num_pictures,
                progress=progress,
            )
