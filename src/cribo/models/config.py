"""Types of a backbone's options; does not import timm, so that a configuration loads fast."""

from typing import Literal

Checkpointing = Literal["none", "selective", "blocks"]

CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
# Modes of torch.compile that record CUDA graphs.
CUDA_GRAPH_MODES: tuple[CompileMode, ...] = ("reduce-overhead", "max-autotune")

NormalisedLayers = Literal["all", "last"]
"""Concatenated layers to which the final norm of a backbone is applied."""

NetworkName = Literal["teacher", "student"]
"""Which network to load from a checkpoint that contains a teacher and a student."""
