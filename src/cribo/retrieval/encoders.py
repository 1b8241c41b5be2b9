"""Encoders of images: one feature for each patch, or one for each image."""

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
    """Encodes images as one feature for each patch.

    Attributes:
        encode: maps images (B, 3, H, W) in 0-1 to features (B, N, D) of N patches, row by row.
        patch_size: in pixels; H and W are multiples of it.
        identity: identifies the features in the cache on disk; None if they are not to be cached.
        blocks: numbers, from 1, of the blocks whose features are concatenated in the D channels.
        image_size: H and W of a network that takes images of this size only; None for others.
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

    @torch.no_grad()
    def dim(self, device: torch.device | str = "cpu") -> int:
        """D, measured on a small black image on the encoder's device."""
        side = 4 * self.patch_size
        blank = torch.zeros(1, 3, *self.size(side, side), dtype=torch.uint8)
        return self.grids(blank, device).shape[-1]


def backbone_encoder(backbone: Backbone, *, layers: int = 1) -> PatchEncoder:
    """Create an encoder of patches from a backbone, which runs in evaluation mode and keeps its own mode.

    Args:
        backbone: on the device where it is to run.
        layers: number of last blocks whose features are concatenated (`Backbone.encode`).
    """

    def encode(images: Float[Tensor, "b 3 h w"]) -> Float[Tensor, "b n d"]:
        with evaluation_mode(backbone):
            return backbone.encode(normalise(images, mean=backbone.mean, std=backbone.std), layers).tokens

    blocks = tuple(range(backbone.depth - layers + 1, backbone.depth + 1))
    image_size = None if backbone.takes_any_size else backbone.image_size
    identity = f"{backbone.fingerprint()}-{layers}"
    if backbone.name == MEAN_COLOUR:
        identity = f"{MEAN_COLOUR}-{backbone.patch_size}"  # by which existing databases of objects know it
    return PatchEncoder(encode, backbone.patch_size, identity, blocks, image_size)


def blocks_encoder(backbone: Backbone, blocks: Sequence[int]) -> PatchEncoder:
    """Create an encoder of patches from some blocks, concatenated in ascending order; one pass computes all of them.

    A readout, which is fitted to the last block alone, is left out.

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
    if backbone.readout is not None:
        backbone = copy.deepcopy(backbone)
        backbone.remove_readout()
    backbone.check_layers(layers)
    last = backbone_encoder(backbone, layers=layers)

    def encode(images: Float[Tensor, "b 3 h w"]) -> Float[Tensor, "b n d"]:
        features = last.encode(images).unflatten(-1, (layers, -1))
        return features[:, :, [block - chosen[0] for block in chosen]].flatten(2)

    identity = f"{last.identity}-blocks-{'-'.join(map(str, chosen))}"
    return dataclasses.replace(last, encode=encode, identity=identity, blocks=chosen)


@dataclass(frozen=True)
class ImageEncoder:
    """Encodes images as one feature each.

    Attributes:
        encode: maps images (B, 3, H, W) in 0-1 to features (B, D).
        patch_size: in pixels; H and W are multiples of it.
        dim: D.
        identity: identifies the features in the cache on disk; None if they are not to be cached.
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
    """Create an encoder of images from the global token of a backbone, which runs in evaluation mode.

    Args:
        backbone: on the device where it is to run; it keeps its mode.
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
    """Create the baseline: a network whose tokens are the mean colours of patches."""
    return Backbone(_MeanColour(patch_size), MEAN_COLOUR, {}, patch_size)


def mean_colour_encoder(patch_size: int = _MEAN_COLOUR_PATCH) -> PatchEncoder:
    """Create an encoder of patches from `mean_colour_backbone`."""
    return backbone_encoder(mean_colour_backbone(patch_size))


def open_backbone(config: BackboneSource, *, image_size: int | None = None, drop_path: float = 0.0) -> Backbone:
    """Load a backbone on the host; `config.layers` is not used here.

    Args:
        config: its source and options.
        image_size: in pixels, to which the position embedding is resized; its own size if None.
        drop_path: rate of stochastic depth in the last block, if the backbone is to be trained.

    Raises:
        InputError: see `load_backbone`.
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


def open_encoder(
    config: BackboneSource, device: str, *, blocks: Sequence[int] | None = None
) -> tuple[PatchEncoder, dict[str, Any]]:
    """Load a backbone as an encoder of patches, with the facts that identify it.

    Args:
        config: whose features.
        device: where it is to run.
        blocks: numbers, from 1, of the blocks that give features (`blocks_encoder`), in place of the last ones.

    Raises:
        errors of `open_network`; ValueError: the backbone does not have these blocks.
    """
    backbone, about = open_network(config)
    backbone.eval().to(device)
    encoder = blocks_encoder(backbone, blocks) if blocks else backbone_encoder(backbone, layers=config.layers)
    return encoder, about


def about_backbone(config: BackboneSource, backbone: Backbone) -> dict[str, Any]:
    """Describe an opened backbone for `results.json`: the options by which it was opened, and what identifies it.

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
