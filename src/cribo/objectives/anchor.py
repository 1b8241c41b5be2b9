"""Anchoring: keeps the student's patch features near those of the starting weights. Beyond the paper."""

import copy

import torch
from jaxtyping import Float
from torch import Tensor, nn

from cribo.method import cosine_distance, gram_loss
from cribo.models import Backbone
from cribo.objectives.options import AnchorKind
from cribo.objectives.trunk import Inputs, encode


class Anchor(nn.Module):
    """The distance of patch features from those of a frozen copy of a backbone.

    Args:
        start: the backbone with its starting weights.
        kind: `gram` compares the similarities between the patches of a view, `cosine` the patches themselves.
    """

    def __init__(self, start: Backbone, kind: AnchorKind) -> None:
        super().__init__()
        self.start = copy.deepcopy(start).requires_grad_(False)
        self.kind = kind
        self.train()

    def train(self, mode: bool = True) -> "Anchor":
        """Stays in evaluation mode: batch norms use the statistics of the starting weights."""
        return super().train(False)

    def forward(self, tokens: Float[Tensor, "b n d"], inputs: Inputs) -> Float[Tensor, ""]:
        """The mean distance of the student's tokens for some views, or for the output of the frozen blocks."""
        with torch.no_grad():
            start = encode(self.start, inputs).tokens
        return gram_loss(tokens, start) if self.kind == "gram" else cosine_distance(tokens, start).mean()
