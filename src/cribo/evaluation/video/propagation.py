"""Label propagation between frames by nearest features, as in DINO's `eval_video_segmentation.py`."""

from collections import deque
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor

from cribo.data.labelled.crops import resize_labels
from cribo.evaluation.video.settings import VideoPropagationSettings
from cribo.features.propagation import LabelledFrame, label_frame


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
    given, previous = LabelledFrame(features[None], labels[None]), deque[LabelledFrame](maxlen=settings.previous)
    for features in frames:
        found = label_frame(
            features[None],
            [given, *previous],
            neighbours=settings.neighbours,
            radius=settings.radius,
            temperature=settings.temperature,
        )
        previous.append(LabelledFrame(features[None], found))
        yield found[0]


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
