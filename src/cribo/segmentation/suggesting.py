"""Suggestions of images to label next."""

from collections.abc import Iterable

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from cribo.data.randomness import keyed_generator
from cribo.segmentation.memory import SegmentationMemory

_PATCHES = 24  # per image
_LABELLED = 2048  # limit on the labelled patches that images are compared with


def suggest(memory: SegmentationMemory, images: Iterable[UInt8[Tensor, "3 h w"]], count: int) -> list[int]:
    """Choose images with uncertain regions to label next.

    Greedy facility location: the gain of an image is the increase in similarity between the patches of all images and
    their nearest labelled or chosen patch, weighted by the uncertainty of their labels. Gains are summed per possible
    class, and the square roots of the sums are added, so that frequent classes do not dominate.

    Args:
        memory: memory of the labelled examples.
        images: unlabelled images; a few patches of each are compared.
        count: number of images to choose.

    Returns:
        Indices into `images`, at most `count`.

    Raises:
        DataError: the memory is empty.
    """
    labeller = memory.labeller()
    rows, probabilities = [], []
    for index, image in enumerate(images):
        (features,) = memory.encoder.encode([image], blocks=labeller.choice.probe.blocks)
        features = features.flatten(0, 1).cpu()
        chosen = torch.randperm(len(features), generator=keyed_generator(index))[:_PATCHES]
        own = labeller.rows(features[chosen])
        rows.append(own)
        probabilities.append(labeller(own))
    if not rows:
        return []
    lengths = [len(own) for own in rows]
    return _cover(torch.cat(rows), torch.cat(probabilities), lengths, labeller.known_rows(_LABELLED), count)


def _cover(
    rows: Float[Tensor, "n e"],
    probabilities: Float[Tensor, "n c"],
    lengths: list[int],
    known: Float[Tensor, "m e"],
    count: int,
) -> list[int]:
    """Choose groups of rows greedily so that uncertain rows are close to a chosen or known row."""
    uncertainty = 1 - probabilities.amax(dim=1)
    patches_per_class = probabilities.sum(dim=0).clamp(min=1)
    covered = (rows @ known.T).amax(dim=1)
    similar = torch.stack([(rows @ group.T).amax(dim=1) for group in rows.split(lengths)])  # (images, N)
    found: list[int] = []
    gained = torch.zeros_like(patches_per_class)
    while len(found) < min(count, len(lengths)):
        gains = ((similar - covered).clamp(min=0) * uncertainty) @ probabilities  # (images, C)
        scores = ((gained + gains) / patches_per_class).sqrt().sum(dim=1)
        scores[found] = -1
        best = int(scores.argmax())
        found.append(best)
        gained += gains[best]
        covered = torch.maximum(covered, similar[best])
    return found
