"""Labelling of planes by strokes: a backbone that stays loaded, and a memory of all strokes."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Integer
from scipy.ndimage import uniform_filter

from cribo.apps.segment.suggesting import suggest
from cribo.base.errors import InputError
from cribo.base.wording import counted
from cribo.data.config import PixelOptions
from cribo.data.labelled.label_maps import IGNORE_INDEX
from cribo.explorer.network import SharedNetwork
from cribo.features import BackboneSource, Encoder
from cribo.features.encoder import open_network
from cribo.features.memory import Example, Segmentation, SegmentationMemory, SegmentationSettings, probe_encoder
from napari_cribo.planes import Plane, reading_of

Strokes = tuple[Plane, Integer[np.ndarray, "h w"]]
"""A plane and the strokes on it: label k of a layer is the k-th class, 0 is none."""


@dataclass(frozen=True)
class Result:
    """What is found on one plane.

    Attributes:
        plane: the plane.
        found: its labels and confidence; None if it cannot be labelled.
        reason: why not.
    """

    plane: Plane
    found: Segmentation | None
    reason: str = ""


@dataclass(frozen=True)
class Suggestion:
    """Where to paint next.

    Attributes:
        plane: the plane.
        row, column: a pixel in a region of low confidence.
    """

    plane: Plane
    row: float
    column: float


@dataclass(frozen=True)
class Summary:
    """What is known after labelling.

    Attributes:
        classes: names of the classes; label k is `classes[k - 1]`.
        score: the expected score, and how it was measured.
        warning: why the confidence is not calibrated, and what to do; "" if it is.
        suggestion: where to paint next.
    """

    classes: tuple[str, ...]
    score: str
    warning: str
    suggestion: Suggestion | None


class Session:
    """Labels planes by strokes, with one backbone.

    The memory is made anew from all strokes each time, so that erased ones are forgotten. Features are kept, so that
    planes are encoded once.

    Args:
        backbone: source of the backbone, as for `cribo segment --backbone`.
        memory_file: a memory to which strokes are added; None for strokes alone.

    Attributes:
        memory: the memory that labelled last; None before.
    """

    def __init__(self, backbone: str, memory_file: Path | None = None) -> None:
        self.backbone, self.memory_file = backbone, memory_file
        self.memory: SegmentationMemory | None = None
        self._networks: dict[int, tuple[Encoder, dict[str, object]]] = {}  # by the number of channels

    def label(
        self, strokes: Sequence[Strokes], planes: Sequence[Plane], names: Sequence[str] = ()
    ) -> Generator[Result, None, Summary]:
        """Label planes by strokes, one after the other.

        Args:
            strokes: all strokes.
            planes: planes to label.
            names: names of the classes; those without one are called `class 3`. Ignored with a memory file.

        Yields:
            The result of each plane, in their order.

        Returns:
            What is known about all of them.

        Raises:
            InputError: nothing or a single class is painted, or the backbone or the memory file cannot be used.
        """
        memory = self._opened(strokes, planes, names)
        _check(strokes, memory.classes, self.memory_file)
        memory.extend(
            [
                Example(plane.in_8_bits(memory.settings), np.where(drawn == 0, IGNORE_INDEX, drawn - 1), plane.title)
                for plane, drawn in strokes
            ]
        )
        present = [name for name, count in zip(memory.classes, memory.holding, strict=True) if count]
        if len(present) < 2:
            raise InputError(
                f"only {present[0]} is painted, and every pixel would be labelled so: paint a second class"
            )
        choice = memory.fit()
        self.memory = memory
        found: list[tuple[Plane, Segmentation]] = []
        for plane in planes:
            try:
                segmentation = memory.segment(plane.in_8_bits(memory.settings))
            except InputError as error:
                yield Result(plane, None, str(error))
            else:
                found.append((plane, segmentation))
                yield Result(plane, segmentation)
        if choice.expected is not None:
            score = (
                f"{choice.expected:.0%} mIoU{choice.coverage(len(present))} expected from "
                f"{counted(len(memory), 'example')}, measured on strokes by leaving out {choice.left_out}"
            )
        else:
            score = f"No expected score: {memory.unmeasured}"
        return Summary(tuple(memory.classes), score, memory.uncalibrated, self._suggestion(strokes, found))

    def save(self, path: Path) -> None:
        """Write the memory that labelled last to a new file.

        Raises:
            InputError: nothing was labelled, or the file exists.
        """
        if self.memory is None:
            raise InputError("nothing is labelled yet: paint two classes and label first")
        if path.exists():
            raise InputError(f"{path} exists and is not replaced: choose another name")
        self.memory.save(path)

    def _opened(self, strokes: Sequence[Strokes], planes: Sequence[Plane], names: Sequence[str]) -> SegmentationMemory:
        """Return the memory of the file, or an empty one for images like the painted ones."""
        if self.memory_file is not None:
            # Its settings are read first: they determine the channels of the network.
            listed = SegmentationMemory.load(self.memory_file, None)
            encoder, about = self._network(listed.settings)
            memory = SegmentationMemory.load(self.memory_file, encoder)
        else:
            if not strokes:
                raise InputError("nothing is painted: choose an image, click Paint, and paint parts of two classes")
            drawn_on = [plane for plane, _ in strokes]
            alike = [plane for plane in planes if plane.channels == drawn_on[0].channels]
            reading = reading_of([*drawn_on, *alike])
            encoder, about = self._network(reading)
            settings = SegmentationSettings(range=reading.range, channels=reading.channels)
            memory = SegmentationMemory(encoder, classes=_classes(strokes, names), settings=settings, batch_size=1)
        memory.backbone = {**about}
        return memory

    def _network(self, reading: PixelOptions) -> tuple[Encoder, dict[str, object]]:
        """Return the encoder for images of these channels, which keeps features, and its description."""
        count = reading.in_chans
        if count not in self._networks:
            network, about = open_network(BackboneSource(self.backbone), in_chans=count)
            device = "cuda" if torch.cuda.is_available() else "cpu"
            encoder = probe_encoder(network.eval().to(device))
            self._networks[count] = SharedNetwork(encoder, probed=encoder).probed, about
        return self._networks[count]

    def _suggestion(self, strokes: Sequence[Strokes], found: Sequence[tuple[Plane, Segmentation]]) -> Suggestion | None:
        """Return the least certain place of the image to paint next: one without strokes, if there is one."""
        assert self.memory is not None
        memory = self.memory
        done = {(id(plane.data), plane.index) for plane, _ in strokes}
        fresh = [each for each in found if (id(each[0].data), each[0].index) not in done]
        if not found:
            return None
        if fresh:
            reading = memory.settings
            images = (plane.in_8_bits(reading) for plane, _ in fresh)
            plane, segmentation = fresh[suggest(memory, images, 1)[0]]
        else:
            plane, segmentation = min(found, key=lambda each: float(each[1].confidence.mean()))
        row, column = least_certain(segmentation, 2 * memory.encoder.patch_size)
        return Suggestion(plane, row, column)


def least_certain(segmentation: Segmentation, side: int) -> tuple[int, int]:
    """Return the centre of the square with the lowest mean confidence, as row and column; it lies inside the image.

    Args:
        segmentation: labels and confidence of an image.
        side: side of the square in pixels.
    """
    smooth = uniform_filter(segmentation.confidence.numpy(), size=side, mode="nearest")
    height, width = segmentation.confidence.shape
    top, left = min(side, height - 1) // 2, min(side, width - 1) // 2
    inside = smooth[top : height - top, left : width - left]
    row, column = np.unravel_index(int(inside.argmin()), inside.shape)
    return int(row) + top, int(column) + left


def _classes(strokes: Sequence[Strokes], names: Sequence[str]) -> list[str]:
    """Return the names of all classes that are named or painted."""
    highest = max(int(drawn.max()) for _, drawn in strokes)
    if highest > IGNORE_INDEX:
        raise InputError(f"labels must be 1 to {IGNORE_INDEX}, got {highest}: paint with a lower label")
    return [*names, *(f"class {label}" for label in range(len(names) + 1, highest + 1))]


def _check(strokes: Sequence[Strokes], classes: Sequence[str], memory_file: Path | None) -> None:
    for plane, drawn in strokes:
        if drawn.min() < 0 or drawn.max() > len(classes):
            wrong = int(drawn.min() if drawn.min() < 0 else drawn.max())
            raise InputError(
                f"{plane.name}: labels must be 1 to {len(classes)} ({', '.join(classes)}"
                f"{'' if memory_file is None else f', the classes of {memory_file.name}'}), got {wrong}"
            )
