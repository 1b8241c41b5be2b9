"""Dense nearest-neighbour retrieval (paper section 4.1; Balazevic et al. 2023).

Each patch of a query image is labelled by its nearest patches in a memory of labelled images. Nothing is trained.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from cribo.base.console import Phases, Progress, no_progress
from cribo.base.errors import InputError
from cribo.data import LabelledImages
from cribo.data.labelled.crops import resize_labels
from cribo.data.randomness import keyed_generator
from cribo.evaluation.dense_neighbours.config import DenseNNSettings
from cribo.evaluation.dense_neighbours.memory import PatchMemory
from cribo.evaluation.intervals import image_counts
from cribo.evaluation.pictures import Panel, panel_of
from cribo.evaluation.protocol import Outcome, Protocol
from cribo.evaluation.run import Run
from cribo.features.cache import Machine
from cribo.features.encoder import Encoder
from cribo.features.extraction import EncodedView, PatchFeatures, Preparation, extract_patches, in_chunks
from cribo.features.patches import majority_label
from cribo.features.scores import count_confusion, iou, iou_row, matched_iou
from cribo.features.search import Neighbours

_MEMORY_DRAW = 0x6D656D  # key of the draws of images, distinct from other uses of the seed
_NOT_SCORED = -1


@dataclass(frozen=True, kw_only=True)
class DenseNN(DenseNNSettings, Protocol):
    """Dense nearest-neighbour retrieval (CrIBo, section 4.1; Balazevic et al. 2023)."""

    def prepare(self, run: Run) -> Self:
        """Set all settings that are None."""
        return self.for_data(run.backbone.patch_size, run.data.train.classes)

    def used(self, run: Run) -> dict[str, Any]:
        """Return the settings, with the number of layers that provide features."""
        return {**self.effective(), "layers": run.source.layers}

    def measure(self, run: Run) -> Outcome:
        """Label the patches of val by their nearest patches in train."""
        with Phases(run.console) as progress:
            return dense_nn(
                run.encoder,
                run.data.train,
                run.data.val,
                self,
                machine=run.machine(run.encoder.identity),
                pictures=run.num_pictures,
                progress=progress,
            )


@torch.no_grad()
def dense_nn(
    encoder: Encoder,
    memory: LabelledImages,
    queries: LabelledImages,
    settings: DenseNNSettings | None = None,
    *,
    machine: Machine | None = None,
    pictures: int = 0,
    progress: Progress = no_progress,
) -> Outcome:
    """Label each patch of the queries by its nearest patches in the memory, and score the predictions.

    Args:
        encoder: the encoder, on its device.
        memory: labelled images whose patches are searched.
        queries: images to label and score.
        settings: settings of the protocol.
        machine: resources of the search.
        pictures: number of queries whose predictions are returned as panels.
        progress: progress callback.

    Returns:
        The outcome. Its rows, one for each ratio, contain `ratio`, `miou` and its `miou_std` (None for a single draw),
        `per_class`, `draws`, `memory_patches`, `recall` of an approximate search, and `confusion`, summed over the
        draws. Its panels are predicted with the memory of the first ratio. It has no image counts if predictions are
        matched with the classes.

    Raises:
        ValueError: memory and queries have different classes, one of them is empty, settings are invalid (`DenseNN`),
            the memory has no labelled patches or fewer patches than `neighbours`, or the queries have no labels.
        UnreadableImage, DataError: an image or label map is unusable.
    """
    machine = machine or Machine()
    _check_sets(memory, queries)
    settings = (settings or DenseNNSettings()).for_data(encoder.patch_size, memory.classes)
    augmentations = range(settings.augmentations) or (None,)
    draws = [
        (ratio, draw, [EncodedView(*view) for view in product(images, augmentations)])
        for ratio in settings.ratios
        for draw, images in enumerate(images_of(memory, ratio, settings))
    ]
    _require_bound(max(len(views) for _, _, views in draws), settings)
    preparation = Preparation(encoder.patch_size, settings.size, settings.interpolation, settings.seed)
    encode = partial(
        extract_patches,
        encoder,
        preparation=preparation,
        machine=machine,
        precision=settings.precision,
        progress=progress,
    )
    needed = sorted({view for _, _, views in draws for view in views})
    memory_features = encode(memory, needed, what="features of the memory")
    query_features = encode(
        queries, [EncodedView(index) for index in range(len(queries))], what="features of the queries"
    )
    memories = []
    for ratio, draw, views in draws:
        part = PatchMemory(memory_features, views, settings, len(memory.classes), draw=draw, device=machine.devices[0])
        _require_neighbours(part, ratio, settings)
        memories.append(part)
        progress("labels of the memory", len(memories), len(draws))
    scorer = _Scorer(queries, query_features, settings, pictures, machine.devices[0])
    if not scorer.has_labels():
        raise InputError("the queries cannot be scored: all labels of their images are ignored")
    tallies, counts_of_images, recalls = _score_all(scorer, memories, settings, machine, progress)
    rows, counted, matched = [], {}, settings.mean == "matched"
    for ratio in settings.ratios:
        places = [place for place, (other, _, _) in enumerate(draws) if other == ratio]
        counts = torch.stack([tallies[place] for place in places])
        if not matched:
            counted[ratio] = torch.stack([counts_of_images[place] for place in places])
        class_ious = map(matched_iou if matched else iou, counts)
        row = {"ratio": ratio, **iou_row(torch.stack(list(class_ious)), memory.classes)}
        row["memory_patches"] = statistics.fmean(len(memories[place].keys) for place in places)
        if settings.search == "faiss":
            row["recall"] = statistics.fmean(recalls[place] for place in places)
        rows.append({**row, "confusion": counts.sum(dim=0)})
    return Outcome(
        rows,
        classes=memory.classes,
        panels=scorer.panels,
        palette=queries.palette,
        data={"memory_patches": memory_features.patches, "query_patches": query_features.patches},
        image_counts=counted,
    )


def images_of(memory: LabelledImages, ratio: int, settings: DenseNNSettings) -> list[list[int]]:
    """Return the images of each draw of a ratio: all images, those of the lists, or random ones.

    Raises:
        InputError: the lists of the ratio do not exist, or contain an image that is not in the memory.
    """
    if ratio == 1:
        return [list(range(len(memory)))]
    if settings.lists is None:
        return [draw_images(len(memory), ratio, settings.seed, draw) for draw in range(settings.draws)]
    folder = Path(settings.lists).expanduser() / f"1_div_{ratio}"
    files = sorted(folder.glob("*.txt"))
    if not files:
        raise InputError(f"{folder} has no lists (*.txt) for ratio {ratio}: omit the ratio, or --lists")
    places = {Path(memory.name(index)).stem: index for index in range(len(memory))}
    draws = [file.read_text(encoding="utf-8").split() for file in files]
    for file, names in zip(files, draws, strict=True):
        if not names:
            raise InputError(f"{file} is empty: it must list images of the memory, one name per line")
        if missing := [name for name in names if name not in places]:
            raise InputError(f"{file} lists {missing[0]}, which is not among the {len(memory)} images of the memory")
    return [sorted({places[name] for name in names}) for names in draws]


def draw_images(count: int, ratio: int, seed: int, draw: int) -> list[int]:
    """Draw a fraction 1 / `ratio` of the images, at least one, without replacement; return sorted indices.

    Example:
        >>> [len(draw_images(10582, ratio, 0, 0)) for ratio in (1, 8, 64, 128)]  # Pascal VOC's trainaug
        [10582, 1323, 165, 83]
    """
    order = torch.randperm(count, generator=keyed_generator(_MEMORY_DRAW, seed, ratio, draw))
    return sorted(order[: max(1, round(count / ratio))].tolist())


class _Scorer:
    """Predicts labels from votes, and accumulates the confusion matrix."""

    def __init__(
        self,
        queries: LabelledImages,
        query_features: PatchFeatures,
        settings: DenseNNSettings,
        pictures: int,
        device: str,
    ) -> None:
        self.queries, self.query_features, self.settings, self.device = queries, query_features, settings, device
        self.panels: list[Panel] = []
        shown = min(pictures, len(queries))
        self._shown = {round(place * (len(queries) - 1) / max(1, shown - 1)) for place in range(shown)}
        self._patch_labels = {}
        if settings.score == "patch":
            self._patch_labels = {
                view: majority_label(torch.from_numpy(counts.toarray()), settings.unlabelled, _NOT_SCORED).short()
                for view, counts in query_features.counts.items()
            }

    def has_labels(self) -> bool:
        """Whether any patch or pixel can be scored."""
        if self.settings.score == "patch":
            return any(len(self.rows(view)) for view in self._patch_labels)
        return any(counts[:, :-1].nnz for counts in self.query_features.counts.values())

    def rows(self, view: EncodedView) -> Int[Tensor, " m"]:
        """Return the patches to classify: those with a label, or all if pixels are scored."""
        if self.settings.score == "patch":
            return (self._patch_labels[view] != _NOT_SCORED).nonzero()[:, 0]
        return torch.arange(self.query_features.patches_of(view))

    def labels(self, view: EncodedView) -> UInt8[Tensor, "h w"] | Int[Tensor, " n"]:
        """Return the labels to score: those of all patches, or of all pixels."""
        if self.settings.score == "patch":
            return self._patch_labels[view]
        labels = self.queries.labels(view.image)
        return resize_labels(labels, self.query_features.sizes[view]) if self.settings.score == "resized" else labels

    def score(
        self,
        chunk: Mapping[EncodedView, Int[Tensor, " m"]],
        labels: Mapping[EncodedView, Tensor],
        part: PatchMemory,
        neighbours: Neighbours,
        *,
        keep: bool,
    ) -> tuple[Int[Tensor, "c p"], Int[Tensor, "i 3 c"]]:
        """Return the confusion matrix of some images, and the counts of each.

        Args:
            chunk: the searched patches of each image.
            labels: the labels of each image.
            part: the memory.
            neighbours: the result of the search.
            keep: whether to keep panels of shown images.
        """
        votes = part.vote(neighbours)
        rows, columns = len(self.queries.classes), part.columns
        tally = torch.zeros(rows, columns, dtype=torch.long, device=self.device)
        counts = []
        lengths = list(map(len, chunk.values()))
        for (view, patches), own in zip(chunk.items(), votes.split(lengths), strict=True):
            if keep and view.image in self._shown:
                self.panels.append(self._panel(view, patches, own))
            true = labels[view].to(self.device)
            if self.settings.score == "patch":
                true, predicted = true[patches.to(self.device)], own.argmax(dim=1)
            else:
                labelled = true != self.queries.ignore_index
                true, predicted = true[labelled], self._upsampled(own, view, (true.shape[0], true.shape[1]))[labelled]
            image = count_confusion(true, predicted, rows, columns)
            tally += image
            counts.append(image_counts(image))
        return tally.cpu(), torch.stack(counts).cpu()

    def _upsampled(self, votes: Float[Tensor, "n p"], view: EncodedView, size: tuple[int, int]) -> Int[Tensor, "h w"]:
        """Return the class of each pixel, from bilinearly upsampled votes."""
        present = (votes.amax(dim=0) > 0).nonzero()[:, 0]  # classes without votes cannot win
        grid = votes[:, present].mT.unflatten(1, self.query_features.grid(view))[None]
        return present[F.interpolate(grid, size=size, mode="bilinear")[0].argmax(dim=0)]

    def _panel(self, view: EncodedView, rows: Int[Tensor, " m"], votes: Float[Tensor, "m p"]) -> Panel:
        ignore_index, predicted = self.queries.ignore_index, votes.argmax(dim=1).cpu()
        labels = torch.full((self.query_features.patches_of(view),), ignore_index)
        labels[rows] = torch.where(predicted == len(self.queries.classes), ignore_index, predicted)
        return panel_of(self.queries, view.image, labels.view(self.query_features.grid(view)))


def _score_all(
    scorer: _Scorer,
    memories: Sequence[PatchMemory],
    settings: DenseNNSettings,
    machine: Machine,
    progress: Progress,
) -> tuple[list[Int[Tensor, "c p"]], list[Int[Tensor, "q 3 c"]], list[float]]:
    """Search and score all queries in all memories; return confusion matrix, image counts and recall of each memory."""
    classes = len(scorer.queries.classes)
    tallies = [torch.zeros(classes, part.columns, dtype=torch.long) for part in memories]
    counts = [torch.zeros(len(scorer.queries), 3, classes, dtype=torch.long) for _ in memories]
    recalls = [0.0] * len(memories)
    rows = {view: scorer.rows(view) for view in scorer.query_features.counts}
    patches = sum(map(len, rows.values()))
    # Scoring counts as one more key, so that the progress reaches 100 % only at the end.
    pairs = patches * sum(len(part.keys) + 1 for part in memories)
    done = 0

    def report(queries: int, keys: int) -> None:
        progress("search [%]", 100 * (done + queries * keys) // pairs, 100)

    for views in in_chunks(_sizes(scorer, rows, memories, settings)):
        chunk, labels = {view: rows[view] for view in views}, {view: scorer.labels(view) for view in views}
        features = torch.cat([scorer.query_features.features(view)[own] for view, own in chunk.items()])
        for number, part in enumerate(memories):
            neighbours, share = part.search(features, machine, partial(report, len(features)))
            recalls[number] += share * len(features) / patches
            tally, own = scorer.score(chunk, labels, part, neighbours, keep=number == 0)
            tallies[number] += tally
            counts[number][[view.image for view in views]] = own
            done += len(features) * (len(part.keys) + 1)
            report(0, 0)
    return tallies, counts, recalls


def _sizes(
    scorer: _Scorer, rows: Mapping[EncodedView, Tensor], memories: Sequence[PatchMemory], settings: DenseNNSettings
) -> dict[EncodedView, int]:
    """Return the memory that the search and scoring of each query take, in bytes; without those of no patch."""
    # Features, neighbours and votes are copied once. Labels have a byte per pixel.
    dim, columns = memories[0].keys.dim, memories[0].columns
    patch_bytes = 2 * (4 * dim + 12 * settings.neighbours + 4 * columns)
    return {
        view: len(own) * patch_bytes + math.prod(scorer.query_features.sizes[view])
        for view, own in rows.items()
        if len(own)
    }


def _check_sets(memory: LabelledImages, queries: LabelledImages) -> None:
    if list(memory.classes) != list(queries.classes):
        raise InputError(f"memory and queries have different classes: {memory.classes} and {queries.classes}")
    for name, images in (("memory", memory), ("queries", queries)):
        if not len(images):
            raise InputError(f"the {name} must hold at least one image, got 0")


def _require_bound(views: int, settings: DenseNNSettings) -> None:
    if 0 < settings.memory_patches < views:
        raise InputError(
            f"memory_patches must be at least the number of images in the memory (times their augmentations), "
            f"{views}, got {settings.memory_patches}: increase it, or use 0 for no limit"
        )


def _require_neighbours(part: PatchMemory, ratio: int, settings: DenseNNSettings) -> None:
    if not len(part.keys):
        raise InputError(
            f"the memory has no labelled patch at ratio {ratio}: all labels of its images are ignored"
            + ("; try a smaller ratio" if ratio > 1 else "")
        )
    if len(part.keys) < settings.neighbours:
        raise InputError(
            f"neighbours must be at most the number of patches in the memory, got {settings.neighbours} with "
            f"{len(part.keys)} patches at ratio {ratio}: use fewer neighbours, or omit this ratio"
        )
