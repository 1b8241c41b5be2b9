import json
from pathlib import Path

import pytest
import torch

from cribo.arguments import ConfigError
from cribo.cli import main
from cribo.method import MemoryBank
from cribo.models import build_backbone
from cribo.pretraining.config import PretrainConfig
from cribo.pretraining.presets import load_config
from cribo.pretraining.profiling import PARTS, Profile, fill_bank, profile

TINY = {
    "data.scenes.count": 40,
    "data.workers": 0,
    "optim.batch_size": 16,
    "objects.group_size": 8,
    "objects.bank_images": 30,
}


def config(**overrides: object) -> PretrainConfig:
    return load_config("quickstart", TINY | {name.replace("__", "."): value for name, value in overrides.items()})


@pytest.fixture(scope="module")
def measured() -> Profile:
    return profile(config(), kept=[2, 5], bootstrapping_ratio=0.25, steps=2, warmup=2)


def test_every_lap_of_a_step_is_known_and_the_laps_make_up_the_step(measured: Profile) -> None:
    for step in measured.steps:
        assert set(step.parts) == set(PARTS)
        assert sum(spread.median for spread in step.parts.values()) == pytest.approx(step.step.median, rel=0.2)
        assert all(0 <= spread.low <= spread.median <= spread.high for spread in step.parts.values())
        assert 0 < step.object_share < 1


def test_objects_and_valid_matches_are_as_asked_for(measured: Profile) -> None:
    for step, objects in zip(measured.steps, (2, 5), strict=True):
        assert step.fixed_objects == objects
        assert step.objects_per_image == objects
        assert step.bootstrapping_ratio == pytest.approx(0.25, abs=0.02)


def test_the_products_of_objects_are_counted(measured: Profile) -> None:
    # By hand, for the preset: 16 images, R = 16 n rows a view, a bank of 30 n rows a view, a fourth of them matched.
    head = config().head
    backbone = config().backbone
    dim = build_backbone(backbone.name, args=backbone.args, image_size=64).embed_dim
    mlp = dim * head.hidden_dim + (head.layers - 2) * head.hidden_dim**2 + head.hidden_dim * head.bottleneck_dim
    for step, objects in zip(measured.steps, (2, 5), strict=True):
        rows = 16 * objects
        search = 2 * rows * 30 * objects * dim
        passes = 2 * rows * (3 + 1 + step.bootstrapping_ratio)
        expected = 2 * (search + passes * (mlp + head.bottleneck_dim * head.prototypes))
        assert step.object_flops == pytest.approx(expected, rel=1e-6)


def test_memory_is_counted_by_what_holds_it(measured: Profile) -> None:
    for step, objects in zip(measured.steps, (2, 5), strict=True):
        memory = step.memory
        # AdamW keeps two numbers a weight; the teacher is as large as the student.
        assert memory["optimiser's state"] == pytest.approx(2 * memory["student's weights"], rel=0.05)
        assert memory["teacher's weights"] == pytest.approx(memory["student's weights"], rel=0.01)
        assert memory["gradients"] == pytest.approx(memory["student's weights"], rel=0.05)
        assert memory["banks"] >= 2 * 30 * objects * 4
        assert step.peak > memory["kept for backward"] > 16 * 2 * 3 * 64 * 64 * 4


def test_micro_batches_keep_less_for_backward() -> None:
    kept = []
    for parts in (1, 4):
        split = config(optim__micro_batches=parts, objects__group_size=2)
        kept.append(profile(split, steps=1, warmup=2).steps[0].memory["kept for backward"])
    assert kept[1] < kept[0] / 2


@pytest.mark.parametrize("devices", ["auto", 0])
def test_an_unknown_number_of_devices_is_asked_for(devices: str | int) -> None:
    with pytest.raises(ValueError, match="does not say how many devices share the batch"):
        profile(config(runtime__devices=devices))


def test_a_total_batch_is_divided_by_the_devices() -> None:
    spread = config(optim__batch_size=32, runtime__devices=2, objects__bank_images=40)
    assert profile(spread, steps=1, warmup=2).batch_size == 16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kept": [17]}, "--kept must be between 1 and 16 .* got 17"),
        ({"kept": [0]}, "between 1 and"),
        ({"steps": 0}, "--steps >= 1"),
        ({"warmup": 1}, "--warmup >= 2"),
        ({"bootstrapping_ratio": 1.5}, "between 0 and 1, got 1.5"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_any_work(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        profile(config(), **arguments)  # pyright: ignore[reportArgumentType]


def test_another_objective_has_other_parts() -> None:
    with pytest.raises(ConfigError, match="measures the objective cribo, got dino"):
        profile(config(objective__name="dino", views__size=64))


def test_the_bank_is_filled_to_the_last_image_with_rows_near_real_objects() -> None:
    objects = torch.randn(2, 6, 16) * 0.1 + 3
    bank = MemoryBank(num_images=50, num_objects=4, dim=16)
    fill_bank(bank, objects, per_image=3)
    assert bank.images_held == 50
    assert len(bank) == 150
    rows = bank.objects(0, torch.arange(150))
    distance = torch.cdist(rows, objects[0]).amin(dim=1)
    spread = objects[0].std(dim=0, correction=0).norm()
    assert (distance < 1.5 * spread).all()
    assert (distance > 0).all()


def test_the_command_prints_the_table_and_leaves_numbers_and_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    words = [f"--{name}={value}" for name, value in TINY.items()]
    status = main(["profile", *words, "--kept", "2,3", "--steps", "1", "--warmup", "2", "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    assert status == 0
    for word in (
        "Clustering",
        "NN retrieval",
        "model FLOPs utilisation",
        "2 objects",
        "3 objects",
        "kept for backward",
    ):
        assert word in printed, word
    (folder,) = tmp_path.iterdir()
    numbers = json.loads((folder / "profile.json").read_text())
    assert [step["fixed_objects"] for step in numbers["steps"]] == [2, 3]
    assert (folder / "profile.png").stat().st_size > 5000


def test_an_unknown_number_of_objects_is_one_line_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"--{name}={value}" for name, value in TINY.items()]
    assert main(["profile", *words, "--kept", "400"]) == 2
    assert "must be between 1 and 16" in capsys.readouterr().err
