"""Shares of a bank against the bank that is held whole, in processes that talk to each other.

Four processes are started once and go through all cases, in groups of several sizes; this file is what they run.
"""

import datetime
import multiprocessing
import os
import random
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from cribo.method import NO_MATCH, MemoryBank, ShardedMemoryBank, search, sharded
from cribo.method.memory import Share
from cribo.method.rings import ring_slices

PROCESSES = 4
SIZES = (1, 2, 3, 4)
DIM = 6
WAYS = {  # first pass of the shares: on copies in bfloat16, on the rows as they are stored, in float32
    "rounded copies": (True, 0),
    "stored rows": (False, 0),
    "one pass": (False, 2**62),
}


# ------------------------------------------------------------------------------------------------- in processes


def bank(kind: Callable[..., Any], **options: Any) -> Any:
    sizes: dict[str, Any] = {"num_images": 7, "num_objects": 3, "dim": DIM} | options
    return kind(**sizes)


class Both:
    """A bank in shares, and the whole one, given the same; every process of the group goes through the same draws."""

    def __init__(self, group: dist.ProcessGroup, way: str, seed: int, **options: Any) -> None:
        copies, self.fewest = WAYS[way]
        search.multiplies_bfloat16 = lambda: copies
        self.sharded = bank(ShardedMemoryBank, group=group, **options)
        self.whole = bank(MemoryBank, **options)
        self.processes, self.number = dist.get_world_size(group), dist.get_rank(group)
        self.chance, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)
        # Few different rows, of few lengths: mostly several are equally similar, in the same share and in others.
        self.pool = torch.randn(2, 9, self.whole._rows.shape[2], generator=self.generator)

    def rows(self, count: int) -> Tensor:
        chosen = self.pool[:, torch.randint(9, (count,), generator=self.generator)]
        fresh = torch.randn(chosen.shape, generator=self.generator)
        return torch.where(torch.rand(2, count, 1, generator=self.generator) < 0.6, chosen, fresh)

    def push(self) -> None:
        most = self.whole.capacity // self.whole.num_images
        counts = [self.chance.randint(0, most) for _ in range(self.chance.randint(0, self.whole.num_images))]
        images = torch.randint(12, (len(counts),), generator=self.generator).repeat_interleave(
            torch.tensor(counts).long()
        )
        objects = self.rows(sum(counts))
        for each in (self.sharded, self.whole):
            each.push(objects, images, counts)
        assert len(self.sharded) == len(self.whole)
        assert self.sharded.images_held == self.whole.images_held

    def match(self, **options: Any) -> None:
        counts = [self.chance.choice([0, 0, 1, 5, 20]) for _ in range(self.processes)]
        objects, images = self.rows(sum(counts)), torch.randint(14, (sum(counts),), generator=self.generator)
        own = slice(sum(counts[: self.number]), sum(counts[: self.number + 1]))
        assert_same_matches(self.sharded, self.whole, objects[:, own], images[own], self.fewest, **options)


def assert_same_matches(
    shares: ShardedMemoryBank, whole: MemoryBank, objects: Tensor, images: Tensor, fewest: int, **options: Any
) -> None:
    search._FEWEST = fewest
    found = shares.match(objects, images, **options)
    search._FEWEST = 2**62
    expected = whole.match(objects, images, **options)
    assert torch.equal(found.nearest, expected.nearest), (found.nearest, expected.nearest)
    assert torch.equal(found.valid, expected.valid)
    for view in (0, 1):
        for asked in (found.nearest[view] != NO_MATCH, found.valid[view]):
            slots = found.nearest[view, asked].flip(0)
            assert torch.equal(shares.objects(view, slots), whole.objects(view, slots))
            assert torch.equal(shares.image_ids(slots), whole.image_ids(slots))


def assert_same_state(state: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(state) == list(expected)
    for name, value in expected.items():
        assert type(state[name]) is type(value), name
        if isinstance(value, Tensor):
            assert state[name].dtype == value.dtype, name
            assert torch.equal(state[name], value), name
        else:
            assert state[name] == value, name


def any_sequence(group: dist.ProcessGroup) -> None:
    """Small rings wrap often; which first pass meets which size and type is another for every number of processes."""
    processes = dist.get_world_size(group)
    for number, (num_images, num_objects) in enumerate([(1, 3), (7, 2), (10, 4)]):
        way = list(WAYS)[(number + processes) % 3]
        dtype = (torch.float32, torch.float16, torch.bfloat16, torch.float64)[(number + processes) % 4]
        both = Both(group, way, processes, num_images=num_images, num_objects=num_objects, dtype=dtype)
        both.match()
        for _ in range(10):
            both.push()
            both.match()
        both.match(criterion="none")


def rows_that_products_cannot_tell_apart(group: dist.ProcessGroup) -> None:
    for way in WAYS:
        for dtype, spread in ((torch.float32, 0), (torch.float32, 1e-6), (torch.float32, 3e-3), (torch.float16, 3e-3)):
            both = Both(group, way, seed=5, num_images=700, num_objects=4, dim=96, dtype=dtype)
            middle = torch.randn(96, generator=both.generator)
            rows = middle + spread * torch.randn(2, 2000, 96, generator=both.generator)
            for each in (both.sharded, both.whole):
                for part, images in zip(rows.split(1000, dim=1), torch.arange(500).split(250), strict=True):
                    each.push(part, images.repeat_interleave(4), [4] * 250)
            for size in (1, spread):  # queries far from the rows, and among them
                queries = middle + size * torch.randn(2, 10 + 7 * both.number, 96, generator=both.generator)
                assert_same_matches(both.sharded, both.whole, queries, torch.arange(queries.shape[1]), both.fewest)


def groups_of_images(group: dist.ProcessGroup) -> None:
    both = Both(group, "one pass", seed=3)
    both.push()
    sizes = [2, 0, 5] if both.number else [1, 6]
    objects = both.rows(sum(sizes) + both.number)
    both_sizes = [*sizes, both.number]
    assert_same_matches(
        both.sharded, both.whole, objects, torch.arange(100, 100 + sum(both_sizes)), 0, group_rows=both_sizes
    )


def states(group: dist.ProcessGroup) -> None:
    for at_once, dtype in ((4, torch.float32), (2**14, torch.float16)):
        sharded._SLOTS_AT_ONCE = at_once
        both = Both(group, "stored rows", seed=at_once, dtype=dtype)
        for _ in range(9):
            state = both.sharded.state_dict()
            if both.number == 0:
                assert_same_state(state, both.whole.state_dict())
            else:
                assert state == {}
            both.push()
        for num_images in (7, 8, 12):  # the same bank and larger ones, from whole to shares and back
            state = _of_first(both.sharded.state_dict(), group)
            both.sharded = bank(ShardedMemoryBank, dtype=dtype, group=group, num_images=num_images)
            both.sharded.load_state_dict(both.whole.state_dict())
            both.whole = bank(MemoryBank, dtype=dtype, num_images=num_images)
            both.whole.load_state_dict(state)
            for _ in range(3):
                both.match()
                both.push()


def other_number_of_processes(group: dist.ProcessGroup) -> None:
    """What this group saves, the first two of its processes and all four go on with, in every combination."""
    both = Both(group, "one pass", seed=8, num_images=6)
    for _ in range(5):
        both.push()
    state = _of_first(both.sharded.state_dict(), group)
    assert_same_state(state, both.whole.state_dict())
    for other in GROUPS.values():
        if other is not None and dist.get_world_size(other) <= dist.get_world_size(group):
            continued = Both(other, "stored rows", seed=9, num_images=6)
            continued.sharded.load_state_dict(state)
            continued.whole.load_state_dict(state)
            for _ in range(6):
                continued.match()
                continued.push()


def _of_first(state: dict[str, Any], group: dist.ProcessGroup) -> dict[str, Any]:
    held = [state]
    dist.broadcast_object_list(held, group_src=0, group=group)
    return held[0]


def memory(group: dist.ProcessGroup) -> None:
    kinds = (MemoryBank, {}), (ShardedMemoryBank, {"group": group})
    for copies in (True, False):
        search.multiplies_bfloat16 = lambda copies=copies: copies
        whole, share = (bank(kind, num_images=1000, num_objects=8, dim=32, **options) for kind, options in kinds)
        processes = dist.get_world_size(group)
        assert whole.nbytes / processes <= share.nbytes <= whole.nbytes * (1 / processes + 0.01)


def what_was_not_found(group: dist.ProcessGroup) -> None:
    both = Both(group, "one pass", seed=1)
    with pytest.raises(ValueError, match="that had no queries"):
        both.sharded.objects(0, torch.tensor([0]))
    objects = torch.eye(DIM)[:3].expand(2, 3, DIM)
    for each in (both.sharded, both.whole):
        each.push(objects, torch.tensor([1, 2, 3]), [1, 1, 1])
    matches = both.sharded.match(objects[:, :2], torch.tensor([1, 9]))
    slots = matches.nearest[0]
    assert slots[0] != 0  # its own image
    missing = torch.tensor([slot for slot in range(4) if slot not in slots.tolist()])
    assert both.sharded.objects(0, missing).isnan().all()
    assert (both.sharded.image_ids(missing) == -1).all()
    assert not both.sharded.objects(0, slots).isnan().any()
    both.sharded.match(objects[:, :0], torch.zeros(0, dtype=torch.long))
    assert both.sharded.objects(0, slots[:0]).shape == (0, DIM)


CASES = (
    any_sequence,
    rows_that_products_cannot_tell_apart,
    groups_of_images,
    states,
    other_number_of_processes,
    memory,
    what_was_not_found,
)
GROUPS: dict[int, dist.ProcessGroup | None] = {}


def take_part(folder: Path, rank: int) -> None:
    """What process `rank` does: every case in every group that it belongs to."""
    torch.set_num_threads(1)
    wait = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=PROCESSES, timeout=wait)
    for size in SIZES:
        group = dist.new_group(list(range(size)), timeout=wait)
        GROUPS[size] = group if rank < size else None  # pyright: ignore[reportArgumentType]
    for size, group in GROUPS.items():
        for case in CASES:
            if group is None:
                continue
            outcome = "passed"
            try:
                case(group)
            except Exception:
                outcome = traceback.format_exc()
            (folder / f"{case.__name__}-{size}-{rank}").write_text(outcome)
            if outcome != "passed":
                os._exit(1)  # the others would wait for it
    dist.barrier()
    dist.destroy_process_group()


def main(folder: Path) -> None:
    """Start all processes from one that has imported what they need, which takes longer than all they do."""
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=take_part, args=(folder, rank)) for rank in range(PROCESSES)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


# -------------------------------------------------------------------------------------------------------- tests


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which every process has left what came of each case."""
    folder = tmp_path_factory.mktemp("processes")
    conftest = Path(__file__).parents[1] / "conftest.py"  # it has signatures checked
    start = f"import runpy; runpy.run_path({str(conftest)!r}); runpy.run_path({__file__!r}, run_name='__main__')"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", start, str(folder)], env=environment, timeout=300, check=True)
    return folder


@pytest.mark.parametrize("processes", SIZES)
@pytest.mark.parametrize("case", [case.__name__ for case in CASES])
def test_shares_are_the_whole_bank(outcomes: Path, case: str, processes: int) -> None:
    for rank in range(processes):
        written = outcomes / f"{case}-{processes}-{rank}"
        assert written.exists(), f"process {rank} did not come so far"
        assert written.read_text() == "passed", written.read_text()


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_shares_of_a_ring_hold_every_slot_once_and_in_order_of_age(count: int) -> None:
    capacity = 7
    for oldest in range(capacity):
        for length in range(capacity + 1):
            parts = ring_slices(oldest, length, capacity)
            held: list[list[int]] = []
            for number in range(count):
                share, slots = Share(number, count), list(range(number, capacity, count))
                held.append([slot for part in parts for slot in slots[share.held(part)]])
                taken = [slot for part in parts for slot in list(range(part.start, part.stop))[share.taken(part)]]
                assert held[-1] == taken
            ages = [[(slot - oldest) % capacity for slot in slots] for slots in held]
            assert all(each == sorted(each) for each in ages)
            assert sorted(age for each in ages for age in each) == list(range(length))
            assert max(map(len, held)) <= -(-length // count) + (len(parts) > 1)


def test_a_bank_in_shares_needs_processes() -> None:
    with pytest.raises(RuntimeError, match="needs the processes of torch"):
        ShardedMemoryBank(num_images=3, num_objects=2, dim=4)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
