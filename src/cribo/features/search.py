"""Nearest neighbours among many patches: exact search within bounded memory, and an approximate index.

Exact search reads the keys in blocks and keeps the k most similar keys of each query. On processors with instructions
for bfloat16, such a product first discards the keys that cannot be neighbours.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from cribo.base.bounds import at_least
from cribo.base.devices import available_memory, multiplies_bfloat16
from cribo.base.errors import InputError, MissingPackage
from cribo.base.packages import install_command
from cribo.models.linear import linear

_PADDING = 64  # rows of a product are padded to it, so that libraries sum all inner products in the same order
_GROUP = 32  # keys whose maximum decides whether they are compared one by one; divides the padding
_BFLOAT16_DIM = 32  # with fewer dimensions, few keys differ by more than the error of bfloat16
_TRACED_BLOCK = 4096  # keys compared at once in a traced search
_INDEX_BLOCK = 65536  # keys added to an approximate index at once
_SAMPLED = 32  # keys for each list whose centres k-means computes
_ROUNDS = 5  # of k-means; further rounds take time and hardly increase the recall
_LARGEST = 1e30  # limit of products of norms, far from overflow
_TINY = 1e-30  # added to norms, since the smallest numbers underflow in bfloat16


class Keys(Protocol):
    """Keys of a search: rows of D numbers, in memory or on disk."""

    dim: int

    def __len__(self) -> int:
        """Return the number of rows."""
        ...

    def blocks(self, rows: int) -> Iterator[Float[Tensor, "m d"]]:
        """Iterate over all rows in order, in blocks of `rows` (the last may be shorter), as float32 or float16."""
        ...


class TensorKeys:
    """Keys in a single tensor.

    Args:
        rows: (M, D), float32 or float16.

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
        """Iterate over all rows in order, in blocks of `rows`; the last may be shorter."""
        return iter(self.rows.split(rows) if len(self.rows) else ())


class Neighbours(NamedTuple):
    """The nearest keys of each query, on the device of the queries.

    Attributes:
        similarity: float32, descending.
        rows: int64, row indices of the keys; ties are sorted by row.
    """

    similarity: Float[Tensor, "q k"]
    rows: Int[Tensor, "q k"]


# ------------------------------------------------------------------ exact search


def nearest(
    queries: Float[Tensor, "q d"],
    keys: Keys,
    neighbours: int,
    *,
    devices: Sequence[torch.device | str] = ("cpu",),
    budget: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Neighbours:
    """Find the k keys with the largest inner product with each query, by exact search.

    The inner product is the cosine similarity if all rows have unit length. Ties in float32 are sorted by row. Since
    the last bits depend on the matrix library, keys whose similarities differ by rounding errors may be ordered
    differently on another device or with another budget. PyTorch's setting for float32 products on GPUs (TF32) applies.

    Args:
        queries: (Q, D), float32 or float16.
        keys: the keys to search; each block is read once.
        neighbours: k.
        devices: one or more devices of the same type, which share the queries; a device may be given several times.
        budget: memory on each device in bytes, without the result (12 bytes per neighbour) and without buffers of
            `Keys.blocks`; by default, four fifths of the free memory.
        progress: called with the number of compared keys.

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
    places, threads = [torch.device(device) for device in devices], torch.get_num_threads()
    norm = _check(queries, len(keys), keys.dim, neighbours)
    if len({place.type for place in places}) != 1:
        raise InputError(f"devices must be one or more devices of the same type, got {list(map(str, places))}")
    size = len(queries)
    found = Neighbours(
        torch.full((size, neighbours), -torch.inf, device=queries.device),
        torch.zeros(size, neighbours, dtype=torch.long, device=queries.device),
    )
    if not size:
        return found
    if budget is None:
        budget = min(available_memory(place) // places.count(place) for place in places) * 4 // 5
    at_once, block_size, workers = _block_sizes(keys.dim, neighbours, places, threads, budget)
    count = math.ceil(size / at_once / len(workers)) * len(workers)  # equal numbers of parts per worker
    parts = list(zip(*(part.detach().split(math.ceil(size / count)) for part in (queries, *found)), strict=True))

    def work(device: torch.device, block: _KeyBlock, parts: Iterator[tuple[Tensor, Tensor, Tensor]]) -> None:
        for part, *best in parts:
            _compare(part.to(device).float(), Neighbours(*best), block, device)

    compared, report = 0, progress or (lambda compared: None)
    try:
        # Single-threaded workers need no barriers; an additional thread reads ahead.
        with ThreadPoolExecutor(len(workers) + 1, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            blocks = _key_blocks(keys, block_size, places, norm)
            upcoming = pool.submit(next, blocks, None)
            while block := upcoming.result():
                report(compared)
                upcoming = pool.submit(next, blocks, None)
                list(pool.map(work, workers, itertools.repeat(block), itertools.repeat(iter(parts))))
                compared += block.length
    finally:
        torch.set_num_threads(threads)  # workers set the number, which PyTorch keeps globally, to 1
    report(compared)
    if compared != len(keys):
        raise InputError(f"keys.blocks must return len(keys) = {len(keys)} rows, got {compared}")
    return found


def nearest_at_once(queries: Float[Tensor, "q d"], keys: Float[Tensor, "m d"], neighbours: int) -> Neighbours:
    """Return the k most similar keys of each query with a fixed sequence of tensor operations, for tracing.

    Ties are in any order.

    Args:
        queries: rows of unit length.
        keys: rows of unit length, at least k.
        neighbours: k.
    """
    found = [(queries @ block.T).topk(min(neighbours, len(block))) for block in keys.split(_TRACED_BLOCK)]
    similarity = torch.cat([part.values for part in found], dim=1)
    rows = torch.cat([part.indices + number * _TRACED_BLOCK for number, part in enumerate(found)], dim=1)
    best = similarity.topk(neighbours)
    return Neighbours(best.values, rows.gather(1, best.indices))


def _check(queries: Tensor, num_keys: int, dim: int, neighbours: int) -> float:
    """Check the arguments of a search and return the largest norm of a query."""
    if queries.ndim != 2 or queries.shape[1] != dim:
        raise InputError(f"queries must have shape (Q, {dim}), like the keys, got {tuple(queries.shape)}")
    at_least(1).check(neighbours=neighbours)
    if neighbours > num_keys:
        raise InputError(
            f"neighbours must be <= the number of keys, got {neighbours} for {num_keys} keys: search for fewer "
            "neighbours, or among more images (a smaller memory ratio)"
        )
    parts = queries.split(1024) if len(queries) else ()
    if not all(part.isfinite().all() for part in parts):
        raise InputError("queries contain values that are not finite: remove these rows")
    return max((float(part.float().norm(dim=1).max()) for part in parts), default=0.0)


def _block_sizes(
    dim: int, neighbours: int, devices: list[torch.device], threads: int, budget: int
) -> tuple[int, int, list[torch.device]]:
    """Choose the numbers of queries and keys to compare at once, and the device of each worker."""

    def needed(queries: int, keys: int, workers: int) -> int:
        kept = 32 * min(_GROUP * neighbours, keys) + 84 * neighbours  # of a query, in `_keep`
        candidates = 4 * dim * keys * _filters(devices[0], dim)
        # Two blocks, one in use and one being read: as returned by `Keys.blocks`, in float32 and in bfloat16.
        return workers * (queries * (4 * keys + 8 * dim + kept) + candidates) + 2 * keys * 10 * dim

    on_cpu = devices[0].type == "cpu"
    queries, keys = (256, 8192) if on_cpu else (1024, 2**17)
    workers = (max(1, threads // len(devices)), 1) if on_cpu else (1,)
    choices = [(queries // a, keys // b, each) for each in workers for a in (1, 4, 16) for b in (1, 4, 16)]
    if (least := needed(*choices[-1])) > budget:
        raise InputError(
            f"a search for {neighbours} neighbours in {dim} dimensions needs at least {math.ceil(least / 2**20)} MiB, "
            f"got a budget of {budget / 2**20:.1f} MiB: provide more memory, or search for fewer neighbours"
        )
    queries, keys, per_device = next(choice for choice in choices if needed(*choice) <= budget)
    return queries, keys, devices * per_device


def _filters(device: torch.device, dim: int) -> bool:
    """Whether a product in bfloat16 selects candidates."""
    return device.type == "cpu" and multiplies_bfloat16() and dim >= _BFLOAT16_DIM


def _padded(rows: Tensor) -> Tensor:
    """Append zeros along the first dimension, up to a multiple of `_PADDING`."""
    missing = -len(rows) % _PADDING
    return torch.cat((rows, rows.new_zeros(missing, *rows.shape[1:]))) if missing else rows


class _KeyBlock(NamedTuple):
    """A block of keys in float32 on each device, and in bfloat16 if it selects candidates; rows are padded."""

    first: int  # index of the first row among all keys
    length: int  # number of rows without padding
    norm: float  # largest norm of a row
    rows: dict[torch.device, Float[Tensor, "m d"]]
    fast: Float[Tensor, "m d"] | None


def _key_blocks(keys: Keys, size: int, devices: Sequence[torch.device], query_norm: float) -> Iterator[_KeyBlock]:
    """Read the keys in blocks, and check that all products are finite."""
    first = 0
    for read in keys.blocks(size):
        rows = read.detach().to(devices[0]).float()
        norm = float(rows.norm(dim=1).max())
        if not (query_norm + _TINY) * (norm + _TINY) < _LARGEST:
            if len(bad := (~rows.isfinite()).any(dim=1).nonzero()):
                where = f"first in row {first + int(bad[0])}"
                raise InputError(f"keys contain values that are not finite, {where}: remove this row")
            raise InputError("similarities overflow float32: normalise queries and keys to unit length")
        padded = _padded(rows)
        fast = padded.bfloat16() if _filters(devices[0], keys.dim) else None
        yield _KeyBlock(first, len(rows), norm, {device: padded.to(device) for device in devices}, fast)
        first += len(rows)


def _compare(queries: Float[Tensor, "q d"], found: Neighbours, block: _KeyBlock, device: torch.device) -> None:
    """Update the neighbours of queries, in place, with a block of keys."""
    best = Neighbours(*(part.to(device) for part in found))
    keys, length, padded = block.rows[device], block.length, _padded(queries)
    rows = torch.arange(block.first, block.first + len(keys), device=device)
    if block.fast is not None:
        candidates = _candidates(padded, _padded(best.similarity[:, -1]), block, block.fast)
        keys, rows, length = _padded(keys[candidates]), _padded(rows[candidates]), len(candidates)
    similarity = linear(padded, keys)[: len(queries)]
    similarity[:, length:] = -torch.inf
    _keep(best, similarity, rows)
    for out, part in zip(found, best, strict=True):
        out.copy_(part)


def _candidates(
    queries: Float[Tensor, "q d"], worst: Float[Tensor, " q"], block: _KeyBlock, fast: Float[Tensor, "m d"]
) -> Int[Tensor, " c"]:
    """Return the keys of a block that may be nearer to any query than its worst neighbour, by a bfloat16 product."""
    # |q·k - q'·k'| <= |q - q'||k| + |q'||k - k'|, and rounding to bfloat16 changes a row by at most 2^-9 of its
    # norm. Rounding the threshold and the product doubles this error, and sums in float32 add their own.
    norms = (queries.norm(dim=1) + _TINY) * (block.norm + _TINY)
    threshold = worst - norms * (2**-7 + queries.shape[1] * 2**-22)
    above = F.linear(fast, queries.bfloat16(), -threshold.clamp(min=-_LARGEST).bfloat16())
    return (above[: block.length].amax(dim=1) > 0).nonzero()[:, 0]


def _keep(best: Neighbours, similarity: Float[Tensor, "q m"], rows: Int[Tensor, " m"]) -> None:
    """Update neighbours, in place, with further keys, which must be in ascending order of their rows."""
    k, groups = best.rows.shape[1], similarity.unflatten(1, (-1, _GROUP))
    maxima = groups.amax(dim=2)
    better = int((maxima > best.similarity[:, -1:]).sum(dim=1).max())
    if not better:
        return
    chosen = _largest(maxima, min(k, better))  # these groups contain the k nearest keys
    offered = groups.gather(1, chosen[:, :, None].expand(-1, -1, _GROUP)).flatten(1)
    offered = torch.cat((best.similarity, offered), dim=1)
    offered_rows = torch.cat((best.rows, rows.view(-1, _GROUP)[chosen].flatten(1)), dim=1)
    kept = _largest(offered, k)
    nearest, order = offered.gather(1, kept).sort(dim=1, descending=True, stable=True)
    best.similarity.copy_(nearest)
    best.rows.copy_(offered_rows.gather(1, kept.gather(1, order)))


def _largest(numbers: Float[Tensor, "q m"], k: int) -> Int[Tensor, "q k"]:
    """Return the columns of the k largest numbers of each row, ascending; the first of equal numbers wins."""
    if k >= numbers.shape[1]:
        return torch.arange(numbers.shape[1], device=numbers.device).expand(len(numbers), -1)
    top, columns = numbers.topk(k + 1)
    columns = columns[:, :k].sort(dim=1).values
    if len(tied := (top[:, -2] == top[:, -1]).nonzero()[:, 0]):  # topk returns any of equal numbers
        larger, equal = numbers[tied] > top[tied, -1:], numbers[tied] == top[tied, -1:]
        missing = k - larger.sum(dim=1, keepdim=True)
        first = equal & (equal.cumsum(dim=1, dtype=torch.int32) <= missing)
        columns[tied] = (larger | first).nonzero()[:, 1].view(-1, k)
    return columns


# ------------------------------------------------------------------ approximate search


class ApproximateIndex:
    """Approximate nearest neighbours by an inverted file index of faiss (IVFFlat).

    k-means clusters a sample of the keys, each key is assigned to the list of its most similar centre, and a query is
    compared with the keys in the lists of its `probes` most similar centres. If these contain fewer than k keys,
    all lists are searched.

    Args:
        keys: the keys to search; stored in memory as float32.
        probes: number of lists to search, of about the square root of the number of keys; with all lists, the
            search is exact.
        seed: seed of the sample and of k-means.

    Raises:
        ImportError: faiss is not installed.
        ValueError: a number is out of range, or the index does not fit into free memory; raised before it is built.

    Example:
        >>> index = ApproximateIndex(TensorKeys(torch.eye(100)), probes=2)
        >>> index.search(torch.eye(100)[5:7], 1).rows.tolist()
        [[5], [6]]
    """

    def __init__(self, keys: Keys, *, probes: int = 8, seed: int = 0) -> None:
        try:
            import faiss
        except ModuleNotFoundError as error:
            raise MissingPackage(f"approximate search needs faiss: {install_command('search')}") from error
        if not (rows := len(keys)):
            raise InputError("keys must contain at least one row, got 0")
        lists = max(1, min(round(math.sqrt(rows)), rows // 40))  # at least 40 keys for each centre
        at_least(1).check(probes=probes)
        self._lists, self._probes, sample = lists, min(probes, lists), min(rows, _SAMPLED * lists)
        # Lists grow by doubling, so up to half of their capacity is unused.
        needed = 2 * rows * (4 * keys.dim + 8) + 4 * keys.dim * (sample + 2 * min(rows, _INDEX_BLOCK))
        if needed > (free := available_memory("cpu")):
            raise InputError(
                f"an index of {rows} keys may need {needed / 2**30:.1f} GiB, but only {free / 2**30:.1f} GiB are free: "
                "use exact search, or search among fewer images"
            )
        self._faiss = faiss
        faiss.omp_set_num_threads(torch.get_num_threads())
        self._index: Any = faiss.index_factory(keys.dim, f"IVF{lists},Flat", faiss.METRIC_INNER_PRODUCT)
        self._index.cp.seed, self._index.cp.niter = seed, _ROUNDS
        self._index.cp.min_points_per_centroid = 1  # no warning about small samples
        self._index.train(_sampled(keys, sample, seed).numpy())
        for block in keys.blocks(_INDEX_BLOCK):
            self._index.add(block.float().contiguous().numpy())

    def search(self, queries: Float[Tensor, "q d"], neighbours: int) -> Neighbours:
        """Return the approximate k nearest keys of each query; ties are sorted by row.

        Raises:
            ValueError: k is below 1 or above the number of keys, or queries have another dimension or are not finite.
        """
        _check(queries, self._index.ntotal, self._index.d, neighbours)
        faiss, rows = self._faiss, queries.to("cpu", torch.float32).contiguous().numpy()
        faiss.omp_set_num_threads(torch.get_num_threads())

        def visit(rows: np.ndarray, probes: int) -> tuple[Tensor, ...]:
            found = self._index.search(rows, neighbours, params=faiss.SearchParametersIVF(nprobe=probes))
            return tuple(map(torch.from_numpy, found))

        similarity, found = visit(rows, self._probes)
        if len(short := (found < 0).any(dim=1).nonzero()[:, 0]):  # -1: the visited lists contain too few keys
            similarity[short], found[short] = visit(rows[short.numpy()], self._lists)
        found, order = found.sort(dim=1)
        similarity, order = similarity.gather(1, order).sort(dim=1, descending=True, stable=True)
        return Neighbours(similarity, found.gather(1, order))


def _sampled(keys: Keys, number: int, seed: int) -> Float[Tensor, "n d"]:
    """Sample keys uniformly without replacement, in order."""
    chosen = torch.zeros(len(keys), dtype=torch.bool)
    chosen[torch.randperm(len(keys), generator=torch.Generator().manual_seed(seed))[:number]] = True
    blocks = keys.blocks(_INDEX_BLOCK)
    return torch.cat([block[kept].float() for block, kept in zip(blocks, chosen.split(_INDEX_BLOCK), strict=True)])


def recall(approximate: Neighbours, exact: Neighbours) -> float:
    """Compute the mean fraction of exact neighbours found by an approximate search.

    Keys as similar as the last exact neighbour, up to rounding, count as found. Raises ValueError if shapes differ.
    """
    shapes = tuple(approximate.rows.shape), tuple(exact.rows.shape)
    if shapes[0] != shapes[1]:
        raise InputError(f"approximate and exact neighbours must have the same shape, got {shapes[0]} and {shapes[1]}")
    last = exact.similarity[:, -1:]
    close = approximate.similarity >= last - 1e-6 * last.abs().clamp(min=1)
    return float((close & (approximate.rows >= 0)).double().mean())
