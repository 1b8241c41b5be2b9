"""Activation checkpointing of transformer blocks: recompute activations in the backward pass to save memory."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from cribo.models.config import Checkpointing

# Operators whose outputs `selective` saves: products and attention, which take most of a block's time, on any device.
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


class DropPathNoise:
    """Random numbers shared by the drop path sites of one network during one call of `encode`."""

    value: Tensor | None = None


class CheckpointedForward:
    """Forward method of a block that recomputes its activations in the backward pass.

    Stored as an attribute of the block that shadows the method, so that neither names nor the block's type change, and
    copies of the block use their own parameters.

    Args:
        block: the block.
        mode: `blocks` saves only the block's input; `selective` also the outputs of its products and attention.
        noise: drop path noise. It is reset before the backward pass, so each call saves it.
    """

    def __init__(self, block: nn.Module, mode: Checkpointing, noise: DropPathNoise) -> None:
        self.block = block
        self.noise = noise
        # torch.compile does not accept PyTorch's default of context_fn.
        self.contexts: dict[str, Any] = {"context_fn": _selective_contexts} if mode == "selective" else {}

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the block's output. Without gradients, this is the plain forward pass."""
        forward: Callable[..., Tensor] = type(self.block).forward
        if not torch.is_grad_enabled():
            return forward(self.block, x, *args, **kwargs)
        noise = self.noise.value

        def run(x: Tensor) -> Tensor:
            # A compiled graph captures the noise, and must not have side effects.
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
            preserve_rng_state=False,  # blocks draw no random numbers: build_backbone rejects dropout
            **self.contexts,
        )
        assert isinstance(out, Tensor)
        return out


def set_checkpointing(blocks: nn.Module, mode: Checkpointing, noise: DropPathNoise) -> None:
    """Set a `CheckpointedForward` on each block, or restore its own forward (`none`)."""
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
