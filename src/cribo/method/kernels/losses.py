"""The elementwise part of the prototype loss, in two kernels: normalisers, then cross-entropies and their gradient."""

from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

WARPS = 8
COLUMNS = 2048
"""Logits of a row that a program holds at once."""


@triton.jit
def normalisers_kernel(
    logits,
    centres,
    groups,
    found,
    num_columns,
    has_centres: tl.constexpr,
    has_groups: tl.constexpr,
    columns: tl.constexpr,
):
    """The log of the sum of exponentials of a row, in one pass with a running maximum. A program is a row."""
    row = tl.program_id(0).to(tl.int64)
    centre = tl.load(groups + row).to(tl.int64) if has_groups else row * 0
    peak = -float("inf")
    total = 0.0
    for start in range(0, num_columns, columns):
        column = start + tl.arange(0, columns)
        inside = column < num_columns
        x = tl.load(logits + row * num_columns + column, mask=inside, other=-float("inf"))
        if has_centres:
            x -= tl.load(centres + centre * num_columns + column, mask=inside, other=0.0)
        higher = tl.maximum(peak, tl.max(x, axis=0))
        total = total * tl.exp(peak - higher) + tl.sum(tl.exp(x - higher), axis=0)
        peak = higher
    tl.store(found + row, peak + tl.log(total))


@triton.jit
def differences_kernel(
    logits,
    targets,
    centres,
    groups,
    offsets,
    weights,
    logit_normalisers,
    target_normalisers,
    expected,
    num_columns,
    has_groups: tl.constexpr,
    columns: tl.constexpr,
):
    """The gradient in place of the logits, and each pair's sum of p * logits. A program is a part of a row."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = part * columns + tl.arange(0, columns)
    inside = column < num_columns
    place = logits + row * num_columns + column
    x = tl.load(place, mask=inside, other=0.0)
    gradient = tl.zeros_like(x)
    counted = 0.0
    for pair in range(tl.load(offsets + row), tl.load(offsets + row + 1)):
        centre = tl.load(groups + pair).to(tl.int64) if has_groups else row * 0
        y = tl.load(targets + tl.cast(pair, tl.int64) * num_columns + column, mask=inside, other=-float("inf"))
        y -= tl.load(centres + centre * num_columns + column, mask=inside, other=0.0)
        p = tl.exp(y - tl.load(target_normalisers + pair))
        tl.store(expected + pair * tl.num_programs(1) + part, tl.sum(p * x, axis=0))
        weight = tl.load(weights + pair)
        gradient -= weight * p
        counted += weight
    gradient += counted * tl.exp(x - tl.load(logit_normalisers + row))
    tl.store(place, gradient, mask=inside)


def differences(
    logits: Float[Tensor, "b l"],
    targets: Float[Tensor, "t l"],
    rows: Int[Tensor, " t"],
    weights: Float[Tensor, " t"],
    centres: Float[Tensor, "c l"],
    groups: Int[Tensor, " t"] | None,
) -> Float[Tensor, " t"]:
    """`cribo.method.losses.differences_plain`, except that `targets` are left as they are; `rows` ascend."""
    num_rows, num_columns = logits.shape
    parts = triton.cdiv(num_columns, COLUMNS)
    offsets = torch.searchsorted(rows, torch.arange(num_rows + 1, device=rows.device))
    of_logits, of_targets = logits.new_empty(num_rows), targets.new_empty(len(targets))
    expected = targets.new_empty(len(targets), parts)
    given = weights if groups is None else groups
    normalise: Any = normalisers_kernel
    subtract: Any = differences_kernel
    normalise[(num_rows,)](
        logits,
        centres,
        given,
        of_logits,
        num_columns,
        has_centres=False,
        has_groups=False,
        columns=COLUMNS,
        num_warps=WARPS,
    )
    normalise[(len(targets),)](
        targets,
        centres,
        given,
        of_targets,
        num_columns,
        has_centres=True,
        has_groups=groups is not None,
        columns=COLUMNS,
        num_warps=WARPS,
    )
    subtract[(num_rows, parts)](
        logits,
        targets,
        centres,
        given,
        offsets,
        weights,
        of_logits,
        of_targets,
        expected,
        num_columns,
        has_groups=groups is not None,
        columns=COLUMNS,
        num_warps=WARPS,
    )
    return weights * (of_logits[rows] - expected.sum(dim=1))
