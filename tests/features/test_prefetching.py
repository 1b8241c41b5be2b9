import time
from threading import Event

import pytest

from cribo.features.prefetching import prefetch


def size(item: int, result: int | None) -> int:
    return 10


def test_results_come_in_order_whatever_takes_longest() -> None:
    def slow_first(item: int) -> int:
        time.sleep(0.05 if item == 0 else 0)
        return 2 * item

    found = prefetch(slow_first, range(20), threads=4, ahead=6, nbytes=size)
    assert list(found) == list(range(0, 40, 2))


@pytest.mark.parametrize(("ahead", "budget", "most"), [(3, 10**6, 3), (100, 40, 4), (100, 1, 1)])
def test_no_more_is_held_than_items_and_bytes_allow(ahead: int, budget: int, most: int) -> None:
    taken = 0

    def items():
        nonlocal taken
        for item in range(30):
            taken += 1
            yield item

    largest = 0
    for consumed, _ in enumerate(prefetch(abs, items(), threads=2, ahead=ahead, nbytes=size, budget=budget), 1):
        largest = max(largest, taken - consumed)
    assert largest == most


def test_an_unknown_size_is_assumed_to_be_the_last_known() -> None:
    taken = []

    def items():
        for item in range(20):
            taken.append(item)
            yield item

    def first_only(item: int, result: int | None) -> int | None:
        return 10 if item == 0 else None

    found = prefetch(abs, items(), threads=2, ahead=20, nbytes=first_only, budget=50)
    assert next(found) == 0
    assert len(taken) == 6  # five of 10 bytes each, and the one that is let in next
    assert list(found) == list(range(1, 20))


def test_an_error_is_raised_in_its_place_and_the_rest_is_not_begun() -> None:
    begun = []

    def work(item: int) -> int:
        begun.append(item)
        if item == 3:
            raise OSError("disk full")
        return item

    found = prefetch(work, range(1000), threads=1, ahead=5, nbytes=size)
    with pytest.raises(OSError, match="disk full"):
        list(found)
    assert len(begun) < 12


def test_items_are_taken_while_the_first_is_worked_on() -> None:
    """A device computes the next batch while the files of the last one are written."""
    release = Event()

    def items():
        yield 0
        yield 1
        release.set()  # reached although 0 is not complete
        yield 2

    def write(item: int) -> bool:
        return release.wait(5) if item == 0 else True

    assert list(prefetch(write, items(), threads=1, ahead=5, nbytes=size)) == [True] * 3
