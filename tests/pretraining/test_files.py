import errno
import os
import stat
from pathlib import Path

import pytest

from cribo.base.files import remove_parts, write_beside, write_text, write_whole


def test_a_failed_write_keeps_only_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_text(path, "old")

    def fail(part: Path) -> None:
        part.write_text("half of the n")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_whole(path, fail)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_written_file_has_default_permissions(tmp_path: Path) -> None:
    plain, whole = tmp_path / "plain", tmp_path / "whole"
    plain.write_text("")
    write_text(whole, "")
    assert whole.stat().st_mode == plain.stat().st_mode


def test_a_file_is_written_even_if_folders_cannot_be_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def only_files(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", only_files)
    write_text(tmp_path / "file", "text")
    assert (tmp_path / "file").read_text() == "text"


def test_partial_files_are_recognised_by_their_full_name(tmp_path: Path) -> None:
    part = write_beside(tmp_path / "file", lambda path: path.write_text("half"))
    others = [tmp_path / name for name in (".file.part", "file.part", part.name.removeprefix("."))]
    for path in others:
        path.touch()
    remove_parts(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted(others)
