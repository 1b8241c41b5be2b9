"""Console output of commands: log lines, and progress with an ETA."""

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bars

Progress = Callable[[str, int, int], None]
"""Called with (description, number done, total number)."""

_LINE_SECONDS = 30.0  # between lines of progress if there is no terminal


def log_to(console: Console) -> None:
    """Print the package's log to a console."""
    log = logging.getLogger("cribo")
    log.setLevel(logging.INFO)
    log.handlers = [RichHandler(console=console, show_path=False, show_level=True, log_time_format="%H:%M:%S")]
    log.propagate = False


@contextmanager
def loading(console: Console) -> Iterator[None]:
    """Show `loading…` on a terminal during slow imports, and erase it afterwards.

    Example:
        >>> with loading(Console()):
        ...     import colorsys
    """
    if console.quiet or not sys.stderr.isatty():
        yield
        return
    said = "loading…"
    sys.stderr.write(said)
    sys.stderr.flush()
    try:
        yield
    finally:
        sys.stderr.write(f"\r{' ' * len(said)}\r")
        sys.stderr.flush()


def duration(seconds: float) -> str:
    """Format seconds as h:mm:ss or m:ss.

    Example:
        >>> duration(3725.2), duration(65)
        ('1:02:05', '1:05')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Phases:
    """Progress of work with several phases: a bar for each on a terminal, otherwise occasional lines.

    Call it as a `Progress`.

    Example:
        >>> with Phases(Console(quiet=True)) as progress:
        ...     progress("features", 1, 10)
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self._bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=console,
        )
        self._tasks: dict[str, TaskID] = {}
        self._started: dict[str, float] = {}
        self._printed = time.perf_counter()

    def __call__(self, what: str, done: int, total: int) -> None:
        """Show the progress of a phase."""
        now = time.perf_counter()
        started = self._started.setdefault(what, now)
        if self.console.is_terminal:
            if what not in self._tasks:
                self._tasks[what] = self._bars.add_task(what, total=total)
            self._bars.update(self._tasks[what], completed=done, total=total)
        elif done == total or now - self._printed >= _LINE_SECONDS:
            self._printed = now
            if done == total:
                time_said = f", {duration(now - started)}"
            else:  # the first call of a phase gives no speed
                time_said = (
                    f", ETA {duration((total - done) * (now - started) / done)}" if now > started and done else ""
                )
            self.console.print(f"{what}: {done}/{total}{time_said}", highlight=False)

    def __enter__(self) -> "Phases":
        if self.console.is_terminal:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.console.is_terminal:  # without a terminal, it would print an empty line
            self._bars.stop()
