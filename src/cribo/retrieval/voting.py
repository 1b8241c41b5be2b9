"""How the nearest labelled patches vote on the label of a new one."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int, Num
from torch import Tensor

from cribo.retrieval.choices import PatchLabels, Vote
from cribo.retrieval.search import Neighbours

_BLOCK = 4096  # queries that vote at once
_LEAST_SIMILARITY = 1e-6  # so that a query of which all neighbours point away is labelled by all alike


class LabelShares(NamedTuple):
    """What some patches are labelled with, as lists of (class, share), end to end.

    Most patches hold one or two classes of many, so this takes far less room than a table.

    Attributes:
        lengths: how many pairs each patch has.
        classes: of the pairs, patch by patch, int16.
        shares: of the pairs; those of a patch sum to 1.
    """

    lengths: Int[Tensor, " n"]
    classes: Int[Tensor, " s"]
    shares: Float[Tensor, " s"]


def label_shares(counts: Num[Tensor, "n c"], patch_labels: PatchLabels) -> LabelShares:
    """Label patches by the pixels of each class in them.

    Args:
        counts: pixels, or their shares; each patch has some.
        patch_labels: `hard`, the class of most pixels (the smallest of several), or `soft`, the share of each.

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
        similarity: of the neighbours, cosines.
        vote: `majority` (all alike), `similarity` (the cosine, next to nothing if negative) or `attention` (softmax of
            cosine / temperature).
        temperature: of the attention.

    Example:
        >>> vote_weights(torch.tensor([[0.5, -0.5]]), "majority").tolist()
        [[1.0, 1.0]]
    """
    if vote == "attention":
        return (similarity / temperature).softmax(dim=1)
    if vote == "similarity":
        return similarity.clamp(min=_LEAST_SIMILARITY)
    return torch.ones_like(similarity)  # whole numbers, so that equal votes are equal


class Voters:
    """The labels of all patches of a memory, which are called up to vote.

    Args:
        labels: of its parts, in the order of the keys.
        columns: of a vote, C.
        device: where votes are counted.

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
        self._classes = torch.cat([part.classes for part in labels]).to(device)
        self._shares = torch.cat([part.shares for part in labels]).to(device)

    def vote(self, neighbours: Neighbours, vote: Vote, temperature: float = 0.02) -> Float[Tensor, "q c"]:
        """The share of the vote that each class gets, in blocks of queries.

        Args:
            neighbours: of the queries.
            vote: weight of a neighbour, see `vote_weights`.
            temperature: of the attention.
        """
        blocks = zip(neighbours.similarity.split(_BLOCK), neighbours.rows.split(_BLOCK), strict=True)
        return torch.cat(
            [self._vote(near.to(self._device), rows.to(self._device), vote, temperature) for near, rows in blocks]
        )

    def _vote(
        self, similarity: Float[Tensor, "q k"], rows: Int[Tensor, "q k"], vote: Vote, temperature: float
    ) -> Float[Tensor, "q c"]:
        weights = vote_weights(similarity, vote, temperature)
        start, length = self._starts[rows], self._starts[rows + 1] - self._starts[rows]
        votes = weights.new_zeros(len(rows), self.columns)
        for step in range(int(length.max())):
            place = (start + step).clamp(max=len(self._classes) - 1)
            share = self._shares[place] * (step < length)
            votes.scatter_add_(1, self._classes[place].long(), weights * share)
        return votes / weights.sum(dim=1, keepdim=True)
