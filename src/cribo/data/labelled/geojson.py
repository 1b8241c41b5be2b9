"""Labels as GeoJSON in pixels, such as QuPath's: a file for each image, with polygons and their holes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cribo.base.errors import DataError, InputError
from cribo.base.files import read_json, write_text
from cribo.data.labelled.label_maps import Labelling
from cribo.data.labelled.regions import Region, RegionImage, RegionSet, corners, naming, polygon, things, trace
from cribo.data.labelled.scaling import Scaling
from cribo.data.labelled.writing import as_json, stems
from cribo.data.reading import EXTENSIONS

_NAMES = ("classification", "class", "label", "category", "name")
"""Properties that may name the class, in order."""


def is_geojson(content: object) -> bool:
    """Whether the content of a JSON file is a GeoJSON collection."""
    return isinstance(content, Mapping) and content.get("type") == "FeatureCollection"


def read_geojson(source: Path, files: list[Path]) -> RegionSet:
    """Read GeoJSON files; each is named as its image, or states its name as `image`.

    Raises:
        DataError: a file is not a GeoJSON collection, or a feature is invalid.
    """
    folder = source if source.is_dir() else source.parent
    found = RegionSet(source, [], [folder])
    for file in files:
        content = read_json(file, limit_bytes=None)
        if not is_geojson(content) or not isinstance(content.get("features"), list):
            raise DataError(f"{file} is not a GeoJSON collection: its type must be FeatureCollection, with features")
        regions: list[Region] = []
        for number, feature in enumerate(content["features"], start=1):
            name = f"feature {number} of {file.name}"
            with naming(file, name):
                regions += _regions(feature, name, found)
        stem = file.relative_to(folder).with_suffix("").as_posix()
        stated = content.get("image")
        names = (str(stated),) if isinstance(stated, str) else (stem, *(f"{stem}{ending}" for ending in _endings()))
        found.images.append(RegionImage(names, None, regions, file))
    return found


def _endings() -> list[str]:
    return [each for ending in EXTENSIONS for each in (ending, ending.upper())]


def _regions(feature: Any, name: str, found: RegionSet) -> Iterator[Region]:
    """Yield the regions of a feature; none if it has no area."""
    geometry = feature.get("geometry") if isinstance(feature, Mapping) else None
    if not isinstance(geometry, Mapping):
        raise InputError("a feature must have a geometry")
    label, kind = _label(feature.get("properties")), geometry.get("type")
    coordinates: Any = geometry.get("coordinates")
    if kind == "Point":
        yield Region(label, points=tuple(corners([coordinates], "a point")), name=name)
        return
    if kind not in ("Polygon", "MultiPolygon"):
        found.skipped.append(name)
        return
    polygons = [coordinates] if kind == "Polygon" else coordinates
    if not isinstance(polygons, list) or not all(isinstance(each, list) and each for each in polygons):
        raise InputError(f"the coordinates of a {kind} must be lists of rings")
    for each in polygons:
        own = [ring[:-1] if ring[:1] == ring[-1:] else ring for ring in map(corners, each)]
        if len(own[0]) < 3:
            found.skipped.append(name)
            continue
        found.extents.append(max(map(max, own[0])))
        yield Region(label, polygon(own[0], *(ring for ring in own[1:] if len(ring) >= 3)), name=name)


def _label(properties: object) -> str:
    """Return the class of a feature."""
    given = properties if isinstance(properties, Mapping) else {}
    for name in _NAMES:
        value: Any = given.get(name)
        value = value.get("name") if isinstance(value, Mapping) else value
        if isinstance(value, str) and value.strip():
            return value.strip()
    raise InputError(f"a feature must have its class in one of the properties {', '.join(_NAMES)}")


def write_geojson(folder: Path, labelling: Labelling) -> int:
    """Write a collection of polygons for each image, with holes; coordinates are pixels from the first corner."""
    return write_features(folder, labelling, lambda name: lambda ring: [*map(list, ring)])


def write_features(
    folder: Path,
    labelling: Labelling,
    placing: Callable[[str], Callable[[Sequence[tuple[float, float]]], list[list[float]]]],
) -> int:
    """Write a collection of polygons for each image, with holes.

    Args:
        folder: output folder.
        labelling: the labels.
        placing: returns, by the name of an image, the function from the (column, row) of corners, at full resolution,
            to coordinates.

    Returns:
        0, the number of holes that were lost.
    """
    named = things(labelling.classes)
    for name, stem in stems(labelling.sizes).items():
        placed, labels = placing(name), labelling.labels(name)
        scaling = Scaling(labelling.sizes[name], (labels.shape[0], labels.shape[1]))
        features = [
            {
                "type": "Feature",
                "properties": {"objectType": "annotation", "classification": {"name": named[region.label]}},
                "geometry": {
                    "type": "Polygon",
                    "coordinates": [placed(scaling.ring_in_full([*ring, ring[0]])) for ring in region.rings],
                },
            }
            for region in trace(labels.numpy(), named, labelling.instances_of(name))
        ]
        path = folder / f"{stem}.geojson"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, as_json({"type": "FeatureCollection", "image": name, "features": features}))
    return 0
