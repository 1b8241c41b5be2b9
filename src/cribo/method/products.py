"""Matrix products by the fastest library that is there."""

import platform
from functools import cache

import torch
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


@torch.no_grad()
def product(a: Float[Tensor, "m k"], b: Float[Tensor, "n k"]) -> Float[Tensor, "m n"]:
    """All inner products of the rows of two matrices of one float type: a @ b.T.

    No gradient flows through it.

    Example:
        >>> product(torch.ones(2, 3), torch.ones(4, 3)).shape
        torch.Size([2, 4])
    """
    if _ONEDNN is not None and by_onednn(a, b):
        return _ONEDNN(a, b, None, "none", [], "")
    return a @ b.T
