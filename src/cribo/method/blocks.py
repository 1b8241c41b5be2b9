"""Block sizes of large computations: views, clustering, search and losses."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

_NUMBERS = {"cpu": 2**22, "cuda": 2**26}
"""Elements of a block's largest tensor: 16 MiB in float32, to fit a CPU's caches; 256 MiB, to fill a GPU."""


def rows_per_block(numbers_per_row: int, device: torch.device) -> int:
    """Return the number of rows to compute at once if each has `numbers_per_row` elements; at least 1.

    Example:
        >>> rows_per_block(65_536, torch.device("cpu"))
        64
    """
    return max(1, _NUMBERS.get(device.type, _NUMBERS["cuda"]) // max(numbers_per_row, 1))


def in_blocks(function: Callable[..., Any], *rows: Tensor, size: int) -> list[Any]:
    """Apply a function to blocks of rows, and again in the backward pass, so that only one block is in memory.

    Args:
        function: function of a block of each of `rows`; draws no random numbers.
        rows: tensors of equally many rows.
        size: number of rows of a block.

    Returns:
        The result for each block.
    """
    blocks = zip(*(each.split(size) for each in rows), strict=True)
    return [checkpoint(function, *block, use_reentrant=False, preserve_rng_state=False) for block in blocks]
