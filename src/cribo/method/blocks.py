"""Block sizes of large computations: views, clustering, search and losses."""

import torch

_NUMBERS = {"cpu": 2**22, "cuda": 2**26}
"""Elements of a block's largest tensor: 16 MiB in float32, to fit a CPU's caches; 256 MiB, to fill a GPU."""


def rows_per_block(numbers_per_row: int, device: torch.device) -> int:
    """Return the number of rows to compute at once if each has `numbers_per_row` elements; at least 1.

    Example:
        >>> rows_per_block(65_536, torch.device("cpu"))
        64
    """
    return max(1, _NUMBERS.get(device.type, _NUMBERS["cuda"]) // max(numbers_per_row, 1))
