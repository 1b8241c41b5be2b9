"""Distillation from a frozen network of another architecture."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.objectives.conftest import batch_of
from tests.objectives.literal import assert_steps_are, unequal
from torch import Tensor

from cribo.base.errors import ConfigError
from cribo.data.samples import Batch
from cribo.models import Backbone, Features, Licence, build_backbone, load_backbone, normalise, save_backbone
from cribo.objectives import Setting, Step
from cribo.objectives.crops import augmented
from cribo.objectives.distill import Distill, at_common_grid, resample
from cribo.pretraining import PretrainConfig, pretrain, resume

Tiny = Callable[..., PretrainConfig]
STEP = Step(2, steps_per_epoch=4, total_steps=12)
CNN = {"backbone.name": "resnet18", "backbone.args": {"layers": [1, 1, 0, 0], "channels": [8, 16, 16, 16]}}


def saved(folder: Path, *, seed: int = 5) -> Backbone:
    """Save a network with patches of 12 pixels and random weights in a folder."""
    args = {"patch_size": 12, "depth": 1, "embed_dim": 24, "num_heads": 2}
    backbone = build_backbone("vit_tiny_patch16_224", args=args, image_size=36, seed=seed)
    save_backbone(backbone, folder)
    return backbone


def make(tiny: Tiny, teacher: Path, changes: dict[str, Any] | None = None, **args: Any) -> Distill:
    return Distill(Setting(tiny({"backbone.drop_path": 0.0, **(changes or {})}), 36, 4), teacher=str(teacher), **args)


def test_a_student_of_another_architecture_learns_the_teachers_features(tiny: Tiny, tmp_path: Path) -> None:
    saved(tmp_path)
    objective = make(tiny, tmp_path, CNN)
    assert objective.teacher_size == 48  # 4 x 4 patches of 12 pixels; the student has 4 x 4 patches of 8 pixels
    optimiser = torch.optim.AdamW(objective.trainable().parameters(), lr=3e-3)
    batch, losses = batch_of(objective, 8), []
    for number in range(60):
        output = objective(batch, Step(number, steps_per_epoch=10, total_steps=60))
        total = sum(objective.weights[name] * loss for name, loss in output.losses.items())
        assert isinstance(total, Tensor)
        optimiser.zero_grad()
        total.backward()
        optimiser.step()
        objective.after_step(Step(number, steps_per_epoch=10, total_steps=60))
        losses.append(float(output.losses["patch_cosine"].detach()))
    assert losses[1] > 0.8
    assert losses[-1] < 0.5 * losses[1]
    assert objective.teacher.training is False
    assert not any(name.startswith("_teacher") or "teacher." in name for name in objective.state_dict())


def test_the_licence_of_the_teacher_is_recorded_with_the_student(tiny: Tiny, tmp_path: Path) -> None:
    teacher = saved(tmp_path)
    teacher.licences = (Licence("teacher.pth", "cc-by-nc-4.0"),)
    save_backbone(teacher, tmp_path)
    save_backbone(make(tiny, tmp_path, CNN).exported(), tmp_path / "student")
    assert load_backbone(tmp_path / "student").licences == (Licence("teacher.pth", "cc-by-nc-4.0", role="teacher"),)


def written_losses(objective: Any, batch: Batch, step: Step) -> dict[str, Tensor]:
    """Compute the distances to the teacher's features, standardised by the moments of earlier steps."""
    student, teacher = objective.exported(), objective.teacher
    views = augmented(batch, "views", objective.options.views).flatten(0, 1)
    larger = F.interpolate(views, (48, 48), mode="bicubic", antialias=True)
    with torch.no_grad():
        targets = teacher(normalise(larger, mean=teacher.mean, std=teacher.std).double())
    features = student(normalise(views, mean=student.mean, std=student.std).double())
    losses, objective.seen = {}, {}
    for level, own, wanted in (
        ("global", features.global_token, targets.global_token),
        ("patch", features.tokens.flatten(0, 1), targets.tokens.flatten(0, 1)),
    ):
        objective.seen[level] = wanted
        mean, variance = (objective.get_buffer(f"{level}_{name}") for name in ("mean", "variance"))
        target = (wanted - mean) / (variance + 1e-6).sqrt()
        predicted = objective.student["head"][level](own)
        difference = (predicted - target).abs()
        losses[f"{level}_cosine"] = (1 - F.cosine_similarity(predicted, target, dim=1)).mean()
        losses[f"{level}_smooth_l1"] = torch.where(difference < 1, difference**2 / 2, difference - 0.5).mean()
    return losses


def written_update(objective: Any, step: Step) -> None:
    share = 1 / (step.number + 1)
    for level, rows in objective.seen.items():
        mean, variance = (objective.get_buffer(f"{level}_{name}") for name in ("mean", "variance"))
        variance.copy_((1 - share) * variance + share * rows.var(dim=0, correction=0).mean())
        mean.copy_((1 - share) * mean + share * rows.mean(dim=0))


def test_two_steps_are_those_written_out(tiny: Tiny, tmp_path: Path) -> None:
    saved(tmp_path)
    objective = unequal(make(tiny, tmp_path))
    batches = [batch_of(objective, 4, first) for first in (0, 4)]
    assert_steps_are(objective, batches, written_losses, written_update, tolerance=1e-6)


def test_the_losses_are_those_of_standardised_features(tiny: Tiny, tmp_path: Path) -> None:
    args = {"depth": 1, "embed_dim": 24, "num_heads": 2}
    teacher = build_backbone("beit_base_patch16_224", args=args, image_size=48, seed=5)  # takes no other size
    save_backbone(teacher, tmp_path)
    objective = make(tiny, tmp_path)
    with torch.no_grad():
        objective.get_buffer("patch_mean").fill_(0.3)
        objective.get_buffer("patch_variance").fill_(4.0)
    batch = batch_of(objective)
    output = objective(batch, STEP)
    assert set(output.losses) == {"global_cosine", "global_smooth_l1", "patch_cosine", "patch_smooth_l1"}
    seen: list[Tensor] = []
    objective.exported().register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    objective(batch, STEP)
    [views] = seen  # normalised for the student as for the teacher
    images = F.interpolate(views, (48, 48), mode="bicubic", antialias=True)
    features, targets = objective.exported().encode(views), teacher.encode(images)
    predicted = objective.student.get_submodule("head.patch")(features.tokens).mT.unflatten(2, (4, 4))
    predicted = F.interpolate(predicted, (3, 3), mode="bilinear", antialias=True).flatten(2).mT.flatten(0, 1)
    target = ((targets.tokens - 0.3) / 2).flatten(0, 1)
    expected = 1 - F.cosine_similarity(predicted, target).mean()
    torch.testing.assert_close(output.losses["patch_cosine"], expected, rtol=1e-3, atol=1e-4)
    expected = F.smooth_l1_loss(predicted, target)
    torch.testing.assert_close(output.losses["patch_smooth_l1"], expected, rtol=1e-3, atol=1e-4)


def test_a_student_of_the_teachers_width_learns_without_a_linear_layer_for_patches(tiny: Tiny, tmp_path: Path) -> None:
    teacher = saved(tmp_path)
    objective = make(tiny, tmp_path, {"backbone.args": {"embed_dim": 24, "depth": 1, "num_heads": 2}})
    assert [name for name, _ in objective.student.get_submodule("head").named_children()] == ["global"]
    with torch.no_grad():
        objective.get_buffer("patch_mean").fill_(0.3)
        objective.get_buffer("patch_variance").fill_(4.0)
    seen: list[Features] = []

    def keep(module: object, args: object, output: Features) -> None:
        seen.append(output)

    for network in (objective.exported(), objective.teacher):
        network.register_forward_hook(keep)
    output = objective(batch_of(objective), STEP)
    own, wanted = (((tokens - 0.3) / 2).flatten(0, 1) for tokens in at_common_grid(seen[1], seen[0]))
    assert own.shape[1] == teacher.embed_dim
    expected = 1 - F.cosine_similarity(own, wanted).mean()
    torch.testing.assert_close(output.losses["patch_cosine"], expected, rtol=1e-3, atol=1e-4)


def test_moments_are_those_of_the_teachers_features(tiny: Tiny, tmp_path: Path) -> None:
    teacher = saved(tmp_path)
    objective = make(tiny, tmp_path)
    seen: list[Tensor] = []
    objective.teacher.register_forward_hook(lambda module, args, output: seen.append(output.tokens.flatten(0, 1)))
    for number, batch in enumerate(batch_of(objective, 8).split(2)):
        for part in batch.split(2):
            objective(part, STEP)
        objective.after_step(Step(number, steps_per_epoch=4, total_steps=12))
    tokens = torch.cat(seen)
    assert tokens.shape[1] == teacher.embed_dim
    torch.testing.assert_close(objective.get_buffer("patch_mean"), tokens.mean(dim=0), rtol=1e-4, atol=1e-5)
    # The variance is that within a batch.
    variance = torch.stack([each.var(dim=0, correction=0).mean() for each in tokens.chunk(2)]).mean()
    torch.testing.assert_close(objective.get_buffer("patch_variance"), variance, rtol=1e-3, atol=1e-5)


def test_resampling_to_a_coarser_grid_averages() -> None:
    tokens = torch.arange(16.0).view(1, 16, 1)
    assert resample(tokens, (4, 4), (4, 4)) is tokens
    assert resample(tokens, (4, 4), (1, 1)).item() == pytest.approx(7.5)


@pytest.mark.parametrize("unused", ["global_token", "smooth_l1"])
def test_a_loss_with_weight_zero_is_left_out(tiny: Tiny, tmp_path: Path, unused: str) -> None:
    saved(tmp_path / "teacher")
    args = {"teacher": str(tmp_path / "teacher"), unused: 0.0}
    run = pretrain(tiny({"objective.name": "distill", "objective.args": args, "optim.epochs": 1}), out=tmp_path)
    losses = json.loads((run.folder / "summary.json").read_text())["losses"]
    assert len(losses) == 2
    assert not any(unused.removesuffix("_token") in name for name in losses)


def test_grids_are_brought_to_the_fewer_rows_and_columns() -> None:
    a = Features(torch.zeros(1, 2), torch.zeros(1, 24 * 18, 2), (24, 18))
    b = Features(torch.zeros(1, 3), torch.zeros(1, 20 * 20, 3), (20, 20))
    assert [tokens.shape for tokens in at_common_grid(a, b)] == [(1, 20 * 18, 2), (1, 20 * 18, 3)]


def test_a_run_resumes_with_the_same_teacher_only(tiny: Tiny, tmp_path: Path) -> None:
    saved(tmp_path / "teacher")
    changes = {"objective.name": "distill", "objective.args": {"teacher": str(tmp_path / "teacher")}}
    run = pretrain(tiny({**changes, "optim.epochs": 1}), out=tmp_path, name="run")
    assert run.backbone().embed_dim == 32
    (run.folder / "summary.json").unlink()
    (run.folder / "backbone.safetensors").unlink()
    saved(tmp_path / "teacher", seed=6)
    with pytest.raises(ConfigError, match=r"teacher .*teacher has changed since the run was started: restore it"):
        resume(run.folder)
