"""Anchoring: keep the student's patch features close to those of the starting weights. Not in the paper."""

import copy

import torch
from jaxtyping import Float
from torch import Tensor, nn

from cribo.method import cosine_distance, gram_loss
from cribo.models import Backbone
from cribo.objectives.options import AnchorKind
from cribo.objectives.trunk import Inputs, encode


class Anchor(nn.Module):
    """Distance of patch features from those of a frozen copy of a backbone.

    Args:
        start: the backbone with its starting weights.
        kind: `gram` compares the similarities between the patches of a view, `cosine` compares the patches.
    """

    def __init__(self, start: Backbone, kind: AnchorKind) -> None:
        super().__init__()
        self.start = copy.deepcopy(start).requires_grad_(False)
        self.kind = kind
        self.train()

    def train(self, mode: bool = True) -> "Anchor":
        """Stay in evaluation mode: batch norms use the statistics of the starting weights."""
        return super().train(False)

    def forward(self, tokens: Float[Tensor, "b n d"], inputs: Inputs) -> Float[Tensor, ""]:
        """Return the mean distance of the student's tokens for views, or for the output of the frozen blocks."""
        with torch.no_grad():
            start = encode(self.start, inputs).tokens
        return gram_loss(tokens, start) if self.kind == "gram" else cosine_distance(tokens, start).mean()
