"""Tracking of masks and polygons in CVAT, with the interface of `cvat-sdk`: labels are propagated by patch features.

    cvat-cli function create-native tracker --function-file examples/tools/cvat_tracker.py -p backbone=str:runs/mine
    cvat-cli function run-agent FUNCTION --function-file examples/tools/cvat_tracker.py -p backbone=str:runs/mine

The second command runs on this machine, and follows the objects that somebody marks in a frame through the next ones.
Each frame is labelled by the most similar patches of the marked and of the previous frames, as `cribo segment --video`
does. The server decides who can use agents: CVAT Online and CVAT Enterprise have them.
"""

from collections import deque
from typing import NamedTuple

import cvat_sdk.auto_annotation as cvataa
import numpy as np
import PIL.Image
import torch
import torch.nn.functional as F
from cvat_sdk.masks import decode_mask, encode_mask
from jaxtyping import Bool, Float
from torch import Tensor

from cribo.data.labelled.inputs import open_image
from cribo.data.labelled.outlines import pixels_of, runs_of
from cribo.data.labelled.regions import trace
from cribo.features.config import PropagationSettings
from cribo.features.encoder import Encoder
from cribo.features.patches import resize_image
from cribo.features.propagation import LabelledFrame, encoded_size, frame_labels, label_frame, soft_labels


class Frame(NamedTuple):
    """A frame: its size in pixels, and its patch features of unit length."""

    size: tuple[int, int]
    features: Float[Tensor, "1 rows columns d"]


class Track(NamedTuple):
    """The labels of the frame in which an object was marked, and those of the previous frames."""

    marked: LabelledFrame
    previous: deque[LabelledFrame]


class Tracker:
    """Follows objects through a video, as a tracking function of CVAT.

    Args:
        backbone: a run, a checkpoint or a timm name.
        device: such as cuda:0. [the first GPU, else the CPU]
    """

    spec = cvataa.TrackingFunctionSpec(supported_shape_types={"mask", "polygon"})

    def __init__(self, backbone: str, device: str | None = None) -> None:
        self.encoder = Encoder(backbone, device=device).open()
        self.settings = PropagationSettings()

    def preprocess_image(self, context: cvataa.TrackingFunctionContext, image: PIL.Image.Image) -> Frame:
        """Encode a frame, once for all objects."""
        pixels = open_image(image)
        size = pixels.shape[1], pixels.shape[2]
        fixed, patch = self.encoder.image_size, self.encoder.patch_size
        encoded = (fixed, fixed) if fixed is not None else encoded_size(size, self.settings.side, patch)
        resized = resize_image(pixels, encoded, self.settings.interpolation)
        return Frame(size, F.normalize(self.encoder.grids(resized[None]), dim=-1))

    def init_tracking_state(
        self, context: cvataa.TrackingFunctionShapeContext, pp_image: Frame, shape: cvataa.TrackableShape
    ) -> Track:
        """Label the patches of the frame in which an object is marked."""
        labels = torch.from_numpy(_drawn(shape, pp_image.size)).to(torch.uint8)
        rows, columns = pp_image.features.shape[1:3]
        soft = soft_labels(labels, (rows, columns), 2)[None].to(pp_image.features)
        return Track(LabelledFrame(pp_image.features, soft), deque(maxlen=self.settings.previous))

    def track(
        self, context: cvataa.TrackingFunctionShapeContext, pp_image: Frame, state: Track
    ) -> cvataa.TrackableShape | None:
        """Label the patches of the next frame, and return the object in it; None if no patch is part of it."""
        soft = label_frame(
            pp_image.features,
            [state.marked, *state.previous],
            neighbours=self.settings.neighbours,
            radius=self.settings.radius,
            temperature=self.settings.temperature,
        )
        state.previous.append(LabelledFrame(pp_image.features, soft))
        if not (soft[0, ..., 1] > soft[0, ..., 0]).any():
            return None
        pixels = frame_labels(soft[0], self.encoder.patch_size, pp_image.size).labels.numpy()
        if context.original_shape_type == "mask":
            return cvataa.TrackableShape(type="mask", points=encode_mask(pixels == 1))
        outline = trace(pixels, [1])[0].rings[0]  # of the largest part
        return cvataa.TrackableShape(type="polygon", points=[float(value) for corner in outline for value in corner])


def _drawn(shape: cvataa.TrackableShape, size: tuple[int, int]) -> Bool[np.ndarray, "h w"]:
    """Return the pixels of a shape."""
    height, width = size
    if shape.type == "mask":
        return decode_mask(shape.points, image_width=width, image_height=height)
    return pixels_of(runs_of([np.array(shape.points).reshape(-1, 2)], height, width), height, width)


create = Tracker
