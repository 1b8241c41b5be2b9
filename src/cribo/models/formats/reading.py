"""Read weight files without running code in them; formats are recognised by their first bytes, not by name."""

import codecs
import contextlib
import pickle
import re
import tarfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from cribo.base import files
from cribo.base.errors import InputError, MissingPackage, UntrustedFile
from cribo.base.packages import install_command
from cribo.models.formats.distributed import METADATA, SHARD, read_distributed
from cribo.models.formats.plain_pickle import ForbiddenName, PlainUnpickler, forbidden_names
from cribo.models.formats.torch_files import is_tar, is_torch_file, read_torch_file
from cribo.models.hub.download import SHARD_INDEX

_AGAIN = "copy or download it again"
_HEADER_BYTES = 512
ORBAX_FILES = ("_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt")
_DEEPEST, _MOST_TENSORS = 100, 300_000
_LISTED = 5


def read_weights(path: Path, *, trust: bool = False) -> dict[str, Any]:
    """Read a weight file: safetensors, torch (zip or legacy), NumPy, Flax, or a pickle of plain data.

    The mapping is nested as saved; NumPy and Flax arrays are converted to tensors.

    Args:
        path: file with any suffix, an index of split weights (`model.safetensors.index.json`), or folder of
            `torch.distributed.checkpoint`.
        trust: allow code in a torch file to run. Use only with files from a trusted source.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is empty, damaged, a text or web page, or contains no mapping; or it contains Python
            objects (listed in the message) and `trust` is not set.
        ImportError: the file is Flax's and msgpack is not installed.
    """
    if (path / METADATA).is_file():
        return _read_or_explain(path, read_distributed)
    if path.is_dir() and any((path / name).exists() for name in ORBAX_FILES):
        raise InputError(
            f"{path} is an Orbax checkpoint (JAX): with orbax and flax installed, save its arrays with "
            'numpy.savez("weights.npz", **flax.traverse_util.flatten_dict('
            f'orbax.checkpoint.PyTreeCheckpointer().restore("{path.absolute()}"), sep="/")), and use that file'
        )
    if not path.is_file():
        raise FileNotFoundError(f"no weights at {path}")
    if path.name.endswith(SHARD_INDEX):
        return _read_split(path, trust=trust)
    with path.open("rb") as file:
        start = file.read(_HEADER_BYTES)
    if not start:
        raise InputError(f"{path} is empty: {_AGAIN}")
    _refuse_text(path, start)
    _refuse_archives(path, start)
    reader = _reader(path, start)
    content = _read_or_explain(path, partial(_read_torch, trust=trust) if reader is _read_torch else reader)
    if not isinstance(content, Mapping):
        raise InputError(f"{path} contains a {type(content).__name__}, expected a mapping of names to tensors")
    return {str(key): value for key, value in content.items()}


def _read_or_explain(path: Path, read: Callable[[Path], Any]) -> Any:
    try:
        return read(path)
    except (ImportError, InputError):
        raise
    except Exception as error:  # readers raise any kind of error on damaged files
        first_line = str(error).partition("\n")[0][:200]
        raise InputError(
            f"{path} is damaged or not a weight file ({type(error).__name__}: {first_line}): {_AGAIN}"
        ) from error


def flatten(content: Mapping[Any, Any]) -> dict[str, Tensor]:
    """Flatten a nested mapping of tensors; join its keys by slashes.

    Raises:
        ValueError: the mapping contains itself, is nested too deeply, or contains too many tensors.

    Example:
        >>> list(flatten({"teacher": {"norm.weight": torch.ones(2)}, "epoch": 3}))
        ['teacher/norm.weight']
    """
    found: dict[str, Tensor] = {}
    empty: set[int] = set()  # containers without tensors, which a file of a few bytes may repeat any number of times

    def descend(value: Any, path: str) -> None:
        if id(value) in empty:
            return
        if path.count("/") > _DEEPEST:
            raise InputError(
                f"the file contains itself or is nested more than {_DEEPEST} levels deep, at {path[:60]}...: save only "
                "the state dict"
            )
        if len(found) > _MOST_TENSORS:
            raise InputError(f"the file has more than {_MOST_TENSORS} tensors, some repeated: save only the state dict")
        before = len(found)
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
        if len(found) == before and isinstance(value, Mapping | list | tuple):
            empty.add(id(value))

    descend(content, "")
    return found


def read_json(path: Path) -> dict[str, Any]:
    """Read an object from a JSON file.

    Raises:
        ValueError: the file is damaged or does not contain an object.
    """
    content = files.read_json(path)
    if not isinstance(content, dict):
        raise InputError(f"{path} contains a {type(content).__name__}, expected an object")
    return content


def _read_split(index: Path, *, trust: bool) -> dict[str, Any]:
    """Read weights that transformers split into several files, in the folder of their index."""
    listed = read_json(index).get("weight_map")
    if not isinstance(listed, Mapping) or not listed or not all(isinstance(name, str) for name in listed.values()):
        raise InputError(f"{index} has no weight_map of names to files: {_AGAIN}")
    content: dict[str, Any] = {}
    for name in sorted(set(listed.values())):
        file = index.with_name(Path(name).name)
        if file.name != name or "\\" in name or name.endswith(SHARD_INDEX):
            raise InputError(f"{index} names the file {name!r}: it must be a file of weights in the same folder")
        if not file.is_file():
            raise FileNotFoundError(f"{index} names {name}, which is not in its folder: {_AGAIN}")
        read = read_weights(file, trust=trust)
        content |= {key: value for key, value in read.items() if listed.get(key) == name}
    if missing := [key for key in listed if key not in content]:
        raise InputError(f"{index} names {missing[0]}, which is not in {listed[missing[0]]}: {_AGAIN}")
    return content


def _refuse_text(path: Path, start: bytes) -> None:
    # safetensors and zip files have zeros near their start; msgpack and pickle do not start with valid UTF-8.
    text = start.lstrip(b"\xef\xbb\xbf \t\r\n")
    if re.match(rb"(?i)<(!doctype|html|head|\?xml|error)", text):
        raise InputError(
            f"{path} is a web page, probably an error or login page, not a weight file: download the file "
            "from the address to which the page links"
        )
    if text.startswith(b"version https://git-lfs"):
        raise InputError(f"{path} is a Git LFS pointer, not the file itself: fetch it with git lfs pull")
    if _is_text(start):
        raise InputError(f"{path} is a text file, not a weight file: give another file, or {_AGAIN}")


def _refuse_archives(path: Path, start: bytes) -> None:
    """Reject archives that contain a weight file; PyTorch's own files are zip files, its oldest ones tar files."""
    for magic, (kind, program) in _ARCHIVES.items():
        if start.startswith(magic):
            raise InputError(f"{path} is a {kind} archive: unpack it ({program}), and use the weight file in it")
    if start.startswith(b"\x89HDF\r\n"):
        raise InputError(f"{path} is an HDF5 file (Keras): save its arrays as .npz (numpy.savez)")
    if re.match(_PICTURES, start, flags=re.DOTALL):
        raise InputError(f"{path} is a picture, not a weight file: give the file of a network, or a timm name")
    for pattern, kind in _PROGRAMS.items():
        if re.match(pattern, start, flags=re.DOTALL):
            raise InputError(f"{path} is {kind}{_PROGRAM}")
    inside = _read_or_explain(path, partial(_archived_names, start=start))
    if any(name.endswith("/archive_format") for name in inside):
        raise InputError(f"{path} is a program of torch.export{_PROGRAM}")
    files = [name for name in inside if re.search(r"\.(pth|pt|pkl|ckpt|bin|safetensors)$", name)]
    if files and not any(name.endswith("data.pkl") for name in inside):
        raise InputError(f"{path} is an archive that contains {files[0]}: unpack it, and use that file")


def _archived_names(path: Path, start: bytes) -> list[str]:
    """List the files in a zip or tar file; none in other files."""
    if start[:4] == b"PK\x03\x04" and zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            return archive.namelist()
    if is_tar(path):
        with tarfile.open(path, "r:") as archive:
            return archive.getnames()
    return []


# ONNX: a version, and the name of a program or a graph.
_PROGRAMS = {
    rb"\x08[\x01-\x3f](?:\x12[\x01-\x7f][ -~]|\x3a)": "an ONNX model",
    rb".{4}TFL3": "a model of TensorFlow Lite",
    rb"GGUF": "a GGUF model",
}
_PICTURES = rb"\x89PNG\r\n|\xff\xd8\xff|GIF8[79]a|RIFF.{4}WEBP|II\*\0|MM\0\*|BM.{4}\0{4}"
_PROGRAM = ", not a weight file: give the checkpoint or the folder from which it was made"
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
        text = codecs.getincrementaldecoder("utf-8-sig")().decode(start)  # the last character may be incomplete
    except UnicodeDecodeError:
        return False
    return all(character.isprintable() or character.isspace() for character in text)


def _reader(path: Path, start: bytes) -> Any:
    if start[:2] == b"PK":
        try:
            with zipfile.ZipFile(path) as archive:
                names = archive.namelist()
        except zipfile.BadZipFile as error:
            raise InputError(f"{path} is truncated or damaged ({error}): {_AGAIN}") from error
        return _read_numpy if all(name.endswith(".npy") for name in names) else _read_torch
    if len(start) > 8 and start[8:9] == b"{":
        return safetensors.torch.load_file
    # A msgpack mapping; 0x80 would be an empty one, but pickles start with it.
    if 0x81 <= start[0] <= 0x8F or start[0] in (0xDE, 0xDF):
        return _read_flax
    return _read_torch


def _read_torch(path: Path, *, trust: bool) -> Any:
    is_torch = is_torch_file(path)
    if trust:
        return _read_trusted(path, is_torch)

    def read(unpickler: type[PlainUnpickler]) -> Any:
        if is_torch:
            return read_torch_file(path, unpickler)
        with path.open("rb") as file:
            return unpickler(file, encoding="latin1").load()

    try:
        return read(PlainUnpickler)
    except ForbiddenName as error:
        if zipfile.is_zipfile(path):  # PyTorch's own reader supports further kinds of tensors
            with contextlib.suppress(Exception):
                return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        names = forbidden_names(read) or [str(error)]
        _refuse_shards(path, names)
        listed = ", ".join(names[:_LISTED]) + (", ..." if len(names) > _LISTED else "")
        raise UntrustedFile(
            f"{path} contains Python objects besides tensors ({listed}), and reading them could run code: "
            "if you trust its source, allow it with --trust (trust=True in Python), or save only its state dict"
        ) from error


def _read_trusted(path: Path, is_torch: bool) -> Any:
    """Read a file whose code may run."""
    try:
        if not is_torch:
            with path.open("rb") as file:
                return pickle.Unpickler(file, encoding="latin1").load()
        return torch.load(path, map_location="cpu", weights_only=False, mmap=zipfile.is_zipfile(path))
    except ModuleNotFoundError as error:
        raise UntrustedFile(
            f"{path} contains objects of {error.name}, which is not installed: install it, or save only the file's "
            "state dict where it is installed"
        ) from error


def _refuse_shards(path: Path, names: Sequence[str]) -> None:
    """Reject sharded tensors, in which each rank of FSDP training saves its part of a network."""
    if not any("_shard." in name or ".distributed.tensor" in name or "DTensor" in name for name in names):
        return
    raise UntrustedFile(f"{path} {SHARD}")


def _read_numpy(path: Path) -> dict[str, Tensor]:
    with files.open_arrays(path) as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays.files}


def _read_flax(path: Path) -> Any:
    try:
        import msgpack
    except ModuleNotFoundError as error:
        raise MissingPackage(
            f"{path} is a checkpoint of Flax, which needs msgpack: {install_command('jax')}, or save its parameters as "
            ".npz"
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
