"""Custom protocols: one class in one file, run by the same runner and command."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from cribo.base.errors import ConfigError, InputError
from cribo.cli import main
from cribo.evaluation import (
    DenseNN,
    EvaluationRuntime,
    Outcome,
    Protocol,
    SegmentationData,
    compare,
    evaluate,
    read_result,
)
from cribo.evaluation.config import PROTOCOLS
from cribo.evaluation.protocol import find_protocol

EXAMPLES = Path(__file__).parents[2] / "examples"


@dataclass(frozen=True, kw_only=True)
class Counted(Protocol):
    """Counts images.

    Attributes:
        step: step of counting.
    """

    name: ClassVar[str] = "counted"
    title: ClassVar[str] = "Counted images"
    metrics: ClassVar[tuple[str, ...]] = ("share",)
    varies: ClassVar[str] = "step"

    step: int = 1

    def measure(self, run: Any) -> Outcome:
        share = len(run.data.val) / (len(run.data.train) + len(run.data.val))
        return Outcome([{"step": self.step, "share": share}], run.data.train.classes)


@dataclass(frozen=True, kw_only=True)
class Unnamed(Protocol):
    """Has no name."""

    metrics: ClassVar[tuple[str, ...]] = ("share",)


@dataclass(frozen=True, kw_only=True)
class Fruitless(Counted):
    """Returns no row."""

    def measure(self, run: Any) -> Outcome:
        return Outcome([], [])


@dataclass(frozen=True, kw_only=True)
class Undrawable(Counted):
    """Fails when its pictures are drawn."""

    def measure(self, run: Any) -> Outcome:
        def draw(result: Any, folder: Path) -> None:
            raise RuntimeError("no font")

        return replace(super().measure(run), write=draw)


WORDS = ["--backbone", "mean-colour", "--data", "scenes", "--limit", "6", "--cache", "none", "--devices", "cpu"]


def test_a_custom_protocol_is_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(EXAMPLES)
    words = ["evaluate", "own_protocol.ClassMeans", *WORDS, "--runtime.workers", "0", "--out", str(tmp_path / "out")]
    assert main([*words, "--sizes", "64,96"]) == 0
    result = read_result(tmp_path / "out")
    assert [row["size"] for row in result.results] == [64, 96]
    assert 0 < result.best["miou"] < 1
    assert result.settings == {"sizes": [64, 96]}
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert files == {"cribo.json", "results.json", "confusion.png", "miou.png"}
    output = " ".join(capsys.readouterr().out.split())
    assert "Class means on scenes" in output
    with pytest.raises(SystemExit):
        main(["evaluate", "own_protocol.ClassMeans", "--help"])
    assert "sides of the square images" in " ".join(capsys.readouterr().out.split())
    assert "Class means" in compare([tmp_path / "out"]).markdown()


def test_protocols_with_equal_encoding_share_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES)
    words = [*WORDS[:-4], "--devices", "cpu", "--cache", str(tmp_path / "cache"), "--runtime.workers", "0"]
    dense = ["--size", "96", "--ratios", "1", "--neighbours", "5", "--out", str(tmp_path / "dense")]
    assert main(["evaluate", "dense-nn", *words, *dense]) == 0
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.npy")}
    assert len(files) == 12
    own = ["--sizes", "96", "--out", str(tmp_path / "own")]
    assert main(["evaluate", "own_protocol.ClassMeans", *words, *own]) == 0
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.npy")} == files


def test_from_python(tmp_path: Path) -> None:
    runtime = EvaluationRuntime(devices=("cpu",), workers=0, cache="none")
    data = SegmentationData("scenes", limit=3)
    result, folder = evaluate(Counted(step=2), "mean-colour", data, runtime, out=tmp_path / "out")
    assert (result.results, folder) == ([{"step": 2, "share": 0.5}], tmp_path / "out")
    with pytest.raises(ValueError, match="must have a metric and a row"):
        evaluate(Fruitless(), "mean-colour", data, runtime, out=tmp_path / "none")
    assert not (tmp_path / "none").exists()
    with pytest.raises(ConfigError, match="counted does not train and cannot be resumed"):
        evaluate(Counted(), "mean-colour", data, runtime, out=tmp_path / "out", resume=True)


def test_failing_pictures_keep_the_result(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    runtime = EvaluationRuntime(devices=("cpu",), workers=0, cache="none")
    evaluate(Undrawable(), "mean-colour", SegmentationData("scenes", limit=3), runtime, out=tmp_path / "out")
    assert read_result(tmp_path / "out").results == [{"step": 1, "share": 0.5}]
    assert "some pictures could not be written" in caplog.text
    assert "no font" in caplog.text


def test_an_unknown_variant_names_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(
        InputError, match="variant must be one of cribo, hummingbird, hummingbird-strict, dip, franca, got 'paper'"
    ):
        DenseNN(variant="paper")  # pyright: ignore[reportArgumentType]
    assert main(["evaluate", "dense-nn", *WORDS, "--variant", "paper"]) == 2
    assert (
        "variant must be cribo, hummingbird, hummingbird-strict, dip or franca, got 'paper'" in capsys.readouterr().err
    )


@pytest.mark.parametrize("name", ["image-nn", "detection", "tests.evaluation.test_protocol.Counted"])
@pytest.mark.parametrize("option", [["--variant", "released"], ["--variant=released"]])
def test_a_protocol_without_variants_refuses_the_option(
    name: str, option: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", name, *WORDS, *option]) == 2
    assert f"{name} has no variants: omit --variant" in capsys.readouterr().err


def test_all_protocols_of_the_table_exist() -> None:
    for name in PROTOCOLS:
        assert find_protocol(name).name == name


@pytest.mark.parametrize(("patch_size", "image_size"), [(14, None), (12, None), (32, 256)])
def test_quick_settings_fit_the_backbone(patch_size: int, image_size: int | None) -> None:
    for name in PROTOCOLS:
        settings = vars(find_protocol(name).quick(patch_size, image_size))
        size = settings.get("size")
        if isinstance(size, tuple):
            assert size[0] == size[1]
            assert size[0] % patch_size == 0
            assert image_size is None or size[0] == image_size


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tests.evaluation.test_protocol.Unnamed", "has no name, title, varies, measure: see docs/extending.md"),
        ("pathlib.Path", "pathlib.Path must be a subclass of cribo.evaluation.Protocol"),
        ("own_protocol_that.Is_Not", "module 'own_protocol_that' not found"),
        ("tests.evaluation.test_protocol.Count", "did you mean tests.evaluation.test_protocol.Counted?"),
    ],
)
def test_other_classes_are_refused(name: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", name, *WORDS]) == 2
    assert message in capsys.readouterr().err
