"""TensorBoard's log of a training that goes on without it."""

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from lightning.pytorch.loggers import TensorBoardLogger

log = logging.getLogger("cribo")


class Events(TensorBoardLogger):
    """TensorBoard's log, which begins another file some time after the one before could not be written to.

    TensorBoard's writer gives up at the first error, and raises it again at whatever it is asked, the last time when
    the run has ended.
    """

    _silent_until = 0.0

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log numbers.

        Raises:
            OSError: they cannot be written; nothing is for a while.
        """
        if time.monotonic() < self._silent_until:
            return
        try:
            super().log_metrics(metrics, step)
        except (OSError, ValueError) as error:
            # Lightning takes any failure for numbers that it cannot log.
            cause = error if isinstance(error, OSError) else error.__cause__
            if not isinstance(cause, OSError):
                raise
            self._experiment = None
            self._silent_until = time.monotonic() + _SECONDS_BETWEEN_TRIES
            raise cause from None

    def finalize(self, status: str) -> None:
        """Write what is left, if it can be written."""
        with going_on(self.log_dir):
            super().finalize(status)


# Each try leaves an empty file while it fails.
_SECONDS_BETWEEN_TRIES = 60.0


@contextmanager
def going_on(what: object) -> Iterator[None]:
    """Say what could not be written, and go on: training is worth more than its protocol."""
    try:
        yield
    except OSError as error:
        log.error("could not write to %s: %s; training goes on", what, error.strerror or error)
