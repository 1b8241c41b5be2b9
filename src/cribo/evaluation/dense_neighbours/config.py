"""Settings and variants of dense nearest-neighbour retrieval. This module does not import torch."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from cribo.base.bounds import above, at_least, require_distinct_numbers
from cribo.base.packages import require_packages
from cribo.data.labelled.sets import SEGMENTATION_SETS
from cribo.evaluation.config import QUICK_SIDE, UNDECIDED, Decided, Settings, Side, require_whole_patches, square
from cribo.features.config import FeaturePrecision, PatchLabels, Unlabelled, Vote
from cribo.method.config import Interpolation

Variant = Literal["cribo", "hummingbird", "hummingbird-strict", "dip", "franca"]
ScoreLevel = Literal["patch", "pixel", "resized"]
Mean = Literal["present", "matched"]
Search = Literal["exact", "faiss"]


@dataclass(frozen=True, kw_only=True)
class DenseNNSettings(Settings):
    """Dense nearest-neighbour retrieval (CrIBo, section 4.1; Balazevic et al. 2023).

    Attributes:
        variant: implementation to follow: cribo (CrIBo, section 4.1), hummingbird (the public toolkit for Balazevic et
            al. 2023), hummingbird-strict (the same, but unlabelled pixels are never a class of the data set, and the
            mean is over the classes that occur), dip or franca (with the changes of these papers). It sets the
            defaults in [brackets] below, where hummingbird stands for all variants except cribo.
        ratios: fractions of the memory's images, one row of results each: 1,8,64,128 for all images, 1/8, ...
        draws: number of random draws of images per ratio; the score is the mean.
        lists: folder with lists of the images of each ratio, instead of random draws: 1_div_<ratio>/*.txt, one name
            per line, as in file_sets of the toolkit.
        seed: seed of the draws and the augmentations.
        neighbours: k, the number of nearest patches that vote. [50, hummingbird: 30]
        vote: weight of a neighbour: majority (equal weights), similarity (its cosine) or attention (softmax of
            cosine / temperature). Not specified in the paper. [majority, hummingbird: attention]
        temperature: temperature of the attention. [0.02, dip: 0.07]
        patch_labels: hard (most frequent class of a patch) or soft (fraction of each class). [hard, hummingbird: soft]
        unlabelled: handling of unlabelled pixels in the memory: drop patches in which they are most frequent, outvote
            them by any labelled pixel, treat them as a class that is never correct (class), or as the first class
            (first). Not specified in the paper. [drop, hummingbird: first, of ADE20K class; hummingbird-strict: first
            if that is background, else class]
        score: unit of the score: patch (each patch counts, with the class of most of its pixels), pixel (each pixel of
            the labels on disk) or resized (each pixel of the resized labels). Not specified in the paper. [patch,
            hummingbird: resized]
        mean: mean IoU over the classes that occur (present), or over all classes after Hungarian matching of predicted
            with true classes, with 0 for absent classes (matched). [present, hummingbird and franca: matched]
        size: height,width of all images, or a single number for squares. [each image's own, rounded to the patch size;
            hummingbird: square, 512, franca 518, or the multiple of the patch size below]
        interpolation: interpolation of resized images. Not specified in the paper. [bicubic, hummingbird: bilinear]
        augmentations: number of augmented views per image in the memory; 0 for the image itself. [0, hummingbird: 2]
        memory_patches: maximum number of patches in the memory, patches of rare classes first; 0 for no limit. [0,
            hummingbird: 10240000, franca: 0]
        search: exact, or faiss for an approximate index, whose recall is printed.
        probes: number of lists searched by the approximate index, of about the square root of the number of patches in
            the memory; more lists increase recall and time.
        precision: precision of the stored features; float16 halves their size.

    Raises:
        ValueError: a value is out of range.
    """

    name: ClassVar[str] = "dense-nn"
    title: ClassVar[str] = "Dense nearest-neighbour retrieval"
    metrics: ClassVar[tuple[str, ...]] = ("miou",)
    varies: ClassVar[str] = "ratio"
    roles: ClassVar[Mapping[str, str]] = {
        "train": "memory",
        "val": "queries",
        "train_images": "memory_images",
        "val_images": "query_images",
    }
    aliases: ClassVar[Mapping[str, str]] = {"--data.memory": "--data.train", "--data.queries": "--data.val"}
    description: ClassVar[str] = """\
Dense nearest-neighbour retrieval: each patch of a validation image is labelled by the most similar patches of the
labelled training images, and the predictions are scored (mIoU). Nothing is trained.

  cribo evaluate dense-nn --backbone runs/camvid --data CAMVID
  cribo evaluate dense-nn --backbone checkpoint.pth --data VOCdevkit/VOC2012
  cribo evaluate dense-nn --backbone vit_small_patch16_224.dino --data MINE

--variant hummingbird follows the public toolkit for "Towards in-context scene understanding". Features are cached on
disk and reused by further evaluations of the same backbone and images. For a quick trial:
--data.limit 50 --ratios 1
"""

    variant: Variant = "cribo"
    ratios: tuple[Annotated[int, at_least(1)], ...] = (1, 8, 64, 128)
    draws: Annotated[int, at_least(1)] = 5
    lists: str | None = None
    seed: int = 0
    neighbours: Decided[Annotated[int, at_least(1)]] = UNDECIDED
    vote: Decided[Vote] = UNDECIDED
    temperature: Decided[Annotated[float, above(0)]] = UNDECIDED
    patch_labels: Decided[PatchLabels] = UNDECIDED
    unlabelled: Decided[Unlabelled] = UNDECIDED
    score: Decided[ScoreLevel] = UNDECIDED
    mean: Decided[Mean] = UNDECIDED
    size: tuple[Side, Side] | None = None
    interpolation: Decided[Interpolation] = UNDECIDED
    augmentations: Decided[Annotated[int, at_least(0)]] = UNDECIDED
    memory_patches: Decided[Annotated[int, at_least(0)]] = UNDECIDED
    search: Search = "exact"
    probes: Annotated[int, at_least(1)] = 8
    precision: FeaturePrecision = "float32"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_distinct_numbers("ratios", self.ratios, "1,8,64,128")

    def for_data(self, patch_size: int, classes: Sequence[str]) -> Self:
        """Return a copy with all settings set, with the defaults of the variant.

        Args:
            patch_size: patch size of the backbone in pixels.
            classes: classes of the data.

        Raises:
            ValueError: the size is not a multiple of the patch size.

        Example:
            >>> DenseNNSettings(variant="hummingbird", neighbours=20).for_data(14, ["road", "sky"]).size
            (504, 504)
        """
        settings = self.decided(_defaults(self.variant, patch_size, classes))
        if settings.size is not None:
            require_whole_patches(settings.size, patch_size)
        return settings

    def effective(self) -> dict[str, Any]:
        """Return the settings by name, without those that have no effect."""
        values = dataclasses.asdict(self)
        unused = {
            "temperature": self.vote != "attention",
            "probes": self.search == "exact",
            "draws": max(self.ratios) == 1 or self.lists is not None,
            "lists": max(self.ratios) == 1 or self.lists is None,
        }
        return {name: value for name, value in values.items() if not unused.get(name)}

    @classmethod
    def quick(cls, patch_size: int, image_size: int | None) -> Self:
        """Return the protocol with the full memory and small images."""
        return cls(ratios=(1,), size=square(image_size or QUICK_SIDE, patch_size))

    def check_packages(self) -> None:
        """Check that faiss is installed if it searches."""
        if self.search == "faiss":
            require_packages("--search faiss", "faiss", extra="search", otherwise=", or use --search exact")


def _defaults(variant: Variant, patch_size: int, classes: Sequence[str]) -> dict[str, Any]:
    """Return the default settings of a variant."""
    if variant == "cribo":  # section 4.1, and our choices where it specifies none
        return {
            "neighbours": 50,
            "vote": "majority",
            "temperature": 0.02,
            "patch_labels": "hard",
            "unlabelled": "drop",
            "score": "patch",
            "mean": "present",
            "interpolation": "bicubic",
            "augmentations": 0,
            "memory_patches": 0,
        }
    strict = {  # Balazevic et al. 2023, with only the data set's classes in labels and mean
        "neighbours": 30,
        "vote": "attention",
        "temperature": 0.02,
        "patch_labels": "soft",
        "unlabelled": "first" if classes[0].lower() == "background" else "class",
        "score": "resized",
        "mean": "present",
        "size": square(512, patch_size),
        "interpolation": "bilinear",
        "augmentations": 2,
        "memory_patches": 10_240_000,
    }
    # In the public toolkit, unlabelled pixels are 0: no class in ADE20K, else the first.
    is_ade20k = list(classes) == SEGMENTATION_SETS["ade20k"].classes
    toolkit = {**strict, "unlabelled": "class" if is_ade20k else "first", "mean": "matched"}
    return {
        "hummingbird-strict": strict,
        "hummingbird": toolkit,
        # DIP's copy of the toolkit has no matching of predictions and absent classes.
        "dip": {**toolkit, "temperature": 0.07, "mean": "present"},
        # Franca's appendix C: 518-pixel images and unbounded memory.
        "franca": {**toolkit, "size": square(518, patch_size), "memory_patches": 0},
    }[variant]
