"""Record of the clusters of a few fixed view pairs over a run."""

import logging
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from cribo.base.errors import DataError, InputError, UnreadableImage
from cribo.base.files import open_arrays, write_whole
from cribo.data.samples import Batch
from cribo.data.sources.images import ImageSource
from cribo.models import Backbone
from cribo.objectives.config import ObjectiveOptions
from cribo.objectives.sampling import cluster_pairs, sample_pairs

log = logging.getLogger("cribo")

CLUSTERS = "clusters.npz"
"""Name of the file in the run folder."""

_PAIRS = 6
_LATER = 7  # number of records after the first


@dataclass(frozen=True)
class ClusterHistory:
    """Clusters of the same view pairs at several epochs of a run.

    Attributes:
        views: (P, 2, C, H, W) 8-bit views, without photometric augmentation.
        grid: (h, w) tokens of a view.
        epochs: E numbers of completed epochs; 0 is the teacher before training.
        labels: (E, P, 2, N) the teacher's cluster of each token.
    """

    views: UInt8[Tensor, "p 2 3 h w"]
    grid: tuple[int, int]
    epochs: tuple[int, ...]
    labels: Int[Tensor, "e p 2 n"]

    def write(self, path: Path) -> None:
        """Write the history as an npz file, atomically."""

        def save(part: Path) -> None:
            labels = self.labels.numpy().astype(np.uint16)
            with part.open("wb") as file:
                np.savez_compressed(file, views=self.views, grid=self.grid, epochs=self.epochs, labels=labels)

        write_whole(path, save)


def read_clusters(folder: Path) -> ClusterHistory:
    """Read the clusters recorded by a run.

    Raises:
        FileNotFoundError: the folder has no record.
        ValueError: the file is damaged.
    """
    path = folder / CLUSTERS
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} has no {CLUSTERS}: the run has no objects, or was created by an older version"
        )
    try:
        with open_arrays(path) as content:
            return ClusterHistory(
                views=torch.from_numpy(content["views"]),
                grid=(int(content["grid"][0]), int(content["grid"][1])),
                epochs=tuple(int(epoch) for epoch in content["epochs"]),
                labels=torch.from_numpy(content["labels"].astype(np.int64)),
            )
    except (KeyError, IndexError, ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise InputError(f"{path} is damaged ({error}): remove it; it is only used for figures") from error


def recorded_epochs(epochs: int) -> tuple[int, ...]:
    """Return the numbers of completed epochs at which clusters are recorded, denser at the beginning.

    Example:
        >>> recorded_epochs(300)
        (0, 1, 3, 7, 17, 45, 116, 300)
        >>> recorded_epochs(3)
        (0, 1, 2, 3)
    """
    if epochs <= _LATER:
        return tuple(range(epochs + 1))
    return tuple(sorted({0, *(round(float(epoch)) for epoch in np.geomspace(1, epochs, _LATER))}))


class ClusterRecord(L.Callback):
    """Record the teacher's clusters of a few view pairs at the start, at some epochs, and at the end of a run.

    Training is not affected: weights and random states do not change, and errors while computing or writing clusters
    are only logged.

    Args:
        folder: the run folder.
        source: the training images.
        options: options of the run.
    """

    def __init__(self, folder: Path, source: ImageSource, options: ObjectiveOptions) -> None:
        self.path = folder / CLUSTERS
        self.source = source
        self.options = options
        self._due = recorded_epochs(options.optim.epochs)
        self._pairs: Batch | None = None
        self._labels: dict[int, Int[Tensor, "p 2 n"]] = {}
        self._failed = False

    def state_dict(self) -> dict[str, Any]:
        """Return the labels of each recorded epoch."""
        return {"labels": dict(self._labels)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the labels."""
        self._labels = state_dict["labels"]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Record the initial teacher, or, in a resumed run, the last epoch if its record is missing."""
        self.on_train_epoch_end(trainer, pl_module)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Record the epoch if it is one of `recorded_epochs`."""
        module: Any = pl_module
        epoch, rest = divmod(trainer.global_step, module.schedules.steps_per_epoch)
        if rest or epoch not in self._due or self._failed or not trainer.is_global_zero:
            return
        try:
            self._record(epoch, module.objective.exported())
        except (UnreadableImage, DataError, OSError) as error:
            self._failed = isinstance(error, UnreadableImage | DataError)
            log.error("could not record clusters in %s: %s; training continues", self.path, error)

    def _record(self, epoch: int, backbone: Backbone) -> None:
        if self._pairs is None:
            self._pairs = sample_pairs(self.source, backbone, self.options, count=_PAIRS)
        self._labels[epoch] = cluster_pairs(backbone, self._pairs, self.options).labels.long()
        side = self.options.views.size // backbone.patch_size
        labels = torch.stack(list(self._labels.values()))
        ClusterHistory(self._pairs["views"], (side, side), tuple(self._labels), labels).write(self.path)
