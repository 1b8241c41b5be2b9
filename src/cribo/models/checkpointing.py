"""Activation checkpointing of transformer blocks: some things are computed twice, and need no memory in between."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from cribo.models.modes import Checkpointing

# What `selective` keeps: products and attention, which take nearly all of a block's time. One list for all devices.
_KEPT = {
    "aten": (
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "linear",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_fused_attention_overrideable",
    ),
    "mkldnn": ("_linear_pointwise",),
}


class Noise(Protocol):
    """Where the drop path sites of a network find their numbers."""

    value: Tensor | None


class CheckpointedForward:
    """The forward of one block, whose activations are computed again in the backward pass.

    An attribute of the block in place of the method, so that neither names nor the block's type change, and copies
    of the block compute with their own parameters.

    Args:
        block: whose forward this is.
        mode: `blocks` keeps the block's input only; `selective` what its products and its attention gave, too.
        noise: of drop path. It is gone when the backward pass comes, so that the block takes it along.
    """

    def __init__(self, block: nn.Module, mode: Checkpointing, noise: Noise) -> None:
        self.block = block
        self.noise = noise
        # torch.compile does not take PyTorch's own default for it.
        self.contexts: dict[str, Any] = {"context_fn": _selective_contexts} if mode == "selective" else {}

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The block's output. Without gradients there is nothing to keep, and nothing to do."""
        forward: Callable[..., Tensor] = type(self.block).forward
        if not torch.is_grad_enabled():
            return forward(self.block, x, *args, **kwargs)
        noise = self.noise.value

        def run(x: Tensor) -> Tensor:
            # A compiled graph holds the noise anyway, and may change nothing outside itself.
            if torch.compiler.is_compiling():
                return forward(self.block, x, *args, **kwargs)
            before, self.noise.value = self.noise.value, noise
            try:
                return forward(self.block, x, *args, **kwargs)
            finally:
                self.noise.value = before

        out = checkpoint(
            run,
            x,
            use_reentrant=False,
            preserve_rng_state=False,  # blocks draw no random numbers: build_backbone refuses dropout
            **self.contexts,
        )
        assert isinstance(out, Tensor)
        return out


def set_checkpointing(blocks: nn.Module, mode: Checkpointing, noise: Noise) -> None:
    """Give each of some blocks a `CheckpointedForward`, or its own forward back (`none`)."""
    for block in blocks.children():
        block.__dict__.pop("forward", None)
        if mode != "none":
            block.__dict__["forward"] = CheckpointedForward(block, mode, noise)


def _selective_contexts() -> Any:
    return create_selective_checkpoint_contexts(_policy)


def _policy(_: object, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    namespace, _, name = operator.name().partition("::")
    kept = name.partition(".")[0] in _KEPT.get(namespace, ())
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
