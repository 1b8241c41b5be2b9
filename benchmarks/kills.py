"""Kill random workers of a loader at random times: how soon are they replaced, and are the batches still the same?

uv run python -m benchmarks.kills ../shared/data/labelmefacade/images/train
"""

import argparse
import logging
import multiprocessing
import random
import sys
import threading
import time
from collections.abc import Generator
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from cribo.base.errors import UnreadableImage
from cribo.data import ImageFiles, ImageSource, open_images
from cribo.data.loading import BatchLoader
from cribo.data.samples import Batch, SampleDataset, StepBatchSampler
from cribo.method import ViewRecipe
from cribo.objectives.views import ViewPairs

BATCH = 16
STEP_SECONDS = 0.2  # maximum duration of a step


class LongNames:
    """Images with long names, a third of which are unreadable, so that messages are longer than a pipe holds."""

    def __init__(self, images: ImageFiles) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def name(self, index: int) -> str:
        """Return a long name."""
        return self.images.name(index) + 50_000 * "x"

    def load(self, index: int) -> Tensor:
        """Load an image, unless its index is a multiple of 3."""
        if index % 3 == 0:
            raise UnreadableImage(self.name(index), "on purpose")
        return self.images.load(index)


class Kills(logging.Handler):
    """Kills one worker after the other, and notes how each death was noticed, from the log of the loader.

    Args:
        count: number of kills.
        draw: source of the random workers and times.

    Attributes:
        noticed: seconds from each kill to the restart, and the logged cause.
        has_loaded: set by the loop after each batch.
    """

    def __init__(self, count: int, draw: random.Random) -> None:
        super().__init__()
        self.count, self.draw = count, draw
        self.noticed: list[tuple[float, str]] = []
        self.has_loaded = threading.Event()
        self._restarted = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        """Note a restart."""
        self.noticed.append((time.monotonic() - self._killed_at, record.getMessage()))
        self._restarted.set()

    def run(self) -> None:
        """Kill the workers."""
        for _ in range(self.count):
            self.has_loaded.clear()
            self.has_loaded.wait()  # kills that follow each other too closely would exceed the number of restarts
            time.sleep(self.draw.uniform(0.2, 1.5))
            worker = self.draw.choice(multiprocessing.active_children())
            self._killed_at = time.monotonic()
            worker.kill()
            self._restarted.wait()
            self._restarted.clear()


def sums(source: ImageSource, workers: int, timeout: float) -> Generator[Tensor, None, None]:
    """Load batches endlessly, and yield a checksum of each."""
    views = ViewPairs(ViewRecipe(size=64), grid=(4, 4), num_objects=5, drop_path_sites=0)
    dataset = SampleDataset(source, views, seed=0)
    step = 0
    sampler = StepBatchSampler(source, BATCH, 0, position=lambda: step)
    loader = BatchLoader(dataset, sampler, workers=workers, pin_memory=False, timeout=timeout)
    try:
        while True:
            for batch in loader:
                yield checksum(batch)
                step += 1
    finally:
        loader.close()


def checksum(batch: Batch) -> Tensor:
    """Sum the bytes of the views, weighted by their position, in integers."""
    values = batch["views"].contiguous().view(torch.uint8).flatten().long()
    return (values * torch.arange(len(values))).sum()


def measure(source: ImageSource, count: int, workers: int, timeout: float, seed: int) -> tuple[str, ...]:
    """Kill workers, and return the cells of a row."""
    draw = random.Random(seed)
    kills = Kills(count, draw)
    logging.getLogger("cribo").addHandler(kills)
    thread = threading.Thread(target=kills.run, daemon=True)
    loaded, found = sums(source, workers, timeout), [next(sums(source, 0, timeout))]
    assert torch.equal(next(loaded), found[0])
    thread.start()
    while thread.is_alive():
        time.sleep(draw.uniform(0, STEP_SECONDS))
        found.append(next(loaded))
        kills.has_loaded.set()
    loaded.close()
    logging.getLogger("cribo").removeHandler(kills)
    is_same = all(torch.equal(mine, other) for mine, other in zip(found, sums(source, 0, timeout), strict=False))
    seconds = sorted(after for after, cause in kills.noticed if "SIGKILL" in cause)
    late = len(kills.noticed) - len(seconds)
    times = f"{seconds[len(seconds) // 2]:.1f} ({seconds[-1]:.1f})"
    return str(len(found)), str(len(seconds)), times, str(late), "yes" if is_same else "NO"


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of images")
    parser.add_argument("--kills", type=int, default=50, help="number of kills of each row")
    parser.add_argument("--workers", type=int, default=2, help="number of workers")
    parser.add_argument("--timeout", type=float, default=10.0, help="data.timeout of the loader")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    images = open_images(arguments.folder)
    title = f"{arguments.kills} SIGKILLs of one of {arguments.workers} workers, PyTorch {torch.__version__}"
    table = Table(title=title)
    columns = ("messages", "batches", "noticed as a kill", "s, median (most)", "noticed by the timeout", "same batches")
    for column in columns:
        table.add_column(column, justify="left" if column == "messages" else "right")
    for name, source in (("ordinary", images), ("longer than a pipe", LongNames(images))):
        row = measure(source, arguments.kills, arguments.workers, arguments.timeout, seed=0)
        table.add_row(name, *row)
    Console(width=None if sys.stdout.isatty() else 150).print(table)


if __name__ == "__main__":
    main()
