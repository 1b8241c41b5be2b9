"""Options of `cribo index` and `cribo search`, shared by the command line and Python."""

from dataclasses import dataclass
from typing import Annotated

from cribo.base.bounds import at_least, between, check_bounds, sorted_blocks
from cribo.base.errors import ConfigError
from cribo.data.config import DEFAULT_READING, Reading
from cribo.features.config import BackboneSource, ObjectOptions
from cribo.features.spread.config import EngineOptions


@dataclass
class IndexConfig(ObjectOptions, EngineOptions):
    """Index the objects of a collection of images.

    If the database exists, backbone, images and settings default to those that it was built with.

    Attributes:
        db: the database: a folder, or a URL such as s3://bucket/name. [objects/<images>.lance]
        images: a folder of images (read recursively), a text file that lists images, tar shards, a Parquet file or a
            folder of them, or a URL of any of these.
        column: of a Parquet file, the column of paths or bytes of images. [the only one, or image, bytes, path, ...]
        backbone: the network to use.
        blocks: numbers, from 1, of the blocks whose features are concatenated, such as 6,8,9,10; the linear layer of an
            adapted backbone is then ignored. [the last block; for an adapted backbone, through its linear layer]
        prune: remove images that are no longer in the folder, and old versions of the database immediately; false
            keeps these images. [up to 5 % of the images are removed; old versions are kept for a week]
        trust: run code that the backbone or an existing database names, and open the addresses in the database. Only
            for files from sources that you trust.
        moved: the folder was moved after it was indexed; --images is its new location.
        reading: how the images are read; an existing database remembers the range.
        device: such as cuda:0 or cpu. [the first GPU, else the CPU]
        batch_size: number of images of equal size to encode at once. Lower it if the device runs out of memory.
        workers: number of threads that read images. [half of the cores]
    """

    db: str | None = None
    images: str | None = None
    column: str | None = None
    backbone: BackboneSource | None = None
    blocks: tuple[int, ...] | None = None
    prune: bool | None = None
    trust: bool = False
    moved: bool = False
    reading: Reading = DEFAULT_READING
    device: str | None = None
    batch_size: Annotated[int, at_least(1)] = 16
    workers: Annotated[int, at_least(0)] | None = None

    def __post_init__(self) -> None:
        check_bounds(self)
        self.check_engine()
        if self.blocks is not None:
            self.blocks = sorted_blocks(self.blocks)
            if self.backbone is not None and self.backbone.layers != 1:
                raise ConfigError(f"--layers {self.backbone.layers} and --blocks exclude each other: omit one of them")
        if self.db is None and self.images is None:
            raise ConfigError("IMAGES is required to create a database, or --db, an existing one to update")
        if self.moved and self.images is None:
            raise ConfigError("--moved requires --images, the new location of the folder")


@dataclass
class SearchConfig:
    """A search for the most similar objects, or for pairs of similar images.

    Attributes:
        db: the database: a folder, or a URL.
        image: the query image: a file, or the path of an indexed one relative to the indexed folder.
        point: x,y of a pixel; the query is the object that contains it.
        box: x0,y0,x1,y1 in pixels; the query is the content of this box.
        object: number of an object, as shown in tables and pictures.
        duplicates: find pairs of similar images instead of objects.
        k: number of objects to find for each query; with duplicates, number of nearest images to compare with each.
        path: pattern of the paths of images to search, such as 'night/*'; `*` also matches `/`.
        one_per_image: find only the most similar object of each image.
        min_similarity: minimum cosine similarity of results. [no limit; 0.95 for duplicates]
        coco: also write the found objects to coco.json, in COCO format.
        include_own: also find objects of the query image.
        exact: compare with every object, without the index.
        images: new location of the indexed folder, if it was moved; or the URL of indexed images, which is opened
            only if it is given.
        backbone: new location of the backbone, if it was moved after indexing. It must be the same one.
        trust: run code that the checkpoint or the database names, and open the addresses in the database. Only for
            files from sources that you trust.
        reading: how images are read; the range is that of the database.
        device: such as cuda:0 or cpu. [the first GPU, else the CPU]
    """

    db: str
    image: str | None = None
    point: tuple[int, int] | None = None
    box: tuple[int, int, int, int] | None = None
    object: int | None = None
    duplicates: bool = False
    k: Annotated[int, at_least(1)] = 10
    path: str | None = None
    one_per_image: bool = False
    min_similarity: Annotated[float, between(-1, 1)] | None = None
    coco: bool = False
    include_own: bool = False
    exact: bool = False
    images: str | None = None
    backbone: str | None = None
    trust: bool = False
    reading: Reading = DEFAULT_READING
    device: str | None = None

    def __post_init__(self) -> None:
        check_bounds(self)
        of_query = ("image", "point", "box", "object", "one_per_image", "include_own", "coco")
        given = [name for name in of_query if getattr(self, name) not in (None, False)]
        if self.duplicates and given:
            raise ConfigError(f"--duplicates and --{given[0]} exclude each other: omit one of them")
        if not self.duplicates and self.image is None:
            raise ConfigError("give --image to search for its objects, or --duplicates to find similar images")
