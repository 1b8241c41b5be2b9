"""Types of a backbone's options; does not import timm, so that a configuration loads fast."""

from typing import Literal

Checkpointing = Literal["none", "selective", "blocks"]

Resizing = Literal["timm", "bicubic", "bicubic_offset", "bilinear", "bilinear_antialiased", "bilinear_corners"]
"""`timm`: bicubic, antialiased (also DINOv2 with registers, open_clip). `bicubic`: without antialiasing (Hugging Face,
MMSegmentation, MAE). `bicubic_offset`: the same with a scale factor of (h + 0.1) / H (DINO, iBOT, DINOv2).
`bilinear`: Segmenter. `bilinear_antialiased`: JAX's `image.resize` (LOCA). `bilinear_corners`: with aligned corners, as
SciPy's `zoom` of order 1 (the original ViT in JAX)."""

CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
# Modes of torch.compile that record CUDA graphs.
CUDA_GRAPH_MODES: tuple[CompileMode, ...] = ("reduce-overhead", "max-autotune")

NormalisedLayers = Literal["all", "last"]
"""Concatenated layers to which the final norm of a backbone is applied."""

NetworkName = Literal["teacher", "student"]
"""Which network to load from a checkpoint that contains a teacher and a student."""
