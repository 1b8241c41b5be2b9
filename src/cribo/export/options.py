"""Targets and options of an export; does not import torch."""

from dataclasses import dataclass
from typing import Literal, get_args

Target = Literal["timm", "transformers", "onnx", "torch-export"]
TARGETS: tuple[Target, ...] = get_args(Target)


@dataclass(frozen=True)
class ExportOptions:
    """Options of an export.

    Attributes:
        layers: number of last blocks whose tokens are concatenated; for `onnx` and `torch-export` only.
        opset: version of the ONNX operator set.
        fixed_size: (height, width) in pixels of the only image that a graph takes at a time; None for any size.
    """

    layers: int = 1
    opset: int = 20
    fixed_size: tuple[int, int] | None = None
