import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from cribo.features import search
from cribo.features.search import ApproximateIndex, Neighbours, TensorKeys, nearest, recall

GIB = 2**30


def unit(rows: int, dim: int, seed: int = 0) -> torch.Tensor:
    return F.normalize(torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed)), dim=1)


def whole_numbers(rows: int, dim: int, seed: int = 0, most: int = 2) -> torch.Tensor:
    """Return vectors with exact inner products in any order of summation, many of them equal."""
    return torch.randint(-most, most + 1, (rows, dim), generator=torch.Generator().manual_seed(seed)).float()


def naive(queries: torch.Tensor, keys: torch.Tensor, k: int) -> Neighbours:
    """Search by a stable sort of all similarities, so that ties are sorted by row."""
    similarity = queries.double() @ keys.double().T
    order = similarity.sort(dim=1, descending=True, stable=True)
    return Neighbours(order.values[:, :k].float(), order.indices[:, :k])


def assert_nearest(found: Neighbours, queries: torch.Tensor, keys: torch.Tensor) -> None:
    """Check against a float64 search, except for the order of keys whose similarities differ by rounding."""
    expected = naive(queries, keys, found.rows.shape[1])
    torch.testing.assert_close(found.similarity, expected.similarity, atol=1e-6, rtol=0)
    products = (queries.double()[:, None] * keys.double()[found.rows]).sum(dim=2)
    torch.testing.assert_close(products.float(), found.similarity, atol=1e-6, rtol=0)
    assert all(len(set(row)) == len(row) for row in found.rows.tolist())


class FromDisk:
    """Keys in several files, as in a cache: blocks span files."""

    def __init__(self, folder: Path, parts: list[torch.Tensor]) -> None:
        self.dim = parts[0].shape[1]
        self.files = [folder / f"{number}.pt" for number in range(len(parts))]
        self.length = sum(map(len, parts))
        self.reads = 0
        for file, part in zip(self.files, parts, strict=True):
            torch.save(part, file)

    def __len__(self) -> int:
        return self.length

    def blocks(self, rows: int) -> Iterator[torch.Tensor]:
        self.reads += 1
        waiting = torch.empty(0, self.dim, dtype=torch.load(self.files[0]).dtype)
        for file in self.files:
            waiting = torch.cat((waiting, torch.load(file)))
            while len(waiting) >= rows:
                yield waiting[:rows]
                waiting = waiting[rows:]
        if len(waiting):
            yield waiting


Sizes = tuple[int, int, int]
SIZES: list[Sizes] = [(256, 8192, 2), (16, 64, 2), (7, 333, 2), (5, 100, 1), (1, 1000, 2), (64, 4096, 3)]
"""Queries and keys compared at once, and workers per device."""


def sized(sizes: Sizes, *arguments: Any, **options: Any) -> Neighbours:
    """Call `nearest` with these block sizes."""
    queries, keys, workers = sizes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "_block_sizes", lambda d, k, devices, *_: (queries, keys, devices * workers))
        return nearest(*arguments, **options)


# ------------------------------------------------------------------ exact search


@pytest.mark.parametrize(("keys", "k"), [(40, 5), (40, 40), (900, 7), (5000, 50), (5000, 300)])
@pytest.mark.parametrize("sizes", SIZES[:4])
def test_neighbours_against_a_naive_search(keys: int, k: int, sizes: Sizes) -> None:
    rows, queries = unit(keys, 12, seed=keys), unit(50, 12, seed=k)
    found = sized(sizes, queries, TensorKeys(rows), k)
    assert_nearest(found, queries, rows)
    assert found.similarity.dtype == torch.float32
    assert found.rows.dtype == torch.int64


@pytest.mark.parametrize("devices", [("cpu",), ("cpu", "cpu", "cpu")])
@pytest.mark.parametrize("sizes", SIZES)
def test_ties_are_sorted_by_row(sizes: Sizes, devices: tuple[str, ...]) -> None:
    """For any block size and number of devices, since products of integers are exact."""
    keys, queries = whole_numbers(3000, 4), whole_numbers(70, 4, seed=1)
    found, expected = sized(sizes, queries, TensorKeys(keys), 20, devices=devices), naive(queries, keys, 20)
    assert torch.equal(found.rows, expected.rows)
    assert torch.equal(found.similarity, expected.similarity)


@pytest.mark.parametrize("sizes", SIZES)
def test_equal_keys_are_sorted_by_row(sizes: Sizes) -> None:
    """Equal keys have equal similarities at any position in a block."""
    keys, queries = unit(1, 31).expand(2500, -1), unit(40, 31, seed=1)
    found = sized(sizes, queries, TensorKeys(keys), 30)
    assert torch.equal(found.rows, torch.arange(30).expand(40, -1))


@pytest.mark.parametrize("dim", [1, 3, 100, 384])
def test_block_sizes_change_only_the_rounding_of_near_ties(dim: int) -> None:
    keys, queries = unit(4001, dim), unit(40, dim, seed=1)
    for sizes in SIZES:
        assert_nearest(sized(sizes, queries, TensorKeys(keys), 25), queries, keys)


@pytest.mark.parametrize(("amd", "bfloat16"), [(True, False), (False, True), (False, False)])
def test_all_products_agree(amd: bool, bfloat16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cribo.models.linear.has_amd_processor", lambda: amd)
    monkeypatch.setattr(search, "multiplies_bfloat16", lambda: bfloat16)
    same, queries = unit(1, 40).expand(2500, -1), unit(40, 40, seed=1)
    keys = unit(3000, 40)
    for sizes in SIZES:
        assert_nearest(sized(sizes, queries, TensorKeys(keys), 25), queries, keys)
        assert torch.equal(sized(sizes, queries, TensorKeys(same), 30).rows, torch.arange(30).expand(40, -1))


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e6])
def test_features_that_are_equal_in_bfloat16(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Features of a collapsed network; the last keys are the nearest, so no block can be skipped."""
    monkeypatch.setattr(search, "multiplies_bfloat16", lambda: True)
    keys = unit(1, 64) + 1e-5 * torch.linspace(0, 1, 3000)[:, None] * unit(1, 64)
    found = sized((16, 512, 2), scale * unit(1, 64).expand(20, -1), TensorKeys(scale * keys), 10)
    expected = (scale * keys) @ (scale * unit(1, 64)[0])
    torch.testing.assert_close(
        found.similarity, expected.topk(10).values.expand(20, -1), atol=2e-7 * scale * scale, rtol=0
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gpu_and_cpu_agree(dtype: torch.dtype) -> None:
    keys, queries = whole_numbers(70_000, 16).to(dtype), whole_numbers(5000, 16, seed=1).to(dtype)
    on_host = nearest(queries, TensorKeys(keys), 50)
    for devices in (("cuda",), ("cuda", "cuda")):
        on_gpu = nearest(queries, TensorKeys(keys), 50, devices=devices)
        assert torch.equal(on_gpu.rows, on_host.rows)
        assert torch.equal(on_gpu.similarity, on_host.similarity)
    mixed = nearest(queries.float(), TensorKeys(keys.half()), 50, devices=("cuda",))
    assert torch.equal(mixed.rows, on_host.rows)


@pytest.mark.parametrize("ascending", [True, False])
def test_keys_in_the_order_of_their_similarity(ascending: bool) -> None:
    """Each block is better than all previous blocks, the worst case for a running selection, or none is."""
    keys = torch.arange(6000.0)[:, None] if ascending else -torch.arange(6000.0)[:, None]
    for sizes in SIZES[:3]:
        found = sized(sizes, torch.ones(20, 1), TensorKeys(keys), 65)
        expected = torch.arange(5999, 5934, -1) if ascending else torch.arange(65)
        assert torch.equal(found.rows, expected.expand(20, -1))


def test_the_nearest_keys_are_consecutive_and_the_others_equal() -> None:
    keys = torch.zeros(6400, 1)
    keys[128:192, 0] = torch.arange(1.0, 65.0)
    found = sized(SIZES[0], torch.ones(2, 1), TensorKeys(keys), 70)
    assert found.rows[0].tolist() == [*range(191, 127, -1), *range(6)]


def test_negative_similarities_and_zeros_of_both_signs() -> None:
    keys = torch.tensor([[-1.0], [0.0], [-0.0], [-2.0], [1.0], [0.0]])
    found = nearest(torch.tensor([[1.0], [-1.0]]), TensorKeys(keys), 6)
    assert found.rows.tolist() == [[4, 1, 2, 5, 0, 3], [3, 0, 1, 2, 5, 4]]
    assert found.similarity[0].tolist() == [1, 0, 0, 0, -1, -2]


@pytest.mark.parametrize("devices", [("cpu",), ("cpu", "cpu")])
def test_half_precision_keys_from_disk_are_read_once(tmp_path: Path, devices: tuple[str, ...]) -> None:
    parts = [unit(rows, 24, seed=rows).half() for rows in (700, 1, 0, 1300, 64)]
    keys, queries = FromDisk(tmp_path, parts), unit(90, 24).half()
    told: list[int] = []
    found = sized((16, 128, 2), queries, keys, 9, devices=devices, progress=told.append)
    assert torch.equal(found.rows, naive(queries, torch.cat(parts), 9).rows)
    assert keys.reads == 1
    assert told == sorted(told)
    assert told[-1] == len(keys)


def test_empty_and_strided_queries() -> None:
    keys = TensorKeys(unit(20, 6))
    assert nearest(torch.empty(0, 6), keys, 3).rows.shape == (0, 3)
    wide = unit(10, 12)[:, ::2]
    assert torch.equal(nearest(wide, keys, 3).rows, nearest(wide.contiguous(), keys, 3).rows)


def test_the_number_of_threads_is_restored() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        nearest(unit(40, 6), TensorKeys(unit(200, 6)), 3)
        assert torch.get_num_threads() == 2
        with pytest.raises(ValueError, match="not finite"):
            nearest(unit(40, 6), TensorKeys(torch.full((200, 6), torch.nan)), 3)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


class Lying(TensorKeys):
    def __len__(self) -> int:
        return len(self.rows) + 1


class Broken(TensorKeys):
    def blocks(self, rows: int) -> Iterator[torch.Tensor]:
        yield self.rows[:rows]
        raise OSError("the disk is gone")


BAD = unit(300, 6)
BAD[217, 3] = torch.nan


@pytest.mark.parametrize(
    ("queries", "keys", "k", "named"),
    [
        (unit(4, 6), unit(30, 6), 50, "got 50 for 30 keys"),
        (unit(4, 6), unit(30, 6), 0, "neighbours"),
        (unit(4, 5), unit(30, 6), 2, r"\(4, 5\)"),
        (unit(4, 6), torch.zeros(6), 2, r"keys .*\(6,\)"),
        (torch.full((1, 6), torch.inf), unit(30, 6), 2, "queries .*not finite"),
        (1e25 * unit(60, 6), 1e25 * unit(30, 6), 2, "overflow float32"),
        (unit(4, 6), BAD, 2, "keys .*not finite.* 217"),
    ],
)
def test_invalid_queries_and_keys_are_refused(queries: torch.Tensor, keys: torch.Tensor, k: int, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        sized(SIZES[1], queries, TensorKeys(keys), k)


def test_invalid_devices_and_sources_of_keys_are_refused() -> None:
    queries = unit(4, 6)
    with pytest.raises(ValueError, match="devices"):
        nearest(queries, TensorKeys(unit(30, 6)), 2, devices=())
    with pytest.raises(ValueError, match=r"len\(keys\) = 31 rows, got 30"):
        nearest(queries, Lying(unit(30, 6)), 2)
    with pytest.raises(OSError, match="the disk is gone"):
        sized(SIZES[1], queries, Broken(unit(300, 6)), 2)


# ------------------------------------------------------------------ memory


def test_the_search_works_with_a_small_budget() -> None:
    keys, queries = whole_numbers(5000, 8), whole_numbers(300, 8, seed=1)
    found = nearest(queries, TensorKeys(keys), 40, budget=2**20)
    assert torch.equal(found.rows, naive(queries, keys, 40).rows)


def test_a_budget_that_is_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match=r"needs at least \d+ MiB, got a budget of 1.0 MiB: provide more memory"):
        nearest(unit(10, 768), TensorKeys(unit(100, 768)), 50, budget=2**20)


MEMORY = """
import json, sys, torch
from pathlib import Path
from cribo.features.search import TensorKeys, nearest
queries, keys, dim, k, budget = map(int, sys.argv[1:])
torch.set_num_threads(2)

class Repeated:  # keys that take no memory of their own
    def __init__(self): self.dim = dim
    def __len__(self): return keys
    def blocks(self, rows):
        for first in range(0, keys, rows):
            generator = torch.Generator().manual_seed(first)
            yield torch.randn(min(rows, keys - first), dim, generator=generator)

def resident(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field + ":"))

asked = torch.randn(queries, dim)
nearest(asked[:64], TensorKeys(torch.randn(1000, dim)), k)  # libraries set themselves up
for _ in range(2):
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    nearest(asked, Repeated(), k, budget=budget)
    print(resident("VmHWM") - before - 12 * queries * k)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads Linux's own figures")
@pytest.mark.parametrize(
    ("queries", "keys", "dim", "k", "budget", "most"),
    [
        pytest.param(4000, 30_000, 64, 50, 2**30, 100 * 2**20, marks=pytest.mark.endurance),
        pytest.param(30_000, 8_000, 256, 50, 2**31, 150 * 2**20, marks=pytest.mark.endurance),
        (9_000, 9_000, 64, 30, 16 * 2**20, 16 * 2**20),  # 324 MB of similarities
    ],
)
def test_peak_memory_stays_within_the_budget(queries: int, keys: int, dim: int, k: int, budget: int, most: int) -> None:
    """And does not grow with the numbers of queries and keys, except for the result."""
    command = [sys.executable, "-c", MEMORY, *map(str, (queries, keys, dim, k, budget))]
    # Otherwise glibc keeps up to 16 MB of freed memory, depending on the threads.
    environment = {**os.environ, "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_MMAP_THRESHOLD_": "65536"}
    printed = subprocess.check_output(command, env=environment, text=True)
    # The peak depends on the overlap of the workers, so take the larger of two searches.
    measured = max(map(int, printed.split()))
    assert measured < 1.1 * most + 8 * 2**20


# ------------------------------------------------------------------ approximate index


@pytest.fixture(scope="module")
def faiss() -> Any:
    return pytest.importorskip("faiss")


@pytest.mark.usefixtures("faiss")
def test_searching_every_list_is_exact() -> None:
    keys, queries = unit(3000, 16), unit(60, 16, seed=1)
    index = ApproximateIndex(TensorKeys(keys), probes=75)
    exact = nearest(queries, TensorKeys(keys), 10)
    found = index.search(queries, 10)
    assert torch.equal(found.rows, exact.rows)
    torch.testing.assert_close(found.similarity, exact.similarity, atol=1e-6, rtol=0)


@pytest.mark.usefixtures("faiss")
def test_more_probes_increase_recall_and_seeds_are_reproducible() -> None:
    keys, queries = TensorKeys(unit(8000, 16).half()), unit(100, 16, seed=1).half()
    exact = nearest(queries, keys, 10)
    shares = []
    for probes in (1, 4, 50, 200):
        first, second = (ApproximateIndex(keys, probes=probes, seed=3).search(queries, 10) for _ in range(2))
        assert torch.equal(first.rows, second.rows)
        shares.append(recall(first, exact))
    assert shares == sorted(shares)
    assert shares[0] < 0.7
    assert shares[2] > 0.8
    assert shares[3] > 0.999


@pytest.mark.usefixtures("faiss")
def test_more_lists_are_searched_if_keys_are_too_few() -> None:
    keys = TensorKeys(unit(400, 8))
    found = ApproximateIndex(keys, probes=1).search(unit(20, 8, seed=1), 390)
    assert all(len(set(row)) == 390 and min(row) >= 0 for row in found.rows.tolist())
    assert (found.similarity[:, :-1] >= found.similarity[:, 1:]).all()


@pytest.mark.usefixtures("faiss")
def test_equal_keys_in_an_index_are_sorted_by_row() -> None:
    keys = TensorKeys(unit(1, 8).expand(50, -1).contiguous())
    assert ApproximateIndex(keys, probes=1).search(unit(3, 8), 50).rows.tolist() == [list(range(50))] * 3


@pytest.mark.usefixtures("faiss")
def test_errors_of_the_index(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = TensorKeys(unit(100, 8))
    with pytest.raises(ValueError, match="probes"):
        ApproximateIndex(keys, probes=0)
    with pytest.raises(ValueError, match="at least one row"):
        ApproximateIndex(TensorKeys(torch.zeros(0, 8)))
    with pytest.raises(ValueError, match="got 101 for 100 keys"):
        ApproximateIndex(keys).search(unit(2, 8), 101)
    monkeypatch.setattr(search, "available_memory", lambda device: 10)
    with pytest.raises(ValueError, match="exact search"):
        ApproximateIndex(keys)


def test_a_missing_faiss_is_reported_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(ImportError, match=r"pip install .*\[search\]"):
        ApproximateIndex(TensorKeys(unit(10, 4)))


def test_recall_counts_rows_and_ties() -> None:
    exact = Neighbours(torch.tensor([[0.9, 0.8, 0.5], [0.9, 0.8, 0.5]]), torch.tensor([[4, 7, 1], [0, 1, 2]]))
    tied = Neighbours(torch.tensor([[0.9, 0.5, 0.5], [0.9, 0.3, -3.4e38]]), torch.tensor([[4, 9, 8], [0, 5, -1]]))
    assert recall(exact, exact) == 1
    # First query: 4, and 9 and 8, which are as similar as the third neighbour; second query: only 0.
    assert recall(tied, exact) == pytest.approx((1 + 1 / 3) / 2)
    with pytest.raises(ValueError, match=r"got \(2, 2\) and \(2, 3\)"):
        recall(Neighbours(exact.similarity[:, :2], exact.rows[:, :2]), exact)
