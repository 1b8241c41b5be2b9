"""Nearest neighbours among many patches: exact search within bounded memory, and an approximate index.

Exact search compares block after block of keys with block after block of queries and keeps the k best keys of each
query. A fast product, with a bound on its error, rules out most keys of a block; the others are compared in float32. A
neighbour is held as one int64 that orders first by similarity, then by row, the smaller row first, so that the greatest
k are the result, ties included.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cribo.devices import multiplies_bfloat16
from cribo.errors import InputError, MissingPackage
from cribo.models.linear import linear
from cribo.retrieval.free_memory import available_memory

_GIB = 2**30
_ROW_MASK = 2**32 - 1
_NOTHING = torch.iinfo(torch.int64).min
_LOWEST = -1e38  # below all similarities, and finite in bfloat16
_TINY = 1e-30  # products below the smallest normal number may be lost
_RUN = 16  # keys whose greatest similarity is looked at first
_QUERY_MULTIPLE, _KEY_MULTIPLE = 16, 64  # shapes for which libraries sum all inner products in the same order
_COMPARED_AT_ONCE = 1024  # candidates compared in float32 at once
_RUNS_AT_ONCE = 8192  # looked at for neighbours
_ROUNDED_AT_ONCE = 256  # rows, so that copies stay in the cache
_BFLOAT16_DIM, _BFLOAT16_QUERIES, _BFLOAT16_KEYS = 64, 512, 2048  # (keys per neighbour) below, float32 is faster


class Keys(Protocol):
    """The rows to search, in memory or on disk."""

    dim: int

    def __len__(self) -> int:
        """Return the number of rows."""
        ...

    def blocks(self, rows: int) -> Iterator[Float[Tensor, "m d"]]:
        """Yield all rows in order, at most `rows` at once, as float32 or float16 on the CPU; restarts at each call."""
        ...


class TensorKeys:
    """Rows of one tensor.

    Args:
        rows: (M, D), float32 or float16, on the CPU.

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
        """Yield all rows in order, at most `rows` at once."""
        return iter(self.rows.split(rows) if len(self.rows) else ())


def in_blocks(parts: Iterable[Float[Tensor, "_ d"]], rows: int) -> Iterator[Float[Tensor, "m d"]]:
    """Regroup parts of any length into blocks of `rows` rows; the last one may be shorter.

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
    """The nearest keys of each query, on the CPU.

    Attributes:
        similarity: float32, descending.
        rows: int64, rows of the keys; of equally similar ones the smaller row first.
    """

    similarity: Float[Tensor, "q k"]
    rows: Int[Tensor, "q k"]


# ------------------------------------------------------------------ memory


@dataclass(frozen=True)
class SearchPlan:
    """How an exact search is cut into blocks, and the memory that takes.

    Attributes:
        query_chunk: queries searched in one pass over the keys.
        query_block: queries compared with a block of keys at once, by each worker.
        key_block: keys read, and compared, at once.
        workers: threads on the CPU; a GPU has one.
        passes: how often all keys are read.
        device_bytes: peak on each device, without the result (12 bytes per neighbour, on the CPU) and without what the
            keys need to read a block.
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

    Blocks are as large as is fast, or smaller until they leave three quarters of the budget to the queries.

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
        >>> plan.passes, plan.device_bytes < 2 * 2**30
        (4, True)
    """
    numbers = {"num_queries": num_queries, "num_keys": num_keys, "dim": dim, "neighbours": neighbours}
    for name, value in (*numbers.items(), ("key_bytes", key_bytes)):
        if value < 1:
            raise InputError(f"{name} must be >= 1, got {value}")
    on_cpu = torch.device(device).type == "cpu"
    # On the CPU, keys that may be neighbours of any query of a block are few; on a GPU, each launch gets enough to do.
    queries, keys = (128, 16384) if on_cpu else (1024, 65536)
    threads = (workers or torch.get_num_threads()) if on_cpu else 1
    per_query = 6 * dim + 8 * neighbours + 12  # the query, also rounded, its neighbours so far, and three numbers

    def needed() -> tuple[int, int, int]:
        rows, columns = (
            min(most, _up_to_multiple(number, multiple))
            for most, number, multiple in (
                (queries, num_queries, _QUERY_MULTIPLE),
                (keys, num_keys, _KEY_MULTIPLE),
            )
        )
        compared = min(_COMPARED_AT_ONCE, _up_to_multiple(columns, _KEY_MULTIPLE))
        worker = (
            10 * rows * columns  # the product in float32, a copy of its best runs, and which of them are candidates
            + 4 * compared * dim  # candidates in float32
            + 48 * rows * compared  # their similarities, and those that are neighbours
            + 48 * rows * neighbours  # neighbours before and after
        )
        # A block of keys in use and one being read: as given, in float32, and rounded.
        return rows, columns, threads * worker + 2 * columns * dim * (key_bytes + 6)

    while (fixed := needed()[2]) + per_query * min(queries, num_queries) * threads > budget // 4:
        if (queries, keys) == (32, 512) and threads == 1:
            break
        if threads > 1 and keys <= 2048:
            threads -= 1
        else:
            queries, keys = max(32, queries // 2), max(512, keys // 2)
    rows, columns, fixed = needed()
    if fixed + per_query * rows > budget:
        raise InputError(
            f"a search for {neighbours} neighbours in {dim} dimensions needs at least "
            f"{math.ceil((fixed + per_query * rows) / 2**20)} MiB, got a budget of {budget / 2**20:.1f} MiB: give it "
            "more memory, or ask for fewer neighbours"
        )
    passes = math.ceil(num_queries / ((budget - fixed) // per_query))
    chunk = math.ceil(num_queries / passes)
    return SearchPlan(chunk, rows, columns, threads, passes, fixed + per_query * chunk)


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
    device or plan. Shapes of products are such that equal keys are equally similar wherever they are.

    On processors with instructions for bfloat16, products in it rule out most keys; a bound on their error ensures
    that no neighbour is lost. Where features are so alike that few keys are ruled out, all are compared in float32.
    PyTorch's settings for float32 products on GPUs (TF32) apply.

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
    found = Neighbours(torch.empty(len(queries), neighbours), torch.empty(len(queries), neighbours, dtype=torch.long))
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
    if num_keys >= _ROW_MASK:
        raise InputError(f"at most {_ROW_MASK - 1} keys can be searched, got {num_keys}: search them in parts")
    for part in queries.split(65536):
        if not part.isfinite().all():
            raise InputError("queries hold values that are not finite: leave those rows out")


def _default_plan(queries: Tensor, keys: Keys, neighbours: int, devices: Sequence[torch.device]) -> SearchPlan:
    """Plan within four fifths of the free memory of the device that has least for each time it is named."""
    result = 12 * len(queries) * neighbours if devices[0].type == "cpu" else 0
    free = min((available_memory(device) - result) // devices.count(device) for device in devices)
    workers = max(1, torch.get_num_threads() // len(devices))
    return plan_search(
        len(queries), len(keys), keys.dim, neighbours, budget=free * 4 // 5, device=devices[0], workers=workers
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
    dtype = _first_dtype(queries, len(keys), found.rows.shape[1], devices[0])
    size = math.ceil(len(queries) / count)
    blocks = [
        _QueryBlock(part, found.rows.shape[1], devices[number % len(devices)], dtype)
        for number, part in enumerate(queries.split(size))
    ]
    places = {block.device for block in blocks}
    source = keys.blocks(plan.key_block)

    def read(first: int) -> dict[torch.device, _KeyBlock]:
        rows = next(source, None)
        return {} if rows is None else {place: _KeyBlock(rows, first, place, dtype) for place in places}

    def compare(block: _QueryBlock, keys: dict[torch.device, _KeyBlock]) -> None:
        block.compare(keys[block.device])

    # Products of one thread each, on many blocks, need no barriers; one more thread reads ahead.
    with ThreadPoolExecutor(threads + 1, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        compared = 0
        upcoming = pool.submit(read, 0)
        while staged := upcoming.result():
            report(compared)
            compared += len(staged[blocks[0].device])
            upcoming = pool.submit(read, compared)
            list(pool.map(compare, blocks, itertools.repeat(staged)))
        if compared != len(keys):
            raise InputError(f"keys must give the {len(keys)} rows that they have, got {compared}")
    for block, *out in zip(blocks, found.similarity.split(size), found.rows.split(size), strict=True):
        for part, result in zip(out, block.result(), strict=True):
            part.copy_(result)
    report(compared)


class _KeyBlock:
    """Consecutive keys on a device, and rounded for the first product.

    Args:
        rows: (M, D).
        first: row of the first one among all keys.
        device: where they are compared.
        dtype: of the first product.

    Raises:
        ValueError: values that are not finite.
    """

    def __init__(self, rows: Float[Tensor, "m d"], first: int, device: torch.device, dtype: torch.dtype) -> None:
        self.first, self.count = first, len(rows)
        missing = -len(rows) % _KEY_MULTIPLE
        self.rows = rows.to(device).float()
        self.rows = F.pad(self.rows, (0, 0, 0, missing)) if missing else self.rows
        norms = self.rows.norm(dim=1)
        if not norms.isfinite().all() and not rows.isfinite().all():
            row = first + int((~rows.isfinite()).any(dim=1).nonzero()[0])
            raise InputError(f"keys hold values that are not finite, first in row {row}: leave that row out")
        self.rounded, errors = _rounded(self.rows, dtype)
        self.norm, self.error = norms.max(), errors.max()

    def __len__(self) -> int:
        return self.count


class _QueryBlock:
    """Some queries and the best neighbours they have met so far.

    Args:
        queries: (Q, D).
        neighbours: k.
        device: where they are compared.
        dtype: of the first product.

    Attributes:
        best: (Q, k) neighbours so far, as `_ordered` writes them.
        least: (Q,) the least similarity that a further neighbour must have; keys come in the order of their rows.
    """

    def __init__(
        self, queries: Float[Tensor, "q d"], neighbours: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.device, self.count = device, len(queries)
        self.queries = F.pad(queries.to(device).float(), (0, 0, 0, -len(queries) % _QUERY_MULTIPLE))
        self.norms = self.queries.norm(dim=1)
        self.rounded, self.errors = _rounded(self.queries, dtype)
        self.best = torch.full((len(self.queries), neighbours), _NOTHING, device=device)
        self.least = torch.full((len(self.queries),), _LOWEST, device=device)
        self.least[self.count :] = torch.inf  # rows that fill up the block have no neighbours

    @torch.no_grad()
    def compare(self, keys: _KeyBlock) -> None:
        """Take in the neighbours among the next keys."""
        if keys.rounded is keys.rows:
            similarity = _product(keys.rows, self.queries)
            similarity[len(keys) :] = -torch.inf  # rows that fill up the block
            self._raise_least(similarity, 0)
            self._take(similarity, torch.arange(len(similarity), device=self.device) + keys.first)
            return
        for part in self._candidates(keys).split(_COMPARED_AT_ONCE):
            filled = F.pad(part, (0, -len(part) % _KEY_MULTIPLE))
            similarity = keys.rows[filled] @ self.queries.mT
            similarity[len(part) :] = -torch.inf
            self._take(similarity, filled + keys.first)

    def _candidates(self, keys: _KeyBlock) -> Int[Tensor, " n"]:
        """Keys of the block that may be a neighbour of any query, ascending."""
        # |q·k - q'·k'| <= |q - q'| |k| + |q'| |k - k'|, and sums in float32 are inexact, here and in `compare`.
        sizes = (self.norms + self.errors) * (keys.norm + keys.error)
        if not (sizes < -_LOWEST / 10).all():  # sums in float32 may overflow
            return torch.arange(len(keys), device=self.device)
        error = self.errors * keys.norm + (self.norms + self.errors) * keys.error
        error += sizes * _sum_error(self.queries.shape[1], self.device) + _TINY
        similarity = _product(keys.rounded, self.rounded)
        similarity[len(keys) :] = -torch.inf
        self._raise_least(similarity, error)
        runs = similarity.unflatten(0, (-1, _RUN))
        # Rounding keeps the order: a bound that is rounded like the product remains a bound.
        floor = (self.least - error).to(similarity.dtype)
        if floor.dtype == torch.bfloat16 and (floor > 0).all():
            # The bits of positive numbers have the same order, and integers are compared several times as fast.
            runs, floor = runs.view(torch.int16), floor.view(torch.int16)
        run = _any(runs.amax(dim=1) >= floor).nonzero()[:, 0]
        which, place = _any(runs[run] >= floor).nonzero().unbind(1)
        return run[which] * _RUN + place

    def _raise_least(self, similarity: Float[Tensor, "m q"], error: Float[Tensor, " q"] | int) -> None:
        """Bound the similarity of neighbours where none are known: k runs have k greatest similarities."""
        k = self.best.shape[1]
        if k <= len(similarity) // _RUN and (self.least == _LOWEST).any():
            maxima = similarity.unflatten(0, (-1, _RUN)).amax(dim=1)
            bound = maxima.mT.topk(k, dim=1, sorted=False).values.amin(dim=1).float()
            self.least = self.least.maximum(bound - bound.abs() * torch.finfo(similarity.dtype).eps - error)

    def _take(self, similarity: Float[Tensor, "m q"], rows: Int[Tensor, " m"]) -> None:
        """Take in the neighbours among keys by their similarities; only runs that hold one are looked at."""
        runs = similarity.unflatten(0, (-1, _RUN))
        hits = (runs.amax(dim=1) >= self.least).mT.nonzero()
        for query, run in (part.unbind(1) for part in hits.split(_RUNS_AT_ONCE)):
            values = runs[run, :, query]
            which, place = (values >= self.least[query, None]).nonzero().unbind(1)
            if len(which):
                self._keep(query[which], _ordered(values[which, place], rows[run[which] * _RUN + place]))

    def _keep(self, query: Int[Tensor, " n"], found: Int[Tensor, " n"]) -> None:
        """Keep the best k of those before and those found, which come in the order of the queries."""
        owners, inverse, counts = query.unique_consecutive(return_inverse=True, return_counts=True)
        position = torch.arange(len(found), device=self.device) - (counts.cumsum(0) - counts)[inverse]
        offered = found.new_full((len(owners), int(counts.max())), _NOTHING)
        offered[inverse, position] = found
        best = torch.cat((self.best[owners], offered), dim=1).topk(self.best.shape[1], dim=1, sorted=False).values
        self.best[owners] = best
        worst = best.amin(dim=1)
        # A later key must be better than the worst; an equal one has the larger row.
        least = _similarity(worst).nextafter(torch.tensor(torch.inf, device=self.device))
        self.least[owners] = self.least[owners].maximum(least.where(worst != _NOTHING, _LOWEST))

    def result(self) -> Neighbours:
        """Return the neighbours, the nearest first.

        Raises:
            ValueError: fewer than k finite similarities.
        """
        best = self.best[: self.count].cpu().sort(dim=1, descending=True).values
        similarity = _similarity(best)
        if (best == _NOTHING).any() or not similarity.isfinite().all():
            raise InputError("similarities overflow float32: normalise queries and keys to unit length")
        return Neighbours(similarity, _row(best))


def _up_to_multiple(number: int, of: int) -> int:
    return -(-number // of) * of


def _first_dtype(queries: Tensor, num_keys: int, neighbours: int, device: torch.device) -> torch.dtype:
    """The type of the first product; in float32 there is no other."""
    if device.type == "cuda":
        return torch.float16 if queries.dtype == torch.float16 else torch.float32
    pays = (
        queries.shape[1] >= _BFLOAT16_DIM
        and len(queries) >= _BFLOAT16_QUERIES
        and num_keys >= _BFLOAT16_KEYS * neighbours
    )
    return torch.bfloat16 if pays and multiplies_bfloat16() else torch.float32


def _rounded(rows: Float[Tensor, "n d"], dtype: torch.dtype) -> tuple[Tensor, Float[Tensor, " n"]]:
    """Rows in another type, and the norms of what rounding took from them."""
    if dtype == rows.dtype:
        return rows, rows.new_zeros(len(rows))
    rounded = torch.empty_like(rows, dtype=dtype)
    parts = zip(rows.split(_ROUNDED_AT_ONCE), rounded.split(_ROUNDED_AT_ONCE), strict=True)
    return rounded, torch.cat([out.copy_(part).float().sub_(part).norm(dim=1) for part, out in parts])


def _sum_error(dim: int, device: torch.device) -> float:
    """Error of two inner products as a share of the product of norms: of sums in float32, and of TF32 on GPUs."""
    return dim * 2**-22 + (2**-8 if device.type == "cuda" else 0)


def _product(keys: Tensor, queries: Tensor) -> Tensor:
    """All inner products, (M, Q), summed in float32; those of bfloat16 are rounded to it."""
    if keys.dtype == torch.float16:
        return torch.mm(keys, queries.mT, out_dtype=torch.float32)
    return linear(keys, queries) if keys.dtype == torch.float32 else keys @ queries.mT


def _any(found: Bool[Tensor, "*n q"]) -> Bool[Tensor, "*n"]:
    """`found.any(dim=-1)` of a multiple of eight columns, eight at once."""
    return found.view(torch.int64).any(dim=-1)


def _ordered(similarity: Float[Tensor, "*n"], row: Int[Tensor, "*m"]) -> Int[Tensor, "*n"]:
    """Integers that are the greater the greater the similarity and, where that is equal, the smaller the row."""
    bits = (similarity + 0.0).view(torch.int32)  # + 0.0 turns -0 into 0
    return (_flip_negative(bits).long() << 32) + (_ROW_MASK - row)


def _similarity(ordered: Int[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """The similarity in an integer of `_ordered`; NaN in `_NOTHING`."""
    return _flip_negative((ordered >> 32).int()).view(torch.float32)


def _row(ordered: Int[Tensor, "*n"]) -> Int[Tensor, "*n"]:
    """The row in an integer of `_ordered`."""
    return _ROW_MASK - (ordered & _ROW_MASK)


def _flip_negative(bits: Int[Tensor, "*n"]) -> Int[Tensor, "*n"]:
    """Bits of floats to integers of the same order, and back: those of negative floats count downwards."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


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
        ordered = _ordered(similarity, found).sort(dim=1, descending=True).values
        return Neighbours(_similarity(ordered), _row(ordered))

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
