"""The examples of a memory on disk: listed and removed, without the backbone."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from cribo.data.images import DataError
from cribo.segmentation.memory import SegmentationMemory
from cribo.segmentation.storage import memory_lock


class ListedExample(NamedTuple):
    """An example of a memory.

    Attributes:
        number: from 1, in the order in which examples were added.
        name: of its image.
        shares: of each class in its labelled pixels, by name, the largest first.
        correct: share of its patches that are labelled correctly when it is left out; None if that is unknown.
    """

    number: int
    name: str
    shares: dict[str, float]
    correct: float | None


def list_examples(memory: SegmentationMemory) -> list[ListedExample]:
    """The examples of a memory, with how well the others predict each of them."""
    correct: list[float | None] = [None] * len(memory)
    if memory.fit().expected is not None:
        correct = [float(counts.trace() / counts.sum()) for counts in memory.left_out()]
    return [
        ListedExample(place + 1, name, memory.classes_of(place), share)
        for place, (name, share) in enumerate(zip(memory.names, correct, strict=True))
    ]


def remove_examples(path: str | Path, examples: Sequence[str]) -> SegmentationMemory:
    """Remove examples from the file of a memory, choose its probe again, and return what is left.

    Args:
        path: the file, which is replaced as a whole.
        examples: names, or numbers as `list_examples` gives them, for names that several examples share.

    Raises:
        DataError: an example that is not there, a name that several share, or no example would be left.
    """
    path = Path(path).expanduser()
    with memory_lock(path):
        memory = SegmentationMemory.load(path, None, device="cpu")
        memory.remove([_place(memory.names, example) for example in examples])
        memory.fit()
        memory.save(path)
    return memory


def _place(names: Sequence[str], example: str) -> int:
    places = [place for place, name in enumerate(names) if name == example]
    if len(places) == 1:
        return places[0]
    if places:
        numbers = ", ".join(str(place + 1) for place in places)
        raise DataError(f"{len(places)} examples are called {example}: give a number of {numbers} instead (see --list)")
    if example.isdecimal() and 1 <= int(example) <= len(names):
        return int(example) - 1
    raise DataError(f"no example is called {example}, and numbers are 1 to {len(names)}: see --list")
