import io
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cribo.sealing import Damaged, Seal, SealingWriter, check_seal, read_seal

CONTENT = {"weights": torch.arange(30.0), "step": 7, "name": "äö", "list": [1, (2, None)]}


def write(path: Path, version: int = 1) -> Seal:
    with path.open("wb") as file:
        writer: Any = SealingWriter(file, version)
        torch.save(CONTENT, writer)
        return writer.seal()


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    write(tmp_path / "file")
    return tmp_path / "file"


def test_a_sealed_file_is_read_by_torch_and_zip_as_any_other(sealed: Path) -> None:
    for mmap in (False, True):
        content = torch.load(sealed, weights_only=True, mmap=mmap)
        assert torch.equal(content.pop("weights"), CONTENT["weights"])
        assert content == {name: value for name, value in CONTENT.items() if name != "weights"}
    with zipfile.ZipFile(sealed) as archive:
        assert archive.testzip() is None


def test_the_seal_says_version_and_size(tmp_path: Path) -> None:
    seal = write(tmp_path / "file", 42)
    assert check_seal(tmp_path / "file") == read_seal(tmp_path / "file") == seal
    assert (seal.version, seal.size) == (42, (tmp_path / "file").stat().st_size)


def test_every_single_flipped_bit_is_found(sealed: Path) -> None:
    whole = sealed.read_bytes()
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << position % 8
        sealed.write_bytes(damaged)
        with pytest.raises(Damaged):
            check_seal(sealed)
    for position in range(len(whole) - 90, len(whole)):  # the end of the archive and the seal: each bit
        for bit in range(8):
            damaged = bytearray(whole)
            damaged[position] ^= 1 << bit
            sealed.write_bytes(damaged)
            with pytest.raises(Damaged):
                check_seal(sealed)
    sealed.write_bytes(whole)
    check_seal(sealed)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda whole: b"", "it is empty"),
        (lambda whole: whole[:-1], "does not end in a checksum: it was cut short"),
        (lambda whole: whole[:40], "does not end in a checksum"),
        (lambda whole: whole + b"\0", "does not end in a checksum"),
        (lambda whole: whole[1:], r"it has \d+ bytes, written were \d+"),
        (lambda whole: whole[:100] + b"x" * 200 + whole[300:], "does not fit its checksum"),
    ],
)
def test_what_is_said_of_damage(sealed: Path, change: Any, reason: str) -> None:
    sealed.write_bytes(change(sealed.read_bytes()))
    with pytest.raises(Damaged, match=reason):
        check_seal(sealed)


@given(st.lists(st.integers(0, 400), max_size=30))
@settings(max_examples=50, deadline=None)
def test_the_pieces_in_which_a_file_is_written_do_not_matter(cuts: list[int]) -> None:
    plain = io.BytesIO()
    torch.save({"a": 1}, plain)
    rest, file = plain.getvalue(), io.BytesIO()
    writer = SealingWriter(file, 1)
    for cut in cuts:
        assert writer.write(rest[:cut]) == len(rest[:cut])
        rest = rest[cut:]
    writer.write(memoryview(rest))
    seal = writer.seal()
    written = file.getvalue()
    assert len(written) == seal.size
    assert written.startswith(plain.getvalue()[:-2])  # all but the length of the comment
    assert torch.load(io.BytesIO(written), weights_only=True) == {"a": 1}
