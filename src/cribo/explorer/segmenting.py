"""Segmentation by examples that visitors paint: one bounded memory of patches per visitor."""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2 import functional as TF

from cribo.data.reading import EncodedImage, UnreadableImage, open_header
from cribo.data.segmentation import Colour
from cribo.explorer.network import SharedEncoder
from cribo.explorer.pictures import as_shown
from cribo.explorer.uploads import Refused
from cribo.segmentation import SegmentationMemory, SegmentationSettings

BRUSHES: dict[str, Colour] = {
    "red": (230, 25, 75),
    "green": (60, 180, 75),
    "blue": (0, 130, 200),
    "yellow": (255, 225, 25),
    "magenta": (240, 50, 230),
    "cyan": (70, 240, 240),
}
"""Colours of the brushes, one per class."""

_LONGEST = 768  # longer side of an example in pixels
_PATCHES = 45  # along the shorter side
_MOST_EXAMPLES = 12
_MOST_PATCHES = 30_000
_MOST_VISITORS = 32
_NO_CLASS = 255


@dataclass(frozen=True)
class SegmentedPicture:
    """A picture with its labels.

    Attributes:
        overlay: the picture, tinted with the colours of its classes.
        confidence: probability that a label is right; bright is high.
        sentence: share of each class.
    """

    overlay: UInt8[np.ndarray, "h w 3"]
    confidence: UInt8[np.ndarray, "h w 3"]
    sentence: str


class Visitors:
    """Memories of the most recently active visitors.

    Args:
        encoder: shared by all.
    """

    def __init__(self, encoder: SharedEncoder) -> None:
        self.encoder = encoder
        self._lock = threading.Lock()
        self._memories: OrderedDict[str, SegmentationMemory] = OrderedDict()

    def __len__(self) -> int:
        """Number of memories."""
        return len(self._memories)

    def memory(self, visitor: str) -> SegmentationMemory:
        """Return the memory of a visitor; an empty one for a new visitor."""
        with self._lock:
            memory = self._memories.get(visitor)
            if memory is None:
                memory = self._memories[visitor] = self._empty()
            self._memories.move_to_end(visitor)
            while len(self._memories) > _MOST_VISITORS:
                self._memories.popitem(last=False)
            return memory

    def forget(self, visitor: str) -> None:
        """Discard the memory of a visitor."""
        with self._lock:
            self._memories.pop(visitor, None)

    def _empty(self) -> SegmentationMemory:
        return SegmentationMemory(
            self.encoder.probed,
            classes=list(BRUSHES),
            palette=list(BRUSHES.values()),
            settings=SegmentationSettings(size=_PATCHES * self.encoder.probed.patch_size),
            device=self.encoder.device,
            batch_size=1,
        )


def example_of(
    image: UInt8[Tensor, "3 h w"], layer: bytes, *, max_pixels: int
) -> tuple[UInt8[Tensor, "3 new_h new_w"], UInt8[Tensor, "new_h new_w"]]:
    """Convert a painted picture to an example: the picture and the class of each pixel, both reduced.

    Painted pixels have the class of the brush nearest in colour; other pixels have none.

    Args:
        image: the picture.
        layer: the painting, an image file with transparency.
        max_pixels: larger layers are not decoded.

    Raises:
        Refused: nothing is painted, or the layer is not an image or not of the size of the picture.
    """
    size = _bounded(image.shape[1], image.shape[2])
    try:
        with open_header(EncodedImage("painting", layer), max_pixels=max_pixels) as opened:
            painted_size = opened.size[1], opened.size[0]
            small = opened.convert("RGBA").resize((size[1], size[0]), Image.Resampling.NEAREST)
    except UnreadableImage as error:
        raise Refused(f"The painting cannot be used: {error.reason}.") from error
    if painted_size != tuple(image.shape[1:]):
        raise Refused(
            f"The painting has {painted_size[1]} x {painted_size[0]} pixels and its picture {image.shape[2]} x "
            f"{image.shape[1]}: upload the picture again and repeat the painting."
        )
    painted = torch.from_numpy(np.array(small))
    brushes = torch.tensor(list(BRUSHES.values()))
    distances = (painted[..., None, :3].int() - brushes).abs().sum(dim=-1)
    labels = torch.where(painted[..., 3] >= 128, distances.argmin(dim=-1), _NO_CLASS).to(torch.uint8)
    if not (labels != _NO_CLASS).any():
        raise Refused("Nothing is painted yet: choose a colour and paint over parts of each thing.")
    return TF.resize(image, list(size), antialias=True), labels


def prepare(memory: SegmentationMemory, image: UInt8[Tensor, "3 h w"]) -> UInt8[Tensor, "3 new_h new_w"]:
    """Reduce a picture and put its features into the cache, so that later requests need not wait for the network."""
    small = TF.resize(image, list(_bounded(image.shape[1], image.shape[2])), antialias=True)
    memory.encode([small])
    return small


def add_example(memory: SegmentationMemory, image: UInt8[Tensor, "3 h w"], labels: UInt8[Tensor, "h w"]) -> None:
    """Add an example to a memory.

    Raises:
        Refused: the memory is full.
    """
    if len(memory) >= _MOST_EXAMPLES or memory.patches >= _MOST_PATCHES:
        raise Refused(f"The memory is full ({len(memory)} examples): start over to add others.")
    memory.add(image, labels)


def memory_sentence(memory: SegmentationMemory) -> str:
    """Describe the contents of a memory."""
    if not len(memory):
        return "No examples yet."
    present = [name for name in memory.classes if name not in memory.absent]
    said = f"{len(memory)} example{'s' * (len(memory) > 1)}, {memory.patches} patches: {', '.join(present)}."
    if len(present) == 1:
        return f"{said} Paint another class, too: with only one, all pixels get it."
    # The halves of a single picture often have different classes: a score from them would mislead.
    expected = memory.fit().expected if len(memory) > 1 else None
    return said if expected is None else f"{said} Expected mIoU on new pictures: {expected:.0%}."


def segment(memory: SegmentationMemory, image: UInt8[Tensor, "3 h w"], names: Sequence[str]) -> SegmentedPicture:
    """Label a picture by the examples.

    Args:
        memory: of the examples.
        image: to label.
        names: of the classes, in the order of the brushes; empty names default to the colour.

    Raises:
        Refused: there are no examples.
    """
    small = prepare(memory, image)
    if not len(memory):
        raise Refused("There are no examples yet: paint one and add it first.")
    found = memory.segment(small)
    picture = as_shown(small)
    size = picture.shape[:2]
    nearest = TF.InterpolationMode.NEAREST_EXACT
    labels = TF.resize(found.labels[None], list(size), interpolation=nearest)[0].numpy()
    colours = np.array(list(BRUSHES.values()), dtype=np.float32)[labels]
    overlay = np.rint(0.45 * picture + 0.55 * colours).astype(np.uint8)
    clear = np.array(Image.fromarray((255 * found.confidence.clamp(0, 1)).byte().numpy()).resize((size[1], size[0])))
    said = {brush: name.strip() for brush, name in zip(BRUSHES, names, strict=False) if name.strip()}
    shares = ", ".join(f"{said.get(name, name)} {share:.0%}" for name, share in found.shares.items())
    return SegmentedPicture(overlay, clear[..., None].repeat(3, axis=2), f"{shares}.")


def _bounded(height: int, width: int) -> tuple[int, int]:
    scale = min(1.0, _LONGEST / max(height, width))
    return max(1, round(scale * height)), max(1, round(scale * width))
