import json
import shutil
from pathlib import Path

import pytest
from tests.features.memory.coded import save_image

from cribo.apps.segment.merging import merge_segmentations
from cribo.base.errors import ConfigError, DataError, FolderError
from cribo.base.job import RECORD
from cribo.cli import main

from .test_run import FIRST, SECOND, enlarged, files, folder, segment  # noqa: F401 (a fixture)


def segment_shares(folder: Path, shares: int, **changes) -> list[Path]:  # noqa: F811
    for number in range(1, shares + 1):
        segment(folder, out=f"p{number}", part=f"{number}/{shares}", **changes)
    return [folder / f"p{number}" for number in range(1, shares + 1)]


def test_merged_labels_equal_those_of_one_command(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    (folder / "images" / "sub" / "2.bmp").write_bytes(b"nothing")  # the only image of a share
    whole = segment(folder, out="whole")
    parts = segment_shares(folder, 3)
    with monkeypatch.context() as patch:
        patch.setattr("cribo.features.memory.memory.SegmentationMemory.__init__", None)
        done = merge_segmentations([*reversed(parts)], out=folder / "all")
    assert (done.images, done.skipped, done.shares) == (whole.images, whole.skipped, whole.shares)
    merged, expected = files(folder / "all"), files(folder / "whole")
    own = ("about.json", ".lock")
    assert {name: merged[name] for name in merged if name not in own} == {
        name: expected[name] for name in expected if name not in own
    }
    about, other = (json.loads((folder / out / "about.json").read_text()) for out in ("all", "whole"))
    for name in ("seconds", "seconds_per_image"):
        assert about.pop(name) > 0
        other.pop(name)
    assert about == other
    assert (parts[0] / "labels" / "1.png").samefile(folder / "all" / "labels" / "1.png")
    assert segment(folder, out="all", resume=True).reused == 2


def test_images_that_moved_to_another_share_are_merged_once(folder: Path) -> None:  # noqa: F811
    segment_shares(folder, 2)
    save_image(folder / "images" / "0.bmp", enlarged(SECOND))
    for number in (1, 2):
        segment(folder, out=f"p{number}", part=f"{number}/2", resume=True)
    assert "sub/2.bmp" in (folder / "p2" / "summary.csv").read_text()
    done = merge_segmentations([folder / "p1", folder / "p2"], out=folder / "all")
    segment(folder, out="whole")
    assert (done.images, done.earlier) == (4, 0)
    assert (folder / "all" / "summary.csv").read_text() == (folder / "whole" / "summary.csv").read_text()


def test_parts_that_do_not_belong_together_are_refused(folder: Path) -> None:  # noqa: F811
    _, p2 = segment_shares(folder, 2)
    segment(folder, out="other", part="2/2", neighbours=2)
    shutil.copytree(p2, folder / "lost")
    (folder / "lost" / "overlays" / "sub" / "2.jpg").unlink()
    save_image(folder / "images" / "4.bmp", enlarged(FIRST))
    segment(folder, out="new", part="2/2")
    shutil.copytree(p2, folder / "cut")
    record = json.loads((p2 / RECORD).read_text())
    (folder / "cut" / RECORD).write_text(json.dumps({**record, "finished": False}))
    refused: list[tuple[list[str], str, type[Exception], str]] = [
        (["p1", "other"], "all", ConfigError, r"other differs from .*p1 .*: neighbours was 1, is 2\. Run"),
        (["p1"], "all", ConfigError, r"part 2/2 is missing"),
        (["p1", "p2"], "p1", FolderError, r"the input .*p1 is inside the results folder"),
        (["p1", "lost"], "all", DataError, r"lost lacks the results of sub/2\.bmp, or some of its files"),
        (["p1", "new"], "all", ConfigError, r"the collection had 3 images, has 4\. Run"),
        (["p1", "cut"], "all", FolderError, r"cut is not finished: repeat its command with --resume"),
    ]
    for parts, out, error, named in refused:
        with pytest.raises(error, match=named):
            merge_segmentations([folder / part for part in parts], out=folder / out)
    assert not (folder / "all").exists()


def test_more_shares_than_images_are_refused(folder: Path) -> None:  # noqa: F811
    with pytest.raises(
        ConfigError, match=r"part 4/4: there are more shares than images, of which there are 3: use 1/3"
    ):
        segment(folder, part="4/4")
    assert not (folder / "out").exists()


def test_the_command(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    monkeypatch.chdir(folder)
    segment_shares(folder, 2)
    capsys.readouterr()
    assert main(["merge", "p2", "p1", "--out", "all"]) == 0
    said = capsys.readouterr().out
    assert "3 images of 2 parts" in said
    assert "all/overlays" in said
    assert main(["merge", "p2", "p1", "--out", "all"]) == 2
    assert "all already exists: choose another --out, or replace it with --overwrite" in capsys.readouterr().err
    assert main(["merge", "p2", "p1", "--out", "all", "--overwrite"]) == 0
