"""Heads and MLPs of projectors and predictors, with seeded random weights."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from cribo.data.randomness import keyed_generator
from cribo.method import ProjectionHead
from cribo.objectives.config import HeadConfig


@contextmanager
def seeded_weights(seed: int, purpose: int = 1) -> Iterator[None]:
    """Make a run's seed the only source of the random weights of modules that are created inside the context."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(keyed_generator(seed, purpose).initial_seed())
        yield


def make_head(dim: int, config: HeadConfig, *, outputs: int | None = None, layers: int | None = None) -> ProjectionHead:
    """Return a projection head of the configured sizes.

    Args:
        dim: channels of the input.
        config: sizes of the MLP.
        outputs: channels of the embeddings; `config.bottleneck_dim` by default.
        layers: number of layers; `config.layers` by default.
    """
    return ProjectionHead(
        dim,
        hidden_dim=config.hidden_dim,
        bottleneck_dim=outputs or config.bottleneck_dim,
        num_layers=layers or config.layers,
        bias=config.bias,
        init_std=config.init_std,
    )


def make_mlp(
    dim: int,
    config: HeadConfig,
    *,
    batch_norm: bool,
    activation: type[nn.Module] = nn.GELU,
    running_statistics: bool = False,
    last_bias: bool = True,
) -> nn.Sequential:
    """Return the MLP of `ProjectionHead`, with optional batch norms before its activations.

    Args:
        dim: channels of the input.
        config: sizes of the MLP.
        batch_norm: whether there are batch norms.
        activation: class of the activations.
        running_statistics: whether batch norms keep running statistics, for use in evaluation mode.
        last_bias: whether the last layer may have a bias; as the others if `config.bias` is set.
    """
    layers: list[nn.Module] = []
    for layer in make_head(dim, config).mlp:
        if not isinstance(layer, nn.GELU):
            layers.append(layer)
            continue
        if batch_norm:
            layers.append(nn.BatchNorm1d(config.hidden_dim, track_running_stats=running_statistics))
        layers.append(activation())
    if not last_bias:
        layers[-1].register_parameter("bias", None)
    return nn.Sequential(*layers)
