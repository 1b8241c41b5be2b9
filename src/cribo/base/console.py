"""Console output of commands: log lines, and progress with an ETA."""

import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType

from rich.console import Console, ConsoleOptions, RenderableType
from rich.logging import RichHandler
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bars
from rich.segment import Segment
from rich.table import Column
from rich.text import Text

from cribo.base.redaction import without_secrets
from cribo.base.startup import import_vision_libraries
from cribo.base.wording import printable

Progress = Callable[[str, int, int], None]
"""Called with (description, number done, total number)."""


def no_progress(what: str, done: int, total: int) -> None:
    """Show no progress."""


@contextmanager
def log_level(level: int, *names: str) -> Iterator[None]:
    """Set the level of loggers, and restore their levels on exit.

    Args:
        level: level from which messages are shown, such as `logging.ERROR`.
        names: names of the loggers.
    """
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(level)
        yield
    finally:
        for logger, before in zip(loggers, levels, strict=True):
            logger.setLevel(before)


_LINE_SECONDS = 30.0  # between progress lines without a terminal
_BAR = 16  # characters


class _SafeConsole(Console):
    """A console that masks secrets in URLs and escapes control characters, such as those that move the cursor."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            text = segment.text if segment.control else printable(segment.text)
            yield segment._replace(text=without_secrets(text))


def command_console(*, quiet: bool = False) -> Console:
    """Create the console of a command, without Rich markup, since file and class names may contain brackets."""
    return _SafeConsole(soft_wrap=True, markup=False, highlight=False, quiet=quiet)


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
    text = "loading…"
    sys.stderr.write(text)
    sys.stderr.flush()
    try:
        yield
    finally:
        sys.stderr.write(f"\r{' ' * len(text)}\r")
        sys.stderr.flush()


@contextmanager
def importing(console: Console) -> Iterator[None]:
    """Import the slow packages of a command, before it opens or writes anything: Ctrl-C exits at once.

    Otherwise a KeyboardInterrupt could be lost: packages catch it, and Python ignores it in a callback of an import.

    Example:
        >>> with importing(Console()):
        ...     import colorsys
    """
    if threading.current_thread() is not threading.main_thread():
        with loading(console), _without_collection():
            yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        os.write(2, b"\ninterrupted; nothing was written\n")
        os._exit(128 + number)

    before = signal.signal(signal.SIGINT, leave)
    try:
        with loading(console), _without_collection():
            yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _without_collection() -> Iterator[None]:
    """Pause the garbage collector: imports create many objects, and none of them is garbage."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def importing_networks(console: Console) -> Iterator[None]:
    """Import the slow packages of a command that computes features, as `importing` does."""
    with importing(console):
        import_vision_libraries()
        yield


def duration(seconds: float) -> str:
    """Format seconds as h:mm:ss or m:ss.

    Example:
        >>> duration(3725.2), duration(65)
        ('1:02:05', '1:05')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class _Numbers(ProgressColumn):
    """The numbers of a phase, cut on the right to the space that is left."""

    def render(self, task: Task) -> Text:
        return Text(task.fields["numbers"], no_wrap=True, overflow="ellipsis")


class Phases:
    """Display of progress in several phases: one bar per phase on a terminal, otherwise a line every 30 seconds.

    Instances are callable as `Progress`, with optional further text.

    Args:
        console: to print to.
        first_line: seconds until the first line without a terminal, at most 30.

    Example:
        >>> with Phases(Console(quiet=True)) as progress:
        ...     progress("features", 1, 10)
    """

    def __init__(self, console: Console, *, first_line: float = _LINE_SECONDS) -> None:
        self.console = console
        whole = Column(no_wrap=True)  # only the numbers become narrower on a narrow terminal
        self._bars = Bars(
            TextColumn("{task.description}", table_column=whole.copy()),
            BarColumn(bar_width=_BAR, table_column=whole.copy()),
            MofNCompleteColumn(table_column=whole.copy()),
            TimeElapsedColumn(table_column=whole.copy()),
            TextColumn("ETA", table_column=whole.copy()),
            TimeRemainingColumn(table_column=whole.copy()),
            _Numbers(),
            console=console,
        )
        self._tasks: dict[str, TaskID] = {}
        self._started: dict[str, tuple[float, int]] = {}
        self._printed = time.perf_counter() - _LINE_SECONDS + min(first_line, _LINE_SECONDS)

    def __call__(self, what: str, done: int, total: int, numbers: str = "") -> None:
        """Show the progress of a phase."""
        now = time.perf_counter()
        started, begun = self._started.setdefault(what, (now, done))
        if self.console.is_terminal:
            if what not in self._tasks:
                self._tasks[what] = self._bars.add_task(what, total=total, numbers="")
            self._bars.update(self._tasks[what], completed=done, total=total, numbers=numbers)
        elif done == total or now - self._printed >= _LINE_SECONDS:
            self._printed = now
            if done == total:
                timing = f", {duration(now - started)}"
            else:  # the speed is unknown until the second call
                left = (total - done) * (now - started) / max(done - begun, 1)
                timing = f", ETA {duration(left)}" if done > begun else ""
            line = f"{what}: {done}/{total}{timing} {numbers}"
            self.console.print(line.rstrip(), highlight=False, soft_wrap=True)

    def __enter__(self) -> "Phases":
        if self.console.is_terminal:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.console.is_terminal:  # otherwise stop() prints an empty line
            self._bars.stop()
