"""Memory files: features and labels of patches, with metadata."""

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from filelock import FileLock, Timeout
from torch import Tensor

from cribo.base.colours import Colour
from cribo.base.errors import DataError, InputError
from cribo.base.files import parse_json, require, require_regular, write_whole
from cribo.base.redaction import masked
from cribo.data.config import DEFAULT_READING, PIXEL_OPTIONS, Reading
from cribo.features.probes.examples import EncodedExample

log = logging.getLogger("cribo")

MEMORY_FORMAT = 2

_KIND = "cribo segmentation memory"
_ABOUT = ("name", "image", "labels", "labelled")
# The tensors of all examples are concatenated; the length of each is stored under these names.
_LENGTHS = {"features": "patches_of_example", "pixels": "pixels_of_example", "halves": "patches_of_example"}


@dataclass(frozen=True, kw_only=True)
class StoredExample(EncodedExample):
    """An example of a memory.

    Attributes:
        name: name for messages.
        image, labels: hashes of the pixels.
    """

    name: str
    image: str
    labels: str


@dataclass(frozen=True)
class Stored:
    """Content of a memory file.

    Attributes:
        encoder: identity of the encoder.
        source: source of the encoder's weights, for messages.
        classes: names of the classes; None if they are numbered.
        palette: colours of the classes; None if no example had a palette.
        settings: fields of `SegmentationSettings`.
        blocks: numbers of the L blocks.
        choice: the chosen probe (`Choice.as_json`); None if none was chosen yet.
        examples: the labelled patches of the examples.
    """

    encoder: str
    source: str
    classes: list[str] | None
    palette: list[Colour] | None
    settings: dict[str, Any]
    blocks: Sequence[int]
    choice: dict[str, Any] | None
    examples: Sequence[StoredExample]


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
    examples = stored.examples
    tensors = {name: torch.cat([getattr(example, name) for example in examples]) for name in _LENGTHS}
    tensors |= {
        lengths: torch.tensor([len(getattr(example, name)) for example in examples])
        for name, lengths in _LENGTHS.items()
    }
    about = {field.name: getattr(stored, field.name) for field in fields(Stored)} | {
        "format": MEMORY_FORMAT,
        "blocks": list(stored.blocks),
        "examples": [{name: getattr(example, name) for name in _ABOUT} for example in examples],
    }
    about = masked(about)
    about["sha256"] = _sha256(tensors, about)

    def save(part: Path) -> None:
        try:
            safetensors.torch.save_file(tensors, part, metadata={_KIND: json.dumps(about)})
        except safetensors.SafetensorError as error:
            raise OSError(f"cannot write {path}: {error}") from error

    write_whole(path, save)


def stored_reading(path: Path) -> Reading:
    """Return the reading options stored in a memory file, or the defaults if the file is damaged."""
    try:
        require_regular(path)
        with safetensors.safe_open(path, "pt") as file:
            found = json.loads((file.metadata() or {})[_KIND])["settings"]
        return Reading(**{name: found[name] for name in PIXEL_OPTIONS if name in found})
    except (safetensors.SafetensorError, OSError, ValueError, KeyError, TypeError, IndexError):
        return DEFAULT_READING


def read_memory(path: str | os.PathLike[str]) -> Stored:
    """Read a memory file written by `write_memory`.

    Raises:
        MissingData: the file does not exist.
        DataError: the file is damaged, is not a memory, or has another format version.
    """
    path = Path(path).expanduser()
    require(path)
    if path.is_dir():
        raise DataError(f"{path} is a folder, not a memory: give the file that cribo segment wrote with --memory")
    require_regular(path)
    try:
        with safetensors.safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            # Copied, since a mapped file that another process truncates would end this one by SIGBUS.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise DataError(f"{path} is not a memory, or is damaged ({error}): create it again") from error
    if _KIND not in metadata:
        held = ", ".join(sorted(tensors)[:4]) or "nothing"
        raise DataError(f"{path} contains {held}, not a memory of `cribo segment`: create one with --examples")
    about = parse_json(metadata[_KIND])
    if about["format"] > MEMORY_FORMAT:
        raise DataError(
            f"{path} has format {about['format']}, but this version of cribo reads format {MEMORY_FORMAT}: update cribo"
        )
    if about["format"] < MEMORY_FORMAT:
        raise DataError(f"{path} was created by an older version of cribo: create it again from the examples")
    if about.pop("sha256") != _sha256(tensors, about):
        raise DataError(f"{path} is damaged: its checksum does not match; copy it again, or create it again")
    if about["palette"] is not None:
        about["palette"] = [(r, g, b) for r, g, b in about["palette"]]
    parts = (tensors[name].split(tensors[lengths].tolist()) for name, lengths in _LENGTHS.items())
    about["examples"] = [
        StoredExample(**example, **dict(zip(_LENGTHS, own, strict=True)))
        for example, *own in zip(about["examples"], *parts, strict=True)
    ]
    return Stored(**{field.name: about[field.name] for field in fields(Stored)})


def _sha256(tensors: dict[str, Tensor], about: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name, values in sorted(tensors.items()):
        digest.update(f"{name} {values.dtype} {tuple(values.shape)}".encode())
        digest.update(values.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
