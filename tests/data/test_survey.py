"""Ranges of collections."""

import numpy as np
import tifffile
from PIL import Image

from cribo.data.config import Reading
from cribo.data.labelled.formats import find_examples
from cribo.data.labelled.label_maps import LabelMap
from cribo.data.reading import read_valid
from cribo.data.sources.collection import open_collection
from cribo.data.survey import surveyed

DEFAULT = Reading()


def survey(folder, reading=DEFAULT):
    return surveyed(open_collection(folder, reading=reading))


def limits(folder, reading=DEFAULT) -> tuple[float, ...]:
    found = survey(folder, reading).range
    assert found is not None
    return found


def write(path, values, **options):
    tifffile.imwrite(path, values, photometric=options.pop("photometric", "minisblack"), **options)


def test_ranges_are_percentiles_of_each_channel_over_the_collection(tmp_path):
    # Channel c of image i has the values 0 to 999 times c + 1, plus 10 i.
    base = np.random.default_rng(0).permutation(1000).reshape(25, 40)
    for image in range(4):
        values = np.stack([base * (channel + 1) + 10 * image for channel in range(5)])
        write(tmp_path / f"{image}.tif", values.astype(np.uint16), planarconfig="separate")
    found = limits(tmp_path, Reading(channels=(0, 1, 2, 3, 4)))
    expected = np.percentile(
        np.stack([base.ravel()[:, None] * np.arange(1, 6) + 10 * image for image in range(4)]).reshape(-1, 5),
        (0.1, 99.9),
        axis=0,
    )
    np.testing.assert_allclose(np.reshape(found, (5, 2)).T, expected, rtol=1e-3, atol=1)
    assert limits(tmp_path, Reading(channels=("nuclei=4", 1))) == (*found[8:], *found[2:4])


def test_the_balance_of_colours_is_kept(tmp_path):
    values = np.random.default_rng(0).integers(0, (1000, 2000, 4000), (20, 30, 3)).astype(np.uint16)
    write(tmp_path / "0.tif", values, photometric="rgb")
    assert survey(tmp_path).channels is None
    np.testing.assert_allclose(limits(tmp_path), np.percentile(values, (0.1, 99.9)), rtol=1e-3)


def test_values_that_are_not_finite_enter_no_range(tmp_path):
    values = np.linspace(-1, 3, 600, dtype=np.float32).reshape(20, 30)
    values[0, :5] = np.nan, np.inf, -np.inf, np.nan, np.inf
    write(tmp_path / "0.tif", values)
    np.testing.assert_allclose(limits(tmp_path), (-1, 3), atol=0.05)
    write(tmp_path / "0.tif", np.full((20, 30), np.nan, dtype=np.float32))
    assert survey(tmp_path).range == (0, 1)


def test_what_is_known_is_kept(tmp_path):
    values = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)
    Image.fromarray(values).save(tmp_path / "0.png")
    Image.fromarray(values).save(tmp_path / "1.jpg")
    Image.fromarray(values).save(tmp_path / "2.tif")
    assert survey(tmp_path) == DEFAULT
    write(tmp_path / "3.tif", values[..., 0].astype(np.uint16) * 100)
    given = Reading(range=(0, 4095))
    assert survey(tmp_path, given) == given
    (tmp_path / "3.tif").write_bytes(b"II*\0")  # unreadable
    assert survey(tmp_path) == DEFAULT


def test_a_stated_range_is_kept(tmp_path):
    write(tmp_path / "0.tif", np.arange(600, dtype=np.uint16).reshape(20, 30), extratags=[(341, "H", 1, 4095, True)])
    assert survey(tmp_path) == DEFAULT


def test_pixels_without_data_enter_no_range(tmp_path):
    values = np.random.default_rng(0).integers(1000, 3000, (2, 20, 30)).astype(np.uint16)
    values[:, :5], values[0, 5:10] = 0, 0
    write(tmp_path / "0.tif", values, planarconfig="separate", extratags=[(42113, "s", 0, "0", True)])
    reading = Reading(channels=(0, 1))
    valid = read_valid(tmp_path / "0.tif", reading=reading)
    assert valid is not None
    assert not valid[:5].any()
    assert valid[5:].all()  # the second channel has data
    second = read_valid(tmp_path / "0.tif", reading=Reading(channels=(1, 1)))
    assert second is not None
    assert second.sum() == 15 * 30
    low = limits(tmp_path, Reading(channels=("a=1", 1)))[0]
    assert 1000 <= low < 1100
    for kind, lost in (("grey.tif", np.nan), ("big.tif", -9999)):
        heights = np.linspace(0, 9, 600, dtype=np.float32).reshape(20, 30)
        heights[3] = lost
        write(tmp_path / kind, heights, extratags=[(42113, "s", 0, "-9999", True), (274, "H", 1, 6, True)])
        valid = read_valid(tmp_path / kind)
        np.testing.assert_array_equal(valid, np.rot90(np.arange(20)[:, None].repeat(30, 1) != 3, -1))
    Image.fromarray(np.zeros((8, 8), dtype=np.uint8)).save(tmp_path / "0.png")
    assert read_valid(tmp_path / "0.png") is None


def test_labels_of_pixels_without_data_are_ignored(tmp_path):
    for part in ("images", "labels"):
        (tmp_path / part).mkdir()
    values = np.full((20, 30), 5, dtype=np.float32)
    values[:4] = np.nan
    write(tmp_path / "images" / "0.tif", values)
    Image.fromarray(np.ones((20, 30), dtype=np.uint8)).save(tmp_path / "labels" / "0.png")
    found = find_examples(tmp_path, reading=Reading(range=(0, 9)))
    example = found.example(0).labels
    assert isinstance(example, LabelMap)
    for labels in (found.labels(0), example.labels):
        assert (labels[:4] == 255).all()
        assert (labels[4:] == 1).all()


def test_large_images_are_surveyed_by_windows(tmp_path):
    rows, columns = np.mgrid[:900, :1300]
    values = np.stack([3 * rows + 100, 2 * columns + 300], axis=-1).astype(np.uint16)
    tagged = [(42113, "s", 0, "65535", True)]
    values[200:400, 300:] = 65_535
    write(tmp_path / "0.tif", values, tile=(128, 128), planarconfig="contig", extratags=tagged)
    reading = Reading(channels=(0, 1), max_pixels=200_000)
    known = values[values[..., 0] != 65_535]
    expected = np.percentile(known, (0.1, 99.9), axis=0).T.ravel()
    np.testing.assert_allclose(limits(tmp_path, reading), expected, atol=10)
    write(tmp_path / "0.tif", values.astype(np.uint8), tile=(128, 128), planarconfig="contig")
    assert survey(tmp_path, reading).range is None
