"""A memory file and its backbone, read again when the file changes."""

import logging
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from cribo.base.devices import resolve_device
from cribo.base.errors import InputError
from cribo.data.config import Reading
from cribo.data.labelled.inputs import DecodedImage, open_valid
from cribo.data.reading import EncodedImage, FileState, read_image
from cribo.features.config import BackboneSource
from cribo.features.encoder import open_network
from cribo.features.memory import Segmentation, SegmentationMemory

log = logging.getLogger("cribo")

_MOST_PATCHES = 65_536  # of a picture of 2 x 20,000,000 pixels, 2.5 million would be encoded


class TooManyPatches(InputError):
    """A picture would be encoded as too many patches."""


class Labelled(NamedTuple):
    """The labels of an image, and the memory that predicted them."""

    found: Segmentation
    memory: SegmentationMemory


class Features(NamedTuple):
    """The features of an image.

    Attributes:
        patches: of unit length in each of the L blocks that the memory reads, on the host.
        global_token: of the whole image, on the host.
    """

    patches: Float[Tensor, "rows columns l d"]
    global_token: Float[Tensor, " e"]


class MemoryFile:
    """A memory file with its backbone. The backbone is opened once, the file whenever it has changed.

    Only one thread may call `segment` and `encode` (`Batches`).

    Args:
        file: the memory file.
        backbone: the backbone with which it was created.
        batch_size: number of images to encode at once.
        device: such as cuda:0. [the first GPU, else the CPU]

    Attributes:
        memory: the memory.
        problem: why a changed file is not used; "" if there is no problem.

    Raises:
        DataError: the file does not exist, is damaged, is not a memory, or was created with another backbone.
        errors of `open_network`.
    """

    def __init__(self, file: Path, backbone: BackboneSource, *, batch_size: int = 8, device: str | None = None) -> None:
        self.file = file.expanduser()
        self._batch_size = batch_size
        self._state = self._current_state()
        self._check()
        network, _ = open_network(backbone)
        self._network = network.eval().to(resolve_device(device))
        self.memory = self._load()
        self.problem = ""

    @property
    def is_current(self) -> bool:
        """Whether the file has not changed since it was read."""
        return self._state == self._current_state()

    @property
    def device(self) -> torch.device:
        """Device of the backbone."""
        return self.memory.encoder.device

    def read(self, content: bytes, *, max_pixels: int) -> DecodedImage:
        """Decode an image as the examples were decoded.

        Raises:
            UnreadableImage: it is not an image, or has more pixels.
            TooManyPatches: it is so elongated that it would have too many patches.
            MissingPackage: the reader of its kind is not installed.
        """
        memory = self.memory
        reading = Reading(**memory.settings.reading.given, max_pixels=max_pixels)
        file = EncodedImage("the picture", content)
        image = read_image(file, reading=reading)
        height, width = image.shape[1:]
        encoded = memory.encoder.size(height, width, scale=memory.settings.factor(height, width))
        if (patches := math.prod(encoded) // memory.encoder.patch_size**2) > _MOST_PATCHES:
            raise TooManyPatches(
                f"a picture of {width} x {height} pixels would be encoded as {patches} patches, and {_MOST_PATCHES} is "
                "the limit: cut it into less elongated pictures, or use a memory with a smaller --size or --scale"
            )
        return DecodedImage(image, open_valid(file, reading))

    def segment(self, images: Sequence[DecodedImage]) -> list[Labelled]:
        """Label images, after reading the file if it has changed; see `SegmentationMemory.segment_all`."""
        self.refresh()
        memory = self.memory
        return [Labelled(found, memory) for found in memory.segment_all(images)]

    def encode(self, images: Sequence[DecodedImage]) -> list[Features]:
        """Encode images, after reading the file if it has changed."""
        self.refresh()
        memory, pixels = self.memory, [image.pixels for image in images]
        grids = memory.encode(pixels, memory.fit().probe.blocks)
        return [
            Features(grid.float().cpu(), self._global_token(image)) for grid, image in zip(grids, pixels, strict=True)
        ]

    def _global_token(self, image: UInt8[Tensor, "c h w"]) -> Float[Tensor, " e"]:
        encoder, factor = self.memory.encoder, self.memory.settings.factor(image.shape[1], image.shape[2])
        return encoder.global_tokens(encoder.resized(image, scale=factor)[None])[0].cpu()

    def refresh(self) -> None:
        """Read the file if it has changed. If that fails, the memory read last stays, and `problem` says why."""
        if self.is_current:
            return
        # The state is that before reading. No lock is needed: memory files are replaced as a whole.
        self._state = self._current_state()
        try:
            self.memory = self._load()
            self.problem = ""
            log.info("read %s again: %d examples", self.file, len(self.memory))
        except (InputError, OSError) as error:
            self.problem = str(error)
            log.warning("the memory has changed, but cannot be read; the previous one is still used: %s", error)

    def _check(self) -> None:
        """Read the file without the backbone: errors are found before the weights are loaded."""
        SegmentationMemory.load(self.file, None, device="cpu")

    def _load(self) -> SegmentationMemory:
        memory = SegmentationMemory.load(self.file, self._network, batch_size=self._batch_size)
        memory.fitted()
        return memory

    def _current_state(self) -> FileState | None:
        try:
            status = os.stat(self.file)  # noqa: PTH116
        except OSError:
            return None
        return FileState(status.st_size, status.st_mtime_ns)
