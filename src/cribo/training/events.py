"""Logging without stopping training at errors of files or services."""

import json
import logging
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger, TensorBoardLogger

from cribo.base.errors import ConfigError, FolderError, Interrupted
from cribo.base.files import write_json
from cribo.base.job import flat
from cribo.base.machine import is_first_process
from cribo.base.redaction import without_secrets
from cribo.training.loggers import SERVICES, TENSORBOARD, Service, Status, plain_settings, run_name

log = logging.getLogger("cribo")

RUN_IDS = "loggers.json"
"""File of the identities of a training's runs in services, by name of the logger."""

_RETRY_SECONDS = 60.0  # each failed attempt creates an empty file
_LONGEST_RETRY_SECONDS = 3600.0  # each failed attempt may block the training for half a minute


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


class ServiceLogger(Logger):
    """Lightning logger of a service whose errors do not stop training.

    Numbers that could not be sent are sent later: a minute after the first error, then after twice as long each time.

    Args:
        name: name of the logger.
        service: the run in the service.
    """

    def __init__(self, name: str, service: Service) -> None:
        super().__init__()
        self._name, self._service = name, service
        self._unsent: deque[tuple[dict[str, float], int]] = deque()
        self._step = 0
        self._wait, self._silent_until = _RETRY_SECONDS, 0.0
        self._warned = False

    @property
    def name(self) -> str:
        """Name of the logger."""
        return self._name

    @property
    def version(self) -> str:
        """Identity of the run in the service."""
        return self._service.id

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """No-op: they are recorded when the run is created."""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Send numbers, or keep them while the service fails."""
        self._step = self._step if step is None else step
        self._unsent.append((dict(metrics), self._step))
        if time.monotonic() >= self._silent_until:
            self._send()

    def close(self, status: Status, pictures: Sequence[Path] = ()) -> None:
        """Send what is left, and end the run in the service.

        Args:
            status: how the training ended.
            pictures: files of pictures to send.
        """
        self._send()
        if self._unsent:
            log.error("%s: %d rows of numbers could not be sent", self._name, len(self._unsent))
            pictures = ()
        with self._warn_once():
            for path in pictures:
                self._service.log_picture(path, self._step)
        with self._warn_once():
            self._service.finish(status)

    def _send(self) -> None:
        with self._warn_once():
            while self._unsent:
                self._service.log(*self._unsent[0])
                self._unsent.popleft()
            self._wait = _RETRY_SECONDS
            return
        self._silent_until = time.monotonic() + self._wait
        self._wait = min(2 * self._wait, _LONGEST_RETRY_SECONDS)

    @contextmanager
    def _warn_once(self) -> Iterator[None]:
        """Log the service's first error only; any type, because each service has its own."""
        try:
            yield
        except Exception as error:
            if not self._warned:
                self._warned = True
                log.error("%s: %s; training continues", self._name, _on_one_line(error))


@contextmanager
def open_loggers(
    names: Sequence[str], folder: Path, *, settings: Mapping[str, Any], pictures: Path | None = None
) -> Iterator[list[Logger]]:
    """Open the loggers of a training, and end its runs in services with the status of the `with` block.

    A resumed training continues its runs. Ranks other than 0 only get TensorBoard's logger, which ignores them.

    Args:
        names: names of the loggers.
        folder: folder of the training, which has the identities of its runs.
        settings: hyperparameters of a new run, nested or by dotted names.
        pictures: folder of PNG files that are sent at the end of a finished training.

    Raises:
        ConfigError: a new run could not be created. If a run cannot be continued, this is logged instead.
        FolderError: the file of identities is damaged.
    """
    services: list[ServiceLogger] = []
    status: Status = "failed"
    try:
        if is_first_process():
            for service in _open_services(names, folder, settings):  # those before an error are closed
                services.append(service)
        tensorboard = [Events(folder, name="", version="tensorboard")] if TENSORBOARD in names else []
        yield [*tensorboard, *services]
        status = "finished"
    except (KeyboardInterrupt, Interrupted):
        status = "interrupted"
        raise
    finally:
        found = sorted(pictures.glob("*.png")) if status == "finished" and pictures is not None else []
        for logger in services:
            logger.close(status, found)


def _open_services(names: Sequence[str], folder: Path, settings: Mapping[str, Any]) -> Iterator[ServiceLogger]:
    path = folder / RUN_IDS
    try:
        ids: dict[str, str] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise FolderError(f"{path} is damaged: remove it to record the training in new runs") from error
    shown = plain_settings(flat(settings))
    for name in names:
        if name not in SERVICES:
            continue
        try:
            service = SERVICES[name](folder, run_name(folder), ids.get(name), shown)
        except Exception as error:  # each service has its own types
            if name not in ids:
                raise ConfigError(
                    f"--logger {name}: could not create a run: {_on_one_line(error)}. Check the service, or resume "
                    f"{folder} with another --logger"
                ) from error
            log.error("%s: could not continue run %s: %s; training continues", name, ids[name], _on_one_line(error))
            continue
        if name not in ids:
            ids[name] = service.id
            write_json(path, ids)
        yield ServiceLogger(name, service)


def _on_one_line(error: Exception) -> str:
    return without_secrets(" ".join(str(error).split()) or type(error).__name__)
