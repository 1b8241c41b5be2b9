"""Equality of inputs from files, Pillow images, arrays and tensors."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from cribo.base.errors import DataError
from cribo.data.labelled.inputs import open_image, open_labels

GENERATOR = np.random.default_rng(0)


def _images() -> dict[str, Image.Image]:
    rgba = Image.fromarray(GENERATOR.integers(0, 256, (6, 9, 4), dtype=np.uint8))
    palette = rgba.convert("RGB").quantize(8)
    palette.info["transparency"] = 3
    return {
        "rgba.png": rgba,
        "la.png": rgba.convert("LA"),
        "palette.png": palette,
        "grey16.png": Image.fromarray(GENERATOR.integers(0, 65536, (6, 9)).astype(np.uint16)),
        "grey16.tif": Image.fromarray(GENERATOR.integers(0, 65536, (6, 9)).astype(np.uint16)),
        "bits.png": rgba.convert("1"),
        "cmyk.jpg": rgba.convert("RGB").convert("CMYK"),
    }


@pytest.mark.parametrize("name", _images())
@pytest.mark.parametrize("orientation", [None, 6])
def test_images_equal_their_files(tmp_path: Path, name: str, orientation: int | None) -> None:
    exif = Image.Exif()
    if orientation is not None:
        if name.endswith(".tif"):
            pytest.skip("Pillow loses the orientation of an uncompressed TIFF that it opens by name")
        exif[0x0112] = orientation
    _images()[name].save(tmp_path / name, exif=exif)
    expected = open_image(tmp_path / name)
    with Image.open(tmp_path / name) as image:
        assert torch.equal(open_image(image), expected)


def test_32_bit_images_are_refused() -> None:
    with pytest.raises(ValueError, match="32-bit pixels have no defined value range"):
        open_image(Image.new("F", (4, 4)))


def test_label_maps_equal_their_files(tmp_path: Path) -> None:
    values = np.array([[0, 1], [2, 255]], dtype=np.uint8)
    grey, palette = Image.fromarray(values), Image.fromarray(values).convert("P")
    palette.putpalette([0, 0, 0, 9, 9, 9, 30, 30, 30])
    for kind, image in (("grey", grey), ("palette", palette)):
        image.save(tmp_path / f"{kind}.png", bits=8)
        from_file, from_image = open_labels(tmp_path / f"{kind}.png"), open_labels(image)
        assert torch.equal(from_image.labels, from_file.labels)
        assert from_image.labels.tolist() == values.tolist()
        assert from_image.palette == from_file.palette
    colours = Image.new("RGB", (2, 2), "red")
    colours.save(tmp_path / "colours.png")
    for labels in (colours, tmp_path / "colours.png"):
        with pytest.raises(DataError, match=r"labels must be class indices, got colours \(mode RGB\)"):
            open_labels(labels)
