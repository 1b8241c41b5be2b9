"""Label propagation between frames by nearest features, as in DINO's `eval_video_segmentation.py`."""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor

from cribo.data.crops import resize_labels
from cribo.evaluation.video.settings import VideoPropagationSettings


class LabelledFrame(NamedTuple):
    """A labelled frame, as a source of propagation.

    Attributes:
        features: patch features of unit length.
        labels: soft labels of each patch, for background and each object.
    """

    features: Float[Tensor, "rows columns d"]
    labels: Float[Tensor, "rows columns c"]


def propagate(
    frames: Iterator[Float[Tensor, "rows columns d"]],
    first: UInt8[Tensor, "h w"],
    objects: int,
    settings: VideoPropagationSettings,
) -> Iterator[Float[Tensor, "rows columns c"]]:
    """Propagate the objects of the first frame to all others in order.

    Args:
        frames: patch features of each frame, of unit length, on the device of the computation.
        first: object index of each pixel of the first frame; 0 for background.
        objects: number of objects.
        settings: settings of the protocol.

    Yields:
        Soft labels of each patch for background and each object, from the second frame on.
    """
    features = next(frames)
    grid = resize_labels(first, (features.shape[0], features.shape[1]))
    labels = F.one_hot(grid.long(), objects + 1).to(features)
    given, previous = LabelledFrame(features, labels), deque[LabelledFrame](maxlen=settings.previous)
    for features in frames:
        labels = label_frame(features, [given, *previous], settings)
        previous.append(LabelledFrame(features, labels))
        yield labels


def label_frame(
    features: Float[Tensor, "rows columns d"], sources: Sequence[LabelledFrame], settings: VideoPropagationSettings
) -> Float[Tensor, "rows columns c"]:
    """Label the patches of a frame by the most similar patches of other frames within `radius`.

    The label of a patch is the mean of its `neighbours` most similar patches over all sources, at most `radius` patches
    away in both directions, weighted by exp(cosine / temperature).

    Args:
        features: patch features of the frame.
        sources: labelled frames of the same size.
        settings: settings of the protocol.
    """
    keys, labels = (torch.stack(parts, dim=1) for parts in zip(*sources, strict=True))  # (rows, sources, columns, ...)
    columns = torch.arange(features.shape[1], device=features.device)
    is_far = (columns[:, None] - columns).abs() > settings.radius
    labelled = []
    for row, queries in enumerate(features):  # by rows, since the similarities of all patches take gigabytes
        near = slice(max(0, row - settings.radius), row + settings.radius + 1)
        cosines = (queries @ keys[near].flatten(0, 2).T).unflatten(1, (-1, len(columns)))
        cosines = cosines.masked_fill(is_far[:, None], -torch.inf).flatten(1)
        best = cosines.topk(min(settings.neighbours, cosines.shape[1]), dim=1)
        weights = (best.values / settings.temperature).softmax(dim=1)
        labelled.append(torch.einsum("qk,qkc->qc", weights, labels[near].flatten(0, 2)[best.indices]))
    return torch.stack(labelled)


def object_map(labels: Float[Tensor, "rows columns c"], patch_size: int, size: tuple[int, int]) -> UInt8[Tensor, "h w"]:
    """Return the object index of each pixel; 0 for background.

    Labels are upsampled bilinearly to the encoded size of the frame, and each is rescaled to 0-1 over the frame; the
    largest one wins. The map is resized to the frame's own size with nearest-neighbour interpolation.

    Args:
        labels: soft labels of the patches.
        patch_size: patch size in pixels.
        size: (height, width) of the frame.
    """
    encoded = labels.shape[0] * patch_size, labels.shape[1] * patch_size
    whole = F.interpolate(labels.permute(2, 0, 1)[None], size=encoded, mode="bilinear")[0]
    lowest, highest = whole.amin(dim=(1, 2), keepdim=True), whole.amax(dim=(1, 2), keepdim=True)
    stretched = (whole - lowest) / (highest - lowest).clamp_min(1e-12)
    return resize_labels(stretched.argmax(dim=0).to(torch.uint8), size)
