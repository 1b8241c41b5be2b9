"""Read pickles of plain data with a fixed table of names, so that nothing is imported and no code in them runs.

PyTorch's reader (`weights_only=True`) supports the opcodes of protocol 2 and its own objects. This one reads tensors,
and options, paths, dates and scores that training scripts store with the weights, checkpoints of later protocols,
detectron2's `.pkl` of NumPy arrays, and the metadata of `torch.distributed.checkpoint`.
"""

import argparse
import collections
import contextlib
import datetime
import math
import pickle
import pickletools
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import PurePosixPath, PureWindowsPath
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch._utils import _rebuild_parameter

# The functions that rebuild arrays and tensors.
_NUMPY_ARRAY: Any = np.empty(0).__reduce__()[0]
_NUMPY_SCALAR: Any = np.float64(0).__reduce__()[0]
_NUMPY_BUFFER: Any = np.zeros(1).__reduce_ex__(5)[0]


class Record:
    """Placeholder for an object of any class; keeps its attributes or constructor arguments."""

    def __init__(self, *content: Any) -> None:
        self.content = content

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"content": state})


def _function(function: Callable[..., Any]) -> Callable[[], Any]:
    """Wrap a function in a new `partial` each time: a pickle may set attributes, which must not change the original."""
    return lambda: partial(function)


def _python_class(kind: type) -> Callable[[], type]:
    """Create a new subclass each time, for the same reason."""
    return lambda: type(kind.__name__, (kind,), {})


def _bytearray(content: str | bytes = b"", encoding: str = "latin1") -> bytearray:
    """Accept content only: `bytearray(n)` would allocate n bytes."""
    return bytearray(content.encode(encoding) if isinstance(content, str) else bytes(memoryview(content)))


def _dtype(name: str | np.dtype, align: bool = False, copy: bool = True) -> np.dtype:
    """Return a copy: NumPy shares its dtypes, and a pickle may set the state of objects."""
    return np.dtype(name, bool(align), True)


class StorageKind(NamedTuple):
    """Type of the numbers in a storage, which a pickle of PyTorch names by class, such as torch.FloatStorage."""

    dtype: torch.dtype


class Storage(NamedTuple):
    """The bytes of tensors, and the type of their numbers."""

    content: torch.UntypedStorage
    dtype: torch.dtype


def _storage_kind(dtype: torch.dtype) -> Callable[[], StorageKind]:
    return lambda: StorageKind(dtype)


def _tensor(storage: Storage, offset: int, size: Sequence[int], stride: Sequence[int], *rest: Any) -> Tensor:
    """Return a view of a storage; PyTorch would enlarge a storage that is too small."""
    last = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    count = storage.content.nbytes() // storage.dtype.itemsize
    if min(offset, *size, *stride, 0) < 0 or (math.prod(size) > 0 and last >= count):
        raise pickle.UnpicklingError(f"a tensor of size {tuple(size)} exceeds its storage of {count} numbers")
    return torch.empty(0, dtype=storage.dtype).set_(storage.content, offset, tuple(size), tuple(stride))


def _as_is(value: Any) -> Callable[[], Any]:
    """For values and types implemented in C, whose attributes cannot be set."""
    return lambda: value


_DTYPES = (
    *("float16", "float32", "float64", "bfloat16", "float8_e4m3fn", "float8_e5m2", "complex64", "complex128"),
    *("uint8", "int8", "int16", "int32", "int64", "bool", "half", "float", "double", "int", "long"),
)
_STORAGES = {
    "Double": torch.float64,
    "Float": torch.float32,
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Long": torch.int64,
    "Int": torch.int32,
    "Short": torch.int16,
    "Char": torch.int8,
    "Byte": torch.uint8,
    "Bool": torch.bool,
    "ComplexDouble": torch.complex128,
    "ComplexFloat": torch.complex64,
}
_DCP = "torch.distributed.checkpoint"
# Types that a `defaultdict` calls for missing keys; it is read as a plain dictionary.
_FACTORIES = ("bool", "bytes", "complex", "dict", "float", "frozenset", "int", "list", "object", "str", "tuple")
# Options and records of other libraries that training scripts store with the weights. MMEngine's history refers to its
# methods by `getattr`, which is read as a placeholder.
_PLACEHOLDERS = (
    *("torch.serialization._get_layout", "torch.Tensor", "torch.nn.parameter.Parameter"),
    *("builtins.getattr", "types.SimpleNamespace", "typing.Any", "collections.Counter"),
    "mmengine.logging.history_buffer.HistoryBuffer",
    *("omegaconf.dictconfig.DictConfig", "omegaconf.listconfig.ListConfig", "omegaconf.nodes.AnyNode"),
    *("omegaconf.base.ContainerMetadata", "omegaconf.base.Metadata"),
)
_MAPPINGS = (
    *("yacs.config.CfgNode", "fvcore.common.config.CfgNode", "detectron2.config.config.CfgNode", "easydict.EasyDict"),
    *("addict.addict.Dict", "mmcv.utils.config.ConfigDict", "mmengine.config.config.ConfigDict"),
)
_ALLOWED: dict[str, Callable[[], Any]] = {
    "collections.OrderedDict": _as_is(collections.OrderedDict),
    "collections.defaultdict": _function(lambda factory=None: {}),
    **{f"builtins.{name}": _python_class(Record) for name in _FACTORIES},
    "builtins.bytearray": _function(_bytearray),
    "builtins.set": _as_is(set),
    "builtins.slice": _as_is(slice),
    "argparse.Namespace": _python_class(argparse.Namespace),
    **{f"torch.{name}Storage": _storage_kind(dtype) for name, dtype in _STORAGES.items()},
    "torch.storage.UntypedStorage": _storage_kind(torch.uint8),
    "torch._utils._rebuild_tensor": _function(_tensor),
    "torch._utils._rebuild_tensor_v2": _function(_tensor),
    "torch._utils._rebuild_parameter": _function(_rebuild_parameter),
    "torch._utils._rebuild_parameter_with_state": _function(lambda data, *rest: data),
    "torch._tensor._rebuild_from_type_v2": _function(lambda function, kind, arguments, state: function(*arguments)),
    "torch.Size": _as_is(torch.Size),
    **{f"torch.{name}": _as_is(getattr(torch, name)) for name in _DTYPES},
    "torch.device": _as_is(torch.device),
    "_codecs.encode": _function(lambda text, encoding: str(text).encode(encoding)),
    **{f"datetime.{name}": _as_is(getattr(datetime, name)) for name in ("datetime", "date", "time", "timedelta")},
    "datetime.timezone": _as_is(datetime.timezone),
    **{
        f"numpy.{core}.multiarray.{name}": _function(function)  # before and since NumPy 2
        for core in ("core", "_core")
        for name, function in (("_reconstruct", _NUMPY_ARRAY), ("scalar", _NUMPY_SCALAR))
    },
    **{
        f"numpy.{core}.numeric._frombuffer": _function(_NUMPY_BUFFER)  # protocol 5
        for core in ("core", "_core")
    },
    "numpy.ndarray": _as_is(np.ndarray),
    "numpy.dtype": _function(_dtype),
    **{
        f"{module}.{prefix}{system}Path": _python_class(kind)
        for module in ("pathlib", "pathlib._local")  # before and since Python 3.13
        for prefix in ("", "Pure")
        for system, kind in (("Posix", PurePosixPath), ("Windows", PureWindowsPath))
    },
    **{
        f"{_DCP}.{name}": _python_class(Record)
        for name in (
            *("metadata.Metadata", "metadata.MetadataIndex", "metadata.StorageMeta", "metadata.TensorProperties"),
            *("metadata.TensorStorageMetadata", "metadata.BytesStorageMetadata", "metadata.ChunkStorageMetadata"),
            *("metadata._MEM_FORMAT_ENCODING", "filesystem._StorageInfo"),
        )
    },
    **{name: _python_class(Record) for name in _PLACEHOLDERS},
    **{name: _python_class(dict) for name in _MAPPINGS},
}


class PlainUnpickler(pickle.Unpickler):
    """Unpickler of plain data, NumPy arrays and tensors that rejects every other name.

    Raises:
        ForbiddenName: the pickle contains another name, `module.name`; nothing is imported.
        UnpicklingError: a memo index is larger than the length of the pickle allows; Python would allocate memory.
    """

    def __init__(self, file: IO[bytes], **options: Any) -> None:
        super().__init__(file, **options)
        self._file = file

    def load(self) -> Any:
        """Read one object."""
        start = self._file.tell()
        for count, (opcode, argument, _) in enumerate(pickletools.genops(self._file)):
            if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and int(argument or 0) > max(count, 255):
                raise pickle.UnpicklingError(f"memo index {argument} after {count} steps")
            if opcode.name in ("EXT1", "EXT2", "EXT4"):  # looked up in a table of the program, not of this module
                raise pickle.UnpicklingError(f"the opcode {opcode.name} is not supported")
        self._file.seek(start)
        return super().load()

    def find_class(self, module: str, name: str) -> Any:
        """Look up the replacement of an allowed name."""
        full_name = f"{module}.{name}".replace("__builtin__.", "builtins.").replace("builtins.long", "builtins.int")
        allowed = _ALLOWED.get(full_name)
        if allowed is None:
            raise ForbiddenName(full_name)
        return allowed()


class ForbiddenName(pickle.UnpicklingError):
    """A pickle names a class or function that is not allowed."""


def forbidden_names(read: Callable[[type[PlainUnpickler]], Any]) -> list[str]:
    """Return the forbidden names in a file, as far as `read` can read it without them."""
    names: list[str] = []

    class Lister(PlainUnpickler):
        def find_class(self, module: str, name: str) -> Any:
            try:
                return super().find_class(module, name)
            except ForbiddenName as error:
                names.append(str(error))
                return _python_class(Record)()

    with contextlib.suppress(Exception):
        read(Lister)
    return sorted(set(names))
