import json
from pathlib import Path

import pytest

from cribo.base.errors import FolderError
from cribo.base.files import write_folder_whole
from cribo.base.folders import MARKER, ResultFolder, describe_changes, named_folder, require_same
from cribo.cli import main


def made(path: Path, kind: str = "search", content: str = "old") -> Path:
    return ResultFolder(path, kind).create(lambda part: (part / "results.json").write_text(content))


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_results_are_replaced_only_on_request_and_only_when_the_new_ones_are_complete(tmp_path: Path) -> None:
    folder = made(tmp_path / "out")
    assert json.loads((folder / MARKER).read_text())["kind"] == "search"
    before = files(folder)
    with pytest.raises(FolderError, match="out already exists: choose another --out"):
        ResultFolder(folder, "search")

    def fail(part: Path) -> None:
        assert files(folder) == before
        raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        ResultFolder(folder, "search", overwrite=True).create(fail)
    assert files(folder) == before
    ResultFolder(folder, "search", overwrite=True).create(lambda part: (part / "new").touch())
    assert files(folder).keys() == {MARKER, "new"}
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, r"has no cribo\.json: not created by cribo"),
        ("{}", "not created by cribo"),
        ("[]", "not created by cribo"),
        ('{"kind": "search"}', "not created by cribo"),  # another program may use the same file name
        ('{"made_by": "cribo", "kind": "trained evaluation"}', "contains trained evaluation results"),
    ],
)
def test_other_contents_are_never_replaced(tmp_path: Path, content: str | None, said: str) -> None:
    (tmp_path / "results.json").write_text("years of work")
    if content is not None:
        (tmp_path / MARKER).write_text(content)
    before = files(tmp_path)
    for resume in (False, True):
        with pytest.raises(FolderError, match=said):
            ResultFolder(tmp_path, "search", overwrite=True, resume=resume)
    for resume in (False, True):
        with pytest.raises(FolderError, match=f"already exists and .*{said}; choose another"):  # not --overwrite
            ResultFolder(tmp_path, "search", resume=resume)
    assert files(tmp_path) == before


def test_results_of_an_earlier_version_are_resumed_but_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    assert ResultFolder(tmp_path, "pretraining", resume=True, known_by="config.yaml").resumes
    with pytest.raises(FolderError, match="not created by cribo"):
        ResultFolder(tmp_path, "pretraining", overwrite=True, known_by="config.yaml")


def test_folders_that_cannot_be_exchanged_are_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = made(tmp_path / "out")
    (tmp_path / "link").symlink_to(folder)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for link in ("link", "dangling"):
        with pytest.raises(FolderError, match=f"{link} is a symbolic link"):
            ResultFolder(tmp_path / link, "search", overwrite=True)
    assert ResultFolder(tmp_path / "link", "search", resume=True).resumes  # nothing is exchanged
    (folder / "below").mkdir()
    for current, out in ((folder, "."), (folder / "below", ".."), (folder, folder)):
        monkeypatch.chdir(current)
        with pytest.raises(FolderError, match="contains the current folder"):
            ResultFolder(Path(out), "search", overwrite=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Path, "is_mount", lambda path: path == folder.resolve())
    with pytest.raises(FolderError, match="is a mounted volume"):
        ResultFolder(folder, "search", overwrite=True)
    assert (folder / "results.json").read_text() == "old"


def test_inputs_in_the_folder_are_refused(tmp_path: Path) -> None:
    folder = made(tmp_path / "out")
    (tmp_path / "photos").symlink_to(folder / "results.json")
    for given in (folder / "results.json", folder, tmp_path / "photos"):
        with pytest.raises(FolderError, match="is inside the results folder"):
            ResultFolder(folder, "search", overwrite=True, inputs=[None, "vit_small_patch16_224", given])
    assert ResultFolder(folder, "search", overwrite=True, inputs=[tmp_path]).replaces


def test_folders_are_numbered(tmp_path: Path) -> None:
    target = [ResultFolder(tmp_path / "deep" / "photo", "search", numbered=True) for _ in range(3)]
    assert not list(tmp_path.iterdir())
    assert [each.create().name for each in target] == ["photo", "photo-2", "photo-3"]

    def fail(part: Path) -> None:
        raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        ResultFolder(tmp_path / "deep" / "photo", "search", numbered=True).create(fail)
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


def test_results_are_resumed_only_with_the_same_inputs(tmp_path: Path) -> None:
    file = tmp_path / "about.json"

    def resume(now: dict[str, int | None]) -> None:
        require_same(file, lambda: describe_changes(json.loads(file.read_text()), now), advice="Use another.")

    file.write_text('{"size": 448, "seed": 0}')
    resume({"size": 448, "seed": 0, "added": None})
    with pytest.raises(
        FolderError,
        match=r"different inputs and cannot be resumed: size was 448, is 224; seed was 0, is not given\. Use another\.",
    ):
        resume({"size": 224})
    for damaged in ("{", "[]"):
        file.write_text(damaged)
        with pytest.raises(FolderError, match=r"about\.json is damaged: choose another --out"):
            resume({"size": 448})
    file.unlink()
    with pytest.raises(FolderError, match=r"about\.json is damaged"):
        resume({"size": 448})


def test_results_are_not_written_to_a_url() -> None:
    with pytest.raises(FolderError, match=r"--out s3:/bucket/out is a URL: results are written to a folder"):
        ResultFolder(Path("s3://bucket/out"), "embedding")


@pytest.mark.parametrize("name", ["../up", "..", ".", "a/../../up", "/tmp/up"])
def test_names_of_results_do_not_leave_their_folder(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    with pytest.raises(FolderError, match="--name"):
        named_folder(out, name)
    images = ["--backbone", "resnet18"]
    commands = [
        ["pretrain", "--config", "quickstart", "--out", out, "--name", name],
        ["pretrain", "--config", "quickstart", "--out", out, "--name", name, "--continue"],
        ["adapt", str(tmp_path), *images, "--out", out, "--name", name],
        ["distill", str(tmp_path), "--teacher", "resnet18", *images, "--out", out, "--name", name],
        ["study", "losses_small", "--out", out, "--name", name],
    ]
    for words in commands:
        assert main(words) == 2
        assert "--name" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


def test_names_of_results_may_have_folders(tmp_path: Path) -> None:
    assert named_folder(tmp_path, "a/b") == tmp_path / "a" / "b"
