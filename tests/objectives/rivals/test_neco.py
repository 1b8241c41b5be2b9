"""NeCo, against golden values and its definition."""

import math
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.objectives.conftest import batch_of
from tests.objectives.golden import cases, load
from tests.objectives.literal import MOMENTUM, assert_steps_are, follow, unequal

from cribo.data.samples import Batch
from cribo.method import Crops, ViewRecipe, patch_coordinates
from cribo.objectives import Setting, Step
from cribo.objectives.crops import augmented_crops, concatenate_crops, multi_crop
from cribo.objectives.overlap import align, overlap_area, overlap_boxes
from cribo.objectives.rivals import neco
from cribo.objectives.rivals.neco import NeCo, OverlappingCrops, aligned_pairs, neighbour_losses, references_of
from cribo.objectives.rivals.sorting import SortingNetwork
from cribo.pretraining import PretrainConfig, pretrain

Tiny = Callable[..., PretrainConfig]
STEP = Step(6, steps_per_epoch=4, total_steps=12)
ARGS: dict[str, Any] = {"local_crops": 2, "local_size": 16, "grid": 3}


NO_CLS = {"patch_size": 8, "depth": 1, "embed_dim": 32, "num_heads": 2, "class_token": False, "global_pool": "avg"}


def make(tiny: Tiny, changes: dict[str, Any] | None = None, **args: Any) -> NeCo:
    return NeCo(Setting(tiny(changes), 36, 4), **{**ARGS, **args})


@pytest.mark.parametrize("file", cases("neco_loss"), ids=lambda file: file.stem)
def test_golden_loss_and_gradient(file: Path) -> None:
    values = load(file)
    grid, patch, side, local_side, *_ = values["sizes"].tolist()
    images, crops = values["crop_boxes"].shape[:2]

    def maps(rows: torch.Tensor, side: int) -> torch.Tensor:
        return rows.view(-1, images, side, side, rows.shape[1]).permute(0, 1, 4, 2, 3)

    student, local = values["student"].requires_grad_(), values["student_local"].requires_grad_()
    pairs = aligned_pairs(
        maps(values["teacher"], side),
        [*maps(student, side), *maps(local, local_side)],
        values["teacher_boxes"] / (patch * side),
        values["other_boxes"] / (patch * torch.tensor([side, side, *[local_side] * (crops - 2)])[:, None, None]),
        torch.zeros(images, crops, dtype=torch.bool),
        grid=grid,
    )
    network, drawn = SortingNetwork(grid**2, steepness=100.0), values["permutations"]
    if "queue" in values:  # (2, Q, D) of the global crops, of which the pairs of the first come first
        crops_of_pairs = torch.tensor([0, 1]).repeat_interleave(len(drawn) // 2)[:, None]
        references = values["queue"][crops_of_pairs, drawn % int(values["entries"])].view_as(pairs[0])
    else:
        references = references_of(pairs[0], drawn[:, None])
    losses, _ = neighbour_losses(
        *pairs,
        references,
        (network, network),
        similarity="euclidean" if "euclidean" in file.stem else "cosine",
    )
    torch.testing.assert_close(losses, values["terms"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(losses.mean(), torch.tensor(values["loss"]).float(), rtol=1e-5, atol=1e-5)
    losses.mean().backward()
    torch.testing.assert_close(student.grad, values["student_grad"], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(local.grad, values["student_local_grad"], rtol=1e-4, atol=1e-6)


def written_losses(objective: Any, batch: Batch, step: Step) -> dict[str, torch.Tensor]:
    """Compute the cross-entropy of the ranks for each pair of crops and each image of two groups of four."""

    def maps(network: Any, views: torch.Tensor) -> torch.Tensor:
        features = network.backbone(views)
        return network.head(features.tokens).transpose(1, 2).unflatten(2, features.grid)

    parts = augmented_crops(batch, objective.options.views, objective.student.backbone)
    views = [view.double() for part in parts for view in part.split(len(batch))]
    teachers = [maps(objective.teacher, view).detach() for view in views[:2]]
    students = [maps(objective.student, view) for view in views]
    stored = torch.zeros(0) if objective.queue is None else objective.queue.rows[: objective.queue.written]
    if objective.queue is not None:  # ten patches of each image and global crop
        objective.seen = [
            torch.cat([each[image].flatten(1)[:, batch["queued"][image, g, k]] for g, each in enumerate(teachers)])
            for image in range(len(batch))
            for k in range(10)
        ]
    terms, place = [], 0
    for g in (0, 1):
        for v in range(4):
            if v == g:
                continue
            found = []
            for each, crop, other in ((teachers[g], g, v), (students[v], v, g)):
                aligned = align(each, batch["boxes"][:, crop, other] * each.shape[-1], 3)
                found.append(aligned.flatten(2).transpose(1, 2))
            for group in (slice(0, 4), slice(4, 8)):
                teacher, student = (rows[group] for rows in found)
                order = batch["order"][group, place].flatten().argsort()
                references = teacher.flatten(0, 1)[order].unflatten(0, (4, 9))
                if len(stored):
                    drawn = (batch["order"][group, place] * len(stored)).long()
                    references = stored.view(-1, 2, stored.shape[1] // 2)[drawn, g]
                for image in range(4):
                    ranks = []
                    for rows, steepness in ((teacher[image], 80.0), (student[image], 40.0)):
                        if objective.similarity == "cosine":
                            numbers = F.cosine_similarity(rows[:, None], references[image], dim=2)
                        else:
                            numbers = (rows[:, None] - references[image]).norm(dim=2)
                        ranks.append(SortingNetwork(9, steepness=steepness)(numbers)[1])
                    terms += (-(ranks[0] * ranks[1].log()).sum(dim=2).mean(dim=1)).unbind()
            place += 1
    return {"neco": torch.stack(terms).mean()}


@pytest.mark.parametrize(("similarity", "queue"), [("cosine", 0), ("euclidean", 0), ("cosine", 200)])
def test_two_steps_are_those_written_out(tiny: Tiny, similarity: Any, queue: int) -> None:
    changes = {"backbone.drop_path": 0.0, "views.flip": 0.0, "optim.momentum": MOMENTUM}
    objective = unequal(make(tiny, changes, similarity=similarity, queue=queue, steepness=(40.0, 80.0)))
    batches = [batch_of(objective, 8, first) for first in (0, 8)]

    def update(own: Any, step: Step) -> None:
        if own.queue is not None:  # 80 rows of 200
            own.queue.rows[own.queue.written : own.queue.written + 80] = torch.stack(own.seen)
            own.queue.written += 80
        follow(own, step)

    assert_steps_are(objective, batches, written_losses, update, tolerance=1e-6)


def test_the_entropy_of_the_ranks_is_the_lower_bound_of_the_loss(tiny: Tiny) -> None:
    objective = unequal(make(tiny))
    output = objective(batch_of(objective), STEP)
    assert output.metrics["rank_entropy"] < output.losses["neco"]


def test_heads_start_equal_or_independent(tiny: Tiny) -> None:
    for own, equal in ((False, True), (True, False)):
        objective = make(tiny, own_teacher_head=own)
        heads = [network.head.state_dict() for network in (objective.student, objective.teacher)]
        assert torch.equal(heads[0]["mlp.0.weight"], heads[1]["mlp.0.weight"]) == equal
        assert not any(parameter.requires_grad for parameter in objective.teacher.parameters())


def test_student_and_teacher_see_the_same_places_also_in_mirrored_crops() -> None:
    # Maps of the places of their patches in the image: aligned, they agree. The second crop lies well inside the first.
    crops = Crops(torch.tensor([[0, 8, 64, 64], [16, 20, 24, 32]]), torch.tensor([False, True]))
    places = [
        patch_coordinates(box, flip, grid).T.unflatten(1, grid)[None]
        for box, flip, grid in zip(crops.boxes, crops.flips, ((16, 16), (4, 4)), strict=True)
    ]
    boxes = overlap_boxes(crops)[None]
    resized = F.interpolate(places[1], size=16, mode="bilinear")
    teacher = torch.stack([places[0], resized])
    teachers, students = aligned_pairs(teacher, places, boxes, boxes, crops.flips[None], grid=4)
    expected = patch_coordinates(crops.boxes[1], torch.tensor(False), (4, 4))
    torch.testing.assert_close(teachers[0, 0], expected)  # first crop, teacher
    torch.testing.assert_close(students[0, 0], expected)  # second crop, student
    torch.testing.assert_close(students[1, 0], expected)  # first crop, student


class Counting(SortingNetwork):
    """Records the number of rows of each call."""

    def forward(self, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.sizes = [*getattr(self, "sizes", []), len(numbers)]
        return super().forward(numbers)


def test_memory_is_that_of_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    teacher, start = torch.randn(2, 2, 6, 9, 4, generator=generator)
    order = torch.stack([torch.randperm(54, generator=generator) for _ in range(2)])[:, None]
    network = Counting(9, steepness=100.0)

    def losses_and_gradient() -> tuple[torch.Tensor, torch.Tensor]:
        student = start.clone().requires_grad_()
        losses, _ = neighbour_losses(teacher, student, references_of(teacher, order), (network, network))
        losses.mean().backward()
        assert student.grad is not None
        return losses, student.grad

    whole = losses_and_gradient()
    network.sizes = []
    monkeypatch.setattr(neco, "rows_per_block", lambda *args: 7)
    saved: list[weakref.ref[torch.Tensor]] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: (saved.append(weakref.ref(each)), each)[1], lambda t: t):
        student = start.clone().requires_grad_()
        losses, _ = neighbour_losses(teacher, student, references_of(teacher, order), (network, network))
    kept = [tensor for reference in saved if (tensor := reference()) is not None]
    assert sum(tensor.numel() for tensor in kept) < 108 * 9 * 9  # less than one of the matrices of each row
    losses.mean().backward()
    torch.testing.assert_close((losses, student.grad), whole)
    assert max(network.sizes) == 7
    assert sum(network.sizes) == 2 * 108  # rows of student and teacher


def test_losses_can_be_computed_without_gradients() -> None:
    network = SortingNetwork(9, steepness=100.0)
    teacher, student = torch.randn(2, 1, 3, 9, 4, generator=torch.Generator().manual_seed(0))
    order = torch.arange(27)[None, None]
    references = references_of(teacher, order)
    losses, least = neighbour_losses(teacher, student, references, (network, network))
    assert not losses.requires_grad
    assert (losses > least).all()
    torch.testing.assert_close(neighbour_losses(teacher, teacher, references, (network, network))[0], least)


@pytest.mark.parametrize("size", [(40, 40), (30, 300), (500, 375)])
def test_each_crop_overlaps_both_global_crops(size: tuple[int, int]) -> None:
    sets = multi_crop(ViewRecipe(area=(0.1, 0.5)), count=3, size=96, area=(0.05, 0.25))
    transform = OverlappingCrops(*sets, drop_path_sites=0)
    for seed in range(30):
        drawn = transform.draw_crops(*size, torch.Generator().manual_seed(seed))
        assert [pixels for _, pixels in transform.sized(drawn)] == [224, 96]
        crops = concatenate_crops(drawn)
        assert len(crops.flips) == 5
        share = overlap_area(crops) / (size[0] * size[1])
        assert share[0, 1] > 0.02
        assert share[:2, 2:].min() > 0.01


def test_crops_that_rarely_overlap_are_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neco, "_CROP_ATTEMPTS", 1)
    sets = multi_crop(ViewRecipe(area=(0.021, 0.03)), count=3, size=96, area=(0.011, 0.02))
    transform = OverlappingCrops(*sets, drop_path_sites=0)
    for seed in range(30):
        views, local = transform.draw_crops(60, 90, torch.Generator().manual_seed(seed))
        assert torch.equal(views.boxes[0], views.boxes[1])
        assert overlap_area(concatenate_crops([views, local])).min() > 0
        assert local.boxes.shape == (3, 4)
        for crops in (views, local):
            assert crops.boxes.min() >= 0
            assert ((crops.boxes[:, :2] + crops.boxes[:, 2:]) <= torch.tensor([60, 90])).all()


def test_samples_are_keyed(tiny: Tiny) -> None:
    objective = make(tiny)
    first, again = batch_of(objective, 8), batch_of(objective, 8)
    assert first["global"].shape == (8, 2, 3, 32, 32)
    assert first["local"].shape == (8, 2, 3, 16, 16)
    assert first["boxes"].shape == (8, 4, 4, 4)
    assert first["order"].shape == (8, 6, 9)
    for name in ("local", "boxes", "order"):
        assert torch.equal(first[name], again[name])
        assert not torch.equal(first[name][0], first[name][1])


def test_local_crops_are_a_multiple_of_the_patch_size(tiny: Tiny) -> None:
    for patch, expected in ((8, 96), (14, 98), (16, 96), (32, 96)):
        args = {"patch_size": patch, "depth": 1, "embed_dim": 32, "num_heads": 2}
        changes = {"backbone.args": args, "views.size": 224}
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
    args = {"local_crops": 2, "local_size": 16, "grid": 3}
    short = {"optim.epochs": 1, "optim.warmup_epochs": 0, "objective.name": "neco", "objective.args": args}
    run = pretrain(tiny({"optim.lr_factors": {"backbone.": 1.0}, **short, **network}), out=tmp_path)
    assert 0 < run.summary["losses"]["neco"] < 5


def test_the_loss_falls_and_features_stay_different(tiny: Tiny) -> None:
    changes = {"backbone.drop_path": 0.0, "optim.momentum": (0.9, 0.9), "views.jitter": 0.0}
    objective = make(tiny, changes, steepness=(30.0, 100.0))
    batch = batch_of(objective, 8)
    optimiser = torch.optim.AdamW(objective.trainable().parameters(), lr=1e-3)
    losses, entropies = [], []
    for _ in range(40):
        output = objective(batch, STEP)
        optimiser.zero_grad()
        output.losses["neco"].backward()
        optimiser.step()
        objective.after_step(STEP)
        losses.append(float(output.losses["neco"].detach()))
        entropies.append(float(output.metrics["rank_entropy"]))
    assert losses[-1] < 0.9 * losses[0]
    assert entropies[-1] < 0.9 * math.log(9)  # of uniform ranks, when all features are the same
