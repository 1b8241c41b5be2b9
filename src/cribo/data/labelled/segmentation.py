"""Images with a class for each pixel, for dense evaluation and segmentation."""

import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from jaxtyping import UInt8
from torch import Tensor

from cribo.base.colours import Colour, class_colours
from cribo.base.errors import DataError, MissingData
from cribo.base.files import require
from cribo.base.wording import enumerated
from cribo.data.config import DEFAULT_READING, Reading
from cribo.data.labelled.inputs import Example, open_valid
from cribo.data.labelled.label_maps import (
    IGNORE_INDEX,
    MASK_CLASSES,
    MASKS,
    ClassList,
    LabelColours,
    LabelMap,
    LabelValues,
    Task,
    are_masks,
    class_indices,
    has_colours,
    open_some,
    read_classes,
    unlisted_colours,
)
from cribo.data.labelled.scaling import resized, scaling_of
from cribo.data.reading import EXTENSIONS, IMAGE_KINDS, image_size, read_values, stored_page
from cribo.data.sources.images import (
    ImageFiles,
    ImageSource,
    composed,
    list_files,
    named_below_one_folder,
    open_images,
)

log = logging.getLogger("cribo")

_MARK = r"(?:masks?|labels?|label_?ids|seg\w*|gt|ground_?truth|ann\w*|L)"  # in names of label maps of other tools
_LOSSY = [extension for kind in IMAGE_KINDS if kind.name in ("JPEG", "WEBP") for extension in kind.extensions]


class LabelledImages(ImageSource, Protocol):
    """An ImageSource in which every image has a class for each pixel."""

    @property
    def classes(self) -> Sequence[str]:
        """Names of the classes; label c is `classes[c]`."""
        ...

    @property
    def ignore_index(self) -> int:
        """The label of ignored pixels."""
        ...

    @property
    def palette(self) -> Sequence[Colour]:
        """The colour of each class in pictures."""
        ...

    def labels(self, index: int) -> UInt8[Tensor, "h w"]:
        """Return the class of each pixel of an image, or `ignore_index`, at the size of the image."""
        ...


class LabelledExamples(ImageFiles):
    """Base of labelled image files, as `LabelledImages` and as examples of segmentation.

    Attributes:
        listed_classes: names of the classes if the labels or a list define them.
    """

    ignore_index: int = IGNORE_INDEX
    listed_classes: list[str] | None = None

    @property
    def classes(self) -> Sequence[str]:
        """Names of the classes; label c is `classes[c]`."""
        return self.listed_classes or ()

    @property
    def palette(self) -> Sequence[Colour]:
        """The colour of each class in pictures."""
        return self.stated_palette or class_colours(self.classes)

    @property
    def new_classes(self) -> list[str] | None:
        """Names of the classes of a new memory."""
        return self.listed_classes

    @property
    def stated_palette(self) -> list[Colour] | None:
        """Colours that the labels or a list define; None for those of `label_map`."""
        return None

    @property
    def tasks(self) -> Mapping[str, Task]:
        """What the tool of the labels knows of the images, by name."""
        return {}

    def label_map(self, index: int) -> LabelMap:
        """Return the class of each pixel of an image, and the colours of the classes if its labels have them."""
        raise NotImplementedError

    def labels(self, index: int) -> UInt8[Tensor, "h w"]:
        """Return the class of each pixel, 255 for ignored pixels; raises the errors of `label_map`."""
        return self._of_data(index).labels

    def example(self, index: int) -> Example:
        """Return an image with its labels as an example of segmentation."""
        return Example(self.path(index), self._of_data(index), self.name(index))

    def _of_data(self, index: int) -> LabelMap:
        """Return the label map of an image, 255 where the image has no data."""
        found, valid = self.label_map(index), open_valid(self.path(index), self.reading)
        return found if valid is None else found._replace(labels=found.labels.masked_fill(~valid, IGNORE_INDEX))

    def require_images(self) -> None:
        """Raise DataError for labels without an image."""


class LabelledFiles(LabelledExamples):
    """Image files, each with a label map in a file.

    A label map is a PNG. Its values are read, of a palette PNG the indices, unless `coding` gives the colours of the
    classes. Values are class indices, with 255 for ignored pixels. If all label maps contain only 0 and 255, and there
    are two classes or no `classes`, they are masks of a background and a foreground.

    Args:
        images: the images.
        label_folder: base of the paths of the label maps.
        label_names: path of the label map of each image.
        classes: names of the classes; if empty, they are numbered up to the highest label, which requires reading all
            label maps once.
        palette: a colour for each class; by default those of `coding`, or of `class_colours`.
        coding: meaning of the values or colours in the label maps; class indices or masks by default.
        masks: whether label maps that contain only 0 and 255 may be masks.
    """

    def __init__(
        self,
        images: ImageFiles,
        label_folder: str | os.PathLike[str],
        label_names: Iterable[str],
        *,
        classes: Sequence[str] = (),
        palette: Sequence[Colour] | None = None,
        coding: LabelValues | LabelColours | None = None,
        masks: bool = True,
    ) -> None:
        super().__init__(images.folder, images.names, reading=images.reading)
        self._label_files = ImageFiles(label_folder, label_names)
        self._classes, self.listed_classes = list(classes), list(classes) or None
        self._palette = coding.classes if palette is None and isinstance(coding, LabelColours) else palette
        self._coding = coding
        self._is_published = isinstance(coding, LabelValues)
        self._may_be_masks = masks and len(classes) in (0, len(MASK_CLASSES))

    @property
    def coding(self) -> LabelValues | LabelColours:
        """Meaning of the values or colours in the label maps."""
        if self._coding is None:
            self._coding = class_indices(len(self._classes) or IGNORE_INDEX)
            if are_masks(map(read_values, self._label_paths())):
                if self._may_be_masks:
                    log.info(
                        "the label maps in %s contain only 0 and 255, which are read as %s and %s. (255 means no class "
                        "if a label map contains other values, or if more than two classes are listed.)",
                        *(self._label_files.folder, *(self._classes or MASK_CLASSES)),
                    )
                    self._coding = MASKS
                elif len(self._classes) != 1:
                    reason = f"{len(self._classes)} classes are listed" if self._classes else "the memory has others"
                    log.warning(
                        "the label maps in %s contain only 0 and 255, and 255 is read as no class, because masks have "
                        "two classes and %s. If 255 is the foreground of masks, replace it with the index of its class",
                        *(self._label_files.folder, reason),
                    )
        return self._coding

    def _label_paths(self) -> list[str]:
        return [self.label_path(index) for index in range(len(self))]

    @property
    def classes(self) -> list[str]:
        """The names of the classes; label c is `classes[c]`."""
        if self.coding == MASKS and not self._classes:  # decided here, before workers of a loader copy this object
            self._classes = list(MASK_CLASSES)
        if not self._classes:
            known = (labels[labels != IGNORE_INDEX] for labels in map(self.labels, range(len(self))))
            highest = max((int(labels.max()) for labels in known if labels.numel()), default=-1)
            if highest < 0:
                folder = self._label_files.folder
                raise DataError(f"every pixel of every label map in {folder} is {IGNORE_INDEX} (ignored)")
            self._classes = [str(number) for number in range(highest + 1)]
        return self._classes

    @property
    def palette(self) -> Sequence[Colour]:
        """The colour of each class in pictures."""
        return class_colours(self.classes) if self._palette is None else self._palette

    @property
    def new_classes(self) -> list[str] | None:
        """Names of the classes of a new memory; those of masks are background and foreground by default."""
        return self.listed_classes or (list(MASK_CLASSES) if self.coding == MASKS else None)

    @property
    def stated_palette(self) -> list[Colour] | None:
        """The colours of the classes in the list of classes; None if the label maps have class indices."""
        return None if isinstance(self.coding, LabelValues) else list(self.coding.classes)

    def label_path(self, index: int) -> str:
        """Return the path of an image's label map."""
        return self._label_files.path(index)

    def label_map(self, index: int) -> LabelMap:
        """Return the class of each pixel, and the colours of a palette PNG.

        The map has the size of the image as read or, with `Reading.pixel_size`, at full resolution; then, it is
        resized by nearest neighbour.

        Raises UnreadableImage for a broken file; DataError if the map has another size, contains colours that `coding`
        does not give, or a value that is neither a class nor ignored.
        """
        path = self.label_path(index)
        image = read_values(path, reading=self.reading)
        size, scaling = (image.height, image.width), scaling_of(self.path(index), self.reading)
        if size != scaling.full:
            self.require_size(index, size, f"{path}: labels")
        if isinstance(self.coding, LabelValues) and not self._is_published and has_colours(image):
            raise unlisted_colours(path, open_some(self._label_paths()))
        found = self.coding.read(image, path)
        return found._replace(labels=resized(found.labels, scaling.read))


class LabelledFolder(LabelledFiles):
    """Images in one folder, label maps in another, paired by their path without extension.

    `images_dir` is any folder or list for `open_images`; for `a/b.jpg`, `labels_dir` must contain the label map
    `a/b.png` (see `LabelledFiles`). Label maps without an image are skipped. `classes` are the names of the classes, or
    a text file that lists them, possibly with their colours in the label maps (see `read_class_list`). If None, classes
    are numbered up to the highest label, which requires reading all label maps when `classes` is first used.

    Raises MissingData if a folder or a label map does not exist; DataError if there are no images, if two images
    share a label map, or if the classes are not 1 to 255 different names.

    >>> val = LabelledFolder("camvid/images/val", "camvid/labels/val", "camvid/classes.txt")  # doctest: +SKIP
    >>> val.load(0).shape, val.labels(0).shape, val.classes[8]  # doctest: +SKIP
    (torch.Size([3, 360, 480]), torch.Size([360, 480]), 'car')
    """

    def __init__(
        self,
        images_dir: str | os.PathLike[str],
        labels_dir: str | os.PathLike[str],
        classes: Sequence[str] | str | os.PathLike[str] | None = None,
        *,
        masks: bool = True,
        reading: Reading = DEFAULT_READING,
    ) -> None:
        images = named_below_one_folder(open_images(images_dir, reading=reading))
        folder = Path(labels_dir).expanduser()
        require(folder)
        stems = by_stem(images.names, EXTENSIONS)
        maps = label_maps_in(folder)
        for stem, name in stems.items():
            if stem not in maps:
                raise missing_labels(name, images.folder, folder / f"{stem}.png")
        listed = ClassList([]) if classes is None else read_classes(classes)
        names = (maps[stem] for stem in stems)
        super().__init__(images, folder, names, classes=listed.names, coding=listed.colours, masks=masks)
        self._unused = [stem for stem in maps if stem not in stems] if Path(images_dir).expanduser().is_dir() else []

    def require_images(self) -> None:
        """Raise DataError for a label map without an image; those of images that a list omits are skipped."""
        images = by_stem(self.names, EXTENSIONS)
        require_images(self._unused, images, Path(self._label_files.folder), Path(self.folder))


class UnlabelledFiles(ImageFiles):
    """Image files as `LabelledImages` of which no pixel has a class, for protocols with other ground truth."""

    classes: Sequence[str] = ("unlabelled",)
    palette: Sequence[Colour] = ((0, 0, 0),)
    ignore_index: int = IGNORE_INDEX

    def labels(self, index: int) -> UInt8[Tensor, "h w"]:
        """No class for any pixel."""
        return torch.full(image_size(self.path(index), reading=self.reading), IGNORE_INDEX, dtype=torch.uint8)


class LabelledSubset:
    """A subset of labelled images, in the given order.

    Args:
        images: the labelled images; `ignore_index` defaults to 255 and `palette` to `class_colours`.
        indices: indices of the images to use.

    Raises:
        IndexError: an index does not exist.
    """

    def __init__(self, images: LabelledImages, indices: Iterable[int]) -> None:
        self.images = images
        self.indices = tuple(indices)
        wrong = next((index for index in self.indices if not 0 <= index < len(images)), None)
        if wrong is not None:
            raise IndexError(f"indices must be in 0..{len(images) - 1}, got {wrong}")
        self.classes = images.classes
        self.ignore_index: int = getattr(images, "ignore_index", IGNORE_INDEX)
        self.palette: Sequence[Colour] = getattr(images, "palette", None) or class_colours(self.classes)

    def __len__(self) -> int:
        return len(self.indices)

    def name(self, index: int) -> str:
        """Return the name of an image."""
        return self.images.name(self.indices[index])

    def load(self, index: int) -> UInt8[Tensor, "c h w"]:
        """Load an image as RGB."""
        return self.images.load(self.indices[index])

    def labels(self, index: int) -> UInt8[Tensor, "h w"]:
        """Return the class of each pixel."""
        return self.images.labels(self.indices[index])


def by_stem(names: Iterable[str], endings: Sequence[str]) -> dict[str, str]:
    """Map the part of each name before its ending to the name; names with other endings are skipped.

    The order is kept, and endings are case-insensitive. Parts are in the Unicode form of `composed`, so that names pair
    across systems. Raises DataError if two names share a stem.

    >>> by_stem(["b/1.jpg", "b/2.JPG", "b/3.txt"], [".jpg", ".png"])
    {'b/1': 'b/1.jpg', 'b/2': 'b/2.JPG'}
    """
    endings = tuple(ending.lower() for ending in endings)
    stems: dict[str, str] = {}
    for name in names:
        lower = name.lower()
        if not lower.endswith(endings):
            continue
        stem = composed(name[: -max(len(ending) for ending in endings if lower.endswith(ending))])
        if stem in stems:
            raise DataError(f"the images {stems[stem]} and {name} share the labels {stem}.png: rename one")
        stems[stem] = name
    return stems


def label_maps_in(folder: Path) -> dict[str, str]:
    """Map the stem of each label map below a folder to its name (see `by_stem`)."""
    return by_stem(list_files(folder, [".png"]), [".png"])


def missing_labels(image: str, folder: str | os.PathLike[str], labels: Path) -> MissingData:
    """Return the error for an image in a folder without a label map."""
    instead = other_annotations(Path(folder, image), labels)
    return MissingData(f"the image {image} has no labels: there is no {labels.name} in {labels.parent}{instead}")


def require_images(maps: Iterable[str], images: Mapping[str, str], labels: Path, folder: Path) -> None:
    """Raise DataError for a label map without an image."""
    for stem in maps:
        if stem not in images:
            near = next((image for image in images if is_marked(stem, image)), None)
            advice = "" if near is None else f", but {images[near]}: give the label map its name, {near}.png"
            raise DataError(f"the labels {labels / stem}.png have no image: {folder} does not contain {stem}{advice}")


def other_annotations(image: Path, labels: Path) -> str:
    """Describe files of other formats or names in place of a missing label map, as the end of a sentence.

    Empty if there are none.
    """
    stem = composed(labels.stem)
    image = Path(stored_page(image)[0])
    files = sorted(path for path in labels.parent.glob("*") if path.is_file() and not path.samefile(image))
    found = [path for path in files if composed(path.stem) == stem]
    found += [path for path in files if path not in found and is_marked(path.stem, stem)]
    if not found:
        return ""
    names = enumerated([path.name for path in found])
    is_beside = labels.is_file() and labels.samefile(image)
    right = f"{stem}_labels.png" if is_beside else labels.name
    if any(path.suffix.lower() == ".png" for path in found):
        return f", but {names}: give each label map the name of its image, {right}"
    if any(path.suffix.lower() in _LOSSY for path in found):
        return f", but {names}: label maps must be PNG, because JPEG changes their values; save masks as PNG, and " + (
            f"threshold those that were JPEG at 128 ({right})"
        )
    return f", but {names}: convert the labels to PNG, {right}"


def is_marked(stem: str, image: str) -> bool:
    """Whether a name is that of an image with a mark for labels.

    >>> [is_marked(stem, "a") for stem in ("a_mask", "gt-a", "a2_mask", "b")]
    [True, True, False, False]
    """
    mark = rf"(?:{_MARK}[\W_]+)?{re.escape(composed(image))}(?:[\W_]+{_MARK})?"
    return re.fullmatch(mark, composed(stem), re.IGNORECASE) is not None
