"""Settings of backbones, objects and probes; does not import torch, so that commands start quickly."""

from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from cribo.base.bounds import above, at_least, below, between, check_bounds, sorted_blocks
from cribo.base.errors import ConfigError, InputError
from cribo.base.redaction import without_secrets
from cribo.method.config import Interpolation, Marginals
from cribo.models.config import Resizing
from cribo.models.hub.download import hub_name

FeaturePrecision = Literal["float32", "float16"]
"""Data type of stored features."""

Vote = Literal["majority", "similarity", "attention"]
PatchLabels = Literal["hard", "soft"]
Unlabelled = Literal["drop", "outvote", "class", "first"]
Head = Literal["knn", "ridge", "both"]

MEAN_COLOUR = "mean-colour"
"""Name of the baseline without a network."""

ENLARGED = 2.0
"""Limit of the factor by which small images are enlarged by default."""

LEAST, LARGEST = 384, 1024
"""Limits of the shorter side in pixels at which images are encoded by default."""


@dataclass
class BackboneSource:
    """Source and options of a backbone.

    Attributes:
        source: a run folder or backbone.safetensors of cribo; a timm name (vit_small_patch16_224.dino); a
            checkpoint of another project (CrOC, DINO, iBOT, MAE, MoCo v3, DINOv2, TimeT, SlotCon, ...); weights on the
            Hugging Face hub (hf://owner/name, hf://owner/name@revision, hf://owner/name/file); or mean-colour,
            a baseline whose features are the mean colours of patches of 16 pixels.
        pretrained: load the weights, for a timm name from timm's cache or the network; false for the same network with
            random weights.
        network: for a checkpoint with two networks, the teacher (momentum network) or the student.
        architecture: timm name of a checkpoint's architecture; required unless it is a ViT, DINOv3 or ResNet, which
            are recognised.
        heads: number of attention heads, if the checkpoint does not store it and heads do not have 64 channels.
        positions: interpolation of the position embedding for other image sizes than in training: `original` for that
            of the project that wrote the checkpoint, `timm` for timm's; or, if the project cannot be recognised,
            bicubic_offset (DINO, iBOT, DINOv2), bicubic (MAE, Hugging Face) or another (docs/checkpoints.md).
        ignore: regular expressions of unknown tensors in a checkpoint to skip.
        trust: run the code in a checkpoint with pickled Python objects. Use only for files from a trusted source.
        layers: number of last blocks whose features are concatenated.
        seed: seed of random weights.
    """

    source: str
    pretrained: bool = True
    network: Literal["teacher", "student"] = "teacher"
    architecture: str | None = None
    heads: int | None = None
    positions: Literal["original", Resizing] = "original"
    ignore: list[str] = field(default_factory=list)
    trust: bool = False
    layers: int = 1
    seed: int = 0


def backbone_name(config: BackboneSource) -> str:
    """Return a short name for tables and folders: of the run, file, timm model or repository; `-random` if untrained.

    Example:
        >>> backbone_name(BackboneSource("runs/camvid/backbone.safetensors"))
        'camvid'
        >>> backbone_name(BackboneSource("vit_small_patch16_224", pretrained=False))
        'vit_small_patch16_224-random'
        >>> backbone_name(BackboneSource("hf://owner/name@v1")), backbone_name(BackboneSource("hf://owner/a/b.pth"))
        ('name', 'b')
    """
    if (hub := hub_name(config.source)) is not None:
        name = hub.short
        return name if config.pretrained else f"{name}-random"
    path = Path(without_secrets(config.source))
    if path.name == "backbone.safetensors":
        path = path.absolute().parent
    name = path.stem if path.is_file() else path.name
    return name if config.pretrained else f"{name}-random"


def portable_source(source: BackboneSource | str) -> BackboneSource:
    """Return a source whose path, if it is one, is absolute, for use in another working folder."""
    config = source if isinstance(source, BackboneSource) else BackboneSource(source)
    path = Path(config.source).expanduser()
    return replace(config, source=str(path.absolute())) if path.exists() else config


@dataclass(kw_only=True)
class ObjectOptions:
    """Options of commands for the settings that define objects.

    Attributes:
        num_objects: K, the maximum number of objects per image. Higher values find smaller objects and split large
            ones. [16]
        marginals: adaptive adapts number and sizes of the objects to the image; uniform gives K objects of about equal
            size. [adaptive]
        position_weight: weight of position relative to similarity; 0 joins similar patches regardless of position.
            [1.0]
        size: shorter side in pixels at which images are encoded; larger sizes find smaller objects and take longer. 0
            for each image's own size. [480]
        min_share: minimum share of the image that an object covers; smaller objects are dropped. [0.005]
    """

    num_objects: Annotated[int, at_least(1)] | None = None
    marginals: Marginals | None = None
    position_weight: Annotated[float, at_least(0)] | None = None
    size: Annotated[int, at_least(0)] | None = None
    min_share: Annotated[float, at_least(0) & below(1)] | None = None

    def settings(self, default: "ObjectSettings") -> "ObjectSettings":
        """Return the settings, with those of `default` for options that are not given."""
        given = {field.name: getattr(self, field.name) for field in fields(ObjectSettings)}
        values = {name: value for name, value in given.items() if value is not None}
        return replace(default, **values | ({"size": None} if self.size == 0 else {}))


@dataclass(frozen=True)
class ObjectSettings:
    """Settings that define objects; all objects of a database share them.

    Attributes:
        num_objects: K, the maximum number of clusters per image. Higher values find smaller objects and split large
            ones.
        marginals: adaptive adapts number and sizes of the objects to the image; uniform gives K objects of about equal
            size.
        position_weight: weight of distance in the image relative to similarity. 0 ignores positions.
        size: shorter side of the encoded image in pixels: larger values find smaller objects and take longer. null for
            each image's own size. Sides are rounded to the patch size, and reduced so that there are at most 4096
            patches.
        min_share: minimum share of the image that an object covers; smaller objects are dropped.

    Raises:
        ConfigError: a value is out of range.
    """

    num_objects: Annotated[int, at_least(1)] = 16
    marginals: Marginals = "adaptive"
    position_weight: Annotated[float, at_least(0)] = 1.0
    size: Annotated[int, at_least(1)] | None = 480
    min_share: Annotated[float, at_least(0) & below(1)] = 0.005

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.marginals not in get_args(Marginals):
            raise ConfigError(f"marginals must be one of {', '.join(get_args(Marginals))}, got {self.marginals!r}")


@dataclass(frozen=True, kw_only=True)
class EncodingSize:
    """Size at which images are encoded.

    Attributes:
        size: shorter side in pixels at which images are encoded, rounded to the patch size; larger sizes show finer
            detail and are slower. [the image's own, clipped to 384-1024, but at most enlarged twice]
        scale: factor by which images are enlarged before encoding, instead of size; 1 for their own size.

    Raises:
        InputError: a value is out of range, or two values exclude each other.
    """

    size: Annotated[int, at_least(1)] | None = None
    scale: Annotated[float, above(0)] | None = None

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.size is not None and self.scale is not None:
            raise InputError(f"size={self.size} and scale={self.scale} exclude each other: omit one of them")

    def factor(self, height: int, width: int) -> float:
        """Return the factor by which an image is resized before encoding."""
        shorter = min(height, width)
        if self.size is not None:
            return self.size / shorter
        if self.scale is not None:
            return self.scale
        return min(ENLARGED, max(1.0, LEAST / shorter), LARGEST / shorter)

    def patch_area(self, patch_size: int, height: int, width: int) -> float:
        """Return the number of pixels of an image that a patch covers.

        Args:
            patch_size: side of a patch in pixels of the encoded image.
            height: height of the image in pixels.
            width: its width.
        """
        return (patch_size / self.factor(height, width)) ** 2


@dataclass(frozen=True, kw_only=True)
class ProbeSettings(EncodingSize):
    """Settings for encoding images, and for choosing a probe.

    Attributes:
        window: side in pixels of the square windows in which images are encoded, for images far larger than those of
            the backbone's training; features are averaged where windows overlap. [images are encoded as a whole]
        stride: distance between windows in pixels. [two thirds of the window]
        precision: data type of the features in the memory; float16 takes half the space.
        blocks: numbers, from 1, of the blocks whose features are used, such as 6,8,9,10. [chosen by cross-validation]
        whiten: whiten the features partially, with statistics of the examples: true or false. [chosen]
        head: knn (nearest neighbours), ridge (ridge regression) or both (their mean). [chosen]
        penalty: penalty of the ridge regression; larger values suit few or noisy labels. [chosen]
        prior: exponent of the classes' frequency in the examples: 1 if classes are as frequent in other images, 0 to
            label as if all classes were equally likely, which finds more of rare classes and more in wrong places.
            [chosen]
        neighbours: k, the number of nearest patches that vote; larger values favour frequent classes.
        temperature: weights of neighbours are the softmax of cosine / temperature; lower values favour the nearest.

    Raises:
        ValueError: a value is out of range, or two values exclude each other.
    """

    window: Annotated[int, at_least(1)] | None = None
    stride: Annotated[int, at_least(1)] | None = None
    precision: FeaturePrecision = "float16"
    blocks: tuple[int, ...] | None = None
    whiten: bool | None = None
    head: Head | None = None
    penalty: Annotated[float, above(0)] | None = None
    prior: Annotated[float, between(0, 1)] | None = None
    neighbours: Annotated[int, at_least(1)] = 5
    temperature: Annotated[float, above(0)] = 0.07

    def __post_init__(self) -> None:
        if self.blocks is not None:
            object.__setattr__(self, "blocks", sorted_blocks(self.blocks))
        super().__post_init__()
        if self.stride is not None and (self.window is None or self.stride > self.window):
            raise InputError(
                f"stride must be at most the window, got {self.stride} with a window of {self.window}: a larger stride "
                "leaves gaps"
            )

    @property
    def of_choice(self) -> tuple[Any, ...]:
        """The settings that influence the choice of a probe."""
        return *self.probe.values(), self.neighbours, self.temperature

    @property
    def probe(self) -> dict[str, Any]:
        """The values of a probe by name; those that are None are chosen."""
        return {name: getattr(self, name) for name in ("blocks", "whiten", "head", "penalty", "prior")}

    @property
    def voting(self) -> dict[str, Any]:
        """Keyword arguments of the vote of the nearest neighbours."""
        return {"neighbours": self.neighbours, "temperature": self.temperature}

    def check(self, patch_size: int) -> None:
        """Check that windows align with the patches of a backbone.

        Raises:
            ValueError: window or stride is not a positive multiple of the patch size.
        """
        for name in ("window", "stride"):
            value = getattr(self, name)
            if value is not None and (value < patch_size or value % patch_size):
                below, above = value // patch_size * patch_size, (value // patch_size + 1) * patch_size
                raise InputError(
                    f"{name} must be a multiple of the backbone's patch size {patch_size}, got {value}: use "
                    f"{f'{below} or {above}' if below else above}"
                )

    def steps(self, patch_size: int) -> tuple[int, int] | None:
        """Return side and stride of windows in patches; None without windows."""
        if self.window is None:
            return None
        side = self.window // patch_size
        return side, self.stride // patch_size if self.stride is not None else max(1, side * 2 // 3)


@dataclass(frozen=True, kw_only=True)
class PropagationSettings:
    """Settings for propagating labels between the frames of a video; the defaults are those of DINO.

    Attributes:
        neighbours: k, number of most similar patches whose labels are averaged.
        radius: search radius in patches, in both directions.
        previous: number of previous frames to search, in addition to the labelled one.
        temperature: temperature of the weights exp(cosine / temperature).
        side: shorter side of resized frames in pixels, rounded down to a multiple of the patch size; the longer side is
            rounded down to a multiple of 64 pixels, or of the patch size if it does not divide 64.
        interpolation: interpolation of resized frames.

    Raises:
        InputError: a value is out of range.
    """

    neighbours: Annotated[int, at_least(1)] = 5
    radius: Annotated[int, at_least(1)] = 12
    previous: Annotated[int, at_least(0)] = 7
    temperature: Annotated[float, above(0)] = 0.1
    side: Annotated[int, at_least(1)] = 480
    interpolation: Interpolation = "bilinear"

    def __post_init__(self) -> None:
        check_bounds(self)


@dataclass(frozen=True, kw_only=True)
class AnomalySettings(EncodingSize):
    """Settings for finding anomalies by their distance to normal images.

    Attributes:
        blocks: numbers, from 1, of the blocks whose features are used, such as 6,8,9,10. [four middle ones of a
            transformer]

    Raises:
        InputError: a value is out of range, or two values exclude each other.
    """

    blocks: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.blocks is not None:
            object.__setattr__(self, "blocks", sorted_blocks(self.blocks))
        super().__post_init__()
