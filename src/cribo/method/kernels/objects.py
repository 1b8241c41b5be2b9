"""Sums of tokens by cluster on a GPU: products with one-hot labels made in registers, always in the same order."""

from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor


@triton.jit
def sums_kernel(
    tokens,
    labels,
    targets,
    sums,
    num_rows,
    image_stride,
    view_stride,
    token_stride,
    num_tokens: tl.constexpr,
    dim: tl.constexpr,
    num_objects: tl.constexpr,
    block_n: tl.constexpr,
    block_d: tl.constexpr,
    block_k: tl.constexpr,
):
    """Sums of some channels over some clusters of one view, each written to its own row of the result."""
    view, channel = tl.program_id(0).to(tl.int64), tl.program_id(1) * block_d + tl.arange(0, block_d)
    cluster, place = tl.program_id(2) * block_k + tl.arange(0, block_k), tl.arange(0, block_n)
    first = tokens + view // 2 * image_stride + view % 2 * view_stride
    total = tl.zeros([block_k, block_d], tl.float32)
    for start in range(0, num_tokens, block_n):
        token = start + place
        label = tl.load(labels + view * num_tokens + token, mask=token < num_tokens, other=-1)
        values = tl.load(
            first + token[:, None] * token_stride + channel[None, :],
            mask=(token < num_tokens)[:, None] & (channel < dim)[None, :],
            other=0.0,
        )
        own = (cluster[:, None] == label[None, :]).to(tl.float32)
        # Ones and half precision are exact in the tensor cores' 19 bits; the second product carries float32's rest.
        total = tl.dot(own, values.to(tl.float32), total, input_precision="tf32x3")
    row = tl.load(targets + view * num_objects + cluster, mask=cluster < num_objects, other=num_rows)
    wanted = (row < num_rows)[:, None] & (channel < dim)[None, :]
    tl.store(sums + row[:, None] * dim + channel[None, :], total, mask=wanted)


def tiles(num_objects: int) -> dict[str, int]:
    """The kernel's tile: tokens, channels and clusters."""
    return {"block_n": 32, "block_d": 64, "block_k": max(16, min(64, triton.next_power_of_2(num_objects)))}


def sums(
    tokens: Float[Tensor, "b 2 n d"], labels: Int[Tensor, "b 2 n"], targets: Int[Tensor, "b 2 k"], num_rows: int
) -> Float[Tensor, "rows d"]:
    """`cribo.method.objects.sums`; every row is the target of one cluster."""
    batch, views, num_tokens, dim = tokens.shape
    found = tokens.new_empty((num_rows, dim), dtype=torch.float32)
    if found.numel() == 0:
        return found
    if tokens.stride(-1) != 1:
        tokens = tokens.contiguous()
    num_objects = targets.shape[2]
    tile = tiles(num_objects)
    grid = (batch * views, triton.cdiv(dim, tile["block_d"]), triton.cdiv(num_objects, tile["block_k"]))
    kernel: Any = sums_kernel
    with torch.cuda.device_of(tokens):
        kernel[grid](
            *(tokens, labels.contiguous(), targets.contiguous(), found, num_rows),
            *tokens.stride()[:3],
            num_tokens=num_tokens,
            dim=dim,
            num_objects=num_objects,
            **tile,
        )
    return found
