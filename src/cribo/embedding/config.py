"""Options of `cribo embed`, shared by the command line and Python."""

from dataclasses import dataclass
from typing import Literal

from cribo.arguments import ConfigError
from cribo.checks import require_least, sorted_blocks
from cribo.method.recipe import Marginals
from cribo.object_search.settings import ObjectSettings
from cribo.retrieval.choices import FeaturePrecision
from cribo.retrieval.source import BackboneSource

Kind = Literal["global", "patches", "objects"]
Format = Literal["parquet", "numpy", "safetensors"]


@dataclass
class EmbedConfig:
    """Write the features of many images to files.

    Attributes:
        images: a folder of images (read recursively), or a text file that lists images.
        backbone: the network to use.
        features: global (a vector for each image), patches (one for each patch) or objects (one for each cluster of
            an image's patches, as in cribo index).
        format: parquet, numpy (.npz) or safetensors.
        precision: data type of the written features; float16 takes half the space.
        blocks: numbers, from 1, of the blocks whose features are concatenated, such as 6,8,9,10; not for global. [the
            last block]
        size: shorter side in pixels at which images are encoded; 0 for each image's own size. [480; for global, the
            network's own]
        num_objects: K, the maximum number of objects per image.
        marginals: adaptive adapts number and sizes of the objects to the image; uniform gives K objects of about equal
            size.
        position_weight: weight of position relative to similarity; 0 joins similar patches regardless of position.
        min_share: minimum share of the image that an object covers; smaller objects are dropped.
        batch_size: number of images of equal size to encode at once. Lower it if the device runs out of memory.
        workers: number of threads that read images. [half of the cores]
        device: such as cuda:0 or cpu. [the first GPU, else the CPU]
    """

    images: str
    backbone: BackboneSource
    features: Kind = "global"
    format: Format = "parquet"
    precision: FeaturePrecision = "float32"
    blocks: tuple[int, ...] | None = None
    size: int | None = None
    num_objects: int = 16
    marginals: Marginals = "adaptive"
    position_weight: float = 1.0
    min_share: float = 0.005
    batch_size: int = 16
    workers: int | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        require_least(self, {"batch_size": 1, "workers": 0, "size": 0})
        if self.blocks is not None:
            self.blocks = sorted_blocks(self.blocks)
            if self.features == "global":
                raise ConfigError("--blocks requires --features patches or objects: global features have one block")
            if self.backbone.layers != 1:
                raise ConfigError(f"--layers {self.backbone.layers} and --blocks exclude each other: omit one of them")

    def settings(self, own_size: int) -> ObjectSettings:
        """Return the settings that define the size of images and their objects.

        Args:
            own_size: image size of the network in pixels.

        Raises:
            ConfigError: a value is out of range.
        """
        default = own_size if self.features == "global" else ObjectSettings.size
        return ObjectSettings(
            num_objects=self.num_objects,
            marginals=self.marginals,
            position_weight=self.position_weight,
            min_share=self.min_share,
            size=default if self.size is None else self.size or None,
        )
