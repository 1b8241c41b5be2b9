"""Near-duplicates in a database: pairs of images whose objects are alike as a whole."""

from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
import torch.nn.functional as F

from cribo.object_search.database import ObjectDatabase
from cribo.retrieval.search import TensorKeys, nearest


class DuplicatePair(NamedTuple):
    """Two images that are alike.

    Attributes:
        similarity: cosine of the means of their objects' vectors, weighted by area.
        first: path of an image below the root.
        second: the other, which comes later in the order of paths.
    """

    similarity: float
    first: str
    second: str


def find_duplicates(
    database: ObjectDatabase, *, min_similarity: float, k: int = 10, path: str | None = None
) -> list[DuplicatePair]:
    """Find pairs of images that are alike, the most similar first; exact, by comparing all images.

    Args:
        database: whose images.
        min_similarity: of a pair.
        k: how many nearest images of each are considered.
        path: pattern that the paths of both images match, as in a shell; `*` also matches `/`.
    """
    means = {name: mean for name, mean in database.image_vectors().items() if path is None or fnmatchcase(name, path)}
    if len(means) < 2:
        return []
    names = sorted(means)
    vectors = F.normalize(torch.stack([torch.from_numpy(means[name]) for name in names]), dim=1)
    found = nearest(vectors, TensorKeys(vectors), min(k + 1, len(names)))  # each finds itself, too
    pairs = {
        (min(row, other), max(row, other)): similarity
        for row, (others, similarities) in enumerate(zip(found.rows.tolist(), found.similarity.tolist(), strict=True))
        for other, similarity in zip(others, similarities, strict=True)
        if other != row and similarity >= min_similarity
    }
    ranked = sorted(pairs.items(), key=lambda pair: (-pair[1], pair[0]))
    return [DuplicatePair(similarity, names[first], names[second]) for (first, second), similarity in ranked]
