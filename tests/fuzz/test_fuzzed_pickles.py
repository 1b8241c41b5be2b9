"""Malicious pickles: only listed functions of plain data are called, and no shared state changes."""

import argparse
import collections
import datetime
import io
import pickle
import pickletools
import struct
import sys
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.fuzz.profile import fuzzed
from torch import _utils

from cribo.models.formats import plain_pickle
from cribo.models.formats.plain_pickle import ForbiddenName, PlainUnpickler, Record
from cribo.models.formats.reading import flatten, read_weights

FUZZED = fuzzed()
LISTED = sorted(plain_pickle._ALLOWED)
FORBIDDEN = [
    *("os.system", "posix.system", "builtins.eval", "builtins.exec", "builtins.__import__", "subprocess.Popen"),
    *("torch.load", "torch.storage._load_from_bytes", "torch.hub.load", "importlib.import_module", "pickle.loads"),
    *("argparse.Namespace.__init__", "functools.partial", "operator.attrgetter", "numpy.load", "pathlib.Path"),
    *("torch._utils.torch", "torch._utils._rebuild_tensor_v2.__globals__", "builtins.open", "codecs.encode"),
]
SHARED: list[Any] = [
    *(argparse.Namespace, collections.OrderedDict, datetime.datetime, PurePosixPath, Record, torch.Size, torch.Tensor),
    *(_utils._rebuild_tensor_v2, _utils._rebuild_parameter, PlainUnpickler, plain_pickle, _utils),
    *(plain_pickle._dtype, plain_pickle._bytearray, np),
]
DTYPES = ("<f4", "<f8", "<i8", "|b1", "|O", "<M8[s]")
_events: list[str] = []
_watching = False


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if _watching and event in ("os.system", "exec", "compile", "import", "open", "subprocess.Popen", "os.exec"):
        _events.append(event)


sys.addaudithook(_watch)


def program_state() -> list[Any]:
    shared = [dict(vars(each)) for each in SHARED]
    return [*shared, [np.dtype(name).__reduce__() for name in DTYPES], dict(plain_pickle._ALLOWED)]


def unpickle(content: bytes) -> Any:
    """Unpickle, and assert that no code runs and no shared state changes; errors are raised."""
    global _watching
    before = program_state()
    _events.clear()
    _watching = True
    try:
        return PlainUnpickler(io.BytesIO(content)).load()
    finally:
        _watching = False
        assert _events == []
        assert program_state() == before


def named(name: str) -> bytes:
    module, _, attribute = name.rpartition(".")
    return b"c" + module.encode() + b"\n" + attribute.encode() + b"\n"


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


VALUES = st.one_of(
    st.sampled_from([b"N", b"\x88", b"]", b"}", b")", b"K\x00", b"K\x07", b"J\xff\xff\xff\x7f", b"C\x04abcd"]),
    st.sampled_from(["f8", "O", "|V8", "__class__", "__reduce__", "__setstate__", "func", "latin1", ""]).map(text),
    st.sampled_from(LISTED).map(named),
)
STEPS = st.one_of(
    VALUES,
    st.sampled_from(
        [b"R", b"b", b"\x81", b"\x85", b"\x86", b"\x87", b"a", b"s", b"0", b"2", b"(", b"t", b"u", b"e", b"l"]
    ),
    st.sampled_from([b"q\x00", b"h\x00", b"q\x01", b"h\x01", b"\x94", b"o", b"\x93", b"\x92"]),
    st.sampled_from(FORBIDDEN).map(named),
)


@FUZZED
@given(steps=st.lists(STEPS, max_size=25))
def test_any_steps_give_plain_data_or_an_error(steps: list[bytes]) -> None:
    try:
        unpickle(b"\x80\x04" + b"".join(steps) + b".")
    except AssertionError:
        raise
    except Exception as error:  # `read_weights` converts any error of a reader
        assert not isinstance(error, SystemError)  # noqa: PT017


@FUZZED
@given(
    name=st.sampled_from(LISTED),
    arguments=st.lists(VALUES, max_size=3),
    state=st.one_of(
        st.just(b"}" + text("func") + named("builtins.set") + b"s"),
        st.just(b"N}" + text("__class__") + named("argparse.Namespace") + b"s\x86"),
        st.just(b"(K\x03" + text(">") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00t"),
        VALUES,
    ),
    is_called=st.booleans(),
)
def test_the_state_of_a_listed_name_is_set_on_a_copy(
    name: str, arguments: list[bytes], state: bytes, is_called: bool
) -> None:
    called = b"(" + b"".join(arguments) + b"tR" if is_called else b""
    try:
        unpickle(b"\x80\x02" + named(name) + called + state + b"b.")
    except AssertionError:
        raise
    except Exception as error:
        assert not isinstance(error, SystemError)  # noqa: PT017


@pytest.mark.parametrize("name", FORBIDDEN)
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_other_names_are_refused_and_named(name: str, protocol: int) -> None:
    module, _, attribute = name.rpartition(".")
    stack_global = text(module) + text(attribute) + b"\x93"
    content = (b"\x80\x04" + stack_global if protocol == 4 else named(name)) + text("echo") + b"\x85R."
    with pytest.raises(ForbiddenName, match=name.replace(".", r"\.")):
        unpickle(content)


def test_shared_objects_cannot_be_changed() -> None:
    for name, make in plain_pickle._ALLOWED.items():
        first, second = make(), make()
        if first is second:
            with pytest.raises((TypeError, AttributeError)):
                first.surprise = name
    assert vars(np.dtype("f8").type).get("surprise") is None


def test_numpy_dtypes_are_unchanged() -> None:
    state = b"(K\x03" + text(">") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00t"
    for arguments in (text("f8") + b"\x85", text("f8") + b"\x89\x89\x87"):  # as one asks for the shared one
        made = unpickle(b"\x80\x02" + named("numpy.dtype") + arguments + b"R" + state + b"b.")
        assert made.byteorder == ">"
    assert np.dtype("f8").isnative


def test_forged_sizes_allocate_no_memory(tmp_path: Path) -> None:
    forged = {
        "memo": b"\x80\x02}r" + struct.pack("<I", 2**31 - 1) + b".",
        "bytes": b"\x80\x04\x8e" + struct.pack("<Q", 2**62) + b"a.",
        "bytearray": b"\x80\x04" + named("builtins.bytearray") + b"J\xff\xff\xff\x7f\x85R.",
        "array": b"\x80\x04" + named("numpy.ndarray") + b"\x8a\x08" + b"\xff" * 7 + b"\x0f\x85R.",
        "long": b"\x80\x04\x8b\xff\xff\xff\x7f.",
    }
    for name, content in forged.items():
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"is damaged or not a weight file"):
            read_weights(path)
    assert [opcode.name for opcode, _, _ in pickletools.genops(forged["memo"])] == [
        "PROTO",
        "EMPTY_DICT",
        "LONG_BINPUT",
        "STOP",
    ]


def test_nesting_and_loops_end_in_a_clear_error(tmp_path: Path) -> None:
    deep = b"\x80\x04" + b"}" + text("a") + b"]" * 100_000 + b"a" * 99_999 + b"s."
    (tmp_path / "deep").write_bytes(deep)
    loop: dict[str, Any] = {"weight": np.ones(2)}
    loop["again"] = [loop]
    (tmp_path / "loop").write_bytes(pickle.dumps(loop))
    for name in ("deep", "loop"):
        with pytest.raises(ValueError, match=r"contains itself or is nested more than 100 levels deep"):
            flatten(read_weights(tmp_path / name))
