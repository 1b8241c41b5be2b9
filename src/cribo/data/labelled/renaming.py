"""Labelled images with their classes renamed, merged or ignored, as a file says."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
import yaml

from cribo.base.colours import Colour, class_colours
from cribo.base.errors import DataError
from cribo.base.files import parse_yaml, read_text, require
from cribo.base.wording import enumerated
from cribo.data.labelled.label_maps import IGNORE_INDEX, LabelMap, Task, read_classes
from cribo.data.labelled.segmentation import LabelledExamples

ENDINGS = (".yaml", ".yml")
"""Endings of files with a mapping of classes."""


def read_mapping(path: Path) -> dict[str, str | None]:
    """Read a mapping from names in the labels to names to use; None for pixels to ignore.

    Raises:
        MissingData: the file does not exist.
        DataError: it is not a mapping of names.
    """
    require(path)
    try:
        content = parse_yaml(read_text(path))
    except yaml.YAMLError as error:
        raise DataError(f"{path} is not valid YAML ({error})") from error
    if not isinstance(content, Mapping) or not content:
        raise DataError(f"{path} must map classes of the labels to classes, such as `car: vehicle` or `sky: null`")
    wrong = next((value for value in content.values() if isinstance(value, list | dict)), None)
    if wrong is not None:
        raise DataError(f"{path}: each class of the labels must have one name, got {wrong!r:.60}")
    return {str(name): None if value is None else str(value) for name, value in content.items()}


class RenamedExamples(LabelledExamples):
    """Labelled images with renamed classes; those that the mapping omits keep their names.

    Args:
        found: the labelled images.
        mapping: from names in their labels to names; None for pixels to ignore.
        source: the file of the mapping, for messages.

    Raises:
        DataError: a name is not a class of the labels, or no class is left.
    """

    def __init__(self, found: LabelledExamples, mapping: Mapping[str, str | None], source: Path) -> None:
        super().__init__(found.folder, found.names, reading=found.reading)
        self.found = found
        if unknown := [name for name in mapping if name not in found.classes]:
            raise DataError(
                f"{source}: {enumerated(unknown)} is not a class of the labels, which have {enumerated(found.classes)}"
            )
        names = [mapping.get(name, name) for name in found.classes]
        kept = [*dict.fromkeys(name for name in names if name is not None)]
        if not kept:
            raise DataError(f"{source} ignores all classes: keep at least one")
        self.listed_classes = read_classes(kept).names
        table = [IGNORE_INDEX if name is None else kept.index(name) for name in names]
        self._table = np.full(IGNORE_INDEX + 1, IGNORE_INDEX, dtype=np.uint8)
        self._table[: len(table)] = table
        first = [names.index(name) for name in kept]
        own = found.stated_palette
        self._palette = class_colours(kept) if own is None else [own[place] for place in first]

    @property
    def stated_palette(self) -> list[Colour]:
        """The colours of the first of the classes that have each name."""
        return list(self._palette)

    def label_map(self, index: int) -> LabelMap:
        """Return the new class of each pixel; raises the errors of the original."""
        self.found.reading = self.reading
        own = self.found.label_map(index)
        boxes = (box._replace(label=int(self._table[box.label]), rest=int(self._table[box.rest])) for box in own.boxes)
        kept = tuple(box for box in boxes if box.label != IGNORE_INDEX)
        return LabelMap(torch.from_numpy(self._table[own.labels.numpy()]), boxes=kept)

    @property
    def tasks(self) -> Mapping[str, Task]:
        """What the tool of the labels knows of the images, by name."""
        return self.found.tasks

    def require_images(self) -> None:
        """Raise DataError for labels without an image."""
        self.found.require_images()
