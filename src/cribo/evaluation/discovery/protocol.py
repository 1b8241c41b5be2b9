"""Object discovery protocol: data and measurement."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from cribo.base.bounds import at_least, check_bounds
from cribo.base.errors import ConfigError, DataError, InputError
from cribo.data.config import spread
from cribo.evaluation.data import Splits, absolute, described
from cribo.evaluation.discovery.settings import DiscoverySettings
from cribo.evaluation.protocol import Outcome, Protocol
from cribo.evaluation.settings import QUICK_SIDE
from cribo.features.config import BackboneSource

if TYPE_CHECKING:
    from cribo.evaluation.run import Run

log = logging.getLogger(__name__)


_MANY = 0.5  # share of images found as a whole above which a warning is logged


@dataclass
class DiscoveryData:
    """Images with boxes: Pascal VOC, or annotations in COCO's format.

    Attributes:
        root: folder of the data set: Annotations, ImageSets and JPEGImages of Pascal VOC (VOCdevkit/VOC2007); or COCO's
            own layout (annotations/instances_val2017.json, val2017), instances_val.json with images/val, or
            val/_annotations.coco.json beside the images.
        split: name of a list in ImageSets/Main for VOC, else train or val. [VOC: trainval, others: val]
        annotations: JSON file in COCO's format, at any path.
        images: folder of the images. [that of the layout, or of the JSON file]
        limit: maximum number of images, evenly spaced, for a quick trial.
    """

    layout: ClassVar[str] = "Annotations, ImageSets and JPEGImages of Pascal VOC, or a layout of COCO's format"

    root: str | None = None
    split: str | None = None
    annotations: str | None = None
    images: str | None = None
    limit: Annotated[int, at_least(1)] | None = None

    def __post_init__(self) -> None:
        check_bounds(self, "data.")

    @classmethod
    def find(cls, folder: Path) -> Self | None:
        """Return the data set in a folder with a layout of Pascal VOC or COCO, None if there is none."""
        from cribo.data.labelled.detection import has_annotations
        from cribo.data.labelled.voc import is_voc

        return cls(str(folder)) if is_voc(folder) or has_annotations(folder) else None

    def open(self) -> Splits:
        """Open the images with at least one object.

        Raises:
            DataError: no image has an object; see also `VocBoxes` and `open_boxes`.
        """
        from cribo.data.labelled.detection import open_boxes
        from cribo.data.labelled.voc import VocBoxes, is_voc

        if self.annotations is None and self.root is not None and is_voc(self.root):
            split = self.split or "trainval"
            found = VocBoxes(self.root, split)
            name = absolute(self.root).name.lower()
        else:
            split = self.split or "val"
            found = open_boxes(self.root, split, annotations=self.annotations, images=self.images)
            name = absolute(found.file.parent if self.root is None else self.root).name
        kept = [index for index in range(len(found)) if not found.boxes(index).crowd.all()]
        if not kept:
            raise DataError(f"no image of {name} has an object: discovery needs annotated objects")
        without = len(found) - len(kept)
        if self.limit is not None:
            kept = [kept[place] for place in spread(len(kept), self.limit)]
        images = found.subset(kept)
        about = described(self, self.root, name=name, split=split, images=len(images), images_without_objects=without)
        return Splits(images, images, name, about)


@dataclass(frozen=True, kw_only=True)
class Discovery(DiscoverySettings, Protocol):
    """Object discovery with LOST and TokenCut on frozen features."""

    title: ClassVar[str] = "Object discovery"
    metrics: ClassVar[tuple[str, ...]] = ("corloc",)
    varies: ClassVar[str] = "method"
    data_type: ClassVar[type[Any]] = DiscoveryData
    pictures: ClassVar[str] = "images for which the objects are drawn"
    less_memory: ClassVar[str] = "lower --size"
    description: ClassVar[str] = """\
Object discovery: LOST and TokenCut find one object in each image by the similarity of its patches, and the fraction of
images with a correctly found object is scored (CorLoc: IoU with any box >= 0.5). Nothing is trained.

  cribo evaluate discovery --backbone vit_small_patch16_224.dino --data VOCdevkit/VOC2007
  cribo evaluate discovery --backbone runs/mine --data MINE --methods tokencut
  cribo evaluate discovery --backbone runs/mine --data.annotations boxes.json --data.images images/

For a quick trial: --limit 50 --size 320
"""

    @classmethod
    def quick(cls, patch_size: int, image_size: int | None) -> Self:
        """Return the protocol with small images."""
        return cls(size=QUICK_SIDE if image_size is None else None)

    def check_backbone(self, source: BackboneSource) -> None:
        """Raise ConfigError for features of several layers."""
        if source.layers != 1:
            raise ConfigError(f"layers must be 1, the last block, got {source.layers}")

    def prepare(self, run: "Run") -> Self:
        """Set the features."""
        if self.size is not None and not run.backbone.takes_any_size:
            side = run.backbone.image_size
            raise InputError(
                f"size cannot be set for {run.backbone.name}, which only accepts images of {side} x {side} pixels, got "
                f"{self.size}: omit --size"
            )
        attention = run.backbone.has_attention
        # Keys do not pass through a linear readout, such as that of an adapted network.
        own = attention and run.backbone.readout is None
        settings = self.decided({"features": "keys" if own else "tokens"})
        if settings.features != "tokens" and not attention:
            raise InputError(
                f"features must be tokens for {run.backbone.name}, since the {settings.features} of its last layer "
                "are not accessible: use --features tokens"
            )
        return settings

    def measure(self, run: "Run") -> Outcome:
        """Find an object in each image, and compare it with the annotated boxes."""
        import scipy

        from cribo.base.console import Phases
        from cribo.base.devices import resolve_workers
        from cribo.evaluation.discovery.discovery import discover
        from cribo.evaluation.discovery.pictures import write_objects

        images = run.data.val
        with Phases(run.console) as progress:
            found = discover(
                run.backbone.to(run.devices[0]),
                images,
                self,
                workers=resolve_workers(run.runtime.workers),
                progress=progress,
            )
        for name, part in found.items():
            if part.whole > _MANY * len(images):
                log.warning(
                    "%s found the whole image in %d of %d images, since the %s of their patches are too similar, or "
                    "too different, to separate an object: CorLoc then measures the data set, not the network. Use %s",
                    name,
                    part.whole,
                    len(images),
                    self.features,
                    self._alternative(name, run),
                )
        return Outcome(
            rows=[
                {"method": name, "corloc": part.corloc, "found": int(part.right.sum()), "whole_image": part.whole}
                for name, part in found.items()
            ],
            classes=(),
            packages={"scipy": scipy.__version__},
            write=lambda result, folder: write_objects(found, images, folder, number=run.num_pictures),
        )

    def _alternative(self, method: str, run: "Run") -> str:
        """Return the settings with which a method may find parts of images."""
        settings = ["another --threshold"] if method == "tokencut" else []
        if run.backbone.has_attention:
            settings.insert(0, "--features tokens" if self.features == "values" else "--features values")
        return " or ".join(settings) or "another network"

    def places(self, folder: Path) -> dict[str, Any]:
        """Return the path of the boxes."""
        return {"boxes": folder / "boxes.json"}
