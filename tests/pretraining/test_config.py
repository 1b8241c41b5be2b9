import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cribo.base.bounds import Bounds, find_bounds
from cribo.base.errors import ConfigError
from cribo.cli import main
from cribo.objectives.banks import resolve_bank_images
from cribo.pretraining import PretrainConfig, load_config
from cribo.pretraining.config import ObjectiveConfig
from cribo.pretraining.loading import dump_config, preset_names


def bounded_numbers(config: Any, prefix: str = "") -> Iterator[tuple[str, Any, Bounds]]:
    """Each number of the configuration with bounds: its name, type and bounds."""
    for part in dataclasses.fields(config):
        value, name = getattr(config, part.name), f"{prefix}{part.name}"
        if dataclasses.is_dataclass(value):
            yield from bounded_numbers(value, f"{name}.")
        elif (bounds := find_bounds(part.type)) is not None:
            yield name, part.type, bounds


def outside() -> list[Any]:
    """Each number of the configuration, with values just outside its bounds."""
    cases = []
    for name, hint, bounds in bounded_numbers(PretrainConfig()):
        step = 1 if "[int" in str(hint) else 0.001
        for sign, limit in bounds.limits:
            value = {">=": limit - step, ">": limit, "<=": limit + step, "<": limit}[sign]
            cases.append(pytest.param(name, (value, value) if "tuple" in str(hint) else value, id=f"{name}={value:g}"))
    return cases


def with_value(config: Any, name: str, value: Any) -> Any:
    head, _, rest = name.partition(".")
    return dataclasses.replace(config, **{head: with_value(getattr(config, head), rest, value) if rest else value})


@pytest.mark.parametrize(("name", "value"), outside())
def test_a_value_out_of_bounds_is_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{name.removeprefix('views.')} must be [<>]") as caught:
        with_value(PretrainConfig(), name, value)
    assert f"got {value}" in str(caught.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_infinity_are_rejected(value: float) -> None:
    with pytest.raises(ValueError, match=r"optim\.lr must be"):
        with_value(PretrainConfig(), "optim.lr", value)


def test_the_default_bank_holds_half_of_the_images_between_a_batch_and_25000() -> None:
    config = PretrainConfig()
    assert resolve_bank_images(config, 1_281_167) == 25_000
    assert resolve_bank_images(config, 10_000) == 5_000
    assert resolve_bank_images(config, 300) == 256
    assert resolve_bank_images(with_value(config, "objects.bank_images", 777), 10_000) == 777


# ------------------------------------------------------------------ presets


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_loads_and_round_trips(name: str, tmp_path: Path) -> None:
    config = load_config(name)
    (tmp_path / "config.yaml").write_text(dump_config(config))
    assert load_config(tmp_path) == config  # a run folder


def test_the_presets_of_the_paper() -> None:
    """docs/method.md, section Recipe."""
    for name, epochs, batch, position, clusters, lr, final, warm, clip, frozen, gain, group in (
        ("coco_vits16", 300, 256, 2.0, 64, 5e-4, 1e-5, 30, None, 1, True, 32),
        ("imagenet_vits16", 800, 1024, 1.0, 32, 5e-4, 1e-5, 30, None, 1, True, 128),
        ("imagenet_vitb16", 400, 1024, 1.0, 32, 7.5e-4, 2e-6, 50, 0.3, 3, False, 64),
    ):
        config = load_config(name)
        assert (config.optim.epochs, config.optim.batch_size) == (epochs, batch)
        assert (config.objects.position_weight, config.objects.num_objects) == (position, clusters)
        assert (config.optim.lr, config.optim.final_lr) == (lr, final)
        assert config.losses.teacher_temperature == (0.04, 0.07)
        assert config.losses.teacher_temperature_epochs == warm
        assert (config.optim.clip, config.optim.freeze_last_layers_epochs, config.head.train_gain) == (
            clip,
            frozen,
            gain,
        )
        assert config.objects.group_size == group
        assert (config.optim.warmup_epochs, config.optim.weight_decay, config.optim.momentum) == (
            10,
            (0.04, 0.4),
            (0.996, 1.0),
        )
        assert (config.head.prototypes, config.head.hidden_dim, config.head.bottleneck_dim) == (65536, 2048, 256)
        assert (config.backbone.drop_path, config.views.size, config.views.area) == (0.1, 224, (0.25, 1.0))
        assert (config.losses.cross_image_from_epoch, config.losses.student_temperature) == (1, 0.1)
        assert resolve_bank_images(config, 118_287) == 25_000
    assert load_config("coco_vits8").backbone.name == "vit_small_patch8_224"


def test_overrides_of_every_kind() -> None:
    config = load_config(
        "coco_vits16",
        {
            "optim.epochs": 7,
            "optim.clip": 0.5,
            "data.root": "some where/it's",
            "score.root": "scenes",
            "backbone.pretrained": "timm",
            "backbone.args": {"depth": 2},
            "optim.momentum": (0.9, 0.95),
            "score.size": [32, 64],
            "losses.cross_image": False,
            "objects.bank_images": None,
            "optim.micro_batches": 2,
            "runtime.compile": "default",
            "runtime.devices": "auto",
            "objective.name": "mine.Objective",
            "objective.args": {"rate": 0.5},
        },
    )
    assert config.objective == ObjectiveConfig("mine.Objective", {"rate": 0.5})
    assert (config.optim.epochs, config.optim.clip, config.data.root) == (7, 0.5, "some where/it's")
    assert (config.score.root, config.backbone.pretrained, config.backbone.args) == ("scenes", "timm", {"depth": 2})
    assert (config.optim.momentum, config.score.size) == ((0.9, 0.95), (32, 64))
    assert (config.losses.cross_image, config.objects.bank_images, config.runtime.devices) == (0.0, None, "auto")


@pytest.mark.parametrize(
    ("given", "expected"), [("true", "default"), ("false", "none"), ("none", "none"), ("max-autotune", "max-autotune")]
)
def test_compile_accepts_modes_and_booleans(given: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(f"runtime:\n  compile: {given}\n")
    assert load_config(tmp_path).runtime.compile == expected
    assert load_config("coco_vits16", {"runtime.compile": given}).runtime.compile == expected


def test_losses_accept_weights_and_booleans(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("losses: {image: true, cross_view: false, cross_image: 0.25}\n")
    losses = load_config(tmp_path).losses
    assert (losses.image, losses.cross_view, losses.cross_image) == (1.0, 0.0, 0.25)
    assert not any(isinstance(weight, bool) for weight in (losses.image, losses.cross_view, losses.cross_image))
    losses = load_config("coco_vits16", {"losses.image": "false", "losses.cross_view": 2}).losses
    assert (losses.image, losses.cross_view, losses.cross_image) == (0.0, 2.0, 1.0)


# ------------------------------------------------------------------ objectives


@pytest.mark.parametrize(
    ("text", "name", "args"),
    [
        ("{}", "cribo", {}),
        ("objective: dino", "dino", {}),
        ("objective: {name: dino, args: {crops: 4}}", "dino", {"crops": 4}),
        ("objective: {class_path: mine.Objective, init_args: {rate: 0.5}}", "mine.Objective", {"rate": 0.5}),
    ],
)
def test_an_objective_is_named_in_a_file(text: str, name: str, args: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(f"{text}\n")
    config = load_config(tmp_path)
    assert config.objective == ObjectiveConfig(name, args)
    (tmp_path / "config.yaml").write_text(dump_config(config))
    assert load_config(tmp_path) == config


@pytest.mark.parametrize(
    "words",
    [
        ["--objective", "mine.Objective", "--objective.args", "{rate: 0.5}"],
        ["--objective.name=mine.Objective", "--objective.args.rate", "0.5"],
        ["--objective.class_path", "mine.Objective", "--objective.init_args.rate=0.5"],
    ],
)
def test_an_objective_is_named_by_option(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["pretrain", *words, "--print_config"])
    (tmp_path / "config.yaml").write_text(capsys.readouterr().out)
    assert load_config(tmp_path).objective == ObjectiveConfig("mine.Objective", {"rate": 0.5})


# ------------------------------------------------------------------ errors


def test_options_that_were_removed_are_ignored_in_files_and_refused_elsewhere(tmp_path: Path) -> None:
    """The config.yaml of runs of earlier versions contains them; these runs can be resumed."""
    text = dump_config(load_config("camvid"))
    removed = "".join(
        f"  {line}\n" for line in ("tf32: null", "bank: sharded", "strategy: fsdp", "on_nonfinite: rollback")
    )
    (tmp_path / "config.yaml").write_text(text.replace("runtime:\n", f"runtime:\n{removed}"))
    assert load_config(tmp_path) == load_config("camvid")
    with pytest.raises(ConfigError, match=r"runtime\.tf32"):
        load_config("camvid", {"runtime.tf32": True})


def test_aliases_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("optim: {warmup_epochs: &n 3}\nlosses: {teacher_temperature_epochs: *n}\n")
    with pytest.raises(ConfigError, match="aliases"):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"optim.epoch": 3}, "optim.epochs"),
        ({"optim.epochs": "many"}, "optim.epochs"),
        ({"optim.epochs": 0}, "optim.epochs"),
        ({"views.flip": 2.0}, "views.flip"),
        ({"losses.image": "half"}, "losses.image"),
        ({"runtime.on_nonfinite": "skip"}, "runtime.on_nonfinite"),
        ({"runtime.compile": "turbo"}, "reduce-overhead"),
        ({"backbone.checkpointing": "all"}, "selective"),
        ({"optim.micro_batches": 2, "runtime.compile": "reduce-overhead"}, "runtime.compile default"),
        ({"optim.micro_batches": 3}, "optim.batch_size"),
    ],
    ids=str,
)
def test_invalid_configurations_are_rejected(overrides: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load_config("coco_vits16", overrides)


def test_the_nearest_preset_is_suggested() -> None:
    with pytest.raises(ConfigError, match="did you mean coco_vits16"):
        load_config("coco_vit16")


def test_the_subfolder_of_a_preset_is_read_where_it_exists(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "coco" / "train2017").mkdir(parents=True)
    (tmp_path / "mine").mkdir()
    assert load_config("coco_vits16", {"data.root": f"{tmp_path}/coco"}).data.images == "train2017"
    assert not caplog.records
    assert load_config("coco_vits16", {"data.root": f"{tmp_path}/mine"}).data.images == ""
    assert "train2017" in caplog.text
    assert load_config("coco_vits16").data.images == "train2017"  # the published data, which is not here


def test_a_subfolder_of_the_user_must_exist(tmp_path: Path) -> None:
    assert load_config("coco_vits16", {"data.images": ""}).data.images == ""  # the root itself
    overrides = {"data.root": str(tmp_path), "data.images": "val"}
    assert load_config("coco_vits16", overrides).data.images == "val"
    (tmp_path / "mine.yaml").write_text(f"data: {{root: {tmp_path}, images: train2017}}\n")
    assert load_config(tmp_path / "mine.yaml").data.images == "train2017"
