"""Custom objectives train, and errors in them are raised before training."""

import csv
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.commands import Commands

from cribo.base.errors import ConfigError, DataError
from cribo.data.config import Reading
from cribo.objectives import Setting, Step, make_objective
from cribo.objectives.trunk import shared_blocks
from cribo.pretraining import PretrainConfig, PretrainingModule, pretrain, resume
from cribo.training.checkpoints import checkpoint_files

Tiny = Callable[..., PretrainConfig]
HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))


def named(tiny: Tiny, name: str, changes: dict[str, Any] | None = None, **args: Any) -> PretrainConfig:
    return tiny({"objective.name": f"custom_objectives.{name}", "objective.args": args, **(changes or {})})


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_it_trains_from_the_command_line_with_its_own_column_names(tmp_path: Path, commands: Commands) -> None:
    words = [
        *("--objective.class_path", "custom_objectives.Flatten", "--objective.init_args.value", "0.25"),
        *("--data.scenes.count", "64", "--data.workers", "0", "--optim.epochs", "2", "--score.images", "[20,10]"),
        *("--runtime.log_every", "1", "--out", str(tmp_path), "--name", "mine"),
    ]
    importable = f"sys.path.insert(0, {str(HERE)!r})"  # with `cribo`, that is the working folder
    done = commands.fork("pretrain", *words, prelude=importable)
    assert done.wait(900) == 0, done.output
    assert "mean 0." in done.output  # losses by name
    assert "norm " in done.output
    folder = tmp_path / "mine"
    trained = [row for row in rows_of(folder) if row["loss"]]
    assert len(trained) == 4
    for row in trained:
        assert float(row["loss"]) == pytest.approx(float(row["loss_mean"]) + 2 * float(row["loss_spread"]), rel=1e-5)
        assert 0 < float(row["share"]) < 1
    assert [float(row["tempo"]) for row in trained] == pytest.approx([1.0, 0.853553, 0.5, 0.146447], abs=1e-6)
    assert any(row["dense_nn"] for row in rows_of(folder))
    assert {path.name for path in (folder / "report").iterdir()} == {"losses.png", "schedules.png", "dense_nn.png"}
    events = b"".join(path.read_bytes() for path in (folder / "tensorboard").iterdir())
    assert all(name in events for name in (b"loss_spread", b"share", b"tempo"))


def test_a_resumed_run_is_the_same(tiny: Tiny, tmp_path: Path) -> None:
    config = named(tiny, "Flatten", {"runtime.checkpoint_every": 5, "runtime.keep_checkpoints": 9})
    whole = pretrain(config, out=tmp_path, name="whole")
    half = shutil.copytree(whole.folder, tmp_path / "half")
    for path in [half / "summary.json", *sorted((half / "checkpoints").iterdir())[1:]]:
        path.unlink()
    resume(half, trust=True)
    states = []
    for run in (whole.folder, half):
        path = checkpoint_files(run)[0]
        states.append(torch.load(path, weights_only=True)["state_dict"])
    assert states[0]["steps"] == states[1]["steps"] == 12
    for name, value in states[0].items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, states[1][name]), name


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("dinos", "objective.name must be cribo, .*dino, .*, or an import path .* did you mean dino"),
        ("nowhere.Objective", "module 'nowhere' not found"),
        (
            "custom_objectives.Flaten",
            "module custom_objectives has no 'Flaten': did you mean custom_objectives.Flatten",
        ),
        ("custom_objectives.function", "is not a subclass of cribo.objectives.Objective"),
        ("torch.nn.Linear", "is not a subclass of cribo.objectives.Objective"),
    ],
)
def test_an_invalid_class_path_is_rejected(tiny: Tiny, tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pretrain(tiny({"objective.name": name}), out=tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"valu": 1.0}, "custom_objectives.Flatten has no argument valu; its arguments: value, spread_weight"),
        ({"value": "much"}, "objective.args of custom_objectives.Flatten: .*value"),
    ],
)
def test_arguments_are_checked(tiny: Tiny, args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_objective("custom_objectives.Flatten", args, Setting(tiny(), 36, 4))


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("NoNumber", ConfigError, "the metric norm must be a number or a pair of numbers, got a tensor of shape"),
        ("NameTwice", ConfigError, "loss_mean is the column of both a loss and a metric"),
        ("TrainersName", ConfigError, "the metric lr conflicts with one of the trainer's columns"),
        ("NoLoss", ConfigError, "returned no loss"),
        ("WeightOfNothing", ConfigError, "weights contains losses that forward does not return: elsewhere"),
        ("Uneven", DataError, "samples of one batch must have the same names and shapes: 'image'"),
    ],
)
def test_invalid_outputs_are_rejected(
    tiny: Tiny, tmp_path: Path, name: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        pretrain(named(tiny, name), out=tmp_path)


def test_a_metric_that_is_not_a_number_leaves_its_cell_empty(tiny: Tiny, tmp_path: Path) -> None:
    config = named(tiny, "NotANumber", {"optim.epochs": 1, "optim.warmup_epochs": 0})
    rows = rows_of(pretrain(config, out=tmp_path).folder)
    assert [row["norm"] != "" for row in rows] == [False, False, True, True]


def test_schedules_of_a_step() -> None:
    steps = [Step(number, steps_per_epoch=4, total_steps=40) for number in range(40)]
    assert steps[0].cosine(0.9, 1.0) == 0.9
    assert steps[20].cosine(0.9, 1.0) == pytest.approx(0.95)
    assert [steps[4 * epoch].linear(0.04, 0.07, 4) for epoch in range(6)] == pytest.approx(
        [0.04, 0.05, 0.06, 0.07, 0.07, 0.07]
    )
    assert steps[3].epoch == 0
    assert steps[4].epoch == 1


@pytest.mark.parametrize("name", ["neco", "paka", "timet"])
def test_the_backbone_has_a_tenth_of_the_rate_of_a_random_head(tiny: Tiny, name: str) -> None:
    args = {"neco": {"local_size": 16}, "paka": {"local_size": 16}, "timet": {}}[name]
    module = PretrainingModule(tiny({"objective.name": name, "objective.args": args}), num_images=36, steps_per_epoch=4)
    groups = module.configure_optimizers().param_groups
    scales = {id(parameter): group["lr_scale"] for group in groups for parameter in group["params"]}
    found = {
        parameter_name.partition(".")[0]: scales[id(parameter)]
        for parameter_name, parameter in module.objective.trainable().named_parameters()
        if parameter.requires_grad
    }
    assert found.pop("backbone") == 0.1
    assert {*found.values()} == {1.0}


def test_positions_of_local_crops_are_resized_as_configured(tiny: Tiny) -> None:
    changes = {"backbone.drop_path": 0.0, "objective.name": "ibot"}
    names = (None, "timm", "bicubic_offset")
    backbones = [Setting(tiny({**changes, "backbone.positions": name}), 36, 4).build_backbone() for name in names]
    crops = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    own, of_timm, other = (backbone.encode(crops).tokens for backbone in backbones)
    assert torch.equal(own, of_timm)
    assert not torch.allclose(own, other, atol=1e-3)
    assert backbones[2].numerics.positions == "bicubic_offset"
    network = {"backbone.name": "resnet18", "backbone.args": {}, "backbone.positions": "bicubic"}
    with pytest.raises(ConfigError, match=r"backbone\.positions .*resnet18"):
        Setting(tiny(network), 36, 4).build_backbone()


FIVE = Reading(channels=(0, 1, 2, 3, 4), range=(0, 4095))


def test_the_first_layer_for_other_channels_than_rgb_is_trained(tiny: Tiny) -> None:
    for args in ({}, {"in_chans": 5}):
        config = tiny({"backbone.train_blocks": 1, "backbone.args": {**tiny().backbone.args, **args}})
        backbone = Setting(config, 36, 4, FIVE).build_backbone()
        assert backbone.in_chans == 5
        assert backbone.pixels == {"channels": [0, 1, 2, 3, 4], "range": [0, 4095]}
        assert backbone.model.patch_embed.proj.weight.requires_grad
        assert not backbone.model.blocks[0].attn.qkv.weight.requires_grad
        assert shared_blocks(backbone, config.backbone) == 0
    assert Setting(tiny(), 36, 4).build_backbone().pixels is None


@pytest.mark.parametrize(
    ("changes", "reading", "option"),
    [
        ({"backbone.train_blocks": 1, "backbone.cache_trunk": 1}, FIVE, "cache_trunk"),
        ({"backbone.args": {"in_chans": 4}}, FIVE, "channels"),
        ({"backbone.args": {"in_chans": 4}}, Reading(), "channels"),
    ],
)
def test_options_that_other_channels_exclude(tiny: Tiny, changes: dict, reading: Reading, option: str) -> None:
    with pytest.raises(ConfigError, match=option):
        Setting(tiny(changes), 36, 4, reading).build_backbone()
