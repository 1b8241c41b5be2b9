"""Merging of small regions of label maps into their neighbours, for tools in which people correct regions."""

from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int64, UInt8
from torch import Tensor

from cribo.data.labelled.label_maps import IGNORE_INDEX


def merge_small_regions(labels: UInt8[Tensor, "h w"], min_area: float) -> UInt8[Tensor, "h w"]:
    """Give each pixel of small connected regions the class of the nearest larger region.

    Distances are numbers of steps to one of the four neighbours through labelled pixels, so that each pixel becomes
    part of the region whose class it gets. Pixels without a class (255) stay as they are. So do small regions from
    which no larger one can be reached.

    Args:
        labels: class of each pixel, 255 for none.
        min_area: regions with fewer pixels are small.

    Example:
        >>> merge_small_regions(torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2]], dtype=torch.uint8), min_area=3)
        tensor([[0, 0, 0, 0, 2, 2, 2, 2]], dtype=torch.uint8)
    """
    values = labels.numpy()
    small = _small_regions(values, min_area)
    if not small.any():
        return labels
    merged = values.copy()
    pixels, nearest = _nearest(small, values != IGNORE_INDEX)
    merged.flat[pixels] = values.flat[nearest]
    return torch.from_numpy(merged)


def _small_regions(values: UInt8[np.ndarray, "h w"], min_area: float) -> Bool[np.ndarray, "h w"]:
    """Return the pixels of connected regions of a class that have fewer pixels."""
    from scipy import ndimage

    small = np.zeros(values.shape, dtype=bool)
    for label in np.unique(values[values != IGNORE_INDEX]) if min_area > 1 else ():
        regions = np.zeros(values.shape, dtype=np.int32)
        ndimage.label(values == label, output=regions)
        sizes = np.bincount(regions.ravel())
        sizes[0] = values.size  # the pixels outside
        small |= (sizes < min_area)[regions]
    return small


def _nearest(
    small: Bool[np.ndarray, "h w"], labelled: Bool[np.ndarray, "h w"]
) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n"]]:
    """Return the small pixels that are connected to larger regions, and the nearest pixel in these, by flat index."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import dijkstra

    places = np.arange(small.size).reshape(small.shape)
    pairs = []
    for one, other in ((np.s_[:, :-1], np.s_[:, 1:]), (np.s_[:-1], np.s_[1:])):
        # Without the steps inside larger regions, the graph is as small as the small regions.
        steps = labelled[one] & labelled[other] & (small[one] | small[other])
        pairs.append(np.stack([places[one][steps], places[other][steps]]))
    pixels, numbers = np.unique(np.concatenate(pairs, axis=1), return_inverse=True)
    numbers = numbers.reshape(2, -1)
    is_small = small.flat[pixels]
    starts = np.flatnonzero(~is_small)
    if not len(starts):
        return pixels[starts], pixels[starts]
    graph = coo_array((np.ones(numbers.shape[1]), (numbers[0], numbers[1])), shape=(len(pixels),) * 2).tocsr()
    found: Any = dijkstra(graph, directed=False, indices=starts, return_predecessors=True, min_only=True)
    distances, _, nearest = found
    merged = is_small & np.isfinite(distances)
    return pixels[merged], pixels[nearest[merged]]
