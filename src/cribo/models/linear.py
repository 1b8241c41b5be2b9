"""Linear layers that multiply float32 by oneDNN on x86 processors, with the same parameters and results."""

from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from cribo.method.products import by_onednn

Module = TypeVar("Module", bound=nn.Module)

# Multiplications, and rows, below which the way through Python costs more than the library saves.
_FEWEST, _FEWEST_ROWS = 2**21, 8


def use_onednn(module: Module) -> Module:
    """Make every `nn.Linear` inside a module a `Linear`, in place.

    Parameters, their names, state dicts and copies stay what they are, and so do results up to the rounding of
    float32. Subclasses of `nn.Linear` are left alone. Where oneDNN does not serve (`by_onednn`), nothing changes.

    Returns:
        the module itself.

    Example:
        >>> mlp = use_onednn(nn.Sequential(nn.Linear(64, 256), nn.GELU()))
        >>> sorted(mlp.state_dict()), isinstance(mlp[0], nn.Linear)
        (['0.bias', '0.weight'], True)
    """
    if by_onednn():
        for child in module.modules():
            if type(child) is nn.Linear:
                child.__class__ = Linear
    return module


class Linear(nn.Linear):
    """`nn.Linear`, computed by `linear`; `use_onednn` makes them."""

    def forward(self, input: Float[Tensor, "*rows k"]) -> Float[Tensor, "*rows n"]:  # noqa: A002 (PyTorch's name)
        """Multiply by the weight and add the bias."""
        return linear(input, self.weight, self.bias)


def linear(
    x: Float[Tensor, "*rows k"], weight: Float[Tensor, "n k"], bias: Float[Tensor, " n"] | None = None
) -> Float[Tensor, "*rows n"]:
    """`F.linear`, forward and backward by oneDNN where that is the faster one: float32 on x86 processors.

    Everything else (other types and devices, autocast, torch.compile, products of a few numbers) is PyTorch's own
    function. Can be differentiated any number of times.

    Example:
        >>> x, weight = torch.randn(8, 100, 64), torch.randn(32, 64)
        >>> torch.allclose(linear(x, weight), F.linear(x, weight), atol=1e-4)
        True
    """
    if torch.compiler.is_compiling() or not _is_served(x, weight, bias):
        return F.linear(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    out = _Linear.apply(rows, weight, bias)
    assert isinstance(out, Tensor)
    return out.view(*x.shape[:-1], weight.shape[0])


def _is_served(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    return (
        x.numel() * weight.shape[0] >= _FEWEST
        and x.ndim > 1
        and x.numel() >= _FEWEST_ROWS * x.shape[-1]
        and all(
            # Other kinds of tensor (fake, distributed) bring functions of their own.
            type(tensor) in (Tensor, nn.Parameter) and tensor.dtype == torch.float32
            for tensor in (x, weight, bias)
            if tensor is not None
        )
        and by_onednn(x, weight)
        and not torch.is_autocast_enabled("cpu")
    )


class _Linear(torch.autograd.Function):
    """(M, K), (N, K), (N,) -> (M, N). Its gradients are products of the same kind, so it differentiates itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(
            x if ctx.needs_input_grad[1] else None,
            weight if ctx.needs_input_grad[0] else None,
        )
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors  # pyright: ignore[reportAttributeAccessIssue]
        needed = ctx.needs_input_grad  # pyright: ignore[reportAttributeAccessIssue]
        out = gradients[0].contiguous()  # the gradient of a sum is one number, expanded
        return (
            _multiply(out, weight.t()) if needed[0] else None,
            _multiply(out.t(), x.t()) if needed[1] else None,
            out.sum(dim=0) if needed[2] else None,
        )


def _multiply(a: Tensor, b: Tensor) -> Tensor:
    out = _Linear.apply(a, b, None)
    assert isinstance(out, Tensor)
    return out
