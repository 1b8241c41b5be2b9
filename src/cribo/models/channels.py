"""Images of any number of channels: the first layer of an RGB network inflated, as timm does it."""

import logging
from collections.abc import Mapping
from dataclasses import replace

from timm.models._manipulate import adapt_input_conv
from torch import Tensor, nn

from cribo.base.errors import InputError
from cribo.base.wording import option_text
from cribo.models.backbone import RGB, Backbone, repeated
from cribo.models.building import build_again

_logger = logging.getLogger(__name__)


def inflate(backbone: Backbone, in_chans: int) -> Backbone:
    """Return a network for images of C channels: the same one if it takes them, else a copy with another first layer.

    The weights of the first layer are repeated cyclically over the channels, and multiplied by 3 / C. Mean and standard
    deviation are repeated, too. For images whose channels are those of an RGB image, repeated, features are equal.

    Args:
        backbone: network for RGB images, or for images of C channels.
        in_chans: C, number of channels.

    Raises:
        InputError: the network is for images of another number of channels than 3 and C, or its first layer cannot be
            inflated.

    Example:
        >>> import torch
        >>> from cribo.models import build_backbone
        >>> backbone = inflate(build_backbone("resnet10t", image_size=64), 5)
        >>> backbone.in_chans, backbone.encode(torch.zeros(1, 5, 64, 64)).grid
        (5, (2, 2))
    """
    if backbone.in_chans == in_chans:
        return backbone
    require_channels(backbone.in_chans, in_chans, backbone.name)
    drop_path = max(backbone.drop_path_rates, default=0.0)
    wide = build_again(backbone, {"in_chans": in_chans}, drop_path=drop_path, initialise=False)
    if backbone.readout is not None:
        wide.set_readout(backbone.readout.weight, backbone.readout.bias)
    wide.mean, wide.std = repeated(backbone.mean, in_chans), repeated(backbone.std, in_chans)
    note = inflation_note(in_chans)
    if backbone.loaded is not None:
        wide.loaded = replace(backbone.loaded, notes=(*backbone.loaded.notes, note))
    wide.licences, wide.pixels = backbone.licences, backbone.pixels
    state, own = inflated(backbone.model.state_dict(), wide), wide.model.state_dict()
    if any(state[key].shape != value.shape for key, value in own.items()):
        raise InputError(
            f"the first layer of {backbone.name} is no convolution over the channels of an image and cannot be "
            f"inflated to {in_chans}: choose three channels with --channels, or another network"
        )
    wide.model.load_state_dict(state)
    wide.to(next(backbone.parameters())).train(backbone.training)
    for mine, parameter in zip(wide.parameters(), backbone.parameters(), strict=True):
        mine.requires_grad_(parameter.requires_grad)
    _logger.info("%s: %s", backbone.name, note)
    return wide


def inflation_note(in_chans: int) -> str:
    """Return the note of an inflated network for the user.

    >>> inflation_note(5)
    'its first layer was inflated from 3 to 5 channels'
    """
    return f"its first layer was inflated from {RGB} to {in_chans} channels"


def described_images(backbone: Backbone) -> str:
    """Describe the images of a network: RGB, or their channels, and how files were read in training.

    >>> from cribo.models import build_backbone
    >>> backbone = build_backbone("resnet10t", args={"in_chans": 2}, image_size=64)
    >>> backbone.pixels = {"channels": [3, 1], "range": [0, 4095]}
    >>> described_images(backbone)
    '2 channels, of files that cribo reads with --channels 3,1 --range 0,4095'
    """
    given = [f"--{name} {option_text(value)}" for name, value in (backbone.pixels or {}).items()]
    what = "RGB" if backbone.in_chans == RGB else f"{backbone.in_chans} channels"
    return f"{what}, of files that cribo reads with {' '.join(given)}" if given else what


def require_channels(own: int, in_chans: int, name: str) -> None:
    """Check that weights for one number of channels can be used for another.

    Raises:
        InputError: they are of C channels, or of RGB.
    """
    if own not in (RGB, in_chans):
        raise InputError(
            f"{name} is for images of {own} channels, and the images are read with {in_chans}: choose {own} channels "
            "with --channels, in the order of its training, or a network for RGB images, whose first layer is inflated"
        )


def first_layer(backbone: Backbone) -> nn.Conv2d:
    """Return the first layer of a network, the convolution over the channels of images.

    Raises:
        InputError: there is none.
    """
    for layer in backbone.model.modules():
        if isinstance(layer, nn.Conv2d) and layer.in_channels == backbone.in_chans:
            return layer
    raise InputError(f"{backbone.name} has no convolution over the channels of images: use another network")


def inflated(state: Mapping[str, Tensor], backbone: Backbone) -> dict[str, Tensor]:
    """Return weights of an RGB network, or of one for C channels, as those of a network for C channels.

    Raises:
        InputError: the first layer is for another number of channels.
    """
    own, channels = backbone.model.state_dict(), backbone.in_chans
    found = dict(state)
    for key, value in state.items():
        if key not in own or key in backbone.unused_parameters or not _differs_in_channels(value, own[key], channels):
            continue
        require_channels(value.shape[1], channels, backbone.name)
        found[key] = adapt_input_conv(channels, value)
    return found


def _differs_in_channels(value: Tensor, own: Tensor, channels: int) -> bool:
    """Whether a kernel differs from the network's own only in its number of input channels."""
    if value.ndim != 4 or own.ndim != 4 or value.shape[1] == own.shape[1]:
        return False
    return own.shape[1] == channels and (value.shape[0], *value.shape[2:]) == (own.shape[0], *own.shape[2:])
