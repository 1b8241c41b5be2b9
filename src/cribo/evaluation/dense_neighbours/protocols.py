"""The protocols of dense nearest-neighbour retrieval: every choice that a score depends on, by name."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from cribo.retrieval.choices import FeaturePrecision, Interpolation, PatchLabels, Unlabelled, Vote

Protocol = Literal["paper", "hummingbird"]
ScoreLevel = Literal["patch", "pixel", "resized"]
Search = Literal["exact", "faiss"]

_SIDE = 512  # of the square images of the hummingbird protocol, as it is mostly run


@dataclass(frozen=True, kw_only=True)
class DenseNNSettings:
    """Every choice that the score depends on, beside backbone and data; the defaults are CrIBo's protocol.

    Args:
        protocol: the name of the defaults that these settings began with (`protocol_settings`).
        ratios: share of the memory's images that is used, one row of results each: 8 is one in 8.
        draws: how often images are drawn for a ratio above 1; the score is the mean.
        seed: of all draws.
        neighbours: k, how many nearest patches vote.
        vote: weight of a neighbour: `majority` (all alike), `similarity` (its cosine, next to nothing if negative) or
            `attention` (softmax of cosine / temperature). The paper is silent.
        temperature: of the attention.
        patch_labels: `hard`, the class of most pixels of a patch, or `soft`, the share of each class.
        unlabelled: pixels without class in the memory: `drop` patches where they win the majority, `outvote`
            them by any labelled pixel, have them be a `class` that is never right, or `background`, class 0. The
            paper is silent.
        score: over what IoU is counted: every `patch` by its majority label, every `pixel` of the labels as
            they are on disk, or every pixel of the `resized` labels. The paper is silent.
        size: height and width of all images, multiples of the patch size; None for the closest multiple of the
            patch size for each image.
        interpolation: of images, `bicubic` or `bilinear`. The paper is silent.
        augmentations: how many augmented views of each image make up the memory, 0 for the image as it is.
        memory_patches: bound of the memory, shared out evenly among its views, patches of rare classes first;
            0 for all patches.
        search: `exact`, or `faiss` for an approximate index, whose recall is reported.
        probes: lists of the approximate index that are looked through.
        precision: in which features are kept: `float32`, or `float16` for half the room.

    Raises:
        ValueError: a value out of range.
    """

    protocol: Protocol = "paper"
    ratios: tuple[int, ...] = (1, 8, 64, 128)
    draws: int = 5
    seed: int = 0
    neighbours: int = 50
    vote: Vote = "majority"
    temperature: float = 0.02
    patch_labels: PatchLabels = "hard"
    unlabelled: Unlabelled = "drop"
    score: ScoreLevel = "patch"
    size: tuple[int, int] | None = None
    interpolation: Interpolation = "bicubic"
    augmentations: int = 0
    memory_patches: int = 0
    search: Search = "exact"
    probes: int = 32
    precision: FeaturePrecision = "float32"

    def __post_init__(self) -> None:
        for name, least in (
            *(("draws", 1), ("neighbours", 1), ("probes", 1)),
            *(("augmentations", 0), ("memory_patches", 0)),
        ):
            if (value := getattr(self, name)) < least:
                raise ValueError(f"{name} must be >= {least}, got {value}")
        if not self.ratios or min(self.ratios) < 1 or len(set(self.ratios)) < len(self.ratios):
            raise ValueError(f"ratios must be different numbers >= 1, such as 1,8,64,128, got {self.ratios}")
        if self.temperature <= 0:
            raise ValueError(f"temperature must be > 0, got {self.temperature}")

    def check(self, patch_size: int, classes: Sequence[str]) -> None:
        """See whether the settings fit a backbone and the classes of the data.

        Raises:
            ValueError: a size that is no multiple of the patch size, or `unlabelled="background"` for classes
                that begin with another one.
        """
        if self.size is not None and (self.size[0] % patch_size or self.size[1] % patch_size or min(self.size) < 1):
            raise ValueError(
                f"size must be a multiple of the patch size {patch_size}, got {self.size[0]}x{self.size[1]}"
            )
        if self.unlabelled == "background" and not _has_background(classes):
            raise ValueError(
                f"unlabelled=background needs a background as class 0, which is {classes[0]!r} here: use drop, "
                "outvote or class"
            )

    def used(self) -> dict[str, object]:
        """The settings that have a say, by name; those that others make meaningless are left out."""
        values = dataclasses.asdict(self)
        if self.vote != "attention":
            del values["temperature"]
        if self.search == "exact":
            del values["probes"]
        if max(self.ratios) == 1:
            del values["draws"]
        return values


def protocol_settings(protocol: Protocol, patch_size: int, classes: Sequence[str], **choices: Any) -> DenseNNSettings:
    """The settings of a protocol, except for choices of one's own.

    `paper` is CrIBo's (section 4.1). `hummingbird` is that of Balazevic et al. 2023, as public toolkits run it:
    soft patch labels, attention over 30 neighbours with a temperature of 0.02, one augmented view of each image
    in the memory, all images resized to squares (the greatest multiple of the patch size up to 512 pixels), scored
    over the pixels of the resized labels. Pixels without class are background in the memory where there is a
    background, a class of their own elsewhere.

    Args:
        protocol: its name.
        patch_size: pixels, of the backbone.
        classes: of the data.
        choices: settings by name, in place of the protocol's; None keeps the protocol's.

    Raises:
        ValueError: as `DenseNNSettings` and its `check` do.

    Example:
        >>> protocol_settings("hummingbird", 14, ["road", "sky"], neighbours=20).size
        (504, 504)
    """
    defaults: dict[str, Any] = {}
    if protocol == "hummingbird":
        side = max(1, _SIDE // patch_size) * patch_size
        defaults = {
            "neighbours": 30,
            "vote": "attention",
            "patch_labels": "soft",
            "unlabelled": "background" if _has_background(classes) else "class",
            "score": "resized",
            "size": (side, side),
            "interpolation": "bilinear",
            "augmentations": 1,
        }
    chosen = {name: value for name, value in choices.items() if value is not None}
    settings = DenseNNSettings(protocol=protocol, **{**defaults, **chosen})
    settings.check(patch_size, classes)
    return settings


def _has_background(classes: Sequence[str]) -> bool:
    return classes[0].lower() == "background"
