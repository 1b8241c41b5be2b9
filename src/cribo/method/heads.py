"""Projection head h and last layers (paper section 3.2.3 and appendix "Network architecture")."""

import itertools
import math
from typing import Literal, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from cribo.base.bounds import above, at_least
from cribo.method.config import HeadWeights
from cribo.method.precision import at_least_float32

_TRUNCATED_STD = 0.87962566  # of a standard normal distribution without its values beyond two


class ProjectionHead(nn.Module):
    """MLP shared by image level and object level, with an L2-normalised output.

    Args:
        dim: D, channels of the representations.
        hidden_dim: width of the hidden layers.
        bottleneck_dim: E, channels of the embeddings.
        num_layers: total number of linear layers, at least 1.
        bias: whether the linear layers have biases, initialised to zero unless stated below.
        init_std: standard deviation of the weights' truncated normal; about 1 / sqrt(hidden_dim) suits narrow heads.
            `kaiming` is a normal distribution of sqrt(2 / inputs) (He et al. 2015); `lecun` a truncated normal of
            1 / sqrt(inputs), the default of Flax; `pytorch` the default of `nn.Linear`, uniform weights and biases of
            at most 1 / sqrt(inputs).

    Raises:
        ValueError: a size below 1, or a standard deviation that is not positive.

    Source: paper appendix "Network architecture", after DINO (Caron et al. 2021): no batch norm, standard
    deviation .02.

    Example:
        >>> ProjectionHead(16, hidden_dim=32, bottleneck_dim=8)(torch.randn(5, 16)).shape
        torch.Size([5, 8])
    """

    def __init__(
        self,
        dim: int,
        *,
        hidden_dim: int = 2048,
        bottleneck_dim: int = 256,
        num_layers: int = 3,
        bias: bool = True,
        init_std: float | HeadWeights = 0.02,
    ) -> None:
        super().__init__()
        at_least(1).check(dim=dim, hidden_dim=hidden_dim, bottleneck_dim=bottleneck_dim, num_layers=num_layers)
        if not isinstance(init_std, str):
            above(0).check(init_std=init_std)
        widths = [dim, *[hidden_dim] * (num_layers - 1), bottleneck_dim]
        layers: list[nn.Module] = []
        for inputs, outputs in itertools.pairwise(widths):
            linear = nn.Linear(inputs, outputs, bias=bias)
            if init_std != "pytorch":
                _draw_weights(linear, init_std)
                if bias:
                    nn.init.zeros_(linear.bias)
            layers += [linear, nn.GELU()]
        self.mlp = nn.Sequential(*layers[:-1])

    def forward(self, representations: Float[Tensor, "*rows d"]) -> Float[Tensor, "*rows e"]:
        """Return embeddings of unit length, at least in float32, whatever the precision of the MLP."""
        return F.normalize(at_least_float32(self.mlp(representations)), dim=-1)


def _draw_weights(linear: nn.Linear, init_std: float | Literal["kaiming", "lecun"]) -> None:
    """Draw the weights of a layer."""
    if init_std == "kaiming":
        nn.init.kaiming_normal_(linear.weight)
    elif init_std == "lecun":
        std = linear.in_features**-0.5 / _TRUNCATED_STD
        nn.init.trunc_normal_(linear.weight, std=std, a=-2 * std, b=2 * std)
    else:
        nn.init.trunc_normal_(linear.weight, std=init_std)


class PrototypeLayer(nn.Module):
    """A weight-normalised linear layer without bias, the last layer of a head.

    Args:
        bottleneck_dim: E, channels of the embeddings.
        num_prototypes: L, number of prototypes.
        train_gain: whether the gain (initially 1) is trained; the released recipe freezes it for ViT-B.

    Raises:
        ValueError: a size below 1.

    Example:
        >>> PrototypeLayer(8, 32)(torch.randn(5, 8)).shape
        torch.Size([5, 32])
    """

    def __init__(self, bottleneck_dim: int, num_prototypes: int, *, train_gain: bool = True) -> None:
        super().__init__()
        at_least(1).check(bottleneck_dim=bottleneck_dim, num_prototypes=num_prototypes)
        # The default initialisation of nn.Linear.
        bound = 1 / math.sqrt(bottleneck_dim)
        self.direction = nn.Parameter(torch.empty(num_prototypes, bottleneck_dim).uniform_(-bound, bound))
        self.gain = nn.Parameter(torch.ones(num_prototypes, 1), requires_grad=train_gain)

    @property
    def weight(self) -> Float[Tensor, "l e"]:
        """The (L, E) prototypes: unit directions times their gain, in float32 even under autocast."""
        return self.normalised()

    def normalised(self) -> Float[Tensor, "l e"]:
        """Return `weight`. A method, because FSDP gathers parameters only around methods.

        PyTorch's fused weight normalisation keeps no second (L, E) tensor for the backward pass.
        """
        with torch.autocast(self.direction.device.type, enabled=False):
            return torch.ops.aten._weight_norm(self.direction, self.gain, 0)

    def forward(self, embeddings: Float[Tensor, "*rows e"]) -> Float[Tensor, "*rows l"]:
        """Return the logits of embeddings. The losses of `cribo.method` compute them in blocks instead."""
        return cast(Tensor, F.linear(embeddings, self.weight))
