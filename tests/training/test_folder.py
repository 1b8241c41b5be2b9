"""Runs claim and lock their folder; two runs never write to the same one."""

import os
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.commands import Commands, RunningCommand

from cribo.base.errors import FolderError
from cribo.base.folders import MARKER, ResultFolder
from cribo.training.folder import RUN_LOCK, claim, run_lock

HOLD = """
import sys, time
from pathlib import Path
from cribo.training.folder import run_lock
with run_lock(Path(sys.argv[1])):
    print("held", flush=True)
    while not Path("end").exists():
        time.sleep(0.01)
"""


@pytest.fixture
def held(tmp_path: Path, commands: Commands) -> RunningCommand:
    """Start a process that holds the lock of the test's folder until its own folder contains `end`."""
    started = commands.fork_program(HOLD, tmp_path)
    while "held" not in started.output:
        assert started.wait(0.01) is None, started.output
    return started


def refused(folder: Path) -> bool:
    try:
        with run_lock(folder):
            return False
    except FolderError as error:
        assert str(folder) in str(error)  # noqa: PT017
        assert "--name" in str(error)  # noqa: PT017
        return True


def test_a_second_run_is_refused_until_the_first_one_ends(tmp_path: Path, held: RunningCommand) -> None:
    assert refused(tmp_path)
    (held.folder / "end").touch()
    assert held.wait(60) == 0
    assert not refused(tmp_path)


def test_the_folder_of_a_killed_run_is_free(tmp_path: Path, held: RunningCommand) -> None:
    held.kill(all_of_it=False)
    held.wait(60)
    assert not refused(tmp_path)


def test_a_second_run_of_the_same_process_is_refused(tmp_path: Path) -> None:
    with run_lock(tmp_path):
        assert refused(tmp_path)
        assert refused(tmp_path)
    assert not refused(tmp_path)


def test_an_error_releases_the_lock(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="inside"), run_lock(tmp_path):
        raise RuntimeError("inside")
    assert not refused(tmp_path)


def test_other_folders_are_free(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with run_lock(tmp_path / "a"):
        assert not refused(tmp_path / "b")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_an_exception_in_a_fork_does_not_release_the_lock(tmp_path: Path, commands: Commands) -> None:
    child = 1
    try:
        with run_lock(tmp_path):
            child = os.fork()
            if child == 0:
                raise RuntimeError
            os.waitpid(child, 0)
            other = commands.fork_program(HOLD, tmp_path)
            assert other.wait(60) == 1
            assert "is in use by another run" in other.output
    except RuntimeError:
        os._exit(0)


# ---------------------------------------------------------------------------- claims


def claim_run(out: Path, name: str | None, default_name: str, *, overwrite: bool = False, resume: bool = False) -> Path:
    """Claim a folder, and release its lock."""
    with ExitStack() as held:
        folder = ResultFolder(
            out / (name or default_name),
            "pretraining",
            numbered=name is None,
            overwrite=overwrite,
            resume=resume,
            advice="choose another --name",
        )
        return claim(held, folder)


def a_run(folder: Path) -> Path:
    return ResultFolder(folder, "pretraining").create(lambda part: (part / "precious").write_text("results"))


def test_runs_without_a_name_are_numbered(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "runs"
    names = [claim_run(out, None, "quickstart").name for _ in range(3)]
    assert names == ["quickstart", "quickstart-2", "quickstart-3"]


def test_overwrite_does_not_touch_a_numbered_run(tmp_path: Path) -> None:
    precious = a_run(tmp_path / "run") / "precious"
    assert claim_run(tmp_path, None, "run", overwrite=True).name == "run-2"
    assert precious.is_file()


def test_a_run_is_not_overwritten_without_overwrite(tmp_path: Path) -> None:
    run = a_run(tmp_path / "mine")
    with pytest.raises(FolderError, match="already exists: choose another --name"):
        claim_run(tmp_path, "mine", "run")
    assert (run / "precious").read_text() == "results"


def test_overwrite_replaces_a_run_and_nothing_else(tmp_path: Path) -> None:
    run = a_run(tmp_path / "mine")
    assert claim_run(tmp_path, "mine", "run", overwrite=True) == run
    assert {path.name for path in run.iterdir()} <= {MARKER, RUN_LOCK}
    other = tmp_path / "holiday"
    other.mkdir()
    (other / "photo.jpg").write_text("photo")
    with pytest.raises(FolderError, match="not created by cribo, refusing to replace it"):
        claim_run(tmp_path, "holiday", "run", overwrite=True)
    assert (other / "photo.jpg").is_file()


def test_an_empty_folder_may_be_used(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert claim_run(tmp_path, "empty", "run") == tmp_path / "empty"


@pytest.mark.parametrize("below", ["", "deeper/still"])
def test_out_that_is_a_file(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FolderError, match=r"file is a file, not a folder: choose another --out"):
        claim_run(tmp_path / "file" / below, None, "run")


def test_a_name_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("text")
    with pytest.raises(FolderError, match="mine is a file, not a folder"):
        claim_run(tmp_path, "mine", "run", overwrite=True)
    assert (tmp_path / "mine").read_text() == "text"


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root can write anywhere")
def test_out_without_write_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(FolderError, match=r"cannot write to .* choose another --out"):
            claim_run(tmp_path, None, "run")
    finally:
        tmp_path.chmod(0o700)


def test_a_run_is_resumed_if_it_exists_and_started_otherwise(tmp_path: Path) -> None:
    run = a_run(tmp_path / "mine")
    assert claim_run(tmp_path, "mine", "run", resume=True) == run
    assert (run / "precious").read_text() == "results"
    assert claim_run(tmp_path, "new", "run", resume=True) == tmp_path / "new"
    other = tmp_path / "holiday"
    other.mkdir()
    (other / "photo.jpg").write_text("photo")
    with pytest.raises(FolderError, match="already exists"):
        claim_run(tmp_path, "holiday", "run", resume=True)


def test_a_run_in_use_is_not_overwritten(tmp_path: Path) -> None:
    run = a_run(tmp_path / "mine")
    with run_lock(run), pytest.raises(FolderError, match="in use by another run"):
        claim_run(tmp_path, "mine", "run", overwrite=True)
    assert (run / "precious").read_text() == "results"
