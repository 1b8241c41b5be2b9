"""Labels in the coordinates of a map, by rasterio (extra `geo`): GeoTIFF, and GeoJSON in degrees."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cribo.base.errors import DataError, UnreadableImage
from cribo.base.packages import require_packages
from cribo.data.labelled.geojson import write_features
from cribo.data.labelled.label_maps import IGNORE_INDEX, Labelling
from cribo.data.labelled.writing import stems
from cribo.data.reading import ImageOnDisk

if TYPE_CHECKING:
    from cribo.data.sources.collection import ImageCollection

_DEGREES = "EPSG:4326"  # WGS 84, the system of GeoJSON (RFC 7946, section 4)


class Georeference(NamedTuple):
    """Where an image lies on the map.

    Attributes:
        transform: rasterio's affine transform from (column, row) of a pixel's corner, at full resolution, to
            coordinates.
        system: rasterio's coordinate reference system.
    """

    transform: Any
    system: Any

    def degrees(self, ring: Sequence[tuple[float, float]]) -> list[list[float]]:
        """Return longitude and latitude of corners given as (column, row)."""
        from rasterio.warp import transform

        a, b, c, d, e, f = self.transform[:6]
        xs = [a * column + b * row + c for column, row in ring]
        ys = [d * column + e * row + f for column, row in ring]
        longitudes, latitudes, *_ = transform(self.system, _DEGREES, xs, ys)
        return [[round(x, 9), round(y, 9)] for x, y in zip(longitudes, latitudes, strict=True)]


def read_georeference(images: ImageCollection, index: int) -> Georeference:
    """Read where an image lies on the map from its header.

    Raises:
        DataError: it has no coordinates.
        MissingPackage: rasterio is not installed.
    """
    require_packages("reading coordinates", "rasterio", extra="geo")
    import rasterio
    from rasterio.errors import NotGeoreferencedWarning, RasterioError
    from rasterio.io import MemoryFile

    name = images.name(index)
    try:
        content = images.read(index)
        with ExitStack() as held:
            held.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore", NotGeoreferencedWarning)  # an error below
            file = content.path if isinstance(content, ImageOnDisk) else held.enter_context(MemoryFile(content.content))
            image = held.enter_context(rasterio.open(file, driver="GTiff"))  # other drivers may open further files
            found = Georeference(image.transform, image.crs)
    except (RasterioError, UnreadableImage, OSError) as error:
        raise DataError(f"the coordinates of {name} cannot be read: {error}") from error
    if found.system is None or found.transform == rasterio.Affine.identity():
        raise DataError(
            f"{name} has no coordinates: --write geojson writes labels in pixels; geotiff and geojson-wgs84 need "
            "images of which each has a transform and a coordinate reference system, such as GeoTIFF"
        )
    return found


def write_geotiff(folder: Path, labelling: Labelling) -> int:
    """Write each label map as a GeoTIFF in the coordinates of its image, with 255 as nodata."""
    import rasterio

    for name, stem in stems(labelling.sizes).items():
        place, labels = labelling.place(name), labelling.labels(name).numpy()
        (height, width), full = labels.shape, labelling.sizes[name]
        across, down = full[1] / width, full[0] / height
        a, b, c, d, e, f = place.transform[:6]
        transform = rasterio.Affine(a * across, b * down, c, d * across, e * down, f)
        path = folder / f"{stem}.tif"
        path.parent.mkdir(parents=True, exist_ok=True)
        shape = {"height": height, "width": width, "count": 1, "dtype": np.uint8}
        about = {"crs": place.system, "transform": transform, "nodata": IGNORE_INDEX, "compress": "deflate"}
        with rasterio.open(path, "w", driver="GTiff", **shape, **about) as file:
            file.write(labels, 1)
    return 0


def write_geojson_in_degrees(folder: Path, labelling: Labelling) -> int:
    """Write a collection of polygons for each image, with holes; coordinates are longitude and latitude (WGS 84)."""
    return write_features(folder, labelling, lambda name: labelling.place(name).degrees)
