"""Pickles of plain data, read with a list of the only names that they may hold, so that no code of theirs runs.

PyTorch's own reader (`weights_only=True`) knows the opcodes of protocol 2 and its own files. This one reads the rest:
checkpoints that were saved with a later protocol, detectron2's `.pkl` of NumPy arrays, and the metadata of
`torch.distributed.checkpoint`.
"""

import argparse
import collections
import datetime
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import PurePosixPath, PureWindowsPath
from types import ModuleType
from typing import Any

import numpy as np
import torch

# The functions that rebuild arrays and tensors, by the names that pickles give them.
_NUMPY_ARRAY: Any = np.empty(0).__reduce__()[0]
_NUMPY_SCALAR: Any = np.float64(0).__reduce__()[0]


class Record:
    """Stands for an object whose class is of no interest: keeps its attributes, or else what it was made of."""

    def __init__(self, *content: Any) -> None:
        self.content = content

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"content": state})


def _function(function: Callable[..., Any]) -> Callable[[], Any]:
    """A new `partial` each time: a pickle may set attributes of what it names, and must not change the original."""
    return lambda: partial(function)


def _python_class(kind: type) -> Callable[[], type]:
    """A new subclass each time, for the same reason."""
    return lambda: type(kind.__name__, (kind,), {})


def _as_is(value: Any) -> Callable[[], Any]:
    """Types implemented in C, and values: their attributes cannot be set."""
    return lambda: value


_DTYPES = ("float16", "float32", "float64", "bfloat16", "uint8", "int8", "int16", "int32", "int64", "bool")
_DCP = "torch.distributed.checkpoint"
_ALLOWED: dict[str, Callable[[], Any]] = {
    "collections.OrderedDict": _as_is(collections.OrderedDict),
    "collections.defaultdict": _as_is(collections.OrderedDict),
    "builtins.set": _as_is(set),
    "builtins.slice": _as_is(slice),
    "argparse.Namespace": _python_class(argparse.Namespace),
    "torch._utils._rebuild_tensor_v2": _function(torch._utils._rebuild_tensor_v2),
    "torch._utils._rebuild_parameter": _function(torch._utils._rebuild_parameter),
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
    "numpy.ndarray": _as_is(np.ndarray),
    "numpy.dtype": _as_is(np.dtype),
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
    "torch.serialization._get_layout": _python_class(Record),
}


class PlainUnpickler(pickle.Unpickler):
    """Reads plain data, NumPy arrays and tensors, and refuses every other name.

    Raises:
        UnpicklingError: another name, given as `GLOBAL module.name`.
    """

    def find_class(self, module: str, name: str) -> Any:
        """What stands for a name of the list."""
        allowed = _ALLOWED.get(f"{module}.{name}")
        if allowed is None:
            raise pickle.UnpicklingError(f"GLOBAL {module}.{name}")
        return allowed()


def as_pickle_module() -> ModuleType:
    """For `torch.load`, whose `pickle_module` it can be."""
    module = ModuleType("plain_pickle")
    module.__dict__.update(
        Unpickler=PlainUnpickler,
        load=lambda file, **options: PlainUnpickler(file, **options).load(),
        UnpicklingError=pickle.UnpicklingError,
    )
    return module
