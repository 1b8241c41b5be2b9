"""Tracking of masks and polygons in CVAT, with the interface of `cvat-sdk`: labels are propagated by patch features.

    cvat-cli function create-native tracker --function-file examples/tools/cvat_tracker.py -p backbone=str:runs/mine
    cvat-cli function run-agent FUNCTION --function-file examples/tools/cvat_tracker.py -p backbone=str:runs/mine

The second command runs an agent on this machine. It tracks the objects that are marked in a frame through the following
frames. Each frame is labelled by the most similar patches of the marked and the previous frames, as in
`cribo segment --video`. Agents are available in CVAT Online and CVAT Enterprise.
"""

from typing import NamedTuple

import cvat_sdk.auto_annotation as cvataa
import numpy as np
import PIL.Image
import torch
from cvat_sdk.masks import decode_mask, encode_mask
from jaxtyping import Bool, Float
from torch import Tensor

from cribo.data.labelled.inputs import open_image
from cribo.data.labelled.regions import corners, polygon, trace
from cribo.features.config import PropagationSettings
from cribo.features.encoder import Encoder
from cribo.features.propagation import Propagation, encode_frames, frame_labels, soft_labels


class Frame(NamedTuple):
    """A frame: its (height, width) in pixels, and its patch features of unit length."""

    size: tuple[int, int]
    features: Float[Tensor, "rows columns d"]


class Tracker:
    """Tracks objects in a video, as a tracking function of CVAT.

    Args:
        backbone: a run, a checkpoint or a timm name.
        device: such as cuda:0. [the first GPU, else the CPU]
    """

    spec = cvataa.TrackingFunctionSpec(supported_shape_types={"mask", "polygon"})

    def __init__(self, backbone: str, device: str | None = None) -> None:
        self.encoder = Encoder(backbone, device=device).open()
        self.settings = PropagationSettings()

    def preprocess_image(self, context: cvataa.TrackingFunctionContext, image: PIL.Image.Image) -> Frame:
        """Encode a frame; all tracked objects share its features."""
        pixels = open_image(image)
        return Frame((pixels.shape[1], pixels.shape[2]), encode_frames([pixels], self.encoder, self.settings)[0])

    def init_tracking_state(
        self, context: cvataa.TrackingFunctionShapeContext, pp_image: Frame, shape: cvataa.TrackableShape
    ) -> Propagation:
        """Label the patches of the frame in which an object is marked."""
        labels = torch.from_numpy(_mask(shape, pp_image.size)).to(torch.uint8)
        rows, columns, _ = pp_image.features.shape
        return Propagation(pp_image.features, soft_labels(labels, (rows, columns), 2), self.settings)

    def track(
        self, context: cvataa.TrackingFunctionShapeContext, pp_image: Frame, state: Propagation
    ) -> cvataa.TrackableShape | None:
        """Return the object in the next frame; None if no patch belongs to it."""
        soft = state(pp_image.features)
        if not (soft[..., 1] > soft[..., 0]).any():
            return None
        pixels = frame_labels(soft, self.encoder.patch_size, pp_image.size).labels.numpy()
        if context.original_shape_type == "mask":
            return cvataa.TrackableShape(type="mask", points=encode_mask(pixels == 1))
        outline = trace(pixels, [1])[0].rings[0]  # of the largest part
        return cvataa.TrackableShape(type="polygon", points=[float(value) for corner in outline for value in corner])


def _mask(shape: cvataa.TrackableShape, size: tuple[int, int]) -> Bool[np.ndarray, "h w"]:
    """Return which pixels are inside a shape."""
    height, width = size
    if shape.type == "mask":
        return decode_mask(shape.points, image_width=width, image_height=height)
    return polygon(corners(list(shape.points)))(height, width)


create = Tracker
