"""The reference, with which everything else is compared, against the paper's equations by hand."""

import pytest
import torch
import torch.nn.functional as F

from cribo.method import reference


def test_positional_cost_by_hand() -> None:
    # Tokens 0 and 1 have the same position, 2 is 3 to the right, 3 is 4 below. Clusters: {0, 1}, {2, 3}, and {}.
    coordinates = torch.tensor([[0.0, 0], [0, 0], [3, 0], [0, 4]])
    members = F.one_hot(torch.tensor([0, 0, 1, 1]), 3).float()
    mean = (3 + 3 + 3 + 5 + 4 + 5) / 12  # entries without another member count as 0
    expected = torch.tensor([[mean, 3, mean], [mean, 3, mean], [3, 5, mean], [4, 5, mean]]) / 5
    torch.testing.assert_close(reference.positional_cost(coordinates, members), expected)


@pytest.mark.parametrize("mass", [[0.25, 0.25, 0.25, 0.25], [0.7, 0.2, 0.0999, 0.0001]])
def test_marginals_of_the_transport_plan(mass: list[float]) -> None:
    cost = torch.rand(50, 4, generator=torch.Generator().manual_seed(0)).double()
    cluster_mass = torch.tensor(mass).double()
    for iterations in (1, 5, 2000):
        plan = reference.transport_plan(cost, cluster_mass, iterations, 20.0)
        torch.testing.assert_close(plan.sum(dim=0), cluster_mass)  # scaled last: exact after any round
    torch.testing.assert_close(plan.sum(dim=1), torch.full((50,), 1 / 50).double(), rtol=1e-2, atol=0)


def test_the_plan_is_the_entropic_optimum() -> None:
    """Eq. 13: log(plan) + sharpness * cost is the sum of a token term and a cluster term."""
    cost = torch.rand(30, 5, generator=torch.Generator().manual_seed(0)).double()
    plan = reference.transport_plan(cost, torch.full((5,), 0.2).double(), 2000, 20.0)
    residual = plan.log() + 20 * cost
    residual = residual - residual.mean(dim=0) - residual.mean(dim=1, keepdim=True) + residual.mean()
    assert residual.abs().max() < 1e-9


def test_a_cycle_by_hand() -> None:
    # View 1: object 0 -> row 1, which is object 2 in view 2; object 1 -> row 2, which is object 1; object 2 -> row 0.
    objects = torch.eye(3).expand(2, -1, -1)
    bank = torch.stack((torch.eye(3)[[2, 0, 1]], torch.eye(3)[[0, 2, 1]]))
    images, bank_images = torch.tensor([0, 1, 2]), torch.tensor([7, 8, 9])
    nearest, consistent = reference.match(objects, images, bank, bank_images)
    assert nearest.tolist() == [[1, 2, 0], [0, 2, 1]]
    assert consistent.tolist() == [[False, True, False], [False, True, False]]


def test_rows_of_the_own_image_never_match() -> None:
    objects = torch.eye(2).expand(2, -1, -1)
    bank = torch.stack((torch.eye(2), torch.eye(2)))
    nearest, consistent = reference.match(objects, torch.tensor([5, 6]), bank, torch.tensor([5, 5]))
    assert nearest[:, 1].tolist() == [1, 1]
    assert consistent.tolist() == [[False, True], [False, True]]


def test_cross_entropy_by_hand() -> None:
    teacher, student = torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    p = torch.tensor([2.0, 0.5]).div(0.5).softmax(dim=0)  # centre (0, -0.5), tau_t = 0.5
    q = torch.tensor([0.0, 1.0]).div(0.1).softmax(dim=0)
    found = reference.cross_entropy(teacher, student, torch.tensor([0.0, -0.5]), 0.5, 0.1)
    torch.testing.assert_close(found, -(p * q.log()).sum())
