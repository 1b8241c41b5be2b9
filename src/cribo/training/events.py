"""Logging without stopping training at write errors."""

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from lightning.pytorch.loggers import TensorBoardLogger

log = logging.getLogger("cribo")

_RETRY_SECONDS = 60.0  # each failed attempt creates an empty file


@contextmanager
def log_write_errors(what: object) -> Iterator[None]:
    """Log a write error and continue."""
    try:
        yield
    except OSError as error:
        log.error("could not write to %s: %s; training continues", what, error.strerror or error)


class Events(TensorBoardLogger):
    """TensorBoard logger that continues in a new file a minute after a write error.

    TensorBoard's writer stops at the first error, and raises it again at each call.
    """

    _silent_until = 0.0

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log metrics."""
        if time.monotonic() < self._silent_until:
            return
        with log_write_errors(self.log_dir):
            try:
                super().log_metrics(metrics, step)
            except (OSError, ValueError) as error:
                # Lightning converts the writer's errors to ValueErrors.
                cause = error if isinstance(error, OSError) else error.__cause__
                if not isinstance(cause, OSError):
                    raise
                self._experiment = None
                self._silent_until = time.monotonic() + _RETRY_SECONDS
                raise cause from None

    def finalize(self, status: str) -> None:
        """Flush the log."""
        with log_write_errors(self.log_dir):
            super().finalize(status)
