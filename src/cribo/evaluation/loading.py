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
        collate: collates a list of samples.
        workers: number of worker processes; 0 loads in the main process.
        options: further options of `DataLoader`.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        collate: Callable[[list[Any]], Any] = default_collate,
        *,
        workers: int = 0,
        **options: Any,
    ) -> None:
        self._loader: DataLoader[Any] = DataLoader(
            _Collated(dataset, collate),
            collate_fn=unchanged,
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


class _Collated(Dataset[Any]):
    """Data set of batches, which returns the exception of an unreadable sample instead of raising it."""

    def __init__(self, dataset: Dataset[Any], collate: Callable[[list[Any]], Any]) -> None:
        self._dataset, self._collate = dataset, collate

    def __len__(self) -> int:
        return len(self._dataset)  # pyright: ignore[reportArgumentType]

    def __getitems__(self, keys: list[Any]) -> Any:
        try:
            return self._collate([self._dataset[key] for key in keys])
        except (ValueError, OSError, UnreadableImage) as error:
            return error
