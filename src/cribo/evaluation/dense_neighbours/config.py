"""What dense nearest-neighbour retrieval can be asked for, typed: the command line and Python share it."""

from dataclasses import dataclass, field

from cribo.evaluation.data import LabelledDataConfig
from cribo.evaluation.dense_neighbours.protocols import Protocol, ScoreLevel, Search
from cribo.evaluation.runtime import EvaluationRuntime
from cribo.retrieval.choices import FeaturePrecision, Interpolation, PatchLabels, Unlabelled, Vote
from cribo.retrieval.source import BackboneSource


@dataclass
class DenseNNConfig:
    """Dense nearest-neighbour retrieval.

    Attributes:
        backbone: whose features.
        data: labelled images.
        protocol: paper (CrIBo, section 4.1) or hummingbird (Balazevic et al. 2023, as public toolkits run it). It
            decides whatever of the following is not given, in [brackets].
        ratios: share of the memory's images, a row of results each: 1,8,64,128 for all, one in 8, ...
        draws: how often the images of a share are drawn; the score is the mean of them.
        seed: of the draws and the augmentations.
        neighbours: k, how many nearest patches vote. [50, hummingbird: 30]
        vote: weight of a neighbour: majority (all alike), similarity (its cosine) or attention (softmax of
            cosine / temperature). The paper is silent. [majority, hummingbird: attention]
        temperature: of the attention. [0.02]
        patch_labels: hard, the class of most pixels of a patch, or soft, the share of each. [hard, hummingbird: soft]
        unlabelled: pixels without class in the memory: drop patches where they are most, outvote them by any
            labelled pixel, have them be a class that is never right, or background. The paper is silent. [drop,
            hummingbird: background if the first class is that, class otherwise]
        score: what is counted: every patch, by the class of most of its pixels, every pixel of the labels on disk,
            or every pixel of the resized labels. The paper is silent. [patch, hummingbird: resized]
        size: height,width of all images, or one number for a square. [for each image its own, rounded to the patch
            size; hummingbird: square, 512 or the multiple of the patch size below]
        interpolation: of images. The paper is silent. [bicubic, hummingbird: bilinear]
        augmentations: augmented views of each image in the memory, 0 for the image as it is. [0, hummingbird: 1]
        memory_patches: bound of the memory, patches of rare classes first; 0 for none. [0]
        search: exact, or faiss for an approximate index (its recall is printed).
        probes: lists that the approximate index looks through: more are slower and find more.
        precision: of the kept features: float16 takes half the room.
        runtime: where and how it is computed. The first device encodes, all share the search.
    """

    backbone: BackboneSource
    data: LabelledDataConfig
    protocol: Protocol = "paper"
    ratios: tuple[int, ...] = (1, 8, 64, 128)
    draws: int = 5
    seed: int = 0
    neighbours: int | None = None
    vote: Vote | None = None
    temperature: float | None = None
    patch_labels: PatchLabels | None = None
    unlabelled: Unlabelled | None = None
    score: ScoreLevel | None = None
    size: tuple[int, int] | None = None
    interpolation: Interpolation | None = None
    augmentations: int | None = None
    memory_patches: int | None = None
    search: Search = "exact"
    probes: int = 32
    precision: FeaturePrecision = "float32"
    runtime: EvaluationRuntime = field(default_factory=EvaluationRuntime)
