from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from cribo.method import (
    Centre,
    PrototypeLayer,
    SelfDistillation,
    blocks,
    cross_image_loss,
    cross_view_loss,
    reference,
    weighted_cross_entropy,
)

ROWS, DIM, PROTOTYPES = 23, 8, 50
EVEN = torch.full((ROWS,), 1 / ROWS)


def unit(*shape: int, seed: int) -> Tensor:
    rows = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.normalize(rows, dim=-1)


def level(student_prototypes: Tensor | None = None) -> SelfDistillation:
    return SelfDistillation(
        unit(PROTOTYPES, DIM, seed=0) if student_prototypes is None else student_prototypes,
        unit(PROTOTYPES, DIM, seed=1),
        0.1 * unit(PROTOTYPES, seed=2),
        0.1,
        0.05,
    )


def literal(student: Tensor, teacher: Tensor, distillation: SelfDistillation) -> Tensor:
    """Return the reference's H of each row in float64, differentiated by autograd."""
    centre, temperatures = (
        distillation.centre.double(),
        (distillation.teacher_temperature, distillation.student_temperature),
    )
    teacher_logits = teacher.double() @ distillation.teacher_prototypes.double().T
    student_logits = student.double() @ distillation.student_prototypes.double().T
    rows = zip(teacher_logits, student_logits, strict=True)
    return torch.stack([reference.cross_entropy(t[None], s[None], centre, *temperatures) for t, s in rows])


def literal_sum(student: Tensor, teacher: Tensor, weights: Tensor, distillation: SelfDistillation) -> Tensor:
    return (weights.double() * literal(student, teacher, distillation)).sum()


def with_gradients(loss_function: Callable[..., Tensor], student: Tensor, teacher: Tensor) -> tuple[Tensor, ...]:
    leaf, prototypes = student.clone().requires_grad_(), unit(PROTOTYPES, DIM, seed=0).requires_grad_()
    weights = torch.rand(len(student), generator=torch.Generator().manual_seed(3))
    loss = loss_function(leaf, teacher, weights / weights.sum(), level(prototypes))
    gradients = torch.autograd.grad(3 * loss, (leaf, prototypes))  # not 1, so that the incoming gradient matters
    return loss.detach(), *gradients


@pytest.fixture(params=[1, 7, 22, 23, 1000])
def block_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Number of rows whose logits are computed at once."""
    monkeypatch.setitem(blocks._NUMBERS, "cpu", request.param * PROTOTYPES)
    return request.param


@pytest.mark.usefixtures("block_rows")
@pytest.mark.parametrize("rows", [1, DIM - 1, DIM, ROWS])  # fewer than channels, and more
def test_loss_and_gradients_match_the_reference(rows: int) -> None:
    student, teacher = unit(rows, DIM, seed=5), unit(rows, DIM, seed=6)
    actual = with_gradients(weighted_cross_entropy, student, teacher)
    expected = with_gradients(literal_sum, student, teacher)
    for ours, plain in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, plain.to(ours.dtype), rtol=1e-5, atol=2e-6)
    assert actual[0].dtype == torch.float32


def test_float64_stays_float64() -> None:
    student, teacher = unit(2, ROWS, DIM, seed=5).double(), unit(2, ROWS, DIM, seed=6).double()
    distillation = SelfDistillation(
        unit(PROTOTYPES, DIM, seed=0).double(),
        unit(PROTOTYPES, DIM, seed=1).double(),
        torch.zeros(PROTOTYPES).double(),
        0.1,
        0.05,
    )
    loss = cross_view_loss(student, teacher, distillation)
    expected = torch.cat([literal(s, t, distillation) for s, t in zip(student, teacher.flip(0), strict=True)]).mean()
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0)


def test_extreme_logits_stay_finite() -> None:
    """Gains may grow: logits / temperature in the thousands must not overflow."""
    student, teacher = unit(ROWS, DIM, seed=5), unit(ROWS, DIM, seed=6)
    distillation = SelfDistillation(
        100 * unit(PROTOTYPES, DIM, seed=0), 100 * unit(PROTOTYPES, DIM, seed=1), torch.zeros(PROTOTYPES), 0.1, 0.04
    )
    leaf = student.clone().requires_grad_()
    loss = weighted_cross_entropy(leaf, teacher, EVEN, distillation)
    loss.backward()
    torch.testing.assert_close(loss, literal_sum(student, teacher, EVEN, distillation).float(), rtol=1e-5, atol=1e-4)
    assert leaf.grad is not None
    assert leaf.grad.isfinite().all()


def test_gradients_stop_at_the_teacher() -> None:
    teacher = unit(ROWS, DIM, seed=6).requires_grad_()
    teacher_prototypes = unit(PROTOTYPES, DIM, seed=1).requires_grad_()
    centre = torch.zeros(PROTOTYPES, requires_grad=True)
    student = unit(ROWS, DIM, seed=5).requires_grad_()
    distillation = SelfDistillation(unit(PROTOTYPES, DIM, seed=0), teacher_prototypes, centre, 0.1, 0.05)
    weighted_cross_entropy(student, teacher, EVEN, distillation).backward()
    assert student.grad is not None
    assert teacher.grad is None
    assert teacher_prototypes.grad is None
    assert centre.grad is None


def test_gradients_reach_direction_and_gain_of_the_layer() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # of the layer's weights: rounding of some draws exceeds the tolerance
        layer = PrototypeLayer(DIM, PROTOTYPES)
    student, teacher = unit(ROWS, DIM, seed=5), unit(ROWS, DIM, seed=6)
    gradients = []
    for loss_function in (weighted_cross_entropy, literal_sum):
        layer.zero_grad()
        loss_function(student, teacher, EVEN, level(layer.weight)).backward()
        gradients.append([parameter.grad.clone() for parameter in layer.parameters() if parameter.grad is not None])
    assert len(gradients[0]) == 2
    for ours, plain in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-7)


def test_losses_can_be_weighted_differently() -> None:
    student, teacher = unit(2, ROWS, DIM, seed=5), unit(2, ROWS, DIM, seed=6)
    valid = torch.rand(2, ROWS, generator=torch.Generator().manual_seed(7)) < 0.4
    neighbours = unit(int(valid.sum()), DIM, seed=8)

    def gradient(first: float, second: float) -> Tensor:
        prototypes = unit(PROTOTYPES, DIM, seed=0).requires_grad_()
        losses = (
            cross_view_loss(student, teacher, level(prototypes)),
            cross_image_loss(student, neighbours, valid, level(prototypes)),
        )
        return torch.autograd.grad(first * losses[0] + second * losses[1], prototypes)[0]

    torch.testing.assert_close(gradient(2, 0.5), 2 * gradient(1, 0) + 0.5 * gradient(0, 1))


def test_losses_of_groups_are_the_mean_over_groups() -> None:
    groups = [slice(0, 3), slice(3, 3), slice(3, 4), slice(4, ROWS)]  # one without rows
    student, teacher, prototypes = unit(2, ROWS, DIM, seed=5), unit(2, ROWS, DIM, seed=6), unit(PROTOTYPES, DIM, seed=0)
    valid = torch.rand(2, ROWS, generator=torch.Generator().manual_seed(7)) < 0.4
    valid[0, 3] = False  # and one without pairs in one direction
    neighbours = unit(2, ROWS, DIM, seed=8)
    whole = (
        cross_view_loss(student, teacher, level(prototypes), groups=groups),
        cross_image_loss(student, neighbours[valid], valid, level(prototypes), groups=groups),
    )
    alone = [
        (
            cross_view_loss(student[:, rows], teacher[:, rows], level(prototypes)),
            cross_image_loss(student[:, rows], neighbours[:, rows][valid[:, rows]], valid[:, rows], level(prototypes)),
        )
        for rows in groups
    ]
    for found, expected in zip(whole, zip(*alone, strict=True), strict=True):
        torch.testing.assert_close(found, torch.stack(expected).mean())


@pytest.mark.parametrize("rows", [DIM - 1, ROWS])
def test_backward_twice_gives_the_same_gradients_twice(rows: int) -> None:
    student, prototypes = unit(rows, DIM, seed=5).requires_grad_(), unit(PROTOTYPES, DIM, seed=0).requires_grad_()
    loss = weighted_cross_entropy(student, unit(rows, DIM, seed=6), EVEN[:rows], level(prototypes))
    first = torch.autograd.grad(loss, (student, prototypes), 2 * torch.ones(()), retain_graph=True)
    second = torch.autograd.grad(loss, (student, prototypes), 6 * torch.ones(()))
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(other, 3 * one)


@pytest.mark.parametrize("rows", [DIM - 1, ROWS])
def test_autocast_changes_nothing(rows: int) -> None:
    student, teacher = unit(2, rows, DIM, seed=5), unit(2, rows, DIM, seed=6)
    results = []
    for autocast in (False, True):
        prototypes = unit(PROTOTYPES, DIM, seed=0).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = cross_view_loss(student, teacher, level(prototypes))
            loss.backward()
        results.append((loss.detach(), prototypes.grad))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rows_are_computed_in_float32(dtype: torch.dtype) -> None:
    student, teacher = (unit(2, ROWS, DIM, seed=seed).to(dtype) for seed in (5, 6))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = cross_view_loss(student.requires_grad_(), teacher, level())
    expected = cross_view_loss(student.float(), teacher.float(), level())
    assert torch.equal(loss, expected)
    loss.backward()
    assert student.grad is not None
    assert student.grad.dtype == dtype


def test_no_rows_give_zero_attached_to_the_graph() -> None:
    source = torch.randn(2, 4, DIM, requires_grad=True)
    prototypes = unit(PROTOTYPES, DIM, seed=0).requires_grad_()
    loss = cross_view_loss(source[:, :0], torch.zeros(2, 0, DIM), level(prototypes))
    assert loss.item() == 0
    loss.backward()
    assert source.grad is not None
    assert (source.grad == 0).all()
    assert prototypes.grad is not None
    assert (prototypes.grad == 0).all()


class LargestTensor(TorchDispatchMode):
    """Records the size of the largest tensor returned by an operation."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in tree_flatten(result)[0]:
            if isinstance(value, Tensor):
                self.elements = max(self.elements, value.numel())
        return result


def test_no_more_logits_than_a_block_are_ever_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, prototypes, bound = 100, 300, 3000
    monkeypatch.setitem(blocks._NUMBERS, "cpu", bound)
    student = unit(2, rows, DIM, seed=5).requires_grad_()
    weight = unit(prototypes, DIM, seed=0).requires_grad_()
    distillation = SelfDistillation(weight, unit(prototypes, DIM, seed=1), torch.zeros(prototypes), 0.1, 0.05)
    with LargestTensor() as largest:
        cross_view_loss(student, unit(2, rows, DIM, seed=6), distillation).backward()
    assert largest.elements <= bound


@pytest.mark.parametrize("name", ["student_temperature", "teacher_temperature"])
def test_temperatures_out_of_range(name: str) -> None:
    temperatures = {"student_temperature": 0.1, "teacher_temperature": 0.05} | {name: 0.0}
    prototypes = unit(PROTOTYPES, DIM, seed=0)
    with pytest.raises(ValueError, match=rf"{name} must be > 0, got 0\.0"):
        SelfDistillation(prototypes, prototypes, torch.zeros(PROTOTYPES), **temperatures)


class Pairs:
    """Objects of two views, of which some have neighbours."""

    def __init__(self, rows: int, share: float) -> None:
        self.student = unit(2, rows, DIM, seed=5)
        self.teacher = unit(2, rows, DIM, seed=6)
        self.valid = torch.rand(2, rows, generator=torch.Generator().manual_seed(7)) < share
        self.neighbours = unit(int(self.valid.sum()), DIM, seed=8)
        self.prototypes = unit(PROTOTYPES, DIM, seed=0)

    def ours(self, student: Tensor, prototypes: Tensor) -> Tensor:
        distillation = level(prototypes)
        return torch.stack(
            (
                cross_view_loss(student, self.teacher, distillation),
                cross_image_loss(student, self.neighbours, self.valid, distillation),
            )
        )

    def literally(self, student: Tensor, prototypes: Tensor) -> Tensor:
        """Compute means of means, direction by direction; 0 if empty (docs/method.md)."""
        neighbours = dict(zip(self.valid.nonzero().unbind(), self.neighbours, strict=True))
        neighbours = {tuple(place.tolist()): embedding for place, embedding in neighbours.items()}
        nothing = 0 * (student.sum() + prototypes.sum()).double()
        losses, distillation = [nothing, nothing], level(prototypes)
        for view in (0, 1):
            rows = range(student.shape[1])
            matched = [row for row in rows if (view, row) in neighbours]
            pairs = (
                [(student[1 - view, row], self.teacher[view, row]) for row in rows],
                [(student[1 - view, row], neighbours[view, row]) for row in matched],
            )
            for loss, found in enumerate(pairs):
                if found:
                    students, teachers = (torch.stack(side) for side in zip(*found, strict=True))
                    losses[loss] = losses[loss] + literal(students, teachers, distillation).mean() / 2
        return torch.stack(losses)


@pytest.mark.parametrize("rows", [0, 1, 3, 11])
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_losses_are_means_over_directions(rows: int, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = Pairs(rows, share)
    results = []
    for function, block_rows in ((pairs.literally, 1), (pairs.ours, 1), (pairs.ours, 3), (pairs.ours, 1000)):
        monkeypatch.setitem(blocks._NUMBERS, "cpu", block_rows * PROTOTYPES)
        leaves = [tensor.clone().requires_grad_() for tensor in (pairs.student, pairs.prototypes)]
        losses = function(*leaves)
        results.append([losses.detach(), *torch.autograd.grad(3 * losses.sum(), leaves)])
    for result in results[1:]:
        for ours, plain in zip(result, results[0], strict=True):
            torch.testing.assert_close(ours, plain.to(ours.dtype), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("view", [0, 1])
def test_the_neighbour_of_one_view_teaches_the_student_of_the_other(view: int) -> None:
    student = unit(2, ROWS, DIM, seed=5).requires_grad_()
    valid = torch.zeros(2, ROWS, dtype=torch.bool)
    valid[view, [3, 11]] = True
    cross_image_loss(student, unit(2, DIM, seed=7), valid, level()).backward()
    assert student.grad is not None
    assert torch.equal(student.grad.abs().sum(dim=-1) > 0, valid.flip(0))


def test_the_centre_is_the_moving_average_of_the_mean_logits() -> None:
    centre = Centre(PROTOTYPES, momentum=0.9)
    prototypes = unit(PROTOTYPES, DIM, seed=1)
    expected = torch.zeros(PROTOTYPES)
    for seed in range(4):
        embeddings = unit(ROWS + seed, DIM, seed=seed)
        expected = 0.9 * expected + 0.1 * (embeddings @ prototypes.T).mean(dim=0)
        parts = embeddings.split(6)  # micro-batches of unequal size
        total = torch.stack([part.sum(dim=0) for part in parts]).sum(dim=0)
        centre.update(total, torch.tensor(sum(len(part) for part in parts)), prototypes)
        torch.testing.assert_close(centre.value, expected, rtol=1e-5, atol=1e-7)


def test_the_centre_does_not_change_without_rows_and_is_saved_with_its_module() -> None:
    centre = Centre(PROTOTYPES)
    centre.value.uniform_()
    before = centre.value.clone()
    centre.update(torch.zeros(DIM), torch.tensor(0), unit(PROTOTYPES, DIM, seed=1))
    assert torch.equal(centre.value, before)
    restored = Centre(PROTOTYPES)
    restored.load_state_dict(centre.state_dict())
    assert torch.equal(restored.value, before)


@pytest.mark.parametrize("momentum", [-0.1, 1.0])
def test_centre_momentum_out_of_range(momentum: float) -> None:
    with pytest.raises(ValueError, match=f"momentum must be >= 0 and < 1, got {momentum}"):
        Centre(PROTOTYPES, momentum=momentum)
