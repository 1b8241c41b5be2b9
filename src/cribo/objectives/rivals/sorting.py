"""Differentiable sorting networks: soft ranks of numbers, with gradients (Petersen et al. 2022)."""

import math
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from cribo.base.bounds import above, at_least

SortingKind = Literal["bitonic", "odd_even"]

Layer = list[tuple[int, int]]
"""Parallel comparators, as pairs (lower wire, upper wire): the smaller number leaves on the lower wire."""


class SortingNetwork(nn.Module):
    """Sort rows of n numbers in ascending order by relaxed comparators.

    A comparator of the numbers a and b on its lower and upper wire returns w a + (1 - w) b and (1 - w) a + w b, where
    w = arctan(steepness (b - a)) / pi + 1/2, the distribution function of the Cauchy distribution. The columns of a
    matrix, initially the identity, are mixed with the same weights: the result is the share of each number at
    each rank.

    Args:
        count: n, number of wires.
        kind: `bitonic`, about log2(n)^2 / 2 layers, or `odd_even`, n layers. Soft ranks depend on the kind: more layers
            blur more.
        steepness: inverse width of the distribution; larger values give harder ranks.

    Raises:
        ValueError: a value out of range.

    Source: Petersen et al. 2022, "Monotonic Differentiable Sorting Networks".

    Example:
        >>> ordered, ranks = SortingNetwork(3, steepness=1e4)(torch.tensor([[0.5, -1.0, 2.0]]))
        >>> ordered.round(decimals=2).tolist(), ranks.argmax(dim=-1).tolist()
        ([[-1.0, 0.5, 2.0]], [[1, 0, 2]])
    """

    def __init__(self, count: int, kind: SortingKind = "bitonic", *, steepness: float) -> None:
        super().__init__()
        at_least(1).check(count=count)
        above(0).check(steepness=steepness)
        self.count = count
        self.steepness = steepness
        layers = bitonic_layers(count) if kind == "bitonic" else odd_even_layers(count)
        orders, places = [], list(range(count))
        for layer in layers:
            compared = [low for low, _ in layer] + [high for _, high in layer]
            wires = compared + sorted(set(range(count)) - set(compared))
            orders.append([places.index(wire) for wire in wires])
            places = wires
        orders.append([places.index(wire) for wire in range(count)])
        self.comparators = tuple(len(layer) for layer in layers)
        # Wires are kept in the order of the current layer: its lower wires, its upper wires, the others. Row l of this
        # table selects the wires of layer l from those of the layer before.
        self.register_buffer("orders", torch.tensor(orders), persistent=False)

    def forward(self, numbers: Float[Tensor, "r n"]) -> tuple[Float[Tensor, "r n"], Float[Tensor, "r n n"]]:
        """Return the sorted numbers, and the weight (R, n, n) of each number at each rank.

        Rows and columns of the weights sum to 1.
        """
        orders: Int[Tensor, "layers n"] = self.get_buffer("orders")
        wires = numbers.T
        # (n wires, R, n numbers): selecting wires then copies contiguous memory.
        weights = torch.eye(self.count, dtype=wires.dtype, device=wires.device)[:, None].expand(-1, wires.shape[1], -1)
        for order, pairs in zip(orders, self.comparators, strict=False):
            sizes = (pairs, pairs, self.count - 2 * pairs)
            a, b, others = wires.index_select(0, order).split(sizes)
            lower, upper, unchanged = weights.index_select(0, order).split(sizes)
            gap = self.steepness * (b - a)
            other = torch.atan2(torch.ones_like(gap), gap) / math.pi  # 1 - w, without cancellation
            step, weight_step = other * (b - a), other[..., None] * (upper - lower)
            wires = torch.cat((a + step, b - step, others))
            weights = torch.cat((lower + weight_step, upper - weight_step, unchanged))
        return wires.index_select(0, orders[-1]).T, weights.index_select(0, orders[-1]).permute(1, 2, 0)


def bitonic_layers(count: int) -> list[Layer]:
    """Return the layers of a bitonic network (Batcher 1968) whose comparators all point the same way.

    Runs of twice the length are merged until one is left: the first layer of a merger compares the two runs, one of
    them reversed, and the others compare halves of halves. If `count` is not a power of 2, the network is built for
    the next power of 2, without the first wires, on which minus infinity would stay.

    Example:
        >>> bitonic_layers(4)
        [[(0, 1), (2, 3)], [(0, 3), (1, 2)], [(0, 1), (2, 3)]]
        >>> bitonic_layers(3)
        [[(1, 2)], [(0, 1)], [(1, 2)]]
    """
    levels = (count - 1).bit_length()
    missing = 2**levels - count
    layers: list[Layer] = []
    for level in range(1, levels + 1):
        size = 2**level
        layers.append([(i, i - i % size + size - 1 - i % size) for i in range(2**levels) if i % size < size // 2])
        for distance in (2**power for power in reversed(range(level - 1))):
            layers.append([(i, i + distance) for i in range(2**levels) if i % (2 * distance) < distance])
    return [[(low - missing, high - missing) for low, high in layer if low >= missing] for layer in layers]


def odd_even_layers(count: int) -> list[Layer]:
    """Return the layers of an odd-even network: neighbouring wires from the first, then from the second, and so on.

    Example:
        >>> odd_even_layers(4)
        [[(0, 1), (2, 3)], [(1, 2)], [(0, 1), (2, 3)], [(1, 2)]]
    """
    return [[(i, i + 1) for i in range(number % 2, count - 1, 2)] for number in range(count)]
