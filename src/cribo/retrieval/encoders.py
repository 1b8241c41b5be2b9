"""What turns images into one feature per patch, or one each, and whose features they are."""

import copy
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from cribo.arguments import ConfigError
from cribo.errors import InputError
from cribo.models import Backbone, evaluation_mode, load_backbone, normalise
from cribo.retrieval.patches import grid_size
from cribo.retrieval.source import MEAN_COLOUR, BackboneSource, backbone_name

_MEAN_COLOUR_PATCH = 16


@dataclass(frozen=True)
class PatchEncoder:
    """What turns images into one feature per patch.

    Attributes:
        encode: gives (B, N, D) features of (B, 3, H, W) images in 0-1, N patches row by row.
        patch_size: pixels; H and W are multiples of it.
        identity: what tells this encoder from all others, for the cache on disk; None keeps it out of the cache.
        blocks: numbers, from 1, of the blocks whose features are concatenated in the D channels.
        image_size: H and W of a network that takes images of this size alone; None for others.
    """

    encode: Callable[[Float[Tensor, "b 3 h w"]], Float[Tensor, "b n d"]]
    patch_size: int
    identity: str | None = None
    blocks: tuple[int, ...] = (1,)
    image_size: int | None = None

    def size(self, height: int, width: int) -> tuple[int, int]:
        """The (height, width) in pixels at which to encode an image: whole patches, or the network's only size."""
        own = None if self.image_size is None else (self.image_size, self.image_size)
        return grid_size(height, width, self.patch_size, own)

    def grids(
        self, pixels: UInt8[Tensor, "b 3 h w"], device: torch.device | str = "cpu"
    ) -> Float[Tensor, "b rows columns d"]:
        """Features in float32 of images as files hold them, on the grid of patches.

        Args:
            pixels: RGB; H and W are multiples of the patch size.
            device: that of the encoder; the features stay there.

        Raises:
            ValueError: the encoder gives another number of features than there are patches.
        """
        grid = pixels.shape[2] // self.patch_size, pixels.shape[3] // self.patch_size
        features = self.encode(pixels.to(device).float().div_(255)).float()
        if features.shape[1] != grid[0] * grid[1]:
            raise InputError(f"the encoder gives {features.shape[1]} features of {grid[0] * grid[1]} patches")
        return features.unflatten(1, grid)


def backbone_encoder(backbone: Backbone, *, layers: int = 1) -> PatchEncoder:
    """Patch features of a backbone, in evaluation mode, whatever mode it is left in.

    Args:
        backbone: on the device where it shall run.
        layers: how many of its last blocks give features, concatenated (`Backbone.encode`).
    """

    def encode(images: Float[Tensor, "b 3 h w"]) -> Float[Tensor, "b n d"]:
        with evaluation_mode(backbone):
            return backbone.encode(normalise(images, mean=backbone.mean, std=backbone.std), layers).tokens

    blocks = tuple(range(backbone.depth - layers + 1, backbone.depth + 1))
    image_size = None if backbone.takes_any_size else backbone.image_size
    return PatchEncoder(encode, backbone.patch_size, f"{backbone.fingerprint()}-{layers}", blocks, image_size)


def blocks_encoder(backbone: Backbone, blocks: Sequence[int]) -> PatchEncoder:
    """Patch features of some blocks of a backbone, concatenated in ascending order; one pass computes all of them.

    Args:
        backbone: on the device where it is to run.
        blocks: numbers from 1 to the backbone's depth.

    Raises:
        ValueError: the backbone does not have these blocks (`Backbone.check_layers`).
    """
    chosen = tuple(sorted(set(blocks)))
    layers = backbone.depth - chosen[0] + 1
    if chosen[-1] > backbone.depth:
        raise InputError(f"blocks must be 1 to {backbone.depth}, those of {backbone.name}, got {chosen[-1]}")
    backbone.check_layers(layers)
    last = backbone_encoder(backbone, layers=layers)

    def encode(images: Float[Tensor, "b 3 h w"]) -> Float[Tensor, "b n d"]:
        features = last.encode(images).unflatten(-1, (layers, -1))
        return features[:, :, [block - chosen[0] for block in chosen]].flatten(2)

    identity = f"{last.identity}-blocks-{'-'.join(map(str, chosen))}"
    return dataclasses.replace(last, encode=encode, identity=identity, blocks=chosen)


@dataclass(frozen=True)
class ImageEncoder:
    """What turns images into one feature each.

    Attributes:
        encode: gives (B, D) features of (B, 3, H, W) images in 0-1.
        patch_size: pixels; H and W are multiples of it.
        dim: D.
        identity: what tells this encoder from all others, for the cache on disk; None keeps it out of the cache.
    """

    encode: Callable[[Float[Tensor, "b 3 h w"]], Float[Tensor, "b d"]]
    patch_size: int
    dim: int
    identity: str | None = None

    def features(self, pixels: UInt8[Tensor, "b 3 h w"], device: torch.device | str = "cpu") -> Float[Tensor, "b d"]:
        """Features in float32 of images as files hold them.

        Args:
            pixels: RGB; H and W are multiples of the patch size.
            device: that of the encoder; the features stay there.
        """
        return self.encode(pixels.to(device).float().div_(255)).float()


def image_encoder(backbone: Backbone) -> ImageEncoder:
    """The global token of a backbone, in evaluation mode, whatever mode it is left in.

    Args:
        backbone: on the device where it shall run.
    """

    def encode(images: Float[Tensor, "b 3 h w"]) -> Float[Tensor, "b d"]:
        with evaluation_mode(backbone):
            return backbone.encode(normalise(images, mean=backbone.mean, std=backbone.std)).global_token

    return ImageEncoder(encode, backbone.patch_size, backbone.embed_dim, f"{backbone.fingerprint()}-global")


class _MeanColour(nn.Module):
    """A network that gives the mean colour of each patch, in the normalised RGB that networks see."""

    def __init__(self, patch_size: int) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.scale = nn.Parameter(torch.ones(()))  # a backbone takes its type and its device from its parameters

    def forward_features(self, images: Float[Tensor, "b 3 h w"]) -> Float[Tensor, "b 3 rows columns"]:
        return self.scale * F.avg_pool2d(images, self.patch_size)


def mean_colour_backbone(patch_size: int = _MEAN_COLOUR_PATCH) -> Backbone:
    """The baseline: a network whose tokens are the mean colours of patches."""
    return Backbone(_MeanColour(patch_size), MEAN_COLOUR, {}, patch_size)


def mean_colour_encoder(patch_size: int = _MEAN_COLOUR_PATCH) -> PatchEncoder:
    """The patch encoder of `mean_colour_backbone`."""
    encoder = backbone_encoder(mean_colour_backbone(patch_size))
    # Databases of objects know the baseline by this name.
    return dataclasses.replace(encoder, identity=f"{MEAN_COLOUR}-{patch_size}")


def open_backbone(config: BackboneSource, *, image_size: int | None = None, drop_path: float = 0.0) -> Backbone:
    """Load a backbone, on the host; its layers are not looked at.

    Args:
        config: whose it is.
        image_size: pixels; the size to which the position embedding is resized. None: the size it has.
        drop_path: rate of the last residual branch, for who trains it.

    Raises:
        what `load_backbone` raises.
    """
    return load_backbone(
        config.source,
        name=config.architecture,
        args=None if config.heads is None else {"num_heads": config.heads},
        pretrained=config.pretrained,
        image_size=image_size,
        network=config.network,
        positions=None if config.positions == "original" else config.positions,
        ignore=config.ignore,
        trust=config.trust,
        drop_path=drop_path,
        seed=config.seed,
    )


def open_network(config: BackboneSource) -> tuple[Backbone, dict[str, Any]]:
    """Load a backbone on the host, or the baseline `mean-colour`, with the facts that identify it.

    Raises:
        errors of `load_backbone` and `about_backbone`.
    """
    backbone = mean_colour_backbone() if config.source == MEAN_COLOUR else open_backbone(config)
    return backbone, about_backbone(config, backbone)


def open_encoder(config: BackboneSource, device: str) -> tuple[PatchEncoder, dict[str, Any]]:
    """Load a backbone as an encoder of patches, with the facts that identify it.

    Raises:
        errors of `open_network`.
    """
    backbone, about = open_network(config)
    encoder = backbone_encoder(backbone.eval().to(device), layers=config.layers)
    if config.source == MEAN_COLOUR:
        encoder = dataclasses.replace(encoder, identity=mean_colour_encoder().identity)
    return encoder, about


def about_backbone(config: BackboneSource, backbone: Backbone) -> dict[str, Any]:
    """What results say about a backbone that was opened: how it was asked for, and all that identifies it.

    Raises:
        ConfigError: more layers than it has, or than the layer behind its features reads, or none.
    """
    try:
        backbone.check_layers(config.layers)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    about = {
        **dataclasses.asdict(config),
        "name": backbone_name(config),
        "architecture": backbone.name,
        "args": backbone.args,
        "embed_dim": backbone.embed_dim,
        "patch_size": backbone.patch_size,
        "parameters": sum(parameter.numel() for parameter in backbone.parameters()),
        "fingerprint": backbone.fingerprint(),
    }
    if backbone.loaded is not None:
        about["format"], about["notes"] = backbone.loaded.format, list(backbone.loaded.notes)
    return about


def image_encoders(backbone: Backbone, devices: Sequence[str], *, image_size: int) -> list[ImageEncoder]:
    """Copy a backbone to each device, as encoders of images.

    Args:
        backbone: on the host; becomes the first copy.
        devices: of the encoders.
        image_size: pixels of the images' sides.

    Raises:
        ConfigError: the backbone does not take images of this size.
    """
    patch_size, name = backbone.patch_size, backbone.name
    if image_size % patch_size:
        near = max(patch_size, round(image_size / patch_size) * patch_size)
        raise ConfigError(
            f"crop must be a multiple of {patch_size}, the patch size of {name}, got {image_size}: give {near}"
        )
    if not backbone.takes_any_size and image_size != backbone.image_size:
        raise ConfigError(
            f"{name} takes images of {backbone.image_size} x {backbone.image_size} pixels only, got crop "
            f"{image_size}: give crop {backbone.image_size}"
        )
    copies = [copy.deepcopy(backbone) for _ in devices[1:]]
    return [image_encoder(part.eval().to(device)) for part, device in zip([backbone, *copies], devices, strict=True)]
