"""Small encoded images for tests of collections."""

import io

import numpy as np
from PIL import Image


def encoded(number: int, kind: str = "JPEG", size: tuple[int, int] = (40, 30)) -> bytes:
    """Return the unique noise image of an index."""
    pixels = np.random.default_rng(number).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format=kind)
    return file.getvalue()
