"""Implementation of `cribo search`; imports torch only for queries that need the backbone."""

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cribo.apps.search.config import SearchConfig
from cribo.apps.search.database import FoundObject, ObjectDatabase, index_command
from cribo.apps.search.pictures import write_pairs, write_sheet
from cribo.apps.search.queries import Query, QueryPlace, make_query
from cribo.base.errors import ConfigError, DatabaseError
from cribo.base.files import write_json
from cribo.base.job import Job
from cribo.data.labelled.coco_writing import mask_annotation, write_coco

if TYPE_CHECKING:
    from cribo.apps.search.duplicates import DuplicatePair
    from cribo.features.encoder import Encoder

RESULTS, SHEET, COCO = "results.json", "sheet.png", "coco.json"
_DUPLICATES_FROM = 0.95  # default minimum similarity of a pair
_OUT = Path("searches")


class SearchResult(NamedTuple):
    """Result of `search_objects`.

    Attributes:
        query: the query.
        found: the nearest objects of each region of the query.
        states: states of the found images: `changed`, `missing` or "".
        folder: folder with results.json and the contact sheet.
    """

    query: Query
    found: list[list[FoundObject]]
    states: dict[str, str]
    folder: Path


def search_objects(
    config: SearchConfig, *, out: Path | None = None, overwrite: bool = False, command: str = ""
) -> SearchResult:
    """Find the objects most similar to those of an image, and write results and a contact sheet.

    Args:
        config: options of the search.
        out: output folder; by default `searches/<image>`, numbered.
        overwrite: replace existing results in `out`.
        command: command line to record in the results.

    Raises:
        ValueError: database, backbone, image or query region is invalid.
        FileNotFoundError: the database, the backbone or the image does not exist.
        UnreadableImage: the image cannot be read.
        ImportError: Lance is not installed.
    """
    if config.image is None:
        raise ConfigError("--image is required")
    place = QueryPlace(config.point, config.box, config.object)
    folder, database = _open_search(config, Path(config.image).stem, out, overwrite)
    reading = database.reading(config.reading)
    if config.coco and reading.pixel_size:
        raise ConfigError(
            f"--coco writes masks at full resolution, but {database.uri} has pixels of {reading.pixel_size:g} "
            f"(--pixel_size): omit --coco and read the masks in {RESULTS}, or build another database without "
            "--pixel_size"
        )
    query = make_query(database, config.image, place, lambda: _open_known(config, database), reading=reading)
    vectors = np.stack([region.vector for region in query.regions])
    own = None if config.include_own else query.indexed
    found = database.search(
        vectors,
        config.k,
        exclude_image=own,
        path=config.path,
        one_per_image=config.one_per_image,
        exact=config.exact,
    )
    least = -2.0 if config.min_similarity is None else config.min_similarity
    found = [[one for one in several if one.similarity >= least] for several in found]
    images = {one.indexed for several in found for one in several}
    states = {image.path: database.is_changed(image) for image in images}

    def write(part: Path) -> None:
        write_sheet(part / SHEET, query, found, states, database.locate, reading)
        write_json(part / RESULTS, _record(config, database, query, found, states, command))
        if config.coco:
            _write_coco(part / COCO, query, found)

    return SearchResult(query, found, states, folder.create(write))


def search_duplicates(
    config: SearchConfig, *, out: Path | None = None, overwrite: bool = False, command: str = ""
) -> "tuple[list[DuplicatePair], Path]":
    """Find pairs of similar images, in descending order, and write results and a contact sheet.

    Arguments and errors are those of `search_objects`; `out` is `searches/duplicates` by default, numbered.
    """
    from cribo.apps.search.duplicates import find_duplicates

    folder, database = _open_search(config, "duplicates", out, overwrite)
    least = _DUPLICATES_FROM if config.min_similarity is None else config.min_similarity
    pairs = find_duplicates(database, min_similarity=least, k=config.k, path=config.path)

    def write(part: Path) -> None:
        write_pairs(part / SHEET, pairs, database.locate, database.reading(config.reading))
        record = {
            **_about(config, database, command),
            "min_similarity": least,
            "pairs": [{"similarity": pair.similarity, "images": [pair.first, pair.second]} for pair in pairs],
        }
        write_json(part / RESULTS, record)

    return pairs, folder.create(write)


def _open_search(config: SearchConfig, name: str, out: Path | None, overwrite: bool) -> tuple[Job, ObjectDatabase]:
    folder = Job(
        out or _OUT / name,
        "search",
        numbered=out is None,
        overwrite=overwrite,
        inputs=(config.db, config.image, config.images, config.backbone),
    )
    database = ObjectDatabase.open(config.db, images=config.images, trust=config.trust)
    database.check_images()
    if not database.num_rows:
        raise DatabaseError(f"{database.uri} contains no objects: index images with {index_command(database.uri)}")
    return folder, database


def _open_known(config: SearchConfig, database: ObjectDatabase) -> "Encoder":
    """Open the backbone with which the database was built."""
    from cribo.features.encoder import Encoder

    backbone = database.info.backbone_source(config.backbone, trust=config.trust)
    channels = database.reading(config.reading).in_chans
    encoder = Encoder(backbone, blocks=database.info.blocks, device=config.device, in_chans=channels)
    database.require_encoder(encoder, encoder.about["name"])
    return encoder


def _record(
    config: SearchConfig,
    database: ObjectDatabase,
    query: Query,
    found: list[list[FoundObject]],
    states: dict[str, str],
    command: str,
) -> dict[str, Any]:
    """Return the content of results.json."""
    results = [
        {
            "query": region.name,
            "box": list(region.box),
            "found": [
                {
                    "rank": rank,
                    "similarity": one.similarity,
                    "image": one.image,
                    "object": one.object.number,
                    "box": list(one.object.box),
                    "area": one.object.area,
                    "share": one.object.share,
                    "mask": one.object.mask.coco(),
                    "image_state": states.get(one.image) or "as indexed",
                }
                for rank, one in enumerate(several, start=1)
            ],
        }
        for region, several in zip(query.regions, found, strict=True)
    ]
    return {**_about(config, database, command), "image": os.fspath(query.image), "results": results}


def _about(config: SearchConfig, database: ObjectDatabase, command: str) -> dict[str, Any]:
    return {
        "database": database.uri,
        "images": str(database.root),
        "backbone": database.info.backbone_name,
        "settings": dataclasses.asdict(database.info.settings),
        "pixels": database.info.pixels,  # boxes and masks are in pixels of images that are read in this way
        "k": config.k,
        "path": config.path,
        "command": command,
    }


def _write_coco(path: Path, query: Query, found: list[list[FoundObject]]) -> None:
    """Write found objects in COCO format: one category per query, the similarity as `score`."""
    sizes = {one.image: one.object.mask.image for several in found for one in several}
    ids = {name: number for number, name in enumerate(sizes, start=1)}
    annotations = (
        {
            "image_id": ids[one.image],
            "category_id": category,
            "score": one.similarity,
            **mask_annotation(one.object.mask.pixels()),
        }
        for category, several in enumerate(found, start=1)
        for one in several
    )
    images = [{"file_name": name, "width": width, "height": height} for name, (height, width) in sizes.items()]
    write_coco(path, images, [region.name for region in query.regions], annotations)
