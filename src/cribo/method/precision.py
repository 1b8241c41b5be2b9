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
def float32_products(precision: str) -> Iterator[None]:
    """Inside, products of float32 are computed as torch's `set_float32_matmul_precision` says.

    Args:
        precision: `highest`: of float32 indeed; `high`: of TF32, where there is such a thing.

    Example:
        >>> with float32_products("high"):
        ...     torch.get_float32_matmul_precision()
        'high'
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
