"""From images to features: a network and the blocks that are read, on its device."""

import copy
import dataclasses
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from cribo.base.devices import resolve_device
from cribo.base.errors import ConfigError, InputError
from cribo.features.config import MEAN_COLOUR, BackboneSource, backbone_name, portable_source
from cribo.features.grid import encoding_size
from cribo.features.patches import resize_image
from cribo.models import Backbone, evaluation_mode, inflate, load_backbone, normalise
from cribo.models.backbone import RGB
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


Tokens = Callable[[Float[Tensor, "b c h w"]], Float[Tensor, "b n d"]]
"""Returns the features of N patches, row by row, of images in 0-1."""


class _Network(NamedTuple):
    """A network that is open.

    Attributes:
        tokens: computes the features of patches.
        patch_size: in pixels.
        blocks: 1-based indices of the blocks whose features are concatenated.
        in_chans: C, channels of an image.
        image_size: H and W of a network with a fixed input size.
        device: returns its device.
        identity: returns the key of its features; None if it has none.
        about: its description for results.
        backbone: the network itself; None for a function.
    """

    tokens: Tokens
    patch_size: int
    blocks: tuple[int, ...]
    in_chans: int
    image_size: int | None
    device: Callable[[], torch.device]
    identity: Callable[[], str | None]
    about: dict[str, Any]
    backbone: Backbone | None = None


class Encoder:
    """A network that encodes images: as a grid of features, one for each patch, or as one feature for each image.

    The network of a source is opened on first use, in each process: a pickle contains only its source and options. It
    runs in evaluation mode, without changing the mode of a given backbone.

    Opening raises the errors of `open_network`, ConfigError if the device is not available or the file of the backbone
    is not the expected one, and ValueError if the backbone does not have the blocks.

    Args:
        network: a backbone, on its device; or its source.
        blocks: 1-based indices of the blocks whose features are concatenated, in ascending order and computed in one
            pass. A readout is not applied, since it is fitted to the last block. [the last ones]
        layers: number of last blocks without `blocks` (`Backbone.encode`). [that of the source, or 1]
        device: of a source, such as cuda:0. [the first GPU of the process, else the CPU]
        in_chans: C, channels of the images; the first layer of an RGB network is inflated to them (`inflate`). [those
            of the network]

    Example:
        >>> Encoder("mean-colour", device="cpu").grids(torch.zeros(1, 3, 32, 64, dtype=torch.uint8)).shape
        torch.Size([1, 2, 4, 3])
    """

    def __init__(
        self,
        network: Backbone | BackboneSource | str,
        *,
        blocks: Sequence[int] | None = None,
        layers: int | None = None,
        device: str | None = None,
        in_chans: int | None = None,
    ) -> None:
        given = isinstance(network, Backbone)
        self._backbone = (network if in_chans is None else inflate(network, in_chans)) if given else None
        self.source = None if given else portable_source(network)
        self._blocks = tuple(sorted(set(blocks))) if blocks else None
        self._layers, self._device, self._in_chans = layers, device, in_chans
        self._expected: str | None = None
        if self._backbone is not None:
            self.open()

    @classmethod
    def from_function(
        cls,
        encode: Tokens,
        patch_size: int,
        *,
        identity: str | None = None,
        blocks: Sequence[int] = (1,),
        image_size: int | None = None,
        device: torch.device | str = "cpu",
    ) -> "Encoder":
        """Create an encoder from a function that returns the features of patches.

        Args:
            encode: maps RGB images (B, 3, H, W) in 0-1, on the device, to features (B, N, D) of N patches, row by row.
            patch_size: patch size in pixels; H and W are multiples of it.
            identity: key of the features in the disk cache; None disables caching.
            blocks: numbers of the blocks whose features are concatenated in D.
            image_size: H and W of a network with a fixed input size; None for others.
            device: to which images are moved.
        """
        return cls._of(
            _Network(
                encode,
                patch_size,
                tuple(blocks),
                RGB,
                image_size,
                lambda: torch.device(device),
                lambda: identity,
                {"name": identity},
            )
        )

    @classmethod
    def _of(cls, network: _Network) -> "Encoder":
        """Create an encoder that is open."""
        made = cls.__new__(cls)
        made._backbone = made.source = made._expected = None
        made._opened = network
        return made

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_opened", "identity", "dim")}

    def open(self) -> "Encoder":
        """Open the network now, so that errors are raised before other work, and return the encoder."""
        self._opened  # noqa: B018
        return self

    def on(self, device: str) -> "Encoder":
        """Return the same encoder on another device, not yet opened; for the encoder of a source."""
        other = copy.copy(self)
        other._device = device
        return other

    def expect(self, identity: str | None) -> None:
        """Require that the encoder has this identity in every process; files may differ between machines."""
        self._expected = identity

    def through(self, encode: Tokens) -> "Encoder":
        """Return the same encoder with patches encoded by a function, such as one that keeps the features."""
        return Encoder._of(self._opened._replace(tokens=encode))

    @property
    def is_open(self) -> bool:
        """Whether the network has been opened in this process."""
        return self._backbone is not None or "_opened" in vars(self)

    @cached_property
    def _opened(self) -> _Network:
        if self._backbone is not None:
            return _opened(self._backbone, {"name": self._backbone.name}, self._blocks, self._layers or 1)
        assert self.source is not None
        backbone, about = open_network(self.source, in_chans=self._in_chans)
        backbone.eval().to(resolve_device(self._device))
        network = _opened(backbone, about, self._blocks, self._layers or self.source.layers)
        if self._expected is not None and self._expected != network.identity():
            raise ConfigError(
                f"{self.source.source} is another backbone on {platform.node()} ({network.identity()}, not "
                f"{self._expected}): put the same file on all machines"
            )
        return network

    @property
    def backbone(self) -> Backbone:
        """The network.

        Raises:
            InputError: the encoder was created from a function.
        """
        if self._opened.backbone is None:
            raise InputError("an encoder from a function has features of patches only: give a backbone")
        return self._opened.backbone

    @property
    def about(self) -> dict[str, Any]:
        """Description of the network for results (`about_backbone`); of a given backbone, only its name."""
        return self._opened.about

    @property
    def device(self) -> torch.device:
        """Device of the network."""
        return self._opened.device()

    @property
    def tokens(self) -> Tokens:
        """Computes the features of patches, row by row, of images (B, C, H, W) in 0-1 on the device."""
        return self._opened.tokens

    @property
    def patch_size(self) -> int:
        """Patch size in pixels."""
        return self._opened.patch_size

    @property
    def blocks(self) -> tuple[int, ...]:
        """1-based indices of the blocks whose features are concatenated."""
        return self._opened.blocks

    @property
    def in_chans(self) -> int:
        """C, channels of an image."""
        return self._opened.in_chans

    @property
    def image_size(self) -> int | None:
        """H and W of a network with a fixed input size; None for others."""
        return self._opened.image_size

    @cached_property
    def identity(self) -> str | None:
        """Key of the features of patches in caches and databases; None for a function without one."""
        return self._opened.identity()

    @property
    def global_identity(self) -> str:
        """Key of the features of images in caches."""
        return f"{self.backbone.fingerprint()}-global"

    @cached_property
    def dim(self) -> int:
        """D, the dimension of a patch's features, measured on a small black image."""
        side = 4 * self.patch_size
        return self.grids(torch.zeros(1, self.in_chans, *self.size(side, side), dtype=torch.uint8)).shape[-1]

    def size(self, height: int, width: int, *, scale: float = 1.0, max_patches: int | None = None) -> tuple[int, int]:
        """Return the (height, width) in pixels at which to encode an image (`encoding_size`)."""
        return encoding_size(
            height, width, self.patch_size, fixed=self.image_size, scale=scale, max_patches=max_patches
        )

    def resized(
        self, image: UInt8[Tensor, "c h w"], *, scale: float = 1.0, max_patches: int | None = None
    ) -> UInt8[Tensor, "c new_h new_w"]:
        """Resize an image to the size at which to encode it, with bicubic interpolation."""
        size = self.size(image.shape[1], image.shape[2], scale=scale, max_patches=max_patches)
        return resize_image(image, size, "bicubic")

    @torch.no_grad()
    def grids(self, pixels: UInt8[Tensor, "b c h w"]) -> Float[Tensor, "b rows columns d"]:
        """Encode images as grids of float32 features, on the device.

        Args:
            pixels: images with the channels of the network; H and W must be multiples of the patch size.

        Raises:
            ValueError: the network returns a number of features that differs from the number of patches, or takes
                images of another number of channels.
        """
        grid = pixels.shape[2] // self.patch_size, pixels.shape[3] // self.patch_size
        features = self.tokens(self._moved(pixels)).float()
        if features.shape[1] != grid[0] * grid[1]:
            raise InputError(f"the encoder must return {grid[0] * grid[1]} patch features, got {features.shape[1]}")
        return features.unflatten(1, grid)

    @torch.no_grad()
    def global_tokens(self, pixels: UInt8[Tensor, "b c h w"]) -> Float[Tensor, "b d"]:
        """Encode images as one float32 feature each, the global token, on the device.

        Args:
            pixels: images with the channels of the network; H and W must be multiples of the patch size.

        Raises:
            InputError: the encoder was created from a function, or takes images of another number of channels.
        """
        backbone = self.backbone
        with evaluation_mode(backbone):
            images = normalise(self._moved(pixels), mean=backbone.mean, std=backbone.std)
            return backbone.encode(images).global_token.float()

    def _moved(self, pixels: UInt8[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
        if pixels.shape[1] != self.in_chans:
            raise InputError(
                f"the images have {pixels.shape[1]} channels, and the network takes {self.in_chans}: choose as many "
                "with --channels (in_chans of an Encoder inflates an RGB network)"
            )
        return pixels.to(self.device).float().div_(255)


def _opened(backbone: Backbone, about: dict[str, Any], blocks: tuple[int, ...] | None, layers: int) -> _Network:
    """Return the features of some blocks of a network, or of its last ones."""
    read, chosen = backbone, ""
    if blocks is not None:
        layers, chosen = backbone.depth - blocks[0] + 1, f"-blocks-{'-'.join(map(str, blocks))}"
        if blocks[-1] > backbone.depth:
            raise InputError(f"blocks must be 1 to {backbone.depth}, those of {backbone.name}, got {blocks[-1]}")
        if backbone.readout is not None:
            read = copy.deepcopy(backbone)
            read.remove_readout()
        read.check_layers(layers)
    every = range(read.depth - layers + 1, read.depth + 1)

    def tokens(images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b n d"]:
        with evaluation_mode(read):
            features = read.encode(normalise(images, mean=read.mean, std=read.std), layers).tokens
        if blocks is None:
            return features
        return features.unflatten(-1, (layers, -1))[:, :, [block - blocks[0] for block in blocks]].flatten(2)

    def identity() -> str:
        if read.name == MEAN_COLOUR:
            channels = "" if read.in_chans == RGB else f"-channels-{read.in_chans}"
            return f"{MEAN_COLOUR}-{read.patch_size}{channels}{chosen}"  # as stored in existing object databases
        return f"{read.fingerprint()}-{layers}{chosen}"

    def device() -> torch.device:
        return next(read.parameters()).device

    chosen_blocks = blocks or tuple(every)
    return _Network(
        tokens, read.patch_size, chosen_blocks, read.in_chans, read.fixed_size, device, identity, about, backbone
    )


def encoders_on(backbone: Backbone, devices: Sequence[str]) -> list[Encoder]:
    """Copy a backbone to each device, and return the copies as encoders.

    Args:
        backbone: a backbone on the host; used as the first copy.
        devices: devices of the encoders.
    """
    copies = [copy.deepcopy(backbone) for _ in devices[1:]]
    return [Encoder(part.eval().to(device)) for part, device in zip([backbone, *copies], devices, strict=True)]


class _MeanColour(nn.Module):
    """A network that returns the mean colour of each patch, normalised."""

    def __init__(self, patch_size: int) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.scale = nn.Parameter(torch.ones(()))  # a backbone's type and device are those of its parameters

    def forward_features(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c rows columns"]:
        return self.scale * F.avg_pool2d(images, self.patch_size)


def mean_colour_backbone(patch_size: int = _MEAN_COLOUR_PATCH, in_chans: int = RGB) -> Backbone:
    """Create the baseline, a network whose tokens are the mean colours of patches."""
    arguments = {} if in_chans == RGB else {"in_chans": in_chans}
    return Backbone(_MeanColour(patch_size), MEAN_COLOUR, arguments, patch_size)


def mean_colour_encoder(patch_size: int = _MEAN_COLOUR_PATCH) -> Encoder:
    """Create an encoder of `mean_colour_backbone`."""
    return Encoder(mean_colour_backbone(patch_size))


def open_backbone(
    config: BackboneSource, *, image_size: int | None = None, drop_path: float = 0.0, in_chans: int | None = None
) -> Backbone:
    """Load a backbone on the host; `config.layers` is ignored.

    Args:
        config: source and options.
        image_size: image size in pixels to which the position embedding is resized; None keeps its size.
        drop_path: rate of stochastic depth in the last block, for training.
        in_chans: C, channels of the images, to which the first layer of an RGB network is inflated. [the network's]

    Raises:
        InputError: the source is `mean-colour`, which is no network; see also `load_backbone` and `inflate`.
    """
    if config.source == MEAN_COLOUR:
        raise InputError(f"{MEAN_COLOUR} is a baseline without weights: choose a network")
    backbone = load_backbone(
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
    return backbone if in_chans is None else inflate(backbone, in_chans)


def open_network(config: BackboneSource, *, in_chans: int | None = None) -> tuple[Backbone, dict[str, Any]]:
    """Load a backbone on the host, or the baseline `mean-colour`, with the metadata that identifies it.

    Args:
        config: source and options.
        in_chans: as in `open_backbone`.

    Raises:
        errors of `open_backbone` and `about_backbone`.
    """
    if config.source == MEAN_COLOUR:
        backbone = mean_colour_backbone(in_chans=in_chans or RGB)
    else:
        backbone = open_backbone(config, in_chans=in_chans)
    return backbone, about_backbone(config, backbone)


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
