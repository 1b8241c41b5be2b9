"""Reference and fast code against the released recipe's values in tests/golden."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cribo.method import (
    Centre,
    MemoryBank,
    SelfDistillation,
    cluster_tokens,
    cross_image_loss,
    cross_view_loss,
    match_objects,
    pool_objects,
    reference,
)

GOLDEN = Path(__file__).parents[1] / "golden"
CLUSTERINGS, MATCHINGS, LOSSES = (
    sorted(path.stem for path in GOLDEN.glob(f"{kind}*.npz")) for kind in ("clustering", "matching", "losses")
)


def load(name: str) -> dict[str, Any]:
    """Load arrays as tensors, numbers and strings as Python objects."""
    with np.load(GOLDEN / f"{name}.npz") as file:
        return {key: torch.from_numpy(value) if value.ndim else value.item() for key, value in file.items()}


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected.to(actual.dtype), rtol=1e-4, atol=1e-6)


def test_all_files_are_there() -> None:
    assert len(CLUSTERINGS) >= 4
    assert MATCHINGS
    assert LOSSES


def fast_labels(case: dict[str, Any]) -> Tensor:
    return cluster_tokens(
        case["tokens"].flatten(0, 1)[None],
        case["coordinates"].flatten(0, 1)[None],
        num_objects=case["num_objects"],
        position_weight=case["position_weight"],
        marginals=case["marginals"],
        initial_tokens=case["initial_tokens"][None],
    ).view(2, -1)


def reference_labels(case: dict[str, Any]) -> Tensor:
    return reference.cluster(
        case["tokens"].flatten(0, 1),
        case["coordinates"].flatten(0, 1),
        case["initial_tokens"].long(),
        position_weight=case["position_weight"],
        marginals=case["marginals"],
    ).view(2, -1)


def fast_objects(tokens: Tensor, labels: Tensor, num_objects: int) -> tuple[Tensor, Tensor]:
    objects, kept = pool_objects(tokens[None], labels[None], num_objects)
    return objects[0], kept[0]


@pytest.mark.parametrize("labels", [fast_labels, reference_labels])
@pytest.mark.parametrize("name", CLUSTERINGS)
def test_labels(name: str, labels: Callable[..., Tensor]) -> None:
    case = load(name)
    assert (labels(case) == case["labels"]).float().mean() >= 0.999


@pytest.mark.parametrize("pool", [fast_objects, reference.pool])
@pytest.mark.parametrize("name", CLUSTERINGS)
def test_objects(name: str, pool: Callable[..., tuple[Tensor, Tensor]]) -> None:
    case = load(name)
    # From the golden labels, so that differing labels do not affect the means.
    objects, kept = pool(case["tokens"], case["labels"].long(), case["num_objects"])
    assert torch.equal(kept, case["valid"])
    assert_close(objects[:, kept], torch.stack((case["objects_view1"], case["objects_view2"])))


@pytest.mark.parametrize("name", CLUSTERINGS)
def test_objects_from_our_own_labels(name: str) -> None:
    case = load(name)
    objects, kept = fast_objects(case["tokens"], fast_labels(case), case["num_objects"])
    assert torch.equal(kept, case["valid"])
    assert_close(objects[:, kept], torch.stack((case["objects_view1"], case["objects_view2"])))


def reference_match(objects: Tensor, bank: Tensor) -> tuple[Tensor, Tensor]:
    queries, rows = torch.arange(objects.shape[1]), torch.arange(bank.shape[1])
    return reference.match(objects, -1 - queries, bank, rows)  # no image of the batch is in the bank


def bank_match(pushes: int) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    def match(objects: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        bank = MemoryBank(num_images=rows.shape[1], num_objects=2, dim=rows.shape[2])
        for part in torch.arange(rows.shape[1]).chunk(pushes):
            bank.push(rows[:, part], part, counts=[1] * len(part))
        matches = bank.match(objects, -1 - torch.arange(objects.shape[1]))
        return matches.nearest, matches.valid

    return match


@pytest.mark.parametrize("match", [match_objects, reference_match, bank_match(1), bank_match(4)])
@pytest.mark.parametrize("name", MATCHINGS)
def test_matching(name: str, match: Callable[..., tuple[Tensor, Tensor]]) -> None:
    case = load(name)
    objects = torch.stack((case["objects_view1"], case["objects_view2"]))
    bank = torch.stack((case["bank_view1"], case["bank_view2"]))
    nearest, consistent = match(objects, bank)
    assert torch.equal(nearest, torch.stack((case["nearest_view1"], case["nearest_view2"])))
    assert torch.equal(consistent, torch.stack((case["cycle_view1"], case["cycle_view2"])))


def logit_level(case: dict[str, Any], level: str) -> SelfDistillation:
    """A level with identity prototypes, so embeddings are logits."""
    centre = case[f"center_{level}"][0]
    identity = torch.eye(len(centre))
    return SelfDistillation(identity, identity, centre, case["student_temperature"], case["teacher_temperature"])


def fast_cross_view(case: dict[str, Any], level: str) -> Tensor:
    student, teacher = (case[f"{network}_{level}"].unflatten(0, (2, -1)) for network in ("student", "teacher"))
    return cross_view_loss(student, teacher, logit_level(case, level))


def reference_cross_view(case: dict[str, Any], level: str) -> Tensor:
    student, teacher = (case[f"{network}_{level}"].unflatten(0, (2, -1)) for network in ("student", "teacher"))
    distillation = case[f"center_{level}"][0], case["teacher_temperature"], case["student_temperature"]
    terms = [reference.cross_entropy(teacher[i], student[1 - i], *distillation) for i in (0, 1)]
    return torch.stack(terms).mean()


@pytest.mark.parametrize("cross_view", [fast_cross_view, reference_cross_view])
@pytest.mark.parametrize(("level", "expected"), [("global", "loss_global"), ("objects", "loss_cross_view")])
@pytest.mark.parametrize("name", LOSSES)
def test_cross_view_losses(name: str, level: str, expected: str, cross_view: Callable[..., Tensor]) -> None:
    case = load(name)
    assert cross_view(case, level).item() == pytest.approx(case[expected], rel=1e-4)


@pytest.mark.parametrize("name", LOSSES)
def test_cross_image_loss(name: str) -> None:
    case = load(name)
    student = case["student_objects"].unflatten(0, (2, -1))
    valid = torch.stack((case["cycle_view1"], case["cycle_view2"]))
    assert valid.any()
    neighbours = torch.stack((case["teacher_nearest_view1"], case["teacher_nearest_view2"]))[valid]
    loss = cross_image_loss(student, neighbours, valid, logit_level(case, "objects"))
    assert loss.item() == pytest.approx(case["loss_cross_image"], rel=1e-4)
    terms = [
        reference.cross_entropy(
            case[f"teacher_nearest_view{i + 1}"][valid[i]],
            student[1 - i, valid[i]],
            case["center_objects"][0],
            case["teacher_temperature"],
            case["student_temperature"],
        )
        for i in (0, 1)
    ]
    assert torch.stack(terms).mean().item() == pytest.approx(case["loss_cross_image"], rel=1e-4)


@pytest.mark.parametrize("level", ["global", "objects"])
@pytest.mark.parametrize("name", LOSSES)
def test_centres(name: str, level: str) -> None:
    case = load(name)
    logits = case[f"teacher_{level}"]
    centre = Centre(logits.shape[1], momentum=case["center_momentum"])
    centre.value.copy_(case[f"center_{level}"][0])
    centre.update(logits.sum(dim=0), torch.tensor(len(logits)), torch.eye(logits.shape[1]))
    assert_close(centre.value, case[f"center_{level}_after"][0])
