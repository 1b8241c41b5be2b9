"""Read files of `torch.save` without running code from them.

`torch.load` runs TorchScript programs. Here, PyTorch's own reader of archives lists and reads the records, and programs
are refused: Python's `zipfile` may find another list of records in the same file.
"""

import contextlib
import io
import pickle
import struct
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.serialization import MAGIC_NUMBER

from cribo.base.errors import InputError
from cribo.models.formats.plain_pickle import PlainUnpickler, Storage

_ARCHIVE = b"PK"
_DATA, _ORDER = "data.pkl", "byteorder"
_COMPRESSED = "is a compressed archive: unpack it, and archive it again with zip -0"
_TORCHSCRIPT = ("constants.pkl", "code/")


def is_torch_file(path: Path) -> bool:
    """Whether a file was written by `torch.save`; other pickles contain NumPy arrays."""
    with path.open("rb") as file:
        if file.read(len(_ARCHIVE)) == _ARCHIVE:
            return True
        file.seek(0)
        with contextlib.suppress(Exception):
            if PlainUnpickler(file).load() == MAGIC_NUMBER:
                return True
    return is_tar(path)


def is_tar(path: Path) -> bool:
    """Whether a file is an uncompressed tar file; a compressed one of a few bytes may be of any size."""
    try:
        with tarfile.open(path, "r:"):
            return True
    except (tarfile.TarError, OSError, ValueError):
        return False


def read_torch_file(path: Path, unpickler: type[PlainUnpickler] = PlainUnpickler) -> Any:
    """Read the content of a file of `torch.save`.

    Tensors of archives are memory-mapped, so that only the network in use is read from a training checkpoint.

    Args:
        path: of the file.
        unpickler: reads its pickles.

    Raises:
        ForbiddenName: the file names an object that is not plain data.
        InputError: the file is a program, is compressed, or has the format of PyTorch 0.1.
        Exception: the file is damaged; the class depends on the damage.
    """
    with path.open("rb") as file:
        start = file.read(len(_ARCHIVE))
    if start == _ARCHIVE:
        return _read_archive(path, unpickler)
    if is_tar(path):
        raise InputError(
            f"{path} is a tar file of PyTorch 0.1: read it with torch.load where you trust its source, save its state "
            "dict again with torch.save, and use that file"
        )
    return _read_older(path, unpickler)


def _read_archive(path: Path, unpickler: type[PlainUnpickler]) -> Any:
    size, entries = path.stat().st_size, _entries(path)
    if any(entry.file_size > size for entry in entries):  # which PyTorch's reader might unpack
        raise InputError(f"{path} {_COMPRESSED}")
    archive: Any = torch._C.PyTorchFileReader(str(path))
    names = archive.get_all_records()
    if any(name.startswith(_TORCHSCRIPT) for name in names):
        raise InputError(f"{path} is a TorchScript program, not a weight file: save its module's state dict")
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise InputError(f"{path} {_COMPRESSED}")
    for name in (_DATA, _ORDER):
        if name in names and archive.get_record_size(name) > size:
            raise pickle.UnpicklingError(f"{name} is larger than its file")
    order = archive.get_record(_ORDER) if _ORDER in names else b"little"
    whole: Any = torch.UntypedStorage.from_file(str(path), False, size)
    storages: dict[str, torch.UntypedStorage] = {}

    def storage(identity: tuple[Any, ...]) -> Storage:
        _, kind, key, _, count = identity
        name, length = f"data/{key}", count * kind.dtype.itemsize
        if key not in storages:
            start = archive.get_record_offset(name)
            if length != archive.get_record_size(name) or not 0 <= start <= size - length:
                raise pickle.UnpicklingError(f"{name} does not have the size {length}")
            storages[key] = whole[start : start + length]
            if order.decode() != sys.byteorder:
                storages[key].byteswap(kind.dtype)
        return Storage(storages[key], kind.dtype)

    return _unpickle(io.BytesIO(archive.get_record(_DATA)), unpickler, storage)


def _entries(path: Path) -> list[zipfile.ZipInfo]:
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.infolist()
    except Exception:  # of a damaged list of files, which PyTorch's reader reports
        return []


def _read_older(path: Path, unpickler: type[PlainUnpickler]) -> Any:
    """Read the format before PyTorch 1.6: pickles, then each storage after its length."""
    size = path.stat().st_size
    storages: dict[str, Storage] = {}

    def storage(identity: tuple[Any, ...]) -> Storage:
        _, kind, key, _, count, view = identity
        if key not in storages:
            if (
                not 0
                <= count * kind.dtype.itemsize
                <= size - sum(other.content.nbytes() for other in storages.values())
            ):
                raise pickle.UnpicklingError(f"the storage {key} of {count} numbers is larger than its file")
            storages[key] = Storage(torch.UntypedStorage(count * kind.dtype.itemsize), kind.dtype)
        if view is None:
            return storages[key]
        _, start, length = (value * kind.dtype.itemsize if isinstance(value, int) else value for value in view)
        return Storage(storages[key].content[start : start + length], kind.dtype)

    with path.open("rb", buffering=2**20) as file:
        for _ in range(3):  # a magic number, the version of the format, and types of the machine
            unpickler(file).load()
        content = _unpickle(file, unpickler, storage)
        keys = unpickler(file).load()
        if set(keys) != storages.keys():
            raise pickle.UnpicklingError("the file does not contain every storage")
        for key in keys:
            (count,) = struct.unpack("<q", file.read(8))
            numbers, dtype = storages[key]
            if count * dtype.itemsize != numbers.nbytes():
                raise pickle.UnpicklingError(f"the storage {key} does not have {count} numbers")
            place: Any = torch.empty(0, dtype=torch.uint8).set_(numbers).numpy()
            if cast("io.BufferedReader", file).readinto(place) != len(place):
                raise pickle.UnpicklingError(f"the storage {key} is incomplete")
            if sys.byteorder != "little":
                numbers.byteswap(dtype)
    return content


def _unpickle(file: IO[bytes], unpickler: type[PlainUnpickler], storage: Callable[[tuple[Any, ...]], Any]) -> Any:
    reader: Any = unpickler(file, encoding="utf-8")
    reader.persistent_load = storage
    return reader.load()
