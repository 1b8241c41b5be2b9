"""DICOM files are written with known values, and read by their window or by a range."""

import io
from typing import Any

import numpy as np
import pytest

from cribo.base.errors import UnreadableImage
from cribo.data.config import Reading
from cribo.data.reading import EncodedImage, image_size, read_image

pydicom = pytest.importorskip("pydicom", reason="requires the extra dicom")

STORED = np.arange(96, dtype=np.uint16).reshape(8, 12) * 40


def dicom(values: np.ndarray = STORED, **attributes: Any) -> EncodedImage:
    """Return a DICOM file of grey values with these attributes, or of RGB."""
    dataset = pydicom.Dataset()
    dataset.file_meta = pydicom.dataset.FileMetaDataset()
    dataset.file_meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
    dataset.file_meta.MediaStorageSOPClassUID = pydicom.uid.CTImageStorage
    dataset.file_meta.MediaStorageSOPInstanceUID = "1.2.3"
    dataset.Rows, dataset.Columns = STORED.shape
    dataset.BitsAllocated = dataset.BitsStored = 8 * values.dtype.itemsize
    dataset.HighBit, dataset.PixelRepresentation = dataset.BitsStored - 1, int(values.dtype.kind == "i")
    is_colour = values.shape[-1] == 3
    dataset.SamplesPerPixel, dataset.PhotometricInterpretation = (3, "RGB") if is_colour else (1, "MONOCHROME2")
    if is_colour:
        dataset.PlanarConfiguration = 0
    for name, value in attributes.items():
        setattr(dataset, name, value)
    dataset.PixelData = values.tobytes()
    file = io.BytesIO()
    pydicom.dcmwrite(file, dataset, enforce_file_format=True)
    return EncodedImage("scan.dcm", file.getvalue())


def grey(file: EncodedImage, **reading: Any) -> np.ndarray:
    pixels = read_image(file, reading=Reading(**reading)).numpy()
    assert (pixels == pixels[:1]).all()
    return pixels[0]


def between(low: float, high: float, values: np.ndarray = STORED) -> np.ndarray:
    return np.rint((values.astype(float).clip(low, high) - low) / (high - low) * 255)


def test_values_are_scaled_by_the_window_of_the_file() -> None:
    window: dict[str, Any] = {"WindowCenter": 1500, "WindowWidth": 1000}
    np.testing.assert_allclose(grey(dicom(**window)), between(1000, 1999), atol=1)
    np.testing.assert_allclose(grey(dicom(**window, VOILUTFunction="LINEAR_EXACT")), between(1000, 2000), atol=1)
    sigmoid = 255 / (1 + np.exp(-4 * (STORED - 1500.0) / 1000))
    np.testing.assert_allclose(grey(dicom(**window, VOILUTFunction="SIGMOID")), sigmoid, atol=1)
    several = dicom(WindowCenter=[1500, 9], WindowWidth=[1000, 9])
    np.testing.assert_array_equal(grey(several), grey(dicom(**window)))


def test_a_range_is_in_the_units_of_the_modality() -> None:
    file = dicom(RescaleSlope=2, RescaleIntercept=-1024, WindowCenter=0, WindowWidth=10)
    np.testing.assert_allclose(grey(file, range=(-1000, 1000)), between(-1000, 1000, 2.0 * STORED - 1024), atol=1)


def test_inverted_grey_and_colour() -> None:
    window: dict[str, Any] = {"WindowCenter": 1500, "WindowWidth": 1000}
    inverted = dicom(**window, PhotometricInterpretation="MONOCHROME1")
    np.testing.assert_array_equal(grey(inverted), 255 - grey(dicom(**window)))
    rgb = np.random.default_rng(0).integers(0, 256, (8, 12, 3), dtype=np.uint8)
    np.testing.assert_array_equal(read_image(dicom(rgb)).permute(1, 2, 0).numpy(), rgb)


def test_stated_bits_are_the_range_without_a_window() -> None:
    np.testing.assert_allclose(grey(dicom(BitsStored=12, HighBit=11)), between(0, 4095), atol=1)


def test_frames_are_chosen() -> None:
    frames = np.stack([STORED, STORED[::-1], STORED + 7])
    file = dicom(frames, NumberOfFrames=3, WindowCenter=1500, WindowWidth=1000)
    np.testing.assert_allclose(grey(file, page=1), between(1000, 1999, STORED[::-1]), atol=1)
    assert image_size(file, reading=Reading(page=2)) == STORED.shape
    for reading in (Reading(), Reading(page=3)):
        with pytest.raises(UnreadableImage, match="--page"):
            read_image(file, reading=reading)


def test_files_that_cannot_be_read() -> None:
    with pytest.raises(UnreadableImage, match="--range"):
        read_image(dicom(STORED.astype(np.int16) - 500))
    with pytest.raises(UnreadableImage, match="--channels"):
        read_image(dicom(BitsStored=12, HighBit=11), reading=Reading(channels=(0,)))
    whole = dicom(BitsStored=12, HighBit=11).content
    for content in (whole[:-40], whole[:200], whole[:132]):
        with pytest.raises(UnreadableImage):
            read_image(EncodedImage("scan.dcm", content))
