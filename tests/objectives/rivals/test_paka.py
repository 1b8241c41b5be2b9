"""PaKA, against its definition: no released code."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.objectives.conftest import batch_of
from tests.objectives.literal import MOMENTUM, assert_steps_are, unequal

from cribo.data.photometric import apply_photometric
from cribo.data.samples import Batch
from cribo.method import ViewRecipe, patch_coordinates
from cribo.models import normalise
from cribo.objectives import Setting, Step
from cribo.objectives.crops import concatenate_crops, multi_crop
from cribo.objectives.overlap import align, overlap_area
from cribo.objectives.rivals import paka
from cribo.objectives.rivals.paka import ContainedCrops, PaKA, kernel_alignment
from cribo.pretraining import PretrainConfig, pretrain

Tiny = Callable[..., PretrainConfig]
STEP = Step(6, steps_per_epoch=4, total_steps=12)
ARGS: dict[str, Any] = {"local_crops": 3, "local_size": 16}
NO_CLS = {"patch_size": 8, "depth": 1, "embed_dim": 32, "num_heads": 2, "class_token": False, "global_pool": "avg"}


def make(tiny: Tiny, changes: dict[str, Any] | None = None, **args: Any) -> PaKA:
    return PaKA(Setting(tiny(changes), 36, 4), **{**ARGS, **args})


def written_alignment(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Compute <HKH, HLH> / (|HKH| |HLH|) of two matrices of patches, with the matrix H."""
    n = len(student)
    centring = torch.eye(n, dtype=student.dtype) - torch.ones(n, n, dtype=student.dtype) / n
    first, second = (centring @ (rows @ rows.T) @ centring for rows in (student, teacher))
    return torch.trace(first @ second) / (torch.trace(first @ first) * torch.trace(second @ second)).sqrt()


def written_losses(objective: Any, batch: Batch, step: Step) -> dict[str, torch.Tensor]:
    """Compute 1 - kernel alignment of each local crop of each image and its global crop, with 2 x 2 patches."""
    losses = []
    mean, std = objective.student.backbone.mean, objective.student.backbone.std
    for image in range(len(batch)):
        clean = normalise(batch["global"][image].double() / 255, mean=mean, std=std)
        changed = apply_photometric(
            batch["local"][image], type(batch["photometric"])(*(each[image] for each in batch["photometric"]))
        )
        local = normalise(changed.double(), mean=mean, std=std)
        for number in range(3):
            parent, crop = number % 2, number + 2
            rows = []
            for network, view, own, other in (
                (objective.student, local[number], crop, parent),
                (objective.teacher, clean[parent], parent, crop),
            ):
                features = network.backbone(view[None])
                found = features.tokens.transpose(1, 2).unflatten(2, features.grid)
                if batch["flips"][image, own]:  # mirror the map and the box back
                    found = found.flip(-1)
                box = batch["boxes"][image, own, other].double()
                if batch["flips"][image, own]:
                    box = torch.stack((1 - box[2], box[1], 1 - box[0], box[3]))
                aligned = align(found, box[None] * found.shape[-1], 2)[0].flatten(1).T
                rows.append(network.head(aligned))
            losses.append(1 - written_alignment(rows[0], rows[1].detach()))
    return {"paka": torch.stack(losses).mean()}


def test_two_steps_are_those_written_out(tiny: Tiny) -> None:
    objective = unequal(make(tiny, {"backbone.drop_path": 0.0, "optim.momentum": MOMENTUM}))
    batches = [batch_of(objective, 4, first) for first in (0, 4)]
    assert len({*batches[0]["flips"].flatten().tolist()}) == 2
    # Views and boxes are in float32.
    assert_steps_are(objective, batches, written_losses, tolerance=1e-6)


def test_alignment_is_that_of_the_centred_kernels() -> None:
    generator = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, 3, 9, 4, generator=generator), torch.randn(2, 3, 9, 6, generator=generator)
    found = kernel_alignment(student, teacher)
    for place in range(6):
        expected = written_alignment(student.flatten(0, 1)[place], teacher.flatten(0, 1)[place])
        torch.testing.assert_close(found.flatten()[place], expected)


def test_alignment_ignores_rotation_scale_and_a_constant() -> None:
    rows = torch.randn(5, 9, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rotation = torch.linalg.qr(torch.randn(4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)).Q
    torch.testing.assert_close(kernel_alignment(7 * rows @ rotation + 3, rows), torch.ones(5, dtype=torch.float64))


def test_equal_patches_have_no_alignment_and_a_finite_gradient() -> None:
    teacher = torch.randn(1, 9, 4, generator=torch.Generator().manual_seed(0))
    student = torch.ones(1, 9, 4, requires_grad=True)
    loss = 1 - kernel_alignment(student, teacher).mean()
    loss.backward()
    assert loss == 1
    assert student.grad is not None
    assert student.grad.isfinite().all()


def test_the_teacher_sees_no_augmentation(tiny: Tiny) -> None:
    plain = {"views.jitter": 0.0, "views.greyscale": 0.0, "views.blur": (0.0, 0.0), "views.solarise": (0.0, 0.0)}
    strong = {**plain, "views.jitter": 1.0, "views.brightness": 0.8}
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    for changes in (plain, strong):
        objective = make(tiny, changes)
        views: list[torch.Tensor] = []

        def record(module: Any, args: Any, into: list[torch.Tensor] = views) -> None:
            into.append(args[0])

        for network in (objective.teacher, objective.student):
            network.backbone.register_forward_pre_hook(record)
        objective(batch_of(objective), STEP)
        seen.append((views[0], views[1]))
    (teacher, student), (other_teacher, other_student) = seen
    assert teacher.shape == (8, 3, 32, 32)
    assert student.shape == (12, 3, 16, 16)
    assert torch.equal(teacher, other_teacher)
    assert not torch.allclose(student, other_student, atol=0.05)


def test_student_and_teacher_see_the_same_places_also_in_mirrored_crops(tiny: Tiny) -> None:
    objective = make(tiny, {"views.flip": 0.5}, local_size=32)
    drawn = [objective.crops.draw_crops(400, 500, torch.Generator().manual_seed(seed)) for seed in range(8)]
    boxes, flips, maps = [], [], []
    for crops in map(concatenate_crops, drawn):
        sample = objective.crops.places(crops, torch.Generator())
        boxes.append(sample["boxes"])
        flips.append(crops.flips)
        maps.append(patch_coordinates(crops.boxes, crops.flips, (32, 32)).transpose(1, 2).unflatten(2, (32, 32)))
    views = torch.stack(maps, dim=1)  # of the places of the patches in the image
    seen, wanted = objective._aligned(views[2:], views[:2], torch.stack(boxes), torch.stack(flips))
    assert len({*torch.stack(flips).flatten().tolist()}) == 2
    torch.testing.assert_close(seen, wanted, rtol=0, atol=8)  # half of a patch of the global crops


@pytest.mark.parametrize("area", [(0.05, 0.25), (0.4, 0.9)])
@pytest.mark.parametrize("size", [(40, 40), (30, 300), (500, 375)])
def test_local_crops_lie_inside_their_global_crops(
    size: tuple[int, int], area: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paka, "_CROP_ATTEMPTS", 3)  # some are moved
    sets = multi_crop(ViewRecipe(area=(0.1, 0.5)), count=3, size=96, area=area)
    transform = ContainedCrops(*sets, drop_path_sites=0)
    for seed in range(30):
        views, local = transform.draw_crops(*size, torch.Generator().manual_seed(seed))
        assert len(views.flips) == 2
        assert len(local.flips) == 3
        contained = overlap_area(concatenate_crops([local, views]))[:3, 3:] / local.boxes[:, 2:].prod(dim=1)[:, None]
        assert contained[[0, 1, 2], [0, 1, 0]].min() >= 0.9 - 1e-6
        assert local.boxes.min() >= 0
        assert (local.boxes[:, :2] + local.boxes[:, 2:] <= torch.tensor(size)).all()


def test_samples_are_keyed(tiny: Tiny) -> None:
    objective = make(tiny)
    first, again = batch_of(objective), batch_of(objective)
    assert first["local"].shape == (4, 3, 3, 16, 16)
    assert first["boxes"].shape == (4, 5, 5, 4)
    for name in ("local", "boxes"):
        assert torch.equal(first[name], again[name])
        assert not torch.equal(first[name][0], first[name][1])


def test_local_crops_are_a_multiple_of_the_patch_size(tiny: Tiny) -> None:
    for patch, expected in ((14, 98), (16, 96), (56, 112)):
        args = {"patch_size": patch, "depth": 1, "embed_dim": 32, "num_heads": 2}
        changes = {"backbone.args": args, "views.size": 2 * 112}
        assert make(tiny, changes, local_size=None).crops.sets[1].recipe.size == expected


@pytest.mark.parametrize(
    "network",
    [
        {"backbone.train_blocks": 1},
        {"backbone.args": NO_CLS},
        {"backbone.name": "resnet18", "backbone.args": {"layers": [1, 1, 0, 0], "channels": [16] * 4}},
    ],
    ids=["frozen blocks", "no [CLS]", "convolutional"],
)
def test_it_trains(tiny: Tiny, tmp_path: Path, network: dict[str, Any]) -> None:
    short = {"optim.epochs": 1, "optim.warmup_epochs": 0, "objective.name": "paka", "objective.args": ARGS}
    run = pretrain(tiny({"optim.lr_factors": {"backbone.": 1.0}, **short, **network}), out=tmp_path)
    assert 0 < run.summary["losses"]["paka"] < 1


def test_the_loss_falls(tiny: Tiny) -> None:
    changes = {"backbone.drop_path": 0.0, "optim.momentum": (0.99, 0.99), "head.init_std": 0.2}
    objective = make(tiny, changes)
    batch = batch_of(objective, 8)
    optimiser = torch.optim.AdamW(objective.trainable().parameters(), lr=1e-3)
    losses = []
    for _ in range(40):
        loss = objective(batch, STEP).losses["paka"]
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        objective.after_step(STEP)
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]
