"""What `cribo segment` can be asked for, typed: the command line and Python share it."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from cribo.arguments import ConfigError
from cribo.retrieval.choices import FeaturePrecision
from cribo.retrieval.source import BackboneSource
from cribo.segmentation.settings import Head, Refine, SegmentationSettings


@dataclass
class SegmentConfig:
    """Segmentation of many images by a few examples.

    Attributes:
        backbone: whose features.
        images: what to label: a folder, a glob in quotes ('frames/**/*.jpg'), a text file that lists images, or one
            image.
        examples: folder of labelled images: a.jpg beside a.png or a_labels.png; or images/a.jpg and labels/a.png; or
            images and a JSON file of COCO's format. Label maps are grey or palette PNGs whose values are class
            indices, 255 for no class.
        labels: where the labels of the examples are, if elsewhere: a folder of label maps, or a JSON file.
        classes: text file with the name of each class; classes.txt beside the examples when not given.
        memory: file that keeps the memory of the examples. Without --examples it is used as it is; with them, those
            that are not in it yet are added.
        size: pixels of the shorter side at which images are encoded: larger is finer, and slower. [the image's own,
            from 384 to 1024]
        scale: enlarge images so many times before they are encoded, in place of size; 1 for their own size.
        window: encode images in square windows of so many pixels, where they are far larger than those that the
            backbone was trained on. [images as a whole]
        stride: pixels between windows. [two thirds of the window]
        precision: in which the memory keeps features: float16 takes half the room. [float16]
        blocks: numbers, from 1, of the blocks whose features are used, such as 6,8,9,10. [chosen by cross-validation]
        whiten: whiten the features partially, with statistics of the examples: true or false. [chosen]
        head: knn (nearest neighbours), ridge (ridge regression) or both (their mean). [chosen]
        neighbours: k, how many nearest patches vote: more of them favour frequent classes. [5]
        temperature: weights of neighbours are the softmax of cosine / temperature; lower values favour the nearest.
            [0.07]
        min_confidence: leave pixels below this confidence (0 to 1) unlabelled (255). [0]
        refine: move the borders of the labels to the edges of the image, with a joint bilateral filter; or none.
            [bilateral]
        reach: radius of that filter, in patches. [1]
        contrast: difference in colour (the sum of three channels, each 0 to 1) from which on an edge counts. [0.1]
        batch_size: images, or windows, encoded at once where they are of one size. Lower it if memory runs out.
        workers: threads that read and write images; when not given, half of the cores.
        device: such as cuda:0 or cpu; a GPU if there is one, when not given.
    """

    backbone: BackboneSource
    images: str
    examples: str | None = None
    labels: str | None = None
    classes: str | None = None
    memory: str | None = None
    size: int | None = None
    scale: float | None = None
    window: int | None = None
    stride: int | None = None
    precision: FeaturePrecision | None = None
    blocks: tuple[int, ...] | None = None
    whiten: bool | None = None
    head: Head | None = None
    neighbours: int | None = None
    temperature: float | None = None
    min_confidence: float | None = None
    refine: Refine | None = None
    reach: float | None = None
    contrast: float | None = None
    batch_size: int = 8
    workers: int | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        if self.examples is None and self.memory is None:
            raise ConfigError("give --examples, a folder of labelled images, or --memory, a file that was made of some")
        if self.examples is None and self.labels is not None:
            raise ConfigError("--labels goes with --examples: it says where their labels are")
        for name, least in (("batch_size", 1), ("workers", 0)):
            if (value := getattr(self, name)) is not None and value < least:
                raise ConfigError(f"{name} must be >= {least}, got {value}")

    @property
    def chosen(self) -> dict[str, Any]:
        """The settings that are not left to their defaults, by name."""
        names = [field.name for field in dataclasses.fields(SegmentationSettings)]
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}
