"""Label maps: the class of each pixel of an image, stored as class indices, as a mask of 0 and 255, or as colours."""

import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Int16, Int32, Integer, UInt8
from PIL import Image
from torch import Tensor

from cribo.base.colours import Colour
from cribo.base.errors import DataError
from cribo.base.files import read_lines, require
from cribo.base.wording import counted, enumerated
from cribo.data.reading import read_values

CLASSES_FILE = "classes.txt"
"""Text file with the names of the classes."""

IGNORE_INDEX = 255
"""Label of pixels that memories and scores ignore."""

MASK_CLASSES: Sequence[str] = ("background", "foreground")
"""Names of the classes of masks of 0 and 255 without a list of classes."""

_IGNORED = "ignore"  # name of colours without a class in a list of colours
_COLOURED_LINE = re.compile(r"(.+?)[\s,]+(?:#([0-9a-fA-F]{6})|(\d{1,3})[\s,]+(\d{1,3})[\s,]+(\d{1,3}))")
_MOST_LISTED = 10  # colours in a message
_MOST_SURVEYED = 100  # label maps whose colours are counted for a message
_COMMENT = "#"  # first character of the lines of a list that are skipped
_NEAR = 16  # values of a soft mask below this are background, and values as near to 255 foreground


class LabelledBox(NamedTuple):
    """A box around an object whose pixels are unknown.

    Attributes:
        label: class of the object.
        corners: (left, top, right, bottom) in pixels of the image; it may reach beyond the image.
        rest: class of the other pixels in the box, such as the background; 255 for none.
    """

    label: int
    corners: tuple[float, float, float, float]
    rest: int = IGNORE_INDEX

    def clipped(self, height: int, width: int) -> tuple[int, int, int, int] | None:
        """Return the (left, top, right, bottom) of its whole pixels in the image; None if it has no area there.

        Example:
            >>> LabelledBox(0, (-3, 1.2, 4, 90)).clipped(10, 20), LabelledBox(0, (30, 1, 40, 9)).clipped(10, 20)
            ((0, 1, 4, 10), None)
        """
        left, top, right, bottom = self.corners
        if not (left < right and top < bottom and left < width and top < height and right > 0 and bottom > 0):
            return None
        return (
            *(math.floor(max(0, left)), math.floor(max(0, top))),
            *(math.ceil(min(width, right)), math.ceil(min(height, bottom))),
        )


class LabelMap(NamedTuple):
    """The class of each pixel of an image.

    Attributes:
        labels: class of each pixel, 255 for none.
        palette: colours of the classes of a palette PNG.
        boxes: boxes of further objects, whose pixels are found by their features (`features.memory.prompts`). Until
            then, they are 255.
    """

    labels: UInt8[Tensor, "h w"]
    palette: tuple[Colour, ...] | None = None
    boxes: tuple[LabelledBox, ...] = ()


class Task(NamedTuple):
    """What a tool knows of an image, kept from its labels to the results.

    Attributes:
        id: of the image or task; "" if there is none.
        split: such as train or val; "" if there are no splits.
    """

    id: str = ""
    split: str = ""


def _no_place(name: str) -> Any:
    raise DataError(f"{name} has no coordinates")


class Labelling(NamedTuple):
    """Labels of many images, to be written to a file.

    Attributes:
        sizes: height and width of each image by name, at full resolution.
        classes: names of the classes.
        labels: returns the class of each pixel of an image by its name, at full resolution; for formats that hold
            labels of any resolution (`LabelFormat.any_resolution`), at that at which the image was read.
        tasks: ids and splits by the name of an image, or by the last part of its name.
        instances: returns the number of the instance of each pixel, 0 for none, at the resolution of the labels; None
            if no class has instances.
        place: returns where an image lies on the map, a `Georeference`; only for formats with coordinates.
    """

    sizes: Mapping[str, tuple[int, int]]
    classes: Sequence[str]
    labels: Callable[[str], UInt8[Tensor, "h w"]]
    tasks: Mapping[str, Task] = {}
    instances: Callable[[str], Int32[Tensor, "h w"]] | None = None
    place: Callable[[str], Any] = _no_place

    def task(self, name: str) -> Task:
        """Return what a tool knows of an image."""
        return self.tasks.get(name) or self.tasks.get(PurePosixPath(name).name) or Task()

    def instances_of(self, name: str) -> Int32[np.ndarray, "h w"] | None:
        """Return the number of the instance of each pixel of an image, 0 for none."""
        return None if self.instances is None else self.instances(name).numpy()

    def masks(self, name: str, classes: Iterable[int]) -> Iterator[tuple[int, Bool[np.ndarray, "h w"]]]:
        """Yield the pixels of each class that occurs in an image, instance by instance for classes with instances."""
        labels, instances = self.labels(name).numpy(), self.instances_of(name)
        for label in classes:
            inside = labels == label
            if instances is None:
                numbers = [0] if inside.any() else []
            else:
                numbers = np.unique(instances[inside]).tolist()
            for number in numbers:
                yield label, inside if instances is None else inside & (instances == number)


# ---------------------------------------------------------------------------------------------------- class indices


@dataclass(frozen=True)
class LabelValues:
    """Meaning of the values in the label maps of a set.

    Attributes:
        classes: the value of each class, in the order of the classes; all different, 0 to 255.
        ignored: the values of ignored pixels.
    """

    classes: tuple[int, ...]
    ignored: tuple[int, ...] = (IGNORE_INDEX,)

    @cached_property
    def table(self) -> Int16[np.ndarray, "256"]:
        """The class of each value, `IGNORE_INDEX` for ignored values, -1 for all others."""
        table = np.full(256, -1, dtype=np.int16)
        table[list(self.ignored)] = IGNORE_INDEX
        table[list(self.classes)] = np.arange(len(self.classes))
        return table

    def __str__(self) -> str:
        ignored = f" or {_ranges(self.ignored)} (ignored)" if self.ignored else ""
        return f"in {_ranges(self.classes)} ({len(self.classes)} classes){ignored}"

    def read(self, image: Image.Image, what: str) -> LabelMap:
        """Return the class of each pixel of a grey or palette image, or of a grey image that is stored as RGB.

        `what` is the name of the image in error messages.

        Raises:
            DataError: the image has colours, a value that is neither a class nor ignored, or, without a list of
                classes, the values of a mask with soft edges.
        """
        if image.mode == "F":
            raise DataError(f"{what}: labels must be integers, got 32-bit floats: save a grey or palette PNG")
        values = _values(image)
        if values is None:
            raise DataError(
                f"{what}: labels must be class indices, got colours (mode {image.mode}): replace each colour with the "
                "index of its class"
            )
        narrow = values.astype(np.uint8)  # maps may also have 1 or 16 bits per pixel
        labels = self.table.take(narrow)
        wrong = (labels < 0) | (narrow != values)
        # With 255 classes, none are listed; with two, masks are usual.
        may_be_mask = len(self.classes) == IGNORE_INDEX or (len(self.classes) == len(MASK_CLASSES) and wrong.any())
        if may_be_mask and (soft := _soft_mask(values)):
            raise DataError(
                f"{what}: {soft}. This is a mask of 0 and 255 with soft edges, or one that was saved as JPEG: "
                "threshold it at 128 and save it as PNG. If the values are class indices, list the classes in "
                "classes.txt"
            )
        if wrong.any():
            raise DataError(
                f"{what}: labels must be {self}, got {int(values[wrong][0])} at {int(wrong.sum())} of {values.size} "
                "pixels: correct the label map, or the list of classes"
            )
        return LabelMap(torch.from_numpy(labels.astype(np.uint8)), self._palette(image, labels))

    def _palette(self, image: Image.Image, labels: Int16[np.ndarray, "h w"]) -> tuple[Colour, ...] | None:
        """Return the colours of a palette PNG up to the last class that it contains or that is not black (padding)."""
        colours = image.getpalette("RGB") if image.mode == "P" else None
        if colours is None:
            return None
        of_values = list(zip(colours[::3], colours[1::3], colours[2::3], strict=True))
        palette = [of_values[value] for value in self.classes if value < len(of_values)]
        used = 1 + int(labels[labels != IGNORE_INDEX].max(initial=0))
        while len(palette) > used and palette[-1] == (0, 0, 0):
            palette.pop()
        return tuple(palette)


MASKS = LabelValues((0, 255), ignored=())
"""Values of masks of a background and a foreground."""


def class_indices(count: int) -> LabelValues:
    """Return values that are class indices, with 255 for ignored pixels."""
    return LabelValues(tuple(range(count)))


def are_masks(label_maps: Iterable[Image.Image]) -> bool:
    """Whether the values of all label maps are 0 and 255; reads them up to the first other value."""
    found: set[int] = set()
    for image in label_maps:
        values = None if image.mode == "F" else _values(image)
        if values is None or not set(np.unique(values).tolist()) <= {0, 255}:
            return False
        found.update(np.unique(values).tolist())
    return found == {0, 255}


def has_colours(image: Image.Image) -> bool:
    """Whether a label map has colours, rather than values."""
    return len(image.getbands()) > 1 and _values(image) is None


def _values(image: Image.Image) -> Integer[np.ndarray, "h w"] | None:
    """Return the values of a grey or palette image, also if it is stored as RGB; None for colours."""
    if len(image.getbands()) == 1:
        return np.array(image).astype(np.uint8) if image.mode == "1" else np.array(image)
    pixels = np.array(image.convert("RGBA"))
    is_grey = (pixels[..., :3] == pixels[..., :1]).all() and (pixels[..., 3] == 255).all()
    return pixels[..., 0] if is_grey else None


def _soft_mask(values: Integer[np.ndarray, "h w"]) -> str | None:
    """Describe the values of a mask with soft edges; None for other values.

    Most pixels are near 0 or near 255, and some lie between. Class indices of 128 and more that few pixels have would
    look alike, so this is not applied to label maps whose classes are listed.
    """
    if values.dtype != np.uint8:
        return None
    counts = np.bincount(values.ravel(), minlength=256)
    low, high = int(counts[:_NEAR].sum()), int(counts[-_NEAR:].sum())
    if not (low and high and 2 * (low + high) > values.size and counts[128:IGNORE_INDEX].any()):
        return None
    different = np.count_nonzero(counts)
    return f"{low + high} of {values.size} pixels are near 0 or 255, and there are {different} different values"


def _ranges(values: Iterable[int]) -> str:
    """Format numbers as ranges: `0..3, 7, 255`."""
    ordered = np.array(sorted(values))
    runs = np.split(ordered, np.flatnonzero(np.diff(ordered) != 1) + 1)
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs)


# ---------------------------------------------------------------------------------------------------------- colours


@dataclass(frozen=True)
class LabelColours:
    """Colours of the classes in the label maps of a set. Transparent pixels are ignored.

    Attributes:
        names: names of the classes.
        classes: the colour of each class.
        ignored: the colours of ignored pixels.
        source: the file that lists them, for messages.
    """

    names: tuple[str, ...]
    classes: tuple[Colour, ...]
    ignored: tuple[Colour, ...]
    source: str

    def read(self, image: Image.Image, what: str) -> LabelMap:
        """Return the class of each pixel of a label map by its colour; `what` is its name in errors.

        Raises:
            DataError: a colour is not listed, or the image has more than 8 bits per channel.
        """
        if image.mode in ("F", "I") or image.mode.startswith("I;"):
            raise DataError(f"{what}: labels must be colours of 8 bits per channel, as {self.source} lists colours")
        pixels = np.array(image.convert("RGBA"))
        packed = _packed(pixels)
        listed = _packed(np.array([*self.classes, *self.ignored]))
        order = listed.argsort()
        places = order[np.searchsorted(listed, packed, sorter=order).clip(max=len(listed) - 1)]
        opaque = pixels[..., 3] > 0
        if (wrong := opaque & (listed[places] != packed)).any():
            raise self._unlisted(Counter(packed[wrong].tolist()), packed.size, what, is_grey=image.mode in ("L", "1"))
        labels = np.where(opaque & (places < len(self.classes)), places, IGNORE_INDEX)
        return LabelMap(torch.from_numpy(labels.astype(np.uint8)))

    def _unlisted(self, counts: Counter[int], pixels: int, what: str, *, is_grey: bool) -> DataError:
        (colour, count), *others = counts.most_common()
        listed = enumerated([f"{name} {_hex(own)}" for name, own in zip(self.names, self.classes, strict=True)])
        further = f" (and {counted(len(others), 'other colour')})" if others else ""
        indices = f", or remove the colours from {self.source} if the values are class indices" if is_grey else ""
        return DataError(
            f"{what}: the colour {_hex(_unpacked(colour))} of {count} of {pixels} pixels{further} is not in "
            f"{self.source}, which lists {listed}: add it, with the name {_IGNORED} for pixels without a class{indices}"
        )


def unlisted_colours(what: str, label_maps: Iterable[Image.Image]) -> DataError:
    """Return the error for a coloured label map `what` without a list of colours, with the list to write."""
    counts: Counter[int] = Counter()
    for image in label_maps:
        colours, numbers = np.unique(_packed(np.array(image.convert("RGB"))), return_counts=True)
        counts.update(dict(zip(colours.tolist(), numbers.tolist(), strict=True)))
    shares = [(_hex(_unpacked(colour)), count / counts.total()) for colour, count in counts.most_common()]
    found = enumerated([f"{colour} {share:.1%}" for colour, share in shares], _MOST_LISTED)
    lines = "".join(f"\n  NAME {colour}" for colour, _ in shares[:_MOST_LISTED])
    if len(shares) > IGNORE_INDEX:
        return DataError(
            f"{what}: labels are {len(shares)} colours, but at most {IGNORE_INDEX} classes are possible. Colours "
            f"found: {found}. Label maps with soft edges, or saved as JPEG, have more colours than classes: save "
            "them as PNG without smoothing, or give the label maps instead of photographs"
        )
    return DataError(
        f"{what}: labels are colours, but the colours of the classes are not listed. Colours found: {found}. Write the "
        f"name and colour of each class to classes.txt, with the name {_IGNORED} for pixels without a class:{lines}"
    )


def _packed(pixels: Integer[np.ndarray, "*size c"]) -> Integer[np.ndarray, "*size"]:
    wide = pixels.astype(np.int64)
    return wide[..., 0] << 16 | wide[..., 1] << 8 | wide[..., 2]


def _unpacked(number: int) -> Colour:
    return number >> 16, number >> 8 & 255, number & 255


def _hex(colour: Colour) -> str:
    return "#{:02x}{:02x}{:02x}".format(*colour)


# ------------------------------------------------------------------------------------------------------------ files


def write_labels(labels: UInt8[Tensor, "h w"], palette: Sequence[Colour], file: Path | IO[bytes]) -> None:
    """Write class indices as a palette PNG; 255 means no class."""
    image = Image.fromarray(labels.numpy())
    image.putpalette([part for colour in palette for part in colour])
    # By default, Pillow stores only as many bits as the palette needs, which truncates 255.
    image.save(file, "PNG", **({"bits": 8} if labels.max() == IGNORE_INDEX else {}))


def open_some(paths: Sequence[str]) -> Iterator[Image.Image]:
    """Open up to a hundred label maps, evenly spaced."""
    return map(read_values, paths[:: max(1, -(-len(paths) // _MOST_SURVEYED))])


class ClassList(NamedTuple):
    """Names of classes, and their colours in label maps unless these contain class indices."""

    names: list[str]
    colours: LabelColours | None = None


def read_classes(classes: Sequence[str] | str | os.PathLike[str]) -> ClassList:
    """Return classes, given by their names or by a text file with a line for each: its name, or its name and colour.

    A colour is `#rrggbb` or `r g b`. Colours with the name `ignore` mark pixels without a class. Blank lines and lines
    that start with # are skipped.

    Raises:
        MissingData: the file does not exist.
        DataError: there are not 1 to 255 different names, only some lines have colours, or two have the same colour.
    """
    if not isinstance(classes, str | os.PathLike):
        return ClassList(_checked(list(classes), "classes"))
    path = Path(classes).expanduser()
    require(path)
    lines = [line for _, line in read_lines(path, "a list of classes") if not line.startswith(_COMMENT)]
    matches = [_COLOURED_LINE.fullmatch(line) for line in lines]
    if not any(matches):
        return ClassList(_checked(lines, str(path)))
    entries: list[tuple[str, Colour]] = []
    for line, match in zip(lines, matches, strict=True):
        if match is None:
            raise DataError(f"{path}: {line!r} has no colour, but other lines have: add #rrggbb, or remove all colours")
        name, code, *numbers = match.groups()
        colour = _unpacked(int(code, 16)) if code else (int(numbers[0]), int(numbers[1]), int(numbers[2]))
        if max(colour) > 255:
            raise DataError(f"{path}: colours must be 0 to 255, got {line!r}")
        if other := next((each for each, own in entries if own == colour), None):
            raise DataError(f"{path}: {other} and {name} have the same colour, {_hex(colour)}")
        entries.append((name, colour))
    classed = [(name, colour) for name, colour in entries if name != _IGNORED]
    names = _checked([name for name, _ in classed], str(path))
    ignored = tuple(colour for name, colour in entries if name == _IGNORED)
    return ClassList(names, LabelColours(tuple(names), tuple(colour for _, colour in classed), ignored, str(path)))


def _checked(names: list[str], origin: str) -> list[str]:
    if not 1 <= len(names) <= IGNORE_INDEX:
        raise DataError(
            f"{origin} must name 1 to {IGNORE_INDEX} classes, got {len(names)}"
            + ("" if names else f": lines that start with {_COMMENT} are comments")
        )
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise DataError(f"{origin} must name each class once, got {twice!r} {names.count(twice)} times")
    return names
