"""How the clusters of a few fixed view pairs change over a run, kept in the run folder."""

import logging
import zipfile
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from cribo.data import DataError, UnreadableImage
from cribo.data.images import ImageSource
from cribo.data.samples import Batch
from cribo.files import write_whole
from cribo.models import Backbone
from cribo.objectives.options import ObjectiveOptions
from cribo.objectives.sampling import cluster_pairs, open_pairs, sample_pairs

log = logging.getLogger("cribo")

CLUSTERS = "clusters.npz"
"""The file in the run folder."""

_PAIRS = 6
_LATER = 7  # times after the beginning


@dataclass(frozen=True)
class ClusterHistory:
    """The clusters of the same view pairs at several times of a run.

    Attributes:
        views: (P, 2, 3, H, W) 8-bit, without photometric changes.
        grid: (h, w) tokens of a view.
        epochs: E, after how many epochs; 0 is the untrained teacher.
        labels: (E, P, 2, N) the teacher's cluster of each token.
    """

    views: UInt8[Tensor, "p 2 3 h w"]
    grid: tuple[int, int]
    epochs: tuple[int, ...]
    labels: Int[Tensor, "e p 2 n"]

    def with_epoch(self, epoch: int, labels: Int[Tensor, "p 2 n"]) -> "ClusterHistory":
        """With one more time; those after it, of a part of the run that is done again, are forgotten."""
        kept = sum(earlier < epoch for earlier in self.epochs)
        return replace(
            self, epochs=(*self.epochs[:kept], epoch), labels=torch.cat([self.labels[:kept], labels[None].long()])
        )

    def write(self, path: Path) -> None:
        """Write it as an npz file, whole or not at all."""
        narrow = np.uint8 if int(self.labels.max()) < 256 else np.uint16
        write_whole(path, self._save(narrow))

    def _save(self, dtype: type[np.unsignedinteger[Any]]) -> Any:
        def save(part: Path) -> None:
            with part.open("wb") as file:
                np.savez_compressed(
                    file,
                    views=self.views.numpy(),
                    grid=np.array(self.grid),
                    epochs=np.array(self.epochs),
                    labels=self.labels.numpy().astype(dtype),
                )

        return save


def read_clusters(folder: Path) -> ClusterHistory:
    """The clusters that a run has recorded.

    Raises:
        FileNotFoundError: it has recorded none.
        ValueError: the file is damaged.
    """
    path = folder / CLUSTERS
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no {CLUSTERS}: the run has no objects, or is older than this record")
    try:
        with np.load(path, allow_pickle=False) as content:
            return ClusterHistory(
                views=torch.from_numpy(content["views"]),
                grid=(int(content["grid"][0]), int(content["grid"][1])),
                epochs=tuple(int(epoch) for epoch in content["epochs"]),
                labels=torch.from_numpy(content["labels"].astype(np.int64)),
            )
    except (KeyError, IndexError, ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{path} is damaged ({error}): remove it; it is only used for figures") from error


def recorded_epochs(epochs: int) -> tuple[int, ...]:
    """After how many epochs of a run clusters are recorded: closer together at its beginning, and at its end.

    Example:
        >>> recorded_epochs(300)
        (0, 1, 3, 7, 17, 45, 116, 300)
        >>> recorded_epochs(3)
        (0, 1, 2, 3)
    """
    spread = np.geomspace(1, epochs, min(_LATER, epochs))
    found = {0, *(round(float(epoch)) for epoch in spread), epochs}
    return tuple(sorted(found if epochs > _LATER else range(epochs + 1)))


class ClusterRecord(L.Callback):
    """Records the teacher's clusters of a few view pairs at the beginning, at some epochs, and at the end of a run.

    It looks on: nothing that is trained is changed, no random number is drawn, and what cannot be read or written is
    said and left out. The first process does it.

    Args:
        folder: the run folder.
        source: the images that are trained on.
        options: of the run.
    """

    def __init__(self, folder: Path, source: ImageSource, options: ObjectiveOptions) -> None:
        self.path = folder / CLUSTERS
        self.source = source
        self.options = options
        self._due = recorded_epochs(options.optim.epochs)
        self._pairs: Batch | None = None
        self._failed = False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Record the untrained teacher, or what a resumed run was stopped before recording."""
        self._record_if_due(trainer, pl_module)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Record at the epochs that are to be recorded, the last one among them."""
        self._record_if_due(trainer, pl_module)

    def _record_if_due(self, trainer: L.Trainer, module: Any) -> None:
        epoch, rest = divmod(trainer.global_step, module.schedules.steps_per_epoch)
        if rest or epoch not in self._due or self._failed or not trainer.is_global_zero:
            return
        try:
            self._record(epoch, module.objective.exported())
        except (UnreadableImage, DataError, OSError) as error:
            self._failed = isinstance(error, UnreadableImage | DataError)
            log.error("could not record clusters in %s: %s; training goes on", self.path, error)

    def _record(self, epoch: int, backbone: Backbone) -> None:
        if self._pairs is None:
            dataset = open_pairs(self.source, backbone, self.options)
            self._pairs = sample_pairs(dataset, self.options, count=_PAIRS)
        labels = cluster_pairs(backbone, self._pairs, self.options).labels
        nothing = torch.empty(0, *labels.shape, dtype=torch.long)
        side = self.options.views.size // backbone.patch_size
        history = ClusterHistory(self._pairs["views"], (side, side), (), nothing)
        if epoch:
            try:
                before = read_clusters(self.path.parent)
            except (FileNotFoundError, ValueError) as error:  # a run that was begun by an older version, say
                log.warning("the record of clusters begins at epoch %d: %s", epoch, error)
            else:
                history = before if torch.equal(before.views, history.views) else history
        history.with_epoch(epoch, labels).write(self.path)
