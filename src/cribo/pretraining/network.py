"""The student and the teacher: a backbone f, the shared head h, and one last layer per level."""

import copy

import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from cribo.data.randomness import keyed_generator
from cribo.method import ProjectionHead, PrototypeLayer
from cribo.models import Backbone
from cribo.pretraining.config import HeadConfig
from cribo.pretraining.shares import held


class Network(nn.Module):
    """Backbone, projection head, and the last layers of the image level and the object level.

    Args:
        backbone: f.
        config: sizes of the head.
        seed: the head's random weights depend on nothing else.
    """

    def __init__(self, backbone: Backbone, config: HeadConfig, *, seed: int) -> None:
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
            self.image_prototypes = PrototypeLayer(
                config.bottleneck_dim, config.prototypes, train_gain=config.train_gain
            )
            self.object_prototypes = PrototypeLayer(
                config.bottleneck_dim, config.prototypes, train_gain=config.train_gain
            )

    @property
    def last_layers(self) -> list[nn.Parameter]:
        """Parameters of both last layers."""
        return [*self.image_prototypes.parameters(), *self.object_prototypes.parameters()]

    def make_teacher(self) -> "Network":
        """A copy that no gradient reaches.

        It stays in training mode: batch norms see their own batches, and stochastic depth needs noise that the
        teacher is never given.
        """
        return copy.deepcopy(self).requires_grad_(False)

    @torch.no_grad()
    def move_towards(self, student: "Network", momentum: float) -> None:
        """Exponential moving average: weights <- momentum * weights + (1 - momentum) * student's."""
        average = get_ema_multi_avg_fn(momentum)
        average([held(p) for p in self.parameters()], [held(p) for p in student.parameters()], 0)
