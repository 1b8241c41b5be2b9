"""Stages of a run before its training, in sub-folders of the run folder."""

import dataclasses
import json
import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich.console import Console

from cribo.base.console import Phases, duration
from cribo.base.errors import FolderError
from cribo.data import ImageSource
from cribo.objectives import Objective
from cribo.pretraining.config import ObjectiveConfig, PretrainConfig
from cribo.pretraining.files import SUMMARY
from cribo.pretraining.planning import with_epochs
from cribo.pretraining.session import Session
from cribo.training.checkpoints import AtomicCheckpointIO, checkpoint_files

log = logging.getLogger("cribo")

_LONGEST_WAIT = timedelta(days=30)


class RunStages:
    """Stages of a run; implements `cribo.objectives.base.Stages`.

    Args:
        session: the run.
        folder: the run folder.
        console: console for the progress display.
        open_folder: creates or checks the folder of a training; called on rank 0.
        train: trains a session in a folder.
    """

    def __init__(
        self,
        session: Session,
        folder: Path,
        console: Console,
        *,
        open_folder: Callable[[Path, PretrainConfig], None],
        train: Callable[[Session, Path], object],
    ) -> None:
        self.session, self.folder, self.console = session, folder, console
        self.source: ImageSource = session.source
        self.workers = session.workers
        self.seconds: dict[str, float] = {}
        self._open_folder, self._train = open_folder, train
        self._group: Any = None

    @property
    def rank(self) -> int:
        """Rank of this process, also before Lightning has started the others."""
        return self.session.probe.global_rank

    @property
    def world_size(self) -> int:
        """Number of running processes: one, until Lightning has started the others for a training."""
        return dist.get_world_size() if _is_distributed() else 1

    def train(self, name: str, objective: str, args: Mapping[str, Any], *, epochs: int | None = None) -> Objective:
        """Train another objective in a sub-folder (see `Stages`)."""
        config = self.session.config
        config = dataclasses.replace(
            with_epochs(config, epochs or config.optim.epochs),
            objective=ObjectiveConfig(objective, dict(args)),
            score=dataclasses.replace(config.score, root=None),
        )
        session, folder = Session(config), self.folder / name
        self.on_rank_0(lambda: self._open_folder(folder, config))
        if not (folder / SUMMARY).is_file():
            log.info("%s: training %s in %s", name, objective, folder)
            self._train(session, folder)
        self.wait()
        checkpoints = checkpoint_files(folder)
        if not checkpoints:
            raise FolderError(f"{folder} has no checkpoint of the finished stage: delete it to train the stage again")
        # Also after training: on CPUs, batch norms of other ranks have other statistics.
        session.module.load_state_dict(AtomicCheckpointIO().load_checkpoint(checkpoints[0])["state_dict"])
        session.module.to(session.probe.strategy.root_device)
        self.seconds[name] = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))["seconds"]
        return session.module.objective

    def progress(self) -> AbstractContextManager[Phases]:
        """Show progress inside a `with` block, on rank 0."""
        return Phases(self.console if self.rank == 0 else Console(quiet=True))

    def on_rank_0(self, function: Callable[[], object]) -> None:
        """Run a function on rank 0; its error is raised on all ranks (see `Stages`)."""
        error: Exception | None = None
        if self.rank == 0:
            try:
                function()
            except Exception as raised:
                error = raised
        if _is_distributed():
            found = [error]
            dist.broadcast_object_list(found, src=0, group=self._gloo())
            error = found[0]
        if error is not None:
            raise error

    def wait(self) -> None:
        """Wait until all ranks have called this method."""
        if _is_distributed():
            dist.barrier(self._gloo())

    def _gloo(self) -> Any:
        """Return a process group whose timeout is longer than a stage; that of the default group is some minutes."""
        if self._group is None:
            self._group = dist.new_group(backend="gloo", timeout=_LONGEST_WAIT)
        return self._group

    def log_seconds(self) -> None:
        """Log the duration of each stage."""
        if self.seconds and self.rank == 0:
            log.info("stages: %s", ", ".join(f"{name} {duration(each)}" for name, each in self.seconds.items()))


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()
