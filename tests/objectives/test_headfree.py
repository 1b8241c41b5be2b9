"""Losses without heads, against their definitions."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cribo.method import MemoryBank
from cribo.objectives import headfree
from cribo.objectives.headfree import gram_loss, soft_neighbour_loss, top_rows

DIM = 6


def filled(generator: torch.Generator, images: list[int]) -> tuple[MemoryBank, Tensor]:
    """A bank with two objects of each image, and these objects."""
    bank = MemoryBank(num_images=8, num_objects=2, dim=DIM)
    rows = torch.randn(2, 2 * len(images), DIM, generator=generator)
    bank.push(rows, torch.tensor(images).repeat_interleave(2), [2] * len(images))
    return bank, rows


def expected(
    student: Tensor, teacher: Tensor, own: list[int], rows: Tensor, images: list[int], neighbours: int
) -> Tensor:
    """Compute the loss row by row: the mean over each view, then over both."""
    means = []
    for view in (0, 1):
        terms = []
        for row, image in enumerate(own):
            others = [slot for slot in range(rows.shape[1]) if images[slot // 2] != image]
            candidates = F.normalize(rows[view, others], dim=1)
            similarity = candidates @ F.normalize(teacher[view, row], dim=0)
            best = similarity.argsort(descending=True)[:neighbours]
            target = (similarity[best] / 0.05).softmax(dim=0)
            logits = candidates[best] @ F.normalize(student[1 - view, row], dim=0) / 0.1
            if len(best):
                terms.append(-(target * logits.log_softmax(dim=0)).sum())
        means.append(torch.stack(terms).mean() if terms else torch.zeros(()))
    return (means[0] + means[1]) / 2


@pytest.mark.parametrize("neighbours", [1, 3, 40])
@pytest.mark.parametrize("block", [1, 100])
def test_the_loss_is_the_cross_entropy_over_the_teachers_neighbours_in_other_images(
    neighbours: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(headfree, "rows_per_block", lambda *args: block)
    generator = torch.Generator().manual_seed(0)
    images, own = [3, 4, 5], [3, 4, 9]
    bank, rows = filled(generator, images)
    student = torch.randn(2, 3, DIM, generator=generator, requires_grad=True)
    teacher = torch.randn(2, 3, DIM, generator=generator)
    loss = soft_neighbour_loss(student, teacher, torch.tensor(own), bank, neighbours=neighbours)
    wanted = expected(student, teacher, own, rows, images, neighbours)
    torch.testing.assert_close(loss, wanted)
    gradients = [torch.autograd.grad(value, student)[0] for value in (loss, wanted)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


def test_rows_without_a_neighbour_do_not_count() -> None:
    generator = torch.Generator().manual_seed(1)
    bank, rows = filled(generator, [3])
    student = torch.randn(2, 2, DIM, generator=generator, requires_grad=True)
    teacher = torch.randn(2, 2, DIM, generator=generator)
    both = soft_neighbour_loss(student, teacher, torch.tensor([3, 8]), bank, neighbours=2)
    torch.testing.assert_close(both, expected(student, teacher, [3, 8], rows, [3], 2))
    none = soft_neighbour_loss(student, teacher, torch.tensor([3, 3]), bank, neighbours=2)
    none.backward()
    assert none == 0
    assert student.grad is not None
    assert torch.equal(student.grad, torch.zeros_like(student))


@pytest.mark.parametrize("rows", [0, 2])
def test_an_empty_bank_or_batch_gives_a_differentiable_0(rows: int) -> None:
    bank = MemoryBank(num_images=8, num_objects=2, dim=DIM)
    bank.rows.values.fill_(torch.nan)  # unused memory
    student = torch.randn(2, rows, DIM, requires_grad=True)
    loss = soft_neighbour_loss(student, torch.randn(2, rows, DIM), torch.arange(rows), bank, neighbours=4)
    loss.backward()
    assert loss == 0
    assert student.grad is not None
    assert student.grad.isfinite().all()


def test_neighbours_in_a_wrapped_bank_are_live_rows() -> None:
    generator = torch.Generator().manual_seed(2)
    bank = MemoryBank(num_images=3, num_objects=2, dim=DIM)
    pushed = torch.randn(2, 10, DIM, generator=generator)
    for image in range(5):
        bank.push(pushed[:, 2 * image : 2 * image + 2], torch.full((2,), image), [2])
    queries = torch.randn(2, 4, DIM, generator=generator)
    live = F.normalize(pushed[:, 4:], dim=-1)
    for view in (0, 1):
        similarities, slots = top_rows(queries[view], bank.rows, view, torch.full((4,), 99), 3)
        expected = F.normalize(queries[view], dim=-1) @ live[view].T
        torch.testing.assert_close(similarities, expected.topk(3, dim=-1).values)
        found = F.normalize(bank.objects(view, slots.flatten()), dim=-1).view(4, 3, DIM)
        torch.testing.assert_close((found * F.normalize(queries[view], dim=-1)[:, None]).sum(dim=-1), similarities)


def test_the_gram_loss_compares_patches_of_the_same_view() -> None:
    student, target = torch.randn(2, 2, 3, 4, generator=torch.Generator().manual_seed(3)).unbind()
    differences = []
    for view in range(2):
        for one in range(3):
            for other in range(3):
                a, b = (F.cosine_similarity(x[view, one], x[view, other], dim=0) for x in (student, target))
                differences.append((a - b) ** 2)
    torch.testing.assert_close(gram_loss(student, target), torch.stack(differences).mean())
