"""Predictions for Label Studio: the regions of predicted labels as results of a task."""

from typing import Any

from cribo.data.labelled.label_studio_writing import OUTLINES, Control, brush
from cribo.data.labelled.regions import is_background, trace
from cribo.explorer.serving.label_studio.labelling import Labelling, class_of_labels
from cribo.explorer.serving.memory_file import Labelled
from cribo.features.memory import SegmentationMemory


def model_version(memory: SegmentationMemory) -> str:
    """Return the version of a memory, which changes with its examples, classes and settings."""
    return f"cribo-{memory.fingerprint[:12]}"


def nothing(memory: SegmentationMemory) -> dict[str, Any]:
    """Return a prediction without regions."""
    return {"model_version": model_version(memory), "score": 0.0, "result": []}


def predicted(labelled: Labelled, labelling: Labelling) -> dict[str, Any]:
    """Return the labels of an image as a prediction.

    A brush stroke has all pixels of its class. Polygons and rectangles are those of its connected regions, without
    regions that are smaller than a patch. Classes that the project does not label are left out, as is the background.
    """
    found, memory = labelled.found, labelled.memory
    labels, confidence, classes = found.labels.numpy(), found.confidence.numpy(), memory.classes
    height, width = labels.shape
    smallest = _patch_area(memory, height, width)
    results: list[dict[str, Any]] = []

    def add(control: Control, label: str, value: dict[str, Any], score: float) -> None:
        results.append(control.result(len(results), label, value, (height, width), score))

    for label, name in class_of_labels(labelling.labels, classes).items():
        control, mask = labelling.controls[label], labels == classes.index(name)
        if is_background(name) or not mask.any():
            continue
        if control.type not in OUTLINES:
            add(control, label, brush(mask), float(confidence[mask].mean()))
            continue
        for region in trace(labels, [classes.index(name)]):
            if region.mask.sum() < smallest:
                continue
            inside = confidence[region.top :, region.left :][: region.mask.shape[0], : region.mask.shape[1]]
            value = OUTLINES[control.type](region, (height, width))
            add(control, label, value, float(inside[region.mask].mean()))
    return {"model_version": model_version(memory), "score": float(confidence.mean()), "result": results}


def _patch_area(memory: SegmentationMemory, height: int, width: int) -> float:
    """Return the number of pixels of an image that a patch covers."""
    rows, columns = memory.encoder.size(height, width, scale=memory.settings.factor(height, width))
    return memory.encoder.patch_size**2 * (height / rows) * (width / columns)
