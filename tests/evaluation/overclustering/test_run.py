"""Overclustering from the command line."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.evaluation.dense_neighbours.test_run import write_set

from cribo.cli import main
from cribo.evaluation import Overclustering, read_result

RUN = ("--cache", "none", "--devices", "cpu", "--runtime.workers", "0")


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_set(tmp_path / "set", side=64)


def words(*more: str) -> list[str]:
    given = ("--backbone", "mean-colour", "--data", "folder", "--data.root", "set")
    return ["evaluate", "overclustering", *given, "--size", "64", *RUN, *more]


def test_an_evaluation_writes_results_and_pictures(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words("--clusters", "3,10", "--draws", "2", "--out", "result")) == 0
    result = read_result("result")
    assert (result.evaluation, result.varies, result.metrics) == ("overclustering", "clusters", ["miou"])
    assert [(row["clusters"], row["matching"]) for row in result.results] == [(3, "hungarian"), (10, "greedy")]
    assert result.settings["size"] == [64, 64]
    assert result.data["patches"] == 4 * 16
    assert 0 < result.results[0]["miou"] <= 1
    assert len(result.results[0]["draws"]) == 2
    pictures = sorted(path.name for path in Path("result").glob("*.png"))
    assert pictures == ["confusion.png", "miou.png", "predictions.png"]
    assert "Overclustering on set" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (("--clusters", "65"), "clusters must be at most the number of patches, 64, got 65: use fewer"),
        (("--clusters", "3,3"), "clusters must be distinct numbers"),
        (("--clusters", "0"), "clusters must be >= 1, got"),
        (("--draws", "0"), "draws must be >= 1, got 0"),
        (("--dims", "0"), "dims must be >= 1, got 0"),
        (("--size", "60"), "size must be a multiple of the patch size 16, got 60x60"),
        (("--foreground",), "foreground requires background as class 0, got 'red'"),
    ],
)
def test_invalid_settings_are_refused_before_any_work(
    data: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...], reason: str
) -> None:
    assert main(words(*more)) == 2
    assert reason in " ".join(capsys.readouterr().err.split())
    assert sorted(path.name for path in Path().iterdir()) == ["set"]


def decided(**settings: object) -> Callable[..., Overclustering]:
    return Overclustering(**settings).for_data  # pyright: ignore[reportArgumentType]


def test_settings_are_decided_by_classes_and_patches() -> None:
    classes = ["background", *map(str, range(20))]
    assert decided()(16, classes, 10).clusters == (21, 300, 500)
    assert decided(foreground=True)(16, classes, 10).clusters == (20, 300, 500)
    assert decided(size=(64, 64))(16, classes, 2).clusters == (21,)
    assert decided(size=(32, 32))(16, classes, 2).clusters == (8,)
    assert decided()(14, classes, 10).size == (448, 448)
    assert decided()(15, classes, 10).size == (435, 435)
    assert decided()(32, classes, 10, 224).size == (224, 224)
