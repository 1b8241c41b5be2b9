"""Data loader that re-raises errors of samples unchanged in the main process."""

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset, default_collate

from cribo.data import UnreadableImage
from cribo.data.loading import unchanged

_PREFETCHED = 4  # batches per worker


class Batches:
    """Data loader that re-raises errors of samples unchanged in the main process.

    A plain `DataLoader` wraps the errors of workers in other exceptions whose message is the traceback.

    Args:
        dataset: map-style data set of the samples.
        collate: collates a list of samples; torch's default if None. Ignored if `batch_size` is None.
        workers: number of worker processes; 0 loads in the main process.
        options: further options of `DataLoader`.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        collate: Callable[[list[Any]], Any] | None = None,
        *,
        workers: int = 0,
        **options: Any,
    ) -> None:
        whole = "batch_size" in options and options["batch_size"] is None
        self._loader: DataLoader[Any] = DataLoader(
            _Caught(dataset),
            collate_fn=unchanged if whole else _Collate(collate or default_collate),
            num_workers=workers,
            prefetch_factor=_PREFETCHED if workers else None,
            **options,
        )

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            if isinstance(batch, Exception):
                raise batch
            yield batch


class _Caught(Dataset[Any]):
    """Data set that returns the exception of an unreadable sample instead of raising it."""

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
