"""Suggestions of images to label next."""

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from cribo.data.labelled.inputs import DecodedImage, ImageLike, decode_image
from cribo.data.randomness import keyed_generator
from cribo.features.memory.memory import SegmentationMemory

_PATCHES = 24  # per image
_LABELLED = 2048  # limit on the labelled patches that images are compared with


def suggest(memory: SegmentationMemory, images: Iterable[ImageLike | DecodedImage], count: int) -> list[int]:
    """Return indices of images with uncertain regions to label next, at most `count` (see `cover`).

    Patches without data are not uncertain.

    Raises:
        DataError: the memory is empty.
    """
    fitted = memory.fitted()
    groups = []
    for index, image in enumerate(images):
        pixels, valid = decode_image(image, memory.reading, memory.encoder.in_chans)
        (features,) = memory.encode([pixels], fitted.choice.probe.blocks)
        groups.append(fitted.rows(sample(features, index, valid)).cpu())
    if not any(map(len, groups)):
        return []
    rows = torch.cat(groups)
    similar = torch.stack([similarity(rows, group) for group in groups])
    return cover(similar, fitted(rows).cpu(), similarity(rows, fitted.known_rows(_LABELLED).cpu()), count)


def sample(
    features: Float[Tensor, "rows columns l d"], key: int, valid: Bool[Tensor, "h w"] | None = None
) -> Float[Tensor, "p l d"]:
    """Return a few random patches of an image, on the CPU; the choice depends only on `key`.

    Args:
        features: features of all patches.
        key: key of the random numbers.
        valid: which pixels have data; None for all. Patches without any are not drawn.
    """
    patches = features.flatten(0, 1).cpu()
    if valid is not None:
        patches = patches[F.adaptive_max_pool2d(valid[None].float(), features.shape[:2]).flatten() > 0]
    return patches[torch.randperm(len(patches), generator=keyed_generator(key))[:_PATCHES]]


def similarity(rows: Float[Tensor, "n e"], others: Float[Tensor, "m e"]) -> Float[Tensor, " n"]:
    """Return the cosine similarity of each row to the nearest of the others, -1 without any; all have unit length."""
    return (rows @ others.T).amax(dim=1) if len(others) else rows.new_full((len(rows),), -1)


def cover(
    similar: Float[Tensor, "images n"],
    probabilities: Float[Tensor, "n c"],
    covered: Float[Tensor, " n"],
    count: int,
    *,
    first: Sequence[int] = (),
) -> list[int]:
    """Return indices of images close to many patches with uncertain labels, at most `count`.

    Greedy facility location: the gain of an image is the increase in similarity between the patches of all images and
    their nearest labelled or chosen patch, weighted by the uncertainty of their labels. Gains are summed per possible
    class, and the square roots of the sums are added, so that frequent classes do not dominate.

    Args:
        similar: similarity of each image to each of the N patches of all images (see `similarity`).
        probabilities: probability of each class for each patch.
        covered: similarity of each patch to the nearest labelled patch.
        count: number of images to choose.
        first: images that are already chosen.
    """
    uncertainty = 1 - probabilities.amax(dim=1)
    patches_per_class = probabilities.sum(dim=0).clamp(min=1)
    gained = torch.zeros_like(patches_per_class)
    taken = list(first)
    for image in first:
        covered = torch.maximum(covered, similar[image])
    while len(taken) < min(len(first) + count, len(similar)):
        gains = ((similar - covered).clamp(min=0) * uncertainty) @ probabilities  # (images, C)
        scores = ((gained + gains) / patches_per_class).sqrt().sum(dim=1)
        scores[taken] = -1
        best = int(scores.argmax())
        taken.append(best)
        gained += gains[best]
        covered = torch.maximum(covered, similar[best])
    return taken[len(first) :]
