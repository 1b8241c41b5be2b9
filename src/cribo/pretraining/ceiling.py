"""What a machine can do at best, and what a network asks of it: the two halves of model FLOPs utilisation."""

import copy
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from cribo.models import Backbone
from cribo.models.linear import linear

# (M, K, N) of the products that are tried, small to large: squares, and a transformer's tokens times its weights.
_SHAPES_CPU = ((512, 512, 512), (1024, 1024, 1024), (3136, 384, 1536), (2048, 2048, 2048))
_SHAPES_DEVICE = ((4096, 4096, 4096), (25216, 768, 3072), (8192, 8192, 8192), (16384, 8192, 8192))
# What all of them together may take, and one of them beyond its warm-up.
_SECONDS, _SECONDS_EACH = 1.0, 0.15


def product_ceiling(device: torch.device | str, dtype: torch.dtype) -> float:
    """The most floating-point operations per second that large matrix products reach now, on this machine.

    The best of a few shapes, measured for about a second. A multiplication and an addition count as two operations.

    Args:
        device: where to multiply.
        dtype: of the factors. PyTorch's settings (TF32, for example) apply.

    Example:
        >>> product_ceiling("cpu", torch.float32) > 1e8
        True
    """
    device = torch.device(device)
    best, start = 0.0, time.perf_counter()
    for m, k, n in _SHAPES_CPU if device.type == "cpu" else _SHAPES_DEVICE:
        # Random numbers: zeros draw less power, so the clock would be higher.
        a, b = (torch.randn(rows, k, device=device).to(dtype) for rows in (m, n))
        best = max(best, 2 * m * k * n / _best_seconds(partial(linear, a, b), device))
        if time.perf_counter() - start > _SECONDS:
            break
    return best


def model_flops(backbone: Backbone, image_size: int | tuple[int, int]) -> float:
    """Floating-point operations of one image's way through a backbone, forward.

    Counted are matrix products, convolutions and attention, on a copy without memory: nothing is computed. The
    backward pass takes twice as many, so a training step of B images, two views each, with student and teacher takes
    2 * B * (3 + 1) times this, and the heads; what is computed again for checkpointing does not count as work.

    Args:
        backbone: on any device, compiled or not.
        image_size: pixels, of a square or (height, width).

    Example:
        >>> from cribo.models import build_backbone
        >>> round(model_flops(build_backbone("vit_small_patch16_224"), 224) / 1e9, 1)
        9.2
    """
    height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
    memo: dict[int, object] = {id(p): nn.Parameter(p.detach().to("meta")) for p in backbone.parameters()}
    memo |= {id(buffer): buffer.to("meta") for buffer in backbone.buffers()}
    hollow = copy.deepcopy(backbone, memo).eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        hollow.encode(torch.zeros(1, 3, height, width, device="meta"))
    return float(counter.get_total_flops())


def _best_seconds(multiply: Callable[[], Tensor], device: torch.device) -> float:
    """Seconds of a product: the fastest of some rounds of a few products each."""

    def seconds(repeats: int) -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            multiply()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        return (time.perf_counter() - start) / repeats

    seconds(1)  # libraries initialise at first use
    once = seconds(1)
    # On a device, launching and waiting must not count; on a CPU, a few milliseconds are exact enough.
    repeats = max(1, int(_SECONDS_EACH / 5 / once))
    return min([once, *(seconds(repeats) for _ in range(4))]) if once < _SECONDS_EACH else once
