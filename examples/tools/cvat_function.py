"""Auto-annotation of CVAT tasks by a memory of `cribo segment`, with the interface of `cvat-sdk`.

    cvat-cli task auto-annotate TASK --function-file examples/tools/cvat_function.py \
        -p memory=str:mine.safetensors -p backbone=str:runs/mine

The function runs on this machine: it receives the images from CVAT and returns a mask for each region of a class, with
its mean confidence as the score. Regions smaller than a patch are merged into the nearest larger region. Use
`--conv-mask-to-poly` for polygons, and `--conf-threshold` to omit uncertain regions. The task needs labels with the
names of the classes; `--allow-unmatched-labels` ignores other classes.
"""

from collections.abc import Sequence
from dataclasses import replace

import cvat_sdk.auto_annotation as cvataa
import PIL.Image
from cvat_sdk.masks import encode_mask

from cribo import SegmentationMemory
from cribo.apps.segment.instances import Splitter
from cribo.data.labelled.regions import things, trace
from cribo.data.labelled.small_regions import merge_small_regions


class Segmenter:
    """Labels images by a memory, as a detection function of CVAT.

    Args:
        memory: the memory file.
        backbone: the backbone with which it was created.
        device: such as cuda:0. [the first GPU, else the CPU]
        instances: comma-separated classes whose objects get a separate mask each, even if they touch.
    """

    def __init__(self, memory: str, backbone: str, device: str | None = None, instances: str = "") -> None:
        self.memory = SegmentationMemory.load(memory, backbone, device=device)
        self.splitter = Splitter.of_names([name for name in instances.split(",") if name], None, self.memory)
        # In CVAT, pixels without a shape are background.
        self.classes = things(self.memory.classes)

    @property
    def spec(self) -> cvataa.DetectionFunctionSpec:
        """The classes that are returned as masks."""
        labels = [cvataa.label_spec(name, label, type="mask") for label, name in self.classes.items()]
        return cvataa.DetectionFunctionSpec(labels=labels)

    def detect(
        self, context: cvataa.DetectionFunctionContext, image: PIL.Image.Image
    ) -> Sequence[cvataa.DetectionAnnotation]:
        """Return the regions of each class, largest first, so that regions inside holes are drawn on top."""
        found = self.memory.segment(image)
        patch_area = self.memory.settings.patch_area(self.memory.encoder.patch_size, *found.labels.shape)
        found = replace(found, labels=merge_small_regions(found.labels, patch_area))
        numbers = self.splitter(found).numbers.numpy() if self.splitter.classes else None
        confidence = found.confidence.numpy()
        shapes = []
        for order, region in enumerate(trace(found.labels.numpy(), self.classes, numbers)):
            (rows, columns), left, top = region.mask.shape, region.left, region.top
            score = float(confidence[top : top + rows, left : left + columns][region.mask].mean())
            if score < (context.conf_threshold or 0):
                continue
            if context.conv_mask_to_poly:  # a polygon of CVAT has no holes
                corners = [float(value) for corner in region.rings[0] for value in corner]
                shapes.append(cvataa.polygon(region.label, corners, z_order=order, score=score))
            else:
                runs = encode_mask(region.mask)[:-4]  # followed by the box, here within the region
                box = [left, top, left + columns - 1, top + rows - 1]
                points = [float(value) for value in (*runs, *box)]
                shapes.append(cvataa.mask(region.label, points, z_order=order, score=score))
        return shapes


create = Segmenter
