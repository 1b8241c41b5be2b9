"""Whose features, as a configuration says it. Nothing here needs torch, so that a command line need not wait for it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

MEAN_COLOUR = "mean-colour"
"""The source that stands for the baseline without a network."""


@dataclass
class BackboneSource:
    """Whose features are evaluated.

    Attributes:
        source: a run folder or backbone.safetensors of ours; a timm name (vit_small_patch16_224.dino); a
            checkpoint of another project (CrOC, DINO, iBOT, MAE, MoCo v3, DINOv2, TimeT, SlotCon, ...); or
            mean-colour, the baseline that knows the mean colour of a patch of 16 pixels.
        pretrained: load the weights, those of a timm name from timm's cache or the network; false for the same network
            with random weights.
        network: of a checkpoint that holds two, the teacher (momentum network) or the student.
        architecture: timm's name of a checkpoint's network, where its weights do not show it (any but ViT,
            DINOv3 and ResNet).
        heads: attention heads, where a checkpoint does not say and they do not have 64 channels each.
        positions: how the position embedding is resized to images of another size than in training: `original` as the
            project that wrote a checkpoint does it, `timm` as timm does; or, where a checkpoint does not show whose it
            is, bicubic_offset (DINO, iBOT, DINOv2), bicubic (MAE, Hugging Face) or another (docs/checkpoints.md).
        ignore: patterns (regular expressions) of tensors of a checkpoint to leave out, where nothing else explains
            them.
        trust: run the code that a checkpoint of Python objects holds. Only for files whose maker you trust.
        layers: how many of the last blocks give features, concatenated.
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
    """A short name for tables and folders: the run's, the file's, or timm's, with `random` for random weights.

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
