"""Dense nearest-neighbour retrieval as a protocol: its settings, its variants, and what it returns."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from cribo.data.sets import SEGMENTATION_SETS
from cribo.errors import InputError
from cribo.evaluation.protocol import (
    QUICK_SIDE,
    UNDECIDED,
    Decided,
    Outcome,
    Protocol,
    require_packages,
    require_whole_patches,
    square,
)
from cribo.evaluation.runtime import require_least
from cribo.retrieval.choices import FeaturePrecision, Interpolation, PatchLabels, Unlabelled, Vote

if TYPE_CHECKING:
    from cribo.evaluation.runner import Run

Variant = Literal["cribo", "hummingbird", "hummingbird-strict", "dip", "franca"]
ScoreLevel = Literal["patch", "pixel", "resized"]
Mean = Literal["present", "matched"]
Search = Literal["exact", "faiss"]


@dataclass(frozen=True, kw_only=True)
class DenseNN(Protocol):
    """Dense nearest-neighbour retrieval (CrIBo, section 4.1; Balazevic et al. 2023).

    Attributes:
        variant: the rules to follow: cribo (CrIBo, section 4.1), hummingbird (the public toolkit for Balazevic et al.
            2023), hummingbird-strict (the same, but pixels without class are never a class of the set, and the mean is
            over the classes that occur), dip or franca (with the changes of these papers). It sets the defaults of the
            following, see [brackets], in which hummingbird stands for all but cribo.
        ratios: share of the memory's images, a row of results each: 1,8,64,128 for all, one in 8, ...
        draws: how often the images of a share are drawn; the score is the mean.
        lists: folder with the images of each share, in place of draws: 1_div_<ratio>/*.txt, one name per line, as in
            file_sets of the toolkit.
        seed: of the draws and the augmentations.
        neighbours: k, the number of nearest patches that vote. [50, hummingbird: 30]
        vote: weight of a neighbour: majority (all equal), similarity (its cosine) or attention (softmax of
            cosine / temperature). The paper is silent. [majority, hummingbird: attention]
        temperature: of the attention. [0.02, dip: 0.07]
        patch_labels: hard, the class of most pixels of a patch, or soft, the share of each. [hard, hummingbird: soft]
        unlabelled: pixels without class in the memory: drop patches in which they are most frequent, outvote them by
            any labelled pixel, treat them as a class that is never correct, or as the first class. The paper is silent.
            [drop, hummingbird: first, of ADE20K class; hummingbird-strict: first if that is background, else class]
        score: what is counted: every patch, by the class of most of its pixels, every pixel of the labels on disk,
            or every pixel of the resized labels. The paper is silent. [patch, hummingbird: resized]
        mean: of the IoU over the classes that occur (present), or over all, with 0 for a class that does not occur,
            after predicted classes are matched one to one to true ones for the highest mean. [present, hummingbird and
            franca: matched]
        size: height,width of all images, or one number for a square. [each image's own, rounded to the patch size;
            hummingbird: square, 512, franca 518, or the multiple of the patch size below]
        interpolation: of images. The paper is silent. [bicubic, hummingbird: bilinear]
        augmentations: augmented views of each image in the memory, 0 for the image itself. [0, hummingbird: 2]
        memory_patches: bound of the memory, patches of rare classes first; 0 for none. [0, hummingbird: 10240000,
            franca: 0]
        search: exact, or faiss for an approximate index (its recall is printed).
        probes: lists that the approximate index looks through: more are slower and find more.
        precision: of the stored features: float16 takes half the space.

    Raises:
        ValueError: a value out of range.
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
Dense nearest-neighbour retrieval: every patch of a new image takes its label from the most similar patches of
labelled images, and the labels are scored (mIoU). Nothing is trained.

  cribo evaluate dense-nn --backbone runs/camvid --data camvid --data.root CAMVID
  cribo evaluate dense-nn --backbone checkpoint.pth --data voc --data.root VOCdevkit/VOC2012
  cribo evaluate dense-nn --backbone vit_small_patch16_224.dino --data folder --data.root MINE

--variant hummingbird follows the public toolkit for "Towards in-context scene understanding". Features are cached
on disk: the next evaluation of the same backbone and images starts with the search. For a first try:
--data.limit 50 --ratios 1
"""

    variant: Variant = "cribo"
    ratios: tuple[int, ...] = (1, 8, 64, 128)
    draws: int = 5
    lists: str | None = None
    seed: int = 0
    neighbours: Decided[int] = UNDECIDED
    vote: Decided[Vote] = UNDECIDED
    temperature: Decided[float] = UNDECIDED
    patch_labels: Decided[PatchLabels] = UNDECIDED
    unlabelled: Decided[Unlabelled] = UNDECIDED
    score: Decided[ScoreLevel] = UNDECIDED
    mean: Decided[Mean] = UNDECIDED
    size: tuple[int, int] | None = None
    interpolation: Decided[Interpolation] = UNDECIDED
    augmentations: Decided[int] = UNDECIDED
    memory_patches: Decided[int] = UNDECIDED
    search: Search = "exact"
    probes: int = 32
    precision: FeaturePrecision = "float32"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_least(self, {"draws": 1, "neighbours": 1, "probes": 1, "augmentations": 0, "memory_patches": 0})
        if not self.ratios or min(self.ratios) < 1 or len(set(self.ratios)) < len(self.ratios):
            raise InputError(f"ratios must be different numbers >= 1, such as 1,8,64,128, got {self.ratios}")
        if self.is_decided("temperature") and self.temperature <= 0:
            raise InputError(f"temperature must be > 0, got {self.temperature}")

    def for_data(self, patch_size: int, classes: Sequence[str]) -> Self:
        """Return a copy in which the variant has decided all settings.

        Args:
            patch_size: of the backbone, in pixels.
            classes: of the data.

        Raises:
            ValueError: a size that is not a multiple of the patch size.
            ImportError: predictions are to be matched to classes, and scipy is not installed.

        Example:
            >>> DenseNN(variant="hummingbird", neighbours=20).for_data(14, ["road", "sky"]).size
            (504, 504)
        """
        settings = self.decided(_VARIANTS[self.variant](patch_size, classes))
        if settings.size is not None:
            require_whole_patches(settings.size, patch_size)
        if settings.mean == "matched":
            require_packages("mean=matched", "scipy", otherwise=", or choose mean=present")
        return settings

    @classmethod
    def quick(cls, patch_size: int, image_size: int | None) -> Self:
        """Return the protocol with the whole memory and small images."""
        return cls(ratios=(1,), size=square(image_size or QUICK_SIDE, patch_size))

    def effective(self) -> dict[str, Any]:
        """Return the settings by name, without those that others make meaningless."""
        values = dataclasses.asdict(self)
        unused = {
            "temperature": self.vote != "attention",
            "probes": self.search == "exact",
            "draws": max(self.ratios) == 1 or self.lists is not None,
            "lists": max(self.ratios) == 1 or self.lists is None,
        }
        return {name: value for name, value in values.items() if not unused.get(name)}

    def prepare(self, run: "Run") -> Self:
        """Decide all settings."""
        return self.for_data(run.backbone.patch_size, run.data.train.classes)

    def used(self, run: "Run") -> dict[str, Any]:
        """Return the settings, with the layers that give features."""
        return {**self.effective(), "layers": run.source.layers}

    def measure(self, run: "Run") -> Outcome:
        """Label the patches of val by those of train."""
        from cribo.console import Phases
        from cribo.evaluation.dense_neighbours.retrieval import dense_nn, panels, row

        encoder = run.encoder
        train, val = run.data.train, run.data.val
        with Phases(run.console) as progress:
            found = dense_nn(
                encoder,
                train,
                val,
                self,
                machine=run.machine(encoder),
                pictures=run.num_pictures,
                progress=progress,
            )
        return Outcome(
            rows=[row(score, train.classes) for score in found.scores],
            classes=train.classes,
            panels=panels(found, val),
            palette=val.palette,
            data={"memory_patches": found.memory_patches, "query_patches": found.query_patches},
        )


def _cribo(patch_size: int, classes: Sequence[str]) -> dict[str, Any]:
    """CrIBo, section 4.1; what it does not mention is chosen here."""
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


def _hummingbird_strict(patch_size: int, classes: Sequence[str]) -> dict[str, Any]:
    """Balazevic et al. 2023, with only the classes of the data set in labels and mean."""
    return {
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


def _hummingbird(patch_size: int, classes: Sequence[str]) -> dict[str, Any]:
    """The public toolkit, which labels pixels without class 0: of ADE20K that is no class, of others the first one."""
    is_ade20k = list(classes) == SEGMENTATION_SETS["ade20k"].classes
    return {
        **_hummingbird_strict(patch_size, classes),
        "unlabelled": "class" if is_ade20k else "first",
        "mean": "matched",
    }


def _dip(patch_size: int, classes: Sequence[str]) -> dict[str, Any]:
    """Its authors' copy of the toolkit, which neither matches predictions nor counts classes that do not occur."""
    return {**_hummingbird(patch_size, classes), "temperature": 0.07, "mean": "present"}


def _franca(patch_size: int, classes: Sequence[str]) -> dict[str, Any]:
    """The toolkit with all patches of images of 518 pixels in the memory (appendix C of the paper)."""
    return {**_hummingbird(patch_size, classes), "size": square(518, patch_size), "memory_patches": 0}


_VARIANTS: Mapping[Variant, Callable[[int, Sequence[str]], dict[str, Any]]] = {
    "cribo": _cribo,
    "hummingbird": _hummingbird,
    "hummingbird-strict": _hummingbird_strict,
    "dip": _dip,
    "franca": _franca,
}
