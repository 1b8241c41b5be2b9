"""List and remove the examples of a memory file without loading the backbone."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from cribo.base.errors import DataError
from cribo.data.sources.images import composed
from cribo.features.memory.memory import SegmentationMemory
from cribo.features.memory.storage import memory_lock


class ListedExample(NamedTuple):
    """An example of a memory.

    Attributes:
        number: number of the example, from 1, in the order of addition.
        name: name of its image.
        shares: share of each class in its labelled pixels, by name, in descending order.
        correct: share of its patches that are labelled correctly when it is left out; None if unknown.
    """

    number: int
    name: str
    shares: dict[str, float]
    correct: float | None


def list_examples(memory: SegmentationMemory) -> list[ListedExample]:
    """List the examples of a memory with the accuracy of their left-out predictions."""
    correct: list[float | None] = [None] * len(memory)
    if memory.fit().expected is not None:
        correct = [float(counts.trace() / counts.sum()) for counts in memory.left_out()]
    return [
        ListedExample(place + 1, name, memory.classes_of(place), share)
        for place, (name, share) in enumerate(zip(memory.names, correct, strict=True))
    ]


def remove_examples(path: str | Path, examples: Sequence[str]) -> SegmentationMemory:
    """Remove examples from a memory file, choose its probe again, and return the new memory.

    Args:
        path: the memory file, which is replaced atomically.
        examples: names of examples, or numbers from `list_examples` if several examples share a name.

    Raises:
        DataError: an example does not exist, a name is ambiguous, or no example would be left.
    """
    path = Path(path).expanduser()
    with memory_lock(path):
        memory = SegmentationMemory.load(path, None, device="cpu")
        memory.remove([_place(memory.names, example) for example in examples])
        memory.fit()
        memory.save(path)
    return memory


def _place(names: Sequence[str], example: str) -> int:
    places = [place for place, name in enumerate(names) if composed(name) == composed(example)]
    if len(places) == 1:
        return places[0]
    if places:
        numbers = ", ".join(str(place + 1) for place in places)
        raise DataError(f"{len(places)} examples are named {example}: give one of the numbers {numbers} (see --list)")
    if example.isdecimal() and 1 <= int(example) <= len(names):
        return int(example) - 1
    raise DataError(f"no example is named {example}, and numbers are 1 to {len(names)}: see --list")
