"""Object representations: the mean of the tokens of each cluster, in each view (paper eq. 1)."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def pool_objects(
    tokens: Float[Tensor, "b 2 n d"], labels: Int[Tensor, "b 2 n"], num_objects: int
) -> tuple[Float[Tensor, "b 2 k d"], Bool[Tensor, "b k"]]:
    """Average the tokens of every cluster, per view.

    The teacher and the student are pooled with the same labels: those of the teacher's tokens.

    Args:
        tokens: (B, 2, N, D) tokens as the backbone gives them (unnormalised), both views.
        labels: (B, 2, N) cluster of each token, in [0, K).
        num_objects: K.

    Returns:
        objects: (B, 2, K, D) float32, differentiable in `tokens`; zero where a cluster has no token.
        kept: (B, K), true for clusters with at least one token in both views. Only these are objects.

    Raises:
        ValueError: shapes do not agree.

    Example:
        >>> tokens, labels = torch.randn(4, 2, 49, 16), torch.randint(0, 6, (4, 2, 49))
        >>> objects, kept = pool_objects(tokens, labels, 6)
        >>> objects.shape, kept.shape
        (torch.Size([4, 2, 6, 16]), torch.Size([4, 6]))
    """
    if tokens.ndim != 4 or tokens.shape[1] != 2:
        raise ValueError(f"tokens must have the shape (B, 2, N, D), got {tuple(tokens.shape)}")
    if labels.shape != tokens.shape[:3]:
        raise ValueError(f"labels must have the shape {tuple(tokens.shape[:3])}, got {tuple(labels.shape)}")
    batch, views, _, dim = tokens.shape
    # Sums of half-precision tokens would lose the small clusters' digits.
    tokens = tokens.float()
    labels = labels.long()
    sums = tokens.new_zeros((batch, views, num_objects, dim))
    sums = sums.scatter_add(2, labels[..., None].expand_as(tokens), tokens)
    sizes = tokens.new_zeros((batch, views, num_objects))
    sizes = sizes.scatter_add(2, labels, torch.ones_like(labels, dtype=sizes.dtype))
    return sums / sizes.clamp_min(1)[..., None], (sizes > 0).all(dim=1)
