"""Options of `cribo segment`, shared by the command line and Python."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from cribo.base.bounds import at_least, check_bounds
from cribo.base.errors import ConfigError
from cribo.data.config import DEFAULT_READING, MAX_PIXELS, LabelFormatName, Reading
from cribo.features.config import BackboneSource
from cribo.features.spread.config import EngineOptions


@dataclass
class SegmentConfig(EngineOptions):
    """Segment many images given a few labelled examples.

    Attributes:
        backbone: the network to use.
        images: images to label: a folder, a glob in quotes ('frames/**/*.jpg'), one image, a text file that lists
            images, tar shards, a Parquet file or a folder of them, or a URL of any of these.
        column: of a Parquet file, the column of paths or bytes of images. [the only one, or image, bytes, path, ...]
        examples: folder of labelled images: a.jpg next to a.png or a_labels.png; or images/a.jpg and labels/a.png; or
            images and the labels of another tool (COCO, YOLO, CVAT, Label Studio, LabelMe, GeoJSON). Label maps are
            PNGs of class indices, 255 for no class; or only of 0 and 255 (background and foreground); or of the colours
            that `classes` lists.
        labels: labels of the examples, if they are elsewhere: a folder of label maps, or a file or folder of another
            tool.
        format: format of the labels. [recognised by the content of the files]
        classes: text file with the name of each class, and its colour (#rrggbb or r g b) for coloured label maps; or a
            YAML file that merges, renames or ignores classes: `car: vehicle`, `sky: null`. [classes.txt in the folder
            of the examples, if it exists]
        memory: file of the memory of the examples. Without --examples it is used unchanged; otherwise new examples
            are added.
        instances: classes whose regions are split into instances where they touch, such as cell,nucleus; counts and
            areas are in summary.csv and instances.csv.
        min_area: leave out smaller instances, in pixels. [the area of a patch]
        settings: fields of `SegmentationSettings` by name; others are those of the memory file, or the defaults.
        max_pixels: larger images count as unreadable, since a small file can expand to more pixels than fit into
            memory. Raise it for larger images.
        batch_size: number of images or windows of equal size to encode at once. Lower it if the device runs out of
            memory.
        workers: number of threads that read and write images. [half of the cores]
        device: such as cuda:0 or cpu. [the first GPU, else the CPU]
    """

    backbone: BackboneSource
    images: str
    column: str | None = None
    examples: str | None = None
    labels: str | None = None
    format: LabelFormatName | None = None
    classes: str | None = None
    memory: str | None = None
    instances: tuple[str, ...] = ()
    min_area: Annotated[int, at_least(1)] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    max_pixels: Annotated[int, at_least(4)] = MAX_PIXELS
    batch_size: Annotated[int, at_least(1)] = 8
    workers: Annotated[int, at_least(0)] | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        if self.examples is None and self.memory is None:
            raise ConfigError("give --examples, a folder of labelled images, or --memory, an existing memory file")
        if self.examples is None and self.labels is not None:
            raise ConfigError("--labels requires --examples, the folder of the labelled images")
        if self.min_area is not None and not self.instances:
            raise ConfigError("--min_area requires --instances, the classes to split into instances")
        check_bounds(self)
        self.check_engine()


@dataclass
class VideoConfig:
    """Label all frames of videos given some labelled frames.

    Attributes:
        backbone: the network to use.
        images: a folder or glob of numbered frames, with a folder for each video; or a video file, or a folder of video
            files (extra video). Frames of a video have names that differ in their last number only.
        examples: folder of labelled frames, with the names of the frames: 000123.jpg with 000123.png, or labels of
            another tool. Each video needs one; a second one at its end helps most.
        labels: labels of the examples, if they are elsewhere. Without --examples, a folder of label maps with the
            names of the frames: 000123.png for frame 000123.jpg, or for frame 123 of a video file, from 0.
        format: format of the labels. [recognised by the content of the files]
        classes: text file with the name of each class, or a YAML file that merges, renames or ignores classes.
            [classes.txt in the folder of the examples, if it exists]
        reading: how frames are read.
        batch_size: number of frames to encode at once. Lower it if the device runs out of memory.
        workers: number of threads that read and write images. [half of the cores]
        device: such as cuda:0 or cpu. [the first GPU, else the CPU]
    """

    backbone: BackboneSource
    images: str
    examples: str | None = None
    labels: str | None = None
    format: LabelFormatName | None = None
    classes: str | None = None
    reading: Reading = DEFAULT_READING
    batch_size: Annotated[int, at_least(1)] = 8
    workers: Annotated[int, at_least(0)] | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        if self.examples is None and self.labels is None:
            raise ConfigError(
                "give --examples, a folder of labelled frames, or --labels, a folder of label maps with their names"
            )
        check_bounds(self)


@dataclass
class SegmenterConfig:
    """Label images by a network that `cribo evaluate segmenter` trained.

    Attributes:
        segmenter: folder of the evaluation, or its segmenter.safetensors.
        images: images to label: a folder, a glob in quotes ('frames/**/*.jpg'), one image, a text file that lists
            images, tar shards, a Parquet file or a folder of them, or a URL of any of these.
        column: of a Parquet file, the column of paths or bytes of images. [the only one, or image, bytes, path, ...]
        reading: how images are read.
        trust: import the custom network that the file names. Use only for files from a trusted source.
        workers: number of threads that read and write images. [half of the cores]
        device: such as cuda:0 or cpu. [the first GPU, else the CPU]
    """

    segmenter: str
    images: str
    column: str | None = None
    reading: Reading = DEFAULT_READING
    trust: bool = False
    workers: Annotated[int, at_least(0)] | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        check_bounds(self)


@dataclass
class AnomalyConfig:
    """Find images that differ from normal ones, and where.

    Attributes:
        backbone: the network to use.
        images: images to score: a folder, a glob in quotes ('parts/**/*.jpg'), one image, a text file that lists
            images, tar shards, or a Parquet file or a folder of them.
        examples: normal images, without labels: a folder, a glob in quotes, or a list; all images in it are normal.
        reading: how images are read.
        batch_size: number of images to encode at once. Lower it if the device runs out of memory.
        workers: number of threads that read images. [half of the cores]
        device: such as cuda:0 or cpu. [the first GPU, else the CPU]
    """

    backbone: BackboneSource
    images: str
    examples: str
    reading: Reading = DEFAULT_READING
    batch_size: Annotated[int, at_least(1)] = 8
    workers: Annotated[int, at_least(0)] | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        check_bounds(self)
