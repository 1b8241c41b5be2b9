"""The values that the released recipe gives, kept in tests/golden (METHOD section 6)."""

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
)

GOLDEN = Path(__file__).parents[1] / "golden"
CLUSTERINGS = sorted(path.stem for path in GOLDEN.glob("clustering_*.npz"))
MATCHINGS = sorted(path.stem for path in GOLDEN.glob("matching_*.npz"))


def load(name: str) -> dict[str, Any]:
    """Arrays as tensors, numbers and strings as Python's own."""
    with np.load(GOLDEN / f"{name}.npz") as file:
        return {key: torch.from_numpy(value) if value.ndim else value.item() for key, value in file.items()}


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected.to(actual.dtype), rtol=1e-4, atol=1e-6)


def test_all_files_are_there() -> None:
    assert len(CLUSTERINGS) >= 4
    assert len(MATCHINGS) >= 1


def golden_labels(case: dict[str, Any]) -> Tensor:
    return cluster_tokens(
        case["tokens"].flatten(0, 1)[None],
        case["coordinates"].flatten(0, 1)[None],
        num_objects=case["num_objects"],
        position_weight=case["position_weight"],
        marginals=case["marginals"],
        initial_tokens=case["initial_tokens"][None],
    ).view(1, 2, -1)


@pytest.mark.parametrize("name", CLUSTERINGS)
def test_labels(name: str) -> None:
    case = load(name)
    agreement = (golden_labels(case)[0] == case["labels"]).float().mean()
    assert agreement >= 0.999


@pytest.mark.parametrize("name", CLUSTERINGS)
def test_objects(name: str) -> None:
    case = load(name)
    # From the golden labels, so that a label that may differ does not show in the means.
    objects, kept = pool_objects(case["tokens"][None], case["labels"][None], case["num_objects"])
    assert torch.equal(kept[0], case["valid"])
    assert_close(objects[0, 0, kept[0]], case["objects_view1"])
    assert_close(objects[0, 1, kept[0]], case["objects_view2"])


@pytest.mark.parametrize("name", CLUSTERINGS)
def test_objects_from_our_own_labels(name: str) -> None:
    case = load(name)
    objects, kept = pool_objects(case["tokens"][None], golden_labels(case), case["num_objects"])
    assert torch.equal(kept[0], case["valid"])
    assert_close(objects[0, :, kept[0]], torch.stack((case["objects_view1"], case["objects_view2"])))


@pytest.mark.parametrize("name", MATCHINGS)
def test_matching(name: str) -> None:
    case = load(name)
    objects = torch.stack((case["objects_view1"], case["objects_view2"]))
    bank = torch.stack((case["bank_view1"], case["bank_view2"]))
    nearest, consistent = match_objects(objects, bank)
    assert torch.equal(nearest, torch.stack((case["nearest_view1"], case["nearest_view2"])))
    assert torch.equal(consistent, torch.stack((case["cycle_view1"], case["cycle_view2"])))


@pytest.mark.parametrize("name", MATCHINGS)
@pytest.mark.parametrize("pushes", [1, 4])
def test_matching_by_the_bank(name: str, pushes: int) -> None:
    case = load(name)
    objects = torch.stack((case["objects_view1"], case["objects_view2"]))
    rows = torch.stack((case["bank_view1"], case["bank_view2"]))
    bank = MemoryBank(num_images=rows.shape[1], num_objects=2, dim=rows.shape[2])
    for part in torch.arange(rows.shape[1]).chunk(pushes):
        bank.push(rows[:, part], part, counts=[1] * len(part))
    matches = bank.match(objects, 1000 + torch.arange(objects.shape[1]))
    assert torch.equal(matches.nearest, torch.stack((case["nearest_view1"], case["nearest_view2"])))
    assert torch.equal(matches.valid, torch.stack((case["cycle_view1"], case["cycle_view2"])))


@pytest.fixture(scope="module")
def losses() -> dict[str, Any]:
    return load("losses")


def logit_level(case: dict[str, Any], level: str) -> SelfDistillation:
    """A level whose embeddings are the logits themselves: the prototypes are the identity."""
    centre = case[f"center_{level}"][0]
    identity = torch.eye(len(centre))
    return SelfDistillation(identity, identity, centre, case["student_temperature"], case["teacher_temperature"])


@pytest.mark.parametrize(("level", "expected"), [("global", "loss_global"), ("objects", "loss_cross_view")])
def test_cross_view_losses(losses: dict[str, Any], level: str, expected: str) -> None:
    student, teacher = (losses[f"{network}_{level}"].unflatten(0, (2, -1)) for network in ("student", "teacher"))
    loss = cross_view_loss(student, teacher, logit_level(losses, level))
    assert loss.item() == pytest.approx(losses[expected], rel=1e-4)


def test_cross_image_loss(losses: dict[str, Any]) -> None:
    student = losses["student_objects"].unflatten(0, (2, -1))
    valid = torch.stack((losses["cycle_view1"], losses["cycle_view2"]))
    assert valid.any()
    neighbours = (losses["teacher_nearest_view1"][valid[0]], losses["teacher_nearest_view2"][valid[1]])
    loss = cross_image_loss(student, neighbours, valid, logit_level(losses, "objects"))
    assert loss.item() == pytest.approx(losses["loss_cross_image"], rel=1e-4)


@pytest.mark.parametrize("level", ["global", "objects"])
def test_centres(losses: dict[str, Any], level: str) -> None:
    logits = losses[f"teacher_{level}"]
    centre = Centre(logits.shape[1], momentum=losses["center_momentum"])
    centre.value.copy_(losses[f"center_{level}"][0])
    centre.update(logits.sum(dim=0), torch.tensor(len(logits)), torch.eye(logits.shape[1]))
    assert_close(centre.value, losses[f"center_{level}_after"][0])
