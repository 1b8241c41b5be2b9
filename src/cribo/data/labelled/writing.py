"""What the writers of label formats share: names of files, and JSON."""

import json
from collections.abc import Iterable
from pathlib import PurePosixPath


def stems(names: Iterable[str]) -> dict[str, str]:
    """Return the path of the labels of each image without its ending; of two with the same, the second keeps its own.

    Example:
        >>> stems(["a/b.jpg", "a/b.png"])
        {'a/b.jpg': 'a/b', 'a/b.png': 'a/b.png'}
    """
    found: dict[str, str] = {}
    for name in names:
        stem = str(PurePosixPath(name).with_suffix("")) if PurePosixPath(name).suffix else name
        found[name] = name if stem in found.values() else stem
    return found


def as_json(content: object) -> str:
    """Return indented JSON."""
    return json.dumps(content, indent=1) + "\n"
