"""SlotCon, against the released code's values and its definition."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.objectives.conftest import batch_of
from tests.objectives.golden import cases, load
from tests.objectives.literal import MOMENTUM, assert_steps_are, follow, linear, unequal
from tests.objectives.rivals.test_byol import RESNET
from torch import Tensor, nn

from cribo.data.samples import Batch
from cribo.method import Centre, ViewRecipe
from cribo.models import normalise
from cribo.objectives import Setting, Step
from cribo.objectives.overlap import overlap_area
from cribo.objectives.rivals.slotcon import (
    SlotCon,
    align_scores,
    find_slots,
    grouping_loss,
    overlapping_crops,
    slot_loss,
)
from cribo.pretraining import PretrainConfig, pretrain

Tiny = Callable[..., PretrainConfig]
STEP = Step(6, steps_per_epoch=4, total_steps=12)


def make(tiny: Tiny, changes: dict[str, Any] | None = None, **args: Any) -> SlotCon:
    return SlotCon(Setting(tiny(changes), 36, 4), **{"batch_norm": False, **args})


def predictor_of(case: dict[str, Any]) -> nn.Sequential:
    """The predictor of a golden case; its batch norms use the statistics of their rows."""
    weights = {key: value for key, value in case.items() if key.startswith("predictor_")}
    layers: list[nn.Module] = []
    for number in range(1 + max(int(key.removeprefix("predictor_").partition(".")[0]) for key in weights)):
        weight = weights.get(f"predictor_{number}.weight")
        if weight is None:
            layers.append(nn.GELU())
        elif weight.ndim == 1:
            layers.append(nn.BatchNorm1d(len(weight), track_running_stats=False))
        else:
            layers.append(nn.Linear(weight.shape[1], weight.shape[0]))
    predictor = nn.Sequential(*layers).double()
    predictor.load_state_dict({name: weights[f"predictor_{name}"] for name in predictor.state_dict()})
    return predictor


@pytest.mark.parametrize("path", cases("slotcon_step"), ids=lambda path: path.stem)
def test_golden_step(path: Path) -> None:
    case = load(path)
    side = case["student_1"].shape[-1]

    def equal(found: Tensor, name: str) -> None:
        expected = torch.as_tensor(case[name], dtype=found.dtype)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9, msg=lambda m: f"{name}: {m}")

    maps = [case[f"student_{view}"].requires_grad_() for view in (1, 2)]
    prototypes = case["student_prototypes"].requires_grad_()
    moved = 0.99 * case["teacher_prototypes_before"] + 0.01 * prototypes.detach()
    equal(moved, "teacher_prototypes_after")
    student = [find_slots(features.flatten(2).mT, prototypes, temperature=0.07) for features in maps]
    teacher = [find_slots(case[f"teacher_{view}"].flatten(2).mT, moved, temperature=0.07) for view in (1, 2)]
    aligned = [
        [
            align_scores(found.scores, case[f"box_{view}"], case[f"flip_{view}"], side)
            for view, found in enumerate(of_both, start=1)
        ]
        for of_both in (student, teacher)
    ]

    def as_maps(scores: Tensor) -> Tensor:
        return scores.mT.unflatten(2, (side, side))

    equal(student[0].slots, "student_slots_1")
    equal(teacher[1].slots, "teacher_slots_2")
    equal(as_maps(student[0].scores), "student_scores_1")
    equal(as_maps(teacher[1].scores), "teacher_scores_2")
    equal(as_maps(aligned[0][0]), "student_aligned_1")
    equal(as_maps(aligned[1][1]), "teacher_aligned_2")
    equal(student[0].present, "present_student_1")
    equal(teacher[1].present, "present_teacher_2")

    predictor, losses = predictor_of(case), []
    for view, name in enumerate(("1_2", "2_1")):
        grouping = grouping_loss(
            aligned[0][view],
            aligned[1][1 - view],
            case["centre_before"][0],
            student_temperature=0.1,
            teacher_temperature=0.07,
        ).mean()
        equal(grouping, f"distillation_{name}")
        other = teacher[1 - view]
        common = student[view].present & other.present
        contrast = slot_loss(
            predictor(student[view].slots[common]), other.slots[common], other.slots[other.present], temperature=0.2
        ).mean()
        equal(contrast, f"contrastive_{name}")
        losses += [grouping, contrast]
    loss = 0.5 * torch.stack(losses).sum()
    equal(loss, "loss")
    loss.backward()
    for found, name in ((maps[0], "student_1"), (maps[1], "student_2"), (prototypes, "student_prototypes")):
        assert found.grad is not None
        equal(found.grad, f"{name}_grad")

    centre = Centre(len(moved)).double()
    centre.value.copy_(case["centre_before"][0])
    directions = torch.cat([F.normalize(found.features, dim=-1).flatten(0, 1) for found in teacher])
    centre.update(directions.sum(dim=0), torch.tensor(len(directions)), F.normalize(moved, dim=-1))
    equal(centre.value[None], "centre_after")


def test_a_slot_is_the_mean_of_its_patches() -> None:
    prototypes = torch.eye(4, 6)
    features = torch.stack([5 * prototypes[0], 3 * prototypes[0], 2 * prototypes[2]])[None]
    found = find_slots(features, prototypes, temperature=0.01)
    assert found.scores[0].tolist() == prototypes[[0, 0, 2], :4].tolist()
    assert found.present.tolist() == [[True, False, True, False]]
    torch.testing.assert_close(found.slots[0, 0], 4 * prototypes[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.slots[0, 2], 2 * prototypes[2], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.slots[0, 1], features[0].mean(dim=0))  # none is similar: all count alike


def test_aligned_scores_are_those_of_the_same_places() -> None:
    """Scores that are linear in the position in the image are the same in both views."""
    side, overlap = 8, torch.tensor([[0.25, 0.0, 1.0, 0.75], [0.0, 0.5, 0.5, 1.0]])
    flips = torch.tensor([False, True])
    centres = (torch.arange(side) + 0.5) / side
    y, x = torch.meshgrid(centres, centres, indexing="ij")
    maps = []
    for (x1, y1, x2, y2), flip in zip(overlap.tolist(), flips.tolist(), strict=True):
        across, down = (x - x1) / (x2 - x1), (y - y1) / (y2 - y1)  # 0 to 1 in the overlap
        maps.append(torch.stack((1 - across if flip else across, down), dim=-1).flatten(0, 1))
    first, second = align_scores(torch.stack(maps), overlap, flips, side).unflatten(1, (side, side))
    inside = slice(1, -1)  # bins at the border of a view are clamped
    torch.testing.assert_close(first[inside, inside], second[inside, inside])
    torch.testing.assert_close(first[inside, inside, 0], x[inside, inside])


def test_the_slot_loss_ranks_a_slot_among_all() -> None:
    generator = torch.Generator().manual_seed(0)
    predicted, keys = torch.randn(3, 5, generator=generator), torch.randn(7, 5, generator=generator)
    places = torch.tensor([4, 0, 6])
    logits = F.cosine_similarity(predicted[:, None], keys, dim=2) / 0.3
    expected = 2 * 0.3 * F.cross_entropy(logits, places, reduction="none")
    torch.testing.assert_close(slot_loss(predicted, keys[places], keys, temperature=0.3), expected)


def written_losses(objective: Any, batch: Batch, step: Step) -> dict[str, Tensor]:
    """Compute both losses from the networks' outputs, one image and one slot at a time."""
    views = normalise(batch["views"].flatten(0, 1).float() / 255).double().unflatten(0, (-1, 2))
    outputs = {}
    for name, network in (("student", objective.student), ("teacher", objective.teacher)):
        features = [network.project(network.backbone(views[:, view]).tokens) for view in (0, 1)]
        outputs[name] = [find_slots(part, network.prototypes.weight, temperature=0.07) for part in features]
    objective.seen = torch.stack([found.scores for found in outputs["teacher"]]).detach()
    places = [
        [
            align_scores(found.scores, batch["overlap"][:, view], batch["flips"][:, view], objective.side)
            for view, found in enumerate(outputs[name])
        ]
        for name in ("student", "teacher")
    ]
    temperature = linear(0.04, 0.07, 3, step)
    grouping, slots = torch.zeros(()), torch.zeros(())
    for view in (0, 1):
        terms, rows, owns = [], [], []
        student, teacher = outputs["student"][view], outputs["teacher"][1 - view]
        for image in range(len(batch)):
            x1, y1, x2, y2 = batch["overlap"][image, view]
            if x2 > x1 and y2 > y1:
                p = ((places[1][1 - view][image].detach() - objective.centre.value) / temperature).softmax(dim=-1)
                terms.append(-(p * (places[0][view][image] / 0.1).log_softmax(dim=-1)).sum(dim=-1).mean())
            for k in range(student.present.shape[1]):
                if student.present[image, k] and teacher.present[image, k]:
                    rows.append(student.slots[image, k])
                    owns.append(F.normalize(teacher.slots[image, k], dim=0).detach())
        queries = F.normalize(objective.student.predictor(torch.stack(rows)), dim=1)
        keys = F.normalize(teacher.slots[teacher.present], dim=1).detach()
        contrasts = [
            2 * 0.2 * ((query @ keys.T / 0.2).logsumexp(dim=0) - query @ own / 0.2)
            for query, own in zip(queries, owns, strict=True)
        ]
        grouping = grouping + torch.stack(terms).mean()
        slots = slots + torch.stack(contrasts).mean()
    return {"grouping": grouping, "slot": slots}


PLAIN = {"views.jitter": 0.0, "views.greyscale": 0.0, "views.blur": (0.0, 0.0), "views.solarise": (0.0, 0.0)}
DISTINCT = {"head.init_std": 0.2, "backbone.drop_path": 0.0}


def written_update(objective: Any, step: Step) -> None:
    centre = objective.centre.value
    centre.copy_(0.8 * centre + 0.2 * objective.seen.flatten(0, -2).mean(dim=0))
    follow(objective, step)


@pytest.mark.parametrize("network", [{}, RESNET], ids=["vit", "resnet with batch norms"])
def test_two_steps_are_those_written_out(tiny: Tiny, network: dict[str, Any]) -> None:
    losses = {"losses.teacher_temperature": (0.04, 0.07), "losses.teacher_temperature_epochs": 3}
    changes = {"losses.student_temperature": 0.1, "losses.centre_momentum": 0.8, "optim.momentum": MOMENTUM}
    args = {"grouping_weight": 0.3, "batch_norm": bool(network)}
    objective = unequal(make(tiny, {**PLAIN, **DISTINCT, **losses, **changes, **network}, **args))
    objective.centre.value += 0.1 * torch.randn(32, generator=torch.Generator().manual_seed(1))
    batches = [batch_of(objective, 4, first) for first in (0, 4)]
    batches[0]["overlap"][2, :, 2] = batches[0]["overlap"][2, :, 0] - 0.1  # no overlap
    assert_steps_are(objective, batches, written_losses, written_update, tolerance=1e-6)
    assert objective.weights == {"grouping": 0.3, "slot": 0.7}


def test_the_predictor_may_have_its_own_number_of_layers(tiny: Tiny) -> None:
    student = make(tiny, {"head.layers": 3}, predictor_layers=2).student
    layers = [
        [layer for layer in mlp.modules() if isinstance(layer, nn.Linear)]
        for mlp in (student.projector, student.predictor)
    ]
    assert [len(of_mlp) for of_mlp in layers] == [3, 2]


def test_slots_of_other_ranks_are_negatives(tiny: Tiny) -> None:
    """Two halves of a batch, each with the slots of the other: the mean of their losses is that of the whole."""
    objective = make(tiny, DISTINCT).double()
    batch = batch_of(objective)
    whole = objective(batch, STEP).losses
    seen: list[list[Tensor]] = []
    for part in batch.split(2):
        seen.append([])
        objective(part, dataclasses.replace(STEP, gather=lambda value: (seen[-1].append(value), value[None])[1]))
    for name, loss in whole.items():
        halves = []
        for part in batch.split(2):
            calls = iter(zip(*seen, strict=True))

            def gather(value: Tensor, calls: Any = calls) -> Tensor:
                both = next(calls)
                longest = max(len(rows) for rows in both) if value.ndim > 1 and value.is_floating_point() else None
                return torch.stack([F.pad(rows, (0, 0, 0, longest - len(rows))) if longest else rows for rows in both])

            halves.append(objective(part, dataclasses.replace(STEP, gather=gather)).losses[name])
        torch.testing.assert_close(torch.stack(halves).mean(), loss)


def only(objective: SlotCon, network: str, prototype: int) -> None:
    """Let all patches of a network be nearest to one prototype."""
    prototypes = getattr(objective, network).prototypes
    features = getattr(objective, network).projector[-1].bias
    with torch.no_grad():
        features.copy_(100 * prototypes.weight[prototype])


@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize("images", [1, 3])
def test_without_common_slots_only_the_grouping_loss_has_gradients(tiny: Tiny, images: int, batch_norm: bool) -> None:
    objective = make(tiny, batch_norm=batch_norm)
    only(objective, "student", 3)
    only(objective, "teacher", 5)
    output = objective(batch_of(objective, images), STEP)
    assert output.losses["slot"].item() == 0
    assert output.losses["grouping"] > 0
    (output.losses["slot"] + output.losses["grouping"]).backward()
    assert all(p.grad is None or not p.grad.any() for p in objective.student.predictor.parameters())
    assert objective.student.prototypes.weight.grad is not None
    assert objective.student.prototypes.weight.grad.any()


def test_batch_norms_need_two_slots(tiny: Tiny) -> None:
    objective = make(tiny, batch_norm=True)
    for network in ("student", "teacher"):
        only(objective, network, 3)
    assert objective(batch_of(objective, 1), STEP).losses["slot"].item() == 0
    output = objective(batch_of(objective, 2), STEP)
    assert output.losses["slot"].item() > 0
    numerator, denominator = output.metrics["slots_per_image"]
    assert (int(numerator), denominator) == (4, 4)


def test_a_batch_without_overlap_has_no_grouping_loss(tiny: Tiny) -> None:
    objective = make(tiny, DISTINCT)
    batch = batch_of(objective)
    batch["overlap"][..., 2:] = batch["overlap"][..., :2] - 0.5
    output = objective(batch, STEP)
    assert output.losses["grouping"].item() == 0
    assert output.losses["slot"].item() > 0
    sum(output.losses.values(), torch.zeros(())).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in objective.student.parameters())


def test_a_step_updates_centre_and_teacher(tiny: Tiny) -> None:
    objective = make(tiny, {**DISTINCT, "losses.centre_momentum": 0.8})
    teacher = objective.teacher
    before = {name: value.clone() for name, value in teacher.named_parameters()}
    assert not any(name.startswith("predictor") for name in before)
    objective(batch_of(objective), STEP)
    scores = find_slots(objective._features, teacher.prototypes.weight, temperature=1.0).scores
    expected = 0.2 * scores.flatten(0, -2).mean(dim=0)
    with torch.no_grad():
        for parameter in objective.student.parameters():
            parameter += 0.1
    objective.after_step(STEP)
    torch.testing.assert_close(objective.centre.value, expected, rtol=1e-4, atol=1e-6)
    momentum = objective.schedules(STEP)["momentum"]
    for name, value in teacher.named_parameters():
        torch.testing.assert_close(value, before[name] + (1 - momentum) * 0.1, rtol=1e-4, atol=1e-6)


def test_prototypes_are_frozen_in_the_first_epochs(tiny: Tiny) -> None:
    objective = make(tiny, {"optim.freeze_last_layers_epochs": 2})
    steps = [Step(number, steps_per_epoch=4, total_steps=12) for number in (7, 8)]
    assert [len(list(objective.frozen(step))) for step in steps] == [1, 0]
    assert next(iter(objective.frozen(steps[0]))) is objective.student.prototypes.weight


def test_the_second_crop_is_drawn_again_until_it_overlaps() -> None:
    recipe, generator = ViewRecipe(area=(0.05, 0.1)), torch.Generator().manual_seed(0)
    drawn = [overlapping_crops(60, 80, recipe, generator=generator) for _ in range(200)]
    shares = torch.stack([overlap_area(crops)[0, 1] / crops.boxes[1, 2:].prod() for crops in drawn])
    assert (shares >= 0.01).float().mean() > 0.9
    tiny = ViewRecipe(area=(1e-4, 1e-4))
    drawn = [overlapping_crops(600, 800, tiny, generator=generator) for _ in range(20)]
    assert any(overlap_area(crops)[0, 1] == 0 for crops in drawn)  # after ten attempts, any crop
    assert all(crops.boxes.shape == (2, 4) for crops in drawn)


def test_samples_have_the_overlap_of_their_views_and_are_keyed(tiny: Tiny) -> None:
    objective = make(tiny, {**PLAIN, "views.area": (1.0, 1.0), "views.aspect": (1.0, 1.0)})
    first, again = batch_of(objective, 8), batch_of(objective, 8)
    assert torch.equal(first["views"], again["views"])
    assert first["overlap"].tolist() == [[[0, 0, 1, 1]] * 2] * 8  # both views are the whole image
    assert first["flips"].any()
    for image in range(8):
        same = first["flips"][image, 0] == first["flips"][image, 1]
        left, right = first["views"][image]
        assert torch.equal(left, right if same else right.flip(-1))


def test_a_convolutional_network_trains_with_batch_norms_and_lars(tiny: Tiny, tmp_path: Any) -> None:
    network = {"layers": [1, 1, 0, 0], "channels": [8, 16, 16, 16]}
    changes = {"backbone.name": "resnet18", "backbone.args": network, "optim.name": "lars", "optim.lr": 10.0}
    run = pretrain(tiny({**changes, "objective.name": "slotcon"}), out=tmp_path)
    assert run.summary["losses"].keys() == {"grouping", "slot"}
    assert all(0 < loss < 10 for loss in run.summary["losses"].values())
    assert run.backbone().embed_dim == 16
