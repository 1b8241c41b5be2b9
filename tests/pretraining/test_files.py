import errno
import os
import stat
from pathlib import Path

import pytest

from cribo.files import FolderError, remove_parts, write_beside, write_text, write_whole
from cribo.pretraining.files import claim_run_folder
from cribo.training.checkpoints import is_disk_full


def a_run(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("seed: 0\n")
    (folder / "precious").write_text("results")
    return folder


def test_runs_without_a_name_are_numbered(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "runs"
    names = [claim_run_folder(out, None, "quickstart", overwrite=False).name for _ in range(3)]
    assert names == ["quickstart", "quickstart-2", "quickstart-3"]
    assert not list((out / "quickstart").iterdir())


def test_overwrite_does_not_touch_a_numbered_run(tmp_path: Path) -> None:
    precious = a_run(tmp_path / "run") / "precious"
    assert claim_run_folder(tmp_path, None, "run", overwrite=True).name == "run-2"
    assert precious.is_file()


def test_a_run_is_never_overwritten_unasked(tmp_path: Path) -> None:
    run = a_run(tmp_path / "mine")
    with pytest.raises(FolderError, match=r"exists already: .* --name, .*--resume .* --overwrite"):
        claim_run_folder(tmp_path, "mine", "run", overwrite=False)
    assert (run / "precious").read_text() == "results"


def test_overwrite_replaces_a_run_and_nothing_else(tmp_path: Path) -> None:
    run = a_run(tmp_path / "mine")
    assert claim_run_folder(tmp_path, "mine", "run", overwrite=True) == run
    assert {path.name for path in run.iterdir()} == set()
    other = tmp_path / "holiday"
    other.mkdir()
    (other / "photo.jpg").write_text("photo")
    with pytest.raises(FolderError, match="not created by cribo, refusing to replace it"):
        claim_run_folder(tmp_path, "holiday", "run", overwrite=True)
    assert (other / "photo.jpg").is_file()


def test_an_empty_folder_may_be_used(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert claim_run_folder(tmp_path, "empty", "run", overwrite=False) == tmp_path / "empty"


@pytest.mark.parametrize("below", ["", "deeper/still"])
def test_out_that_is_a_file(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FolderError, match=r"file is a file, not a folder: choose another --out"):
        claim_run_folder(tmp_path / "file" / below, None, "run", overwrite=False)


def test_a_name_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("text")
    with pytest.raises(FolderError, match="is a file, not a run folder"):
        claim_run_folder(tmp_path, "mine", "run", overwrite=True)
    assert (tmp_path / "mine").read_text() == "text"


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write anywhere")
def test_out_that_may_not_be_written_to(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(FolderError, match=r"cannot write to .* choose another --out"):
            claim_run_folder(tmp_path, None, "run", overwrite=False)
    finally:
        tmp_path.chmod(0o700)


def test_a_failing_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_text(path, "old")

    def fail(part: Path) -> None:
        part.write_text("half of the n")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left") as caught:
        write_whole(path, fail)
    assert is_disk_full(caught.value)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_is_written_has_the_usual_permissions(tmp_path: Path) -> None:
    plain, whole = tmp_path / "plain", tmp_path / "whole"
    plain.write_text("")
    write_text(whole, "")
    assert whole.stat().st_mode == plain.stat().st_mode


def test_what_counts_as_a_full_disk() -> None:
    assert is_disk_full(RuntimeError("PytorchStreamWriter failed writing file data/7: file write failed"))
    assert not is_disk_full(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_disk_full(PermissionError(13, "Permission denied"))
    too_large = OSError(27, "File too large")
    too_large.__context__ = RuntimeError("unexpected pos 81216 vs 81168")  # torch's own, for any failure to write
    assert not is_disk_full(too_large)


def test_a_file_stands_even_where_folders_cannot_be_synchronised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def only_files(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", only_files)
    write_text(tmp_path / "file", "text")
    assert (tmp_path / "file").read_text() == "text"


def test_leftovers_are_known_by_their_whole_name(tmp_path: Path) -> None:
    part = write_beside(tmp_path / "file", lambda path: path.write_text("half"))
    others = [tmp_path / name for name in (".file.part", "file.part", part.name.removeprefix("."))]
    for path in others:
        path.touch()
    remove_parts(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted(others)
