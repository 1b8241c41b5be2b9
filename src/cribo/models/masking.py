"""Mask tokens: patches of the input that a vision transformer does not see."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn


class Mask(NamedTuple):
    """Patches to replace.

    Attributes:
        patches: (B, N) whether a patch is masked, in row-major order.
        token: (D,) the vector that replaces its embedding, before positions are added.
    """

    patches: Bool[Tensor, "b n"]
    token: Float[Tensor, " d"]


class MaskedEmbedding:
    """Forward method of a patch embedding that replaces masked patches during one call of `encode`.

    Stored as an attribute that shadows the method, so that neither names nor the type of the embedding change, and
    `torch.compile` traces it.

    Args:
        embedding: the patch embedding.
    """

    mask: Mask | None = None

    def __init__(self, embedding: nn.Module) -> None:
        self.embedding = embedding

    def __call__(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b *patches d"]:
        """Return the embeddings as a map or a sequence, as the network expects them."""
        patches = type(self.embedding).forward(self.embedding, images)
        if self.mask is None:
            return patches
        masked = self.mask.patches.view(patches.shape[:-1])[..., None]
        return torch.where(masked, self.mask.token.to(patches.dtype), patches)
