import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cribo.method import NO_MATCH, blocks, match_objects, reference
from cribo.method.matching import Rows, nearest_rows


def naive_nearest(query: Tensor, rows: Tensor) -> int:
    if not len(rows):
        return NO_MATCH
    cosines = [float(query.double() @ row.double() / (query.double().norm() * row.double().norm())) for row in rows]
    return max(range(len(rows)), key=lambda index: (cosines[index], -index))


def naive_cycle(objects: Tensor, bank: Tensor) -> tuple[list[list[int]], list[list[bool]]]:
    """Compute neighbours and cycle consistency, one object at a time."""
    nearest, consistent = [], []
    for view in (0, 1):
        found, closed = [], []
        for r in range(objects.shape[1]):
            neighbour = naive_nearest(objects[view, r], bank[view])
            jumped = bank[1 - view, neighbour]
            back = naive_nearest(jumped, objects[1 - view])
            found.append(neighbour)
            closed.append(back == r)
        nearest.append(found)
        consistent.append(closed)
    return nearest, consistent


def random_case(seed: int, *, rows: int, bank_rows: int, dim: int = 6) -> tuple[Tensor, Tensor]:
    """Similar views, so that some cycles close and some do not."""
    generator = torch.Generator().manual_seed(seed)
    objects = torch.randn(1, rows, dim, generator=generator) + 0.5 * torch.randn(2, rows, dim, generator=generator)
    source = torch.randint(rows, (bank_rows,), generator=generator)
    bank = objects[:, source] + 0.5 * torch.randn(2, bank_rows, dim, generator=generator)
    scale = 0.1 + 10 * torch.rand(2, bank_rows, 1, generator=generator)
    return objects, bank * scale


@pytest.mark.parametrize("seed", range(0, 12, 3))
def test_matches_against_a_loop(seed: int) -> None:
    objects, bank = random_case(seed, rows=9 + seed, bank_rows=1 + 4 * seed)
    assert tuple(found.tolist() for found in match_objects(objects, bank)) == naive_cycle(objects, bank)


def test_some_cycles_close_and_some_do_not() -> None:
    shares = [match_objects(*random_case(seed, rows=20, bank_rows=40))[1].float().mean() for seed in range(5)]
    assert 0.1 < float(torch.stack(shares).mean()) < 0.9


def test_views_match_in_their_own_bank_and_return_through_the_other() -> None:
    objects = torch.eye(3).expand(2, -1, -1)
    bank = torch.stack((torch.eye(3)[[2, 0, 1]], torch.eye(3)[[0, 2, 1]]))
    nearest, consistent = match_objects(objects, bank)
    assert nearest.tolist() == [[1, 2, 0], [0, 2, 1]]
    # View 1: object 0 -> row 1, which is object 2 in view 2; object 1 -> row 2, object 1; object 2 -> row 0.
    assert consistent.tolist() == [[False, True, False], [False, True, False]]


def test_scale_and_autocast_change_no_match() -> None:
    objects, bank = random_case(3, rows=30, bank_rows=200)
    expected = match_objects(objects, bank)
    scaled = match_objects(objects * 100, bank * torch.rand(2, 200, 1).add(0.1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = match_objects(objects, bank)
    for found in (scaled, half):
        assert all(torch.equal(own, other) for own, other in zip(found, expected, strict=True))


def test_empty_banks_and_queries() -> None:
    nearest, consistent = match_objects(torch.randn(2, 4, 3), torch.zeros(2, 0, 3))
    assert (nearest == NO_MATCH).all()
    assert not consistent.any()
    nearest, consistent = match_objects(torch.zeros(2, 0, 3), torch.randn(2, 5, 3))
    assert nearest.shape == consistent.shape == (2, 0)


@pytest.fixture(params=[1, 3, 7, 4096])
def block_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Number of rows that a search of 4 queries compares at once."""
    monkeypatch.setitem(blocks._NUMBERS, "cpu", 4 * request.param)
    return request.param


def stored(rows: Tensor, parts: list[slice] | None = None, images: Tensor | None = None) -> Rows:
    """The same rows in both views."""
    return Rows(rows.expand(2, -1, -1), [slice(0, len(rows))] if parts is None else parts, images)


@pytest.mark.parametrize("parts", [None, [slice(0, 20), slice(20, 50)], [slice(30, 50), slice(0, 30)]])
@pytest.mark.usefixtures("block_rows")
def test_blocks_and_parts_change_nothing(parts: list[slice] | None) -> None:
    queries, rows = torch.randn(4, 6), F.normalize(torch.randn(50, 6), dim=-1)
    expected = reference.nearest(queries.double(), rows.double())
    assert torch.equal(nearest_rows(queries, stored(rows, parts), 0), expected)


@pytest.mark.usefixtures("block_rows")
def test_rows_outside_of_the_parts_are_not_found() -> None:
    queries, rows = torch.randn(4, 6), F.normalize(torch.randn(50, 6), dim=-1)
    found = nearest_rows(queries, stored(rows, [slice(40, 50), slice(0, 5)]), 0)
    inside = torch.cat((torch.arange(40, 50), torch.arange(5)))
    assert torch.equal(found, inside[reference.nearest(queries.double(), rows[inside].double())])


@pytest.mark.usefixtures("block_rows")
def test_ties_go_to_the_first_row() -> None:
    rows = torch.eye(4)[[3, 1, 0, 1, 0, 2, 2]]
    assert nearest_rows(torch.eye(4), stored(rows), 0).tolist() == [2, 1, 5, 0]
    assert nearest_rows(torch.eye(4), stored(rows, [slice(3, 7), slice(0, 3)]), 0).tolist() == [4, 3, 5, 0]


@pytest.mark.usefixtures("block_rows")
def test_rows_of_the_own_image_never_match() -> None:
    queries, bank = torch.randn(20, 6), F.normalize(torch.randn(60, 6), dim=-1)
    images, bank_images = torch.arange(20) % 5, torch.arange(60) % 5
    nearest = nearest_rows(queries, stored(bank, images=bank_images), 0, images)
    for query, image, row in zip(queries, images, nearest, strict=True):
        others = (bank_images != image).nonzero().flatten()
        assert int(row) == int(others[naive_nearest(query, bank[others])])


def test_a_bank_with_only_the_own_image_matches_nothing() -> None:
    bank = F.normalize(torch.randn(3, 6), dim=-1)
    queries, images = bank[[0, 0]], torch.tensor([7, 8])
    nearest = nearest_rows(queries, stored(bank, images=torch.tensor([7, 7, 7])), 0, images)
    assert nearest.tolist() == [NO_MATCH, 0]


def test_a_zero_row_loses() -> None:
    objects = torch.ones(2, 1, 4)
    nearest, _ = match_objects(objects, torch.stack((torch.zeros(4), torch.ones(4))).expand(2, -1, -1))
    assert nearest.tolist() == [[1], [1]]


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("objects", "bank", "message"),
    [((5, 3), (2, 4, 3), r"objects .* \(2, R, D\), got \(5, 3\)"), ((2, 5, 3), (2, 4, 6), r"bank .* \(2, M, 3\)")],
)
def test_invalid_shapes_are_refused(objects: tuple[int, ...], bank: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        match_objects(torch.zeros(objects), torch.zeros(bank))
