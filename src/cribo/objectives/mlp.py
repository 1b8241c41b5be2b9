"""MLPs of projectors and predictors."""

from torch import nn

from cribo.method import ProjectionHead
from cribo.objectives.config import HeadConfig


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
    head = ProjectionHead(
        dim,
        hidden_dim=config.hidden_dim,
        bottleneck_dim=config.bottleneck_dim,
        num_layers=config.layers,
        bias=config.bias,
        init_std=config.init_std,
    )
    layers: list[nn.Module] = []
    for layer in head.mlp:
        if not isinstance(layer, nn.GELU):
            layers.append(layer)
            continue
        if batch_norm:
            layers.append(nn.BatchNorm1d(config.hidden_dim, track_running_stats=running_statistics))
        layers.append(activation())
    if not last_bias:
        layers[-1].register_parameter("bias", None)
    return nn.Sequential(*layers)
