"""Configuration of a backbone, in a module that does not import torch, so that command lines start quickly."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from cribo.models.hub import hub_name
from cribo.redaction import without_secrets

MEAN_COLOUR = "mean-colour"
"""Name of the baseline without a network."""


@dataclass
class BackboneSource:
    """Source and options of a backbone whose features are used.

    Attributes:
        source: a run folder or backbone.safetensors of cribo; a timm name (vit_small_patch16_224.dino); a
            checkpoint of another project (CrOC, DINO, iBOT, MAE, MoCo v3, DINOv2, TimeT, SlotCon, ...); weights on the
            Hugging Face hub (hf://owner/name, hf://owner/name@revision, hf://owner/name/file); or mean-colour,
            a baseline whose features are the mean colours of patches of 16 pixels.
        pretrained: load the weights, for a timm name from timm's cache or the network; false for the same network with
            random weights.
        network: for a checkpoint with two networks, the teacher (momentum network) or the student.
        architecture: timm name of a checkpoint's architecture; required unless it is a ViT, DINOv3 or ResNet, which
            are recognised.
        heads: number of attention heads, if the checkpoint does not store it and heads do not have 64 channels.
        positions: interpolation of the position embedding for other image sizes than in training: `original` for that
            of the project that wrote the checkpoint, `timm` for timm's; or, if the project cannot be recognised,
            bicubic_offset (DINO, iBOT, DINOv2), bicubic (MAE, Hugging Face) or another (docs/checkpoints.md).
        ignore: regular expressions of unknown tensors in a checkpoint to skip.
        trust: run the code in a checkpoint with pickled Python objects. Use only for files from a trusted source.
        layers: number of last blocks whose features are concatenated.
        seed: seed of random weights.
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
    """Return a short name for tables and folders: of the run, file, timm model or repository; `-random` if untrained.

    Example:
        >>> backbone_name(BackboneSource("runs/camvid/backbone.safetensors"))
        'camvid'
        >>> backbone_name(BackboneSource("vit_small_patch16_224", pretrained=False))
        'vit_small_patch16_224-random'
        >>> backbone_name(BackboneSource("hf://owner/name@v1")), backbone_name(BackboneSource("hf://owner/a/b.pth"))
        ('name', 'b')
    """
    if (hub := hub_name(config.source)) is not None:
        name = hub.short
        return name if config.pretrained else f"{name}-random"
    path = Path(without_secrets(config.source))
    if path.name == "backbone.safetensors":
        path = path.absolute().parent
    name = path.stem if path.is_file() else path.name
    return name if config.pretrained else f"{name}-random"


def portable_source(source: BackboneSource | str) -> BackboneSource:
    """Return a source whose path, if it is one, is absolute, for use in another working folder."""
    config = source if isinstance(source, BackboneSource) else BackboneSource(source)
    path = Path(config.source).expanduser()
    return replace(config, source=str(path.absolute())) if path.exists() else config
