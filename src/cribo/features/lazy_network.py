"""A backbone for units of work: described in one process, opened in those that use it."""

import copy
import platform
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch

from cribo.base.devices import resolve_device
from cribo.base.errors import ConfigError
from cribo.features.config import BackboneSource, portable_source
from cribo.features.encoder import PatchEncoder, backbone_encoder, blocks_encoder, open_network
from cribo.models import Backbone


class _Opened(NamedTuple):
    backbone: Backbone
    encoder: PatchEncoder
    about: dict[str, Any]
    device: str


class OpenEncoder(NamedTuple):
    """An encoder on its device, which stays in this process."""

    encoder: PatchEncoder
    device: torch.device | str

    @property
    def dim(self) -> int:
        """Dimension of the features of a patch."""
        return self.encoder.dim(self.device)


class LazyNetwork:
    """A backbone that each process opens on first use; its pickle contains only its source and options.

    Its attributes raise the errors of `open_network`, ConfigError if the device is not available or the file of the
    backbone is not the expected one, and ValueError if the backbone does not have the blocks.

    Args:
        backbone: its source.
        blocks: 1-based indices of the blocks whose features are concatenated. [the last ones of the source]
        device: such as cuda:0. [the first GPU of the process, else the CPU]
    """

    def __init__(
        self, backbone: BackboneSource | str, *, blocks: Sequence[int] | None = None, device: str | None = None
    ) -> None:
        self.source = portable_source(backbone)
        self.blocks = None if blocks is None else tuple(blocks)
        self._device = device
        self._identity: str | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_opened"}

    def on(self, device: str) -> "LazyNetwork":
        """Return the same backbone on another device, not yet opened."""
        other = copy.copy(self)
        other._device = device
        return other

    def expect(self, identity: str | None) -> None:
        """Require that the encoder has this identity in every process; files may differ between machines."""
        self._identity = identity

    @cached_property
    def _opened(self) -> _Opened:
        device = resolve_device(self._device)
        backbone, about = open_network(self.source)
        backbone.eval().to(device)
        layers = self.source.layers
        encoder = blocks_encoder(backbone, self.blocks) if self.blocks else backbone_encoder(backbone, layers=layers)
        if self._identity not in (None, encoder.identity):
            raise ConfigError(
                f"{self.source.source} is another backbone on {platform.node()} ({encoder.identity}, not "
                f"{self._identity}): put the same file on all machines"
            )
        return _Opened(backbone, encoder, about, device)

    @property
    def backbone(self) -> Backbone:
        """The network, in evaluation mode."""
        return self._opened.backbone

    @property
    def encoder(self) -> PatchEncoder:
        """The network as an encoder of patches."""
        return self._opened.encoder

    @property
    def about(self) -> dict[str, Any]:
        """Description of the backbone."""
        return self._opened.about

    @property
    def device(self) -> str:
        """Device of the network."""
        return self._opened.device

    @cached_property
    def dim(self) -> int:
        """Dimension of the features of a patch."""
        return self.encoder.dim(self.device)
