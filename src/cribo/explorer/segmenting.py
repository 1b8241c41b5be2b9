"""Segmentation from painted examples; examples of the most recent visitors are kept, within bounded memory."""

import io
import threading
import zipfile
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256

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
from cribo.segmentation.fitting import candidate_probes, default_probe
from cribo.segmentation.pictures import overlay
from cribo.segmentation.pixels import write_labels

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
_PATCHES = 45  # patches along the shorter side
_MOST_EXAMPLES = 12
_MOST_PATCHES = 30_000
_MOST_VISITORS = 32
_MOST_BYTES = 2 * 2**30  # of the examples of all visitors
_NO_CLASS = 255


@dataclass(frozen=True)
class SegmentedPicture:
    """A picture with its labels.

    Attributes:
        overlay: the picture, tinted by class.
        confidence: probability of each predicted label; bright is high.
        sentence: share of each class, as text.
    """

    overlay: UInt8[np.ndarray, "h w 3"]
    confidence: UInt8[np.ndarray, "h w 3"]
    sentence: str


@dataclass
class PaintedExamples:
    """The examples of a visitor.

    Attributes:
        memory: segmentation memory of the examples.
        paintings: pictures and their labels, by hash of the picture, so that a new painting replaces an earlier one.
    """

    memory: SegmentationMemory
    paintings: dict[str, tuple[UInt8[Tensor, "3 h w"], UInt8[Tensor, "h w"]]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        paintings = [part for painting in self.paintings.values() for part in painting]
        return self.memory.nbytes + sum(part.nbytes for part in paintings)

    def add(self, image: UInt8[Tensor, "3 h w"], labels: UInt8[Tensor, "h w"]) -> None:
        """Add a painting.

        Raises:
            Refused: the memory is full.
        """
        if len(self.memory) >= _MOST_EXAMPLES or self.memory.patches >= _MOST_PATCHES:
            raise Refused(f"The memory is full ({len(self.memory)} examples): start over to add more.")
        self.memory.add(image, labels)
        self.paintings[sha256(image.numpy().tobytes()).hexdigest()] = image, labels

    def zipped(self, names: Sequence[str]) -> bytes:
        """Return a zip file of all paintings in the layout that `cribo segment --examples` reads.

        Args:
            names: names of the classes, in the order of the brushes; empty names default to the colour.

        Raises:
            Refused: there are no examples.
        """
        if not self.paintings:
            raise Refused("There are no examples yet: paint one and add it first.")
        content = io.BytesIO()
        with zipfile.ZipFile(content, "w") as archive:
            for number, (image, labels) in enumerate(self.paintings.values(), start=1):
                with archive.open(f"examples/images/{number:02d}.png", "w") as file:
                    TF.to_pil_image(image).save(file, "PNG")
                with archive.open(f"examples/labels/{number:02d}.png", "w") as file:
                    write_labels(labels, list(BRUSHES.values()), file)
            archive.writestr("examples/classes.txt", "".join(f"{name}\n" for name in _named(names)))
        return content.getvalue()


class Visitors:
    """Examples of the most recently active visitors.

    Args:
        encoder: the shared encoder.
    """

    def __init__(self, encoder: SharedEncoder) -> None:
        self.encoder = encoder
        self._lock = threading.Lock()
        self._examples: OrderedDict[str, PaintedExamples] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of visitors with examples."""
        return len(self._examples)

    def __contains__(self, visitor: str) -> bool:
        """Whether a visitor has examples."""
        return visitor in self._examples

    def examples(self, visitor: str) -> PaintedExamples:
        """Return the examples of a visitor, which are empty for a new visitor."""
        with self._lock:
            examples = self._examples.get(visitor)
            if examples is None:
                examples = self._examples[visitor] = PaintedExamples(self._empty())
            self._examples.move_to_end(visitor)
            while len(self) > 1 and (len(self) > _MOST_VISITORS or self._nbytes() > _MOST_BYTES):
                self._examples.popitem(last=False)
            return examples

    def forget(self, visitor: str) -> None:
        """Discard the examples of a visitor."""
        with self._lock:
            self._examples.pop(visitor, None)

    def _nbytes(self) -> int:
        return sum(examples.nbytes for examples in self._examples.values())

    def _empty(self) -> SegmentationMemory:
        # Use the default probe: comparing probes would take several seconds after each example.
        available = self.encoder.probed.blocks
        probe = default_probe(candidate_probes(available, blocks=None, whiten=None, head=None), available)
        return SegmentationMemory(
            self.encoder.probed,
            classes=list(BRUSHES),
            palette=list(BRUSHES.values()),
            settings=SegmentationSettings(
                size=_PATCHES * self.encoder.probed.patch_size,
                blocks=probe.blocks,
                whiten=probe.whiten,
                head=probe.head,
            ),
            device=self.encoder.device,
            batch_size=1,
        )


def example_of(
    image: UInt8[Tensor, "3 h w"], layer: bytes, *, max_pixels: int
) -> tuple[UInt8[Tensor, "3 new_h new_w"], UInt8[Tensor, "new_h new_w"]]:
    """Convert a painted picture to an example: the picture and the class of each pixel, both reduced.

    Painted pixels get the class of the brush with the nearest colour; other pixels are ignored.

    Args:
        image: the picture.
        layer: the painting, an image file with transparency.
        max_pixels: maximum number of pixels of the layer.

    Raises:
        Refused: nothing is painted, or the layer is not an image of the size of the picture.
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
            f"The painting must have the size of its picture, {image.shape[2]} x {image.shape[1]}, got "
            f"{painted_size[1]} x {painted_size[0]}: upload the picture again and repeat the painting."
        )
    painted = torch.from_numpy(np.array(small))
    brushes = torch.tensor(list(BRUSHES.values()))
    distances = (painted[..., None, :3].int() - brushes).abs().sum(dim=-1)
    labels = torch.where(painted[..., 3] >= 128, distances.argmin(dim=-1), _NO_CLASS).to(torch.uint8)
    if not (labels != _NO_CLASS).any():
        raise Refused("Nothing is painted yet: choose a colour and paint over parts of each object.")
    return TF.resize(image, list(size), antialias=True), labels


def prepare(memory: SegmentationMemory, image: UInt8[Tensor, "3 h w"]) -> UInt8[Tensor, "3 new_h new_w"]:
    """Reduce a picture and cache its features for later requests."""
    small = TF.resize(image, list(_bounded(image.shape[1], image.shape[2])), antialias=True)
    memory.encoder.encode([small])
    return small


def memory_sentence(memory: SegmentationMemory | None) -> str:
    """Describe the contents of a memory; None stands for an empty one."""
    if memory is None or not len(memory):
        return "No examples yet."
    present = [name for name in memory.classes if name not in memory.absent]
    summary = f"{len(memory)} example{'s' * (len(memory) > 1)}, {memory.patches} patches: {', '.join(present)}."
    if len(present) == 1:
        return f"{summary} Paint a second class: with a single class, all pixels are assigned to it."
    # Halves of a single picture often have different classes, so a score from them would be misleading.
    choice = memory.fit() if len(memory) > 1 else None
    if choice is None or choice.expected is None:
        return summary
    return f"{summary} Expected mIoU on new pictures{choice.coverage(len(present))}: {choice.expected:.0%}."


def segment(memory: SegmentationMemory, image: UInt8[Tensor, "3 h w"], names: Sequence[str]) -> SegmentedPicture:
    """Segment a picture from the examples.

    Args:
        memory: memory of the examples.
        image: picture to segment.
        names: names of the classes, in the order of the brushes; empty names default to the colour.

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
    labels = TF.resize(found.labels[None], list(size), interpolation=nearest)[0]
    painted = overlay(torch.from_numpy(picture).permute(2, 0, 1), labels, list(BRUSHES.values()))
    clear = np.array(Image.fromarray((255 * found.confidence.clamp(0, 1)).byte().numpy()).resize((size[1], size[0])))
    name_of = dict(zip(BRUSHES, _named(names), strict=True))
    shares = ", ".join(f"{name_of[brush]} {share:.0%}" for brush, share in found.shares.items())
    return SegmentedPicture(painted, clear[..., None].repeat(3, axis=2), f"{shares}.")


def _named(names: Sequence[str]) -> list[str]:
    """Return the class name of each brush, by default its colour."""
    given = {brush: name.strip() for brush, name in zip(BRUSHES, names, strict=False)}
    return [given.get(brush) or brush for brush in BRUSHES]


def _bounded(height: int, width: int) -> tuple[int, int]:
    scale = min(1.0, _LONGEST / max(height, width))
    return max(1, round(scale * height)), max(1, round(scale * width))
