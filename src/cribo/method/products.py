"""Matrix products by the fastest library that is there."""

import platform
from collections.abc import Iterator
from functools import cache

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

_IS_X86 = platform.machine().lower() in ("x86_64", "amd64")
# oneDNN uses all of an x86 processor's vector width, whoever made it; PyTorch's default (MKL) multiplies float32 half
# as fast on some, and no faster on the others. The operator is the one that PyTorch's compiler calls.
_ONEDNN = (
    torch.ops.mkldnn._linear_pointwise
    if _IS_X86 and torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    else None
)


@cache
def multiplies_bfloat16() -> bool:
    """Whether this machine's processor has instructions for products of bfloat16 (AVX512-BF16, AMX, Arm's BF16).

    Without them such products are put together from others, several times slower than those of float32.

    Example:
        >>> multiplies_bfloat16() in (True, False)
        True
    """
    if _IS_X86:
        checks = [getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")]
    else:
        checks = [getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)]
    return any(check() for check in checks if check is not None)


def by_onednn(*tensors: Tensor) -> bool:
    """Whether `product` multiplies these tensors by oneDNN."""
    return (
        _ONEDNN is not None
        and torch.backends.mkldnn.enabled
        and all(tensor.device.type == "cpu" and _has_type(tensor.dtype) for tensor in tensors)
    )


def _has_type(dtype: torch.dtype) -> bool:
    return dtype == torch.float32 or (dtype == torch.bfloat16 and multiplies_bfloat16())


# oneDNN generates code for every combination of sizes that it meets: a millisecond or two and half a MiB each, far more
# than most products of objects take, whose number is another one at every step. So sizes are taken from a grid: eight
# between any power of two and the next, but none closer than 16. Below 16, or off the grid, libraries may
# also sum up the same numbers in another order, so that equal rows would have different products.


def _step(size: int) -> int:
    return max(16, 2 ** size.bit_length() // 16)


def _missing(size: int) -> int:
    """How much there is from a size to the next one on the grid."""
    return -size % _step(size)


def rows_on_grid(a: Float[Tensor, "m k"]) -> Float[Tensor, "m2 k"]:
    """The matrix with zero rows added, up to a size that oneDNN has met before, or soon has.

    Example:
        >>> rows_on_grid(torch.ones(300, 64)).shape
        torch.Size([320, 64])
    """
    return _padded(a, _missing(len(a)), 0)


def parts_on_grid(rows: int, most: int) -> Iterator[slice]:
    """Slices of consecutive rows, of `most` and then of smaller and smaller powers of two.

    Example:
        >>> [part.stop for part in parts_on_grid(5000, 2048)]
        [2048, 4096, 4608, 4864, 4992, 5000]
    """
    start = 0
    while start < rows:
        length = most if rows - start >= most else 1 << (rows - start).bit_length() - 1
        yield slice(start, start + length)
        start += length


def rows_within(numbers: int, columns: int) -> int:
    """How many rows of so many columns `product` makes without holding more than some numbers; at least 16.

    Example:
        >>> rows_within(20_000, 1000)
        16
    """
    rows = max(16, numbers // (columns + _missing(columns)))
    return rows - rows % _step(rows)


def _padded(a: Float[Tensor, "m k"], rows: int, columns: int) -> Float[Tensor, "m2 k2"]:
    return F.pad(a, (0, columns, 0, rows)) if rows or columns else a


@torch.no_grad()
def product(a: Float[Tensor, "m k"], b: Float[Tensor, "n k"]) -> Float[Tensor, "m n"]:
    """All inner products of the rows of two matrices of one float type: a @ b.T.

    No gradient flows through it. The result may be a view of a somewhat larger matrix.

    Example:
        >>> product(torch.ones(2, 3), torch.ones(4, 3)).shape
        torch.Size([2, 4])
    """
    (m, k), n = a.shape, len(b)
    if a.device.type != "cpu":
        return a @ b.T
    a, b = (_padded(part, _missing(len(part)), _missing(k)) for part in (a, b))
    products = _ONEDNN(a, b, None, "none", [], "") if _ONEDNN is not None and by_onednn(a, b) else a @ b.T
    return products[:m, :n]
