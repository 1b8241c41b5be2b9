"""The precision of the method's computations: float32 or better, outside autocast."""

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def at_least_float32(value: Any) -> Any:
    """Convert half-precision tensors to float32; return everything else, including float64, unchanged.

    Example:
        >>> [at_least_float32(torch.ones(2, dtype=t)).dtype for t in (torch.bfloat16, torch.float64, torch.long)]
        [torch.float32, torch.float64, torch.int64]
    """
    is_half = isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if is_half else value


def in_float32(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator that runs a function outside autocast, with half-precision arguments converted to float32.

    Clusters, matches and losses must not depend on the precision of the networks.
    """

    @wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        device = next(value.device.type for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        with torch.autocast(device, enabled=False):
            arguments = [at_least_float32(value) for value in args]
            return function(*arguments, **{name: at_least_float32(value) for name, value in kwargs.items()})  # pyright: ignore[reportCallIssue]

    return wrapper


def tf32_under_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator that computes the float32 products of a function in TF32 on GPUs, if it is called under autocast.

    The embeddings then come from half precision, of 8 or 11 significant bits, so TF32's 11 lose little.
    """

    @wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.is_autocast_enabled("cuda"):
            return function(*args, **kwargs)
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        try:
            return function(*args, **kwargs)
        finally:
            torch.set_float32_matmul_precision(before)

    return wrapper


def inner_products(queries: Float[Tensor, "r d"], rows: Float[Tensor, "m d"]) -> Float[Tensor, "r m"]:
    """Compute all inner products of queries with stored rows, in the queries' type.

    GPUs multiply rows stored in half precision directly and accumulate in float32; on CPUs they are converted first.
    """
    if rows.is_cuda and rows.dtype != queries.dtype:
        return torch.mm(queries.to(rows.dtype), rows.T, out_dtype=queries.dtype)
    return queries @ rows.to(queries.dtype).T
