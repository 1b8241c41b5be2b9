import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from cribo.base.errors import DataError, FolderError
from cribo.cli import main
from cribo.pretraining import PretrainConfig, pretrain
from cribo.pretraining.figures import write_figures
from cribo.pretraining.figures.config import FIGURES, FigureConfig


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    for number in range(12):
        Image.effect_noise((48, 40), 20.0 * number).convert("RGB").save(folder / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def run(tiny: Callable[..., PretrainConfig], images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny({"data.root": str(images), "optim.epochs": 2, "losses.cross_image_from_epoch": 0})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cribo.pretraining.run.write_report", lambda *args, **kwargs: [])
        return pretrain(config, out=tmp_path_factory.mktemp("out"), name="run").folder


@pytest.fixture(scope="module")
def written(run: Path, images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("written") / "figures"
    result = write_figures({"run": run}, out, FigureConfig(num_objects=4, queries=2, pictures=3, images=str(images)))
    assert not result.left_out
    return out


def test_every_figure_is_written_for_print(written: Path) -> None:
    for name in FIGURES:
        pdf = (written / f"{name}.pdf").read_bytes()
        assert pdf.startswith(b"%PDF")
        assert b"/Type3" not in pdf  # Type 3 fonts, which publishers refuse
        with Image.open(written / f"{name}.png") as picture:
            assert picture.info["dpi"][0] == pytest.approx(300, abs=0.1)
            assert picture.size[0] in (round(300 * 6.9), round(300 * 3.3))
    assert b"/FontFile2" in (written / "losses.pdf").read_bytes()
    captions = (written / "captions.md").read_text()
    assert all(f"**{name}**: " in captions for name in FIGURES)
    assert "K = 4;" in captions


def test_figures_are_reproducible(run: Path, images: Path, written: Path, tmp_path: Path) -> None:
    only = ("matches", "clusters", "features")
    config = FigureConfig(only=only, num_objects=4, queries=2, pictures=3, images=str(images))
    write_figures({"run": run}, tmp_path / "again", config)
    for name in ("matches.pdf", "clusters.pdf", "features.png"):
        assert (tmp_path / "again" / name).read_bytes() == (written / name).read_bytes()


def test_a_run_without_recorded_clusters_is_drawn(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "old")
    (tmp_path / "old" / "clusters.npz").unlink()
    result = write_figures(
        {"old": tmp_path / "old"}, tmp_path / "out", FigureConfig(only=("clusters", "losses"), format=("png",))
    )
    assert "has no clusters.npz" in result.left_out["clusters"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        *("captions.md", "cribo.json", "figures.json", "losses.png")
    ]


def test_moved_images_are_reported_before_any_work(run: Path, images: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().replace(str(images), "/gone/images"))
    with pytest.raises(DataError, match=r"/gone/images.*--images.*--features_of"):
        write_figures({"run": tmp_path / "run"}, tmp_path / "out", FigureConfig(images="/gone/images"))
    assert not (tmp_path / "out").exists()
    small = {"num_objects": 4, "queries": 1, "pictures": 2, "format": ("png",)}
    write_figures(
        {"run": tmp_path / "run"}, tmp_path / "out", FigureConfig(only=("matches",), images=str(images), **small)
    )
    copied = Path(shutil.copytree(images, tmp_path / "images [1]"))  # brackets of folders are no wildcards
    files = FigureConfig(only=("features",), features_of=str(copied / "1*.png"), **small)
    write_figures({"run": tmp_path / "run"}, tmp_path / "features", files)
    assert (tmp_path / "features" / "features.png").is_file()


def test_the_command_compares_runs(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["figures", "--run", str(run), "--label", "one", "--run", str(run), "--label", "two"]
    words += ["--only", "bootstrapping", "--format", "pdf", "--out", str(tmp_path / "out")]
    assert main(words) == 0
    assert "bootstrapping.pdf" in capsys.readouterr().out
    assert list(json.loads((tmp_path / "out" / "figures.json").read_text())["runs"]) == ["one", "two"]
    assert main(words) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert main([*words[:3], "--run", str(run), "--out", str(tmp_path / "more")]) == 2
    assert "--label" in capsys.readouterr().err


def test_invalid_options_are_refused(run: Path, images: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    refusals: list[tuple[Path, dict[str, Any], type[Exception], str]] = [
        (run, {"only": ("maches",)}, ValueError, "only .*maches"),
        (run, {"format": ("gif",)}, ValueError, "format .*gif"),
        (run, {"num_objects": 1}, ValueError, "num_objects .*1"),
        (run, {"num_objects": 99}, ValueError, "num_objects .*32.* 99"),
        (run, {"features_of": "/nowhere/*.jpg"}, FileNotFoundError, "--features_of"),
        (tmp_path, {}, FileNotFoundError, r"config\.yaml"),
        (tmp_path / "nowhere", {}, FileNotFoundError, "nowhere"),
    ]
    for folder, choices, error, named in refusals:
        with pytest.raises(error, match=named):
            write_figures({"run": folder}, out, FigureConfig(**{"images": str(images), **choices}))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("")
    with pytest.raises(FolderError):
        write_figures({"run": run}, out, overwrite=True)
    assert [path.name for path in out.iterdir()] == ["thesis.tex"]
