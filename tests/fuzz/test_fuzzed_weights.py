"""Damaged, forged or malicious weight files: tensors or a clear error."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.fuzz.profile import fuzzed

from cribo.models.formats.reading import flatten, read_weights
from cribo.models.formats.recognising import recognise

FUZZED = fuzzed(4)
STATE = {
    "cls_token": torch.ones(1, 1, 4),
    "patch_embed.proj.weight": torch.ones(4, 3, 2, 2),
    "blocks.0.attn.qkv.weight": torch.ones(12, 4),
}


def torch_file(content: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(content, file, **options)
    return file.getvalue()


def numpy_file() -> bytes:
    file = io.BytesIO()
    np.savez(file, allow_pickle=True, **{name: value.numpy() for name, value in STATE.items()})
    return file.getvalue()


FILES = {
    "torch": torch_file({"teacher": STATE, "epoch": 3}),
    "older torch": torch_file(STATE, _use_new_zipfile_serialization=False),
    "safetensors": safetensors.torch.save(STATE),
    "numpy": numpy_file(),
    "flax": b"\x81\xa6params\x81\xa6kernel\xc7\x1a\x01\x93\x92\x01\x04\xa7float32\xc4\x10" + bytes(16),
}


def assert_read_or_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    try:
        tensors = flatten(read_weights(path))
        recognise(tensors, str(path))
    except (ValueError, ImportError) as error:
        assert str(error).strip()  # noqa: PT017


@pytest.mark.parametrize("kind", FILES)
@FUZZED
@given(data=st.data())
def test_any_damage_gives_tensors_or_a_clear_error(tmp_path: Path, kind: str, data: st.DataObject) -> None:
    content = bytearray(FILES[kind])
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, max(0, len(content) - 1)))
        new = data.draw(
            st.one_of(
                st.binary(min_size=1, max_size=8),
                st.sampled_from([b"\xff" * 8, b"\xff\xff\xff\x7f", bytes(8), b"99999999999", b"[-1,4]", b"F64", b"}}"]),
            )
        )
        content[place : place + len(new)] = new
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content))) :]
    assert_read_or_refused(tmp_path / "x", bytes(content))


@FUZZED
@given(
    start=st.sampled_from(
        [
            b"",
            b"PK\3\4",
            b"PK\5\6",
            b"\x80\2",
            b"\x80\x04",
            b"\x81",
            b"\xdf",
            bytes(8) + b"{",
            b"\x10" + bytes(7) + b"{",
        ]
    ),
    rest=st.binary(max_size=200),
)
def test_noise_after_any_magic_number(tmp_path: Path, start: bytes, rest: bytes) -> None:
    assert_read_or_refused(tmp_path / "x", start + rest)


@FUZZED
@given(
    names=st.dictionaries(
        st.one_of(
            st.text(max_size=30),
            st.sampled_from(
                [
                    *STATE,
                    "teacher/backbone.norm.weight",
                    "blocks.99999999999.norm1.weight",
                    "student/head.mlp.0.weight",
                    "encoder_k.0.conv1.weight",
                    "pos_embed",
                    "blocks.0.norm1.weight",
                    "norm.weight",
                ]
            ),
        ),
        st.lists(st.integers(0, 3), max_size=5),
        min_size=1,
        max_size=12,
    )
)
def test_any_names_and_shapes(names: dict[str, list[int]]) -> None:
    try:
        recognise({name: torch.zeros(shape) for name, shape in names.items()}, "x")
    except ValueError as error:
        assert str(error).strip()  # noqa: PT017


def test_recursive_and_deeply_nested_mappings(tmp_path: Path) -> None:
    itself: dict[str, Any] = {"weight": torch.ones(2)}
    itself["again"] = itself
    nested: dict[str, Any] = {"weight": torch.ones(2)}
    for _ in range(900):
        nested = {"a": nested}
    assert_read_or_refused(tmp_path / "x", torch_file(itself))
    with pytest.raises(ValueError, match="contains itself or is nested more than 100 levels deep"):
        flatten(itself)
    with pytest.raises(ValueError, match="contains itself or is nested more than 100 levels deep"):
        flatten(nested)


@pytest.mark.parametrize("shape", [[2**62, 4], [2**31, 2**31], [-1, 4], [10**30]])
def test_a_shape_beyond_memory(tmp_path: Path, shape: list[int]) -> None:
    header = f'{{"weight":{{"dtype":"F32","shape":{shape},"data_offsets":[0,16]}}}}'.encode()
    assert_read_or_refused(tmp_path / "x", len(header).to_bytes(8, "little") + header + bytes(16))
    file = io.BytesIO()
    np.savez(file, a=np.zeros(4))
    forged = file.getvalue().replace(b"(4,), }", f"({shape[0]},), }}".encode()[: len(b"(4,), }")])
    assert_read_or_refused(tmp_path / "x", forged)
