"""Cards of a tiny network on small sets."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
from matplotlib.image import imread

from cribo.base.errors import FolderError, InputError
from cribo.base.job import Job
from cribo.cli import main
from cribo.evaluation import (
    DenseNN,
    EvaluationRuntime,
    Linear,
    SegmentationData,
    TrainingRuntime,
    evaluate,
    read_result,
)
from cribo.evaluation.benchmark import BenchmarkConfig, BenchmarkData, benchmark
from cribo.evaluation.training import KIND, is_evaluation_of
from cribo.features.config import BackboneSource
from cribo.models import load_backbone


@dataclass(frozen=True, kw_only=True)
class BriefLinear(Linear):
    """Two steps of linear segmentation."""

    name: ClassVar[str] = "brief-linear"

    iterations: Any = 2
    batch_size: Any = 2
    crop: Any = 32
    learning_rates: Any = (1e-2,)


@dataclass(frozen=True, kw_only=True)
class OwnNeighbours(DenseNN):
    """A protocol whose name is not its import path."""

    name: ClassVar[str] = "own-neighbours"
    quick_limit: ClassVar[int] = 3


Make = Callable[..., Path]
RUNTIME = EvaluationRuntime(devices=("cpu",), workers=0, cache="none")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def config(root: Path, source: Path | str, only: tuple[str, ...] = ("dense-nn",), **options: Any) -> BenchmarkConfig:
    data = BenchmarkData(str(root), options.pop("sets", None))
    given: dict[str, Any] = {"quick": True, "runtime": RUNTIME, "pictures": 0, **options}
    return BenchmarkConfig(BackboneSource(str(source)), data, only, **given)


def written(folder: Path = Path("evaluations")) -> dict[str, int]:
    return {path.parent.name: path.stat().st_mtime_ns for path in folder.glob("*/results.json")}


def test_a_card_of_all_protocols_without_training(sets: Path, make_backbone: Make) -> None:
    only = ("dense-nn", "image-nn", "discovery")
    card, folder = benchmark(config(sets, make_backbone(), only, pictures=2))
    assert folder == Path("cards/tiny")
    assert {(row.evaluation, row.set) for row in card.measured} == {
        ("dense-nn", "squares"),
        ("image-nn", "kinds"),
        ("discovery", "boxes"),
    }
    pictures = {f"{name}.png" for name in ("dense-nn-squares", "image-nn-kinds", "discovery-boxes")}
    assert {path.name for path in folder.iterdir()} == {"cribo.json", "card.md", "card.png", "results.json", *pictures}

    # The score equals that of the separate evaluation, and mean colours separate the classes.
    row = next(row for row in card.measured if row.evaluation == "dense-nn")
    data = SegmentationData("folder", str(sets / "squares"), limit=40)
    alone, _ = evaluate(DenseNN(ratios=(1,), size=(224, 224)), "tiny", data, RUNTIME, out=Path("alone"))
    assert row.results["backbone"].results == alone.results
    assert row.results["mean colour"].best["miou"] == 1.0
    twin = row.results["untrained"].backbone
    assert twin["args"] == alone.backbone["args"]
    assert twin["fingerprint"] == load_backbone("tiny", pretrained=False).fingerprint() != alone.backbone["fingerprint"]

    text = (folder / "card.md").read_text()
    assert f"| dense-nn | squares | mIoU, memory share 1/1 | {100 * alone.best['miou']:.1f} |" in text
    assert "| 100.0 |" in text
    assert "Not measured: dense-nn on half: " in text
    assert "Differences of a few points are not significant" in text
    for name in ("card.png", *pictures):
        assert f"]({name})" in text
    assert imread(folder / "card.png").shape[0] > 400

    record = json.loads((folder / "results.json").read_text())
    assert (record["kind"], record["quick"], record["backbone"]["name"]) == ("card", True, "tiny")
    assert {row["evaluation"] for row in record["rows"]} == set(only)
    assert "no images in" in record["not_measured"]["dense-nn on half"]
    for row in record["rows"]:
        for part in row["folders"].values():
            assert read_result(part).evaluation == row["evaluation"]
    with pytest.raises(InputError, match="is a card of several evaluations: give the folders of its rows"):
        read_result(folder)


def test_a_backbone_with_the_name_of_a_baseline_keeps_its_row(sets: Path, make_backbone: Make) -> None:
    card, _ = benchmark(config(sets, make_backbone("untrained"), sets=("squares",)))
    names = [row["name"] for row in card.record()["rows"][0]["comparison"]["results"]]
    assert names == ["untrained (backbone)", "untrained", "mean colour"]


def test_rows_are_reused_only_for_equal_backbone_data_and_settings(sets: Path, make_backbone: Make) -> None:
    source = make_backbone()
    first, _ = benchmark(config(sets, source, sets=("squares",)))
    before = written()
    assert len(before) == 3
    again, folder = benchmark(config(sets, source, sets=("squares",)))
    assert (written(), folder) == (before, Path("cards/tiny-2"))
    assert again.rows == first.rows

    # An interrupted card continues: only the missing row is measured.
    shutil.rmtree("evaluations/dense-nn-squares-tiny-random")
    benchmark(config(sets, source, sets=("squares",)))
    now = written()
    assert now.keys() == before.keys()
    assert {name for name in now if now[name] != before[name]} == {"dense-nn-squares-tiny-random"}

    # Other weights under the same name: nothing is replaced, and the baselines are kept.
    make_backbone(seed=1)
    other, _ = benchmark(config(sets, source, sets=("squares",)))
    assert written() == {**now, "dense-nn-squares-tiny-2": written()["dense-nn-squares-tiny-2"]}
    assert other.rows[0].folders["backbone"] == Path("evaluations/dense-nn-squares-tiny-2")

    # The same set in another folder is another set.
    shutil.copytree(sets / "squares", "moved/squares")
    moved, _ = benchmark(config(Path("moved"), source))
    assert moved.rows[0].folders["mean colour"] == Path("evaluations/dense-nn-squares-mean-colour-2")


def test_protocols_that_train_are_resumed(sets: Path, make_backbone: Make) -> None:
    data, only = BenchmarkData(str(sets), ("squares",)), (f"{__name__}.BriefLinear",)
    training = TrainingRuntime(accelerator="cpu", devices=1, workers=0)
    wanted = BenchmarkConfig(BackboneSource(str(make_backbone())), data, only, training=training, pictures=0)
    card, _ = benchmark(wanted)
    row = card.rows[0]
    assert row.results.keys() == {"backbone", "untrained", "mean colour"}
    assert row.results["backbone"].settings["schedule"] == "short"
    before = written()
    (row.folders["untrained"] / "results.json").unlink()
    again, _ = benchmark(wanted)
    assert again.rows[0].folders == row.folders
    assert {name for name, time in written().items() if time != before[name]} == {row.folders["untrained"].name}
    assert again.rows[0].results["untrained"].results == row.results["untrained"].results


def test_a_protocol_of_ones_own(sets: Path) -> None:
    card, _ = benchmark(config(sets, "mean-colour", only=(f"{__name__}.OwnNeighbours",), sets=("squares",)))
    assert "at most 3 images per split" in card.summary


def test_an_incomplete_set(sets: Path) -> None:
    with pytest.raises(InputError, match=r"all evaluations failed: dense-nn on half: no images in .*val"):
        benchmark(config(sets, "mean-colour", sets=("half",)))
    assert not Path("cards").exists()


def test_a_card_is_replaced_only_with_overwrite(sets: Path) -> None:
    wanted = config(sets, "mean-colour", sets=("squares",))
    card, _ = benchmark(wanted, out=Path("card"))
    assert list(card.rows[0].results) == ["backbone"]
    with pytest.raises(FolderError, match="card already exists"):
        benchmark(wanted, out=Path("card"))
    benchmark(wanted, out=Path("card"), overwrite=True)
    with pytest.raises(FolderError, match="is inside the results folder"):
        benchmark(wanted, out=sets)


def test_the_command(sets: Path, make_backbone: Make, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["benchmark", "--backbone", str(make_backbone()), "--data", str(sets), "--quick", "--only", "dense-nn"]
    run = ["--cache", "none", "--runtime.workers", "0", "--devices", "cpu", "--rows", "rows", "--out", "card"]
    assert main([*words, *run]) == 0
    output = " ".join(capsys.readouterr().out.split())
    for part in ("2/2 dense-nn on squares", "Not measured: dense-nn on half", "card/card.md", "card/card.png"):
        assert part in output
    assert len(written(Path("rows"))) == 3
    assert main(["benchmark", "--backbone", "x", "--data", str(sets), "--only", "dense"]) == 2
    assert "did you mean dense-nn?" in capsys.readouterr().err


def test_an_unfinished_training_is_recognised_by_its_settings(tmp_path: Path) -> None:
    settings = {"evaluation": "linear", "settings": {"learning_rates": (1e-3, 1e-4)}}
    out = tmp_path / "out"
    assert not is_evaluation_of(out, settings)
    with Job(out, KIND).open(settings):
        pass
    assert is_evaluation_of(out, settings)
    assert not is_evaluation_of(out, {**settings, "evaluation": "segmenter"})
    (out / "results.json").touch()
    assert not is_evaluation_of(out, settings)
