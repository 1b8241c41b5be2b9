"""Object representations: the mean of the tokens of each cluster, in each view (paper eq. 1)."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cribo.method.kernels import Accelerated
from cribo.method.precision import at_least_float32

_IMAGES_AT_ONCE = 8  # a float32 copy of half-precision tokens stays in a processor's cache, and out of memory


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
    _check_shapes(tokens, labels)
    batch, views, _, dim = tokens.shape
    num_rows = batch * views * num_objects
    targets = torch.arange(num_rows, device=labels.device).view(batch, views, num_objects)
    objects: Tensor = _Means.apply(tokens, labels.long(), targets, num_rows)
    return objects.view(batch, views, num_objects, dim), kept_clusters(labels, num_objects)


def kept_clusters(labels: Int[Tensor, "b 2 n"], num_objects: int) -> Bool[Tensor, "b k"]:
    """Which clusters have at least one token in both views: only these are objects.

    Example:
        >>> kept_clusters(torch.tensor([[[0, 0, 1], [1, 2, 1]]]), 3)
        tensor([[False,  True, False]])
    """
    batch, views, _ = labels.shape
    present = torch.zeros((batch, views, num_objects), dtype=torch.bool, device=labels.device)
    return present.scatter_(2, labels.long(), True).all(dim=1)


def pool_kept_objects(
    tokens: Float[Tensor, "b 2 n d"],
    labels: Int[Tensor, "b 2 n"],
    num_objects: int,
    rows: Int[Tensor, " r"],
    clusters: Int[Tensor, " r"],
) -> Float[Tensor, "2 r d"]:
    """`pool_objects` for some clusters alone, compacted: no row is made, and none sent a gradient, for the others.

    Args:
        tokens: (B, 2, N, D) tokens as the backbone gives them (unnormalised), both views.
        labels: (B, 2, N) cluster of each token, in [0, K).
        num_objects: K.
        rows: (R,) the image, within the batch, of each cluster that is wanted; none is named twice.
        clusters: (R,) its number in [0, K).

    Returns:
        (2, R, D) float32, view first, differentiable in `tokens`; zero where a cluster has no token.

    Raises:
        ValueError: shapes do not agree.

    Example:
        >>> tokens, labels = torch.randn(4, 2, 49, 16), torch.randint(0, 6, (4, 2, 49))
        >>> rows, clusters = kept_clusters(labels, 6).nonzero(as_tuple=True)
        >>> objects = pool_kept_objects(tokens, labels, 6, rows, clusters)
        >>> torch.equal(objects, pool_objects(tokens, labels, 6)[0][rows, :, clusters].transpose(0, 1))
        True
    """
    _check_shapes(tokens, labels)
    if rows.shape != clusters.shape or rows.ndim != 1:
        raise ValueError(
            f"rows and clusters must have the same shape (R,), got {tuple(rows.shape)} and {tuple(clusters.shape)}"
        )
    wanted, num_rows = len(rows), 2 * len(rows)
    targets = torch.full((len(tokens), 2, num_objects), num_rows, device=labels.device)
    targets[rows, :, clusters] = torch.arange(num_rows, device=labels.device).view(2, wanted).T
    objects: Tensor = _Means.apply(tokens, labels.long(), targets, num_rows)
    return objects.view(2, wanted, tokens.shape[-1])


def _check_shapes(tokens: Tensor, labels: Tensor) -> None:
    if tokens.ndim != 4 or tokens.shape[1] != 2:
        raise ValueError(f"tokens must have the shape (B, 2, N, D), got {tuple(tokens.shape)}")
    if labels.shape != tokens.shape[:3]:
        raise ValueError(f"labels must have the shape {tuple(tokens.shape[:3])}, got {tuple(labels.shape)}")


class _Means(torch.autograd.Function):
    """Means of clusters, each written to a row of its own; those with the target `num_rows` are left out.

    Autograd's own way would keep a float32 copy of all tokens, their gradient in float32 and an index as large.
    """

    @staticmethod
    def forward(
        ctx: Any,
        tokens: Float[Tensor, "b 2 n d"],
        labels: Int[Tensor, "b 2 n"],
        targets: Int[Tensor, "b 2 k"],
        num_rows: int,
    ) -> Float[Tensor, "rows d"]:
        rows = targets.gather(2, labels).flatten()
        sizes = tokens.new_zeros(num_rows + 1, dtype=torch.float32)
        sizes.index_add_(0, rows, torch.ones_like(rows, dtype=torch.float32)).clamp_min_(1)
        ctx.save_for_backward(rows, sizes)
        ctx.shape, ctx.dtype = tokens.shape, tokens.dtype
        return _SUMS.on(tokens.device)(tokens, labels, targets, num_rows).div_(sizes[:-1, None])

    @staticmethod
    def backward(ctx: Any, *gradients: Float[Tensor, "rows d"]) -> tuple[Tensor, None, None, None]:
        rows, sizes = ctx.saved_tensors
        shares = (gradients[0] / sizes[:-1, None]).to(ctx.dtype)
        shares = F.pad(shares, (0, 0, 0, 1))  # one more row, of zeros, for the tokens that were left out
        return shares.index_select(0, rows).view(ctx.shape), None, None, None


def sums(
    tokens: Float[Tensor, "b 2 n d"], labels: Int[Tensor, "b 2 n"], targets: Int[Tensor, "b 2 k"], num_rows: int
) -> Float[Tensor, "rows d"]:
    """Sums of clusters, each in the row that `targets` gives, in float32 or better, in plain PyTorch.

    Sums of half-precision tokens in their own type would lose the small clusters' digits.
    """
    found = at_least_float32(tokens[:0]).new_zeros((num_rows + 1, tokens.shape[-1]))
    rows = targets.gather(2, labels)
    for own_rows, own in zip(rows.split(_IMAGES_AT_ONCE), tokens.split(_IMAGES_AT_ONCE), strict=True):
        found.index_add_(0, own_rows.flatten(), at_least_float32(own.flatten(0, 2)))
    return found[:-1]


def _try(fused: Callable[..., Tensor], device: torch.device) -> None:
    """Pool small made-up batches by the fused version, and compare with the plain one."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(7, (3, 2, 50), generator=generator).to(device)
    targets = torch.randperm(42, generator=generator).view(3, 2, 7).to(device).clamp_max(30)
    for dtype in (torch.float32, torch.bfloat16):
        tokens = torch.randn((3, 2, 50, 72), generator=generator).to(device, dtype)
        found, expected = (version(tokens, labels, targets, 30) for version in (fused, sums))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def _make_fused() -> Callable[..., Tensor]:
    from cribo.method.kernels import objects

    return objects.sums


_SUMS = Accelerated("pooling of objects", plain=sums, fused=_make_fused, trial=_try)
