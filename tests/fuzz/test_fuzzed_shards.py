"""Damaged, forged or malicious tar shards: a list of images or a clear error; nothing is unpacked."""

import io
import tarfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tests.fuzz.profile import fuzzed

from cribo.base.errors import DataError
from cribo.data.sources.shards import ShardedImages
from cribo.data.sources.storage import LocalShards
from cribo.data.sources.tars import HEADER, image_members

FUZZED = fuzzed(4)


def image_bytes() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(file, "PNG")
    return file.getvalue()


def header(name: str, size: int = 0, kind: bytes = tarfile.REGTYPE, linkname: str = "") -> bytes:
    member = tarfile.TarInfo(name)
    member.size, member.type, member.linkname = size, kind, linkname
    return member.tobuf(tarfile.GNU_FORMAT)


def padded(content: bytes) -> bytes:
    return content + bytes(-len(content) % HEADER)


def tar_of(*names: str, kind: int = tarfile.PAX_FORMAT) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=kind) as tar:
        for name in names:
            member = tarfile.TarInfo(name)
            content = image_bytes()
            member.size, member.mtime = len(content), 1.5
            tar.addfile(member, io.BytesIO(content))
    return file.getvalue()


def listed(path: Path, content: bytes) -> list[tuple[str, int, int]] | None:
    """List the images of a file on disk, where reading too many bytes fails differently than in memory."""
    path.write_bytes(content)
    with path.open("rb") as file:
        try:
            found = list(image_members(file, len(content), "the shard"))
        except DataError as error:
            assert str(error).startswith("the shard is broken")  # noqa: PT017
            return None
    assert all(offset >= HEADER and offset + length <= len(content) for _, offset, length in found)
    return found


def with_checksum(block: bytes) -> bytes:
    return block[:148] + b"%06o\0 " % (sum(block[:148]) + 256 + sum(block[156:HEADER])) + block[156:]


WHOLE = [
    tar_of("a/1.png", "a/2.png", "ü" * 60 + ".png", kind=tarfile.PAX_FORMAT),
    tar_of("a/1.png", "n" * 150 + ".png", kind=tarfile.GNU_FORMAT),
    tar_of("1.png", "2.png", kind=tarfile.USTAR_FORMAT),
]


@FUZZED
@given(whole=st.sampled_from(WHOLE), data=st.data())
def test_any_damage_gives_a_list_or_a_clear_error(tmp_path: Path, whole: bytes, data: st.DataObject) -> None:
    content = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        block = HEADER * data.draw(st.integers(0, len(content) // HEADER - 1)) if len(content) >= HEADER else 0
        place = block + data.draw(st.sampled_from([0, 100, 124, 124, 136, 148, 156, 156, 157, 257, 345, 482]))
        place += data.draw(st.integers(0, 11))
        new = data.draw(
            st.one_of(
                st.binary(min_size=1, max_size=12),
                st.sampled_from(
                    [
                        b"\x80" + bytes(7) + b"\xff" * 4,
                        b"\x80" + b"\x7f" * 11,
                        b"\xff" * 12,
                        b"77777777777\0",
                        b"L",
                        b"K",
                        b"x",
                        b"g",
                        b"S",
                        b"1",
                        b"2",
                        b"X",
                    ]
                ),
            )
        )
        content[place : place + len(new)] = new
        if data.draw(st.booleans()):
            content[block : block + HEADER] = with_checksum(bytes(content[block : block + HEADER]))
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content))) :]
    listed(tmp_path / "x.tar", bytes(content))


@FUZZED
@given(records=st.binary(max_size=300), kind=st.sampled_from([b"x", b"g", b"X"]))
def test_any_extended_header(tmp_path: Path, records: bytes, kind: bytes) -> None:
    extended = header("pax", len(records), kind) + padded(records)
    listed(tmp_path / "x.tar", extended + tar_of("1.png", kind=tarfile.USTAR_FORMAT))


@FUZZED
@given(
    key=st.sampled_from(
        [
            "size",
            "path",
            "mtime",
            "GNU.sparse.map",
            "GNU.sparse.size",
            "GNU.sparse.major",
            "GNU.sparse.minor",
            "GNU.sparse.realsize",
            "GNU.sparse.name",
            "hdrcharset",
            "uid",
        ]
    ),
    value=st.one_of(
        st.text(max_size=20), st.integers(-(2**70), 2**70).map(str), st.sampled_from(["1,2,3", "1e400", "nan"])
    ),
    second=st.sampled_from(["GNU.sparse.major=1", "GNU.sparse.minor=0", "a=b"]),
)
def test_any_value_in_an_extended_header(tmp_path: Path, key: str, value: str, second: str) -> None:
    records = b""
    for record in (f"{key}={value}", second, second.replace("major", "minor").replace("=1", "=0")):
        text = record.encode("utf-8", "surrogatepass") + b"\n"
        length = len(text) + 1
        while length != len(str(length)) + 1 + len(text):
            length = len(str(length)) + 1 + len(text)
        records += str(length).encode() + b" " + text
    extended = header("pax", len(records), b"x") + padded(records)
    listed(tmp_path / "x.tar", extended + tar_of("1.png", kind=tarfile.USTAR_FORMAT))


@pytest.mark.parametrize("kind", [b"L", b"K", b"x", b"g", b"X"])
def test_unlimited_chains_of_headers(tmp_path: Path, kind: bytes) -> None:
    listed(tmp_path / "x.tar", (header("long", 0, kind)) * 3000 + tar_of("1.png"))


@pytest.mark.parametrize("size", [2**33, 2**40, 2**62, 2**63 - 1, 2**63, 2**70])
@pytest.mark.parametrize("kind", [b"0", b"L", b"K", b"x", b"g", b"S", b"D"])
def test_a_size_beyond_memory(tmp_path: Path, kind: bytes, size: int) -> None:
    assert listed(tmp_path / "x.tar", header("1.png", size, kind) + padded(image_bytes()) + bytes(1024)) is None


def test_names_are_not_paths_and_links_are_not_images(tmp_path: Path) -> None:
    folder, secret = tmp_path / "shards", tmp_path / "secret.png"
    folder.mkdir()
    Image.new("RGB", (8, 8), "blue").save(secret)
    names = ["/etc/1.png", "../../2.png", "a/../../3.png", "C:\\4.png"]
    content = image_bytes()
    blocks = [header(name, len(content)) + padded(content) for name in names]
    links = [header("5.png", 0, kind, str(secret)) for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE)]
    others = [
        header("6.png", 0, kind) for kind in (tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE)
    ]
    (folder / "x.tar").write_bytes(b"".join(blocks + links + others) + bytes(1024))
    before = sorted(tmp_path.rglob("*"))
    images = ShardedImages(LocalShards(folder))
    assert len(images) == 4
    for index in range(4):
        assert torch.equal(images.load(index)[:, 0, 0], torch.tensor([255, 0, 0], dtype=torch.uint8))
    assert set(tmp_path.rglob("*")) - set(before) <= {folder / "cribo-index.npz", folder / ".cribo-index.npz.lock"}
