"""Options of a backbone. Does not import torch, so that a command line starts fast."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

MEAN_COLOUR = "mean-colour"
"""The source of the baseline without a network."""


@dataclass
class BackboneSource:
    """The backbone whose features are used.

    Attributes:
        source: a run folder of cribo or its backbone.safetensors; a timm name (vit_small_patch16_224.dino); a
            checkpoint of another project (CrOC, DINO, iBOT, MAE, MoCo v3, DINOv2, TimeT, SlotCon, ...); or
            mean-colour, the baseline whose feature is the mean colour of a patch of 16 pixels.
        pretrained: for a timm name, load its weights from timm's cache or the network; false for random ones.
        network: if a checkpoint contains both, the teacher (momentum network) or the student.
        architecture: timm's name of a checkpoint's network, if it cannot be inferred from the weights (any but ViT,
            DINOv3 and ResNet).
        heads: number of attention heads, if a checkpoint does not store it and heads do not have 64 channels each.
        positions: how the position embedding is resized for image sizes other than that of the training: `original` as
            in the project that wrote the checkpoint, `timm` as in timm; if the project cannot be recognised,
            bicubic_offset (DINO, iBOT, DINOv2), bicubic (MAE, Hugging Face) or another (docs/checkpoints.md).
        ignore: regular expressions for the names of unknown tensors of a checkpoint to ignore.
        trust: run code stored in a checkpoint with Python objects. Only for files from sources that you trust.
        layers: number of last blocks whose features are concatenated.
        seed: of random weights.
    """

    source: str
    pretrained: bool = True
    network: Literal["teacher", "student"] = "teacher"
    architecture: str | None = None
    heads: int | None = None
    positions: Literal[
        "original", "timm", "bicubic", "bicubic_offset", "bilinear", "bilinear_antialiased", "bilinear_corners"
    ] = "original"
    ignore: list[str] = field(default_factory=list)
    trust: bool = False
    layers: int = 1
    seed: int = 0


def backbone_name(config: BackboneSource) -> str:
    """Return a short name for tables and folders: of the run, file or timm model, with `random` for random weights.

    Example:
        >>> backbone_name(BackboneSource("runs/camvid/backbone.safetensors"))
        'camvid'
        >>> backbone_name(BackboneSource("vit_small_patch16_224", pretrained=False))
        'vit_small_patch16_224-random'
    """
    path = Path(config.source)
    if path.name == "backbone.safetensors":
        path = path.absolute().parent
    name = path.stem if path.is_file() else path.name
    return name if config.pretrained else f"{name}-random"
