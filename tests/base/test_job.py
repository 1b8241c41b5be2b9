import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cribo.base.errors import ConfigError, FolderError
from cribo.base.files import write_folder_whole, write_text
from cribo.base.job import ACCOUNTS, LOCK, RECORD, Job, finished_shares, named_folder, read_record
from cribo.cli import main


def made(path: Path, kind: str = "search", content: str = "old") -> Path:
    return Job(path, kind).create(lambda part: (part / "results.json").write_text(content))


def files(folder: Path) -> dict[str, bytes]:
    found = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {name: content for name, content in found.items() if name != LOCK}


def test_results_are_replaced_only_on_request_and_only_when_the_new_ones_are_complete(tmp_path: Path) -> None:
    folder = made(tmp_path / "out")
    assert json.loads((folder / RECORD).read_text())["kind"] == "search"
    before = files(folder)
    with pytest.raises(FolderError, match="out already exists: choose another --out"):
        Job(folder, "search")

    def fail(part: Path) -> None:
        assert files(folder) == before
        raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        Job(folder, "search", overwrite=True).create(fail)
    assert files(folder) == before
    Job(folder, "search", overwrite=True).create(lambda part: (part / "new").touch())
    assert files(folder).keys() == {RECORD, "new"}
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize(
    "content",
    [
        None,
        "{}",
        "[]",
        '{"kind": "search"}',  # another program may use the same file name
        '{"made_by": "cribo", "kind": "trained evaluation"}',
    ],
)
def test_other_contents_are_never_replaced(tmp_path: Path, content: str | None) -> None:
    said = "contains trained evaluation results" if content and "made_by" in content else "not created by cribo"
    (tmp_path / "results.json").write_text("years of work")
    if content is not None:
        (tmp_path / RECORD).write_text(content)
    before = files(tmp_path)
    with pytest.raises(FolderError, match=said):
        Job(tmp_path, "search", overwrite=True)
    for resume in (False, True):
        with pytest.raises(FolderError, match=f"{said}; choose another"):  # not --overwrite
            Job(tmp_path, "search", resume=resume)
    assert files(tmp_path) == before


def test_folders_that_cannot_be_exchanged_are_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = made(tmp_path / "out")
    (tmp_path / "link").symlink_to(folder)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for link in ("link", "dangling"):
        with pytest.raises(FolderError, match=f"{link} is a symbolic link"):
            Job(tmp_path / link, "search", overwrite=True)
    assert Job(tmp_path / "link", "search", resume=True).resumes  # nothing is exchanged
    (folder / "below").mkdir()
    for current, out in ((folder, "."), (folder / "below", ".."), (folder, folder)):
        monkeypatch.chdir(current)
        with pytest.raises(FolderError, match="contains the current folder"):
            Job(Path(out), "search", overwrite=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Path, "is_mount", lambda path: path == folder.resolve())
    with pytest.raises(FolderError, match="is a mounted volume"):
        Job(folder, "search", overwrite=True)
    assert (folder / "results.json").read_text() == "old"


def test_inputs_in_the_folder_are_refused(tmp_path: Path) -> None:
    folder = made(tmp_path / "out")
    (tmp_path / "photos").symlink_to(folder / "results.json")
    for given in (folder / "results.json", folder, tmp_path / "photos"):
        with pytest.raises(FolderError, match="is inside the results folder"):
            Job(folder, "search", overwrite=True, inputs=[None, "vit_small_patch16_224", given])
    assert Job(folder, "search", overwrite=True, inputs=[tmp_path]).replaces


def test_folders_are_numbered(tmp_path: Path) -> None:
    target = [Job(tmp_path / "deep" / "photo", "search", numbered=True) for _ in range(3)]
    assert not list(tmp_path.iterdir())
    assert [each.create().name for each in target] == ["photo", "photo-2", "photo-3"]

    def fail(part: Path) -> None:
        raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        Job(tmp_path / "deep" / "photo", "search", numbered=True).create(fail)
    assert len(list((tmp_path / "deep").iterdir())) == 3


@pytest.mark.parametrize("failures", [1, 2])
def test_a_failed_exchange_keeps_the_old_and_the_new_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    folder = tmp_path / "out"
    write_folder_whole(folder, lambda part: (part / "old").touch())
    rename, calls = Path.rename, []

    def failing(self: Path, target: Path) -> Path:
        calls.append(self)
        if 1 < len(calls) <= 1 + failures:  # moving the new folder fails, and optionally moving the old one back
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(FolderError, match="the complete results are in") as raised:
        write_folder_whole(folder, lambda part: (part / "new").touch(), replaces=True)
    places = {path.name: path.parent for path in tmp_path.rglob("*") if path.is_file()}
    assert places.keys() == {"old", "new"}
    assert str(places["new"]) in str(raised.value)
    assert places["old"] == folder if failures == 1 else str(places["old"]) in str(raised.value)


def test_results_are_not_written_to_a_url() -> None:
    with pytest.raises(FolderError, match=r"--out s3:/bucket/out is a URL: results are written to a folder"):
        Job(Path("s3://bucket/out"), "embedding")


def test_names_of_results_do_not_leave_their_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "out")
    for name in ("../up", "..", ".", "a/../../up", "/tmp/up"):
        with pytest.raises(FolderError, match="--name"):
            named_folder(out, name)
    assert named_folder(out, "a/b") == tmp_path / "out" / "a" / "b"
    backbone = ("--backbone", "resnet18")
    for words in (
        ("pretrain", "--config", "quickstart"),
        ("pretrain", "--config", "quickstart", "--continue"),
        ("adapt", tmp_path, *backbone),
        ("distill", tmp_path, "--teacher", "resnet18", *backbone),
        ("study", "table5_small"),
    ):
        assert main([*map(str, words), "--out", out, "--name", "../up"]) == 2
        assert "--name" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


# ------------------------------------------------------------------------------------------------- work in parts

SQUARES = """
import sys, time
from pathlib import Path
from cribo.base.files import write_text
from cribo.base.job import Job
out, pause, options = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
with Job(out, "squares", resume="resume" in options).open({"power": 2}, command="squares") as job:
    for number in job.missing(range(20)):
        write_text(out / f"{number}.txt", str(number**2))
        job.done(number, bytes=len(str(number**2)))
        print(number, flush=True)
        time.sleep(pause)
    job.finish()
"""


def squares(
    out: Path, numbers: Sequence[int] = range(20), *, power: int = 2, share: str = "1/1", **options: Any
) -> Job:
    """Write squares, each as a part."""
    with Job(out, "squares", **options).open({"power": power}, share=share) as job:
        for number in job.missing(numbers):
            write_text(job.path / f"{number}.txt", str(number**power))
            job.done(number, bytes=len(str(number**power)))
        job.finish()
    return job


def test_a_killed_job_is_resumed_to_equal_results(tmp_path: Path) -> None:
    whole = files(squares(tmp_path / "whole").path)
    for parts in (1, 7, 19):
        out = tmp_path / f"killed-{parts}"
        with subprocess.Popen(
            [sys.executable, "-c", SQUARES, str(out), "0.02"], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            for _ in range(parts):
                process.stdout.readline()
            with pytest.raises(FolderError, match="in use by another process"):
                squares(out, resume=True)
            process.kill()
        assert not read_record(out, "squares").finished
        with (out / ACCOUNTS).open("a") as file:
            file.write('{"part": "1')  # a line that was not written to its end
        with pytest.raises(FolderError):
            Job(out, "squares", resume=False)
        assert files(squares(out, resume=True).path).keys() == whole.keys()
        assert {name: content for name, content in files(out).items() if name.endswith("txt")} == {
            name: content for name, content in whole.items() if name.endswith("txt")
        }
        assert read_record(out, "squares").finished
        assert Job(out, "squares", resume=True).accounts.keys() == {str(number) for number in range(20)}


def test_a_finished_job_does_nothing_again_except_new_parts(tmp_path: Path) -> None:
    out = squares(tmp_path / "out", range(5)).path
    before = files(out)
    assert files(squares(out, range(5), resume=True).path) == before
    with Job(out, "squares", resume=True).open({"power": 2}) as job:
        assert job.missing(range(6)) == [5]
        job.done(5)
        assert not read_record(out, "squares").finished
    with pytest.raises(FolderError, match="not finished: repeat its command with --resume"):
        finished_shares([out], "squares")


def test_other_inputs_are_not_resumed(tmp_path: Path) -> None:
    before = files(squares(tmp_path / "out", range(2)).path)
    refused: list[tuple[dict[str, Any], str]] = [
        ({"power": 3}, "power was 2, is 3"),
        ({"share": "1/2"}, "part was 1/1, is 1/2"),
    ]
    for changes, named in refused:
        with pytest.raises(FolderError, match=named):
            squares(tmp_path / "out", range(2), resume=True, **changes)
    assert files(tmp_path / "out") == before


def test_results_of_an_earlier_version_are_not_resumed(tmp_path: Path) -> None:
    record = {"made_by": "cribo", "version": "0.2.0", "kind": "squares"}
    (tmp_path / RECORD).write_text(json.dumps(record))
    with pytest.raises(FolderError, match=r"begun by cribo 0\.2\.0"):
        squares(tmp_path, resume=True)
    with pytest.raises(FolderError, match=r"written by cribo 0\.2\.0"):
        finished_shares([tmp_path], "squares")


def interrupted(out: Path, error: BaseException, parts: int) -> None:
    """Raise an error after some parts."""
    with Job(out, "squares", resume=False).open({}) as job:
        for number in job.missing(range(5), unit="squares"):
            if number == parts:
                raise error
            job.done(number)


def test_an_interruption_says_what_is_done_and_how_to_continue(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt, match=r"2 of 5 squares are done in .*out; .* the command with --resume"):
        interrupted(tmp_path / "out", KeyboardInterrupt(), 2)


@pytest.mark.parametrize("parts", [0, 1])
def test_an_input_error_leaves_no_new_folder_unless_something_was_done(tmp_path: Path, parts: int) -> None:
    with pytest.raises(ConfigError, match="too late"):
        interrupted(tmp_path / "out", ConfigError("too late"), parts)
    assert (tmp_path / "out").exists() == bool(parts)


def test_a_job_in_progress_is_neither_resumed_nor_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with Job(out, "squares").open({"power": 2}) as job:
        job.done(0)
        before = files(out)
        for other in (Job(out, "squares", resume=True), Job(out, "squares", overwrite=True)):
            with pytest.raises(FolderError, match=r"in use by another process.*choose another --out"):
                other.open({"power": 2}).__enter__()
        assert files(out) == before
    assert files(squares(out, range(2), overwrite=True).path).keys() == {RECORD, ACCOUNTS, "0.txt", "1.txt"}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_an_exception_in_a_fork_does_not_release_the_lock(tmp_path: Path) -> None:
    out, child = tmp_path / "out", 1
    try:
        with Job(out, "squares").open({"power": 2}):
            child = os.fork()
            if child == 0:
                raise RuntimeError
            os.waitpid(child, 0)
            command = [sys.executable, "-c", SQUARES, str(out), "0", "resume"]
            other = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
            assert other.returncode == 1
            assert "is in use by another process" in other.stderr
    except RuntimeError:
        os._exit(0)


@pytest.mark.parametrize("below", ["", "deeper/still"])
@pytest.mark.parametrize("options", [{}, {"overwrite": True}, {"numbered": True}, {"resume": True}])
def test_a_file_is_not_a_folder(tmp_path: Path, below: str, options: dict[str, Any]) -> None:
    (tmp_path / "file").write_text("text")
    with pytest.raises(FolderError, match="file is a file, not a folder: choose another --out"):
        Job(tmp_path / "file" / below / ("name" if "numbered" in options else ""), "search", **options)
    assert (tmp_path / "file").read_text() == "text"


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root can write anywhere")
def test_a_folder_without_write_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(FolderError, match=r"cannot write to .* choose another --out"):
            Job(tmp_path / "out", "search")
    finally:
        tmp_path.chmod(0o700)


def test_resume_starts_a_job_in_a_new_or_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    one, other = squares(tmp_path / "new", range(2), resume=True), squares(tmp_path / "out", range(2))
    assert files(one.path) == files(other.path)


def test_overwrite_excludes_resume_and_numbers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--resume"):
        Job(tmp_path / "out", "squares", resume=True, overwrite=True)
    with pytest.raises(ConfigError, match="--out"):
        Job(tmp_path / "out", "squares", overwrite=True, numbered=True)


def test_resume_of_a_numbered_job_continues_the_last_of_its_kind(tmp_path: Path) -> None:
    def job() -> Job:
        return Job(tmp_path / "out", "squares", resume=True, numbered=True)

    assert not job().resumes
    with job().open({"power": 2}) as started:
        assert started.path.name == "out"
    for number in (2, 10):
        squares(tmp_path / f"out-{number}", range(1))
    Job(tmp_path / "out-11", "search").create()
    (tmp_path / "out-12").mkdir()
    assert (job().path.name, job().resumes) == ("out-10", True)


def test_merged_shares_equal_one_job(tmp_path: Path) -> None:
    whole = files(squares(tmp_path / "whole", range(6)).path)
    folders = [squares(tmp_path / f"{n}", range(3 * (n - 1), 3 * n), share=f"{n}/2").path for n in (2, 1)]
    shares = finished_shares(folders, "squares")
    assert [share.record.share for share in shares] == ["1/2", "2/2"]

    def write(folder: Path) -> None:
        for share in shares:
            for part in share.accounts:
                (folder / f"{part}.txt").write_bytes((share.folder / f"{part}.txt").read_bytes())

    assert files(Job(tmp_path / "all", "squares").merge(shares, write)) == whole
    assert files(squares(tmp_path / "all", range(6), resume=True).path) == whole


def test_shares_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    one = squares(tmp_path / "one", range(2), share="1/2").path
    other = squares(tmp_path / "other", range(2), power=3, share="2/2").path
    with pytest.raises(ConfigError, match=r"other differs from .*one .*: power was 2, is 3"):
        finished_shares([one, other], "squares")
    with pytest.raises(ConfigError, match="part 2/2 is missing"):
        finished_shares([one], "squares")
    with pytest.raises(FolderError, match="contains search results, not squares results"):
        finished_shares([one, made(tmp_path / "search")], "squares")


# ------------------------------------------------------------------------------------------- parts of many processes


def joined(out: Path, power: int = 2) -> Job:
    """Join a job whose folder has a file that all processes share."""
    job = Job(out, "squares", resume=True)
    job.join({"power": power}, lambda folder: write_text(folder / "plan.txt", str(os.getpid())))
    return job


def test_processes_that_start_together_share_one_folder(tmp_path: Path) -> None:
    first, second = (Job(tmp_path / "out", "squares", resume=True) for _ in range(2))  # neither sees a folder
    first.join({"power": 2}, lambda folder: write_text(folder / "plan.txt", "first"))
    second.join({"power": 2}, lambda folder: write_text(folder / "plan.txt", "second"))
    assert (tmp_path / "out" / "plan.txt").read_text() == "first"
    with pytest.raises(FolderError, match="power was 2, is 3"):
        joined(tmp_path / "out", power=3)


def test_a_part_is_claimed_by_one_process(tmp_path: Path) -> None:
    first, second = joined(tmp_path / "out"), joined(tmp_path / "out")
    with first.claim("a") as own, second.claim("a") as taken, second.claim("b") as other:
        assert (own, taken, other) == (True, False, True)
    with second.claim("a") as free:
        assert free


def test_files_of_others_are_not_joined(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("years of work")
    with pytest.raises(FolderError, match="not created by cribo"):
        joined(tmp_path)
