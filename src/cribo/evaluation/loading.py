"""A data loader that raises the errors of samples in the main process, unchanged."""

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset, default_collate

from cribo.data import UnreadableImage
from cribo.data.loading import unchanged


class Batches:
    """Load batches of a data set; an error in reading a sample is raised unchanged in this process.

    A `DataLoader` by itself turns errors in workers into others, with a traceback as their text.

    Args:
        dataset: of the samples.
        collate: makes a batch of a list of samples; torch's default if None. Unused if `batch_size` is None.
        options: of the `DataLoader`.
    """

    def __init__(
        self, dataset: Dataset[Any], collate: Callable[[list[Any]], Any] | None = None, **options: Any
    ) -> None:
        whole = "batch_size" in options and options["batch_size"] is None
        collate_fn = unchanged if whole else _Collate(collate or default_collate)
        self._loader: DataLoader[Any] = DataLoader(_Caught(dataset), collate_fn=collate_fn, **options)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            if isinstance(batch, Exception):
                raise batch
            yield batch


class _Caught(Dataset[Any]):
    """A data set that returns the error of a sample in its place."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)  # pyright: ignore[reportArgumentType]

    def __getitem__(self, key: Any) -> Any:
        try:
            return self._dataset[key]
        except (ValueError, OSError, UnreadableImage) as error:
            return error


class _Collate:
    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: list[Any]) -> Any:
        wrong = next((sample for sample in samples if isinstance(sample, Exception)), None)
        return self._collate(samples) if wrong is None else wrong
