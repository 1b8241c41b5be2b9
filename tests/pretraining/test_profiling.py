import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from cribo.cli import main
from cribo.method import MemoryBank
from cribo.objectives.cribo import CrIBo
from cribo.objectives.objects import Objects
from cribo.pretraining.config import PretrainConfig
from cribo.pretraining.loading import load_config
from cribo.pretraining.profile_report import profile_figure, profile_table
from cribo.pretraining.profiling import Profile, fill_bank, profile
from cribo.pretraining.session import Session
from cribo.training.timing import part

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


def test_the_table_contains_every_part_and_parts_sum_to_the_step(measured: Profile) -> None:
    for step in measured.steps:
        assert all(seconds > 0 for part, seconds in step.parts.items() if part not in ("frozen blocks", "patch losses"))
        assert sum(step.parts.values()) == pytest.approx(sum(step.rows.values()))
        assert sum(step.parts.values()) == pytest.approx(step.step, rel=0.2)
        low, high = step.step_range
        assert low <= step.step <= high
        assert 0 < step.object_share < 1
        assert step.images_per_second == pytest.approx(16 / step.step)
    assert measured.loader_images_per_second > 0


def test_frozen_blocks_and_patch_losses_are_parts_of_a_step() -> None:
    vit = {"patch_size": 16, "depth": 2, "embed_dim": 32, "num_heads": 2}
    frozen = {"backbone__name": "vit_tiny_patch16_224", "backbone__args": vit, "backbone__train_blocks": 1}
    (step,) = profile(config(losses__patch_neighbours=1.0, **frozen), steps=1, warmup=2).steps
    assert all(seconds > 0 for seconds in step.parts.values())
    assert sum(step.parts.values()) == pytest.approx(step.step)


@pytest.mark.parametrize("preset", ["scenes_dino", "scenes_mae", "scenes_slotcon"])
def test_steps_of_other_objectives_have_a_forward_pass_and_an_update_but_no_objects(preset: str) -> None:
    (step,) = profile(load_config(preset, TINY), steps=1, warmup=2, loader_seconds=0.1).steps
    assert step.rows["Forward pass"] > 0
    assert step.rows["Update"] > 0
    assert step.object_share == 0
    assert sum(step.rows.values()) == pytest.approx(step.step)


class Sampled(CrIBo):
    """An objective that names a part of its own."""

    def find_objects(self, tokens: Any, labels: Any, batch: Any) -> Objects:
        objects = super().find_objects(tokens, labels, batch)
        with part("own part"):
            objects.teacher.sum()
        return objects


def test_a_custom_objective_names_its_own_parts() -> None:
    sampled = profile(config(objective__name=f"{__name__}.Sampled"), steps=1, warmup=2)
    (step,) = sampled.steps
    assert 0 < step.parts["own part"] == step.rows["Other"]
    assert sum(step.rows.values()) == pytest.approx(step.step)
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(profile_table(sampled))
    assert "own part" in console.export_text()
    assert profile_figure(sampled).axes


def test_objects_and_valid_matches_are_as_requested(measured: Profile) -> None:
    for step, objects in zip(measured.steps, (2, 5), strict=True):
        assert step.fixed_objects == objects
        assert step.objects_per_image == objects
        assert step.bootstrapping_ratio == pytest.approx(0.25, abs=0.02)


def test_memory_between_steps_is_that_of_networks_optimiser_and_bank(measured: Profile) -> None:
    module = Session(config()).make_module()
    objective = module.objective
    assert isinstance(objective, CrIBo)
    student, teacher = (
        sum(p.nbytes for p in network.parameters()) for network in (objective.student, objective.teacher)
    )
    dim = objective.student.backbone.embed_dim
    bank = MemoryBank(num_images=30, num_objects=config().objects.num_objects, dim=dim).nbytes
    for step in measured.steps:
        # Weights, gradients and AdamW's two moments of the student; weights of the teacher.
        assert step.held == pytest.approx(4 * student + teacher + bank, rel=0.05)
        assert step.peak > step.held


def test_a_total_batch_is_divided_by_the_devices() -> None:
    spread = config(optim__batch_size=32, runtime__devices=2, objects__bank_images=40)
    assert profile(spread, steps=1, warmup=2).config.optim.batch_size == 16


@pytest.mark.parametrize(
    ("changes", "arguments", "named"),
    [
        ({}, {"kept": [17]}, "--kept"),
        ({}, {"kept": [0]}, "--kept"),
        ({}, {"steps": 0}, "steps"),
        ({}, {"warmup": 1}, "warmup"),
        ({}, {"bootstrapping_ratio": 1.5}, "bootstrapping_ratio"),
        ({}, {"trace": Path(__file__).parent}, "--trace"),
        ({"runtime__devices": "auto"}, {}, "how many devices"),
        ({"runtime__devices": 0}, {}, "how many devices"),
        ({"objective__name": "dino", "views__size": 64}, {"kept": [2]}, "--kept"),
    ],
)
def test_invalid_settings_are_errors_before_any_work(
    changes: dict[str, object], arguments: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        profile(config(**changes), **arguments)


def test_the_bank_is_filled_with_rows_near_real_objects() -> None:
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


def test_the_command_prints_the_table_and_writes_json_figure_and_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    words = [f"--{name}={value}" for name, value in TINY.items()]
    out, trace = tmp_path / "profiles", tmp_path / "new" / "trace.json"
    words += ["--kept", "2,3", "--steps", "1", "--warmup", "2", "--out", str(out), "--trace", str(trace)]
    status = main(["profile", *words])
    printed = capsys.readouterr().out
    assert status == 0
    for word in ("Clustering", "NN retrieval", "bank update", "2 objects", "3 objects", "images/s", "peak memory"):
        assert word in printed, word
    (folder,) = out.iterdir()
    numbers = json.loads((folder / "profile.json").read_text())
    assert [step["fixed_objects"] for step in numbers["steps"]] == [2, 3]
    assert (folder / "profile.png").stat().st_size > 5000
    marks = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"clustering", "retrieval", "backbone, backward"} <= marks


def test_an_invalid_number_of_objects_is_a_one_line_error(capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"--{name}={value}" for name, value in TINY.items()]
    assert main(["profile", *words, "--kept", "400"]) == 2
    assert "--kept" in capsys.readouterr().err
