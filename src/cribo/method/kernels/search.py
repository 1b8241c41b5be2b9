"""First pass of the search in a memory bank, fused: products, scales, masks and tile maxima in one kernel."""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

CONFIGS = [
    triton.Config(
        {"block_queries": queries, "block_rows": rows, "block_channels": channels}, num_stages=stages, num_warps=warps
    )
    for queries, rows, channels, stages, warps in (
        (128, 64, 64, 4, 4),
        (128, 128, 64, 3, 4),
        (128, 128, 64, 4, 8),
        (128, 256, 64, 3, 8),
        (256, 128, 64, 3, 8),
        (64, 64, 64, 3, 4),
    )
]
"""Blocks that are tried at first use on a width; `block_rows` are whole tiles."""


@triton.jit
def tile_maxima_kernel(
    queries,
    rows,
    scales,
    images,
    row_images,
    maxima,
    num_queries,
    num_rows,
    dim: tl.constexpr,
    tile_size: tl.constexpr,
    block_queries: tl.constexpr,
    block_rows: tl.constexpr,
    block_channels: tl.constexpr,
):
    """Greatest scaled products of some queries with the rows of some tiles, own images left out."""
    # Programs that run side by side share rows, and the queries of all stay in the cache.
    block = tl.program_id(0) // tl.cdiv(num_queries, block_queries)
    query = tl.program_id(0) % tl.cdiv(num_queries, block_queries) * block_queries + tl.arange(0, block_queries)
    row = block * block_rows + tl.arange(0, block_rows)
    channel = tl.arange(0, block_channels)
    query_there, row_there = query < num_queries, row < num_rows
    query_at = queries + query[:, None].to(tl.int64) * dim + channel[None, :]
    row_at = rows + row[None, :].to(tl.int64) * dim + channel[:, None]
    products = tl.zeros((block_queries, block_rows), dtype=tl.float32)
    for start in range(0, dim, block_channels):
        inside = start + channel < dim
        left = tl.load(query_at + start, mask=query_there[:, None] & inside[None, :], other=0.0)
        right = tl.load(row_at + start, mask=inside[:, None] & row_there[None, :], other=0.0)
        products = tl.dot(left, right, products)
    products *= tl.load(scales + row, mask=row_there, other=0.0)[None, :]
    image = tl.load(images + query, mask=query_there, other=0)
    row_image = tl.load(row_images + row, mask=row_there, other=0)
    products = tl.where(image[:, None] == row_image[None, :], -float("inf"), products)
    highest = tl.max(tl.reshape(products, (block_queries, block_rows // tile_size, tile_size)), axis=2)
    tile = block * (block_rows // tile_size) + tl.arange(0, block_rows // tile_size)
    there = query_there[:, None] & (tile[None, :] < num_rows // tile_size)
    tl.store(maxima + tile[None, :].to(tl.int64) * num_queries + query[:, None], highest, mask=there)


@cache
def _tuned(size_class: int) -> Any:
    """The kernel, tuned for banks of about one size: the first steps of a run search few rows, the later ones many."""
    return triton.autotune(configs=CONFIGS, key=["dim"])(tile_maxima_kernel)


def tile_maxima(
    queries: Float[Tensor, "r d"],
    rows: Float[Tensor, "m d"],
    inverse_norms: Float[Tensor, " m"],
    images: Int[Tensor, " r"],
    row_images: Int[Tensor, " m"],
    into: Float[Tensor, "t r"],
) -> None:
    """The fused twin of `cribo.method.search.plain_tile_maxima`; sums are float32.

    Raises:
        ValueError: rows that are not in half precision, or tensors with gaps: the kernel is made for neither.
    """
    if rows.dtype not in (torch.float16, torch.bfloat16) or queries.dtype != rows.dtype:
        raise ValueError(f"rows and queries must both be float16 or bfloat16, got {rows.dtype} and {queries.dtype}")
    given = (queries, rows, inverse_norms, images, row_images, into)
    if not all(tensor.is_contiguous() for tensor in given):
        raise ValueError("all tensors must be contiguous: call .contiguous() first")

    def grid(meta: dict[str, int]) -> tuple[int]:
        return (triton.cdiv(len(rows), meta["block_rows"]) * triton.cdiv(len(queries), meta["block_queries"]),)

    _tuned(len(rows).bit_length() // 2)[grid](*given, len(queries), len(rows), rows.shape[1], len(rows) // len(into))
