"""Options of `cribo embed`; the command line and Python share them."""

from dataclasses import dataclass
from typing import Literal

from cribo.arguments import ConfigError
from cribo.method.recipe import Marginals
from cribo.object_search.settings import ObjectSettings
from cribo.retrieval.choices import FeaturePrecision
from cribo.retrieval.source import BackboneSource

Kind = Literal["global", "patches", "objects"]
Format = Literal["parquet", "numpy", "safetensors"]


@dataclass
class EmbedConfig:
    """Features of many images, written to files.

    Attributes:
        images: a folder of images of any depth, or a text file that lists images.
        backbone: whose features.
        features: global (a vector for each image), patches (one for each patch) or objects (one for each cluster of
            an image's patches, as in cribo index).
        format: parquet, numpy (.npz) or safetensors.
        precision: of the written features: float16 takes half the room.
        blocks: numbers, from 1, of the blocks whose features are concatenated, such as 6,8,9,10; not for global. [the
            last block]
        size: shorter side at which an image is encoded, in pixels; 0 for each image's own. [480; for global, the
            network's own]
        num_objects: K, the objects of an image at most.
        marginals: adaptive lets the number and sizes of objects follow the image; uniform makes K of about one size.
        position_weight: weight of nearness against likeness; 0 joins what looks alike wherever it is.
        min_share: objects that cover less of the image are left out.
        batch_size: images of one size that are encoded at once. Lower it if the device runs out of memory.
        workers: threads that read images; when not given, half of the cores.
        device: such as cuda:0 or cpu; a GPU if there is one, when not given.
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
        for name, least in (("batch_size", 1), ("workers", 0), ("size", 0)):
            if (value := getattr(self, name)) is not None and value < least:
                raise ConfigError(f"{name} must be >= {least}, got {value}")
        if self.blocks is not None:
            self.blocks = tuple(sorted(set(self.blocks)))
            if not self.blocks or self.blocks[0] < 1:
                raise ConfigError(f"blocks must be numbers from 1, got {list(self.blocks)}")
            if self.features == "global":
                raise ConfigError("--blocks goes with --features patches or objects: global features have one block")
            if self.backbone.layers != 1:
                raise ConfigError(f"--layers {self.backbone.layers} and --blocks exclude each other: leave one out")

    def settings(self, own_size: int) -> ObjectSettings:
        """How images are resized, and what counts as an object.

        Args:
            own_size: of the network, in pixels.

        Raises:
            ConfigError: a value out of range.
        """
        default = own_size if self.features == "global" else ObjectSettings.size
        return ObjectSettings(
            num_objects=self.num_objects,
            marginals=self.marginals,
            position_weight=self.position_weight,
            min_share=self.min_share,
            size=default if self.size is None else self.size or None,
        )
