"""Nearest neighbours among many patches: exact search within bounded memory, and an approximate index.

Exact search reads the keys in blocks, and keeps the k best keys of each query. A fast product, in bfloat16 where the
device has it, shows which keys of a block may be among them; those are compared in float32.
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
_MULTIPLE = 64  # rows of a product are a multiple of it, so that libraries sum all inner products in the same order
_WIDTH_MULTIPLE = 32  # numbers of an operand in bfloat16, for which processors with AMX are fastest
_COMPARED_AT_ONCE = 512
_BFLOAT16_DIM = 32  # below, few keys differ by more than the error of bfloat16
_LARGEST = 1e30  # products of norms, far from overflow
_TINY = 1e-30  # added to norms: rounding to bfloat16 loses all of the smallest numbers


class Keys(Protocol):
    """What is searched: rows of D numbers, in memory or on disk."""

    dim: int

    def __len__(self) -> int:
        """Number of rows."""
        ...

    def blocks(self, rows: int) -> Iterator[Float[Tensor, "m d"]]:
        """All rows in order, at most `rows` at once, on the host, float32 or float16; again at every call."""
        ...


class TensorKeys:
    """Rows of one tensor.

    Args:
        rows: (M, D), float32 or float16, on the host.

    Raises:
        ValueError: another shape.

    Example:
        >>> [len(block) for block in TensorKeys(torch.zeros(5, 2)).blocks(2)]
        [2, 2, 1]
    """

    def __init__(self, rows: Float[Tensor, "m d"]) -> None:
        if rows.ndim != 2:
            raise InputError(f"keys must have the shape (M, D), got {tuple(rows.shape)}")
        self.rows = rows
        self.dim = rows.shape[1]

    def __len__(self) -> int:
        return len(self.rows)

    def blocks(self, rows: int) -> Iterator[Float[Tensor, "m d"]]:
        """All rows in order, at most `rows` at once."""
        return iter(self.rows.split(rows) if len(self.rows) else ())


def in_blocks(parts: Iterable[Float[Tensor, "_ d"]], rows: int) -> Iterator[Float[Tensor, "m d"]]:
    """Rows that come in parts of any length, in blocks of `rows`; the last one may be shorter.

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
        rows: int64, which keys; of equally similar ones the smaller row first.
    """

    similarity: Float[Tensor, "q k"]
    rows: Int[Tensor, "q k"]


# ------------------------------------------------------------------ memory


@dataclass(frozen=True)
class SearchPlan:
    """How an exact search is cut into blocks, and the memory that takes.

    Attributes:
        query_chunk: queries searched in one pass over the keys; all of them on the CPU, where the result is written in
            place.
        query_block: queries compared with a block of keys at once, by each worker.
        key_block: keys read, and compared, at once.
        workers: threads on the CPU; a GPU has one.
        passes: how often all keys are read.
        device_bytes: peak on each device, without the result on the CPU (12 bytes per neighbour) and without what the
            keys need to read a block, except the block itself.
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
    """Cut a search into blocks so that it stays within a budget of memory, for any number of queries and keys.

    Args:
        num_queries: Q.
        num_keys: M.
        dim: D.
        neighbours: k.
        key_bytes: bytes of each number in the keys.
        budget: bytes on each device.
        device: kind of device.
        workers: threads on the CPU; by default, PyTorch's number of threads.

    Raises:
        ValueError: a number below 1, or a budget too small for the smallest blocks.

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
    per_query = 0 if on_cpu else 4 * dim + 12 * neighbours  # on a GPU, the query and its neighbours

    def fixed() -> int:
        candidates = min(_COMPARED_AT_ONCE, key_block)
        worker = (
            query_block * key_block * dtype.itemsize  # products
            + candidates * dim * 4  # candidates
            + query_block * candidates * 90  # their similarities, and those that are neighbours with their places
            + query_block * neighbours * 50  # neighbours before and after
        )
        copied = 0 if on_cpu and key_bytes == 4 else 4 * dim
        # One block in use and one being read.
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
            f"got a budget of {budget / 2**20:.1f} MiB: give it more memory, or ask for fewer neighbours"
        )
    chunk = min(num_queries, (budget - fixed()) // per_query) if per_query else num_queries
    passes = math.ceil(num_queries / chunk)
    chunk = math.ceil(num_queries / passes)
    return SearchPlan(chunk, query_block, key_block, threads, passes, fixed() + per_query * chunk)


def _up_to_multiple(number: int, of: int) -> int:
    return -(-number // of) * of


def _width(dim: int, dtype: torch.dtype) -> int:
    """Numbers in an operand of the fast product: a row, and two more for the threshold."""
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
    """Find the keys with the greatest inner product with each query, exactly; the cosine if all have unit length.

    Of equally similar keys the one with the smaller row comes first. That holds for similarities in float32: their last
    bits are the matrix library's, so keys whose similarities differ by rounding alone may change places with another
    device or plan. PyTorch's setting for float32 products on GPUs (TF32) applies.

    Args:
        queries: (Q, D), float32 or float16.
        keys: the rows to search; each block is read once per pass.
        neighbours: k.
        devices: all of one kind; the queries are divided among them. One that is named twice works twice.
        plan: how the search is cut into blocks; by default, within four fifths of the free memory.
        progress: called with the number of keys compared, up to `len(keys)`, whatever the number of passes.

    Raises:
        ValueError: k below 1 or above the number of keys, devices of several kinds or none, queries of another
            dimension, values that are not finite or too large for float32 products, or too little memory.

    Example:
        >>> keys = TensorKeys(torch.tensor([[0.0, 1.0], [0.6, 0.8], [0.6, -0.8]]))
        >>> found = nearest(torch.tensor([[1.0, 0.0]]), keys, 2)
        >>> found.rows.tolist(), [round(value, 2) for value in found.similarity[0].tolist()]
        ([[1, 2]], [0.6, 0.6])
    """
    places = [torch.device(device) for device in devices]
    _check(queries, len(keys), keys.dim, neighbours)
    if len({place.type for place in places}) != 1:
        raise InputError(f"devices must be of one kind, at least one, got {list(map(str, places))}")
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
        torch.set_num_threads(threads)  # each worker computes with one, and PyTorch has one number for all threads
    return found


def _check(queries: Tensor, num_keys: int, dim: int, neighbours: int) -> None:
    if queries.ndim != 2 or queries.shape[1] != dim:
        raise InputError(f"queries must have the shape (Q, {dim}), as the keys have, got {tuple(queries.shape)}")
    if neighbours < 1:
        raise InputError(f"neighbours must be >= 1, got {neighbours}")
    if neighbours > num_keys:
        raise InputError(
            f"neighbours must be <= the number of keys, got {neighbours} for {num_keys} keys: ask for fewer "
            "neighbours, or search among more images (a smaller memory ratio)"
        )
    for part in queries.split(1024):
        if not part.isfinite().all():
            raise InputError("queries hold values that are not finite: leave those rows out")


def _default_plan(queries: Tensor, keys: Keys, neighbours: int, devices: Sequence[torch.device]) -> SearchPlan:
    """Plan within four fifths of the free memory of the device that has least for each time it is named."""
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
    """Compare some queries with all keys, in one pass, and write their neighbours to `found`."""
    threads = len(devices) * plan.workers
    count = math.ceil(len(queries) / plan.query_block / threads) * threads  # as many blocks for each thread
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
            block.rows = None  # the block before the one in use
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

    # Workers with one thread each need no barriers; one more thread reads ahead.
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
        raise InputError(f"keys must give the {len(keys)} rows that they have, got {compared}")
    for block in blocks:
        block.write()


def _fast_dtype(device: torch.device, dim: int) -> torch.dtype:
    """The type of the product that finds candidates."""
    fast = device.type == "cpu" and multiplies_bfloat16() and dim >= _BFLOAT16_DIM
    return torch.bfloat16 if fast else torch.float32


class _KeyBlock:
    """A block of keys on a device, in float32 and as an operand of the fast product; memory that is used again.

    Attributes:
        rows: (M, D), float32; None where they are no longer needed.
        operand: (M, D + 2 and more), the rows, ones in the next two columns, zeros in the others.
        first: row of the first one among all keys.
        norm: the greatest norm of a row.
    """

    def __init__(self, plan: SearchPlan, dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self._operand = torch.zeros(plan.key_block, _width(dim, dtype), dtype=dtype, device=device)
        self._operand[:, dim : dim + 2] = 1
        self._copy = torch.empty(plan.key_block, dim, device=device)
        self.rows: Tensor | None = None

    @torch.no_grad()
    def load(self, rows: Float[Tensor, "m d"], first: int) -> None:
        """Take the next keys.

        Raises:
            ValueError: values that are not finite.
        """
        self.first = first
        on_device = rows.dtype == torch.float32 and rows.device == self._copy.device
        self.rows = rows if on_device else self._copy[: len(rows)].copy_(rows)
        self.operand = self._operand[: len(rows)]
        self.operand[:, : rows.shape[1]] = self.rows
        self.norm = self.rows.norm(dim=1).max()
        if not self.norm.isfinite() and not rows.isfinite().all():
            row = first + int((~rows.isfinite()).any(dim=1).nonzero()[0])
            raise InputError(f"keys hold values that are not finite, first in row {row}: leave that row out")


class _QueryBlock:
    """Some queries and their best neighbours so far, which are written in place on the CPU.

    Attributes:
        queries: (Q, D).
        best: similarities in descending order; -inf where there are no neighbours yet.
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
        """Keep the best of the neighbours so far and of further keys, in the order of their rows."""
        k = self.best.rows.shape[1]
        # Of equal keys the first wins.
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
    """What one thread compares with; memory that is used again."""

    def __init__(self, plan: SearchPlan, dim: int, dtype: torch.dtype, device: torch.device) -> None:
        queries, candidates = _up_to_multiple(plan.query_block, _MULTIPLE), min(_COMPARED_AT_ONCE, plan.key_block)
        candidates = _up_to_multiple(candidates, _MULTIPLE)
        self._queries = torch.zeros(queries, dim, device=device)
        self._operand = torch.zeros(queries, _width(dim, dtype), dtype=dtype, device=device)
        self._products = torch.empty(plan.key_block * queries, dtype=dtype, device=device).view(plan.key_block, queries)
        self._candidates = torch.zeros(candidates, dim, device=device)
        self._similarity = torch.empty(queries, candidates, device=device)
        # |q·k - q'·k'| <= |q - q'||k| + |q'||k - k'|, and rounding to bfloat16 changes a row by at most 2^-9 of its
        # norm. A GPU may round to TF32. Sums in float32 are inexact, too.
        rounds = dtype == torch.bfloat16 or device.type != "cpu"
        self._error = rounds * 2**-8 + dim * 2**-22

    @torch.no_grad()
    def compare(self, block: _QueryBlock, keys: _KeyBlock) -> None:
        """Keep the neighbours among a block of keys."""
        count = len(block.queries)
        self._queries[:count] = block.queries
        assert keys.rows is not None
        candidates = self._find_candidates(block, keys)
        # Nearly all of the first keys are neighbours at first: few at once take less time and memory.
        size = _MULTIPLE if keys.first == 0 else len(self._candidates)
        while len(candidates):
            part, candidates = candidates[:size], candidates[size:]
            size = min(2 * size, len(self._candidates))
            torch.index_select(keys.rows, 0, part, out=self._candidates[: len(part)])
            filled = _up_to_multiple(len(part), _MULTIPLE)
            similarity = _multiply(self._queries, self._candidates[:filled], self._similarity[:, :filled])
            block.keep(similarity[:count, : len(part)], part + keys.first)

    def _find_candidates(self, block: _QueryBlock, keys: _KeyBlock) -> Int[Tensor, " n"]:
        """The keys that may be a neighbour of any query, in ascending order.

        Raises:
            ValueError: products may overflow.
        """
        count, dim = block.queries.shape
        queries = self._queries[:count]
        sizes = (queries.norm(dim=1) + _TINY) * (keys.norm + _TINY)
        if not (sizes < _LARGEST).all():
            raise InputError("similarities overflow float32: normalise queries and keys to unit length")
        threshold = (block.best.similarity[:, -1] - sizes * self._error).clamp(min=-_LARGEST)
        # The threshold is subtracted within the product: as two more numbers, so that little of it is rounded away.
        self._operand[:count, :dim] = queries
        self._operand[:count, dim] = -threshold
        self._operand[:count, dim + 1] = -threshold - self._operand[:count, dim]
        self._operand[count:] = 0
        above = _multiply(keys.operand, self._operand, self._products[: len(keys.operand)])
        # As integers, the bits of floats have the same sign, and their maximum is found several times as fast.
        bits = torch.int16 if above.dtype == torch.bfloat16 else torch.int32
        return (above.view(bits).amax(dim=1) > 0).nonzero()[:, 0]


def _multiply(rows: Float[Tensor, "m d"], columns: Float[Tensor, "n d"], out: Float[Tensor, "m n"]) -> Tensor:
    """`rows @ columns.mT`; in `out`, except by the library that is faster on AMD processors."""
    if rows.dtype == torch.float32 and rows.device.type == "cpu" and has_amd_processor():
        return linear(rows, columns)
    return torch.mm(rows, columns.mT, out=out)


# ------------------------------------------------------------------ approximate search


class ApproximateIndex:
    """Neighbours among the keys of the lists closest to a query: faster than exact search, and not always right.

    k-means on a sample of the keys makes the lists, each key joins the list of the centre it is most similar
    to, and a query is compared with the keys of its `probes` most similar centres (faiss, inverted file with
    whole vectors). Where those hold fewer keys than neighbours are asked for, more lists are visited.

    Args:
        keys: what is searched; held in memory as float32.
        probes: lists that are visited; all of them gives exact search.
        lists: number of lists; about 4 times the root of the number of keys by default.
        seed: of the sample and of k-means.

    Raises:
        ImportError: faiss is not installed.
        ValueError: numbers out of range, or less memory than the index needs, which is said before it is built.

    Example:
        >>> index = ApproximateIndex(TensorKeys(torch.eye(100)), probes=2, lists=2)
        >>> index.search(torch.eye(100)[5:7], 1).rows.tolist()
        [[5], [6]]
    """

    def __init__(self, keys: Keys, *, probes: int = 32, lists: int | None = None, seed: int = 0) -> None:
        self._faiss = _import_faiss()
        if not len(keys):
            raise InputError("keys must hold one row at least, got 0")
        # k-means wants some tens of keys for each centre.
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
                f"an index of {len(keys)} keys may need {self.bytes / _GIB:.1f} GiB, {free / _GIB:.1f} GiB are "
                "free: use exact search, or search among fewer images"
            )
        self._index = self._build(keys, sample, seed)

    def search(self, queries: Float[Tensor, "q d"], neighbours: int) -> Neighbours:
        """The most similar keys that are found for each query; of equally similar ones the smaller row first.

        Raises:
            ValueError: k below 1 or above the number of keys, queries of another dimension or not finite.
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
        """Faiss's own search; rows are -1 where it found too few."""
        self._faiss.omp_set_num_threads(torch.get_num_threads())
        parameters = self._faiss.SearchParametersIVF(nprobe=probes)
        similarity, rows = self._index.search(queries.numpy(), neighbours, params=parameters)
        return torch.from_numpy(similarity), torch.from_numpy(rows)

    def _build(self, keys: Keys, sample: int, seed: int) -> Any:
        self._faiss.omp_set_num_threads(torch.get_num_threads())
        centres = self._faiss.IndexFlatIP(keys.dim)
        index = self._faiss.IndexIVFFlat(centres, keys.dim, self.lists, self._faiss.METRIC_INNER_PRODUCT)
        index.cp.seed = seed
        index.cp.min_points_per_centroid = 1  # we take what sample there is
        index.train(_sampled(keys, sample, seed).numpy())
        for block in keys.blocks(_INDEX_BLOCK):
            index.add(block.float().contiguous().numpy())
        return index


_INDEX_BLOCK = 65536


def _index_bytes(rows: int, dim: int, sample: int) -> int:
    # Lists grow by doubling, so up to half of their room is empty.
    return 2 * rows * (4 * dim + 8) + 4 * dim * (sample + 2 * min(rows, _INDEX_BLOCK))


def _sampled(keys: Keys, number: int, seed: int) -> Float[Tensor, "n d"]:
    """Keys drawn uniformly without repetition, in order."""
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
    """Mean share of the exact neighbours that an approximate search has found.

    A key that is as similar as the last exact neighbour, to rounding, counts as found: it was a tie.

    Raises:
        ValueError: neighbours of different queries, or different numbers of them.
    """
    if approximate.rows.shape != exact.rows.shape:
        raise InputError(
            f"both must have the same queries and neighbours, got {tuple(approximate.rows.shape)} and "
            f"{tuple(exact.rows.shape)}"
        )
    last = exact.similarity[:, -1:]
    close = approximate.similarity >= last - 1e-6 * last.abs().clamp(min=1)
    return float((close & (approximate.rows >= 0)).double().mean())
