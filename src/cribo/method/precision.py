"""Which float type sums and losses are taken in."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor


def at_least_float32(tensor: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Half precision becomes float32; float32 and float64 stay what they are.

    Runs in float64 serve comparisons: rounding in between would undo what they are made for.

    Example:
        >>> [at_least_float32(torch.ones(2, dtype=t)).dtype for t in (torch.bfloat16, torch.float64)]
        [torch.float32, torch.float64]
    """
    return tensor if tensor.dtype == torch.float64 else tensor.float()


@contextmanager
def full_float32() -> Iterator[None]:
    """Inside, products of float32 are of float32, whatever shorter type is preferred for them elsewhere.

    Example:
        >>> with full_float32():
        ...     torch.get_float32_matmul_precision()
        'highest'
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
