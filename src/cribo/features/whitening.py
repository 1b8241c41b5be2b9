"""Partial whitening of features: a linear layer in closed form, fitted to unlabelled patches.

PCA whitening as in image retrieval (Jegou and Chum 2012) divides each direction by its standard deviation. A power
below 1 keeps part of the variance, which indicates the importance of a direction.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from cribo.base.bounds import between
from cribo.base.errors import InputError


class Moments:
    """Running mean and covariance of vectors, in float64.

    Args:
        dim: D.

    Example:
        >>> moments = Moments(2)
        >>> moments.update(torch.tensor([[0.0, 1.0], [2.0, 1.0]]))
        >>> moments.mean.tolist(), moments.covariance.tolist()
        ([1.0, 1.0], [[1.0, 0.0], [0.0, 0.0]])
    """

    def __init__(self, dim: int) -> None:
        self.count = 0
        self.mean = torch.zeros(dim, dtype=torch.float64)
        self._scatter = torch.zeros(dim, dim, dtype=torch.float64)  # around the mean

    def update(self, vectors: Float[Tensor, "*n d"]) -> None:
        """Add vectors."""
        vectors = vectors.flatten(0, -2).to(self.mean)
        if not len(vectors):
            return
        mean = vectors.mean(dim=0)
        centred = vectors - mean
        shift, total = mean - self.mean, self.count + len(vectors)
        self._scatter += centred.T @ centred + shift.outer(shift) * (self.count * len(vectors) / total)
        self.mean += shift * (len(vectors) / total)
        self.count = total

    @property
    def covariance(self) -> Float[Tensor, "d d"]:
        """Covariance of all vectors so far."""
        return self._scatter / max(self.count, 1)


# Directions with a smaller variance relative to the largest contain only rounding errors.
_NEGLIGIBLE = 1e-10


def partial_whitening(
    moments: Moments, *, power: float, dims: int | None = None
) -> tuple[Float[Tensor, "e d"], Float[Tensor, " e"]]:
    """Compute a linear layer for partial PCA whitening.

    The layer centres features, rotates them to their principal axes, and divides each axis by (standard
    deviation)^power.

    Args:
        moments: moments of unlabelled features.
        power: 0 only rotates, 1 whitens.
        dims: number E of directions of largest variance to keep; by default all with non-zero variance.

    Returns:
        Weight (E, D) and bias (E,), float32.

    Raises:
        ValueError: `power` is outside [0, 1], `dims` exceeds the directions with variance, or `moments` contains fewer
            than two vectors.
    """
    between(0, 1).check(power=power)
    if moments.count < 2:
        raise InputError(f"whitening needs at least 2 vectors, got {moments.count}: use more images")
    variances, axes = torch.linalg.eigh(moments.covariance)  # ascending
    variances, axes = variances.flip(0), axes.flip(1)
    available = int((variances > _NEGLIGIBLE * variances[0]).sum())
    if dims is not None and not 1 <= dims <= available:
        raise InputError(f"dims must be 1 to {available}, the number of directions with variance, got {dims}")
    kept = dims or available
    weight = (axes[:, :kept] * variances[:kept].pow(-power / 2)).T
    return weight.float(), -(weight @ moments.mean).float()
