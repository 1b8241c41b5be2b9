"""Patches that a vision transformer does not encode, for MAE and LOCA."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float, Int
from timm.models import VisionTransformer
from torch import Tensor, nn

from cribo.base.errors import ConfigError
from cribo.models import Backbone


class KeepTokens(nn.Module):
    """Replacement for timm's `patch_drop`: keep prefix tokens, e.g. [CLS], and patches `kept` (B, n); all if None."""

    def __init__(self, prefix_tokens: int) -> None:
        super().__init__()
        self.prefix_tokens = prefix_tokens
        self.kept: Int[Tensor, "b n"] | None = None

    def forward(self, tokens: Float[Tensor, "b t d"]) -> Float[Tensor, "b s d"]:
        """Select the tokens."""
        if self.kept is None:
            return tokens
        prefix, patches = tokens[:, : self.prefix_tokens], tokens[:, self.prefix_tokens :]
        return torch.cat((prefix, gather_tokens(patches, self.kept)), dim=1)

    @contextmanager
    def only(self, kept: Int[Tensor, "b n"]) -> Iterator[None]:
        """Keep only these patches inside the context, in this order."""
        self.kept = kept
        try:
            yield
        finally:
            self.kept = None


def accept_drops(backbone: Backbone, objective: str) -> KeepTokens:
    """Prepare a network to encode only some patches; return the module that selects them.

    Args:
        backbone: the network, changed in place.
        objective: display name of the objective, for errors.

    Raises:
        ConfigError: the network is not timm's VisionTransformer.
    """
    if not isinstance(backbone.model, VisionTransformer):
        raise ConfigError(
            f"{objective} requires a timm vision transformer that can drop patches, not {backbone.name}: use "
            "vit_small_patch16_224, for example"
        )
    keep = KeepTokens(backbone.model.num_prefix_tokens)
    backbone.model.set_submodule("patch_drop", keep)
    return keep


def gather_tokens(tokens: Float[Tensor, "b n d"], index: Int[Tensor, "b m"]) -> Float[Tensor, "b m d"]:
    """Return the tokens of these indices of each image."""
    return tokens.gather(1, index[..., None].expand(-1, -1, tokens.shape[2]))
