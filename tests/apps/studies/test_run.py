"""`cribo study` with a small network: cells, resume, parts, failures, tables, and comparison of two studies."""

import csv
import json
import os
import shlex
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image
from tests.apps.studies.conftest import CHANGES, ROWS, Written
from tests.commands import Commands
from tests.faults.runs import last_row

from cribo.apps.studies.comparison import compare_studies
from cribo.apps.studies.config import load_study, share_of
from cribo.apps.studies.run import Study, run_study
from cribo.base.errors import FolderError, InputError
from cribo.cli import main
from cribo.data.scenes import Scenes
from cribo.evaluation.intervals import counts_miou

SUPERVISED = {"objective.name": "cribo.objectives.controls.SupervisedCrIBo"}  # needs labels


@pytest.mark.slow
def test_parts_train_each_cell_once_and_end_with_the_table(
    study: Written, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = study()
    assert main(["study", str(path), "--part", "1/2"]) == 0
    assert "2 cells of other parts or processes are not finished" in " ".join(capsys.readouterr().out.split())
    folder = tmp_path / "studies" / "mine"
    summaries = {name: folder / "cells" / name / "summary.json" for name in ("image-seed0", "image-seed1")}
    before = {name: summary.stat().st_mtime_ns for name, summary in summaries.items()}
    assert main(["study", str(path)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "all against image: mIoU" in printed
    assert "not enough seeds" in printed
    assert {name: summary.stat().st_mtime_ns for name, summary in summaries.items()} == before
    # Rows with the same configuration share a cell.
    assert sorted(cell.name for cell in (folder / "cells").iterdir()) == sorted(
        f"{row}-seed{seed}" for row in ("all", "image") for seed in (0, 1)
    )
    results = json.loads((folder / "results.json").read_text())["scores"]["dense-nn"]
    rows = results["rows"]
    assert rows["all"] == {**rows["the same"], "paper": 0.581}
    values = rows["all"]["seeds"]
    assert rows["all"]["mean"] == pytest.approx((values["0"] + values["1"]) / 2)
    written = json.loads((folder / "scores" / "dense-nn" / "all-seed1" / "results.json").read_text())
    assert written["results"][0]["miou"] == values["1"]
    [first, _] = results["comparisons"]
    assert (first["row"], first["reference"], first["seeds"]) == ("all", "image", [0, 1])
    assert first["difference"] == pytest.approx(rows["all"]["mean"] - rows["image"]["mean"])
    assert first["interval"] == [None, None]
    assert first["paper"] == pytest.approx(0.265)
    with (folder / "table.csv").open(encoding="utf-8") as lines:
        table = list(csv.DictReader(lines))
    assert [(line["row"], line["seed"]) for line in table][:2] == [("image", "0"), ("image", "1")]
    assert r"\begin{tabular}{lc}" in (folder / "table.tex").read_text()
    assert "| image |" in (folder / "table.md").read_text()
    assert (folder / "figure.png").stat().st_size > 5000
    assert main(["study", "compare", str(folder), str(folder)]) == 0
    assert "3 comparisons" in capsys.readouterr().out
    # Another study, without its images: only the results are read.
    changed = study(
        changes={**CHANGES, "optim.lr": 0.1}, seeds=[1], rows={"all": {}, "other": {"losses.image": 0}}, paper={}
    )
    run_study(changed, name="after")
    [compared] = compare_studies(folder, folder.with_name("after"))
    [[row, before, after, difference]] = compared.rows
    assert (row, [column.title for column in compared.columns]) == ("all", ["row", "mine", "after", "difference"])
    assert "±" in before
    assert "±" not in after
    assert float(difference)
    other = study(
        seeds=[1], scores={"dense-nn": {"data": {"name": "scenes", "limit": 6}, "ratios": 1, "neighbours": 3}}
    )
    run_study(other, name="other")
    with pytest.raises(
        InputError, match="dense-nn cannot be compared: neighbours is 5 in the first study, and 3 in the"
    ):
        compare_studies(folder, folder.with_name("other"))


@pytest.mark.slow
def test_two_scores_on_the_same_data_are_compared_with_their_own_settings(study: Written) -> None:
    near, far = (
        {"evaluation": "dense-nn", "data": {"name": "scenes", "limit": 6}, "ratios": 1, "neighbours": number}
        for number in (1, 40)
    )
    result = run_study(
        study(seeds=[0], rows={"image": ROWS["image"], "all": {}}, paper={}, scores={"a b": near, "a-b": far})
    )
    first, second = (result.table.measured[name].results["all"][0] for name in ("a b", "a-b"))
    assert (first.folder, second.folder) == ("scores/a-b/all-seed0", "scores/a-b-2/all-seed0")
    assert first.value != second.value
    assert first.counts is not None
    assert float(counts_miou(first.counts[0].sum(dim=0).double())) == pytest.approx(first.value)
    assert not list(result.folder.glob(".features*"))


@pytest.mark.slow
def test_a_signal_stops_the_study_and_the_same_command_continues_it(study: Written, commands: Commands) -> None:
    path = study(seeds=[0], rows={"image": ROWS["image"], "all": {}}, paper={}, budget={"epochs": 60})
    folder = Path("studies/mine").resolve()
    begun = commands.fork("study", path, "--out", folder.parent)
    first, second = (folder / "cells" / name for name in ("image-seed0", "all-seed0"))
    while last_row(second) < 1:
        assert begun.wait(0.01) is None, begun.output[-5000:]
    os.kill(begun.pid, signal.SIGTERM)
    assert begun.wait(60) == 143, begun.output[-5000:]
    assert "to continue the study, repeat the command" in " ".join(begun.output.split())
    assert list((second / "checkpoints").iterdir())
    assert not (second / "summary.json").exists()
    assert "| image |" in (folder / "table.md").read_text()
    trained = (first / "summary.json").stat().st_mtime_ns
    result = run_study(path)
    assert (result.failed, result.unfinished) == ({}, [])
    assert (first / "summary.json").stat().st_mtime_ns == trained
    steps = [int(row["step"]) for row in csv.DictReader((second / "metrics.csv").open(encoding="utf-8"))]
    assert steps == sorted(set(steps))
    assert steps[-1] == 120


@pytest.mark.slow
def test_a_network_is_scored_by_a_training(study: Written) -> None:
    for place, first in (("train", 0), ("val", 8)):
        scenes = Scenes(4, size=64, first=first)
        for kind in ("images", "labels"):
            Path("labelled", kind, place).mkdir(parents=True)
        for index in range(4):
            Image.fromarray(scenes.load(index).permute(1, 2, 0).numpy()).save(f"labelled/images/{place}/{index}.png")
            Image.fromarray(scenes.labels(index).numpy()).save(f"labelled/labels/{place}/{index}.png")
    Path("labelled/classes.txt").write_text("\n".join(map(str, range(9))), encoding="utf-8")
    score = {"data": "labelled", "iterations": 2, "crop": 32, "batch_size": 2, "learning_rates": 0.1}
    path = study(rows={"image": ROWS["image"], "all": {}}, seeds=[0, 1, 2], paper={}, scores={"linear": score})
    result = run_study(path)
    assert not result.failed
    [pair] = result.table.pairs["linear"]
    assert pair.difference.low is not None
    assert "not enough seeds" not in pair.sentence("miou")


@pytest.mark.slow
def test_a_cell_of_another_process_is_left_to_it(study: Written) -> None:
    path = study(seeds=[0], rows={"image": ROWS["image"], "all": {}}, paper={})
    started = Study(load_study(path), Path("studies/mine"))
    first, second = started.start()
    with started.job.claim(first.name):
        result = run_study(path)
    assert not result.failed
    assert result.unfinished == [first.name]
    assert list(result.table.measured["dense-nn"].results["all"]) == [second.seed]


@pytest.mark.slow
def test_a_cell_that_fails_does_not_stop_the_others(study: Written, capsys: pytest.CaptureFixture[str]) -> None:
    path = study(seeds=[0], paper={})
    Study(load_study(path), Path("studies/mine")).start()
    foreign = Path("studies/mine/cells/image-seed0/mine.txt")
    foreign.parent.mkdir(parents=True)
    foreign.write_text("a file of the user", encoding="utf-8")
    assert main(["study", str(path)]) == 2
    assert "1 cell failed, see above; to try again, repeat the command: image-seed0" in capsys.readouterr().err
    assert foreign.read_text(encoding="utf-8") == "a file of the user"
    foreign.unlink()
    result = run_study(path)
    assert not result.failed
    assert not result.unfinished
    assert list(result.table.measured["dense-nn"].results["image"]) == [0]


def test_shares_cover_all_cells_once() -> None:
    shares = [list(range(7))[share_of(f"{part}/3")] for part in (1, 2, 3)]
    assert sorted(cell for share in shares for cell in share) == list(range(7))
    for part in ("0/3", "4/3", "1", "a/b"):
        with pytest.raises(ValueError, match=f"--part must be i/n with i from 1 to n, such as 2/5, got {part}"):
            share_of(part)


def scores(**changes: Any) -> dict[str, Any]:
    return {"scores": {"dense-nn": {"data": "scenes", **changes}}}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rows": {"a": {}, "b": {"objects.num_objects": 5000}}}, "row 'b': objects.num_objects"),
        ({"rows": {"a": {}, "b": {"optim.batch_size": 64}}}, "row 'b': .*32 images"),
        ({"changes": {**CHANGES, "runtime.devices": 2}}, "row 'image': .*runtime.devices 2"),
        ({"scores": {"dense": {"data": "scenes"}}}, "scores.dense: .*dense-nn"),
        (scores(ratio=1), "scores.dense-nn: .*did you mean ratios"),
        (scores(data="nowhere"), "scores.dense-nn: .*nowhere"),
        (scores(size=[50, 50]), "row 'image': scores.dense-nn: .*50"),
        (scores(runtime={"devices": "cpu,cpu"}), "scores.dense-nn: .* one device, got cpu,cpu"),
        ({"changes": {**CHANGES, "data.workers": 1}, "budget": {"cpu_seconds": 10}}, "set data.workers to 0"),
        ({"budget": {"images": 1}}, "the budget allows 0.03 epochs"),
        ({"rows": {"a": {}, "labels": SUPERVISED}, "changes": {**CHANGES, "data.root": "images"}}, "row 'labels'"),
    ],
)
def test_invalid_cells_are_found_before_the_first_is_trained(
    study: Written, changes: dict[str, Any], named: str
) -> None:
    Path("images").mkdir()
    for index in range(32):
        Image.fromarray(Scenes(32, size=64).load(index).permute(1, 2, 0).numpy()).save(f"images/{index}.png")
    with pytest.raises(ValueError, match=named):
        run_study(study(**{"paper": {}, **changes}))
    assert not Path("studies").exists()


def test_a_changed_study_is_not_continued(study: Written) -> None:
    path = study()
    Study(load_study(path), Path("studies/mine")).start()
    study(title="Another title", compare=[["image", "all"]])  # does not change the cells
    Study(load_study(path), Path("studies/mine"))
    rows = {**ROWS, "all": {"losses.cross_image": 0.5}}
    for changes, named in (
        ({"budget": {"epochs": 2}}, r"budget\.epochs was 1, is 2\. Restore it, or choose another --name"),
        ({"rows": {**ROWS, "extra": {}}}, "rows was image, all, the same, is image, all, the same, extra"),
        ({"rows": rows}, r"rows\.all\.losses\.cross_image was 1\.0, is 0\.5"),
    ):
        study(**changes)
        with pytest.raises(InputError, match=named):
            Study(load_study(path), Path("studies/mine"))


def test_a_full_disk_is_found_before_the_folder_is_made(study: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    path = study()
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=10))
    with pytest.raises(InputError, match=r"the cells need 0\.0 GiB, but .* has 0\.0 GiB left: choose another --out"):
        run_study(path)
    assert not Path("studies").exists()


def test_a_folder_below_a_file_is_refused_before_the_study_is_planned(study: Written) -> None:
    path = study()
    Path("file").touch()
    with pytest.raises(FolderError, match="file is a file, not a folder: choose another --out"):
        Study(load_study(path), Path("file", "mine")).start()


def test_budgets_are_rounded_to_whole_epochs(study: Written) -> None:
    def epochs(**budget: float) -> int | None:
        return Study(load_study(study(budget=budget)), Path("none")).plan()["all"].epochs

    # 32 images, 2 steps per epoch
    assert [epochs(epochs=3), epochs(steps=5), epochs(images=100)] == [3, 2, 3]
    assert (epochs(cpu_seconds=1.0) or 0) >= 1


def test_the_plan_and_the_job_file_name_cells_and_parts(study: Written, capsys: pytest.CaptureFixture[str]) -> None:
    path = study()
    assert main(["study", str(path), "--print_plan"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "as all" in printed
    assert "4 of 4 cells left" in printed
    assert not Path("studies").exists()
    assert main(["study", str(path), "--slurm", "3"]) == 0
    job = Path("studies/mine/job.sbatch").read_text()
    assert "#SBATCH --array=1-3\n" in job
    program = f"{shlex.quote(sys.executable)} -m cribo"
    assert job.endswith(f'srun {program} study {path} --out studies --name mine --part "$SLURM_ARRAY_TASK_ID/3"\n')
    path = path.rename(path.with_name("my $HOME study.yaml"))
    capsys.readouterr()
    assert main(["study", str(path), "--slurm", "3"]) == 0
    folder = Path("studies/my $HOME study")
    lines = (folder / "job.sbatch").read_text().splitlines()
    options = [
        word for line in lines if line.startswith("#SBATCH") for word in shlex.split(line.removeprefix("#SBATCH"))
    ]
    assert "--job-name=my $HOME study" in options
    assert f"--output={folder}/slurm-%A_%a.log" in options
    assert shlex.split(lines[-1])[4:9] == ["study", str(path), "--out", "studies", "--name"]
    printed = capsys.readouterr().out.partition("to start it")[2].splitlines()[0]
    assert shlex.split(printed) == ["sbatch", str(folder / "job.sbatch")]
    assert main(["study", str(path), "--slurm", "0"]) == 2
    assert "--slurm must be a number of parts >= 1, got 0" in capsys.readouterr().err
