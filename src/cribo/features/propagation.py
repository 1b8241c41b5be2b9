"""Propagation of labels between the frames of a video, as in DINO's `eval_video_segmentation.py`."""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor

from cribo.data.labelled.crops import resize_labels
from cribo.data.labelled.label_maps import IGNORE_INDEX
from cribo.features.config import PropagationSettings
from cribo.features.encoder import Encoder
from cribo.features.memory.pixels import PixelLabels
from cribo.features.patches import resize_image

_MULTIPLE = 64  # pixels, of the longer side in DINO
_CONSTANT = 1e-6  # spread up to which a map of labels is constant


class LabelledFrame(NamedTuple):
    """Labelled frames of B videos, as a source of propagation.

    Attributes:
        features: (B, h, w, D) patch features of unit length.
        labels: (B, h, w, C) soft labels of each patch.
    """

    features: Float[Tensor, "b rows columns d"]
    labels: Float[Tensor, "b rows columns c"]


def label_frame(
    features: Float[Tensor, "b rows columns d"],
    sources: Sequence[LabelledFrame],
    *,
    neighbours: int,
    radius: int,
    temperature: float,
) -> Float[Tensor, "b rows columns c"]:
    """Label the patches of a frame by the most similar patches of other frames of its video within a radius.

    The label of a patch is the mean over its nearest patches in all sources, weighted by exp(cosine / temperature).

    Args:
        features: (B, h, w, D) patch features of unit length of a frame of each video.
        sources: labelled frames of the same videos.
        neighbours: number of nearest patches.
        radius: maximum distance of a nearest patch in rows and in columns.
        temperature: of the weights.

    Returns:
        (B, h, w, C) soft labels.

    Source: Jabri et al. 2020, as in DINO's `eval_video_segmentation.py`.

    Example:
        >>> features = torch.nn.functional.normalize(torch.randn(2, 4, 4, 8), dim=-1)
        >>> source = LabelledFrame(features, torch.rand(2, 4, 4, 3))
        >>> label_frame(features, [source], neighbours=5, radius=2, temperature=0.1).shape
        torch.Size([2, 4, 4, 3])
    """
    # (B, rows, sources, columns, ...)
    keys, labels = (torch.stack(parts, dim=2) for parts in zip(*sources, strict=True))
    columns = torch.arange(features.shape[2], device=features.device)
    is_far = (columns[:, None] - columns).abs() > radius
    labelled = []
    for row, queries in enumerate(features.unbind(1)):  # by rows: similarities of all patches can take gigabytes
        near = slice(max(0, row - radius), row + radius + 1)
        cosines = (queries @ keys[:, near].flatten(1, 3).mT).unflatten(2, (-1, len(columns)))
        cosines = cosines.masked_fill(is_far[:, None], -torch.inf).flatten(2)
        best = cosines.topk(min(neighbours, cosines.shape[2]), dim=2)
        weights = (best.values / temperature).softmax(dim=2)
        of_near = labels[:, near].flatten(1, 3)
        rows = best.indices.flatten(1)[..., None].expand(-1, -1, of_near.shape[2])
        labelled.append(torch.einsum("bqk,bqkc->bqc", weights, of_near.gather(1, rows).unflatten(1, weights.shape[1:])))
    return torch.stack(labelled, dim=1)


def encoded_size(size: tuple[int, int], side: int, patch_size: int) -> tuple[int, int]:
    """Return the (height, width) in pixels at which frames are encoded, as in DINO.

    Args:
        size: height and width of the frames.
        side: shorter side in pixels.
        patch_size: patch size of the backbone in pixels.

    Example:
        >>> encoded_size((480, 854), 480, 16), encoded_size((854, 480), 480, 14)
        ((480, 832), (854, 476))
    """
    multiple = _MULTIPLE if _MULTIPLE % patch_size == 0 else patch_size
    shorter = max(1, side // patch_size) * patch_size
    longer = max(shorter, side * max(size) // min(size) // multiple * multiple)
    return (shorter, longer) if size[0] <= size[1] else (longer, shorter)


def soft_labels(
    labels: UInt8[Tensor, "h w"], grid: tuple[int, int], classes: int
) -> Float[Tensor, "rows columns classes"]:
    """Return the class of each patch as a vector of ones and zeros; only zeros for 255, no class."""
    of_patches = resize_labels(labels, grid).long()
    one_hot = F.one_hot(of_patches.where(of_patches != IGNORE_INDEX, classes), classes + 1)
    return one_hot[..., :classes].float()


def encode_frames(
    images: Sequence[UInt8[Tensor, "c h w"]], encoder: Encoder, settings: PropagationSettings
) -> Float[Tensor, "b rows columns d"]:
    """Encode frames of equal size as patch features of unit length, on the device of the encoder.

    The frames are resized to the fixed input size of the encoder, or to `encoded_size`.

    Raises:
        InputError: the encoder takes images with other channels.
    """
    height, width = images[0].shape[1:]
    fixed = encoder.image_size
    size = encoded_size((height, width), settings.side, encoder.patch_size) if fixed is None else (fixed, fixed)
    pixels = torch.stack([resize_image(image, size, settings.interpolation) for image in images])
    return F.normalize(encoder.grids(pixels), dim=-1)


class Propagation:
    """Propagates the labels of a frame to later frames, one at a time.

    The labels of a frame are those of the most similar patches in the given and the previous frames (`label_frame`).

    Args:
        features: patch features of the given frame, of unit length, on the device of the computation.
        labels: soft labels of its patches.
        settings: neighbours, and frames in which they are searched.
    """

    def __init__(
        self,
        features: Float[Tensor, "rows columns d"],
        labels: Float[Tensor, "rows columns c"],
        settings: PropagationSettings,
    ) -> None:
        self._first = LabelledFrame(features[None], labels[None].to(features))
        self._previous = deque[LabelledFrame](maxlen=settings.previous)
        self._settings = settings

    def __call__(self, features: Float[Tensor, "rows columns d"]) -> Float[Tensor, "rows columns c"]:
        """Return the soft labels of the patches of the next frame, given their features of unit length."""
        found = label_frame(
            features[None],
            [self._first, *self._previous],
            neighbours=self._settings.neighbours,
            radius=self._settings.radius,
            temperature=self._settings.temperature,
        )
        self._previous.append(LabelledFrame(features[None], found))
        return found[0]


def propagate(
    frames: Iterator[Float[Tensor, "rows columns d"]],
    given: Float[Tensor, "rows columns c"],
    settings: PropagationSettings,
) -> Iterator[Float[Tensor, "rows columns c"]]:
    """Propagate the labels of the first frame to all others in order.

    Args:
        frames: patch features of each frame, of unit length, on the device of the computation.
        given: soft labels of the patches of the first frame.
        settings: neighbours, and frames in which they are searched.

    Yields:
        Soft labels of the patches of each frame, from the second one on.
    """
    yield from map(Propagation(next(frames), given, settings), frames)


def frame_labels(labels: Float[Tensor, "rows columns c"], patch_size: int, size: tuple[int, int]) -> PixelLabels:
    """Label each pixel of a frame; the results are on the CPU.

    Labels are upsampled bilinearly to the encoded size of the frame, and each is rescaled to 0-1 over the frame; the
    largest one wins. The map is resized to the frame's own size with nearest-neighbour interpolation. The confidence is
    the label before it is rescaled.

    Args:
        labels: soft labels of the patches, 0 to 1.
        patch_size: patch size in pixels.
        size: (height, width) of the frame.
    """
    encoded = labels.shape[0] * patch_size, labels.shape[1] * patch_size
    whole = F.interpolate(labels.permute(2, 0, 1)[None], size=encoded, mode="bilinear")[0]
    lowest, highest = whole.amin(dim=(1, 2), keepdim=True), whole.amax(dim=(1, 2), keepdim=True)
    spread = highest - lowest
    winners = torch.where(spread > _CONSTANT, (whole - lowest) / spread, whole).argmax(dim=0)
    confidence = whole.gather(0, winners[None])
    return PixelLabels(
        resize_labels(winners.to(torch.uint8), size).cpu(),
        F.interpolate(confidence[None], size=size, mode="nearest-exact")[0, 0].cpu(),
    )
