"""Labels of patches by a vote of their nearest labelled neighbours."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int, Num
from torch import Tensor

from cribo.features.config import PatchLabels, Vote
from cribo.features.search import Neighbours

_BLOCK = 4096  # queries per block
_LEAST_SIMILARITY = 1e-6  # so that neighbours have equal weights if all similarities are negative


class LabelShares(NamedTuple):
    """Class shares of patches in sparse form: concatenated lists of (class, share) pairs.

    Since most patches contain only one or two classes, this takes much less memory than a dense matrix.

    Attributes:
        lengths: number of pairs of each patch.
        classes: class of each pair, patch by patch, int16.
        shares: share of each pair; the shares of a patch sum to 1.
    """

    lengths: Int[Tensor, " n"]
    classes: Int[Tensor, " s"]
    shares: Float[Tensor, " s"]


def label_shares(counts: Num[Tensor, "n c"], patch_labels: PatchLabels) -> LabelShares:
    """Compute the class shares of patches from their pixel counts.

    Args:
        counts: number or fraction of pixels of each class in each patch; no row may be all zero.
        patch_labels: `hard` for the majority class (ties go to the smallest index), or `soft` for all shares.

    Example:
        >>> [part.tolist() for part in label_shares(torch.tensor([[3, 1], [0, 4]]), "soft")]
        [[2, 1], [0, 1, 1], [0.75, 0.25, 1.0]]
    """
    if patch_labels == "hard":
        return LabelShares(
            torch.ones(len(counts), dtype=torch.long), counts.argmax(dim=1).to(torch.int16), torch.ones(len(counts))
        )
    patches, classes = counts.nonzero(as_tuple=True)
    shares = counts[patches, classes] / counts.sum(dim=1)[patches]
    return LabelShares(patches.bincount(minlength=len(counts)), classes.to(torch.int16), shares)


def vote_weights(similarity: Float[Tensor, "q k"], vote: Vote, temperature: float = 0.02) -> Float[Tensor, "q k"]:
    """Return the weight of each neighbour, up to a factor for each query.

    Args:
        similarity: cosine similarity of the neighbours.
        vote: `majority` (equal weights), `similarity` (the cosine similarity, at least 1e-6) or `attention` (softmax of
            cosine similarity / temperature).
        temperature: temperature of the attention.

    Example:
        >>> vote_weights(torch.tensor([[0.5, -0.5]]), "majority").tolist()
        [[1.0, 1.0]]
    """
    if vote == "attention":
        return (similarity / temperature).softmax(dim=1)
    if vote == "similarity":
        return similarity.clamp(min=_LEAST_SIMILARITY)
    return torch.ones_like(similarity)  # sums of integers are exact, so that ties are detected


class Voters:
    """The labels of all patches of a memory, which vote on the labels of queries.

    Args:
        labels: class shares of the parts of the memory, in the order of the keys.
        columns: number of classes in a vote, C.
        device: device on which votes are counted.

    Example:
        >>> voters = Voters([label_shares(torch.tensor([[4, 0], [2, 2]]), "soft")], 2)
        >>> voters.vote(Neighbours(torch.ones(1, 2), torch.tensor([[0, 1]])), "majority").tolist()
        [[0.75, 0.25]]
    """

    def __init__(self, labels: Sequence[LabelShares], columns: int, device: torch.device | str = "cpu") -> None:
        self.columns = columns
        self._device = device
        ends = torch.cat([part.lengths for part in labels]).cumsum(dim=0)
        self._starts = torch.cat((ends.new_zeros(1), ends)).to(device)
        self._longest = max((int(part.lengths.max()) for part in labels if len(part.lengths)), default=0)
        self._classes = torch.cat([part.classes for part in labels]).to(device)
        self._shares = torch.cat([part.shares for part in labels]).to(device)

    def vote(self, neighbours: Neighbours, vote: Vote, temperature: float = 0.02) -> Float[Tensor, "q c"]:
        """Compute each class's share of the vote, in blocks of queries.

        Args:
            neighbours: nearest neighbours of the queries.
            vote: weight of a neighbour, see `vote_weights`.
            temperature: temperature of the attention.
        """
        blocks = zip(neighbours.similarity.split(_BLOCK), neighbours.rows.split(_BLOCK), strict=True)
        return torch.cat(
            [
                self.vote_at_once(Neighbours(near.to(self._device), rows.to(self._device)), vote, temperature)
                for near, rows in blocks
            ]
        )

    def vote_at_once(self, neighbours: Neighbours, vote: Vote, temperature: float) -> Float[Tensor, "q c"]:
        """Count all votes at once with a fixed sequence of tensor operations, for tracing."""
        similarity, rows = neighbours
        weights = vote_weights(similarity, vote, temperature)
        start, length = self._starts[rows], self._starts[rows + 1] - self._starts[rows]
        votes = weights.new_zeros(rows.shape[0], self.columns)  # `len` would fix the size in a traced graph
        for step in range(self._longest):
            place = (start + step).clamp(max=len(self._classes) - 1)
            share = self._shares[place] * (step < length)
            votes.scatter_add_(1, self._classes[place].long(), weights * share)
        return votes / weights.sum(dim=1, keepdim=True)
