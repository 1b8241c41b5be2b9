"""No two runs write to the same folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cribo.files import FolderError
from cribo.training.lock import run_lock

HOLD = """
import sys
from pathlib import Path
from cribo.training.lock import run_lock
with run_lock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def held(tmp_path: Path) -> "subprocess.Popen[str]":
    """A process that holds the lock of the test's folder."""
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def refused(folder: Path) -> bool:
    try:
        with run_lock(folder):
            return False
    except FolderError as error:
        assert str(folder) in str(error)  # noqa: PT017
        assert "--name" in str(error)  # noqa: PT017
        return True


def test_a_second_run_is_refused_until_the_first_one_ends(tmp_path: Path, held: "subprocess.Popen[str]") -> None:
    assert refused(tmp_path)
    assert held.stdin is not None
    held.stdin.close()
    assert held.wait() == 0
    assert not refused(tmp_path)


def test_a_killed_run_leaves_the_folder_to_the_next(tmp_path: Path, held: "subprocess.Popen[str]") -> None:
    held.kill()
    held.wait()
    assert not refused(tmp_path)


def test_a_run_of_the_same_process_is_refused_too(tmp_path: Path) -> None:
    with run_lock(tmp_path):
        assert refused(tmp_path)
        assert refused(tmp_path)
    assert not refused(tmp_path)


def test_an_error_inside_lets_go(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="inside"), run_lock(tmp_path):
        raise RuntimeError("inside")
    assert not refused(tmp_path)


def test_other_folders_are_free(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with run_lock(tmp_path / "a"):
        assert not refused(tmp_path / "b")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_that_ends_by_an_exception_leaves_the_lock_to_its_parent(tmp_path: Path) -> None:
    child = 1
    try:
        with run_lock(tmp_path):
            child = os.fork()
            if child == 0:
                raise RuntimeError
            os.waitpid(child, 0)
            command = [sys.executable, "-c", HOLD, str(tmp_path)]
            other = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
            assert "is in use by another run" in other.stderr
    except RuntimeError:
        os._exit(0)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FolderError, match=r"cannot use .*nothing"), run_lock(tmp_path / "nothing"):
        pass
