"""What an indexing and a search can be asked for, typed: the command line and Python share it."""

from dataclasses import dataclass

from cribo.arguments import ConfigError
from cribo.method.recipe import Marginals
from cribo.object_search.settings import ObjectSettings
from cribo.retrieval.source import BackboneSource


@dataclass
class IndexConfig:
    """A folder of images into a database of objects.

    What a database was built with need not be said again: backbone, images and settings that are not given are its
    own.

    Attributes:
        db: the database: a folder, or a URL such as s3://bucket/name.
        images: a folder of images of any depth, or a text file that lists them.
        backbone: whose features.
        blocks: numbers, from 1, of the blocks whose features are concatenated, such as 6,8,9,10; the linear layer of an
            adapted backbone is left out. [the last block; for an adapted backbone, through its linear layer]
        num_objects: K, the objects of an image at most. More find smaller things, and cut large ones. [16]
        marginals: adaptive lets the number and sizes of objects follow the image; uniform makes K of about one size.
            [adaptive]
        position_weight: weight of nearness against likeness; 0 joins what looks alike wherever it is. [1.0]
        size: shorter side at which an image is encoded, in pixels: larger finds smaller things and takes longer; 0
            for each image's own. [480]
        min_share: objects that cover less of the image are left out. [0.005]
        prune: remove images that are gone from the folder, and old versions of the database at once; false keeps
            these images. [up to 5 % of the images are removed; old versions are kept for a week]
        moved: the folder was moved since it was indexed; --images says where it is now.
        max_pixels: larger images are unreadable.
        device: such as cuda:0 or cpu; the first GPU, or the CPU where there is none, when not given.
        batch_size: images of one size that are encoded at once. Lower it if the device runs out of memory.
        threads: that read and decode; as many as there are cores, and 16 at most, when not given.
    """

    db: str
    images: str | None = None
    backbone: BackboneSource | None = None
    blocks: tuple[int, ...] | None = None
    num_objects: int | None = None
    marginals: Marginals | None = None
    position_weight: float | None = None
    size: int | None = None
    min_share: float | None = None
    prune: bool | None = None
    moved: bool = False
    max_pixels: int | None = None
    device: str | None = None
    batch_size: int = 16
    threads: int | None = None

    def __post_init__(self) -> None:
        for name in ("batch_size", "threads"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError(f"{name} must be >= 1, got {value}")
        if self.blocks is not None:
            self.blocks = tuple(sorted(set(self.blocks)))
            if not self.blocks or self.blocks[0] < 1:
                raise ConfigError(f"blocks must be numbers from 1, got {list(self.blocks)}")
            if self.backbone is not None and self.backbone.layers != 1:
                raise ConfigError(f"--layers {self.backbone.layers} and --blocks exclude each other: leave one out")
        if self.moved and self.images is None:
            raise ConfigError("--moved wants --images: where the folder is now")

    def settings(self, default: ObjectSettings) -> ObjectSettings:
        """What counts as an object: what was given, and `default` where nothing was.

        Raises:
            ConfigError: a value out of range.
        """
        names = ("num_objects", "marginals", "position_weight", "min_share")
        values = {
            name: getattr(default, name) if getattr(self, name) is None else getattr(self, name) for name in names
        }
        if self.size is not None and self.size < 0:
            raise ConfigError(f"size must be >= 1 pixel, or 0 for the image's own, got {self.size}")
        return ObjectSettings(**values, size=default.size if self.size is None else self.size or None)


@dataclass
class SearchConfig:
    """A search for the objects most like one, or for images that are alike.

    Attributes:
        db: the database: a folder, or a URL.
        image: the image that is searched with: a file, or the path of an indexed one below the indexed folder.
        point: x,y of a pixel: searches for the object that it lies in.
        box: x0,y0,x1,y1 in pixels: searches for what is inside.
        object: number of an object, as tables and pictures say it.
        duplicates: find pairs of images that are alike, in place of objects like those of an image.
        k: how many are found for each object; with duplicates, how many nearest images of each are considered.
        path: pattern of the paths of images to search in, such as 'night/*'; `*` also matches `/`.
        one_per_image: find only the most similar object of each image.
        min_similarity: cosine, -1 to 1, below which nothing is found. [no limit; 0.95 for duplicates]
        coco: write the objects that were found to coco.json, too, in COCO's format.
        include_own: find objects of the same image, too.
        exact: compare with every object although there is an index.
        images: where the indexed folder is now, if it was moved.
        backbone: where the backbone is now, if it was moved since the images were indexed. It must be the same one.
        trust: run the code that a checkpoint of Python objects holds. Only for files whose maker you trust.
        device: such as cuda:0 or cpu; the first GPU, or the CPU where there is none, when not given.
    """

    db: str
    image: str | None = None
    point: tuple[int, int] | None = None
    box: tuple[int, int, int, int] | None = None
    object: int | None = None
    duplicates: bool = False
    k: int = 10
    path: str | None = None
    one_per_image: bool = False
    min_similarity: float | None = None
    coco: bool = False
    include_own: bool = False
    exact: bool = False
    images: str | None = None
    backbone: str | None = None
    trust: bool = False
    device: str | None = None

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ConfigError(f"k must be >= 1, got {self.k}")
        if self.min_similarity is not None and not -1 <= self.min_similarity <= 1:
            raise ConfigError(f"min_similarity must be from -1 to 1, got {self.min_similarity}")
        of_query = ("image", "point", "box", "object", "one_per_image", "include_own", "coco")
        given = [name for name in of_query if getattr(self, name) not in (None, False)]
        if self.duplicates and given:
            raise ConfigError(f"--duplicates and --{given[0]} exclude each other: leave one of them out")
        if not self.duplicates and self.image is None:
            raise ConfigError(
                "give --image, whose objects are searched for, or --duplicates, for images that are alike"
            )
