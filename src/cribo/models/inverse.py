"""Weights under the keys of another project: the inverse of how it is read, so that names are known once."""

import math
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from cribo.errors import InputError
from cribo.models.formats.naming import State
from cribo.models.formats.table import Naming


def write_as(
    naming: Naming, state: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], *, zero: Collection[str] = ()
) -> State:
    """The tensors of a naming's own keys that are read as `state`.

    What renaming does to rows (which key they come under, which are joined, in which order) is seen by renaming
    tensors of numbers: each row of the result is the number of the row that it came from.

    Args:
        naming: whose `rename` is inverted.
        state: tensors under timm's keys, as `rename` gives them.
        shapes: of all tensors under its own keys.
        zero: those whose first position `rename` adds to a token, which already holds the sum: it becomes zero.

    Returns:
        a tensor for each key of `shapes`, of zeros where `rename` does not look.

    Raises:
        ValueError: the two do not have the same tensors, so that a network of these shapes cannot hold the state.
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
                    f"no network of {naming.name} has these weights: {keys[owner]} is {tuple(target.shape)}, for "
                    f"rows of {rows.shape[1]}"
                )
            target.view(-1, rows.shape[1])[flat[mine] - starts[owner]] = rows[mine]
    return own


def _rows(shape: torch.Size) -> tuple[int, ...]:
    """Numbers are for whole rows: renaming never takes one apart."""
    return (*shape[:-1], 1) if len(shape) > 1 else tuple(shape)
