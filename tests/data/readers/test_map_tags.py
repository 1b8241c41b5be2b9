"""Pictures of the labels of a large GeoTIFF lie where the image does."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cribo.apps.segment.large import Tiles
from cribo.data.config import Reading
from cribo.data.windows import open_large

rasterio = pytest.importorskip("rasterio")
HEIGHT, WIDTH = 400, 600
UPRIGHT = rasterio.Affine(10, 0, 500_000, 0, -10, 5_500_000)
TURN = rasterio.Affine.rotation(30) @ rasterio.Affine.scale(10, -10)
ROTATED = rasterio.Affine.translation(500_000, 5_500_000) @ TURN


def write_image(path: Path, place: Any, **tags: str) -> Path:
    about = {} if place is None else {"crs": "EPSG:32632", "transform": place}
    size = {"height": HEIGHT, "width": WIDTH, "count": 1, "dtype": np.uint8}
    with rasterio.open(path, "w", tiled=True, blockxsize=64, blockysize=64, **size, **about) as file:
        file.update_tags(**tags)
        file.write(np.zeros((HEIGHT, WIDTH), dtype=np.uint8), 1)
    return path


def written(image: Path, path: Path, pixel_size: float | None = None) -> Path:
    """Write labels of an image that is read in windows."""
    large = open_large(image, Reading(max_pixels=10_000, pixel_size=pixel_size))
    assert large is not None
    tiles = Tiles(large.size, large.pixel_size, large.map_tags)
    tiles.add(np.ones(large.size, np.uint8))
    tiles.write(path, [(0, 0, 0), (255, 0, 0)])
    return path


@pytest.mark.parametrize("place", [UPRIGHT, ROTATED], ids=["upright", "rotated"])
@pytest.mark.parametrize("pixels", ["Area", "Point"])
@pytest.mark.parametrize("times", [1, 2, 4])
def test_labels_lie_where_the_image_does(tmp_path: Path, place: Any, pixels: str, times: int) -> None:
    image = write_image(tmp_path / "image.tif", place, AREA_OR_POINT=pixels)
    with rasterio.open(written(image, tmp_path / "labels.tif", None if times == 1 else 10.0 * times)) as labels:
        assert labels.transform.almost_equals(place @ rasterio.Affine.scale(times), 1e-6)
        assert labels.crs.to_epsg() == 32632
        assert (labels.nodata, labels.shape) == (255, (HEIGHT // times, WIDTH // times))
        assert (labels.read(1) == 1).all()


@pytest.mark.filterwarnings("ignore::rasterio.errors.NotGeoreferencedWarning")
def test_labels_of_other_images_have_no_place(tmp_path: Path) -> None:
    image = write_image(tmp_path / "image.tif", None)
    with rasterio.open(written(image, tmp_path / "labels.tif")) as labels:
        assert (labels.crs, labels.nodata) == (None, None)
