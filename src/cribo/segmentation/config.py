"""Options of `cribo segment`, shared by the command line and Python."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from cribo.arguments import ConfigError
from cribo.checks import require_least
from cribo.retrieval.choices import FeaturePrecision
from cribo.retrieval.source import BackboneSource
from cribo.segmentation.settings import Head, Refine, SegmentationSettings


@dataclass
class SegmentConfig:
    """Segment many images given a few labelled examples.

    Attributes:
        backbone: the network to use.
        images: images to label: a folder, a glob in quotes ('frames/**/*.jpg'), a text file that lists images, or one
            image.
        examples: folder of labelled images: a.jpg next to a.png or a_labels.png; or images/a.jpg and labels/a.png; or
            images and a JSON file in COCO format. Label maps are grey or palette PNGs whose values are class indices,
            255 for no class.
        labels: labels of the examples, if they are elsewhere: a folder of label maps, or a JSON file.
        classes: text file with the name of each class. [classes.txt in the folder of the examples, if it exists]
        memory: file of the memory of the examples. Without --examples it is used unchanged; otherwise new examples
            are added.
        size: shorter side in pixels at which images are encoded; larger sizes give finer labels and are slower. [the
            image's own, clipped to 384-1024]
        scale: factor by which images are enlarged before encoding, instead of size; 1 for their own size.
        window: side in pixels of the square windows in which images are encoded, for images far larger than those of
            the backbone's training. [images are encoded as a whole]
        stride: distance between windows in pixels. [two thirds of the window]
        precision: data type of the features in the memory; float16 takes half the space. [float16]
        blocks: numbers, from 1, of the blocks whose features are used, such as 6,8,9,10. [chosen by cross-validation]
        whiten: whiten the features partially, with statistics of the examples: true or false. [chosen]
        head: knn (nearest neighbours), ridge (ridge regression) or both (their mean). [chosen]
        neighbours: k, the number of nearest patches that vote; larger values favour frequent classes. [5]
        temperature: weights of neighbours are the softmax of cosine / temperature; lower values favour the nearest.
            [0.07]
        min_confidence: leave pixels below this confidence (0 to 1) unlabelled (255). [0]
        refine: align the borders of the labels with the edges of the image by a joint bilateral filter; or none.
            [bilateral]
        reach: radius of the filter, in patches. [1]
        contrast: difference in colour (sum over three channels, each 0 to 1) that counts as an edge. [0.1]
        batch_size: number of images or windows of equal size to encode at once. Lower it if the device runs out of
            memory.
        workers: number of threads that read and write images. [half of the cores]
        device: such as cuda:0 or cpu. [the first GPU, else the CPU]
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
            raise ConfigError("give --examples, a folder of labelled images, or --memory, an existing memory file")
        if self.examples is None and self.labels is not None:
            raise ConfigError("--labels requires --examples, the folder of the labelled images")
        require_least(self, {"batch_size": 1, "workers": 0})

    @property
    def chosen(self) -> dict[str, Any]:
        """Settings that are given, by name."""
        names = [field.name for field in dataclasses.fields(SegmentationSettings)]
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}
