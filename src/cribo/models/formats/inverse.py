"""Write weights under the keys of another project by inverting the renaming used to read them."""

import math
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from cribo.base.errors import InputError
from cribo.models.formats.naming import State
from cribo.models.formats.table import Naming


def write_as(
    naming: Naming, state: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], *, zero: Collection[str] = ()
) -> State:
    """Return tensors of these shapes that a naming reads as `state`; zero for keys that it ignores.

    The effect of `rename` on rows (their key, concatenation and order) is found by renaming tensors of row numbers:
    each row of the result contains the number of its source row.

    Args:
        naming: naming whose `rename` is inverted.
        state: tensors under timm's keys, as returned by `rename`.
        shapes: shapes of all tensors under the naming's own keys.
        zero: keys whose first position `rename` adds to a token that already contains the sum; set to zero.

    Raises:
        ValueError: a network of these shapes does not have the tensors of the state.
    """
    numbered: State = {}
    starts: list[int] = []
    first = 1
    for key, shape in shapes.items():
        rows = _rows(shape)
        numbers = torch.arange(first, first + math.prod(rows)).view(rows)
        starts.append(first)
        first += numbers.numel()
        if key in zero:
            numbers[:, :1] = 0
        numbered[key] = numbers
    read = naming.rename(numbered)
    wrong = [
        f"{key} {tuple(read[key].shape[:-1]) if key in read else 'missing'} for "
        f"{tuple(state[key].shape) if key in state else 'missing'}"
        for key in sorted(read.keys() | state.keys())
        if key not in read or key not in state or read[key].shape != _rows(state[key].shape)
    ]
    if wrong:
        raise InputError(f"no network of {naming.name} has these weights: {', '.join(wrong[:4])}")
    own = {key: torch.zeros(shape) for key, shape in shapes.items()}
    keys = list(shapes)
    for key, numbers in read.items():
        flat = numbers.flatten()
        rows = state[key].detach().cpu().float().reshape(len(flat), -1) if len(flat) else torch.empty(0, 1)
        owners = torch.bucketize(flat, torch.tensor(starts), right=True) - 1
        for owner in owners.unique().tolist():
            mine = owners == owner
            target = own[keys[owner]]
            if target.numel() != rows.shape[1] * math.prod(_rows(target.shape)):
                raise InputError(
                    f"no network of {naming.name} has these weights: {keys[owner]} is {tuple(target.shape)}, but "
                    f"rows have {rows.shape[1]} values"
                )
            target.view(-1, rows.shape[1])[flat[mine] - starts[owner]] = rows[mine]
    return own


def _rows(shape: torch.Size) -> tuple[int, ...]:
    """Return the shape of row numbers: renaming never splits a row."""
    return (*shape[:-1], 1) if len(shape) > 1 else tuple(shape)
