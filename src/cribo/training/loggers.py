"""Services that record trainings beside TensorBoard. Their packages are imported on use only."""

import logging
import os
import re
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Literal

from cribo.base.bounds import require_distinct
from cribo.base.errors import ConfigError
from cribo.base.job import result_kind
from cribo.base.packages import require_packages
from cribo.base.redaction import without_secrets

log = logging.getLogger("cribo")

PROJECT = "cribo"
"""Name of the project or experiment, unless an environment variable of the service names another."""

TENSORBOARD = "tensorboard"

Status = Literal["finished", "failed", "interrupted"]

_UPLOAD_SECONDS = 600  # limit for the upload of buffered data at the end
_MLFLOW_PARAMS = 100  # maximum per request


class Service(ABC):
    """A run in a service that records trainings; created or continued by the constructor.

    Methods raise errors of the service, of any type.

    Args:
        folder: folder of the training.
        name: name of a new run.
        run_id: identity of the run to continue; None for a new one.
        settings: hyperparameters of the training, by dotted name.

    Attributes:
        packages: import names of the required packages.
        extra: extra of this package that installs them.
        id: identity of the run.
    """

    packages: ClassVar[tuple[str, ...]]
    extra: ClassVar[str]
    id: str

    @abstractmethod
    def __init__(self, folder: Path, name: str, run_id: str | None, settings: Mapping[str, Any]) -> None: ...

    @classmethod  # noqa: B027 (most services need none)
    def require_login(cls) -> None:
        """Check that the service can be used without a prompt.

        Raises:
            ConfigError: the user is not logged in.
        """

    @abstractmethod
    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record numbers of a step."""

    @abstractmethod
    def log_picture(self, path: Path, step: int) -> None:
        """Record a picture of the report."""

    @abstractmethod
    def finish(self, status: Status) -> None:
        """End the run."""


class Wandb(Service):
    """Run of Weights & Biases."""

    packages = ("wandb",)
    extra = "wandb"

    def __init__(self, folder: Path, name: str, run_id: str | None, settings: Mapping[str, Any]) -> None:
        import wandb

        limits: dict[str, Any] = {} if "WANDB_FINISH_TIMEOUT" in os.environ else {"finish_timeout": _UPLOAD_SECONDS}
        with _masked_command_line():
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", PROJECT),
                name=os.environ.get("WANDB_NAME", name),
                dir=folder,
                id=run_id,
                resume="allow",
                reinit="create_new",  # a caller's own run stays untouched
                config=dict(settings),
                settings=wandb.Settings(**limits),
            )
        # The service's own steps only increase, but a resumed training repeats those after its checkpoint.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self.id = self._run.id

    @classmethod
    def require_login(cls) -> None:
        """Check that there are credentials, unless the mode is offline or disabled."""
        import wandb

        if wandb.setup().settings.mode in ("online", "shared") and not wandb.login(prompt=False, verify=False):
            raise ConfigError(
                "--logger wandb: not logged in to Weights & Biases: run `wandb login`, set WANDB_API_KEY, or set "
                "WANDB_MODE=offline to write to the run folder only"
            )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record numbers of a step."""
        self._run.log({**metrics, "step": step})

    def log_picture(self, path: Path, step: int) -> None:
        """Record a picture of the report."""
        import wandb

        self._run.log({f"report/{path.stem}": wandb.Image(str(path)), "step": step})

    def finish(self, status: Status) -> None:
        """Upload the remaining data, and end the run."""
        self._run.finish(exit_code={"finished": 0, "failed": 1, "interrupted": 255}[status])


class MLflow(Service):
    """Run of MLflow, by default in a database in the folder of the training."""

    packages = ("mlflow", "sqlalchemy", "alembic")
    extra = "mlflow"

    def __init__(self, folder: Path, name: str, run_id: str | None, settings: Mapping[str, Any]) -> None:
        # MLflow's defaults would block the training for minutes if its server fails.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        from mlflow import MlflowClient, get_tracking_uri, is_tracking_uri_set

        database = f"sqlite:///{folder.absolute() / 'mlflow.db'}"
        uri = get_tracking_uri() if is_tracking_uri_set() else database
        self._is_local = uri == database
        self._client = MlflowClient(uri)
        log.info("mlflow: recording %s in %s", name, without_secrets(uri))
        if run_id is not None:
            self._client.update_run(run_id, status="RUNNING")
            self.id = run_id
            return
        self.id = self._create_run(name, folder)
        try:
            self._log_settings(settings)
        except Exception:
            self.finish("failed")
            raise

    def _create_run(self, name: str, folder: Path) -> str:
        from mlflow.tracking.context.registry import resolve_tags

        experiment = os.environ.get("MLFLOW_EXPERIMENT_ID") or self._experiment(folder)
        return self._client.create_run(experiment, run_name=name, tags=resolve_tags()).info.run_id

    def _log_settings(self, settings: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        params = [Param(_mlflow_name(name), str(value)) for name, value in settings.items()]
        for first in range(0, len(params), _MLFLOW_PARAMS):
            self._client.log_batch(self.id, params=params[first : first + _MLFLOW_PARAMS])

    def _experiment(self, folder: Path) -> str:
        """Return the identity of the experiment, which is created if it does not exist."""
        from mlflow.exceptions import MlflowException

        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        place = (folder.absolute() / "mlflow").as_uri() if self._is_local else None
        found = self._client.get_experiment_by_name(name)
        if found is None:
            try:
                return self._client.create_experiment(name, artifact_location=place)
            except MlflowException:
                found = self._client.get_experiment_by_name(name)
                if found is None:  # not created by another process either
                    raise
        return found.experiment_id

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record numbers of a step."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        numbers = [Metric(_mlflow_name(name), value, now, step) for name, value in metrics.items()]
        self._client.log_batch(self.id, metrics=numbers)

    def log_picture(self, path: Path, step: int) -> None:
        """Upload a picture of the report; no-op for a database beside the report."""
        if not self._is_local:
            self._client.log_artifact(self.id, str(path), "report")

    def finish(self, status: Status) -> None:
        """End the run."""
        states = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
        self._client.set_terminated(self.id, states[status])


class Trackio(Service):
    """Run of trackio."""

    packages = ("trackio",)
    extra = "trackio"

    def __init__(self, folder: Path, name: str, run_id: str | None, settings: Mapping[str, Any]) -> None:
        import trackio

        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=name,
            config=dict(settings),
            resume="never" if run_id is None else "allow",
            embed=False,  # would start a server in notebooks
        )
        if run_id is not None:
            self._run.id = run_id  # trackio continues the latest run of that name, which may be another one
        self.id = self._run.id

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record numbers of a step."""
        self._run.log(dict(metrics), step=step)

    def log_picture(self, path: Path, step: int) -> None:
        """Record a picture of the report."""
        import trackio

        self._run.log({f"report/{path.stem}": trackio.Image(str(path))}, step=step)

    def finish(self, status: Status) -> None:
        """Write the remaining data; runs have no status, so that all but a finished one gets an alert."""
        import trackio

        if status != "finished":
            self._run.alert(f"training {status}", level=trackio.AlertLevel.ERROR)
        trackio.finish()


def _mlflow_name(name: str) -> str:
    """Replace the characters that MLflow refuses in names."""
    return re.sub(r"[^\w\-./: ]", "_", name)


@contextmanager
def _masked_command_line() -> Iterator[None]:
    """Mask secrets in the command line, which wandb records."""
    words = sys.argv
    sys.argv = [without_secrets(word) for word in words]
    try:
        yield
    finally:
        sys.argv = words


SERVICES: dict[str, type[Service]] = {"wandb": Wandb, "mlflow": MLflow, "trackio": Trackio}
"""Services by the names of their loggers."""

LOGGERS = (TENSORBOARD, *SERVICES)
"""Names of all loggers."""


def require_loggers(names: Iterable[str]) -> None:
    """Check that the packages of loggers are installed.

    Raises:
        MissingPackage: a package is not installed.
    """
    for name in names:
        if name in SERVICES:
            require_packages(f"--logger {name}", *SERVICES[name].packages, extra=SERVICES[name].extra)


def require_logins(names: Iterable[str]) -> None:
    """Check that the services of loggers can be used without a prompt; for rank 0.

    Raises:
        ConfigError: the user is not logged in.
    """
    for name in names:
        if name in SERVICES:
            SERVICES[name].require_login()


def require_known(names: tuple[str, ...]) -> None:
    """Check the names of loggers.

    Raises:
        ConfigError: there are none, or a name is unknown or repeated.
    """
    require_distinct("runtime.logger", names, LOGGERS)


def run_name(folder: Path) -> str:
    """Return the name of a training: its folder, with those of the results that it is a part of.

    Example:
        >>> run_name(Path("runs/mine"))
        'mine'
    """
    folder = folder.absolute()
    names = [folder.name]
    for parent in folder.parents:
        if result_kind(parent) is None:
            break
        names.insert(0, parent.name)
    return "/".join(names)


def plain_settings(value: Any) -> Any:
    """Return settings as JSON types, without secrets in strings.

    Example:
        >>> plain_settings({"roots": ("s3://me:secret@host", Path("here")), "seed": 3})
        {'roots': ['s3://***@host', 'here'], 'seed': 3}
    """
    if isinstance(value, Mapping):
        return {str(name): plain_settings(each) for name, each in value.items()}
    if isinstance(value, list | tuple | set):
        return [plain_settings(each) for each in value]
    return value if isinstance(value, bool | int | float | None) else without_secrets(str(value))
