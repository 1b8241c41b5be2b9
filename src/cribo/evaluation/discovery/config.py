"""Settings and data of object discovery. This module does not import torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from cribo.base.bounds import above, at_least, below, require_distinct
from cribo.base.errors import ConfigError, DataError
from cribo.data.config import spread
from cribo.evaluation.config import QUICK_SIDE, UNDECIDED, Decided, Settings
from cribo.evaluation.data import LabelledData, Splits, absolute, described
from cribo.features.config import BackboneSource

METHODS = ("lost", "tokencut")
DiscoveryFeatures = Literal["keys", "queries", "values", "tokens"]


@dataclass
class DiscoveryData(LabelledData):
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

    @classmethod
    def recognises(cls, folder: Path) -> bool:
        """Whether a folder has a layout of Pascal VOC or COCO."""
        from cribo.data.labelled.detection import has_annotations
        from cribo.data.labelled.voc import is_voc

        return is_voc(folder) or has_annotations(folder)

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
class DiscoverySettings(Settings):
    """Object discovery with LOST and TokenCut on frozen features.

    Attributes:
        methods: lost (Siméoni et al. 2021) or tokencut (Wang et al. 2022), one row of results each.
        features: keys, queries or values of the last attention layer (keys in both papers), or tokens, the features of
            all other protocols. [keys; tokens for networks without attention, or with a linear readout]
        candidates: number of candidate patches for the seed expansion of LOST.
        threshold: minimum cosine of connected patches in TokenCut.
        size: longer side of resized images in pixels. [each image's own size, or the fixed input size of the network]

    Raises:
        InputError: a value is out of range.
    """

    name: ClassVar[str] = "discovery"
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

    methods: tuple[str, ...] = METHODS
    features: Decided[DiscoveryFeatures] = UNDECIDED
    candidates: Annotated[int, at_least(1)] = 100
    threshold: Annotated[float, above(-1) & below(1)] = 0.2
    size: Annotated[int, at_least(1)] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_distinct("methods", self.methods, METHODS)

    @classmethod
    def quick(cls, patch_size: int, image_size: int | None) -> Self:
        """Return the protocol with small images."""
        return cls(size=QUICK_SIDE if image_size is None else None)

    def check_backbone(self, source: BackboneSource) -> None:
        """Raise ConfigError for features of several layers."""
        if source.layers != 1:
            raise ConfigError(f"layers must be 1, the last block, got {source.layers}")
