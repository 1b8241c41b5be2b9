"""Files of PyTorch that carry their own checksum: damage is found before anything is read from them."""

import os
import re
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

# PyTorch's file is a zip archive, which ends in this record, of this length, and then a comment, empty as PyTorch
# writes it. The checksum goes there: one file that cannot be torn apart, and torch.load and unzip read it as ever.
_END_OF_ARCHIVE, _END_LENGTH = b"PK\x05\x06", 22
_SEAL = re.compile(rb"cribo format (\d{4}), (\d{20}) bytes, crc32 ([0-9a-f]{8})\n")
_SEAL_LENGTH = len("cribo format 0000, 00000000000000000000 bytes, crc32 00000000\n")
_CRC_LENGTH = len("00000000\n")
_BLOCK = 2**20


class Damaged(ValueError):
    """A file that is not what was written; the message says why, without naming the file."""


@dataclass(frozen=True)
class Seal:
    """What a sealed file says of itself.

    Attributes:
        version: of the format of the content.
        size: of the whole file, in bytes.
        crc32: of all of it but these eight digits.
    """

    version: int
    size: int
    crc32: int


class SealingWriter:
    """A file for `torch.save` to write to; the checksum is taken of what passes, so that no later fault enters it.

    CRC-32 and not a cryptographic digest: the checksum finds accidents, each single flipped bit among them, and is
    no signature. It is several times faster, and as fast as the copying that goes on beside it.

    Args:
        file: opened for binary writing, empty.
        version: of the format of the content, 0 to 9999.
    """

    def __init__(self, file: BinaryIO, version: int) -> None:
        self._file = file
        self._version = version
        self._held_back = b""  # the end of the archive, whose comment is not yet known
        self._size = 0
        self._crc32 = 0

    def write(self, data: Any) -> int:
        """Pass bytes on, but for the last few."""
        view = memoryview(data).cast("B")
        if len(view) >= _END_LENGTH:
            self._pass_on(self._held_back)
            self._pass_on(view[:-_END_LENGTH])
            self._held_back = bytes(view[-_END_LENGTH:])
        else:
            together = self._held_back + bytes(view)
            self._pass_on(together[:-_END_LENGTH])
            self._held_back = together[-_END_LENGTH:]
        return len(view)

    def flush(self) -> None:
        """Hand what was passed on to the system."""
        self._file.flush()

    def seal(self) -> Seal:
        """Write the end of the archive and the checksum; nothing may be written after it."""
        end = self._held_back
        assert end.startswith(_END_OF_ARCHIVE), "what torch.save wrote is no zip archive"
        self._pass_on(end[:-2] + _SEAL_LENGTH.to_bytes(2, "little"))
        size = self._size + _SEAL_LENGTH
        self._pass_on(f"cribo format {self._version:04d}, {size:020d} bytes, crc32 ".encode())
        seal = Seal(self._version, size, self._crc32)
        self._pass_on(f"{seal.crc32:08x}\n".encode())
        self.flush()
        return seal

    def _pass_on(self, data: bytes | memoryview) -> None:
        self._crc32 = zlib.crc32(data, self._crc32)
        self._size += len(data)
        self._file.write(data)


def read_seal(path: Path) -> Seal:
    """What a file says of itself; nothing is compared with it yet.

    Raises:
        Damaged: it has no seal, or another length than it says.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return _read_seal(file)


def check_seal(path: Path) -> Seal:
    """Read a whole file and compare it with its seal.

    Raises:
        Damaged: it is not what was written.
        OSError: it cannot be read.
    """
    with path.open("rb", buffering=0) as file:
        seal = _read_seal(file)
        file.seek(0)
        block = memoryview(bytearray(min(_BLOCK, seal.size)))
        left, crc32 = seal.size - _CRC_LENGTH, 0
        while left:
            read = file.readinto(block[: min(left, len(block))])
            if not read:
                raise Damaged("it became shorter while it was read")
            crc32 = zlib.crc32(block[:read], crc32)
            left -= read
    if crc32 != seal.crc32:
        raise Damaged(f"its content does not fit its checksum: CRC-32 {crc32:08x}, written was {seal.crc32:08x}")
    return seal


def _read_seal(file: Any) -> Seal:
    size = file.seek(0, os.SEEK_END)
    if not size:
        raise Damaged("it is empty")
    file.seek(max(0, size - _SEAL_LENGTH))
    found = _SEAL.fullmatch(file.read(_SEAL_LENGTH))
    if found is None:
        raise Damaged("it does not end in a checksum: it was cut short, or written by something else")
    seal = Seal(int(found[1]), int(found[2]), int(found[3], 16))
    if seal.size != size:
        raise Damaged(f"it has {size} bytes, written were {seal.size}")
    return seal
