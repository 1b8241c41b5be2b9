import math
from typing import Any

import pytest
import torch
from benchmarks import literal
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from cribo.method import (
    Centre,
    PrototypeLayer,
    SelfDistillation,
    Targets,
    cross_image_loss,
    cross_image_targets,
    cross_view_loss,
    cross_view_targets,
    prototype_loss,
    prototype_losses,
    sinkhorn_centre,
)
from cribo.method.losses import add_product

ROWS, DIM, PROTOTYPES = 23, 8, 50


def unit(*shape: int, seed: int) -> Tensor:
    rows = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.normalize(rows, dim=-1)


def level(seed: int = 0, *, student_prototypes: Tensor | None = None) -> SelfDistillation:
    return SelfDistillation(
        unit(PROTOTYPES, DIM, seed=seed) if student_prototypes is None else student_prototypes,
        unit(PROTOTYPES, DIM, seed=seed + 1),
        0.1 * unit(PROTOTYPES, seed=seed + 2),
        0.1,
        0.05,
    )


def plain_loss(student: Tensor, teacher: Tensor, distillation: SelfDistillation) -> Tensor:
    """The literal formula in float64."""
    return literal.prototype_loss(
        student.double(),
        teacher.double(),
        distillation.student_prototypes.double(),
        distillation.teacher_prototypes.double(),
        distillation.centre.double(),
        distillation.student_temperature,
        distillation.teacher_temperature,
    )


def with_gradients(loss_function: Any, student: Tensor, teacher: Tensor, **options) -> tuple[Tensor, ...]:
    leaf = student.clone().requires_grad_()
    prototypes = unit(PROTOTYPES, DIM, seed=0).requires_grad_()
    loss = loss_function(leaf, teacher, level(student_prototypes=prototypes), **options)
    (3 * loss).backward()  # not 1, so that the incoming gradient is felt
    assert leaf.grad is not None
    assert prototypes.grad is not None
    return loss.detach(), leaf.grad, prototypes.grad


@pytest.mark.parametrize("block_rows", [1, 2, 7, 22, 23, 1000])
def test_the_loss_and_its_gradients_are_those_of_the_plain_formula(block_rows: int) -> None:
    student, teacher = unit(ROWS, DIM, seed=5), unit(ROWS, DIM, seed=6)
    actual = with_gradients(prototype_loss, student, teacher, block_logits=block_rows * PROTOTYPES)
    expected = with_gradients(plain_loss, student, teacher)
    for ours, plain in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, plain.to(ours.dtype), rtol=1e-5, atol=1e-6)
    assert actual[0].dtype == torch.float32


def test_a_bound_below_one_row_still_works() -> None:
    student, teacher = unit(ROWS, DIM, seed=5), unit(ROWS, DIM, seed=6)
    loss = prototype_loss(student, teacher, level(), block_logits=1)
    torch.testing.assert_close(loss, plain_loss(student, teacher, level()).float())


def test_extreme_logits_stay_finite() -> None:
    """Gains may grow: logits / temperature of thousands must not overflow."""
    student, teacher = unit(ROWS, DIM, seed=5), unit(ROWS, DIM, seed=6)
    distillation = SelfDistillation(
        100 * unit(PROTOTYPES, DIM, seed=0), 100 * unit(PROTOTYPES, DIM, seed=1), torch.zeros(PROTOTYPES), 0.1, 0.04
    )
    leaf = student.clone().requires_grad_()
    loss = prototype_loss(leaf, teacher, distillation)
    loss.backward()
    torch.testing.assert_close(loss, plain_loss(student, teacher, distillation).float(), rtol=1e-5, atol=1e-4)
    assert leaf.grad is not None
    assert leaf.grad.isfinite().all()


def test_numeric_derivative() -> None:
    student, teacher = unit(ROWS, DIM, seed=5), unit(ROWS, DIM, seed=6)
    step = 1e-2 * unit(ROWS, DIM, seed=7)
    leaf = student.clone().requires_grad_()
    prototype_loss(leaf, teacher, level()).backward()
    assert leaf.grad is not None
    ahead, behind = (prototype_loss(student + sign * step, teacher, level()) for sign in (1, -1))
    assert float((ahead - behind) / 2) == pytest.approx(float((leaf.grad * step).sum()), rel=2e-3)


def test_gradients_stop_at_the_teacher() -> None:
    teacher = unit(ROWS, DIM, seed=6).requires_grad_()
    teacher_prototypes = unit(PROTOTYPES, DIM, seed=1).requires_grad_()
    centre = torch.zeros(PROTOTYPES, requires_grad=True)
    student = unit(ROWS, DIM, seed=5).requires_grad_()
    distillation = SelfDistillation(unit(PROTOTYPES, DIM, seed=0), teacher_prototypes, centre, 0.1, 0.05)
    prototype_loss(student, teacher, distillation).backward()
    assert student.grad is not None
    assert teacher.grad is None
    assert teacher_prototypes.grad is None
    assert centre.grad is None


@pytest.mark.parametrize("wanted", ["student", "prototypes", "nothing"])
def test_only_the_gradients_that_are_wanted_are_made(wanted: str) -> None:
    student = unit(ROWS, DIM, seed=5).requires_grad_(wanted == "student")
    prototypes = unit(PROTOTYPES, DIM, seed=0).requires_grad_(wanted == "prototypes")
    loss = prototype_loss(student, unit(ROWS, DIM, seed=6), level(student_prototypes=prototypes))
    assert loss.requires_grad == (wanted != "nothing")
    if wanted != "nothing":
        loss.backward()
    assert (student.grad is None) == (wanted != "student")
    assert (prototypes.grad is None) == (wanted != "prototypes")


def test_gradients_reach_direction_and_gain_of_the_layer() -> None:
    layer = PrototypeLayer(DIM, PROTOTYPES)
    student, teacher = unit(ROWS, DIM, seed=5), unit(ROWS, DIM, seed=6)
    gradients = []
    for loss_function in (prototype_loss, plain_loss):
        layer.zero_grad()
        loss_function(student, teacher, level(student_prototypes=layer.weight)).backward()
        gradients.append([parameter.grad.clone() for parameter in layer.parameters() if parameter.grad is not None])
    assert len(gradients[0]) == 2
    for ours, plain in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-7)


def test_autocast_changes_nothing() -> None:
    student, teacher = unit(ROWS, DIM, seed=5), unit(ROWS, DIM, seed=6)
    expected = with_gradients(prototype_loss, student, teacher)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = with_gradients(prototype_loss, student, teacher)
    for ours, plain in zip(actual, expected, strict=True):
        assert torch.equal(ours, plain)


def test_half_precision_rows_get_gradients_of_their_type() -> None:
    student = unit(ROWS, DIM, seed=5).bfloat16().requires_grad_()
    loss = prototype_loss(student, unit(ROWS, DIM, seed=6).bfloat16(), level())
    loss.backward()
    assert loss.dtype == torch.float32
    assert student.grad is not None
    assert student.grad.dtype == torch.bfloat16


def test_no_rows_give_zero_attached_to_the_graph() -> None:
    source = torch.randn(4, DIM, requires_grad=True)
    prototypes = unit(PROTOTYPES, DIM, seed=0).requires_grad_()
    loss = prototype_loss(source[:0], torch.zeros(0, DIM), level(student_prototypes=prototypes))
    assert loss.item() == 0
    loss.backward()
    assert source.grad is not None
    assert (source.grad == 0).all()
    assert prototypes.grad is not None
    assert (prototypes.grad == 0).all()


class LargestTensor(TorchDispatchMode):
    """Records the most elements of any tensor that an operation gives."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in tree_flatten(result)[0]:
            if isinstance(value, Tensor):
                self.elements = max(self.elements, value.numel())
        return result


def test_no_more_logits_than_the_bound_are_ever_made() -> None:
    rows, prototypes, bound = 400, 1000, 20_000
    student = unit(rows, DIM, seed=5).requires_grad_()
    weight = unit(prototypes, DIM, seed=0).requires_grad_()
    distillation = SelfDistillation(weight, unit(prototypes, DIM, seed=1), torch.zeros(prototypes), 0.1, 0.05)
    with LargestTensor() as largest:
        prototype_loss(student, unit(rows, DIM, seed=6), distillation, block_logits=bound).backward()
    assert largest.elements <= bound
    with LargestTensor() as largest:
        sinkhorn_centre(unit(rows, DIM, seed=6), weight, temperature=0.1, block_logits=bound)
    assert largest.elements <= bound


@pytest.mark.parametrize("name", ["student_temperature", "teacher_temperature"])
def test_temperatures_out_of_range(name: str) -> None:
    temperatures = {"student_temperature": 0.1, "teacher_temperature": 0.05} | {name: 0.0}
    prototypes = unit(PROTOTYPES, DIM, seed=0)
    with pytest.raises(ValueError, match=rf"{name} must be > 0, got 0\.0"):
        SelfDistillation(prototypes, prototypes, torch.zeros(PROTOTYPES), **temperatures)


@pytest.mark.usefixtures("unchecked_shapes")
def test_rows_that_do_not_pair_up() -> None:
    with pytest.raises(ValueError, match=r"student and teacher rows differ: \(5, 8\) and \(4, 8\)"):
        prototype_loss(torch.zeros(5, DIM), torch.zeros(4, DIM), level())


def test_cross_view_is_the_mean_of_the_two_directions() -> None:
    student, teacher = unit(2, ROWS, DIM, seed=5), unit(2, ROWS, DIM, seed=6)
    loss = cross_view_loss(student, teacher, level())
    directions = [plain_loss(student[1 - view], teacher[view], level()) for view in (0, 1)]
    assert abs(float(directions[0] - directions[1])) > 1e-3
    torch.testing.assert_close(loss, ((directions[0] + directions[1]) / 2).float())


def cross_image_case(counts: tuple[int, int]) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor]:
    student = unit(2, ROWS, DIM, seed=5).requires_grad_()
    valid = torch.zeros(2, ROWS, dtype=torch.bool)
    for view, count in enumerate(counts):
        chosen = torch.randperm(ROWS, generator=torch.Generator().manual_seed(view))[:count]
        valid[view, chosen] = True
    neighbours = (unit(counts[0], DIM, seed=7), unit(counts[1], DIM, seed=8))
    return student, neighbours, valid


@pytest.mark.parametrize("counts", [(5, 11), (1, 23), (0, 6), (6, 0)])
def test_cross_image_divides_each_direction_by_its_own_count(counts: tuple[int, int]) -> None:
    student, neighbours, valid = cross_image_case(counts)
    loss = cross_image_loss(student, neighbours, valid, level())
    expected = 0.0
    for view in (0, 1):
        # One object at a time: the teacher on the neighbour of view i, the student on the other view.
        rows = valid[view].nonzero().flatten()
        terms = [
            plain_loss(student[1 - view, row][None], neighbour[None], level()).item()
            for row, neighbour in zip(rows, neighbours[view], strict=True)
        ]
        expected += sum(terms) / max(len(terms), 1) / 2
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    loss.backward()
    assert student.grad is not None
    touched = student.grad.abs().sum(dim=-1) > 0
    assert torch.equal(touched, valid.flip(0))


def test_cross_image_without_pairs_is_zero_attached_to_the_graph() -> None:
    student, neighbours, valid = cross_image_case((0, 0))
    loss = cross_image_loss(student, neighbours, valid, level())
    assert loss.item() == 0
    loss.backward()
    assert student.grad is not None
    assert (student.grad == 0).all()


class Groups:
    """Objects of two views in groups, some without objects, some without neighbours; each with a centre of its own."""

    def __init__(self, sizes: tuple[int, ...], share: float) -> None:
        self.sizes, rows = sizes, sum(sizes)
        self.student = unit(2, rows, DIM, seed=5)
        self.teacher = unit(2, rows, DIM, seed=6)
        self.valid = torch.rand(2, rows, generator=torch.Generator().manual_seed(7)) < share
        self.neighbours = tuple(unit(int(view.sum()), DIM, seed=8 + i) for i, view in enumerate(self.valid))
        self.prototypes = unit(PROTOTYPES, DIM, seed=0)
        self.centres = 0.1 * unit(len(sizes), PROTOTYPES, seed=2)

    def level(self, centre: Tensor, prototypes: Tensor) -> SelfDistillation:
        return SelfDistillation(prototypes, unit(PROTOTYPES, DIM, seed=1), centre, 0.1, 0.05)

    def ours(self, student: Tensor, prototypes: Tensor, centres: Tensor, **options: Any) -> Tensor:
        targets = [
            cross_view_targets(self.teacher, self.sizes),
            cross_image_targets((self.neighbours[0], self.neighbours[1]), self.valid, self.sizes),
        ]
        return prototype_losses(student.flatten(0, 1), targets, self.level(centres, prototypes), **options)

    def literally(self, student: Tensor, prototypes: Tensor, centres: Tensor) -> Tensor:
        """Group by group, direction by direction, one object at a time (METHOD section 4)."""
        student, prototypes = student.double(), prototypes.double()
        totals = [0 * (student.sum() + prototypes.sum())] * 2
        first, taken = 0, [0, 0]
        for group, size in enumerate(self.sizes):
            level = self.level(centres[group] if centres.ndim > 1 else centres, prototypes)
            for view in (0, 1):
                terms: tuple[list[Tensor], list[Tensor]] = ([], [])
                for row in range(first, first + size):
                    own = student[1 - view, row][None]
                    terms[0].append(plain_loss(own, self.teacher[view, row][None], level))
                    if self.valid[view, row]:
                        terms[1].append(plain_loss(own, self.neighbours[view][taken[view]][None], level))
                        taken[view] += 1
                for loss, found in enumerate(terms):
                    if found:
                        totals[loss] = totals[loss] + torch.stack(found).mean() / 2 / len(self.sizes)
            first += size
        return torch.stack(totals)


def gradients(function: Any, *tensors: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """Values, and what three times their sum gives to the first two tensors."""
    leaves = [tensor.clone().requires_grad_() for tensor in tensors[:2]]
    losses = function(*leaves, *tensors[2:], **options)
    found = torch.autograd.grad(3 * losses.sum(), leaves)
    return losses.detach(), *found


@pytest.mark.parametrize("sizes", [(9,), (4, 0, 6, 1), (0, 3), (0, 0)])
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("centres", ["one", "each"])
def test_losses_of_groups_against_loops_over_groups_directions_and_objects(
    sizes: tuple[int, ...], share: float, centres: str
) -> None:
    groups = Groups(sizes, share)
    centre = groups.centres[0] if centres == "one" else groups.centres
    given = (groups.student, groups.prototypes, centre)
    expected = gradients(groups.literally, *given)
    for block_rows in (1, 3, 1000):
        actual = gradients(groups.ours, *given, block_logits=block_rows * PROTOTYPES)
        for ours, plain in zip(actual, expected, strict=True):
            torch.testing.assert_close(ours, plain.to(ours.dtype), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_of_several_losses_by_type(dtype: torch.dtype) -> None:
    """Rows in bf16 are read as they are; all else happens in float32, so only the gradient's own rounding differs."""
    groups = Groups((5, 3), 0.5)
    groups.teacher = groups.teacher.to(dtype)
    groups.neighbours = tuple(part.to(dtype) for part in groups.neighbours)
    given = (groups.student.to(dtype), groups.prototypes.to(dtype), groups.centres[0])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = gradients(groups.ours, *given)
    expected = gradients(groups.literally, *given)
    assert actual[0].dtype == torch.float32
    torch.testing.assert_close(actual[0], expected[0].float(), rtol=1e-5, atol=1e-6)
    for ours, plain in zip(actual[1:], expected[1:], strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours, plain.to(dtype))


def test_rows_in_any_order_repeated_and_missing() -> None:
    student, prototypes = unit(6, DIM, seed=5), unit(PROTOTYPES, DIM, seed=0)
    rows = [torch.tensor([4, 0, 4, 4, 1]), torch.tensor([5, 0])]
    teacher = [unit(len(part), DIM, seed=6 + i) for i, part in enumerate(rows)]
    weights = [torch.tensor([0.1, 2.0, 0.0, 0.7, 1.5]), torch.tensor([0.5, 0.25])]

    def ours(student: Tensor, prototypes: Tensor) -> Tensor:
        targets = [Targets(*given) for given in zip(teacher, rows, weights, strict=True)]
        return prototype_losses(student, targets, level(student_prototypes=prototypes), block_logits=2 * PROTOTYPES)

    def plain(student: Tensor, prototypes: Tensor) -> Tensor:
        distillation = level(student_prototypes=prototypes)
        losses = []
        for embeddings, of, weight in zip(teacher, rows, weights, strict=True):
            pairs = zip(student[of], embeddings, strict=True)
            each = torch.stack([plain_loss(s[None], t[None], distillation) for s, t in pairs])
            losses.append((weight * each).sum())
        return torch.stack(losses)

    actual, expected = gradients(ours, student, prototypes), gradients(plain, student, prototypes)
    for mine, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, theirs.to(mine.dtype), rtol=1e-5, atol=2e-6)
    assert (actual[1][[2, 3]] == 0).all()


def test_losses_weighted_differently_afterwards_are_refused() -> None:
    groups = Groups((5, 3), 0.5)
    leaf = groups.student.clone().requires_grad_()
    losses = groups.ours(leaf, groups.prototypes, groups.centres)
    with pytest.raises(RuntimeError, match="give its Targets larger weights"):
        (2 * losses[0] + losses[1]).backward(retain_graph=True)
    (losses[0] + losses[1]).backward()
    assert leaf.grad is not None


def test_backward_twice_gives_the_same_gradients_twice() -> None:
    groups = Groups((5, 3), 0.5)
    student, prototypes = (tensor.requires_grad_() for tensor in (groups.student, groups.prototypes))
    loss = groups.ours(student, prototypes, groups.centres).sum()
    first = torch.autograd.grad(loss, (student, prototypes), 2 * torch.ones(()), retain_graph=True)
    kept = [gradient.clone() for gradient in first]
    second = torch.autograd.grad(loss, (student, prototypes), 6 * torch.ones(()))
    for one, other, copy in zip(first, second, kept, strict=True):
        assert torch.equal(one, copy)
        torch.testing.assert_close(other, 3 * one)
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()


def test_one_gradient_of_the_prototypes_is_held_whatever_the_groups_and_losses() -> None:
    for sizes in ((8,), (1,) * 8):
        groups = Groups(sizes, 1.0)
        prototypes = groups.prototypes.requires_grad_()
        kept: list[Tensor] = []

        def keep(tensor: Tensor, kept: list[Tensor] = kept) -> Tensor:
            kept.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            groups.ours(groups.student, prototypes, groups.centres[0])
        assert sum(tensor.numel() >= prototypes.numel() for tensor in kept) == 1


def test_a_sum_of_products_in_place() -> None:
    """Sizes around the parts in which it is added."""
    for rows, columns, dim in ((1, 1, 1), (5, 7, 3), (3, 2**21 // 64 + 1, 64), (40, 33, 2**21 + 1)):
        a, b, total = unit(rows, columns, seed=1), unit(rows, dim, seed=2), unit(columns, dim, seed=3)
        expected = total.double() + a.double().T @ b.double()
        add_product(total, a, b)
        torch.testing.assert_close(total, expected.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("unchecked_shapes")
def test_targets_that_do_not_fit() -> None:
    teacher, weights = unit(3, DIM, seed=1), torch.ones(3)
    with pytest.raises(ValueError, match=r"as many rows and weights as embeddings, got \[3, 2, 3\]"):
        Targets(teacher, torch.arange(2), weights)
    student = unit(3, DIM, seed=2)
    with pytest.raises(ValueError, match=r"rows of targets must be in \[0, 3\), got 1 to 3"):
        prototype_losses(student, [Targets(teacher, torch.arange(1, 4), weights)], level())
    with pytest.raises(ValueError, match="targets must have at least one loss, got none"):
        prototype_losses(student, [], level())
    prototypes = unit(PROTOTYPES, DIM, seed=3)
    several = SelfDistillation(prototypes, prototypes, torch.zeros(2, PROTOTYPES), 0.1, 0.05)
    with pytest.raises(ValueError, match="with several centres, targets need groups"):
        prototype_losses(student, [Targets(teacher, torch.arange(3), weights)], several)
    with pytest.raises(ValueError, match="group_rows must add up to the 3 rows, got 4"):
        cross_view_targets(unit(2, 3, DIM, seed=1), [2, 2])


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


def test_the_centre_stays_where_there_are_no_rows() -> None:
    centre = Centre(PROTOTYPES)
    centre.value.uniform_()
    before = centre.value.clone()
    centre.update(torch.zeros(DIM), torch.tensor(0), unit(PROTOTYPES, DIM, seed=1))
    assert torch.equal(centre.value, before)


def test_the_centre_is_saved_with_its_module() -> None:
    centre = Centre(PROTOTYPES)
    centre.value.uniform_()
    restored = Centre(PROTOTYPES)
    restored.load_state_dict(centre.state_dict())
    assert torch.equal(restored.value, centre.value)


@pytest.mark.parametrize("momentum", [-0.1, 1.0])
def test_centre_momentum_out_of_range(momentum: float) -> None:
    with pytest.raises(ValueError, match=rf"momentum of the centre must be in \[0, 1\), got {momentum}"):
        Centre(PROTOTYPES, momentum=momentum)


def sinkhorn_probabilities(logits: Tensor, iterations: int) -> Tensor:
    """Plain Sinkhorn-Knopp in the log domain on (R, L), columns first as its last rows are probabilities."""
    rows, columns = logits.shape
    plan = logits.double().log_softmax(dim=1)
    for _ in range(iterations):
        plan = plan - plan.logsumexp(dim=0, keepdim=True) + math.log(rows / columns)
        plan = plan - plan.logsumexp(dim=1, keepdim=True)
    return plan.exp()


@pytest.mark.parametrize("iterations", [1, 3, 8])
@pytest.mark.parametrize("block_logits", [1, 7 * PROTOTYPES, 10**6])
def test_sinkhorn_centre_gives_sinkhorn_s_probabilities(iterations: int, block_logits: int) -> None:
    embeddings, prototypes = unit(ROWS, DIM, seed=1), unit(PROTOTYPES, DIM, seed=2)
    centre = sinkhorn_centre(embeddings, prototypes, temperature=0.1, iterations=iterations, block_logits=block_logits)
    logits = embeddings @ prototypes.T
    probabilities = ((logits - centre) / 0.1).softmax(dim=-1)
    expected = sinkhorn_probabilities(logits / 0.1, iterations)
    torch.testing.assert_close(probabilities, expected.float(), rtol=1e-3, atol=1e-6)


def test_sinkhorn_centre_spreads_rows_evenly_over_prototypes() -> None:
    embeddings, prototypes = unit(300, DIM, seed=1) + 0.7, unit(PROTOTYPES, DIM, seed=2)
    logits = embeddings @ prototypes.T
    uneven = (logits / 0.1).softmax(dim=-1).mean(dim=0) * PROTOTYPES
    assert uneven.max() > 3
    centre = sinkhorn_centre(embeddings, prototypes, temperature=0.1, iterations=200)
    even = ((logits - centre) / 0.1).softmax(dim=-1).mean(dim=0) * PROTOTYPES
    torch.testing.assert_close(even, torch.ones(PROTOTYPES), rtol=1e-2, atol=0)


def test_sinkhorn_centre_without_rows_is_zero() -> None:
    centre = sinkhorn_centre(torch.zeros(0, DIM), unit(PROTOTYPES, DIM, seed=2), temperature=0.1)
    assert (centre == 0).all()


def test_sinkhorn_centre_out_of_range() -> None:
    rows, prototypes = unit(ROWS, DIM, seed=1), unit(PROTOTYPES, DIM, seed=2)
    with pytest.raises(ValueError, match=r"temperature must be > 0, got 0\.0"):
        sinkhorn_centre(rows, prototypes, temperature=0.0)
    with pytest.raises(ValueError, match="iterations must be >= 1, got 0"):
        sinkhorn_centre(rows, prototypes, temperature=0.1, iterations=0)
