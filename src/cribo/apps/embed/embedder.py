"""The unit of work of `cribo embed`: from a batch of encoded images to their features."""

import copy
import hashlib
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from cribo.apps.embed.config import Kind
from cribo.base.devices import resolve_threads
from cribo.base.errors import UnreadableImage
from cribo.data.config import DEFAULT_READING, Reading
from cribo.data.sources.collection import ImageCollection, joined_digest, rows_of
from cribo.features.config import BackboneSource, FeaturePrecision, ObjectSettings
from cribo.features.encoder import Encoder, map_by_size
from cribo.features.object_extraction import PreparedImage, extract_prepared, read_prepared
from cribo.features.prefetching import prefetch_parts

COLUMNS: Mapping[Kind, tuple[str, ...]] = {
    "global": (),
    "patches": ("row", "column"),
    "objects": ("object", "x0", "y0", "x1", "y1", "area"),
}
"""Columns that say which part of the image a row belongs to."""

Encoded = list[tuple[Float[np.ndarray, "n d"], Int[np.ndarray, "n c"]]]
"""Feature rows of each image, and the values of their columns."""


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


class _Read(NamedTuple):
    """An image, or why it cannot be read, and the hash of its content; empty if the file cannot be read."""

    image: PreparedImage | UnreadableImage
    digest: bytes


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
        encode = self._function()
        read = prefetch_parts(
            self._read,
            parts,
            threads=resolve_threads(self.workers),
            ahead=4 * self.batch_size,
            nbytes=lambda image: getattr(image.image, "nbytes", 0),
        )
        with closing(read):
            for part, images in read:
                found: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # by index in the part
                errors: dict[int, str] = {}
                digests: list[bytes] = []
                own = enumerate(images)
                while batch := list(islice(own, self.batch_size)):
                    digests += [each.digest for _, each in batch]
                    errors |= {i: each.image.reason for i, each in batch if isinstance(each.image, UnreadableImage)}
                    readable = {i: each.image for i, each in batch if isinstance(each.image, PreparedImage)}
                    found.update(zip(readable, encode([*readable.values()]), strict=True))
                names = [part.name(index) for index in range(len(part))]
                yield self._joined(names, found, errors, joined_digest(digests))

    def _read(self, part: ImageCollection, index: int) -> _Read:
        digest = b""
        try:
            file = part.read(index)
            digest = hashlib.sha256(file.content).digest()
            image = read_prepared(file, self.encoder, self.settings, reading=part.reading)
            return _Read(image, digest)
        except UnreadableImage as error:
            return _Read(error, digest)
        except OSError as error:
            return _Read(UnreadableImage(part.name(index), error.strerror or str(error)), digest)

    def _function(self) -> Callable[[Sequence[PreparedImage]], Encoded]:
        encoder = self.encoder
        if self.features == "global":
            return _by_size(lambda pixels: encoder.global_tokens(pixels)[:, None, None])
        if self.features == "patches":
            return _by_size(encoder.grids)
        return _objects(encoder, self.settings, self.dim)

    def _joined(
        self,
        names: list[str],
        found: Mapping[int, tuple[np.ndarray, np.ndarray]],
        errors: dict[int, str],
        content: str,
    ) -> Features:
        none = np.empty(0, dtype=np.int32)
        images = (np.full(len(rows), index, dtype=np.int32) for index, (rows, _) in found.items())
        columns = {"image": np.concatenate([none, *images])}
        for place, name in enumerate(COLUMNS[self.features]):
            columns[name] = np.concatenate([none, *(own[:, place] for _, own in found.values())])
        empty = np.empty((0, self.dim), dtype=np.float32)
        embedding = np.concatenate([empty, *(rows for rows, _ in found.values())])
        return Features(names, errors, columns, embedding.astype(self.precision), content)


def _by_size(
    encode: Callable[[Tensor], Float[Tensor, "b rows columns d"]],
) -> Callable[[Sequence[PreparedImage]], Encoded]:
    """Return a function that encodes images in batches of equal size."""

    def rows(batch: list[PreparedImage]) -> Encoded:
        grids = encode(torch.stack([image.pixels for image in batch])).cpu().numpy()
        places = np.indices(grids.shape[1:3], dtype=np.int32).reshape(2, -1).T
        return [(grid.reshape(-1, grid.shape[-1]), places) for grid in grids]

    @torch.no_grad()
    def encoded(images: Sequence[PreparedImage]) -> Encoded:
        return map_by_size(rows, images, lambda image: tuple(image.pixels.shape), lambda _: len(images))

    return encoded


def _objects(encoder: Encoder, settings: ObjectSettings, dim: int) -> Callable[[Sequence[PreparedImage]], Encoded]:
    """Return a function that finds the objects of images."""

    def encoded(images: Sequence[PreparedImage]) -> Encoded:
        found = []
        for image in extract_prepared(encoder, images, settings):
            places = np.array([(each.number, *each.box, each.area) for each in image.objects], dtype=np.int32)
            vectors = np.array([each.vector for each in image.objects], dtype=np.float32)
            found.append((vectors.reshape(-1, dim), places.reshape(-1, len(COLUMNS["objects"]))))
        return found

    return encoded
