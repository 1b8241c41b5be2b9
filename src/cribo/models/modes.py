"""What a backbone can be told about how it computes, named apart so that a configuration need not wait for timm."""

from typing import Literal

Checkpointing = Literal["none", "selective", "blocks"]

CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
# The modes of torch.compile that record CUDA graphs.
CUDA_GRAPH_MODES: tuple[CompileMode, ...] = ("reduce-overhead", "max-autotune")

NormalisedLayers = Literal["all", "last"]
"""Which of several concatenated layers pass the final norm of a backbone."""
