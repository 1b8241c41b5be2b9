import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cribo.method import NO_MATCH, MemoryBank, search
from cribo.method.alike import distinct_slots
from cribo.method.matching import inverse_norms, nearest_rows
from cribo.method.rings import Ring
from cribo.method.search import RoundedCopies, StoredRows, nearest_in_rings, plain_tile_maxima

TILE = 32


WAYS = ("rounded copies", "stored rows", "one pass")


def choose(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Either first pass, or a single pass, whatever the machine and the sizes would choose."""
    monkeypatch.setattr(search, "multiplies_bfloat16", lambda: way == "rounded copies")
    monkeypatch.setattr(search, "_FEWEST", 2**62 if way == "one pass" else 0)


@pytest.fixture(params=WAYS, autouse=True)
def first_pass(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    choose(request.param, monkeypatch)
    return request.param


def filled(rows: Tensor, images: Tensor, *, per_image: int = 4, dtype: torch.dtype = torch.float32) -> MemoryBank:
    """A bank that holds just these rows (2, M, D)."""
    count = rows.shape[1]
    bank = MemoryBank(num_images=-(-count // per_image), num_objects=per_image, dim=rows.shape[2], dtype=dtype)
    counts = [len(part) for part in torch.arange(count).split(per_image)]
    bank.push(rows, images, counts)
    return bank


def found_in(bank: MemoryBank, queries: Tensor, images: Tensor) -> Tensor:
    """Neighbours (2, R), counted from the oldest row."""
    return nearest_in_rings(queries, images, (bank._ring(0), bank._ring(1)), bank._first_pass)


def assert_nearest(found: Tensor, queries: Tensor, images: Tensor, rows: Tensor, row_images: Tensor) -> None:
    """Against cosines in float64: the most similar row, or one that float32 cannot tell apart; of equals the first."""
    for view in (0, 1):
        cosines = F.normalize(queries[view].double(), dim=-1) @ F.normalize(rows[view].double(), dim=-1).T
        cosines.masked_fill_(images[:, None] == row_images, -torch.inf)
        best = cosines.amax(dim=1)
        for query, row in enumerate(found[view].tolist()):
            if best[query] == -torch.inf:
                assert row == NO_MATCH
                continue
            assert cosines[query, row] >= best[query] - 5e-7
            allowed = row_images != images[query]
            equal = (rows[view] == rows[view, row]).all(dim=1) & allowed
            assert row == int(equal.nonzero()[0])


def clustered(seed: int, count: int, dim: int, spread: float, centres: int = 5) -> Tensor:
    """Rows (2, count, D) about a few directions that have much in common, of very different lengths."""
    generator = torch.Generator().manual_seed(seed)
    middle = torch.randn(dim, generator=generator)
    centre = middle + torch.randn(centres, dim, generator=generator)
    rows = centre[torch.randint(centres, (count,), generator=generator)]
    rows = rows + spread * torch.randn(2, count, dim, generator=generator)
    return rows * torch.rand(2, count, 1, generator=generator).add(0.01)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    dim=st.sampled_from([1, 2, 3, 17, 64]),
    rows=st.integers(1, 400),
    queries=st.integers(1, 40),
    pushes=st.integers(1, 6),
    spread=st.sampled_from([1e-4, 1e-2, 1.0]),
    scale=st.sampled_from([1e-6, 1.0, 1e12]),
)
@pytest.mark.parametrize("first_pass", WAYS)
def test_any_bank_against_float64(
    first_pass: str, seed: int, dim: int, rows: int, queries: int, pushes: int, spread: float, scale: float
) -> None:
    """Rings that are empty in part, full or wrapped, with copies of rows and images that meet themselves."""
    with pytest.MonkeyPatch.context() as patch:
        choose(first_pass, patch)
        bank = MemoryBank(num_images=rows, num_objects=1, dim=dim)
        generator = torch.Generator().manual_seed(seed)
        pool = scale * clustered(seed, 60, dim, spread)
        held, held_images = torch.zeros(2, 0, dim), torch.zeros(0, dtype=torch.long)
        for _ in range(pushes):
            count = int(torch.randint(1, rows + 1, (), generator=generator))
            new = pool[:, torch.randint(60, (count,), generator=generator)]
            new_images = torch.randint(30, (count,), generator=generator)
            bank.push(new, new_images, [1] * count)
            held = torch.cat((held, new), dim=1)[:, -rows:]
            held_images = torch.cat((held_images, new_images))[-rows:]
        asked = clustered(seed + 1, queries, dim, spread)
        asked[:, ::2] = pool[:, torch.randint(60, (len(range(0, queries, 2)),), generator=generator)]
        images = torch.randint(40, (queries,), generator=generator)
        assert_nearest(found_in(bank, asked, images), asked, images, held, held_images)


@pytest.mark.parametrize("spread", [1e-3, 1e-4])
def test_rows_that_half_precision_cannot_tell_apart(spread: float) -> None:
    rows = clustered(0, 3000, 96, spread)
    queries, row_images = clustered(0, 30, 96, 0.3), torch.arange(3000) // 4
    images = torch.full((30,), -1)
    bank = filled(rows, row_images)
    found = found_in(bank, queries, images)
    assert_nearest(found, queries, images, rows, row_images)
    rounded = F.normalize(rows[0], dim=-1).bfloat16()
    assert len(rounded.unique(dim=0)) < 3000 or spread > 1e-4
    assert (found[0] != (queries[0].bfloat16() @ rounded.T).float().argmax(dim=1)).any()


def test_the_nearest_rows_are_all_of_the_own_image() -> None:
    rows, row_images = clustered(1, 800, 32, 0.5), torch.arange(800) // 40
    queries, images = rows[:, ::7] * 1.0001, row_images[::7]
    found = found_in(filled(rows, row_images, per_image=40), queries, images)
    assert_nearest(found, queries, images, rows, row_images)
    assert (row_images[found[0]] != images).all()


def test_nothing_but_the_own_image_in_every_tile_but_one() -> None:
    rows, row_images = clustered(2, 8 * TILE, 16, 0.5), torch.zeros(8 * TILE, dtype=torch.long)
    row_images[5 * TILE + 3] = 1
    queries = clustered(3, 5, 16, 0.5)
    found = found_in(filled(rows, row_images), queries, torch.tensor([0, 0, 1, 1, 2]))
    assert (found[:, :2] == 5 * TILE + 3).all()
    assert_nearest(found, queries, torch.tensor([0, 0, 1, 1, 2]), rows, row_images)


def test_a_row_of_the_own_image_does_not_hide_an_expired_neighbour() -> None:
    """The best product of a tile is that of a row that has expired: its live rows are all of the own image."""
    bank = MemoryBank(num_images=64, num_objects=1, dim=4)
    old, own, other = torch.eye(4)[:3]
    bank.push(old.expand(2, 40, 4), torch.full((40,), 5), [1] * 40)
    bank.push(own.expand(2, 24, 4), torch.arange(24) // 24 + 6, [1] * 24)
    bank.push(other.expand(2, 20, 4), torch.full((20,), 7), [1] * 20)
    bank.push(torch.zeros(2, 0, 4), torch.zeros(0, dtype=torch.long), [0] * 20)  # expires old rows, writes none
    queries = torch.tensor([1.0, 0.1, 0.05, 0]).expand(2, 1, 4)
    assert found_in(bank, queries, torch.tensor([6])).tolist() == [[24], [24]]


def test_all_rows_equal_and_the_oldest_wins() -> None:
    bank = MemoryBank(num_images=1000, num_objects=1, dim=8)
    for _ in range(3):
        bank.push(torch.ones(2, 700, 8), torch.arange(700), [1] * 700)
    assert bank._oldest
    queries = clustered(4, 20, 8, 1.0)
    assert (found_in(bank, queries, torch.full((20,), -1)) == 0).all()
    # The oldest rows are of images 400 and up.
    assert found_in(bank, queries, torch.full((20,), 400)).tolist() == [[1] * 20] * 2


def test_of_equal_rows_the_oldest_wins_across_the_end_of_the_ring() -> None:
    bank = MemoryBank(num_images=3 * TILE, num_objects=1, dim=4)
    bank.push(torch.eye(4)[0].expand(2, 3 * TILE, 4), torch.zeros(3 * TILE).long(), [1] * 3 * TILE)
    second = torch.eye(4)[[1] + [2] * (2 * TILE)].expand(2, -1, -1)
    bank.push(second, torch.zeros(2 * TILE + 1).long(), [1] * (2 * TILE + 1))
    bank.push(second, torch.zeros(2 * TILE + 1).long(), [1] * (2 * TILE + 1))  # wraps
    queries = torch.eye(4)[1:3].expand(2, -1, -1)
    rows = bank.state_dict()["rows"][0]
    expected = [int((rows == query).all(dim=1).nonzero()[0]) for query in queries[0]]
    assert found_in(bank, queries, torch.tensor([9, 9])).tolist() == [expected] * 2


def test_zero_rows_and_zero_queries() -> None:
    rows = torch.zeros(2, 3 * TILE, 6)
    rows[:, -1] = -1
    bank = filled(rows, torch.arange(3 * TILE))
    queries = torch.stack((torch.ones(6), -torch.ones(6), torch.zeros(6))).expand(2, -1, -1)
    assert found_in(bank, queries, torch.full((3,), -1)).tolist() == [[0, 3 * TILE - 1, 0]] * 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_rows_are_what_is_searched(dtype: torch.dtype) -> None:
    rows, row_images = clustered(5, 2000, 48, 0.2), torch.arange(2000) // 4
    queries, images = clustered(6, 50, 48, 0.2), torch.full((50,), -1)
    bank = filled(rows, row_images, dtype=dtype)
    norms = [inverse_norms(view.to(dtype)) for view in rows]
    for view in (0, 1):
        expected = nearest_rows(queries[view], [rows[view].to(dtype)], [norms[view]])
        assert torch.equal(found_in(bank, queries, images)[view], expected)


@pytest.mark.parametrize("scale", [1e-9, 1e9])
def test_scales(scale: float) -> None:
    rows, row_images = clustered(7, 500, 24, 0.2), torch.arange(500) // 4
    queries, images = clustered(8, 30, 24, 0.2), torch.full((30,), -1)
    found = found_in(filled(rows * scale, row_images), queries / scale, images)
    assert_nearest(found, queries, images, rows, row_images)


@pytest.mark.parametrize("first_pass", WAYS[:2], indirect=True)
def test_few_rows_are_compared_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound is tight: on random rows hardly a tile more than the best one, and no search among all rows."""
    compared = []
    exact = search.compare
    monkeypatch.setattr(search, "compare", lambda *given: compared.append(len(given[4])) or exact(*given))
    monkeypatch.setattr(search, "places", lambda *_: pytest.fail("the bound was of no use"))
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2, 20_000, 64, generator=generator)
    bank = filled(rows, torch.arange(20_000) // 4)
    found_in(bank, torch.randn(2, 100, 64, generator=generator), torch.full((100,), -1))
    assert 200 <= sum(compared) < 400


@pytest.mark.parametrize("first_pass", WAYS[:2], indirect=True)
@pytest.mark.parametrize("dim", [2, 5, 100])
@pytest.mark.parametrize("spread", [1e-3, 0.1, 2.0])
def test_no_product_is_below_the_least_that_its_similarity_allows(first_pass: str, dim: int, spread: float) -> None:
    rows = clustered(9, 512, dim, spread)
    queries = F.normalize(clustered(10, 200, dim, spread)[0], dim=-1)
    images, norms = torch.arange(512), inverse_norms(rows)
    if first_pass == "rounded copies":
        made = RoundedCopies(512, dim, images, TILE)
        made.write(slice(0, 512), rows, norms)
        products = made.rounded(queries).float() @ made._copies[0].float().T
    else:
        made = StoredRows(rows.half(), norms, images, TILE)
        rows = rows.half().float()
        products = made.rounded(queries).float() @ rows[0].T * norms[0]
    similarity = queries @ rows[0].T * norms[0]
    for column in range(512):
        least = search._least_product(similarity[:, column], queries, made.rounded(queries), made.distortion(0))
        assert (products[:, column] >= least).all()
    ceilings = torch.empty(512 // TILE, 200)
    made.ceilings(0, range(512 // TILE), made.rounded(queries), torch.full((200,), -1), ceilings)
    assert (ceilings >= products.view(200, -1, TILE).amax(dim=2).T - 1e-6).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("spread", [1e-6, 1e-3, 1.0])
def test_a_neighbour_does_not_depend_on_what_else_is_asked_or_where_rows_lie(dtype: torch.dtype, spread: float) -> None:
    """Rows that a product takes for equal, or for unequal, in one place of a block and not in another."""
    rows, row_images = clustered(13, 900, 100, spread), torch.arange(900) // 4
    queries, images = clustered(14, 20, 100, 0.3), torch.full((20,), -1)
    bank = filled(rows, row_images, dtype=dtype)
    found = found_in(bank, queries, images)
    for size in (1, 7, 13):
        parts = [found_in(bank, part, images[: part.shape[1]]) for part in queries.split(size, dim=1)]
        assert torch.equal(torch.cat(parts, dim=1), found)
    bank.push(torch.zeros(2, 300, 100), torch.full((300,), -1), [4] * 75)
    bank.push(rows, row_images, [4] * 225)  # behind the others and over the end of the ring
    assert len(bank._ring(0).live()) == 2
    assert torch.equal(found_in(bank, queries, images), found)


def alike(kind: str, count: int, dim: int, generator: torch.Generator) -> Tensor:
    """Rows (2, count, D) of a run that has collapsed in one of several ways."""
    noise = torch.randn(2, count, dim, generator=generator)
    fixed = torch.Generator().manual_seed(17)
    middles = torch.randn(4, dim, generator=fixed)
    few = middles[0] + 1e-7 * torch.randn(2, 9, dim, generator=fixed)
    which = torch.randint(9, (count,), generator=generator)
    rows = {
        "one vector": middles[0] + 0 * noise,
        "rounding": middles[0] + 1e-7 * noise,
        "one place": middles[0] + 3e-3 * noise,
        "four places": middles[which % 4] + 1e-5 * noise,
        "a half": torch.where(which[:, None] % 2 == 0, middles[0] + 1e-5 * noise, noise),
        "copies of a few": few[:, which],
    }[kind]
    # Of three lengths, so that there are copies of rows, and rows that differ in length alone.
    return rows * 4.0 ** torch.randint(3, (2, count, 1), generator=generator)


ALIKE = ("one vector", "rounding", "one place", "four places", "a half", "copies of a few")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", ALIKE)
def test_rows_that_are_nearly_all_alike(kind: str, dtype: torch.dtype) -> None:
    """In a ring that wraps, against the greatest of all exact similarities, and the oldest row that has it."""
    generator = torch.Generator().manual_seed(3)
    bank = MemoryBank(num_images=400, num_objects=8, dim=40, dtype=dtype)
    for length in (3000, 1800):
        rows, images = alike(kind, length, 40, generator), torch.randint(30, (length,), generator=generator)
        bank.push(rows, images, [8] * (length // 8))
    queries = torch.cat((alike(kind, 30, 40, generator), rows[:, :20], torch.randn(2, 10, 40)), dim=1)
    images = torch.randint(33, (60,), generator=generator)
    found = found_in(bank, queries, images)
    for view, ring in enumerate((bank._ring(0), bank._ring(1))):
        assert len(ring.live()) == 2
        slots = torch.cat([torch.arange(part.start, part.stop) for part in ring.live()])
        unit = torch.round(F.normalize(queries[view], dim=-1) * 2.0**26).double()
        similarity = (
            unit @ torch.round(ring.rows[slots].float() * (ring.inverse_norms[slots] * 2.0**26)[:, None]).double().T
        )
        similarity.masked_fill_(images[:, None] == ring.images[slots], -1e30)
        oldest = [int((row == row.amax()).nonzero()[0]) for row in similarity]
        assert found[view].tolist() == oldest


@pytest.mark.parametrize("first_pass", WAYS[:2], indirect=True)
@pytest.mark.parametrize("kind", ALIKE)
def test_of_rows_that_are_all_alike_few_are_compared(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    exact = search.compare
    monkeypatch.setattr(search, "compare", lambda *given: compared.append(len(given[4])) or exact(*given))
    generator = torch.Generator().manual_seed(0)
    bank = filled(alike(kind, 20_000, 64, generator), torch.arange(20_000) // 4)
    found_in(bank, alike(kind, 100, 64, generator), torch.full((100,), -1))
    assert sum(compared) < 200 * 20_000 // TILE // 16


def test_of_equal_rows_two_are_multiplied() -> None:
    """The oldest, and the oldest of another image, also where rows differ in channels that decide no order."""
    bank = MemoryBank(num_images=12, num_objects=1, dim=40)
    rows = torch.zeros(2, 12, 40)
    rows[:, :, 0] = 1
    rows[:, 6:, 1] = torch.tensor([2.0, 2, 3, 2, 3, 2])
    images = torch.tensor([9, 9, 8, 7, 9, 8, 5, 5, 5, 5, 5, 4])
    bank.push(rows[:, :3], images[:3], [1] * 3)  # expire, so that the ring wraps
    bank.push(rows, images, [1] * 12)
    ring = bank._ring(0)
    assert sorted(ring.ages(distinct_slots(ring)).tolist()) == [0, 2, 6, 8, 11]


@pytest.mark.parametrize("spread", [1e-3, 3e-2])
def test_a_run_that_prefers_short_floats_finds_the_same(spread: float) -> None:
    rows, row_images = clustered(15, 3000, 96, spread), torch.arange(3000) // 4
    queries, images = clustered(16, 30, 96, 0.3), torch.full((30,), -1)
    bank = filled(rows, row_images)
    found = found_in(bank, queries, images)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        assert torch.equal(found_in(bank, queries, images), found)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


def test_plain_tile_maxima() -> None:
    rows, queries = clustered(11, 4 * TILE, 20, 1.0)[0], clustered(12, 9, 20, 1.0)[0]
    images, row_images, norms = torch.arange(9), torch.arange(4 * TILE) // 6, inverse_norms(rows)
    found = torch.empty(4, 9)
    plain_tile_maxima(queries, rows, norms, images, row_images, found)
    products = (rows * norms[:, None]) @ queries.T
    products[row_images[:, None] == images] = -torch.inf
    torch.testing.assert_close(found, products.view(4, TILE, 9).amax(dim=1))


def test_tiles_with_live_rows_are_visited_once() -> None:
    def tiles(oldest: int, length: int, capacity: int = 100) -> list[int]:
        tensors = torch.zeros(128, 1), torch.zeros(128), torch.zeros(128, dtype=torch.long)
        return [tile for part in Ring(*tensors, capacity, oldest, length, TILE).tiles() for tile in part]

    assert tiles(0, 0) == []
    assert tiles(0, 1) == [0]
    assert tiles(31, 2) == [0, 1]
    assert tiles(96, 4) == [3]
    assert tiles(96, 10) == [3, 0]
    assert tiles(40, 100) == [1, 2, 3, 0]  # tile 1 has the oldest rows, and the newest
    assert tiles(10, 100) == [0, 1, 2, 3]
