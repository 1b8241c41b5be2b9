"""Object representations: the mean of the tokens of each cluster, in each view (paper equation 1)."""

import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cribo.base.errors import InputError
from cribo.method.precision import in_float32


@in_float32
def pool_objects(
    tokens: Float[Tensor, "b 2 n d"], labels: Int[Tensor, "b 2 n"], num_objects: int
) -> tuple[Float[Tensor, "b 2 k d"], Bool[Tensor, "b k"]]:
    """Average the tokens of every cluster, per view.

    Teacher and student are pooled with the same labels, those of the teacher's tokens.

    Args:
        tokens: (B, 2, N, D) unnormalised tokens of both views.
        labels: (B, 2, N) cluster of each token, in [0, K).
        num_objects: K.

    Returns:
        objects: (B, 2, K, D) at least float32, differentiable in `tokens`; zero if a cluster has no token.
        kept: (B, K), true for clusters with at least one token in both views. Only these are objects.

    Raises:
        ValueError: shapes do not agree.

    Source: paper equation 1.

    Example:
        >>> import torch
        >>> tokens, labels = torch.randn(4, 2, 49, 16), torch.randint(0, 6, (4, 2, 49))
        >>> objects, kept = pool_objects(tokens, labels, 6)
        >>> objects.shape, kept.shape
        (torch.Size([4, 2, 6, 16]), torch.Size([4, 6]))
    """
    if tokens.ndim != 4 or tokens.shape[1] != 2:
        raise InputError(f"tokens must have the shape (B, 2, N, D), got {tuple(tokens.shape)}")
    if labels.shape != tokens.shape[:3]:
        raise InputError(f"labels must have the shape {tuple(tokens.shape[:3])}, got {tuple(labels.shape)}")
    members = F.one_hot(labels.long(), num_objects).to(tokens.dtype)  # (B, 2, N, K)
    sizes = members.sum(dim=2)
    return members.mT @ tokens / sizes.clamp_min(1)[..., None], (sizes > 0).all(dim=1)
