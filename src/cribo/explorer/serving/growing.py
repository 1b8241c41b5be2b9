"""A memory file that grows while it is served."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from cribo.base.errors import FolderError
from cribo.base.job import require_writable
from cribo.data.labelled.outlines import BACKGROUND
from cribo.explorer.serving.memory_file import MemoryFile
from cribo.features.config import BackboneSource
from cribo.features.memory import SegmentationMemory, SegmentationSettings
from cribo.features.reading import completed_for

log = logging.getLogger("cribo")

Change = Callable[[SegmentationMemory], bool]
"""Changes a memory, and returns whether it has changed."""


class GrowingMemory(MemoryFile):
    """A memory file that grows. It is created by the first change if it does not exist: with the class of the
    background, and without examples.

    Args:
        file: the memory file, which may not exist yet.
        backbone: the backbone with which it was, or will be, created.
        batch_size: number of images to encode at once.
        device: such as cuda:0. [the first GPU, else the CPU]

    Raises:
        FolderError: the file cannot be written.
        DataError: the file is damaged, is not a memory, or was created with another backbone.
        errors of `open_network`.
    """

    def __init__(self, file: Path, backbone: BackboneSource, *, batch_size: int = 8, device: str | None = None) -> None:
        self._new_settings = completed_for(backbone, SegmentationSettings())
        self._is_new = not file.expanduser().exists()
        super().__init__(file, backbone, batch_size=batch_size, device=device)

    def change(self, changes: Sequence[Change]) -> list[bool]:
        """Change the memory, choose its probe again, and replace the file atomically; return which have changed it.

        The changes apply to the file as it is now, also if another process has changed it. If one fails, the file and
        the served memory stay as they are. The caller must hold `memory_lock`.

        Raises:
            DataError: the file is damaged or has been deleted, or an example is invalid.
            OSError: the file cannot be written.
        """
        memory = self._load()
        changed = [change(memory) for change in changes]
        if any(changed):
            memory.fitted()
            memory.save(self.file)
        self._is_new = self._is_new and not any(changed)
        self._state, self.memory, self.problem = self._current_state(), memory, ""
        return changed

    def _check(self) -> None:
        if not self.file.parent.is_dir():
            raise FolderError(f"the folder of --memory {self.file} does not exist: create it, or choose another")
        require_writable(self.file.parent, "--memory")
        if not self._is_new:
            super()._check()

    def _load(self) -> SegmentationMemory:
        if self._is_new and not self.file.exists():
            return SegmentationMemory(
                self._network, classes=[BACKGROUND], settings=self._new_settings, batch_size=self._batch_size
            )
        memory = super()._load()
        self._is_new = False
        return memory
