"""The unit of work of `cribo embed`: from a batch of encoded images to their features."""

import copy
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from cribo.apps.embed.config import Kind
from cribo.data.config import DEFAULT_READING, Reading
from cribo.data.reading import EncodedImage
from cribo.data.sources.collection import ImageCollection, joined_digest, rows_of
from cribo.features.config import BackboneSource, FeaturePrecision, ObjectSettings
from cribo.features.encoder import Encoder, map_by_size
from cribo.features.object_extraction import PreparedImage, extract_prepared, read_prepared
from cribo.features.spread.parts import ImagePart
from cribo.features.stream import Streamed, stream

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


class Embedder:
    """Embeds batches of images; can be sent to other processes, where it opens the backbone on first use.

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
        backbone: BackboneSource | str,
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
        self.encoder = Encoder(backbone, blocks=blocks, device=device)
        self.reading = reading
        self.features: Kind = features
        self.precision: FeaturePrecision = precision
        self.batch_size, self.workers = batch_size, workers
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

    def __call__(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Embed a batch of rows, as in `map_batches` of Ray Data.

        Args:
            batch: `image`, names of images, and `bytes`, the contents of their files; without it, the names are paths
                or URLs.

        Returns:
            One row for each image, patch or object, in the order of the images: `image`, the columns of `COLUMNS`,
            `embedding` (N, D), and `error`. An image that cannot be read has one row with the reason in `error`, -1 in
            the columns and NaN in `embedding`; in other rows `error` is "".

        Raises:
            DataError: the batch has no column `image`.
        """
        [found] = self.stream([rows_of(batch, reading=self.reading)])
        unreadable = np.array([*found.errors], dtype=np.int32)
        image = np.concatenate([found.columns["image"], unreadable])
        order = np.argsort(image, kind="stable")
        missing = np.full((len(unreadable), self.dim), np.nan, dtype=found.embedding.dtype)
        own = {name: values for name, values in found.columns.items() if name != "image"}
        return {
            "image": np.array([found.names[index] for index in image[order]], dtype=np.str_),
            **{name: np.append(values, np.full_like(unreadable, -1))[order] for name, values in own.items()},
            "embedding": np.concatenate([found.embedding, missing])[order],
            "error": np.array([found.errors.get(int(index), "") for index in image[order]], dtype=np.str_),
        }

    def stream(self, parts: Iterable[ImageCollection]) -> Generator[Features, None, None]:
        """Yield the features of each part of a collection, and read images of the next ones meanwhile."""
        self.encoder.open()  # before the threads use it
        found = stream(
            map(ImagePart, parts), self._prepare, self._function(), at_once=self.batch_size, workers=self.workers
        )
        with closing(found):
            for _, images in found:
                yield self._joined([*images])

    def _prepare(self, file: EncodedImage, reading: Reading) -> PreparedImage:
        return read_prepared(file, self.encoder, self.settings, reading=reading)

    def _function(self) -> Callable[[Sequence[PreparedImage]], list[Rows]]:
        encoder = self.encoder
        if self.features == "global":
            return _by_size(lambda pixels: encoder.global_tokens(pixels)[:, None, None])
        if self.features == "patches":
            return _by_size(encoder.grids)
        return _objects(encoder, self.settings, self.dim)

    def _joined(self, images: Sequence[Streamed[Rows]]) -> Features:
        """Join the rows of the images of a part."""
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


def _by_size(
    encode: Callable[[Tensor], Float[Tensor, "b rows columns d"]],
) -> Callable[[Sequence[PreparedImage]], list[Rows]]:
    """Return a function that encodes images in batches of equal size."""

    def rows(batch: list[PreparedImage]) -> list[Rows]:
        grids = encode(torch.stack([image.pixels for image in batch])).cpu().numpy()
        places = np.indices(grids.shape[1:3], dtype=np.int32).reshape(2, -1).T
        return [(grid.reshape(-1, grid.shape[-1]), places) for grid in grids]

    @torch.no_grad()
    def encoded(images: Sequence[PreparedImage]) -> list[Rows]:
        return map_by_size(rows, images, lambda image: tuple(image.pixels.shape), lambda _: len(images))

    return encoded


def _objects(encoder: Encoder, settings: ObjectSettings, dim: int) -> Callable[[Sequence[PreparedImage]], list[Rows]]:
    """Return a function that finds the objects of images."""

    def encoded(images: Sequence[PreparedImage]) -> list[Rows]:
        found = []
        for image in extract_prepared(encoder, images, settings):
            places = np.array([(each.number, *each.box, each.area) for each in image.objects], dtype=np.int32)
            vectors = np.array([each.vector for each in image.objects], dtype=np.float32)
            found.append((vectors.reshape(-1, dim), places.reshape(-1, len(COLUMNS["objects"]))))
        return found

    return encoded
