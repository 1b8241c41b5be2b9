"""Options of `cribo embed`, shared by the command line and Python."""

from dataclasses import dataclass
from typing import Annotated, Literal

from cribo.base.bounds import at_least, between, check_bounds, sorted_blocks
from cribo.base.errors import ConfigError
from cribo.data.config import DEFAULT_READING, Reading
from cribo.features.config import BackboneSource, FeaturePrecision, ObjectOptions
from cribo.features.spread.config import EngineOptions

Kind = Literal["global", "patches", "objects"]
Format = Literal["parquet", "lance", "numpy", "safetensors"]
MapMethod = Literal["pca", "umap"]


@dataclass
class EmbedConfig(ObjectOptions, EngineOptions):
    """Write the features of many images to files.

    Attributes:
        images: a folder of images (read recursively), a text file that lists images, tar shards, a Parquet file or a
            folder of them, or a URL of any of these, such as s3://bucket/photographs.
        column: of a Parquet file, the column of paths or bytes of images. [the only one, or image, bytes, path, ...]
        backbone: the network to use.
        features: global (a vector for each image, by default at the network's own size), patches (one for each patch)
            or objects (one for each cluster of an image's patches, as in cribo index).
        format: parquet, lance, numpy (.npz) or safetensors.
        precision: data type of the written features; float16 takes half the space.
        blocks: numbers, from 1, of the blocks whose features are concatenated, such as 6,8,9,10; not for global. [the
            last block]
        map: also write map.parquet, with two coordinates x and y for each row of the features, to show them as points:
            pca (the first two principal components) or umap (places similar features near each other; requires the
            extra `map`). For existing features, repeat their command with --resume. [no map]
        map_seed: seed of --map umap.
        reading: how the images are read.
        batch_size: number of images of equal size to encode at once. Lower it if the device runs out of memory.
        workers: number of threads that read images. [half of the cores]
        device: such as cuda:0 or cpu. [the first GPU, else the CPU]
    """

    images: str
    backbone: BackboneSource
    column: str | None = None
    features: Kind = "global"
    format: Format = "parquet"
    precision: FeaturePrecision = "float32"
    blocks: tuple[int, ...] | None = None
    map: MapMethod | None = None
    map_seed: Annotated[int, between(0, 2**32 - 1)] = 0
    reading: Reading = DEFAULT_READING
    batch_size: Annotated[int, at_least(1)] = 16
    workers: Annotated[int, at_least(0)] | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        check_bounds(self)
        self.check_engine()
        if self.map is not None and self.part is not None:
            raise ConfigError(
                f"--map needs all images, and --part {self.part} is a share: join the parts with cribo merge, then "
                "repeat this command without --part, with --resume and --out of the merged results"
            )
        if self.blocks is not None:
            self.blocks = sorted_blocks(self.blocks)
            if self.features == "global":
                raise ConfigError("--blocks requires --features patches or objects: global features have one block")
            if self.backbone.layers != 1:
                raise ConfigError(f"--layers {self.backbone.layers} and --blocks exclude each other: omit one of them")
