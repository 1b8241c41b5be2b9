"""Pages of stacks as images of their own."""

import numpy as np
import pytest
import tifffile
from PIL import Image

from cribo.apps.segment.targets import open_targets, result_name
from cribo.base.errors import DataError, UnreadableImage
from cribo.data import open_images
from cribo.data.config import Reading
from cribo.data.labelled.formats import find_examples
from cribo.data.reading import page_name, read_image, stored_page
from cribo.data.sources.collection import open_collection

VALUES = np.random.default_rng(0).integers(0, 256, (12, 16, 20), dtype=np.uint8)


@pytest.fixture
def folder(tmp_path):
    tifffile.imwrite(tmp_path / "b.tif", VALUES, photometric="minisblack")
    Image.fromarray(VALUES[0]).save(tmp_path / "a.tif")
    Image.fromarray(VALUES[1]).save(tmp_path / "c.png")
    return tmp_path


def test_each_page_is_an_image(folder):
    images = open_images(folder)
    names = [images.name(index) for index in range(len(images))]
    assert names == ["a.tif", *(f"b.page{page:02}.tif" for page in range(12)), "c.png"]
    for page in range(12):
        np.testing.assert_array_equal(images.load(1 + page)[0].numpy(), VALUES[page])
        assert images.state(1 + page).size_bytes == (folder / "b.tif").stat().st_size
    encoded = open_collection(folder).part([4])
    np.testing.assert_array_equal(encoded.load(0)[0].numpy(), VALUES[3])
    assert result_name(names[4]) == "b.page03"


@pytest.mark.parametrize("source", ["b.tif", "*.tif", "list.txt"])
def test_pages_of_files_that_are_named(folder, source):
    (folder / "list.txt").write_text("b.tif\n")
    images = open_targets(str(folder / source))
    assert sum(images.name(index).startswith("b.page") for index in range(len(images))) == 12


def test_a_page_that_is_chosen_is_one_image(folder):
    images = open_images(folder, reading=Reading(page=5))
    assert [images.name(index) for index in range(len(images))] == ["a.tif", "b.tif", "c.png"]
    np.testing.assert_array_equal(images.load(1)[0].numpy(), VALUES[5])


def test_channels_are_no_pages(tmp_path):
    values = VALUES.reshape(2, 3, 2, 16, 20)
    tifffile.imwrite(tmp_path / "x.tif", values, imagej=True, metadata={"axes": "TZCYX"})
    tifffile.imwrite(tmp_path / "y.tif", VALUES[:4], photometric="minisblack")  # without named axes
    images = open_images(tmp_path, reading=Reading(channels=(1, 0)))
    assert [images.name(index) for index in range(len(images))] == [
        *(f"x.page{page}.tif" for page in range(6)),
        "y.tif",
    ]
    np.testing.assert_array_equal(images.load(4).numpy(), values[1, 1, [1, 0]])
    np.testing.assert_array_equal(images.load(6).numpy(), VALUES[[1, 0]])


def test_stacks_that_are_not_readable_are_one_image(folder):
    (folder / "b.tif").write_bytes((folder / "b.tif").read_bytes()[:200])
    images = open_images(folder)
    assert len(images) == 3
    with pytest.raises(UnreadableImage):
        images.load(1)


def test_names_of_pages(tmp_path):
    assert page_name("x/stack.tif", 3, 10) == "x/stack.page3.tif"
    assert stored_page(tmp_path / "stack.page007.tif") == (str(tmp_path / "stack.tif"), 7)
    (tmp_path / "stack.page007.tif").touch()
    assert stored_page(tmp_path / "stack.page007.tif") == (str(tmp_path / "stack.page007.tif"), None)
    with pytest.raises(UnreadableImage, match="no such file"):
        read_image(tmp_path / "gone.page1.tif")


def test_labels_of_pages(folder):
    (folder / "c.png").unlink()
    (folder / "a.tif").unlink()
    for page in (2, 11):
        Image.fromarray(np.full((16, 20), page, dtype=np.uint8)).save(folder / f"b.page{page:02}_labels.png")
    with pytest.raises(DataError, match=r"b\.page00"):
        find_examples(folder)
    Image.fromarray(np.full((16, 20), 7, dtype=np.uint8)).save(folder / "b_labels.png")
    for page in (2, 11):
        (folder / f"b.page{page:02}_labels.png").unlink()
    found = find_examples(folder, reading=Reading(page=5))
    assert len(found) == 1
    np.testing.assert_array_equal(found.load(0)[0].numpy(), VALUES[5])
    assert (found.labels(0) == 7).all()
