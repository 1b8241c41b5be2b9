"""The unit of work of `cribo embed`: from a batch of encoded images to their features."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int

from cribo.apps.embed.config import Kind
from cribo.base.errors import UnreadableImage
from cribo.data.config import DEFAULT_READING, Reading
from cribo.data.reading import ImageContent
from cribo.data.sources.collection import joined_digest
from cribo.data.windows import LargeImage
from cribo.features.config import BackboneSource, FeaturePrecision, ObjectSettings
from cribo.features.encoder import Encoder, map_by_size
from cribo.features.large_features import large_global, large_objects, large_patches
from cribo.features.object_extraction import PreparedImage, extract_prepared, read_prepared_or_open
from cribo.features.objects import ImageObject
from cribo.features.stream import ImageFunction, Streamed
from cribo.features.windows import with_large
from cribo.models import Backbone

COLUMNS: Mapping[Kind, tuple[str, ...]] = {
    "global": (),
    "patches": ("row", "column"),
    "objects": ("object", "x0", "y0", "x1", "y1", "area"),
}
"""Columns that say which part of the image a row belongs to."""

Rows = tuple[Float[np.ndarray, "n d"], Int[np.ndarray, "n c"]]
"""Feature rows of an image, and the values of their columns."""


class Features(NamedTuple):
    """Features of a part of a collection.

    Attributes:
        names: names of all images of the part.
        errors: reasons why images cannot be read, by index in `names`.
        columns: `image`, the index in `names`, and the columns of `COLUMNS`.
        embedding: a vector for each row.
        content: `content_hash` of the images.
    """

    names: list[str]
    errors: dict[int, str]
    columns: Mapping[str, Int[np.ndarray, " n"]]
    embedding: Float[np.ndarray, "n d"]
    content: str


class Embedder(ImageFunction[PreparedImage | LargeImage, Rows]):
    """Embeds images, in collections or batches of rows; can be sent to other processes.

    A batch has one row for each image, patch or object, in the order of the images: `image`, the columns of `COLUMNS`,
    `embedding` (N, D), and `error`.

    Args:
        backbone: the backbone, or its source.
        features: global (a vector for each image), patches (one for each patch) or objects (one for each cluster of an
            image's patches).
        blocks: 1-based indices of the blocks whose features are concatenated; not for global. [the last]
        settings: size of the images, and, for objects, what defines them. [the network's own size for global, else
            480 pixels]
        precision: data type of the features.
        batch_size: number of images of equal size to encode at once.
        workers: number of threads that read images. [half of the cores]
        device: such as cuda:0. [the first GPU of the process, else the CPU]
        reading: how the images of a batch are read.

    Example:
        >>> embed = Embedder("mean-colour", features="patches", device="cpu")
        >>> dataset.map_batches(embed, batch_size=256)  # Ray Data  # doctest: +SKIP
        >>> embed({"image": np.array(["a.jpg", "b.jpg"])})["embedding"].shape  # doctest: +SKIP
        (2400, 3)
    """

    def __init__(
        self,
        backbone: Backbone | BackboneSource | str,
        *,
        features: Kind = "global",
        blocks: Sequence[int] | None = None,
        settings: ObjectSettings | None = None,
        precision: FeaturePrecision = "float32",
        batch_size: int = 16,
        workers: int | None = None,
        device: str | None = None,
        reading: Reading = DEFAULT_READING,
    ) -> None:
        super().__init__(batch_size, workers, reading=reading)
        self.encoder = Encoder(backbone, blocks=blocks, device=device, in_chans=reading.in_chans)
        self.features: Kind = features
        self.precision: FeaturePrecision = precision
        self._settings = settings

    def on(self, device: str) -> "Embedder":
        """Return the same embedder on another device, with its backbone not yet opened."""
        other = copy.copy(self)
        other.encoder = self.encoder.on(device)
        return other

    @property
    def settings(self) -> ObjectSettings:
        """Size of the images, and what defines objects."""
        if self._settings is not None:
            return self._settings
        return ObjectSettings(size=self.encoder.backbone.image_size) if self.features == "global" else ObjectSettings()

    @property
    def dim(self) -> int:
        """D, the dimension of a vector."""
        return self.encoder.backbone.embed_dim if self.features == "global" else self.encoder.dim

    def open(self) -> None:
        """Open the backbone."""
        self.encoder.open()

    def prepare(self, file: ImageContent, reading: Reading) -> PreparedImage | LargeImage:
        """Decode and resize an image; one above the limit of pixels is read when it is encoded."""
        return read_prepared_or_open(file, self.encoder, self.settings, reading=reading)

    def compute(self, images: Sequence[PreparedImage | LargeImage]) -> Iterator[Rows | UnreadableImage]:
        """Return the features of images."""

        def together(images: list[PreparedImage]) -> list[Rows]:
            if self.features == "objects":
                return self._objects(images)
            return map_by_size(self._patches, images, lambda image: tuple(image.pixels.shape), lambda _: len(images))

        return with_large(images, together, self._large)

    def rows(self, image: Streamed[Rows]) -> dict[str, np.ndarray]:
        """Return `image`, the columns of `COLUMNS`, `embedding` and `error`.

        The row of an unreadable image has -1 in the columns and NaN in `embedding`.
        """
        names = COLUMNS[self.features]
        unreadable = np.full((1, self.dim), np.nan), np.full((1, len(names)), -1, dtype=np.int32)
        embedding, places = image.result or unreadable
        return {
            "image": np.full(len(embedding), image.name),
            **{name: places[:, number] for number, name in enumerate(names)},
            "embedding": embedding.astype(self.precision),
            "error": np.full(len(embedding), image.reason),
        }

    def join(self, images: Sequence[Streamed[Rows]]) -> Features:
        """Join the features of the images of a part."""
        found = {index: each.result for index, each in enumerate(images) if each.result is not None}
        none = np.empty(0, dtype=np.int32)
        columns = {
            "image": np.concatenate([none, *(np.full(len(own), index, np.int32) for index, (own, _) in found.items())])
        }
        for place, name in enumerate(COLUMNS[self.features]):
            columns[name] = np.concatenate([none, *(own[:, place] for _, own in found.values())])
        empty = np.empty((0, self.dim), dtype=np.float32)
        embedding = np.concatenate([empty, *(own for own, _ in found.values())])
        return Features(
            [each.name for each in images],
            {index: each.reason for index, each in enumerate(images) if each.error is not None},
            columns,
            embedding.astype(self.precision),
            joined_digest(bytes.fromhex(each.sha256) for each in images),
        )

    @torch.no_grad()
    def _patches(self, images: Sequence[PreparedImage]) -> list[Rows]:
        """Return the features of the patches of images of equal size, or their global tokens."""
        pixels = torch.stack([image.pixels for image in images])
        if self.features == "global":
            grids = self.encoder.global_tokens(pixels)[:, None, None]
        else:
            grids = self.encoder.grids(pixels)
        places = np.indices(grids.shape[1:3], dtype=np.int32).reshape(2, -1).T
        return [(grid.reshape(-1, grid.shape[-1]), places) for grid in grids.cpu().numpy()]

    def _objects(self, images: Sequence[PreparedImage]) -> list[Rows]:
        """Return the features of the objects of images."""
        return [self._rows(image.objects) for image in extract_prepared(self.encoder, images, self.settings)]

    def _rows(self, objects: Sequence[ImageObject]) -> Rows:
        places = np.array([(each.number, *each.box, each.area) for each in objects], dtype=np.int32)
        vectors = np.array([each.vector for each in objects], dtype=np.float32)
        return vectors.reshape(-1, self.dim), places.reshape(-1, len(COLUMNS["objects"]))

    def _large(self, image: LargeImage) -> Rows:
        """Return the features of a large image."""
        options = self.encoder, image, self.settings, self.batch_size
        if self.features == "objects":
            return self._rows(large_objects(*options))
        grid = large_global(*options)[None, None] if self.features == "global" else large_patches(*options)
        places = np.indices(grid.shape[:2], dtype=np.int32).reshape(2, -1).T
        return grid.reshape(-1, grid.shape[-1]), places
