"""Linear layers that use oneDNN for float32 products on AMD processors, with the same parameters and results.

PyTorch uses MKL for float32 products. With MKL, a ViT-S takes 1.7 to 1.9 times as long as with oneDNN on an AMD EPYC,
and 0.8 times as long on an Intel Xeon (benchmarks/RESULTS.md, "Processors").
"""

import platform
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

Module = TypeVar("Module", bound=nn.Module)

# The operator that PyTorch's compiler emits for a linear layer on x86.
_ONEDNN = getattr(torch.ops.mkldnn, "_linear_pointwise", None) if torch.backends.mkldnn.is_available() else None
# Below this number of multiplications or rows, the call from Python costs more than oneDNN saves.
_FEWEST, _FEWEST_ROWS = 2**21, 8


@cache
def has_amd_processor() -> bool:
    """Whether the processor is from AMD."""
    cpuinfo = Path("/proc/cpuinfo")
    return "AuthenticAMD" in (cpuinfo.read_text() if cpuinfo.is_file() else platform.processor())


def use_onednn(module: Module) -> Module:
    """Replace every `nn.Linear` inside a module by `Linear`, in place, on AMD processors; return the module.

    Parameters, their names, state dicts and copies do not change, and results only by rounding. Subclasses of
    `nn.Linear` are not replaced.

    Example:
        >>> mlp = use_onednn(nn.Sequential(nn.Linear(64, 256), nn.GELU()))
        >>> sorted(mlp.state_dict()), isinstance(mlp[0], nn.Linear)
        (['0.bias', '0.weight'], True)
    """
    if has_amd_processor():
        for child in module.modules():
            if type(child) is nn.Linear:
                child.__class__ = Linear
    return module


class Linear(nn.Linear):
    """`nn.Linear` computed by `linear`; created by `use_onednn`."""

    def forward(self, input: Float[Tensor, "*rows k"]) -> Float[Tensor, "*rows n"]:  # noqa: A002 (PyTorch's name)
        """Multiply by the weight and add the bias."""
        return linear(input, self.weight, self.bias)


def linear(
    x: Float[Tensor, "*rows k"], weight: Float[Tensor, "n k"], bias: Float[Tensor, " n"] | None = None
) -> Float[Tensor, "*rows n"]:
    """`F.linear`, with oneDNN in forward and backward pass for large float32 products on AMD processors.

    Other processors, types and devices, autocast, torch.compile and small products use PyTorch's own function.
    Differentiable any number of times.

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
            # Subclasses (fake, distributed) implement their own operators.
            type(tensor) in (Tensor, nn.Parameter) and tensor.dtype == torch.float32
            for tensor in (x, weight, bias)
            if tensor is not None
        )
        and _ONEDNN is not None
        and torch.backends.mkldnn.enabled
        and x.device.type == "cpu"
        and has_amd_processor()
        and not torch.is_autocast_enabled("cpu")
    )


class _Linear(torch.autograd.Function):
    """(M, K), (N, K), (N,) -> (M, N); its gradients are products of the same kind."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(
            x if ctx.needs_input_grad[1] else None,
            weight if ctx.needs_input_grad[0] else None,
        )
        assert _ONEDNN is not None
        return _ONEDNN(x, weight, bias, "none", [], "")

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors  # pyright: ignore[reportAttributeAccessIssue]
        needed = ctx.needs_input_grad  # pyright: ignore[reportAttributeAccessIssue]
        out = gradients[0].contiguous()  # the gradient of a sum is an expanded scalar
        return (
            _multiply(out, weight.t()) if needed[0] else None,
            _multiply(out.t(), x.t()) if needed[1] else None,
            out.sum(dim=0) if needed[2] else None,
        )


def _multiply(a: Tensor, b: Tensor) -> Tensor:
    out = _Linear.apply(a, b, None)
    assert isinstance(out, Tensor)
    return out
