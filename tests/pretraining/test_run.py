"""Inputs and outputs of a run."""

import csv
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import timm
import torch
from PIL import Image

from cribo.base.errors import ConfigError, TooManyUnreadable
from cribo.base.job import LOCK
from cribo.models import load_backbone
from cribo.objectives.pictures import draw_bootstrapping
from cribo.pretraining import PretrainConfig, load_config, pretrain
from cribo.pretraining.loading import dump_config
from cribo.pretraining.run import latest_run, overrides_in
from cribo.pretraining.session import Session

Tiny = Callable[..., PretrainConfig]
Train = Callable[..., Any]
Finished = tuple[PretrainConfig, Any]  # a run with its configuration


def picture(seed: int, mode: str = "RGB", size: tuple[int, int] = (48, 40)) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def a_folder(root: Path, count: int = 16) -> Path:
    """JPEGs in nested folders."""
    for number in range(count):
        path = root / ["", "a", "a/b", "c"][number % 4] / f"{number:03d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        picture(number).save(path)
    return root


# ------------------------------------------------------------------ outputs


@pytest.fixture(scope="module")
def whole_run(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A run with all features enabled, including figures."""
    config = tiny(
        {
            "score.root": "scenes",
            "score.images": (6, 3),
            "score.neighbours": 10,
            "score.every_epochs": 1,
            "runtime.log_every": 2,
        }
    )
    return config, pretrain(config, out=tmp_path_factory.mktemp("out"), name="run")


def test_the_configuration_reproduces_the_run(whole_run: Finished, tmp_path: Path, without_report: None) -> None:
    config, run = whole_run
    assert load_config(run.folder / "config.yaml") == config
    again = pretrain(run.folder / "config.yaml", out=tmp_path)
    for name in ("losses", "dense_nn", "bootstrapping_ratio"):
        assert again.summary[name] == run.summary[name]


def test_the_summary(whole_run: Finished) -> None:
    _, run = whole_run
    summary = json.loads((run.folder / "summary.json").read_text())
    assert {"cribo", "torch", "timm", "lightning", "hardware"} <= set(summary["versions"])
    assert summary == run.summary
    assert summary["seconds"] > 0
    assert summary["peak_rss_bytes"] > 100 * 2**20
    assert summary["images_per_second"] > 1
    assert set(summary["losses"]) == {"image", "cross_view", "cross_image"}
    assert all(value > 0 for value in summary["losses"].values())
    assert 0 < summary["bootstrapping_ratio"] <= 1
    score = summary["dense_nn"]
    assert score["data"] == "held-out synthetic scenes"
    assert all(0 <= score[name] < 1 for name in ("before", "after", "mean_color"))
    assert [point["step"] for point in score["curve"]] == [0, 4, 8, 12]
    assert (score["curve"][0]["miou"], score["curve"][-1]["miou"]) == (score["before"], score["after"])
    assert (summary["steps"], summary["epochs"], summary["images"], summary["unreadable_images"]) == (12, 3, 36, 0)


def test_figures_are_images_with_content(whole_run: Finished) -> None:
    _, run = whole_run
    pictures = {path.stem: path for path in (run.folder / "report").iterdir()}
    assert set(pictures) == {"losses", "bootstrapping_ratio", "schedules", "dense_nn", "clusters", "matches"}
    for path in pictures.values():
        with Image.open(path) as image:
            assert image.format == "PNG"
            assert image.width >= 600
            assert image.height >= 300
            assert np.asarray(image.convert("L")).std() > 5


@pytest.mark.parametrize(("epochs", "points"), [(1, 4), (10, 10)])
def test_the_ratio_of_few_epochs_is_drawn_for_each_row(epochs: int, points: int) -> None:
    rows = [{"epoch": row / 4, "bootstrapping_ratio": 0.1} for row in range(1, 4 * epochs + 1)]
    (curve,) = draw_bootstrapping({"": rows}).axes[0].lines
    assert len(np.asarray(curve.get_xdata())) == points


@pytest.mark.parametrize(
    ("changes", "pictures"),
    [
        ({"losses.cross_image_from_epoch": 1}, {"losses", "schedules", "clusters", "matches"}),
        ({"losses.cross_view": False, "losses.cross_image": False}, {"losses", "schedules"}),
    ],
    ids=["no ratio", "no objects"],
)
def test_what_was_not_trained_has_no_figure(
    tiny: Tiny, tmp_path: Path, changes: dict[str, Any], pictures: set[str]
) -> None:
    run = pretrain(tiny({"optim.epochs": 1, **changes}), out=tmp_path)
    assert run.folder.name == "run"
    assert {path.stem for path in (run.folder / "report").iterdir()} == pictures
    if "clusters" not in pictures:
        assert "objects" not in (run.folder / "metrics.csv").read_text()
        assert "bootstrapping_ratio" not in run.summary
        assert "bootstrapped" not in run.summary["shown"]


def test_no_other_files_are_written(whole_run: Finished) -> None:
    _, run = whole_run
    files = {"cribo.json", "config.yaml", "metrics.csv", "summary.json", "clusters.npz"}
    files |= {"backbone.safetensors", "backbone.json"}
    kept = {path.name for path in run.folder.iterdir()} - {LOCK}  # filelock removes its file or not, by version
    assert kept == files | {"checkpoints", "report", "tensorboard"}
    assert not [path for path in run.folder.rglob("*") if path.name.endswith(".part")]
    assert list((run.folder / "tensorboard").glob("events.*"))


def test_the_backbone_is_the_teachers_and_loads_in_plain_timm(whole_run: Finished) -> None:
    _, run = whole_run
    about = json.loads((run.folder / "backbone.json").read_text())
    model: Any = timm.create_model(about["name"], **about["args"])
    model.load_state_dict(safetensors.torch.load_file(run.folder / "backbone.safetensors"))
    model.eval()
    checkpoint = torch.load(run.folder / "checkpoints" / "step=00000012.ckpt", weights_only=True)["state_dict"]
    for name, value in model.state_dict().items():
        assert torch.equal(value, checkpoint[f"teacher.backbone.model.{name}"]), name
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model.forward_features(images)
        features = load_backbone(run.folder).eval().encode(images)
    torch.testing.assert_close(features.global_token, expected[:, 0])
    torch.testing.assert_close(features.tokens, expected[:, 1:])


# ------------------------------------------------------------------ inputs


def test_folders_lists_and_sub_folders(tiny: Tiny, tmp_path: Path) -> None:
    """Nested folders, the same images listed in a file, and one sub-folder of a root, as for COCO."""
    coco = tmp_path / "coco"
    images = a_folder(coco / "train2017")
    a_folder(coco / "val2017", 3)
    names = sorted(str(path.relative_to(coco)) for path in images.rglob("*.jpg"))
    in_order = sorted(names, key=lambda name: name.split("/"))
    (coco / "list.txt").write_text("# training images\n" + "\n".join(in_order) + "\n\n")
    nested, sub_folder, listed, everything = (
        Session(tiny({"data.root": str(root), "data.images": part})).source
        for root, part in ((images, ""), (coco, "train2017"), (coco / "list.txt", ""), (coco, ""))
    )
    assert [len(source) for source in (nested, sub_folder, listed, everything)] == [16, 16, 16, 19]
    for index in range(16):
        assert torch.equal(nested.load(index), sub_folder.load(index))
        assert torch.equal(nested.load(index), listed.load(index))


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Twelve valid images of all kinds, three broken ones, and one with too many pixels."""
    root = a_folder(tmp_path / "mixed", 7)
    for number, mode in enumerate(("L", "P", "RGBA", "CMYK")):
        picture(number, mode).save(root / f"mode-{mode}.{'jpg' if mode in ('L', 'CMYK') else 'png'}")
    deep = np.random.default_rng(0).integers(0, 2**16, (40, 48)).astype(np.uint16)
    Image.fromarray(deep).save(root / "deep.png")
    whole = root / "whole.jpg"
    picture(99, size=(200, 200)).save(whole)
    (root / "truncated.jpg").write_bytes(whole.read_bytes()[:3000])
    whole.unlink()
    (root / "text.jpg").write_text("this is no image")
    picture(5, size=(1, 1)).save(root / "point.png")
    picture(0, size=(400, 300)).save(root / "bomb.jpg")
    return root


def test_broken_images_are_skipped_counted_and_listed_up_to_a_limit(
    tiny: Tiny, train: Train, resumed: Train, mixed: Path, tmp_path: Path
) -> None:
    common = {"data.root": str(mixed), "data.max_pixels": 10_000, "optim.epochs": 6}
    with pytest.raises(TooManyUnreadable, match=r"data.max_unreadable 0.1"):
        train(tiny({**common, "data.max_unreadable": 0.1}))
    assert (tmp_path / "run" / "skipped.csv").is_file()
    assert not (tmp_path / "run" / "summary.json").exists()
    trained = resumed(**{"data.max_unreadable": 0.25, "data.workers": 1})  # the advice of the error
    with (trained.run.folder / "skipped.csv").open(newline="") as file:
        reasons = {row["image"]: row["reason"] for row in csv.DictReader(file)}
    assert reasons.keys() == {"truncated.jpg", "text.jpg", "point.png", "bomb.jpg"}
    assert all(reasons.values())
    assert trained.run.summary["unreadable_images"] == 4
    assert trained.run.summary["steps"] == 12
    assert all(np.isfinite(float(row["loss"])) for row in trained.rows)


# ------------------------------------------------------------------ training


def test_minutes_set_the_number_of_epochs(tiny: Tiny, tmp_path: Path, without_report: None) -> None:
    """The timed steps are not part of the run."""
    run = pretrain(tiny({"data.scenes.count": 16, "optim.epochs": 5000}), out=tmp_path, minutes=0.02)
    config = load_config(run.folder)
    assert 1 <= config.optim.epochs < 5000
    assert run.summary["steps"] == 2 * config.optim.epochs
    first = run.folder / "metrics.csv"
    other = pretrain(load_config(run.folder), out=tmp_path)

    def losses(path: Path) -> list[str]:
        with path.open(newline="") as file:
            return [row["loss"] for row in csv.DictReader(file)]

    assert losses(first) == losses(other.folder / "metrics.csv")


def test_bf16_autocast_runs_on_a_cpu(tiny: Tiny, whole: Train) -> None:
    half, full = (whole(tiny({"runtime.precision": name, "optim.epochs": 1})) for name in ("bf16-mixed", "32-true"))
    first_half, first_full = float(half.rows[0]["loss"]), float(full.rows[0]["loss"])
    assert first_half != first_full
    assert first_half == pytest.approx(first_full, rel=0.1)
    assert all(np.isfinite(float(row["loss"])) for row in half.rows)
    assert all(value.dtype == torch.float32 for value in half.weights.values() if value.is_floating_point())


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("resnet10t", {"channels": (8, 8, 16, 16)}),
        ("convnext_atto", {"dims": [8, 8, 16, 16], "depths": [1, 1, 1, 1]}),
    ],
    ids=["resnet", "convnext"],
)
def test_other_backbones_train(tiny: Tiny, train: Train, name: str, args: dict[str, Any]) -> None:
    changes = {"backbone.name": name, "backbone.args": args, "backbone.drop_path": 0.0, "optim.epochs": 1}
    trained = train(tiny({**changes, "views.size": 64, "objects.num_objects": 3}))
    assert all(np.isfinite(float(row["loss"])) for row in trained.rows)
    assert trained.run.backbone().name == name


def test_a_run_can_start_from_the_backbone_of_another_run(tiny: Tiny, train: Train) -> None:
    first = train(tiny({"optim.epochs": 1}), "first")
    weights = str(first.run.folder / "backbone.safetensors")
    second = train(
        tiny({"optim.epochs": 1, "backbone.pretrained": weights, "optim.freeze_backbone_epochs": 1}), "second"
    )
    before, after = (safetensors.torch.load_file(run.run.folder / "backbone.safetensors") for run in (first, second))
    assert all(torch.equal(value, after[name]) for name, value in before.items())


# ------------------------------------------------------------------ command line


def test_a_configuration_object_does_not_accept_overrides(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="PretrainConfig"):
        pretrain(tiny(), data="scenes", out=tmp_path)


def test_a_run_is_named_after_its_configuration(tiny: Tiny, tmp_path: Path, without_report: None) -> None:
    (tmp_path / "mine.yaml").write_text(dump_config(tiny({"optim.epochs": 1})))
    names = [pretrain(tmp_path / "mine.yaml", out=tmp_path / "runs", data="scenes").folder.name for _ in range(2)]
    assert names == ["mine", "mine-2"]


def test_overrides_in_a_command_line() -> None:
    words = ["--resume", "a", "--optim.lr=0.1", "--seed", "4", "--out", "x", "--data.root", "b"]
    assert overrides_in(words) == {"optim.lr": 0.1, "seed": 4, "data.root": "b"}


def test_the_latest_run_is_the_one_whose_stage_was_written_last(tmp_path: Path) -> None:
    for seconds, name in enumerate(("a/config.yaml", "b/config.yaml", "b/checkpoints/step=1.ckpt", "a/first/x.ckpt")):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        os.utime(path, (seconds, seconds))
    assert latest_run(tmp_path) == tmp_path / "a"
