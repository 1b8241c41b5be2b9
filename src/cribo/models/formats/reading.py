"""Files of weights, read without running code in them and recognised by their first bytes, never by their name."""

import codecs
import contextlib
import json
import pickle
import re
import tarfile
import warnings
import zipfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from cribo.errors import InputError, MissingPackage
from cribo.models.formats.distributed import METADATA, read_distributed
from cribo.models.formats.plain_pickle import ForbiddenName, PlainUnpickler, as_pickle_module, forbidden_names
from cribo.models.formats.table import SHARD

_AGAIN = "copy or download it again"
_HEADER_BYTES = 512
ORBAX_FILES = ("_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt")
_DEEPEST = 100
_LISTED = 5


def read_weights(path: Path, *, trust: bool = False) -> dict[str, Any]:
    """Read a file of weights: safetensors, torch (zip or legacy), NumPy, Flax, or a pickle of plain data.

    Args:
        path: the file, whose suffix does not matter; or a folder of `torch.distributed.checkpoint`.
        trust: run the code that a torch file may hold beside its tensors. Only for files whose maker you trust.

    Returns:
        The mapping in the file, as it was saved: nested, arrays of NumPy and Flax as tensors.

    Raises:
        FileNotFoundError: no such file.
        ValueError: it is empty, damaged, a text or web page, or no mapping; or it holds Python objects (which are
            named) and `trust` is not set.
        ImportError: a Flax file, and msgpack is not installed.
    """
    if (path / METADATA).is_file():
        return _read_or_explain(path, read_distributed)
    if path.is_dir() and any((path / name).exists() for name in ORBAX_FILES):
        raise InputError(
            f"{path} is a checkpoint of Orbax (JAX): where orbax and flax are installed, save its arrays with "
            'numpy.savez("weights.npz", **flax.traverse_util.flatten_dict('
            f'orbax.checkpoint.PyTreeCheckpointer().restore("{path.absolute()}"), sep="/")), and give that file'
        )
    if not path.is_file():
        raise FileNotFoundError(f"no weights at {path}")
    with path.open("rb") as file:
        start = file.read(_HEADER_BYTES)
    if not start:
        raise InputError(f"{path} is empty: {_AGAIN}")
    _refuse_text(path, start)
    _refuse_archives(path, start)
    reader = _reader(path, start)
    content = _read_or_explain(path, partial(_read_torch, trust=trust) if reader is _read_torch else reader)
    if not isinstance(content, Mapping):
        raise InputError(f"{path} holds a {type(content).__name__}, expected a mapping of names to tensors")
    return {str(key): value for key, value in content.items()}


def _read_or_explain(path: Path, read: Callable[[Path], Any]) -> Any:
    try:
        return read(path)
    except (ImportError, UntrustedFile):
        raise
    except Exception as error:  # a damaged file can fail anywhere in its reader
        first_line = str(error).partition("\n")[0][:200]
        raise InputError(
            f"{path} is damaged or is no file of weights ({type(error).__name__}: {first_line}): {_AGAIN}"
        ) from error


def flatten(content: Mapping[Any, Any]) -> dict[str, Tensor]:
    """Flatten a nested mapping of tensors; join its keys by slashes.

    Raises:
        ValueError: the mapping holds itself, or is nested very deep.

    Example:
        >>> list(flatten({"teacher": {"norm.weight": torch.ones(2)}, "epoch": 3}))
        ['teacher/norm.weight']
    """
    found: dict[str, Tensor] = {}

    def descend(value: Any, path: str) -> None:
        if path.count("/") > _DEEPEST:
            raise InputError(
                f"the file holds itself, or is nested more than {_DEEPEST} levels deep, at {path[:60]}...: save only "
                "its state dict"
            )
        if isinstance(value, Tensor):
            found[path] = value
        elif isinstance(value, np.ndarray) and value.dtype.kind in "fiub":
            found[path] = torch.from_numpy(np.ascontiguousarray(value))
        elif isinstance(value, Mapping):
            for key, inner in value.items():
                descend(inner, f"{path}/{key}" if path else str(key))
        elif isinstance(value, list | tuple):
            for index, inner in enumerate(value):
                descend(inner, f"{path}/{index}" if path else str(index))

    descend(content, "")
    return found


def read_json(path: Path) -> dict[str, Any]:
    """Read an object from a JSON file.

    Raises:
        ValueError: the file is damaged or holds no object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path} is damaged ({error}): {_AGAIN}") from error
    if not isinstance(content, dict):
        raise InputError(f"{path} holds a {type(content).__name__}, expected an object")
    return content


class UntrustedFile(InputError):
    """A file that needs to run code to be read, which is not allowed or not possible."""


def _refuse_text(path: Path, start: bytes) -> None:
    # safetensors and zip files have zeros near their start; msgpack and pickle start as no UTF-8 does.
    text = start.lstrip(b"\xef\xbb\xbf \t\r\n")
    if re.match(rb"(?i)<(!doctype|html|head|\?xml|error)", text):
        raise InputError(
            f"{path} is a web page, probably of an error or a login, and no file of weights: download it again, "
            "from the address that the page itself links to"
        )
    if text.startswith(b"version https://git-lfs"):
        raise InputError(f"{path} is a pointer of Git LFS and not the file it stands for: fetch it with git lfs pull")
    if _is_text(start):
        raise InputError(f"{path} is a text file and no file of weights: {_AGAIN}")


def _refuse_archives(path: Path, start: bytes) -> None:
    """Refuse archives that contain a file of weights; PyTorch's own files are zip files, its oldest ones tar files."""
    for magic, (kind, program) in _ARCHIVES.items():
        if start.startswith(magic):
            raise InputError(f"{path} is a {kind} archive: unpack it ({program}), and give the file of weights in it")
    if start.startswith(b"\x89HDF\r\n"):
        raise InputError(f"{path} is an HDF5 file, as Keras writes it: save its arrays as .npz (numpy.savez)")
    inside: list[str] = []
    if start[:4] == b"PK\x03\x04" and zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            inside = archive.namelist()
    elif tarfile.is_tarfile(path):
        with tarfile.open(path) as archive:
            inside = archive.getnames()
    files = [name for name in inside if re.search(r"\.(pth|pt|pkl|ckpt|bin|safetensors)$", name)]
    if files and not any(name.endswith("data.pkl") for name in inside):
        raise InputError(f"{path} is an archive that holds {files[0]}: unpack it, and give that file")


_ARCHIVES = {
    b"\x1f\x8b": ("gzip", "tar xzf, gunzip"),
    b"BZh": ("bzip2", "tar xjf, bunzip2"),
    b"\xfd7zXZ\0": ("xz", "tar xJf, unxz"),
    b"\x28\xb5\x2f\xfd": ("Zstandard", "tar --zstd -xf, unzstd"),
    b"7z\xbc\xaf\x27\x1c": ("7-Zip", "7z x"),
    b"Rar!\x1a\x07": ("RAR", "unrar x"),
}


def _is_text(start: bytes) -> bool:
    try:
        text = codecs.getincrementaldecoder("utf-8-sig")().decode(start)  # its last character may be cut off
    except UnicodeDecodeError:
        return False
    return all(character.isprintable() or character.isspace() for character in text)


def _reader(path: Path, start: bytes) -> Any:
    if start[:2] == b"PK":
        try:
            with zipfile.ZipFile(path) as archive:
                names = archive.namelist()
        except zipfile.BadZipFile as error:
            raise InputError(f"{path} is cut off or damaged ({error}): {_AGAIN}") from error
        if any("/code/" in name for name in names):
            raise InputError(f"{path} is a TorchScript program and no file of weights: save its module's state dict")
        return _read_numpy if all(name.endswith(".npy") for name in names) else _read_torch
    if len(start) > 8 and start[8:9] == b"{":
        return safetensors.torch.load_file
    # A msgpack mapping; 0x80 alone would be an empty one, and is how pickles start.
    if 0x81 <= start[0] <= 0x8F or start[0] in (0xDE, 0xDF):
        return _read_flax
    return _read_torch


def _read_torch(path: Path, *, trust: bool) -> Any:
    if trust:
        try:
            return _load(path, pickle, _is_torch(path))
        except ModuleNotFoundError as error:
            raise UntrustedFile(
                f"{path} holds objects of {error.name}, which is not installed: install it, or save only the file's "
                "state dict where it is"
            ) from error
    is_torch = _is_torch(path)
    if is_torch:
        # PyTorch's own safe reader knows more kinds of tensors, ours more of what lies beside them.
        with contextlib.suppress(Exception), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Detected pickle protocol")
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    try:
        return _load(path, as_pickle_module(), is_torch)
    except ForbiddenName as error:
        names = forbidden_names(lambda module: _load(path, module, is_torch)) or [str(error)]
        _refuse_shards(path, names)
        listed = ", ".join(names[:_LISTED]) + (", ..." if len(names) > _LISTED else "")
        raise UntrustedFile(
            f"{path} holds Python objects beside its tensors ({listed}) and is not read, because that could run code "
            "in it: if you trust its maker, allow it with --trust (trust=True in Python), or save only its state dict"
        ) from error


def _is_torch(path: Path) -> bool:
    """Whether a pickle was written by `torch.save`; other pickles contain NumPy arrays."""
    if zipfile.is_zipfile(path):
        return True
    with path.open("rb") as file, contextlib.suppress(Exception):
        return PlainUnpickler(file).load() == torch.serialization.MAGIC_NUMBER or tarfile.is_tarfile(path)
    return tarfile.is_tarfile(path)


def _load(path: Path, pickle_module: Any, is_torch: bool) -> Any:
    if not is_torch:
        with path.open("rb") as file:
            return pickle_module.Unpickler(file, encoding="latin1").load()
    # Mapped, so that of a training checkpoint only the network that is used comes into memory. Older files cannot be.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected pickle protocol")
        return torch.load(
            path, map_location="cpu", weights_only=False, pickle_module=pickle_module, mmap=zipfile.is_zipfile(path)
        )


def _refuse_shards(path: Path, names: Sequence[str]) -> None:
    """Refuse sharded tensors, in which one rank of FSDP training saves its part of a network."""
    if not any("_shard." in name or ".distributed.tensor" in name or "DTensor" in name for name in names):
        return
    raise UntrustedFile(f"{path} {SHARD}")


def _read_numpy(path: Path) -> dict[str, Tensor]:
    with np.load(path, allow_pickle=False) as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays.files}


def _read_flax(path: Path) -> Any:
    try:
        import msgpack
    except ImportError as error:
        raise MissingPackage(
            f"{path} is a checkpoint of Flax, which needs msgpack: pip install msgpack, or save its parameters as .npz"
        ) from error
    return msgpack.unpackb(path.read_bytes(), ext_hook=_flax_array, raw=False, strict_map_key=False)


def _flax_array(code: int, data: bytes) -> Any:
    """Unpack a Flax array: extension 1 contains its shape, dtype name and bytes."""
    import msgpack

    if code != 1:
        return None
    shape, name, content = msgpack.unpackb(data, raw=False)
    if name == "bfloat16":  # NumPy has none
        return torch.frombuffer(bytearray(content), dtype=torch.bfloat16).reshape(shape)
    return torch.from_numpy(np.frombuffer(content, dtype=name).reshape(shape).copy())
