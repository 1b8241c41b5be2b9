"""Labels in the coordinates of a map."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from cribo.base.errors import DataError, InputError
from cribo.data.labelled.georeferenced import read_georeference, write_geojson_in_degrees, write_geotiff
from cribo.data.labelled.label_maps import Labelling
from cribo.data.sources.images import ImageFiles

rasterio = pytest.importorskip("rasterio")
HEIGHT, WIDTH = 40, 60
# One pixel is 10 m; the upper left corner is in UTM zone 32 N.
PLACE = rasterio.Affine(10, 0, 500_000, 0, -10, 5_500_000)


@pytest.fixture
def images(tmp_path):
    about = {"height": HEIGHT, "width": WIDTH, "count": 1, "dtype": np.uint8}
    with rasterio.open(tmp_path / "a.tif", "w", crs="EPSG:32632", transform=PLACE, **about) as file:
        file.write(np.zeros((HEIGHT, WIDTH), dtype=np.uint8), 1)
    return ImageFiles(tmp_path, ["a.tif"])


@pytest.fixture
def labelling(images):
    labels = torch.zeros(HEIGHT, WIDTH, dtype=torch.uint8)
    labels[10:20, 30:50], labels[30:] = 1, 255
    sizes = {"a.tif": (HEIGHT, WIDTH)}
    return Labelling(sizes, ["ground", "roof"], lambda _: labels, place=lambda _: read_georeference(images, 0))


def test_geotiff_lies_where_the_image_does(labelling, tmp_path):
    write_geotiff(tmp_path / "maps", labelling)
    with rasterio.open(tmp_path / "maps" / "a.tif") as file:
        assert file.transform == PLACE
        assert file.crs.to_epsg() == 32632
        assert file.nodata == 255
        np.testing.assert_array_equal(file.read(1), labelling.labels("a.tif"))


def test_geojson_in_degrees_covers_the_labels(labelling, tmp_path):
    from rasterio.features import rasterize
    from rasterio.warp import transform_geom

    write_geojson_in_degrees(tmp_path / "maps", labelling)
    features = json.loads((tmp_path / "maps" / "a.geojson").read_text())["features"]
    roofs = [each for each in features if each["properties"]["classification"]["name"] == "roof"]
    longitude, latitude = roofs[0]["geometry"]["coordinates"][0][0]
    assert 9 < longitude < 9.1  # the zone's central meridian is 9 degrees east
    assert 49 < latitude < 50
    shapes = [(transform_geom("EPSG:4326", "EPSG:32632", each["geometry"]), 1) for each in roofs]
    found = rasterize(shapes, (HEIGHT, WIDTH), transform=PLACE)
    np.testing.assert_array_equal(found, labelling.labels("a.tif") == 1)


def test_labels_of_a_lower_resolution_lie_where_the_image_does(labelling, tmp_path):
    coarse = labelling._replace(labels=lambda name: labelling.labels(name)[::5, ::10])
    write_geotiff(tmp_path / "maps", coarse)
    with rasterio.open(tmp_path / "maps" / "a.tif") as file:
        assert file.transform == rasterio.Affine(100, 0, 500_000, 0, -50, 5_500_000)
        np.testing.assert_array_equal(file.read(1), labelling.labels("a.tif")[::5, ::10])
    for place, own in (("full", labelling), ("coarse", coarse)):
        write_geojson_in_degrees(tmp_path / place, own)
    found = [json.loads((tmp_path / place / "a.geojson").read_text()) for place in ("full", "coarse")]
    np.testing.assert_allclose(*(each["features"][-1]["geometry"]["coordinates"] for each in found), atol=1e-8)


def test_an_image_without_coordinates(tmp_path):
    Image.new("L", (8, 8)).save(tmp_path / "b.tif")
    with pytest.raises(DataError, match="geojson"):
        read_georeference(ImageFiles(tmp_path, ["b.tif"]), 0)
    (tmp_path / "c.tif").write_bytes(b"II*\0")
    with pytest.raises(DataError, match=r"c\.tif"):
        read_georeference(ImageFiles(tmp_path, ["c.tif"]), 0)


def test_maps_are_no_format_of_examples(tmp_path):
    from cribo.data.labelled.formats import find_examples

    with pytest.raises(InputError, match="--format"):
        find_examples(tmp_path, label_format="geotiff")
