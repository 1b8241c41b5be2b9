"""Centres of the teacher's logits that balance a batch over the prototypes."""

import torch
from jaxtyping import Float
from torch import Tensor

from cribo.base.bounds import above, at_least
from cribo.method.blocks import rows_per_block
from cribo.method.precision import in_float32


@torch.no_grad()
@in_float32
def sinkhorn_centre(
    embeddings: Float[Tensor, "r e"], prototypes: Float[Tensor, "l e"], *, temperature: float, iterations: int = 3
) -> Float[Tensor, " l"]:
    """Return the centre that balances the rows' probabilities over the prototypes.

    An alternative to the moving average for small batches and short runs; not in the paper. The probabilities
    softmax((logits - centre) / temperature) equal those of `iterations` rounds of Sinkhorn-Knopp with uniform marginals
    (SwAV, Caron et al. 2020): scaling the columns of exp(logits / temperature) is the same as shifting the logits.

    Args:
        embeddings: (R, E) teacher embeddings of one group.
        prototypes: (L, E) weight of the teacher's last layer.
        temperature: tau_t, temperature of the teacher's softmax.
        iterations: number of rounds.

    Returns:
        (L,) the centre; zeros if there are no rows.

    Raises:
        ValueError: temperature or iterations out of range.

    Example:
        >>> centre = sinkhorn_centre(torch.randn(64, 8), torch.randn(32, 8), temperature=0.1)
        >>> centre.shape
        torch.Size([32])
    """
    above(0).check(temperature=temperature)
    at_least(1).check(iterations=iterations)
    num_prototypes = len(prototypes)
    shift = prototypes.new_zeros(num_prototypes)  # log of the column scaling
    if not len(embeddings):
        return shift
    for _ in range(iterations):
        mass = torch.zeros_like(shift)
        for block in (embeddings / temperature).split(rows_per_block(num_prototypes, prototypes.device)):
            mass += torch.addmm(shift, block, prototypes.T).softmax(dim=1).sum(dim=0)
        shift = shift - (mass * (num_prototypes / len(embeddings))).clamp_min(1e-30).log()
    return -temperature * shift
