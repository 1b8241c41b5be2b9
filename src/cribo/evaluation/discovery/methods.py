"""LOST and TokenCut: discovery of the main object of an image from the similarity of its patches."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

EDGE = 1e-5
"""Weight of an edge between dissimilar patches in TokenCut's graph."""


@dataclass(frozen=True)
class FoundObject:
    """An object on the grid of patches.

    Attributes:
        mask: patches of the object, a connected component (4-connectivity).
        seed: row and column of the seed patch.
    """

    mask: Bool[np.ndarray, "h w"]
    seed: tuple[int, int]

    @property
    def box(self) -> tuple[int, int, int, int]:
        """Left, top, right and bottom of the mask in patches; right and bottom are exclusive."""
        rows, columns = (np.flatnonzero(self.mask.any(axis=axis)) for axis in (1, 0))
        return int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1


def lost(features: Float[Tensor, "n d"], grid: tuple[int, int], *, candidates: int = 100) -> FoundObject:
    """Find an object with LOST (Siméoni et al. 2021, section 3).

    The seed is the patch with the fewest similar patches (inner product above 0). It is expanded by those of the
    `candidates` patches with the fewest similar patches that are similar to the seed. Patches whose inner products with
    the expanded seed have a sum above 0 belong to objects; the connected component of the seed is returned.

    Args:
        features: patch features, row by row, not normalised.
        grid: (h, w).
        candidates: number of candidates for the expansion of the seed, k in the paper.
    """
    similarity = features @ features.T
    degree = (similarity.clone().fill_diagonal_(0) > 0).sum(dim=1)
    order = degree.argsort(stable=True)
    seed, near = order[0], order[:candidates]
    joined = near[similarity[seed, near] > 0]
    belongs = similarity[joined].sum(dim=0).view(grid) > 0
    return _object(belongs.cpu().numpy(), divmod(int(seed), grid[1]))


def tokencut(features: Float[Tensor, "n d"], grid: tuple[int, int], *, threshold: float = 0.2) -> FoundObject:
    """Find an object with TokenCut (Wang et al. 2022, section 3).

    Patches with a cosine above `threshold` are connected by an edge of weight 1, all others by 1e-5. The normalised cut
    of this graph is the second eigenvector of (D - E) y = λ D y, split at its mean. The object is on the side of the
    patch with the largest absolute value, its seed, and contains it.

    Where all pairs of patches are similar, or none is, all cuts are equal and the object is the whole image. Every
    vector with a sum of 0 is then an eigenvector; the one that a solver returns depends on its algorithm, the order of
    the patches and the shape of the grid, but not on the image.

    Args:
        features: patch features, row by row.
        grid: (h, w).
        threshold: τ in the paper.
    """
    from scipy.linalg import eigh

    unit = F.normalize(features.double(), dim=1)
    similar = unit @ unit.T > threshold
    if similar.all() or similar.sum() <= len(similar):
        return FoundObject(np.ones(grid, dtype=bool), (0, 0))
    edges = torch.where(similar, 1.0, EDGE).cpu().numpy()
    scale = 1 / np.sqrt(edges.sum(axis=1))
    # Symmetric form of the generalised eigenvalue problem, whose eigenvectors are D^(1/2) y.
    laplacian = np.eye(len(edges)) - scale[:, None] * edges * scale
    vector = scale * eigh(laplacian, subset_by_index=[1, 1])[1][:, 0]
    seed = int(np.abs(vector).argmax())
    side = vector > vector.mean()
    return _object((side if side[seed] else ~side).reshape(grid), divmod(seed, grid[1]))


def _object(belongs: Bool[np.ndarray, "h w"], seed: tuple[int, int]) -> FoundObject:
    """Return the connected component of the seed among the patches that belong to objects."""
    from scipy.ndimage import label

    belongs[seed] = True  # the sum of LOST is 0 if the seed's features are 0
    components = np.empty(belongs.shape, dtype=np.int32)
    label(belongs, output=components)
    return FoundObject(components == components[seed], seed)
