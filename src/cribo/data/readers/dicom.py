"""Reader of DICOM, by pydicom (extra `dicom`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import pydicom
from pydicom.multival import MultiValue
from pydicom.pixels.processing import apply_color_lut, apply_modality_lut, apply_voi
from pydicom.pixels.utils import pixel_array

from cribo.base.errors import InputError
from cribo.base.wording import counted
from cribo.data.channels import Samples, grey_to_8_bits, scaled
from cribo.data.config import Reading
from cribo.data.readers import ImageKind, Picture

if TYPE_CHECKING:
    from jaxtyping import Real, UInt8


@contextmanager
def open_picture(file: BinaryIO, name: str, kind: ImageKind, reading: Reading) -> Iterator[Picture]:
    """Open a DICOM file.

    Raises:
        InputError: it has no picture.
    """
    dataset = pydicom.dcmread(file, defer_size="1 MB" if hasattr(file, "fileno") else None)
    if "PixelData" not in dataset:
        raise InputError("no picture: it has no pixel data of integers")
    yield _DicomPicture(kind, dataset, reading, name)


class _DicomPicture(Picture):
    """A DICOM file whose attributes have been read."""

    def __init__(self, kind: ImageKind, dataset: Any, reading: Reading, name: str) -> None:
        super().__init__(kind, (int(dataset.Rows), int(dataset.Columns)))
        self._dataset, self._reading, self._name = dataset, reading, name

    @property
    def pages(self) -> int:
        return int(self._dataset.get("NumberOfFrames") or 1)

    def require_whole(self) -> None:
        pages, page = self.pages, self._reading.page
        if page is None and pages > 1:
            raise InputError(
                f"a stack of {pages} frames, of which one would be read: choose one with --page, from 0 to {pages - 1}"
            )
        if (page or 0) >= pages:
            raise InputError(f"it has {counted(pages, 'frame')}, 0 to {pages - 1}, got --page {page}")
        if self._reading.channels is not None:
            raise InputError("--channels is for images with several channels, not for DICOM: omit it")

    def pixels(self) -> UInt8[np.ndarray, "h w c"]:
        dataset = self._dataset
        values = pixel_array(dataset, index=self._reading.page or 0)  # of colour, as RGB
        if dataset.PhotometricInterpretation == "PALETTE COLOR":
            values = apply_color_lut(values, dataset)
            values = (values >> 8 if values.dtype.itemsize == 2 else values).astype(np.uint8)
        if values.ndim == 3:
            if values.dtype != np.uint8:
                raise InputError("colour with more than 8 bits cannot be read from DICOM: convert it to TIFF")
            return np.ascontiguousarray(values[..., :3])
        grey = self._grey(values)
        if dataset.PhotometricInterpretation == "MONOCHROME1":
            grey = 255 - grey
        return np.stack([grey] * 3, axis=-1)

    def _grey(self, stored: Real[np.ndarray, "h w"]) -> UInt8[np.ndarray, "h w"]:
        """Scale the values by --range, in the units of the modality, or by the window of the file (PS3.3, C.11.2)."""
        dataset, limits = self._dataset, self._reading.limits()
        values = apply_modality_lut(stored, dataset)
        if limits is not None:
            return scaled(values, *limits)
        if lookup := dataset.get("VOILUTSequence"):
            return scaled(apply_voi(values, dataset), 0, 2 ** int(lookup[0].LUTDescriptor[2]) - 1)
        centre, width = (_first(dataset.get(name)) for name in ("WindowCenter", "WindowWidth"))
        if centre is not None and width is not None:
            match dataset.get("VOILUTFunction") or "LINEAR":
                case "SIGMOID":
                    return scaled(1 / (1 + np.exp(-4 * (values - centre) / width)), 0, 1)
                case "LINEAR_EXACT":
                    return scaled(values, centre - width / 2, centre + width / 2)
                case _:
                    return scaled(values, centre - width / 2, centre + width / 2 - 1)
        if values.dtype.kind == "u" and values.dtype.itemsize <= 2:
            bits = int(dataset.BitsStored)
            return grey_to_8_bits(values.astype(np.uint16), Samples(16, high=2**bits - 1), None, self._name)
        raise InputError("the file has no VOI window: give the values of black and white with --range LOW,HIGH")


def _first(value: Any) -> float | None:
    """Return a number, the first of several, or None if there is none."""
    if value is None or value == "":
        return None
    return float(value[0] if isinstance(value, MultiValue) else value)
