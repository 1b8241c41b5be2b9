"""Rows of weights, columns of one evaluation, steps as a score, and studies of which something is missing."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.apps.studies.conftest import CHANGES, Written

from cribo.apps.studies.config import load_study
from cribo.apps.studies.costs import training_seconds
from cribo.apps.studies.run import run_study
from cribo.base.errors import ConfigError, MissingData
from cribo.cli import main
from cribo.models import build_backbone, save_backbone
from cribo.pretraining.loading import load_config

RATIOS = {"evaluation": "dense-nn", "data": {"name": "scenes", "limit": 6}, "ratios": [2, 1], "neighbours": 5}
TRAINED = {"all": {}}


def weights(path: Path) -> Path:
    """Write weights of a small network."""
    save_backbone(build_backbone("resnet18", args={"layers": [1, 1, 0, 0], "channels": [8, 8, 8, 8]}), path)
    return path


def missing(path: str, **others: Any) -> dict[str, Any]:
    return {"checkpoint": path, "origin": "https://example.org/weights", "licence": "cc-by-nc-4.0", **others}


def test_weights_are_evaluated_beside_trained_networks_by_several_columns(study: Written) -> None:
    path = weights(Path("weights"))
    rows = {"public": {"checkpoint": str(path)}, "never": {"checkpoint": None, "origin": "not public"}, **TRAINED}
    scores = {"half": {**RATIOS, "at": 2}, "whole": {"of": "half", "at": 1}}
    paper = {"half": {"public": 10.0, "never": 31.6}, "whole": {"all": 58.1}}
    result = run_study(study(rows=rows, scores=scores, paper=paper, compare=[]))
    assert (result.failed, result.unfinished) == ({}, [])
    half, whole = (result.table.measured[name].results for name in ("half", "whole"))
    assert {row: list(seeds) for row, seeds in half.items()} == {"public": [0], "never": [], "all": [0, 1]}
    assert half["public"][0].folder == whole["public"][0].folder
    written = json.loads((result.folder / half["all"][1].folder / "results.json").read_text())["results"]
    assert [half["all"][1].value, whole["all"][1].value] == [row["miou"] for row in written]
    means, first, second = result.table.tables()
    assert [row[0] for row in means.rows] == ["public", "never", "all"]
    measured = 100 * half["public"][0].value
    assert float(first.rows[0][3]) == pytest.approx(measured - 10.0, abs=0.11)
    assert first.rows[1][1:] == ["-", "31.6", "-"]
    assert second.rows[0][2:] == ["-", "-"]
    # What was evaluated is no longer needed.
    path.rename("moved")
    again = run_study(study(rows=rows, scores=scores, paper=paper, compare=[]))
    assert again.table.measured["half"].results["public"][0].value == half["public"][0].value


def test_what_is_missing_is_named_before_anything_is_trained(
    study: Written, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = {"public": missing("weights/public.pth"), "elsewhere": {"data.root": "nowhere"}, **TRAINED}
    scores = {"here": RATIOS, "photographs": {**RATIOS, "data": "sets/camvid"}}
    path = study(rows=rows, scores=scores, paper={})
    assert main(["study", str(path)]) == 2
    printed = capsys.readouterr().err
    for named in ("weights/public.pth", "https://example.org/weights", "cc-by-nc-4.0", "nowhere", "camvid"):
        assert named in printed
    assert "--available" in printed
    assert not Path("studies").exists()
    result = run_study(path, available=True)
    assert set(result.missing) == {"row 'public'", "row 'elsewhere'", "score 'photographs'"}
    assert (result.failed, result.unfinished) == ({}, [])
    assert list(result.table.measured["here"].results["all"]) == [0, 1]
    assert not result.table.measured["photographs"].results["all"]
    # A row whose weights arrive later is added.
    weights(Path("weights/public.pth"))
    result = run_study(path, available=True)
    assert list(result.table.measured["here"].results["public"]) == [0]
    assert set(result.missing) == {"row 'elsewhere'", "score 'photographs'"}


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": {"a": missing("a.pth"), "b": missing("b.pth")}},
        {"scores": {"photographs": {**RATIOS, "data": "sets/camvid"}}},
    ],
)
def test_a_study_without_anything_that_exists_is_an_error(study: Written, changes: dict[str, Any]) -> None:
    with pytest.raises(MissingData, match=r"a\.pth|camvid"):
        run_study(study(**{"paper": {}, **changes}), available=True)
    assert not Path("studies").exists()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rows": {"a": {"checkpoint": "a.pth", "optim.lr": 0.1}, **TRAINED}}, r"rows\.a .*optim\.lr"),
        ({"rows": {"a": {"licence": "mit"}, **TRAINED}}, r"rows\.a .*licence"),
        ({"rows": {"a": {"checkpoint": 3}, **TRAINED}}, r"rows\.a\.checkpoint"),
        ({"rows": {"a": {"part": "Clustering"}, **TRAINED}}, r"rows\.a\.part"),
        ({"rows": {"a": missing("a.pth"), **TRAINED}, "scores": {"step": {}}}, r"rows\.a is a checkpoint"),
        ({"scores": {"half": RATIOS, "whole": {"of": "hal", "at": 1}}}, r"scores\.whole\.of"),
        ({"scores": {"half": RATIOS, "whole": {"of": "half", "ratios": 1}}}, r"scores\.whole .*ratios"),
        ({"scores": {"half": {**RATIOS, "metric": "ap"}}}, r"scores\.half\.metric"),
        ({"scores": {"half": {**RATIOS, "part": "Clustering"}}}, r"scores\.half\.part"),
        ({"scores": {"step": {"part": "Clusterin"}}}, "part .*Clustering"),
        ({"scores": {"step": {"warmup": 1}}}, r"scores\.step: .*warmup"),
    ],
)
def test_invalid_rows_and_columns_are_rejected(study: Written, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        run_study(study(**{"paper": {}, "compare": [], **changes}))
    assert not Path("studies").exists()


def test_steps_are_timed_by_parts_without_training(study: Written) -> None:
    rows = {"forward": {"part": "Forward pass"}, "total": {}, "dino": {"base": "scenes_dino"}}
    scores = {
        "time": {"evaluation": "step", "steps": 2, "warmup": 2, "images": 320},
        "share": {"of": "time", "metric": "share"},
        "objects": {"of": "time", "part": "Objects"},
        "memory": {"of": "time", "metric": "memory"},
        "epoch": {"of": "time", "metric": "epoch"},
    }
    changes = {name: value for name, value in CHANGES.items() if "head" not in name and "backbone" not in name}
    result = run_study(study(rows=rows, scores=scores, changes=changes, seeds=[0], paper={"time": {"total": 1087.4}}))
    assert (result.failed, result.unfinished) == ({}, [])
    assert not (result.folder / "cells").exists()

    def value(score: str, row: str) -> float | None:
        return result.table.measured[score].mean(row)

    forward, total = value("time", "forward"), value("time", "total")
    assert forward is not None
    assert total is not None
    assert 0 < forward < total
    assert value("share", "forward") == pytest.approx(forward / total)
    assert value("share", "total") == pytest.approx(1)
    assert value("epoch", "total") == pytest.approx(total * 20)  # 320 images in batches of 16
    assert value("objects", "dino") is None
    assert (value("objects", "total") or 0) > 0
    assert (value("memory", "dino") or 0) > 1e6
    [paper] = [row for row in result.table.tables()[1].rows if row[0] == "total"]
    assert float(paper[3]) == pytest.approx(1000 * total - 1087.4, abs=0.11)


@pytest.mark.parametrize("name", ["table1", "table5", "table6"])
def test_the_plan_of_a_table_has_gpu_hours_and_lists_what_is_missing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["study", name, "--print_plan"]) == 0
    printed = capsys.readouterr().out
    assert "GPU hours" in printed
    listed = printed.partition("Missing here")[2]
    assert "coco" in listed
    for weights in load_study(name).checkpoints.values():
        assert all(text in listed for text in (weights.licence, weights.origin))
    assert not Path("studies").exists()


def test_gpu_hours_follow_from_the_images_of_a_training() -> None:
    coco = load_config("coco_vits16")
    # 121 ms for 128 images on an H100 (benchmarks/RESULTS.md)
    assert training_seconds(coco, 100) == pytest.approx(100 * 256 * 0.121 / 128)
    finer, other = (load_config(name) for name in ("coco_vits8", "slotcon_resnet50"))
    assert (training_seconds(finer, 100) or 0) > 4 * (training_seconds(coco, 100) or 0)
    assert (training_seconds(other, 100) or 0) > 0
    assert training_seconds(load_config("quickstart"), 100) is None
