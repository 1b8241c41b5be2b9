"""Between host and GPU without anybody waiting for it."""

import torch
from jaxtyping import Shaped
from torch import Tensor


def send(tensor: Shaped[Tensor, "*shape"], device: torch.device) -> Shaped[Tensor, "*shape"]:
    """A host's tensor on a device. A GPU copies it from page-locked memory, while the host goes on."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class OnItsWay:
    """A device's tensor on its way to the host, which waits for what is under way now, not for what comes after.

    Example:
        >>> OnItsWay(torch.arange(3)).read()
        tensor([0, 1, 2])
    """

    def __init__(self, tensor: Shaped[Tensor, "*shape"]) -> None:
        self._host, self._arrived = tensor, None
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def read(self) -> Shaped[Tensor, "*shape"]:
        """The tensor on the host."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host
