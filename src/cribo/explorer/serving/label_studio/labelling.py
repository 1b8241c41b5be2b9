"""Labelling configurations of Label Studio: which tags label regions of an image, with which classes."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from xml.parsers import expat

from cribo.base.errors import DataError
from cribo.base.wording import enumerated
from cribo.data.labelled.label_studio_writing import Control
from cribo.data.labelled.regions import is_background, is_ignored

TYPES = ("brushlabels", "polygonlabels", "rectanglelabels")
"""Types of tags that are predicted, the most precise first."""

_NAMES = "BrushLabels, PolygonLabels or RectangleLabels"
_VARIABLE = re.compile(r"\$([\w.\-$]+)")
_DEEPEST = 64  # nested tags


@dataclass(frozen=True)
class Labelling:
    """A parsed labelling configuration, for one image of each task.

    Attributes:
        image: name of the tag of the image.
        field: field of a task's data that has the address of the image.
        controls: the most precise tag for each label.
    """

    image: str
    field: str
    controls: Mapping[str, Control]

    @property
    def labels(self) -> list[str]:
        """Names of the labels."""
        return [*self.controls]

    def address(self, data: object) -> str:
        """Return the address of the image in a task's data.

        Raises:
            DataError: there is none.
        """
        address = data.get(self.field) if isinstance(data, Mapping) else None
        if not isinstance(address, str) or not address:
            raise DataError(
                f"the data of a task must have the address of its image as {self.field!r}, got {address!r:.60}"
            )
        return address

    def own(self, annotation: Mapping[str, Any]) -> dict[str, Any]:
        """Return a copy of an annotation without the results for other images of the task."""
        results = annotation.get("result")
        if isinstance(results, list):
            results = [
                each
                for each in results
                if not isinstance(each, Mapping) or each.get("to_name", self.image) == self.image
            ]
        return {**annotation, "result": results}


def read_labelling(config: object) -> Labelling:
    """Read a labelling configuration. It must not have a document type, so that no entities are expanded.

    Raises:
        DataError: it is not XML, or has no brush, polygon or rectangle with labels for an image of the tasks.
    """
    tags = _tags(config)
    images = {tag["name"]: tag.get("value", "") for kind, tag in tags if kind == "image" and "name" in tag}
    found: list[tuple[Control, str]] = []
    owner: Control | None = None
    for kind, tag in tags:
        if kind == "label" and owner is not None and (name := tag.get("alias") or tag.get("value")):
            found.append((owner, name))
        elif kind != "label":
            names = [name.strip() for name in tag.get("toname", "").split(",")]
            image = next((name for name in names if name in images), None)
            is_control = kind in TYPES and image is not None and "name" in tag
            owner = Control(kind, tag["name"], str(image)) if is_control else None
    if not found:
        held = enumerated(sorted({tag for tag, _ in tags if tag not in ("view", "label")})) or "nothing"
        raise DataError(
            f"the labelling configuration has no {_NAMES} with labels for an Image, but {held}: add one, such as "
            '<BrushLabels name="label" toName="image"><Label value="car"/></BrushLabels>'
        )
    image = found[0][0].image
    if (field := _VARIABLE.fullmatch(images[image])) is None:
        raise DataError(
            f"the Image {image!r} of the labelling configuration must have a field of the tasks as its value, such as "
            f"$image, got {images[image]!r:.60}"
        )
    own = sorted((each for each in found if each[0].image == image), key=lambda each: TYPES.index(each[0].type))
    controls: dict[str, Control] = {}
    for control, label in own:
        controls.setdefault(label, control)
    listed = dict.fromkeys(label for _, label in found if label in controls)  # in the order of the configuration
    return Labelling(image, field[1], {label: controls[label] for label in listed})


def _tags(config: object) -> list[tuple[str, dict[str, str]]]:
    """Parse XML into (tag, attributes) pairs; all names become lower case."""
    found: list[tuple[str, dict[str, str]]] = []
    depth = 0
    parser = expat.ParserCreate()

    def start(name: str, attributes: dict[str, str]) -> None:
        nonlocal depth
        depth += 1
        if depth > _DEEPEST:
            raise DataError(f"the labelling configuration has more than {_DEEPEST} nested tags")
        found.append((name.lower(), {key.lower(): value for key, value in attributes.items()}))

    def end(name: str) -> None:
        nonlocal depth
        depth -= 1

    def refuse(*declaration: object) -> None:
        raise DataError("the labelling configuration has a document type (<!DOCTYPE ...>), which is not read: omit it")

    parser.StartElementHandler, parser.EndElementHandler, parser.StartDoctypeDeclHandler = start, end, refuse
    try:
        parser.Parse(config if isinstance(config, str) else "", True)
    except (expat.ExpatError, UnicodeEncodeError) as error:
        raise DataError(f"the labelling configuration is not XML ({error}): {config!r:.60}") from error
    return found


# --------------------------------------------------------------------------------------------------------- classes


def class_of_labels(labels: Iterable[str], classes: Sequence[str]) -> dict[str, str]:
    """Return the class of a memory for each label that has one: the same name, or one that differs in case only.

    Names of the background are equal.

    Example:
        >>> class_of_labels(["Car", "tree", "Background"], ["background", "car", "road"])
        {'Car': 'car', 'Background': 'background'}
    """
    found: dict[str, str] = {}
    for label in labels:
        if label in classes:
            found[label] = label
            continue
        similar = [
            name
            for name in classes
            if name.casefold() == label.casefold() or (is_background(name) and is_background(label))
        ]
        if len(similar) == 1:
            found[label] = similar[0]
    return found


def differences(labels: Sequence[str], classes: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the labels without a class in the memory, and the classes without a label; background is left out."""
    matched = class_of_labels(labels, classes)
    lacking = [label for label in labels if label not in matched and not is_ignored(label) and not is_background(label)]
    others = [name for name in classes if name not in matched.values() and not is_background(name)]
    return lacking, others
