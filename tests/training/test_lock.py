import errno
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from cribo.files import FolderError
from cribo.pretraining.files import claim_run_folder
from cribo.training import lock
from cribo.training.lock import RUN_LOCK, run_lock

HOLD = """
import os, sys, time
from pathlib import Path
from cribo.training.lock import run_lock
with run_lock(Path(sys.argv[1])):
    {body}
"""


def start(folder: Path, body: str) -> subprocess.Popen[str]:
    """A process that holds the lock and says a line once it does."""
    command = [sys.executable, "-c", HOLD.format(body=body), str(folder)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_second_run_is_refused_at_once_and_told_who_has_the_folder(tmp_path: Path) -> None:
    holder = start(tmp_path, 'print("held", flush=True); sys.stdin.read()')
    try:
        assert first_line(holder) == "held"
        before = (tmp_path / RUN_LOCK).read_text()
        with pytest.raises(FolderError) as caught, run_lock(tmp_path):
            raise AssertionError("two runs in one folder")
        for part in (str(tmp_path), f"process {holder.pid} on {socket.gethostname()}", "wait for its end", "--name"):
            assert part in str(caught.value)
        assert (tmp_path / RUN_LOCK).read_text() == before
        assert holder.stdin is not None
        holder.stdin.close()
        assert holder.wait() == 0
        with run_lock(tmp_path):
            pass
    finally:
        holder.kill()
        holder.wait()


def test_the_folder_is_left_as_it_was(tmp_path: Path) -> None:
    for _ in range(2):
        with run_lock(tmp_path):
            assert (tmp_path / RUN_LOCK).is_file()
        assert list(tmp_path.iterdir()) == []
    with pytest.raises(RuntimeError), run_lock(tmp_path):
        raise RuntimeError
    with run_lock(tmp_path):
        pass


def test_a_run_of_the_same_process_is_refused_too(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with run_lock(tmp_path):
        for same in (tmp_path, tmp_path / "link"):
            with pytest.raises(FolderError, match=f"this process, {os.getpid()} on"), run_lock(same):
                pass
        # And the refused one has not taken the lock away.
        other = subprocess.run([sys.executable, "-c", HOLD.format(body="pass"), str(tmp_path)], capture_output=True)
        assert b"is in use by another run" in other.stderr


def test_other_folders_are_free(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with run_lock(tmp_path / "a"), run_lock(tmp_path / "b"):
        pass


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_worker_that_outlives_its_killed_run_does_not_keep_the_folder(tmp_path: Path) -> None:
    """As a loader's worker does that hangs in a network file system."""
    body = """
    worker = os.fork()
    if worker == 0:
        time.sleep(60)
        os._exit(0)
    print(worker, flush=True)
    sys.stdin.read()
"""
    holder = start(tmp_path, body.strip())
    worker = int(first_line(holder))
    try:
        with pytest.raises(FolderError, match=f"process {holder.pid}"), run_lock(tmp_path):
            pass
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        os.kill(worker, 0)  # it is still there
        assert (tmp_path / RUN_LOCK).is_file()  # and so is what the killed run has left
        with run_lock(tmp_path):
            pass
        os.kill(worker, 0)
    finally:
        os.kill(worker, signal.SIGKILL)
        holder.kill()
        holder.wait()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_that_ends_by_an_exception_leaves_the_lock_to_its_parent(tmp_path: Path) -> None:
    with run_lock(tmp_path):
        child = os.fork()
        if child == 0:
            try:
                with pytest.raises(FolderError), run_lock(tmp_path):
                    os._exit(2)
            except BaseException:
                os._exit(1)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert (tmp_path / RUN_LOCK).is_file()


def test_many_at_once_hold_it_one_after_the_other(tmp_path: Path) -> None:
    """Each removes the file when it is done: who has opened it before must not take that for the lock."""
    body = """
    mark = Path(sys.argv[1]) / "mark"
    mark.touch(exist_ok=False)
    time.sleep(0.001)
    mark.unlink()
"""
    program = f"""
import os, sys, time
from pathlib import Path
from cribo.files import FolderError
from cribo.training.lock import run_lock
held, end = 0, time.monotonic() + 60
while held < 50 and time.monotonic() < end:
    try:
        with run_lock(Path(sys.argv[1])):
            {body.strip().replace(chr(10), chr(10) + "        ")}
            held += 1
    except FolderError:
        pass
sys.exit(held < 50)
"""
    running = [
        subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    for process in running:
        _, errors = process.communicate()
        assert process.returncode == 0, errors


def test_a_live_run_is_not_overwritten(tmp_path: Path) -> None:
    run = claim_run_folder(tmp_path, "mine", "run", overwrite=False)
    (run / "config.yaml").write_text("seed: 0\n")
    holder = start(run, 'print("held", flush=True); sys.stdin.read()')
    try:
        assert first_line(holder) == "held"
        with pytest.raises(FolderError, match="is in use by another run"):
            claim_run_folder(tmp_path, "mine", "run", overwrite=True)
        assert (run / "config.yaml").is_file()
    finally:
        holder.kill()
        holder.wait()
    claim_run_folder(tmp_path, "mine", "run", overwrite=True)
    assert {path.name for path in run.iterdir()} == set()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    def refuse(handle: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(lock, "_lock", refuse)
    with run_lock(tmp_path):
        pass
    assert f"{tmp_path} cannot be locked" in caplog.text
    assert "no other run uses this folder" in caplog.text


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FolderError, match=r"cannot use .*: No such file"), run_lock(tmp_path / "nothing"):
        pass
