import copy
import io
import random
from collections import deque
from typing import Any

import pytest
import torch
from torch import Tensor

from cribo.method import NO_MATCH, MemoryBank, match_objects

DIM = 6


class PlainBank:
    """Reference: a deque of the last `num_images` (image, objects (2, n, D))."""

    def __init__(self, num_images: int) -> None:
        self.images: deque[tuple[int, Tensor]] = deque(maxlen=num_images)

    def push(self, objects: Tensor, images: Tensor, counts: list[int]) -> None:
        rows = objects.split(counts, dim=1)
        ids = images.split(counts)
        for part, image in zip(rows, ids, strict=True):
            self.images.append((int(image[0]) if len(image) else -1, part))

    def rows(self) -> tuple[Tensor, Tensor]:
        """Return all objects (2, M, D), oldest first, and the image (M,) of each."""
        objects = torch.cat([torch.zeros(2, 0, DIM), *[part for _, part in self.images]], dim=1)
        ids = [torch.full((part.shape[1],), image) for image, part in self.images]
        return objects, torch.cat([torch.zeros(0, dtype=torch.long), *ids])

    def neighbours(self, objects: Tensor, images: Tensor) -> list[list[Tensor | None]]:
        """Return the nearest object (D,) to each query in its view's bank, or None."""
        bank, ids = self.rows()
        found: list[list[Tensor | None]] = [[], []]
        for view in (0, 1):
            for query, image in zip(objects[view], images, strict=True):
                others = bank[view, ids != image]
                if not len(others):
                    found[view].append(None)
                    continue
                row = match_objects(query.expand(2, 1, -1), others.expand(2, -1, -1))[0][0, 0]
                found[view].append(others[row])
        return found


def batch(generator: torch.Generator, images: list[int], most: int) -> tuple[Tensor, Tensor, list[int]]:
    """Random objects of some images, with counts from 0 to `most`."""
    counts = torch.randint(0, most + 1, (len(images),), generator=generator).tolist()
    ids = torch.tensor([image for image, count in zip(images, counts, strict=True) for _ in range(count)])
    return torch.randn(2, sum(counts), DIM, generator=generator), ids.long(), counts


def assert_same(bank: MemoryBank, plain: PlainBank, generator: torch.Generator) -> None:
    rows, ids = plain.rows()
    assert len(bank) == rows.shape[1]
    assert bank.images_held == len(plain.images)
    queries = torch.randn(2, 5, DIM, generator=generator)
    images = torch.randint(0, 20, (5,), generator=generator)
    matches = bank.match(queries, images, criterion="none")
    for view, neighbours in enumerate(plain.neighbours(queries, images)):
        for slot, neighbour in zip(matches.nearest[view], neighbours, strict=True):
            if neighbour is None:
                assert slot == NO_MATCH
            else:
                torch.testing.assert_close(bank.objects(view, slot[None])[0], neighbour)
    assert torch.equal(matches.valid, matches.nearest != NO_MATCH)
    everything = bank.state_dict()
    torch.testing.assert_close(everything["rows"] * everything["norms"][..., None], rows)
    assert torch.equal(everything["images"], ids)


@pytest.mark.parametrize(("num_images", "num_objects"), [(1, 3), (4, 3), (7, 2), (10, 5)])
def test_pushes_match_a_deque(num_images: int, num_objects: int) -> None:
    """Small rings wrap often. Every push is compared with the deque; the state is sometimes saved and restored."""
    chance, generator = random.Random(num_images), torch.Generator().manual_seed(num_images)
    bank = MemoryBank(num_images=num_images, num_objects=num_objects, dim=DIM)
    plain = PlainBank(num_images)
    assert_same(bank, plain, generator)
    for _ in range(12):
        images = [chance.randrange(20) for _ in range(chance.randint(0, num_images))]
        objects, ids, counts = batch(generator, images, num_objects)
        bank.push(objects, ids, counts)
        plain.push(objects, ids, counts)
        assert_same(bank, plain, generator)
        if chance.random() < 0.3:
            state = copy.deepcopy(bank.state_dict())
            bank = MemoryBank(num_images=num_images, num_objects=num_objects, dim=DIM)
            bank.load_state_dict(state)
            assert_same(bank, plain, generator)


def test_images_without_objects_count() -> None:
    bank = MemoryBank(num_images=3, num_objects=2, dim=DIM)
    bank.push(torch.randn(2, 2, DIM), torch.tensor([1, 1]), [2])
    none = torch.zeros(2, 0, DIM), torch.zeros(0, dtype=torch.long)
    bank.push(*none, [0, 0])
    assert len(bank) == 2
    assert bank.images_held == 3
    bank.push(*none, [0])
    assert len(bank) == 0
    assert bank.images_held == 3


def test_a_batch_as_large_as_the_bank_replaces_it() -> None:
    bank = MemoryBank(num_images=4, num_objects=3, dim=DIM)
    bank.push(torch.randn(2, 5, DIM), torch.tensor([0, 0, 1, 2, 2]), [2, 1, 2])
    full, images = torch.randn(2, 12, DIM), torch.arange(10, 14).repeat_interleave(3)
    bank.push(full, images, [3] * 4)
    assert len(bank) == 12
    matches = bank.match(full, torch.full((12,), 99))
    for view in (0, 1):
        torch.testing.assert_close(bank.objects(view, matches.nearest[view]), full[view])
        assert torch.equal(bank.image_ids(matches.nearest[view]), images)
    assert matches.valid.all()


def wrapped_bank(dtype: torch.dtype = torch.float32, num_images: int = 5) -> MemoryBank:
    """A bank whose live rows wrap around the end of the ring."""
    generator = torch.Generator().manual_seed(0)
    bank = MemoryBank(num_images=num_images, num_objects=4, dim=DIM, dtype=dtype)
    for number in range(7):
        objects = torch.randn(2, 6, DIM, generator=generator)
        bank.push(objects, torch.tensor([2 * number] * 3 + [2 * number + 1] * 3), [3, 3])
    assert len(bank.rows.parts) == 2
    return bank


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_state_of_a_wrapped_bank_is_restored_from_a_file(dtype: torch.dtype) -> None:
    bank = wrapped_bank(dtype)
    file = io.BytesIO()
    torch.save(bank.state_dict(), file)
    file.seek(0)
    restored = MemoryBank(num_images=5, num_objects=4, dim=DIM, dtype=dtype)
    restored.load_state_dict(torch.load(file, weights_only=True))
    queries, images = torch.randn(2, 40, DIM), torch.arange(40) % 12
    before, after = bank.match(queries, images), restored.match(queries, images)
    assert torch.equal(before.nearest, after.nearest)
    assert torch.equal(before.valid, after.valid)
    more = torch.randn(2, 7, DIM), torch.tensor([50] * 4 + [51] * 3), [4, 3]
    bank.push(*more)
    restored.push(*more)
    before, after = bank.match(queries, images), restored.match(queries, images)
    assert torch.equal(before.nearest, after.nearest)
    assert torch.equal(bank.objects(1, before.nearest[1]), restored.objects(1, after.nearest[1]))


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_state_does_not_change_with_its_bank(wrapped: bool) -> None:
    """A batch that is pushed to a full bank replaces the oldest rows."""
    bank, each = (wrapped_bank(), 4) if wrapped else (MemoryBank(num_images=2, num_objects=1, dim=DIM), 1)
    if not wrapped:
        bank.push(torch.ones(2, 2, DIM), torch.tensor([0, 1]), [1, 1])
    state = bank.state_dict()
    before = copy.deepcopy(state)
    bank.push(torch.zeros(2, 2 * each, DIM), torch.tensor([2, 3]).repeat_interleave(each), [each, each])
    assert all(torch.equal(state[name], before[name]) for name in ("rows", "norms"))


def test_an_empty_bank_can_be_saved() -> None:
    bank = MemoryBank(num_images=3, num_objects=2, dim=DIM)
    restored = wrapped_bank()
    restored.load_state_dict(bank.state_dict())
    assert len(restored) == 0
    assert (restored.match(torch.randn(2, 3, DIM), torch.arange(3)).nearest == NO_MATCH).all()


def test_a_larger_bank_restores_the_state_of_a_smaller_one() -> None:
    bank = wrapped_bank()
    larger = MemoryBank(num_images=9, num_objects=4, dim=DIM)
    larger.load_state_dict(bank.state_dict())
    queries, images = torch.randn(2, 30, DIM), torch.arange(30) % 12
    before, after = bank.match(queries, images), larger.match(queries, images)
    assert torch.equal(before.valid, after.valid)
    for view in (0, 1):
        assert torch.equal(bank.objects(view, before.nearest[view]), larger.objects(view, after.nearest[view]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_rows_are_searched_in_float32(dtype: torch.dtype) -> None:
    torch.manual_seed(0)  # a tie after rounding is decided by the draw
    bank = MemoryBank(num_images=50, num_objects=2, dim=DIM, dtype=dtype)
    rows = torch.randn(2, 100, DIM)
    bank.push(rows, torch.arange(50).repeat_interleave(2), [2] * 50)
    rounded = rows.to(dtype).float()
    queries = torch.randn(2, 30, DIM)
    matches = bank.match(queries, torch.full((30,), 99))
    nearest, consistent = match_objects(queries, rounded)
    assert (matches.nearest == nearest).float().mean() > 0.95  # rows are rounded after normalisation
    assert (matches.valid == consistent).float().mean() > 0.9
    assert bank.objects(0, matches.nearest[0]).dtype == torch.float32


def test_own_images_never_match() -> None:
    bank = MemoryBank(num_images=10, num_objects=2, dim=DIM)
    rows, images = torch.randn(2, 20, DIM), torch.arange(10).repeat_interleave(2)
    bank.push(rows, images, [2] * 10)
    matches = bank.match(rows, images, criterion="none")
    assert matches.valid.all()
    for view in (0, 1):
        assert (bank.image_ids(matches.nearest[view]) != images).all()


def test_the_criterion_does_not_change_the_neighbours() -> None:
    bank = MemoryBank(num_images=40, num_objects=1, dim=DIM)
    rows = torch.randn(2, 40, DIM)
    bank.push(rows, torch.arange(40), [1] * 40)
    queries, images = torch.randn(2, 12, DIM), torch.arange(100, 112)
    everything = bank.match(queries, images, criterion="none")
    cycle = bank.match(queries, images)
    assert everything.valid.all()
    assert torch.equal(cycle.valid, match_objects(queries, rows)[1])
    assert torch.equal(cycle.nearest, everything.nearest)
    assert bank.match(queries[:, :1], images[:1]).valid.all()  # an object that is alone in its group matches itself


def test_cycles_close_within_a_group() -> None:
    bank = MemoryBank(num_images=40, num_objects=1, dim=DIM)
    bank.push(torch.randn(2, 40, DIM), torch.arange(40), [1] * 40)
    queries, images = torch.randn(2, 12, DIM), torch.arange(100, 112)
    groups = [slice(0, 4), slice(4, 4), slice(4, 12)]
    found = bank.match(queries, images, groups=groups)
    alone = [bank.match(queries[:, rows], images[rows]) for rows in groups]
    assert torch.equal(found.nearest, torch.cat([part.nearest for part in alone], dim=1))
    assert torch.equal(found.valid, torch.cat([part.valid for part in alone], dim=1))
    assert not torch.equal(found.valid, bank.match(queries, images).valid)


def test_pushed_tensors_are_copied() -> None:
    bank = MemoryBank(num_images=5, num_objects=4, dim=DIM)
    rows = torch.randn(2, 2, DIM, requires_grad=True)
    bank.push(rows, torch.tensor([0, 1]), [1, 1])
    before = bank.objects(0, torch.tensor([0, 1]))
    with torch.no_grad():
        rows.zero_()
    assert torch.equal(bank.objects(0, torch.tensor([0, 1])), before)


@pytest.mark.parametrize("name", ["num_images", "num_objects", "dim"])
def test_sizes_below_one(name: str) -> None:
    sizes: dict[str, Any] = {"num_images": 3, "num_objects": 2, "dim": 4, name: 0}
    with pytest.raises(ValueError, match=f"{name} must be >= 1, got 0"):
        MemoryBank(**sizes)


@pytest.mark.parametrize(
    ("objects", "counts", "message"),
    [
        (4, [2, 1], "counts .* 4 objects given, got 3"),
        (4, [1] * 4, "4 images .* bank of 3 images"),
        (7, [7], "7 objects .* bank of 3 images and 6 objects"),
    ],
)
def test_batches_that_do_not_fit_are_refused(objects: int, counts: list[int], message: str) -> None:
    bank = MemoryBank(num_images=3, num_objects=2, dim=DIM)
    with pytest.raises(ValueError, match=message):
        bank.push(torch.zeros(2, objects, DIM), torch.zeros(objects).long(), counts)


@pytest.mark.usefixtures("unchecked_shapes")
def test_an_unknown_criterion_is_refused() -> None:
    with pytest.raises(ValueError, match=r"criterion .* got 'oracle'"):
        wrapped_bank().match(torch.zeros(2, 2, DIM), torch.zeros(2).long(), criterion="oracle")  # pyright: ignore[reportArgumentType]


def test_a_state_that_does_not_fit_does_not_change_the_bank() -> None:
    state = wrapped_bank().state_dict()
    with pytest.raises(ValueError, match="the bank's objects have 8 channels, the state's 6"):
        MemoryBank(num_images=5, num_objects=4, dim=8).load_state_dict(state)
    smaller = MemoryBank(num_images=2, num_objects=4, dim=DIM)
    smaller.push(torch.ones(2, 3, DIM), torch.tensor([0, 0, 1]), [2, 1])
    with pytest.raises(ValueError, match="a state of 5 images with 15 objects does not fit a bank of 2 images"):
        smaller.load_state_dict(state)
    assert len(smaller) == 3
    assert smaller.images_held == 2


def test_objects_that_are_not_finite_are_stored_as_zeros() -> None:
    bank = MemoryBank(num_images=4, num_objects=1, dim=DIM)
    objects = torch.randn(2, 3, DIM)
    objects[0, 1, 2], objects[1, 2, 0] = torch.inf, torch.nan
    bank.push(objects, torch.arange(3), [1, 1, 1])
    assert (bank.objects(0, torch.tensor([1])) == 0).all()
    assert (bank.objects(1, torch.tensor([2])) == 0).all()
    matches = bank.match(objects.nan_to_num(0, 0, 0), 10 + torch.arange(3), criterion="none")
    assert matches.nearest[0, [0, 2]].tolist() == [0, 2]


def test_rows_too_large_for_half_precision_keep_their_norm():
    bank = MemoryBank(num_images=4, num_objects=1, dim=8, dtype=torch.float16)
    rows = torch.eye(8)[:4].expand(2, 4, 8).clone()
    rows[:, 0] *= 1e6
    bank.push(rows, torch.arange(4), counts=[1] * 4)
    torch.testing.assert_close(bank.objects(0, torch.arange(4)), rows[0])
    matches = bank.match(rows, torch.arange(4) + 100)
    assert matches.nearest.tolist() == [[0, 1, 2, 3]] * 2
