"""Memory files: features and labels of patches, with metadata."""

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import safetensors.torch
import torch
from filelock import FileLock, Timeout
from jaxtyping import Float, Int
from torch import Tensor

from cribo.data.images import DataError, require
from cribo.data.segmentation import Colour
from cribo.errors import InputError
from cribo.files import write_whole

log = logging.getLogger("cribo")

MEMORY_FORMAT = 2

_KIND = "cribo segmentation memory"


class StoredExample(NamedTuple):
    """Metadata of an example.

    Attributes:
        name: name for messages.
        image, labels: hashes of the pixels.
    """

    name: str
    image: str
    labels: str

    def is_same(self, other: "StoredExample") -> bool:
        """Whether image and labels are equal."""
        return (self.image, self.labels) == (other.image, other.labels)


@dataclass(frozen=True)
class Stored:
    """Content of a memory file.

    Attributes:
        encoder: identity of the encoder.
        source: source of the encoder's weights, for messages.
        classes: names of the classes; None if they are numbered.
        palette: colours of the classes; None if no example had a palette.
        settings: fields of `SegmentationSettings`.
        examples: metadata of the examples.
        features: features of the patches of each example, for each block.
        pixels: rows of patch, class and number of pixels, for each example.
        halves: 1 for patches in the right half of the image, else 0, for each example.
        blocks: numbers of the L blocks.
        choice: the chosen probe (`Choice.as_json`); None if none was chosen yet.
    """

    encoder: str
    source: str
    classes: list[str] | None
    palette: list[Colour] | None
    settings: dict[str, Any]
    examples: Sequence[StoredExample]
    features: Sequence[Float[Tensor, "n l d"]]
    pixels: Sequence[Int[Tensor, "s 3"]]
    halves: Sequence[Int[Tensor, " n"]]
    blocks: Sequence[int]
    choice: dict[str, Any] | None


@contextmanager
def memory_lock(path: Path) -> Iterator[None]:
    """Lock a memory file while it is changed; other commands block until the lock is released."""
    lock = FileLock(path.with_name(f".{path.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        log.info("waiting for another command that is changing %s", path)
        lock.acquire()
    except (NotImplementedError, OSError):
        log.warning("cannot lock %s: make sure that no other command changes it", path)
    try:
        yield
    finally:
        lock.release()


def write_memory(path: str | os.PathLike[str], stored: Stored) -> None:
    """Write a memory file atomically.

    Raises:
        ValueError: the memory has no examples.
        OSError: the file cannot be written.
    """
    path = Path(path)
    if not stored.examples:
        raise InputError(f"cannot write an empty memory to {path}: add a labelled image first")
    tensors = {
        "features": torch.cat(list(stored.features)),
        "pixels": torch.cat(list(stored.pixels)),
        "halves": torch.cat(list(stored.halves)),
        "patches_of_example": torch.tensor([len(part) for part in stored.features]),
        "pixels_of_example": torch.tensor([len(part) for part in stored.pixels]),
    }
    about = {
        "format": MEMORY_FORMAT,
        "encoder": stored.encoder,
        "source": stored.source,
        "classes": stored.classes,
        "palette": stored.palette,
        "settings": stored.settings,
        "blocks": list(stored.blocks),
        "choice": stored.choice,
        "examples": [example._asdict() for example in stored.examples],
    }
    about["sha256"] = _sha256(tensors, about)

    def save(part: Path) -> None:
        try:
            safetensors.torch.save_file(tensors, part, metadata={_KIND: json.dumps(about)})
        except safetensors.SafetensorError as error:
            raise OSError(f"cannot write {path}: {error}") from error

    write_whole(path, save)


def read_memory(path: str | os.PathLike[str]) -> Stored:
    """Read a memory file written by `write_memory`.

    Raises:
        MissingData: the file does not exist.
        DataError: the file is damaged, is not a memory, or has another format version.
    """
    path = Path(path).expanduser()
    require(path)
    try:
        with safetensors.safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise DataError(f"{path} is not a memory, or is damaged ({error}): create it again") from error
    if _KIND not in metadata:
        held = ", ".join(sorted(tensors)[:4]) or "nothing"
        raise DataError(f"{path} contains {held}, not a memory of `cribo segment`: create one with --examples")
    about = json.loads(metadata[_KIND])
    if about["format"] > MEMORY_FORMAT:
        raise DataError(
            f"{path} has format {about['format']}, but this version of cribo reads format {MEMORY_FORMAT}: update cribo"
        )
    if about["format"] < MEMORY_FORMAT:
        raise DataError(f"{path} was created by an older version of cribo: create it again from the examples")
    if about.pop("sha256") != _sha256(tensors, about):
        raise DataError(f"{path} is damaged: its checksum does not match; copy it again, or create it again")
    return Stored(
        encoder=about["encoder"],
        source=about["source"],
        classes=about["classes"],
        palette=None if about["palette"] is None else [(r, g, b) for r, g, b in about["palette"]],
        settings=about["settings"],
        examples=[StoredExample(**example) for example in about["examples"]],
        features=tensors["features"].split(tensors["patches_of_example"].tolist()),
        pixels=tensors["pixels"].split(tensors["pixels_of_example"].tolist()),
        halves=tensors["halves"].split(tensors["patches_of_example"].tolist()),
        blocks=about["blocks"],
        choice=about["choice"],
    )


def _sha256(tensors: dict[str, Tensor], about: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name, values in sorted(tensors.items()):
        digest.update(f"{name} {values.dtype} {tuple(values.shape)}".encode())
        digest.update(values.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
