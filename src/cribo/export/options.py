"""What can be asked of an export; free of torch."""

from dataclasses import dataclass
from typing import Literal, get_args

Target = Literal["timm", "transformers", "onnx", "torch-export"]
TARGETS: tuple[Target, ...] = get_args(Target)


@dataclass(frozen=True)
class Options:
    """What can be chosen about an export.

    Attributes:
        layers: how many of the last blocks give tokens, concatenated; of a graph only.
        opset: of ONNX.
        fixed_size: (height, width) in pixels of the only images that a graph takes, one at a time; None for any.
    """

    layers: int = 1
    opset: int = 20
    fixed_size: tuple[int, int] | None = None
