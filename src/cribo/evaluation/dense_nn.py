"""Dense nearest-neighbour retrieval: k-NN over patches (paper section 4.1)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torchmetrics.functional.classification import multiclass_confusion_matrix
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as TF

from cribo.data import LabelledImages
from cribo.data.randomness import keyed_generator
from cribo.method import normalise
from cribo.models import Backbone

Encoder = Callable[[Float[Tensor, "b 3 h w"]], Float[Tensor, "b n d"]]
"""Turns images in 0-1 into one feature per patch."""


@dataclass(frozen=True)
class DenseRetrieval:
    """A dense retrieval score.

    Attributes:
        miou: mean intersection over union in 0-1, over the classes that occur in labels or predictions.
        per_class: IoU of every class, NaN where it does not occur.
        confusion: (C, C) patches; rows are labels, columns predictions.
    """

    miou: float
    per_class: list[float]
    confusion: Int[Tensor, "c c"]


@torch.no_grad()
def dense_nn(
    encoder: Encoder,
    memory: LabelledImages,
    queries: LabelledImages,
    *,
    patch_size: int,
    size: tuple[int, int] | None = None,
    neighbours: int = 50,
    memory_ratio: int = 1,
    batch_size: int = 16,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> DenseRetrieval:
    """Label every patch of the queries by its nearest patches in the memory, and score the labels.

    Similarity is the cosine; the vote is a plain majority (the smallest class wins a tie); patches whose
    majority is the ignored label are left out on both sides; the score is taken over patches. Search is exact,
    blockwise, with a running top-k.

    Args:
        encoder: gives (B, N, D) features of (B, 3, H, W) images in 0-1, N patches row by row.
        memory: images whose patches are searched.
        queries: images whose patches are labelled.
        patch_size: pixels of a patch; images are resized to the closest multiple of it.
        size: (height, width) to resize all images to instead; multiples of the patch size.
        neighbours: k; fewer if the memory holds fewer patches.
        memory_ratio: one image of the memory in this many is used, drawn uniformly.
        batch_size: images encoded at once, where they are of one size.
        device: where it is computed.
        seed: of the draw.

    Raises:
        ValueError: a size that is no multiple of the patch size, a number below 1, other classes in the two
            sets, or a memory without any labelled patch.
    """
    if size is not None and (size[0] % patch_size or size[1] % patch_size):
        raise ValueError(f"size must be a multiple of the patch size {patch_size}, got {size[0]}x{size[1]}")
    for name, value in (("neighbours", neighbours), ("memory_ratio", memory_ratio), ("batch_size", batch_size)):
        if value < 1:
            raise ValueError(f"{name} must be >= 1, got {value}")
    if list(memory.classes) != list(queries.classes):
        raise ValueError(f"memory and queries have different classes: {memory.classes} and {queries.classes}")
    num_classes = len(memory.classes)
    drawn = torch.randperm(len(memory), generator=keyed_generator(seed)).tolist()
    drawn = sorted(drawn[: max(1, len(memory) // memory_ratio)])
    keys, key_labels = _features(encoder, memory, drawn, patch_size, size, batch_size, device)
    if not key_labels.numel():
        raise ValueError("the memory has no labelled patch: all of its labels are ignored")
    everything = list(range(len(queries)))
    confusion = torch.zeros((num_classes, num_classes), dtype=torch.long)
    for start in range(0, len(queries), batch_size):
        part = everything[start : start + batch_size]
        features, labels = _features(encoder, queries, part, patch_size, size, batch_size, device)
        if labels.numel():
            votes = _vote(features, keys, key_labels, neighbours, num_classes)
            confusion += multiclass_confusion_matrix(votes, labels, num_classes).cpu()
    return _score(confusion)


def patch_labels(labels: Int[Tensor, "h w"], patch_size: int, num_classes: int, ignore_index: int) -> Int[Tensor, " n"]:
    """Label of most pixels in each patch, row by row; `ignore_index` counts as one of the labels.

    Example:
        >>> patch_labels(torch.tensor([[0, 0, 1, 1], [0, 2, 1, 1]]), 2, 3, 255).tolist()
        [0, 1]
    """
    squares = F.unfold(
        torch.where(labels == ignore_index, num_classes, labels)[None, None].float(),
        kernel_size=patch_size,
        stride=patch_size,
    )[0].long()
    counts = torch.zeros((num_classes + 1, squares.shape[1]), dtype=torch.long)
    counts.scatter_add_(0, squares, torch.ones_like(squares))
    winner = counts.argmax(dim=0)
    return torch.where(winner == num_classes, ignore_index, winner)


def backbone_encoder(backbone: Backbone) -> Encoder:
    """Patch features of a backbone, in evaluation mode, whatever mode it is left in."""

    def encode(images: Float[Tensor, "b 3 h w"]) -> Float[Tensor, "b n d"]:
        training = backbone.training
        backbone.eval()
        try:
            return backbone.encode(normalise(images, mean=backbone.mean, std=backbone.std)).tokens
        finally:
            backbone.train(training)

    return encode


def mean_colour_encoder(patch_size: int) -> Encoder:
    """The baseline: the mean colour of each patch, in the normalised RGB that networks see."""

    def encode(images: Float[Tensor, "b 3 h w"]) -> Float[Tensor, "b n 3"]:
        return F.avg_pool2d(normalise(images), patch_size).flatten(2).mT

    return encode


def _features(
    encoder: Encoder,
    images: LabelledImages,
    indices: list[int],
    patch_size: int,
    size: tuple[int, int] | None,
    batch_size: int,
    device: torch.device | str,
) -> tuple[Float[Tensor, "m d"], Int[Tensor, " m"]]:
    """Normalised features and labels of all patches that are not ignored."""
    features: list[Tensor] = []
    labels: list[Tensor] = []
    pending: list[Tensor] = []

    def flush() -> None:
        if pending:
            batch = torch.stack(pending).to(device).float().div_(255)
            features.append(F.normalize(encoder(batch).float(), dim=-1).flatten(0, 1))
            pending.clear()

    for index in indices:
        image, label = images.load(index), images.labels(index)
        target = list(size or _closest_multiple(image.shape[1], image.shape[2], patch_size))
        resized = TF.resize(image, target, interpolation=InterpolationMode.BICUBIC, antialias=True)
        label = TF.resize(label[None], target, interpolation=InterpolationMode.NEAREST_EXACT)[0]
        if pending and (pending[0].shape != resized.shape or len(pending) == batch_size):
            flush()
        pending.append(resized)
        labels.append(patch_labels(label.long(), patch_size, len(images.classes), images.ignore_index))
    flush()
    all_labels = torch.cat(labels).to(device)
    known = all_labels != images.ignore_index
    return torch.cat(features)[known], all_labels[known]


def _closest_multiple(height: int, width: int, patch_size: int) -> tuple[int, int]:
    return (
        max(1, round(height / patch_size)) * patch_size,
        max(1, round(width / patch_size)) * patch_size,
    )


def _vote(
    queries: Float[Tensor, "q d"],
    keys: Float[Tensor, "m d"],
    key_labels: Int[Tensor, " m"],
    neighbours: int,
    num_classes: int,
    *,
    query_block: int = 256,
    key_block: int = 65536,
) -> Int[Tensor, " q"]:
    """Majority label of each query's nearest keys; at most (query_block, key_block) similarities at once."""
    votes = []
    for part in queries.split(query_block):
        best = part.new_empty((part.shape[0], 0))
        owner = key_labels.new_empty((part.shape[0], 0))
        for start in range(0, keys.shape[0], key_block):
            block = slice(start, start + key_block)
            value, index = _top(part @ keys[block].T, neighbours)
            value = torch.cat((best, value), dim=1)
            label = torch.cat((owner, key_labels[block][index]), dim=1)
            best, chosen = value.topk(min(neighbours, value.shape[1]), dim=1, sorted=False)
            owner = label.gather(1, chosen)
        counts = torch.zeros((part.shape[0], num_classes), dtype=torch.long, device=part.device)
        votes.append(counts.scatter_add_(1, owner, torch.ones_like(owner)).argmax(dim=1))
    return torch.cat(votes)


def _top(similarity: Float[Tensor, "q m"], k: int, *, run: int = 64) -> tuple[Tensor, Tensor]:
    """The k greatest values of each row and their places, in any order; exact.

    The k greatest lie in the k runs of columns whose maxima are greatest, and maxima are cheap: on a CPU this
    is several times faster than selecting among all columns.
    """
    rows, columns = similarity.shape
    runs = columns // run
    if runs <= k:
        return similarity.topk(min(k, columns), dim=1, sorted=False)
    head, tail = similarity[:, : runs * run], similarity[:, runs * run :]
    head = head.reshape(rows, runs, run)
    chosen = head.amax(dim=2).topk(k, dim=1, sorted=False).indices
    value = head.gather(1, chosen[..., None].expand(-1, -1, run)).flatten(1)
    place = (chosen[..., None] * run + torch.arange(run, device=chosen.device)).flatten(1)
    value = torch.cat((value, tail), dim=1)
    last = torch.arange(runs * run, columns, device=chosen.device).expand(rows, -1)
    value, index = value.topk(k, dim=1, sorted=False)
    return value, torch.cat((place, last), dim=1).gather(1, index)


def _score(confusion: Int[Tensor, "c c"]) -> DenseRetrieval:
    hit = confusion.diag().double()
    union = confusion.sum(dim=0) + confusion.sum(dim=1) - confusion.diag()
    iou = torch.where(union > 0, hit / union, torch.nan)
    return DenseRetrieval(float(iou.nanmean()), iou.tolist(), confusion)
