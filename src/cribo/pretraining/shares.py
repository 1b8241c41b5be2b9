"""Tensors that are shared among devices: the part that a process holds, and the whole."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def held(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process holds, in the same memory; all of a tensor that is not shared."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """A copy of all of a tensor, on its device. To be called by all who share it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def shared_like(tensor: Tensor, like: Tensor) -> Tensor:
    """A copy of what this process holds of a tensor that is shared as another of its shape is; nothing is sent.

    Args:
        tensor: whole, the same on all processes, on any device.
        like: shared, or not.
    """
    if not isinstance(like, DTensor):
        return tensor.clone()
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None).clone()


@torch.no_grad()
def norms(tensors: Sequence[Tensor]) -> Float[Tensor, " n"]:
    """The Euclidean norm of each whole tensor, without waiting for the device.

    Args:
        tensors: all shared among the same processes, each of which calls this, or none of them shared.
    """
    own = torch.stack(torch._foreach_norm([held(tensor) for tensor in tensors]))  # pyright: ignore[reportPrivateImportUsage]
    if not isinstance(tensors[0], DTensor):
        return own
    squares = own.double().square()  # of numbers that float32 holds, none is too large
    dist.all_reduce(squares, group=tensors[0].device_mesh.get_group())
    return squares.sqrt().to(own.dtype)
