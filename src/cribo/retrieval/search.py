"""Nearest neighbours among many patches: exact search within bounded memory, and an approximate index.

Exact search compares block after block of the keys with block after block of the queries and keeps the best few
of every query; a whole matrix of similarities never exists. A neighbour found so far is one integer of 64 bits
that orders as it should: first by similarity, then by row, the smaller row first. So the greatest k integers are the
neighbours, ties included, in whatever order and on whichever device the blocks were met.
"""

import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cribo.errors import InputError, MissingPackage
from cribo.models.linear import linear

_GIB = 2**30
_RUN = 64  # most keys in a run, whose greatest similarity stands for all of them at first
_ROW_MULTIPLE = 16  # queries of a block, so that no product takes a library's path for odd sizes
_ROW_MASK = 2**32 - 1
_NOTHING = torch.iinfo(torch.int64).min
_LOWEST = torch.finfo(torch.float32).min


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


# ------------------------------------------------------------------ what it takes


@dataclass(frozen=True)
class SearchPlan:
    """How a search is cut into pieces, and what that needs.

    Attributes:
        query_chunk: queries whose neighbours so far are held at once.
        query_block: queries compared with a block of keys at once, by each worker.
        key_block: keys read, and compared, at once.
        run: keys of which only the greatest similarity is looked at first.
        workers: threads of a host; a GPU has one.
        passes: how often all keys are read.
        device_bytes: peak on each device beyond what is there before; the result is not in it, 12 bytes for
            each neighbour on the host, nor what the keys need to read a block.
        flops: of the products, in all.
    """

    query_chunk: int
    query_block: int
    key_block: int
    run: int
    workers: int
    passes: int
    device_bytes: int
    flops: int


class _Tile(NamedTuple):
    """Queries and keys that are compared at once."""

    queries: int
    keys: int


# A host's tile stays in its caches; a GPU wants enough work for each launch.
_HOST_TILE, _GPU_TILE = _Tile(256, 8192), _Tile(4096, 32768)
_SMALL_TILE, _LEAST_TILE = _Tile(128, 4096), _Tile(64, 512)


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
    """Cut a search so that it stays within a budget of memory, whatever the number of queries and keys.

    Args:
        num_queries: Q.
        num_keys: M.
        dim: D.
        neighbours: k.
        key_bytes: of each number in the keys.
        budget: bytes on each device.
        device: kind of device.
        workers: threads of a host, PyTorch's number of threads by default.

    Raises:
        ValueError: a number below 1, or a budget below what the smallest pieces need.

    Example:
        >>> plan = plan_search(2_700_000, 27_000_000, 384, 50, budget=2 * 2**30, workers=2)
        >>> plan.passes, plan.device_bytes < 2 * 2**30
        (3, True)
    """
    numbers = {"num_queries": num_queries, "num_keys": num_keys, "dim": dim, "neighbours": neighbours}
    for name, value in (*numbers.items(), ("key_bytes", key_bytes)):
        if value < 1:
            raise InputError(f"{name} must be >= 1, got {value}")
    on_host = torch.device(device).type == "cpu"
    most = (workers or torch.get_num_threads()) if on_host else 1
    whole = _Tile(_up_to_multiple(num_queries, _ROW_MULTIPLE), _up_to_multiple(num_keys, _RUN))
    per_query = _query_bytes(dim, neighbours)
    cuts = [
        (tile, threads, _fixed_bytes(tile, dim, neighbours, key_bytes, threads))
        for tile, threads in _cuts(_HOST_TILE if on_host else _GPU_TILE, whole, most)
    ]
    fitting = (cut for cut in cuts if cut[2] + per_query * cut[0].queries * cut[1] <= budget // 2)
    tile, threads, fixed = next(fitting, cuts[-1])
    if fixed + per_query * tile.queries > budget:
        needed = math.ceil((fixed + per_query * tile.queries) / 2**20)
        raise InputError(
            f"a search for {neighbours} neighbours in {dim} dimensions needs at least {needed} MiB, got a budget of "
            f"{budget / 2**20:.1f} MiB: give it more memory, or ask for fewer neighbours"
        )
    passes = math.ceil(num_queries / ((budget - fixed) // per_query))
    chunk = math.ceil(num_queries / passes)
    return SearchPlan(
        query_chunk=chunk,
        query_block=tile.queries,
        key_block=tile.keys,
        run=_run_length(tile, neighbours),
        workers=threads,
        passes=passes,
        device_bytes=fixed + per_query * chunk,
        flops=2 * num_queries * num_keys * dim,
    )


def _cuts(tile: _Tile, whole: _Tile, threads: int) -> Iterator[tuple[_Tile, int]]:
    """Tiles and numbers of threads, from the fastest to those that need least memory."""
    for least, fewest in ((_SMALL_TILE, threads), (_SMALL_TILE, 1), (_LEAST_TILE, 1)):
        yield _Tile(*map(min, tile, whole)), threads
        while tile != least or threads > fewest:
            if tile != least:
                tile = _Tile(*map(max, least, (side // 2 for side in tile)))
            else:
                threads -= 1
            yield _Tile(*map(min, tile, whole)), threads


def _query_bytes(dim: int, neighbours: int) -> int:
    """What stays for a query all through a pass: itself, its neighbours so far, the worst of them."""
    return 4 * dim + 8 * neighbours + 4


def _fixed_bytes(tile: _Tile, dim: int, neighbours: int, key_bytes: int, workers: int) -> int:
    """What does not grow with the number of queries."""
    similarities = tile.queries * tile.keys
    candidates = max(similarities // _SHARE_AT_ONCE, _run_length(tile, neighbours))
    runs = similarities // _run_length(tile, neighbours)
    # Similarities, as the library lays them out and as we read them; candidates with their rows and queries;
    # maxima of runs and which of them are candidates; neighbours before and after a merge.
    worker = 8 * similarities + 100 * candidates + 40 * runs + 96 * tile.queries * neighbours
    # Blocks of keys: in work, waiting, and being read.
    blocks = tile.keys * dim * (3 * 4 + 2 * key_bytes)
    return workers * worker + blocks


_SHARE_AT_ONCE = 8  # of a tile's similarities, the part that is looked at as candidates at once


def _run_length(tile: _Tile, neighbours: int) -> int:
    """Keys of a run: enough runs in a tile that their maxima tell a bound on the k-th best similarity."""
    run = _RUN
    while run > 1 and tile.keys // run < neighbours:
        run //= 2
    return run


def _up_to_multiple(number: int, of: int) -> int:
    return -(-number // of) * of


def available_memory(device: torch.device | str) -> int:
    """Bytes of a device that one may plan with: free ones, on a host within the limit of its control group."""
    device = torch.device(device)
    if device.type == "cuda":
        # What PyTorch has reserved and does not use is free for us too.
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    return min((_free_on_host(), *_free_in_groups()))


def _free_on_host() -> int:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        pass
    try:  # no Linux: half of what there is, for want of knowledge
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    except (AttributeError, ValueError, OSError):
        return 4 * _GIB


def _free_in_groups(proc: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")) -> list[int]:
    """Bytes left under the limit of each control group that this process is in, of version 1 or 2."""
    try:
        lines = proc.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    free = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = mount / "memory" if controllers else mount
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(root):
                free += _free_in_group(folder, *names)
    return free


def _free_in_group(folder: Path, limit_name: str, usage_name: str) -> list[int]:
    try:
        limit = (folder / limit_name).read_text(encoding="ascii").strip()
        usage = int((folder / usage_name).read_text(encoding="ascii"))
        statistics = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return []  # a group outside this container's sight, or one without a limit
    if limit == "max":
        return []
    cached = [
        int(line.split()[1]) for line in statistics if line.split()[0] in ("inactive_file", "total_inactive_file")
    ]
    return [max(0, int(limit) - usage + max(cached, default=0))]


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
    """The keys with the greatest inner product with each query, exactly; the cosine where all have unit length.

    Of keys that are equally similar the one with the smaller row comes first. That holds for similarities as
    they come out in float32: their last bits are the matrix library's, so two keys whose similarities differ by
    rounding alone may change places with another device or plan. On a host all blocks are filled up to shapes for
    which the libraries sum in one order, so that equal keys are equally similar wherever they stand.

    On several devices the blocks of keys go round, each device finds its share's neighbours of all queries, and
    the best of all shares are the result: the same as on one device.

    float32 is used throughout, except that a GPU multiplies float16 queries with float16 keys as they are and
    sums in float32. PyTorch's own setting for float32 products on GPUs (TF32) applies.

    Args:
        queries: (Q, D), float32 or float16.
        keys: what is searched; each block is read once per pass.
        neighbours: k.
        devices: all of one kind; one that is named twice works twice.
        plan: how the search is cut into pieces; by default, within most of the memory that is free.
        progress: is told how many keys have been compared, up to `len(keys)`, whatever the number of passes.

    Raises:
        ValueError: k below 1 or above the number of keys, devices of several kinds or none, queries of another
            dimension, values that are not finite, or too little memory.

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
    result = Neighbours(torch.empty(len(queries), neighbours), torch.empty(len(queries), neighbours, dtype=torch.long))
    if not len(queries):
        return result
    plan = plan or _default_plan(queries, keys, neighbours, places)
    threads = torch.get_num_threads()
    try:
        for number, start in enumerate(range(0, len(queries), plan.query_chunk)):
            chunk = slice(start, start + plan.query_chunk)

            def report(done: int, number: int = number) -> None:
                if progress is not None:
                    progress((number * len(keys) + done) // math.ceil(len(queries) / plan.query_chunk))

            _search_chunk(queries[chunk], keys, Neighbours(*(part[chunk] for part in result)), plan, places, report)
    finally:
        torch.set_num_threads(threads)  # each worker computes with one, and PyTorch has one number for all threads
    return result


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
    """Within four fifths of the free memory of the device that has least for each time it is named."""
    result = 12 * len(queries) * neighbours if devices[0].type == "cpu" else 0
    free = min((available_memory(device) - result) // devices.count(device) for device in devices)
    workers = max(1, torch.get_num_threads() // len(devices))
    return plan_search(
        len(queries), len(keys), keys.dim, neighbours, budget=free * 4 // 5, device=devices[0], workers=workers
    )


def _search_chunk(
    queries: Float[Tensor, "q d"],
    keys: Keys,
    result: Neighbours,
    plan: SearchPlan,
    devices: Sequence[torch.device],
    report: Callable[[int], None],
) -> None:
    """One pass over the keys for the queries whose neighbours are held at once, into `result`."""
    shares = [_Share(queries, result.rows.shape[1], plan, device) for device in devices]
    reader = _single_threaded(1)  # reads ahead while the devices compute
    try:
        blocks = keys.blocks(plan.key_block)
        following = itertools.cycle(shares)
        done = 0
        upcoming = reader.submit(_read, blocks, share := next(following), done)
        while (staged := upcoming.result()) is not None:
            share.finish()
            share.start(staged, done)
            report(done)
            done += staged.rows
            upcoming = reader.submit(_read, blocks, share := next(following), done)
        if done != len(keys):
            raise InputError(f"keys must give the {len(keys)} rows that they have, got {done}")
        for share in shares:
            share.finish()
        _collect(shares, result)
        report(done)
    finally:
        reader.shutdown(cancel_futures=True)
        for share in shares:
            share.close()


def _single_threaded(workers: int) -> ThreadPoolExecutor:
    """Threads that compute with one thread each: parallel pieces need no barriers within them."""
    return ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,))


class _Staged(NamedTuple):
    """A block of keys where and how a device wants it."""

    keys: Tensor
    rows: int
    ready: Any = None
    """What the device waits for before it uses the keys."""


@torch.no_grad()
def _read(blocks: Iterator[Tensor], share: "_Share", first: int) -> _Staged | None:
    """The next block of keys, moved to its device; None after the last."""
    block = next(blocks, None)
    if block is None:
        return None
    # A sum is one quick pass; only one that is not finite needs a second look.
    if not block.sum(dtype=torch.float32).isfinite() and not block.isfinite().all():
        row = first + int((~block.isfinite()).any(dim=1).nonzero()[0])
        raise InputError(f"keys hold values that are not finite, first in row {row}: leave that row out")
    return share.arithmetic.stage(block)


def _collect(shares: "Sequence[_Share]", result: Neighbours) -> None:
    """The best neighbours of all shares, in order."""
    start = 0
    for parts in zip(*(share.blocks for share in shares), strict=True):
        found = torch.cat([part.best[: part.count].cpu() for part in parts], dim=1)
        best = found.sort(dim=1, descending=True).values[:, : result.rows.shape[1]]
        if (best == _NOTHING).any():
            raise InputError("similarities overflow: normalise queries and keys to unit length")
        rows = slice(start, start + len(best))
        result.similarity[rows], result.rows[rows] = _similarity(best), _row(best)
        start += len(best)


class _Share:
    """The neighbours of a chunk of queries among the keys that one device is given.

    Args:
        queries: (Q, D).
        neighbours: k.
        plan: of the search.
        device: where.
    """

    def __init__(self, queries: Float[Tensor, "q d"], neighbours: int, plan: SearchPlan, device: torch.device) -> None:
        self.arithmetic = _arithmetic(device)
        self.run = plan.run
        workers = plan.workers if device.type == "cpu" else 1
        # As many blocks for one worker as for another.
        count = _up_to_multiple(math.ceil(len(queries) / plan.query_block), workers)
        parts = queries.split(math.ceil(len(queries) / count))
        self.blocks = [_QueryBlock(self.arithmetic, part, neighbours, device) for part in parts]
        self._executor = _single_threaded(workers)
        self._running: list[Future[None]] = []

    def start(self, staged: _Staged, first: int) -> None:
        """Compare all queries with a block of keys whose first row is `first`."""
        self._running = [self._executor.submit(self._compare, block, staged, first) for block in self.blocks]

    def finish(self) -> None:
        """Wait for the comparison that was started last.

        Raises:
            whatever went wrong in it.
        """
        for future in self._running:
            future.result()
        self._running = []

    def close(self) -> None:
        """Stop, after an error too."""
        self._executor.shutdown(cancel_futures=True)

    @torch.no_grad()
    def _compare(self, block: "_QueryBlock", staged: _Staged, first: int) -> None:
        similarity = self.arithmetic.product(block.queries, staged)
        similarity[:, staged.rows :] = -torch.inf  # rows that only fill the block up
        block.offer(similarity, self.run, first)


class _QueryBlock:
    """Some queries and the best neighbours they have met so far.

    Args:
        arithmetic: of the device.
        queries: (Q, D).
        neighbours: k.
        device: where.
    """

    def __init__(self, arithmetic: "_Arithmetic", queries: Tensor, neighbours: int, device: torch.device) -> None:
        self.count = len(queries)
        rows = _up_to_multiple(self.count, _ROW_MULTIPLE)
        self.queries = arithmetic.place(F.pad(queries, (0, 0, 0, rows - self.count)))
        self.best = torch.full((rows, neighbours), _NOTHING, device=device)
        self.worst = torch.full((rows,), _LOWEST, device=device)
        # The rows that fill up are zero: no neighbour is better than the first that comes.
        self.worst[self.count :] = torch.inf

    def offer(self, similarity: Float[Tensor, "q m"], run: int, first: int) -> None:
        """Take in the similarities with the next keys, of rows `first` and up; later ones than all before.

        Few similarities beat the worst neighbour that a query has. The maxima of runs of keys tell which runs
        hold one, and only those are looked at.
        """
        runs = similarity.shape[1] // run
        maxima = similarity.view(-1, runs, run).amax(dim=2)
        # Equal is not better: the keys met before have smaller rows.
        promising = maxima > self.worst[:, None]
        floor = self._raise_floor(maxima, promising)
        chosen = promising.flatten().nonzero()[:, 0]
        by_run = similarity.view(-1, run)
        for part in chosen.split(max(1, similarity.numel() // (_SHARE_AT_ONCE * run))):
            values = by_run[part]
            owner = part // runs
            place = (values >= floor[owner, None]).flatten().nonzero()[:, 0]
            which = place // run
            row = part[which] % runs * run + place % run + first
            self._merge(owner[which], values.flatten()[place], row)

    def _raise_floor(self, maxima: Float[Tensor, "q r"], promising: Bool[Tensor, "q r"]) -> Float[Tensor, " q"]:
        """The least similarity that may matter; drops the runs that stay below it.

        A query with more than k promising runs has k values at least as great as the k-th of their maxima.
        """
        k = self.best.shape[1]
        many = (promising.sum(dim=1) > k).nonzero()[:, 0]
        if not len(many):
            return self.worst
        floor = self.worst.clone()
        some = maxima[many]
        floor[many] = some.topk(k, dim=1, sorted=False).values.amin(dim=1)
        promising[many] &= some >= floor[many, None]
        return floor

    def _merge(self, owner: Int[Tensor, " n"], values: Float[Tensor, " n"], row: Int[Tensor, " n"]) -> None:
        """Take in candidates, those of one query beside each other and in the order of their rows.

        Each query takes k at once at most, so that one with very many of them costs no memory.
        """
        k = self.best.shape[1]
        while len(owner):
            queries, inverse, counts = torch.unique_consecutive(owner, return_inverse=True, return_counts=True)
            position = torch.arange(len(owner), device=owner.device) - (counts.cumsum(0) - counts)[inverse]
            now = position < k
            width = min(k, int(counts.max()))
            offered = self.best.new_full((len(queries), width), _NOTHING)
            offered[inverse[now], position[now]] = _ordered(values[now], row[now])
            best = torch.cat((self.best[queries], offered), dim=1).topk(k, dim=1, sorted=False).values
            self.best[queries] = best
            worst = _similarity(best.amin(dim=1))
            self.worst[queries] = worst.where(worst > _LOWEST, _LOWEST)  # NaN: still without k neighbours
            left = ~now & (values > self.worst[owner])
            owner, values, row = owner[left], values[left], row[left]


def _ordered(similarity: Float[Tensor, "*n"], row: Int[Tensor, "*n"]) -> Int[Tensor, "*n"]:
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


class _Arithmetic(Protocol):
    """How a device takes queries and keys, and multiplies them."""

    def place(self, queries: Float[Tensor, "q d"]) -> Tensor:
        """Queries where and how products want them."""
        ...

    def stage(self, block: Float[Tensor, "m d"]) -> _Staged:
        """Keys where and how products want them, zero rows added up to a multiple of the longest run."""
        ...

    def product(self, queries: Tensor, staged: _Staged) -> Float[Tensor, "q m"]:
        """All inner products, float32, in memory that may be written to."""
        ...


def _arithmetic(device: torch.device) -> _Arithmetic:
    if device.type == "cuda":
        return _Cuda(device)
    return _Host()


class _Host:
    """Products on a host."""

    def place(self, queries: Float[Tensor, "q d"]) -> Tensor:
        return queries.to("cpu", torch.float32).contiguous()

    def stage(self, block: Float[Tensor, "m d"]) -> _Staged:
        return _Staged(_filled_up(block).to("cpu", torch.float32).contiguous(), len(block))

    def product(self, queries: Tensor, staged: _Staged) -> Float[Tensor, "q m"]:
        return linear(queries, staged.keys)


class _Cuda:
    """Products on a GPU; keys are copied while it computes.

    Args:
        device: which one.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._copies = torch.cuda.Stream(device)

    def place(self, queries: Float[Tensor, "q d"]) -> Tensor:
        return queries.to(self.device)

    def stage(self, block: Float[Tensor, "m d"]) -> _Staged:
        with torch.cuda.stream(self._copies):
            keys = _filled_up(block.pin_memory().to(self.device, non_blocking=True))
            return _Staged(keys, len(block), self._copies.record_event())

    def product(self, queries: Tensor, staged: _Staged) -> Float[Tensor, "q m"]:
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(staged.ready)
        staged.keys.record_stream(stream)  # else their memory may be given to the next block too early
        if queries.dtype == staged.keys.dtype == torch.float16:
            return torch.mm(queries, staged.keys.mT, out_dtype=torch.float32)
        return queries.float() @ staged.keys.float().mT


def _filled_up(block: Float[Tensor, "m d"]) -> Float[Tensor, "n d"]:
    missing = -len(block) % _RUN
    return F.pad(block, (0, 0, 0, missing)) if missing else block


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
