"""How much of a large computation is done at once, in one place for views, clustering, search and losses."""

import torch

_NUMBERS = {"cpu": 2**22, "cuda": 2**26}
"""Numbers in the largest tensor of a block: in float32 16 MiB, about a processor's caches; 256 MiB, to fill a GPU."""


def rows_per_block(numbers_per_row: int, device: torch.device) -> int:
    """How many rows to compute at once where each needs `numbers_per_row` numbers; at least 1.

    Example:
        >>> rows_per_block(65_536, torch.device("cpu"))
        64
    """
    return max(1, _NUMBERS.get(device.type, _NUMBERS["cuda"]) // max(numbers_per_row, 1))
