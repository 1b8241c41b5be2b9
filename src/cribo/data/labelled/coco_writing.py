"""Writing of annotation files in COCO's format; does not import torch."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool

from cribo.base.files import write_whole


def mask_annotation(mask: Bool[np.ndarray, "h w"]) -> dict[str, Any]:
    """Describe a mask for an annotation: `segmentation` (run lengths), `bbox` (x, y, w, h) and `area`."""
    from faster_coco_eval.core import mask as coco

    encoded: Any = coco.encode(np.asfortranarray(mask, dtype=np.uint8))
    return {
        "segmentation": {"size": list(mask.shape), "counts": encoded["counts"].decode("ascii")},
        "bbox": np.asarray(coco.toBbox(encoded)).tolist(),
        "area": int(coco.area(encoded)),
    }


def write_coco(
    path: Path,
    images: Sequence[Mapping[str, Any]],
    categories: Sequence[str],
    annotations: Iterable[Mapping[str, Any]],
) -> None:
    """Write a file in COCO's format, whole or not at all; annotations are written as they come.

    Args:
        path: of the JSON file.
        images: `file_name`, `width` and `height` of each; their ids are their places, from 1.
        categories: names; their ids are their places, from 1.
        annotations: all fields but `id`.
    """

    def write(part: Path) -> None:
        with part.open("w", encoding="utf-8") as file:
            listed = [{"id": number, **image} for number, image in enumerate(images, start=1)]
            named = [{"id": number, "name": name} for number, name in enumerate(categories, start=1)]
            file.write(f'{{"images": {json.dumps(listed)},\n"categories": {json.dumps(named)},\n"annotations": [')
            for number, annotation in enumerate(annotations, start=1):
                file.write(f"{',' if number > 1 else ''}\n{json.dumps({'id': number, 'iscrowd': 0, **annotation})}")
            file.write("]}\n")

    write_whole(path, write)
