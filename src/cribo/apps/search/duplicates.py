"""Near-duplicates in a database: pairs of images with similar objects."""

from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
import torch.nn.functional as F

from cribo.apps.search.database import ObjectDatabase
from cribo.features.search import TensorKeys, nearest


class DuplicatePair(NamedTuple):
    """Two similar images.

    Attributes:
        similarity: cosine similarity of the area-weighted means of their object vectors.
        first: path of the image that is first in the order of paths, relative to the root.
        second: path of the other image, relative to the root.
    """

    similarity: float
    first: str
    second: str


def find_duplicates(
    database: ObjectDatabase, *, min_similarity: float, k: int = 10, path: str | None = None
) -> list[DuplicatePair]:
    """Find pairs of similar images by exact search, in descending order of similarity.

    Args:
        database: the database to search.
        min_similarity: minimum similarity of a pair.
        k: number of nearest neighbours of each image to consider.
        path: shell-style pattern that both paths must match; `*` also matches `/`.
    """
    means = {name: mean for name, mean in database.image_vectors().items() if path is None or fnmatchcase(name, path)}
    if len(means) < 2:
        return []
    names = sorted(means)
    vectors = F.normalize(torch.stack([torch.from_numpy(means[name]) for name in names]), dim=1)
    found = nearest(vectors, TensorKeys(vectors), min(k + 1, len(names)))  # + 1: each image also finds itself
    pairs = {
        (min(row, other), max(row, other)): similarity
        for row, (others, similarities) in enumerate(zip(found.rows.tolist(), found.similarity.tolist(), strict=True))
        for other, similarity in zip(others, similarities, strict=True)
        if other != row and similarity >= min_similarity
    }
    ranked = sorted(pairs.items(), key=lambda pair: (-pair[1], pair[0]))
    return [DuplicatePair(similarity, names[first], names[second]) for (first, second), similarity in ranked]
