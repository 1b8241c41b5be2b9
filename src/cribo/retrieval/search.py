"""Nearest neighbours among many patches: exact search within bounded memory, and an approximate index.

Exact search reads the keys in blocks and keeps the k most similar keys of each query. A fast product, in bfloat16 if
the processor supports it, selects candidates in each block; these are compared in float32.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cribo.devices import multiplies_bfloat16
from cribo.errors import InputError, MissingPackage
from cribo.models.linear import has_amd_processor, linear
from cribo.retrieval.free_memory import available_memory

_GIB = 2**30
_MULTIPLE = 64  # rows of a product are padded to it, so that libraries sum all inner products in the same order
_WIDTH_MULTIPLE = 32  # columns of a bfloat16 operand are padded to it, which is fastest on processors with AMX
_COMPARED_AT_ONCE = 512
_BFLOAT16_DIM = 32  # with fewer dimensions, few keys differ by more than the error of bfloat16
_LARGEST = 1e30  # limit of products of norms, far from overflow
_TINY = 1e-30  # added to norms, since the smallest numbers underflow in bfloat16


class Keys(Protocol):
    """Keys of a search: rows of D numbers, in memory or on disk."""

    dim: int

    def __len__(self) -> int:
        """Return the number of rows."""
        ...

    def blocks(self, rows: int) -> Iterator[Float[Tensor, "m d"]]:
        """Iterate over all rows in order, in blocks of at most `rows`, on the host, as float32 or float16."""
        ...


class TensorKeys:
    """Keys in a single tensor.

    Args:
        rows: (M, D), float32 or float16, on the host.

    Raises:
        ValueError: `rows` is not a matrix.

    Example:
        >>> [len(block) for block in TensorKeys(torch.zeros(5, 2)).blocks(2)]
        [2, 2, 1]
    """

    def __init__(self, rows: Float[Tensor, "m d"]) -> None:
        if rows.ndim != 2:
            raise InputError(f"keys must have shape (M, D), got {tuple(rows.shape)}")
        self.rows = rows
        self.dim = rows.shape[1]

    def __len__(self) -> int:
        return len(self.rows)

    def blocks(self, rows: int) -> Iterator[Float[Tensor, "m d"]]:
        """Iterate over all rows in order, in blocks of at most `rows`."""
        return iter(self.rows.split(rows) if len(self.rows) else ())


def in_blocks(parts: Iterable[Float[Tensor, "_ d"]], rows: int) -> Iterator[Float[Tensor, "m d"]]:
    """Regroup parts of any length into blocks of `rows` rows; the last block may be shorter.

    Example:
        >>> [len(block) for block in in_blocks([torch.zeros(5, 2), torch.zeros(1, 2)], 4)]
        [4, 2]
    """
    gathered: list[Tensor] = []
    waiting = 0
    for part in parts:
        while len(part):
            taken = part[: rows - waiting]
            gathered.append(taken)
            waiting += len(taken)
            part = part[len(taken) :]
            if waiting == rows:
                yield torch.cat(gathered)
                gathered, waiting = [], 0
    if waiting:
        yield torch.cat(gathered)


class Neighbours(NamedTuple):
    """The nearest keys of each query, on the host.

    Attributes:
        similarity: float32, descending.
        rows: int64, row indices of the keys; ties are sorted by row.
    """

    similarity: Float[Tensor, "q k"]
    rows: Int[Tensor, "q k"]


# ------------------------------------------------------------------ memory


@dataclass(frozen=True)
class SearchPlan:
    """Block sizes of an exact search, and its memory.

    Attributes:
        query_chunk: number of queries per pass over the keys; all queries on the CPU, where the result is written in
            place.
        query_block: number of queries that a worker compares with a block of keys at once.
        key_block: number of keys read and compared at once.
        workers: number of threads on the CPU; 1 on a GPU.
        passes: number of passes over the keys.
        device_bytes: peak memory on each device in bytes, without the result on the CPU (12 bytes per neighbour) and
            without buffers of `Keys.blocks`, except the block itself.
    """

    query_chunk: int
    query_block: int
    key_block: int
    workers: int
    passes: int
    device_bytes: int


def plan_search(
    num_queries: int,
    num_keys: int,
    dim: int,
    neighbours: int,
    *,
    key_bytes: int = 4,
    budget: int,
    device: torch.device | str = "cpu",
    workers: int | None = None,
) -> SearchPlan:
    """Choose block sizes so that a search of any size stays within a memory budget.

    Args:
        num_queries: Q.
        num_keys: M.
        dim: D.
        neighbours: k.
        key_bytes: size of a number in the keys, in bytes.
        budget: memory on each device, in bytes.
        device: type of the devices.
        workers: number of threads on the CPU; by default, PyTorch's number of threads.

    Raises:
        ValueError: a number is below 1, or the budget is too small for the smallest blocks.

    Example:
        >>> plan = plan_search(2_700_000, 27_000_000, 384, 50, budget=2 * 2**30, workers=2)
        >>> plan.passes, plan.device_bytes < 100 * 2**20
        (1, True)
    """
    numbers = {"num_queries": num_queries, "num_keys": num_keys, "dim": dim, "neighbours": neighbours}
    for name, value in (*numbers.items(), ("key_bytes", key_bytes)):
        if value < 1:
            raise InputError(f"{name} must be >= 1, got {value}")
    device = torch.device(device)
    on_cpu, dtype = device.type == "cpu", _fast_dtype(device, dim)
    query_block, key_block = (256, 8192) if on_cpu else (1024, 65536)
    query_block = min(query_block, _up_to_multiple(num_queries, _MULTIPLE))
    key_block = min(key_block, _up_to_multiple(num_keys, _MULTIPLE))
    threads = (workers or torch.get_num_threads()) if on_cpu else 1
    per_query = 0 if on_cpu else 4 * dim + 12 * neighbours  # the query and its neighbours on a GPU

    def fixed() -> int:
        candidates = min(_COMPARED_AT_ONCE, key_block)
        worker = (
            query_block * key_block * dtype.itemsize  # products
            + candidates * dim * 4  # candidates
            + query_block * candidates * 90  # similarities of the candidates, and temporaries of _QueryBlock.keep
            + query_block * neighbours * 50  # neighbours before and after
        )
        copied = 0 if on_cpu and key_bytes == 4 else 4 * dim
        # Two blocks: one in use, one being read.
        return threads * worker + 2 * key_block * (key_bytes * dim + copied + dtype.itemsize * _width(dim, dtype))

    while fixed() > budget // 2 and key_block > 512:
        key_block //= 2
    while fixed() > budget // 2 and query_block > 64:
        query_block //= 2
    while fixed() > budget // 2 and threads > 1:
        threads -= 1
    if (least := fixed() + per_query) > budget:
        raise InputError(
            f"a search for {neighbours} neighbours in {dim} dimensions needs at least {math.ceil(least / 2**20)} MiB, "
            f"got a budget of {budget / 2**20:.1f} MiB: provide more memory, or search for fewer neighbours"
        )
    chunk = min(num_queries, (budget - fixed()) // per_query) if per_query else num_queries
    passes = math.ceil(num_queries / chunk)
    chunk = math.ceil(num_queries / passes)
    return SearchPlan(chunk, query_block, key_block, threads, passes, fixed() + per_query * chunk)


def _up_to_multiple(number: int, of: int) -> int:
    return -(-number // of) * of


def _width(dim: int, dtype: torch.dtype) -> int:
    """Return the columns of an operand of the fast product: D, and two for the threshold, padded."""
    return _up_to_multiple(dim + 2, _WIDTH_MULTIPLE if dtype == torch.bfloat16 else 1)


# ------------------------------------------------------------------ exact search


@torch.no_grad()
def nearest(
    queries: Float[Tensor, "q d"],
    keys: Keys,
    neighbours: int,
    *,
    devices: Sequence[torch.device | str] = ("cpu",),
    plan: SearchPlan | None = None,
    progress: Callable[[int], None] | None = None,
) -> Neighbours:
    """Find the k keys with the largest inner product with each query, by exact search.

    The inner product is the cosine similarity if all rows have unit length. Ties in float32 are sorted by row. Since
    the last bits depend on the matrix library, keys whose similarities differ by rounding errors may be ordered
    differently on another device or with another plan. PyTorch's setting for float32 products on GPUs (TF32) applies.

    Args:
        queries: (Q, D), float32 or float16.
        keys: the keys to search; each block is read once per pass.
        neighbours: k.
        devices: one or more devices of the same type, which share the queries; a device may be given several times.
        plan: block sizes; by default, chosen for four fifths of the free memory.
        progress: called with the number of compared keys, at most `len(keys)` regardless of the number of passes.

    Raises:
        ValueError: k is below 1 or above the number of keys, `devices` is empty or has several types, the dimension of
            the queries differs from that of the keys, values are not finite or too large for float32 products, or
            memory is insufficient.

    Example:
        >>> keys = TensorKeys(torch.tensor([[0.0, 1.0], [0.6, 0.8], [0.6, -0.8]]))
        >>> found = nearest(torch.tensor([[1.0, 0.0]]), keys, 2)
        >>> found.rows.tolist(), [round(value, 2) for value in found.similarity[0].tolist()]
        ([[1, 2]], [0.6, 0.6])
    """
    places = [torch.device(device) for device in devices]
    _check(queries, len(keys), keys.dim, neighbours)
    if len({place.type for place in places}) != 1:
        raise InputError(f"devices must be one or more devices of the same type, got {list(map(str, places))}")
    found = _no_neighbours(len(queries), neighbours, "cpu")
    if not len(queries):
        return found
    plan = plan or _default_plan(queries, keys, neighbours, places)
    chunks = [part.split(plan.query_chunk) for part in (queries, *found)]
    threads = torch.get_num_threads()
    try:
        for number, (chunk, similarity, rows) in enumerate(zip(*chunks, strict=True)):

            def report(compared: int, number: int = number) -> None:
                if progress is not None:
                    progress((number * len(keys) + compared) // len(chunks[0]))

            _search_chunk(chunk, keys, Neighbours(similarity, rows), plan, places, report)
    finally:
        torch.set_num_threads(threads)  # workers set the number, which PyTorch keeps globally, to 1
    return found


def _check(queries: Tensor, num_keys: int, dim: int, neighbours: int) -> None:
    if queries.ndim != 2 or queries.shape[1] != dim:
        raise InputError(f"queries must have shape (Q, {dim}), like the keys, got {tuple(queries.shape)}")
    if neighbours < 1:
        raise InputError(f"neighbours must be >= 1, got {neighbours}")
    if neighbours > num_keys:
        raise InputError(
            f"neighbours must be <= the number of keys, got {neighbours} for {num_keys} keys: search for fewer "
            "neighbours, or among more images (a smaller memory ratio)"
        )
    for part in queries.split(1024):
        if not part.isfinite().all():
            raise InputError("queries contain values that are not finite: remove these rows")


def _default_plan(queries: Tensor, keys: Keys, neighbours: int, devices: Sequence[torch.device]) -> SearchPlan:
    """Plan for four fifths of the least free memory of a device, divided by how often it is listed."""
    free = min(available_memory(device) // devices.count(device) for device in devices)
    workers = max(1, torch.get_num_threads() // len(devices))
    return plan_search(
        len(queries), len(keys), keys.dim, neighbours, budget=free * 4 // 5, device=devices[0], workers=workers
    )


def _no_neighbours(queries: int, neighbours: int, device: torch.device | str) -> Neighbours:
    return Neighbours(
        torch.full((queries, neighbours), -torch.inf, device=device),
        torch.zeros(queries, neighbours, dtype=torch.long, device=device),
    )


def _search_chunk(
    queries: Float[Tensor, "q d"],
    keys: Keys,
    found: Neighbours,
    plan: SearchPlan,
    devices: Sequence[torch.device],
    report: Callable[[int], None],
) -> None:
    """Compare queries with all keys in one pass, and write their neighbours to `found`."""
    threads = len(devices) * plan.workers
    count = math.ceil(len(queries) / plan.query_block / threads) * threads  # equal numbers of blocks per thread
    size = math.ceil(len(queries) / count)
    parts = zip(*(part.split(size) for part in (queries, *found)), strict=True)
    blocks = [
        _QueryBlock(part, Neighbours(similarity, rows), device)
        for (part, similarity, rows), device in zip(parts, itertools.cycle(devices), strict=False)
    ]
    dtype = _fast_dtype(devices[0], keys.dim)
    loaded = {
        device: (_KeyBlock(plan, keys.dim, dtype, device), _KeyBlock(plan, keys.dim, dtype, device))
        for device in devices
    }
    idle = {device: SimpleQueue() for device in devices}
    for device in devices:
        for _ in range(plan.workers):
            idle[device].put(_Worker(plan, keys.dim, dtype, device))
    source = keys.blocks(plan.key_block)

    def read(number: int, first: int) -> int:
        blocks = [pair[number % 2] for pair in loaded.values()]
        for block in blocks:
            block.rows = None  # free the previous block
        rows = next(source, None)
        if rows is None:
            return 0
        for block in blocks:
            block.load(rows, first)
        return len(rows)

    def compare(block: _QueryBlock, number: int) -> None:
        worker = idle[block.device].get()
        try:
            worker.compare(block, loaded[block.device][number % 2])
        finally:
            idle[block.device].put(worker)

    # Single-threaded workers need no barriers; an additional thread reads ahead.
    with ThreadPoolExecutor(threads + 1, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        compared = 0
        upcoming = pool.submit(read, 0, 0)
        for number in itertools.count():
            report(compared)
            if not (length := upcoming.result()):
                break
            compared += length
            upcoming = pool.submit(read, number + 1, compared)
            list(pool.map(compare, blocks, itertools.repeat(number)))
    if compared != len(keys):
        raise InputError(f"keys.blocks must return len(keys) = {len(keys)} rows, got {compared}")
    for block in blocks:
        block.write()


def _fast_dtype(device: torch.device, dim: int) -> torch.dtype:
    """Return the data type of the product that selects candidates."""
    fast = device.type == "cpu" and multiplies_bfloat16() and dim >= _BFLOAT16_DIM
    return torch.bfloat16 if fast else torch.float32


class _KeyBlock:
    """Reusable buffers for a block of keys on a device, in float32 and as an operand of the fast product.

    Attributes:
        rows: (M, D), float32; None once they are no longer needed.
        operand: (M, >= D + 2), the rows, followed by two columns of ones and zero padding.
        first: index of the first row among all keys.
        norm: largest norm of a row.
    """

    def __init__(self, plan: SearchPlan, dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self._operand = torch.zeros(plan.key_block, _width(dim, dtype), dtype=dtype, device=device)
        self._operand[:, dim : dim + 2] = 1
        self._copy = torch.empty(plan.key_block, dim, device=device)
        self.rows: Tensor | None = None

    @torch.no_grad()
    def load(self, rows: Float[Tensor, "m d"], first: int) -> None:
        """Load the next keys.

        Raises:
            ValueError: values are not finite.
        """
        self.first = first
        on_device = rows.dtype == torch.float32 and rows.device == self._copy.device
        self.rows = rows if on_device else self._copy[: len(rows)].copy_(rows)
        self.operand = self._operand[: len(rows)]
        self.operand[:, : rows.shape[1]] = self.rows
        self.norm = self.rows.norm(dim=1).max()
        if not self.norm.isfinite() and not rows.isfinite().all():
            row = first + int((~rows.isfinite()).any(dim=1).nonzero()[0])
            raise InputError(f"keys contain values that are not finite, first in row {row}: remove this row")


class _QueryBlock:
    """A block of queries and their nearest neighbours so far, which are updated in place on the CPU.

    Attributes:
        queries: (Q, D).
        best: the neighbours, by descending similarity; -inf marks missing ones.
    """

    def __init__(self, queries: Float[Tensor, "q d"], found: Neighbours, device: torch.device) -> None:
        self.device, self._found = device, found
        self.queries = queries.to(device)
        self.best = found if device.type == "cpu" else _no_neighbours(len(queries), found.rows.shape[1], device)

    def write(self) -> None:
        """Copy the neighbours to the CPU."""
        for out, part in zip(self._found, self.best, strict=True):
            if out is not part:
                out.copy_(part)

    def keep(self, similarity: Float[Tensor, "q m"], rows: Int[Tensor, " m"]) -> None:
        """Update the neighbours with further keys, which must be in ascending order of their rows."""
        k = self.best.rows.shape[1]
        # Ties go to the first key.
        query, column = (similarity > self.best.similarity[:, -1:]).nonzero(as_tuple=True)
        if not len(query):
            return
        owners, owner, counts = query.unique_consecutive(return_inverse=True, return_counts=True)
        place = torch.arange(k, k + len(query), device=self.device) - (counts.cumsum(0) - counts)[owner]
        offered = similarity.new_full((len(owners), k + int(counts.max())), -torch.inf)
        offered_rows = rows.new_zeros(offered.shape)
        offered[:, :k], offered_rows[:, :k] = self.best.similarity[owners], self.best.rows[owners]
        offered[owner, place], offered_rows[owner, place] = similarity[query, column], rows[column]
        best, order = offered.sort(dim=1, descending=True, stable=True)
        self.best.similarity[owners] = best[:, :k]
        self.best.rows[owners] = offered_rows.gather(1, order[:, :k])


class _Worker:
    """Reusable buffers of one thread."""

    def __init__(self, plan: SearchPlan, dim: int, dtype: torch.dtype, device: torch.device) -> None:
        queries, candidates = _up_to_multiple(plan.query_block, _MULTIPLE), min(_COMPARED_AT_ONCE, plan.key_block)
        candidates = _up_to_multiple(candidates, _MULTIPLE)
        self._queries = torch.zeros(queries, dim, device=device)
        self._operand = torch.zeros(queries, _width(dim, dtype), dtype=dtype, device=device)
        self._products = torch.empty(plan.key_block * queries, dtype=dtype, device=device).view(plan.key_block, queries)
        self._candidates = torch.zeros(candidates, dim, device=device)
        self._similarity = torch.empty(queries, candidates, device=device)
        # |q·k - q'·k'| <= |q - q'||k| + |q'||k - k'|, and rounding to bfloat16 changes a row by at most 2^-9 of its
        # norm. A GPU may round to TF32. Sums in float32 add a rounding error.
        rounds = dtype == torch.bfloat16 or device.type != "cpu"
        self._error = rounds * 2**-8 + dim * 2**-22

    @torch.no_grad()
    def compare(self, block: _QueryBlock, keys: _KeyBlock) -> None:
        """Update the neighbours of a block of queries with a block of keys."""
        count = len(block.queries)
        self._queries[:count] = block.queries
        assert keys.rows is not None
        candidates = self._find_candidates(block, keys)
        # Nearly all of the first keys become neighbours, so small blocks take less time and memory.
        size = _MULTIPLE if keys.first == 0 else len(self._candidates)
        while len(candidates):
            part, candidates = candidates[:size], candidates[size:]
            size = min(2 * size, len(self._candidates))
            torch.index_select(keys.rows, 0, part, out=self._candidates[: len(part)])
            filled = _up_to_multiple(len(part), _MULTIPLE)
            similarity = _multiply(self._queries, self._candidates[:filled], self._similarity[:, :filled])
            block.keep(similarity[:count, : len(part)], part + keys.first)

    def _find_candidates(self, block: _QueryBlock, keys: _KeyBlock) -> Int[Tensor, " n"]:
        """Return the keys that may be a neighbour of any query, in ascending order.

        Raises:
            ValueError: products may overflow.
        """
        count, dim = block.queries.shape
        queries = self._queries[:count]
        sizes = (queries.norm(dim=1) + _TINY) * (keys.norm + _TINY)
        if not (sizes < _LARGEST).all():
            raise InputError("similarities overflow float32: normalise queries and keys to unit length")
        threshold = (block.best.similarity[:, -1] - sizes * self._error).clamp(min=-_LARGEST)
        # Subtract the threshold within the product, split into two columns to reduce its rounding error.
        self._operand[:count, :dim] = queries
        self._operand[:count, dim] = -threshold
        self._operand[:count, dim + 1] = -threshold - self._operand[:count, dim]
        self._operand[count:] = 0
        above = _multiply(keys.operand, self._operand, self._products[: len(keys.operand)])
        # The sign of a float equals that of its bits as an integer, and integer maxima are several times as fast.
        bits = torch.int16 if above.dtype == torch.bfloat16 else torch.int32
        return (above.view(bits).amax(dim=1) > 0).nonzero()[:, 0]


def _multiply(rows: Float[Tensor, "m d"], columns: Float[Tensor, "n d"], out: Float[Tensor, "m n"]) -> Tensor:
    """Return `rows @ columns.mT`, in `out` except with the library that is faster on AMD processors."""
    if rows.dtype == torch.float32 and rows.device.type == "cpu" and has_amd_processor():
        return linear(rows, columns)
    return torch.mm(rows, columns.mT, out=out)


# ------------------------------------------------------------------ approximate search


class ApproximateIndex:
    """Approximate nearest neighbours by an inverted file index of faiss (IVFFlat).

    k-means clusters a sample of the keys, each key is assigned to the list of its most similar centre, and a query is
    compared with the keys in the lists of its `probes` most similar centres. If these contain fewer than k keys,
    further lists are searched.

    Args:
        keys: the keys to search; stored in memory as float32.
        probes: number of lists to search; with all lists, the search is exact.
        lists: number of lists; by default, about 4 times the square root of the number of keys.
        seed: seed of the sample and of k-means.

    Raises:
        ImportError: faiss is not installed.
        ValueError: a number is out of range, or the index does not fit into free memory; raised before it is built.

    Example:
        >>> index = ApproximateIndex(TensorKeys(torch.eye(100)), probes=2, lists=2)
        >>> index.search(torch.eye(100)[5:7], 1).rows.tolist()
        [[5], [6]]
    """

    def __init__(self, keys: Keys, *, probes: int = 32, lists: int | None = None, seed: int = 0) -> None:
        self._faiss = _import_faiss()
        if not len(keys):
            raise InputError("keys must contain at least one row, got 0")
        # k-means needs some tens of keys for each centre.
        lists = lists if lists is not None else max(1, min(round(4 * math.sqrt(len(keys))), len(keys) // 40))
        for name, value, most in (("lists", lists, len(keys)), ("probes", probes, None)):
            if value < 1 or (most is not None and value > most):
                raise InputError(f"{name} must be >= 1{'' if most is None else f' and <= {most}'}, got {value}")
        self.lists = lists
        self.probes = min(probes, lists)
        sample = min(len(keys), 64 * lists)
        self.bytes = _index_bytes(len(keys), keys.dim, sample)
        if self.bytes > (free := available_memory("cpu")):
            raise InputError(
                f"an index of {len(keys)} keys may need {self.bytes / _GIB:.1f} GiB, but only {free / _GIB:.1f} GiB "
                "are free: use exact search, or search among fewer images"
            )
        self._index = self._build(keys, sample, seed)

    def search(self, queries: Float[Tensor, "q d"], neighbours: int) -> Neighbours:
        """Return the approximate k nearest keys of each query; ties are sorted by row.

        Raises:
            ValueError: k is below 1 or above the number of keys, or queries have another dimension or are not finite.
        """
        _check(queries, self._index.ntotal, self._index.d, neighbours)
        rows = queries.to("cpu", torch.float32).contiguous()
        probes = self.probes
        similarity, found = self._visit(rows, neighbours, probes)
        while len(short := (found < 0).any(dim=1).nonzero()[:, 0]):
            probes = min(2 * probes, self.lists)
            similarity[short], found[short] = self._visit(rows[short], neighbours, probes)
        found, order = found.sort(dim=1)
        similarity, order = similarity.gather(1, order).sort(dim=1, descending=True, stable=True)
        return Neighbours(similarity, found.gather(1, order))

    def _visit(self, queries: Tensor, neighbours: int, probes: int) -> tuple[Tensor, Tensor]:
        """Search with faiss; missing neighbours have row -1."""
        self._faiss.omp_set_num_threads(torch.get_num_threads())
        parameters = self._faiss.SearchParametersIVF(nprobe=probes)
        similarity, rows = self._index.search(queries.numpy(), neighbours, params=parameters)
        return torch.from_numpy(similarity), torch.from_numpy(rows)

    def _build(self, keys: Keys, sample: int, seed: int) -> Any:
        self._faiss.omp_set_num_threads(torch.get_num_threads())
        centres = self._faiss.IndexFlatIP(keys.dim)
        index = self._faiss.IndexIVFFlat(centres, keys.dim, self.lists, self._faiss.METRIC_INNER_PRODUCT)
        index.cp.seed = seed
        index.cp.min_points_per_centroid = 1  # no warning about small samples
        index.train(_sampled(keys, sample, seed).numpy())
        for block in keys.blocks(_INDEX_BLOCK):
            index.add(block.float().contiguous().numpy())
        return index


_INDEX_BLOCK = 65536


def _index_bytes(rows: int, dim: int, sample: int) -> int:
    # Lists grow by doubling, so up to half of their capacity is unused.
    return 2 * rows * (4 * dim + 8) + 4 * dim * (sample + 2 * min(rows, _INDEX_BLOCK))


def _sampled(keys: Keys, number: int, seed: int) -> Float[Tensor, "n d"]:
    """Sample keys uniformly without replacement, in order."""
    rows = torch.randperm(len(keys), generator=torch.Generator().manual_seed(seed))[:number].sort().values
    parts, first = [], 0
    for block in keys.blocks(_INDEX_BLOCK):
        here = rows[(rows >= first) & (rows < first + len(block))] - first
        parts.append(block[here].float())
        first += len(block)
    return torch.cat(parts)


def _import_faiss() -> Any:
    try:
        import faiss
    except ImportError as error:
        raise MissingPackage("approximate search needs faiss: pip install 'cribo-ssl[search]'") from error
    return faiss


def recall(approximate: Neighbours, exact: Neighbours) -> float:
    """Compute the mean fraction of exact neighbours found by an approximate search.

    Keys as similar as the last exact neighbour, up to rounding, count as found.

    Raises:
        ValueError: the numbers of queries or neighbours differ.
    """
    if approximate.rows.shape != exact.rows.shape:
        raise InputError(
            f"approximate and exact neighbours must have the same shape, got {tuple(approximate.rows.shape)} and "
            f"{tuple(exact.rows.shape)}"
        )
    last = exact.similarity[:, -1:]
    close = approximate.similarity >= last - 1e-6 * last.abs().clamp(min=1)
    return float((close & (approximate.rows >= 0)).double().mean())
