"""Encoders that return one feature per patch or one per image."""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from cribo.base.errors import ConfigError, InputError
from cribo.features.config import MEAN_COLOUR, BackboneSource, backbone_name
from cribo.features.grid import encoding_size
from cribo.features.patches import resize_image
from cribo.models import Backbone, evaluation_mode, load_backbone, normalise
from cribo.models.licences import describe_licences

_MEAN_COLOUR_PATCH = 16


Item = TypeVar("Item")
Result = TypeVar("Result")


def batches_by_size(
    items: Sequence[Item], size: Callable[[Item], tuple[int, ...]], at_once: Callable[[tuple[int, ...]], int]
) -> Iterator[list[int]]:
    """Yield the indices of items in batches of equal size.

    Args:
        items: such as images.
        size: returns the size of an item.
        at_once: returns the maximum number of items of a size in a batch.
    """
    members: dict[tuple[int, ...], list[int]] = {}
    for number, item in enumerate(items):
        members.setdefault(size(item), []).append(number)
    for own, numbers in members.items():
        most = at_once(own)
        for start in range(0, len(numbers), most):
            yield numbers[start : start + most]


def map_by_size(
    function: Callable[[list[Item]], Iterable[Result]],
    items: Sequence[Item],
    size: Callable[[Item], tuple[int, ...]],
    at_once: Callable[[tuple[int, ...]], int],
) -> list[Result]:
    """Apply a function to batches of items of equal size, and return the results in the order of the items.

    Args:
        function: returns one result for each item of a batch.
        items: such as images.
        size: returns the size of an item.
        at_once: returns the maximum number of items of a size in a batch.

    Example:
        >>> words = ["one", "three", "two"]
        >>> map_by_size(lambda batch: [",".join(batch)] * len(batch), words, lambda word: (len(word),), lambda size: 2)
        ['one,two', 'three', 'one,two']
    """
    found: dict[int, Result] = {}
    for batch in batches_by_size(items, size, at_once):
        found.update(zip(batch, function([items[number] for number in batch]), strict=True))
    return [found[number] for number in range(len(items))]


@dataclass(frozen=True)
class PatchEncoder:
    """Encodes images as one feature per patch.

    Attributes:
        encode: maps images (B, 3, H, W) in 0-1 to features (B, N, D) of N patches, row by row.
        patch_size: patch size in pixels; H and W must be multiples of it.
        identity: key of the features in the disk cache; None disables caching.
        blocks: 1-based indices of the blocks whose features are concatenated in the D channels.
        image_size: H and W of a network with a fixed input size; None for others.
    """

    encode: Callable[[Float[Tensor, "b 3 h w"]], Float[Tensor, "b n d"]]
    patch_size: int
    identity: str | None = None
    blocks: tuple[int, ...] = (1,)
    image_size: int | None = None

    def size(self, height: int, width: int, *, scale: float = 1.0, max_patches: int | None = None) -> tuple[int, int]:
        """Return the (height, width) in pixels at which to encode an image (`encoding_size`)."""
        return encoding_size(
            height, width, self.patch_size, fixed=self.image_size, scale=scale, max_patches=max_patches
        )

    def resized(
        self, image: UInt8[Tensor, "3 h w"], *, scale: float = 1.0, max_patches: int | None = None
    ) -> UInt8[Tensor, "3 new_h new_w"]:
        """Resize an image to the size at which to encode it, with bicubic interpolation."""
        size = self.size(image.shape[1], image.shape[2], scale=scale, max_patches=max_patches)
        return resize_image(image, size, "bicubic")

    def grids(
        self, pixels: UInt8[Tensor, "b 3 h w"], device: torch.device | str = "cpu"
    ) -> Float[Tensor, "b rows columns d"]:
        """Encode uint8 images as grids of float32 features.

        Args:
            pixels: RGB; H and W must be multiples of the patch size.
            device: device of the encoder and of the returned features.

        Raises:
            ValueError: the encoder returns a number of features that differs from the number of patches.
        """
        grid = pixels.shape[2] // self.patch_size, pixels.shape[3] // self.patch_size
        features = self.encode(pixels.to(device).float().div_(255)).float()
        if features.shape[1] != grid[0] * grid[1]:
            raise InputError(f"the encoder must return {grid[0] * grid[1]} patch features, got {features.shape[1]}")
        return features.unflatten(1, grid)

    @torch.no_grad()
    def dim(self, device: torch.device | str = "cpu") -> int:
        """Return D, measured on a small black image on the encoder's device."""
        side = 4 * self.patch_size
        blank = torch.zeros(1, 3, *self.size(side, side), dtype=torch.uint8)
        return self.grids(blank, device).shape[-1]


def backbone_encoder(backbone: Backbone, *, layers: int = 1) -> PatchEncoder:
    """Create a patch encoder from a backbone, which runs in evaluation mode without changing its own mode.

    Args:
        backbone: the backbone, on its device.
        layers: number of last blocks whose features are concatenated (`Backbone.encode`).
    """

    def encode(images: Float[Tensor, "b 3 h w"]) -> Float[Tensor, "b n d"]:
        with evaluation_mode(backbone):
            return backbone.encode(normalise(images, mean=backbone.mean, std=backbone.std), layers).tokens

    blocks = tuple(range(backbone.depth - layers + 1, backbone.depth + 1))
    image_size = backbone.fixed_size
    identity = f"{backbone.fingerprint()}-{layers}"
    if backbone.name == MEAN_COLOUR:
        identity = f"{MEAN_COLOUR}-{backbone.patch_size}"  # as stored in existing object databases
    return PatchEncoder(encode, backbone.patch_size, identity, blocks, image_size)


def blocks_encoder(backbone: Backbone, blocks: Sequence[int]) -> PatchEncoder:
    """Create a patch encoder from some blocks, concatenated in ascending order and computed in one pass.

    A readout is not applied, since it is fitted to the last block.

    Args:
        backbone: the backbone, on its device.
        blocks: indices of the blocks, from 1 to the backbone's depth.

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
    """Encodes images as one feature per image.

    Attributes:
        encode: maps images (B, 3, H, W) in 0-1 to features (B, D).
        patch_size: patch size in pixels; H and W must be multiples of it.
        dim: D.
        identity: key of the features in the disk cache; None disables caching.
    """

    encode: Callable[[Float[Tensor, "b 3 h w"]], Float[Tensor, "b d"]]
    patch_size: int
    dim: int
    identity: str | None = None

    def features(self, pixels: UInt8[Tensor, "b 3 h w"], device: torch.device | str = "cpu") -> Float[Tensor, "b d"]:
        """Encode uint8 images as float32 features.

        Args:
            pixels: RGB; H and W must be multiples of the patch size.
            device: device of the encoder and of the returned features.
        """
        return self.encode(pixels.to(device).float().div_(255)).float()


def image_encoder(backbone: Backbone) -> ImageEncoder:
    """Create an image encoder from the global token of a backbone, which runs in evaluation mode.

    Args:
        backbone: the backbone, on its device; its mode is not changed.
    """

    def encode(images: Float[Tensor, "b 3 h w"]) -> Float[Tensor, "b d"]:
        with evaluation_mode(backbone):
            return backbone.encode(normalise(images, mean=backbone.mean, std=backbone.std)).global_token

    return ImageEncoder(encode, backbone.patch_size, backbone.embed_dim, f"{backbone.fingerprint()}-global")


class _MeanColour(nn.Module):
    """A network that returns the mean colour of each patch, in normalised RGB."""

    def __init__(self, patch_size: int) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.scale = nn.Parameter(torch.ones(()))  # a backbone's type and device are those of its parameters

    def forward_features(self, images: Float[Tensor, "b 3 h w"]) -> Float[Tensor, "b 3 rows columns"]:
        return self.scale * F.avg_pool2d(images, self.patch_size)


def mean_colour_backbone(patch_size: int = _MEAN_COLOUR_PATCH) -> Backbone:
    """Create the baseline, a network whose tokens are the mean colours of patches."""
    return Backbone(_MeanColour(patch_size), MEAN_COLOUR, {}, patch_size)


def mean_colour_encoder(patch_size: int = _MEAN_COLOUR_PATCH) -> PatchEncoder:
    """Create a patch encoder from `mean_colour_backbone`."""
    return backbone_encoder(mean_colour_backbone(patch_size))


def open_backbone(config: BackboneSource, *, image_size: int | None = None, drop_path: float = 0.0) -> Backbone:
    """Load a backbone on the host; `config.layers` is ignored.

    Args:
        config: source and options.
        image_size: image size in pixels to which the position embedding is resized; None keeps its size.
        drop_path: rate of stochastic depth in the last block, for training.

    Raises:
        InputError: the source is `mean-colour`, which is no network; see also `load_backbone`.
    """
    if config.source == MEAN_COLOUR:
        raise InputError(f"{MEAN_COLOUR} is a baseline without weights: choose a network")
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
    """Load a backbone on the host, or the baseline `mean-colour`, with the metadata that identifies it.

    Raises:
        errors of `load_backbone` and `about_backbone`.
    """
    backbone = mean_colour_backbone() if config.source == MEAN_COLOUR else open_backbone(config)
    return backbone, about_backbone(config, backbone)


def open_encoder(
    config: BackboneSource, device: str, *, blocks: Sequence[int] | None = None
) -> tuple[PatchEncoder, dict[str, Any]]:
    """Load a backbone as a patch encoder, with the metadata that identifies it.

    Args:
        config: source and options of the backbone.
        device: device of the encoder.
        blocks: 1-based indices of the blocks to use (`blocks_encoder`) instead of the last ones.

    Raises:
        errors of `open_network`; ValueError: the backbone does not have these blocks.
    """
    backbone, about = open_network(config)
    backbone.eval().to(device)
    encoder = blocks_encoder(backbone, blocks) if blocks else backbone_encoder(backbone, layers=config.layers)
    return encoder, about


def about_backbone(config: BackboneSource, backbone: Backbone) -> dict[str, Any]:
    """Describe a loaded backbone for `results.json`: its options and the metadata that identifies it.

    Raises:
        ConfigError: `config.layers` is invalid for this backbone (`Backbone.check_layers`).
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
        "licences": describe_licences(backbone.licences),
    }
    if backbone.loaded is not None:
        about["format"], about["notes"] = backbone.loaded.format, list(backbone.loaded.notes)
        about["revision"] = backbone.loaded.revision
    return about


def image_encoders(backbone: Backbone, devices: Sequence[str], *, image_size: int) -> list[ImageEncoder]:
    """Copy a backbone to each device and return the copies as image encoders.

    Args:
        backbone: a backbone on the host; used as the first copy.
        devices: devices of the encoders.
        image_size: side of the images in pixels.

    Raises:
        ConfigError: the backbone does not support this image size.
    """
    patch_size, name = backbone.patch_size, backbone.name
    if image_size % patch_size:
        near = max(patch_size, round(image_size / patch_size) * patch_size)
        raise ConfigError(
            f"crop must be a multiple of {patch_size}, the patch size of {name}, got {image_size}: use {near}"
        )
    if not backbone.takes_any_size and image_size != backbone.image_size:
        raise ConfigError(f"crop must be {backbone.image_size}, the fixed input size of {name}, got {image_size}")
    copies = [copy.deepcopy(backbone) for _ in devices[1:]]
    return [image_encoder(part.eval().to(device)) for part, device in zip([backbone, *copies], devices, strict=True)]
