"""Labelled regions of images, which the files of other tools contain: one model, drawn as label maps."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Int32, UInt8

from cribo.base.colours import Colour, class_colours
from cribo.base.errors import DataError, InputError, MissingData
from cribo.base.files import path_inside
from cribo.base.wording import counted, enumerated
from cribo.data.labelled.label_maps import IGNORE_INDEX, LabelledBox, LabelMap, Task, read_classes
from cribo.data.labelled.outlines import (
    BACKGROUND,
    CORNERS,
    check_outline,
    meets_image,
    pixels_of,
    require_pixels,
    require_size,
    runs_of,
)
from cribo.data.labelled.segmentation import LabelledExamples
from cribo.data.reading import image_size
from cribo.data.sources.images import FilesBelow

log = logging.getLogger("cribo")

Mask = Bool[np.ndarray, "h w"]
Draw = Callable[[int, int], Mask]
"""Draws a region in an image of this height and width."""

_BACKGROUNDS = (BACKGROUND, "_background_", "__background__")
_IGNORED = ("__ignore__", "ignore")
_POINT = 0.01  # radius of a key point, relative to the shorter side of the image

BOXES = "%s: the objects in %s are found by the features inside against those around them"
"""Message about boxes in labels."""


@dataclass(frozen=True)
class Region:
    """A labelled region of an image.

    Attributes:
        label: name of its class.
        draw: draws it; None if it is a box or points.
        box: (left, top, right, bottom) in pixels, of a box.
        points: (x, y) in pixels, of key points.
        name: for messages, such as its id.
    """

    label: str
    draw: Draw | None = None
    box: tuple[float, float, float, float] | None = None
    points: tuple[tuple[float, float], ...] = ()
    name: str = ""


@dataclass
class RegionImage:
    """The regions of an image.

    Attributes:
        file: possible names of its file, the likeliest first.
        size: height and width as listed; None if the file lists none.
        regions: in the order in which they are drawn.
        id: of the image or task in its tool.
        split: such as train or val; "" if there are no splits.
        source: the file of its labels.
    """

    file: tuple[str, ...]
    size: tuple[int, int] | None
    regions: list[Region]
    source: Path
    id: str = ""
    split: str = ""


@dataclass
class RegionSet:
    """The content of the files of a tool.

    Attributes:
        source: file or folder.
        images: images with labels, possibly empty ones.
        classes: names in their order; those of the regions, sorted, if the files do not list them.
        folders: folders that may contain the images.
        unlabelled: listed images without labels.
        skipped: what had no area in its image.
        extents: largest coordinate of each polygon and box.
    """

    source: Path
    images: list[RegionImage]
    folders: Sequence[Path]
    classes: Sequence[str] | None = None
    unlabelled: list[RegionImage] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    extents: list[float] = field(default_factory=list)

    def boxed(self, label: str, box: tuple[float, float, float, float], *, name: str) -> list[Region]:
        """Return a box (left, top, right, bottom) as a region; add it to `skipped` if it has no area."""
        if box[2] <= box[0] or box[3] <= box[1]:
            self.skipped.append(name)
            return []
        self.extents.append(max(box[2:]))
        return [Region(label, box=box, name=name)]

    def outline(
        self, label: str, ring: Sequence[tuple[float, float]], *, size: tuple[int, int] | None, name: str
    ) -> list[Region]:
        """Return a polygon as a region; add it to `skipped` if it has no area in an image of this size."""
        self.extents += [max(map(max, ring))] if ring else []
        if len(ring) < CORNERS or (size is not None and not meets_image(np.array(ring), *size)):
            self.skipped.append(name)
            return []
        return [Region(label, polygon(ring), name=name)]


class Drawn(NamedTuple):
    """A label map, the number of its pixels with several classes, and the names of what lies outside the image."""

    map: LabelMap
    several: int
    outside: list[str]


class RegionLabels(LabelledExamples):
    """Images with labelled regions, as `LabelledImages`.

    Class 0 is the background, followed by the classes of the files. Where regions of different classes overlap, the
    later one is on top. Pixels in boxes have no class unless another region covers them: the label map has the boxes
    (`LabelMap.boxes`). Key points are drawn as discs, on top of regions; if an image has nothing else, its other pixels
    have no class.

    Args:
        found: content of the files.
        images: folder of the images; by default those of the set.

    Raises:
        MissingData: an image does not exist.
        DataError: there are no labels.
    """

    def __init__(self, found: RegionSet, images: Path | None = None) -> None:
        require_pixels(found.source, found.extents)
        if not found.images:
            raise DataError(f"{found.source} has no labelled images" + _unlabelled(found))
        self._set = found
        labels = dict.fromkeys(region.label for image in found.images for region in image.regions)
        names = list(found.classes) if found.classes is not None else sorted(labels)
        if unlisted := [label for label in labels if label not in names and not is_ignored(label)]:
            raise DataError(f"{found.source} has labels of classes that it does not list: {enumerated(unlisted)}")
        things = [name for name in names if not is_background(name) and name.lower() not in _IGNORED]
        self._label = {name: place for place, name in enumerate(things, start=1)}
        self._label |= {name: 0 for name in names if is_background(name)}
        self._label |= {name: IGNORE_INDEX for name in _IGNORED if name not in things}
        self.listed_classes = read_classes([BACKGROUND, *things]).names
        folder, files = _find_images(found, [images] if images is not None else found.folders)
        super().__init__(folder, files)

    @property
    def stated_palette(self) -> list[Colour]:
        """Colours by the names of the classes."""
        return list(class_colours(self.classes))

    @property
    def tasks(self) -> dict[str, Task]:
        """Ids and splits by the possible names of all listed images, also those without labels."""
        listed = (*self._set.unlabelled, *self._set.images)
        return {name: Task(image.id, image.split) for image in listed for name in image.file}

    def label_map(self, index: int) -> LabelMap:
        """Return the class of each pixel, 0 for background.

        Raises:
            UnreadableImage: the image file is broken.
            DataError: its size differs from the listed one.
        """
        return self._draw(index).map

    def _draw(self, index: int) -> Drawn:
        """Draw the regions of an image."""
        size = image_size(self.path(index), reading=self.reading)
        return draw_regions(self._set.images[index], size, self._label, name=self.name(index))

    def require_images(self) -> None:
        """Draw all regions once, to find faults before any work; say what is skipped, and where labels overlap.

        Raises:
            DataError: no region has an area, a region is invalid, or the size of an image is not the listed one.
        """
        found, regions = self._set, [region for image in self._set.images for region in image.regions]
        skipped, boxes, several = [*found.skipped], 0, dict[str, int]()
        for index in range(len(self)):
            drawn = self._draw(index)
            skipped += drawn.outside
            boxes += len(drawn.map.boxes)
            several |= {self.name(index): drawn.several} if drawn.several else {}
        total = len(regions) + len(found.skipped)
        if len(skipped) == total:
            raise DataError(
                f"none of the {counted(total, 'annotation')} of {found.source} gives a class to pixels: polygons, "
                "masks, boxes or points inside the images are needed"
                + (f". The first is {skipped[0]}" if skipped else "")
            )
        if skipped:
            log.warning(
                "%s: skipped %d of %d annotations, which have no area, or lie outside the image; their pixels are "
                "background. The first is %s",
                *(found.source, len(skipped), total, skipped[0]),
            )
        if boxes:
            log.info(BOXES, found.source, counted(boxes, "box", "boxes"))
        if found.unlabelled:
            log.info("%s: %s", found.source, _unlabelled(found).strip(" ,"))
        if several:
            log.warning(
                "%s: %d pixels of %s have labels of several classes; the later one wins. The first image is %s",
                *(found.source, sum(several.values()), counted(len(several), "image"), next(iter(several))),
            )


def draw_regions(
    image: RegionImage, size: tuple[int, int], labels: Mapping[str, int], *, name: str, rest: int = 0
) -> Drawn:
    """Draw the regions of an image as a label map.

    Args:
        image: the regions.
        size: height and width of the image file.
        labels: class of each name; 255 for pixels without a class.
        name: of the image, in messages.
        rest: class of pixels outside all regions, unless there are only points: the background, or 255 for none.

    Raises:
        DataError: the listed size is another one, or a region is invalid.
    """
    height, width = size
    require_size(image.source, name, image.size, size)
    points = [region for region in image.regions if region.points]
    # Points do not show where objects end.
    empty = IGNORE_INDEX if points and len(points) == len(image.regions) else rest
    drawn, several = np.full(size, empty, dtype=np.uint8), np.zeros(size, dtype=bool)
    taken = np.zeros(size, dtype=bool)
    boxes, outside = list[LabelledBox](), list[str]()
    for region in image.regions:
        if region.box is None:
            continue
        box = LabelledBox(labels[region.label], region.box, rest=rest)
        if (place := box.clipped(height, width)) is None:
            outside.append(region.name)
            continue
        drawn[place[1] : place[3], place[0] : place[2]] = IGNORE_INDEX
        boxes += [] if box.label == IGNORE_INDEX else [box]
    for region in image.regions:
        if region.draw is None:
            continue
        with naming(image.source, f"{region.name or region.label} of {name}"):
            mask = region.draw(height, width)
        label = labels[region.label]
        several |= mask & taken & (drawn != label)
        drawn[mask], taken = label, taken | mask
    radius = max(1.0, _POINT * min(height, width))
    for region in points:
        within = [(x, y) for x, y in region.points if 0 <= x <= width and 0 <= y <= height]
        outside += [] if within else [region.name]
        for x, y in within:
            drawn[ellipse(x, y, radius, radius)(height, width)] = labels[region.label]
    return Drawn(LabelMap(torch.from_numpy(drawn), boxes=tuple(boxes)), int(several.sum()), outside)


@contextmanager
def naming(source: Path, what: str) -> Iterator[None]:
    """Re-raise an InputError as a DataError that names the file and the region."""
    try:
        yield
    except InputError as error:
        raise DataError(f"{source}: {what} is invalid: {error}") from error


def _unlabelled(found: RegionSet) -> str:
    left_out = len(found.unlabelled)
    return f", {counted(left_out, 'listed image')} without labels left out" if left_out else ""


def _find_images(found: RegionSet, folders: Iterable[Path]) -> tuple[Path, list[str]]:
    """Return the folder of the images and their paths in it."""
    folders = list(folders)
    for image in found.images:
        for name in image.file:
            path_inside(folders[0], name, source=image.source, follow_links=True)
    best: tuple[Path, list[str | None]] | None = None
    for folder in folders:
        files = FilesBelow(folder)
        names = [next(filter(None, map(files.find, image.file)), None) for image in found.images]
        if best is None or sum(map(bool, names)) > sum(map(bool, best[1])):
            best = folder, names
    assert best is not None
    missing = [image.file[0] for image, name in zip(found.images, best[1], strict=True) if name is None]
    if missing:
        raise MissingData(
            f"{len(missing)} of the {len(found.images)} images of {found.source} are not in "
            f"{' or '.join(map(str, folders))}, the first is {missing[0]!r}: give the folder of the images"
        )
    names = [name for name in best[1] if name is not None]
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise DataError(f"{found.source} has the labels of an image more than once: {enumerated(repeated)}")
    return best[0], names


# ------------------------------------------------------------------------------------------------------------ shapes


def polygon(*rings: Sequence[tuple[float, float]]) -> Draw:
    """Return the function that draws a polygon: its outer ring, then its holes."""

    def draw(height: int, width: int) -> Mask:
        outer, *holes = (_filled(ring, height, width) for ring in rings)
        for hole in holes:
            outer &= ~hole
        return outer

    return draw


def ellipse(x: float, y: float, rx: float, ry: float, degrees: float = 0.0) -> Draw:
    """Return the function that draws an ellipse around (x, y), rotated clockwise."""

    def draw(height: int, width: int) -> Mask:
        rows, columns = np.mgrid[:height, :width] + 0.5
        cos, sin = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
        across, down = columns - x, rows - y
        return ((across * cos + down * sin) / rx) ** 2 + ((down * cos - across * sin) / ry) ** 2 <= 1

    return draw


def part(decode: Callable[[], Mask], left: int, top: int, size: tuple[int, int]) -> Draw:
    """Return the function that draws a mask of a part of the image, which is decoded if it lies inside the image."""
    h, w = size

    def draw(height: int, width: int) -> Mask:
        whole = np.zeros((height, width), dtype=bool)
        if left < 0 or top < 0 or h < 1 or w < 1 or left + w > width or top + h > height:
            raise InputError(
                f"its mask of {w} x {h} pixels at ({left}, {top}) must lie inside the image of {width} x {height}"
            )
        whole[top : top + h, left : left + w] = decode()
        return whole

    return draw


def corners(values: object, what: str = "a polygon") -> list[tuple[float, float]]:
    """Return the corners of a polygon, given as pairs or as a flat list.

    Raises:
        InputError: they are not finite numbers, or the flat list is odd.
    """
    try:
        found = np.array(values if isinstance(values, list) else np.nan, dtype=np.float64)
    except (TypeError, ValueError):
        found = np.array([np.nan])
    if found.ndim == 1 and len(found) % 2 == 0:
        found = found.reshape(-1, 2)
    if found.ndim != 2 or found.shape[1] != 2 or not np.isfinite(found).all():
        raise InputError(f"{what} must be a list of x and y of its corners")
    return [(float(x), float(y)) for x, y in found]


def _filled(ring: Sequence[tuple[float, float]], height: int, width: int) -> Mask:
    points = np.asarray(ring, dtype=np.float64)
    check_outline([points], height, width)
    return pixels_of(runs_of([points], height, width), height, width)


# ------------------------------------------------------------------------------------------- regions of label maps


@dataclass(frozen=True)
class Traced:
    """A connected region of a label map.

    Attributes:
        label: its class.
        rings: corners of its outer border, then of its holes, on the edges of pixels.
        mask: (h, w) its pixels within its box.
        left, top: first column and row of its box.
    """

    label: int
    rings: list[list[tuple[int, int]]]
    mask: Mask
    left: int
    top: int

    @property
    def has_holes(self) -> bool:
        """Whether the region has holes."""
        return len(self.rings) > 1

    def holes_of(self, labels: np.ndarray, classes: Iterable[int]) -> int:
        """Return the number of its holes in which some pixel of the label map has none of the classes."""
        from scipy import ndimage

        around = np.ones((3, 3), dtype=bool)
        holes = ndimage.binary_fill_holes(self.mask, around) & ~self.mask
        height, width = self.mask.shape
        own = labels[self.top : self.top + height, self.left : self.left + width]
        numbers: Any = np.zeros(holes.shape, dtype=np.int32)
        ndimage.label(holes, around, output=numbers)
        return len(np.unique(numbers[holes & ~np.isin(own, [*classes])]))


def trace(
    labels: UInt8[np.ndarray, "h w"], classes: Iterable[int], instances: Int32[np.ndarray, "h w"] | None = None
) -> list[Traced]:
    """Return the connected regions of some classes, the largest first, so that those in holes of others come later.

    Args:
        labels: class of each pixel.
        classes: the classes.
        instances: number of the instance of each pixel, 0 for none; each connected part of an instance is a region.
    """
    found = []
    for label in classes:
        for mask, top, left in _connected(labels == label, instances):
            rings = [[(x + left, y + top) for x, y in ring] for ring in _rings(mask)]
            found.append(Traced(label, rings, mask, left, top))
    return sorted(found, key=lambda each: -int(each.mask.sum()))


def _connected(inside: Mask, instances: Int32[np.ndarray, "h w"] | None) -> Iterator[tuple[Mask, int, int]]:
    """Yield the connected regions of a mask, or of each instance in it: pixels in their box, its first row, column."""
    from scipy import ndimage

    if instances is not None and (numbered := inside & (instances > 0)).any():
        for number, box in enumerate(ndimage.find_objects(np.where(numbered, instances, 0)), start=1):
            if box is not None:
                for mask, top, left in _connected(instances[box] == number, None):
                    yield mask, box[0].start + top, box[1].start + left
        inside = inside & ~numbered
    components: Any = np.zeros(inside.shape, dtype=np.int32)
    ndimage.label(inside, output=components)
    for number, box in enumerate(ndimage.find_objects(components), start=1):
        yield components[box] == number, box[0].start, box[1].start


def _rings(mask: Mask) -> list[list[tuple[int, int]]]:
    """Return the borders of one connected region on the edges of pixels: the outer one first, then those of holes."""
    padded = np.pad(mask, 1)
    inside = padded[1:-1, 1:-1]
    following: dict[tuple[int, int], list[tuple[int, int]]] = {}
    # Edges have the region on their right. (dx, dy) of their start and end from a pixel's first corner, by neighbour.
    for neighbours, start, end in (
        (padded[:-2, 1:-1], (0, 0), (1, 0)),
        (padded[1:-1, 2:], (1, 0), (1, 1)),
        (padded[2:, 1:-1], (1, 1), (0, 1)),
        (padded[1:-1, :-2], (0, 1), (0, 0)),
    ):
        rows, columns = np.nonzero(inside & ~neighbours)
        for x, y in zip(columns.tolist(), rows.tolist(), strict=True):
            following.setdefault((x + start[0], y + start[1]), []).append((x + end[0], y + end[1]))
    rings = []
    while following:
        at = next(iter(following))
        ring = [at]
        while at in following and (len(ring) == 1 or at != ring[0]):
            ends = following.pop(at)
            # Where two pixels touch at a corner, turn right, to stay at the same pixel.
            turns = [_turn(ring[-2], at, end) if len(ring) > 1 else 0 for end in ends]
            at = ends.pop(turns.index(max(turns)))
            if ends:
                following[ring[-1]] = ends
            ring.append(at)
        corner = [_turn(*each) for each in zip([ring[-2], *ring], ring[:-1], ring[1:], strict=False)]
        rings.append([point for point, turn in zip(ring, corner, strict=False) if turn])
    return sorted(rings, key=lambda ring: -abs(_area(ring)))


def _turn(before: tuple[int, int], at: tuple[int, int], after: tuple[int, int]) -> int:
    """Return the cross product of two steps: positive for a turn to the right, 0 for none."""
    return (at[0] - before[0]) * (after[1] - at[1]) - (at[1] - before[1]) * (after[0] - at[0])


def _area(ring: Sequence[tuple[int, int]]) -> float:
    x, y = np.array(ring, dtype=np.float64).T
    return float((x * np.roll(y, -1) - np.roll(x, -1) * y).sum() / 2)


def is_background(name: str) -> bool:
    """Whether a name is one of the background."""
    return name.lower() in _BACKGROUNDS


def is_ignored(name: str) -> bool:
    """Whether a name is that of pixels without a class."""
    return name in _IGNORED


def things(classes: Sequence[str]) -> Mapping[int, str]:
    """Return the classes that are written as regions: all but the background."""
    return {label: name for label, name in enumerate(classes) if not is_background(name)}
