"""Matrix products by the fastest library that is there."""

import platform

import torch
from jaxtyping import Float
from torch import Tensor

# oneDNN uses all of an x86 processor's vector width, whoever made it; PyTorch's default (MKL) multiplies float32 half
# as fast on some, and no faster on the others. The operator is the one that PyTorch's compiler calls.
_ONEDNN = (
    torch.ops.mkldnn._linear_pointwise
    if platform.machine().lower() in ("x86_64", "amd64")
    and torch.backends.mkldnn.is_available()
    and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    else None
)
_ONEDNN_TYPES = (torch.float32, torch.bfloat16)


def by_onednn(*tensors: Tensor) -> bool:
    """Whether `product` multiplies these tensors by oneDNN."""
    return (
        _ONEDNN is not None
        and torch.backends.mkldnn.enabled
        and all(tensor.device.type == "cpu" and tensor.dtype in _ONEDNN_TYPES for tensor in tensors)
    )


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
