"""Student and teacher of self-distillation: a backbone f, a shared head h, and one last layer per level."""

import copy
from collections.abc import Sequence

import torch
from torch import nn

from cribo.data.randomness import keyed_generator
from cribo.method import ProjectionHead, PrototypeLayer
from cribo.models import Backbone
from cribo.objectives.options import HeadConfig


class Network(nn.Module):
    """Backbone, projection head, and a last layer for each level, such as `image_prototypes`.

    Args:
        backbone: f.
        config: sizes of the head.
        levels: their names.
        seed: the head's random weights depend on nothing else.
    """

    def __init__(self, backbone: Backbone, config: HeadConfig, *, levels: Sequence[str], seed: int) -> None:
        super().__init__()
        self.backbone = backbone
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(keyed_generator(seed, 1).initial_seed())
            self.head = ProjectionHead(
                backbone.embed_dim,
                hidden_dim=config.hidden_dim,
                bottleneck_dim=config.bottleneck_dim,
                num_layers=config.layers,
                bias=config.bias,
                init_std=config.init_std,
            )
            self.levels = tuple(levels)
            for level in levels:
                layer = PrototypeLayer(config.bottleneck_dim, config.prototypes, train_gain=config.train_gain)
                self.add_module(f"{level}_prototypes", layer)

    @property
    def last_layers(self) -> list[nn.Parameter]:
        """Parameters of the last layers."""
        return [parameter for level in self.levels for parameter in self.prototypes(level).parameters()]

    def prototypes(self, level: str) -> PrototypeLayer:
        """The last layer of a level."""
        layer = getattr(self, f"{level}_prototypes")
        assert isinstance(layer, PrototypeLayer)
        return layer

    def make_teacher(self) -> "Network":
        """A copy that no gradient reaches.

        It stays in training mode: batch norms see their own batches, and stochastic depth needs noise that the
        teacher is never given.
        """
        return copy.deepcopy(self).requires_grad_(False)
