"""Memory of dense nearest-neighbour retrieval: labelled patches, their search and their votes."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from cribo.data.randomness import keyed_generator
from cribo.evaluation.dense_neighbours.config import DenseNNSettings
from cribo.features.cache import Machine
from cribo.features.extraction import EncodedView, PatchFeatures, SelectedKeys
from cribo.features.patches import labels_in_memory, rarest_patches
from cribo.features.search import ApproximateIndex, Neighbours, recall
from cribo.features.voting import LabelShares, Voters, label_shares

_PATCH_DRAW = 0x706174  # key of the draws of patches, distinct from other uses of the seed
_RECALL_QUERIES = 1000


class PatchMemory:
    """Labelled patches as keys of a search, with their votes.

    Args:
        features: features and class counts of the views.
        views: views in this memory.
        settings: settings of the protocol.
        num_classes: C, number of classes.
        draw: index of the draw; a bounded memory selects other patches in each draw.
        device: device on which votes are counted.

    Attributes:
        keys: keys of the search.
        columns: number of columns of a vote: C, or C + 1 if unlabelled pixels form a class.
    """

    def __init__(
        self,
        features: PatchFeatures,
        views: Sequence[EncodedView],
        settings: DenseNNSettings,
        num_classes: int,
        *,
        draw: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.columns = num_classes + (settings.unlabelled == "class")
        limit = max(1, settings.memory_patches // len(views)) if settings.memory_patches else None
        rows: dict[EncodedView, Tensor] = {}
        labels: list[LabelShares] = []
        for view in views:
            counts, kept = labels_in_memory(torch.from_numpy(features.counts[view].toarray()), settings.unlabelled)
            counts = counts[kept]
            if limit is not None:
                key = (_PATCH_DRAW, settings.seed, draw, view.image, view.augmentation or 0)
                chosen = rarest_patches(counts, limit, keyed_generator(*key))
                counts, kept = counts[chosen], kept[chosen]
            rows[view] = kept.int()  # int32 halves the memory
            labels.append(label_shares(counts, settings.patch_labels))
        self.keys = SelectedKeys(features, rows)
        self._settings = settings
        self._voters = Voters(labels, self.columns, device)
        self._index: ApproximateIndex | None = None

    def search(
        self,
        queries: Float[Tensor, "q d"],
        machine: Machine,
        progress: Callable[[int], None] | None = None,
    ) -> tuple[Neighbours, float]:
        """Return the nearest patches of each query, and the recall of the search (1 if exact)."""
        settings = self._settings
        exact = partial(machine.search, keys=self.keys, neighbours=settings.neighbours, progress=progress)
        if settings.search == "exact":
            return exact(queries), 1.0
        if self._index is None:
            self._index = ApproximateIndex(self.keys, probes=settings.probes, seed=settings.seed)
        found = self._index.search(queries, settings.neighbours)
        sample = torch.arange(0, len(queries), max(1, len(queries) // _RECALL_QUERIES))
        return found, recall(Neighbours(found.similarity[sample], found.rows[sample]), exact(queries[sample]))

    def vote(self, neighbours: Neighbours) -> Float[Tensor, "q p"]:
        """Return the fraction of votes for each class."""
        return self._voters.vote(neighbours, self._settings.vote, self._settings.temperature)
