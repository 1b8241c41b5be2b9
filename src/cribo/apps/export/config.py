"""Targets and options of an export; does not import torch."""

from dataclasses import dataclass
from typing import Literal, get_args

from cribo.base.packages import require_packages
from cribo.features.config import FeaturePrecision

Target = Literal["timm", "transformers", "onnx", "torch-export"]
"""Name of a format that a backbone is exported to."""

TARGETS: tuple[Target, ...] = get_args(Target)
"""Names of all formats."""

_PACKAGES = {"transformers": ("transformers",), "onnx": ("onnx", "onnxscript", "onnxruntime")}


@dataclass(frozen=True)
class ExportOptions:
    """Options of an export.

    Attributes:
        precision: data type of weights and features; float16 halves the size of the files. Graphs take images in
            float32 in both.
        layers: number of last blocks whose tokens are concatenated; for onnx and torch-export only.
        opset: version of the ONNX operator set, 18 to 23; lower it for older runtimes.
        fixed_size: height,width in pixels, or one number for a square: the graph of onnx or torch-export takes one
            image of this size, for runtimes that need fixed shapes. [batch, height and width are dynamic]
    """

    precision: FeaturePrecision = "float32"
    layers: int = 1
    opset: int = 20
    fixed_size: tuple[int, int] | None = None


def require_target(to: str) -> None:
    """Check that the packages of a target are installed.

    Raises:
        MissingPackage: a package is not installed.
    """
    require_packages(f"--to {to}", *_PACKAGES.get(to, ()), extra="export")
