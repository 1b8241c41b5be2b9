import errno
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from cribo.base.errors import DataError, FolderError, MissingData
from cribo.base.files import is_part, read_json, remove_parts, write_beside, write_folder_whole, write_text, write_whole


def test_a_folder_is_written_atomically(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        (folder / "inner").mkdir()
        (folder / "inner" / "new").write_text("new")
        (folder / "mine").touch(mode=0o600)

    def fail(folder: Path) -> None:
        write(folder)
        raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        write_folder_whole(tmp_path / "out", fail)
    assert not list(tmp_path.iterdir())
    write_folder_whole(tmp_path / "out", write)
    (tmp_path / "plain").touch()
    assert (tmp_path / "out" / "mine").stat().st_mode == (tmp_path / "plain").stat().st_mode
    (tmp_path / "plain").unlink()
    with pytest.raises(FolderError, match="already exists"):
        write_folder_whole(tmp_path / "out", lambda folder: (folder / "other").touch())
    with pytest.raises(OSError, match="no room"):
        write_folder_whole(tmp_path / "out", fail, replaces=True)
    assert (tmp_path / "out" / "inner" / "new").read_text() == "new"
    write_folder_whole(tmp_path / "out", lambda folder: (folder / "other").touch(), replaces=True)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["other"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_json_of_users_is_read_in_any_encoding(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "a.json").write_text('{"é": [1, 2.5, null]}', encoding=encoding)
    assert read_json(tmp_path / "a.json") == {"é": [1, 2.5, None]}


@pytest.mark.parametrize(
    "content", [b"", b'{"a": [1, 2', b"\xff\xfe\xff", b"[" * 10**6, b'{"a":' * 10**6, b"1" * 10**5, b"[1]]"]
)
def test_damaged_json_is_an_error_with_its_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(DataError, match=r"a\.json is"):
        read_json(tmp_path / "a.json")


def test_json_is_read_from_files_only(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    for path in (tmp_path / "pipe.json", tmp_path, Path("/dev/zero")):
        with pytest.raises(DataError, match="is not a regular file"):
            read_json(path)
    with pytest.raises(MissingData, match="does not exist"):
        read_json(tmp_path / "absent.json")


@pytest.mark.parametrize("name", ["a" * 255, "é" * 127, os.fsdecode(b"\xff" * 250), "b"])
def test_temporary_names_are_short(tmp_path: Path, name: str) -> None:
    try:
        (tmp_path / name).touch()
    except (OSError, UnicodeError) as error:
        pytest.skip(f"the file system does not allow the name: {error}")
    write_text(tmp_path / name, "new")
    assert (tmp_path / name).read_text() == "new"
    part = write_beside(tmp_path / name, lambda part: part.write_text("killed"))
    assert is_part(part.name)
    assert len(os.fsencode(part.name)) <= 143  # the limit of encrypted folders
    remove_parts(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]


_KILLED = """
import os, signal, sys
from pathlib import Path
from cribo.base.files import write_folder_whole

def write(folder):
    (folder / "weights").touch()
    print("writing", flush=True)
    sys.stdin.read() if sys.argv[2] == "waits" else os.kill(os.getpid(), signal.SIGKILL)

write_folder_whole(Path(sys.argv[1]), write)
"""


def test_the_folder_of_a_killed_process_is_removed_by_the_next_write(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _KILLED, str(tmp_path / "killed"), "dies"]
    assert subprocess.run(command, check=False, stdout=subprocess.DEVNULL).returncode == -signal.SIGKILL
    assert list(tmp_path.glob(".killed.*.part/weights"))
    finished = tmp_path / f".mine.{'0' * 32}.part"  # without a lock: complete results that could not be moved
    finished.mkdir()
    waits = [sys.executable, "-c", _KILLED, str(tmp_path / "waiting"), "waits"]
    with subprocess.Popen(waits, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        write_folder_whole(tmp_path / "out", lambda folder: (folder / "new").touch())
        assert list(tmp_path.glob(".waiting.*.part/weights"))
        process.communicate()
    assert sorted(path.name for path in tmp_path.iterdir()) == [finished.name, "out", "waiting"]


def test_the_loser_of_two_concurrent_writes_leaves_no_folder(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        (folder / "late").touch()
        write_folder_whole(tmp_path / "out", lambda folder: (folder / "first").touch())

    with pytest.raises(FolderError, match="already exists"):
        write_folder_whole(tmp_path / "out", write)
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "first"]


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
