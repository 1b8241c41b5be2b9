"""Services record a training: the same numbers as metrics.csv, in one run, and without stopping it."""

import importlib.util
import json
import logging
import os
import re
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import lightning as L
import numpy as np
import pytest
from PIL import Image

from cribo.apps.adapt.config import AdaptConfig
from cribo.apps.adapt.planning import load_recipe
from cribo.base.errors import ConfigError, FolderError, MissingPackage
from cribo.base.job import Job
from cribo.base.packages import install_command
from cribo.cli import main
from cribo.features.config import BackboneSource
from cribo.pretraining import PretrainConfig, load_config, pretrain, resume
from cribo.pretraining.monitoring import read_metrics
from cribo.training import events
from cribo.training.events import RUN_IDS, open_loggers
from cribo.training.loggers import LOGGERS, SERVICES, run_name

KEY = "0123456789abcdef" * 2 + "01234567"

Numbers = dict[tuple[int, str], float]


def needs(name: str) -> pytest.MarkDecorator:
    missing = [each for each in SERVICES[name].packages if importlib.util.find_spec(each) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")


SERVICE_NAMES = [pytest.param(name, marks=needs(name)) for name in SERVICES]


@pytest.fixture(autouse=True, scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Set variables that keep the services' files in a temporary folder and off the network."""
    folder = tmp_path_factory.mktemp("services")
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(("WANDB_", "MLFLOW_", "TRACKIO_"))]:
            patch.delenv(name)
        for name, value in {
            "WANDB_MODE": "offline",
            "WANDB_API_KEY": KEY,
            "WANDB_CONFIG_DIR": f"{folder}/wandb",
            "WANDB_CACHE_DIR": f"{folder}/wandb",
            "WANDB_ERROR_REPORTING": "false",
            "WANDB_SILENT": "true",
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "TRACKIO_DIR": f"{folder}/trackio",
        }.items():
            patch.setenv(name, value)
        yield folder


# ------------------------------------------------------------------ what the services store, by their own readers


class Stored(NamedTuple):
    """A run in a service."""

    name: str
    settings: dict[str, str]
    numbers: Numbers
    pictures: int
    status: str


def read_wandb(folder: Path, run_id: str) -> Stored:
    files = sorted(folder.glob("wandb/offline-run-*/*.wandb"))
    assert {path.stem for path in files} == {f"run-{run_id}"}
    records = []
    for path in files:
        command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        records += map(json.loads, done.stdout.splitlines())
    found: dict[str, list[Any]] = defaultdict(list)
    for record in records:
        found[record["type"]].append(record[record["type"]])
    rows = [record["item"] for record in found["history"]]
    numbers = {
        (row["step"], name): value
        for row in rows
        for name, value in row.items()
        if name != "step" and not name.startswith(("_", "report/"))
    }
    settings = {name: str(value) for name, value in found["run"][0]["config"]["update"].items()}
    pictures = sum("report/losses._type" in row for row in rows)
    return Stored(found["run"][-1]["display_name"], settings, numbers, pictures, str(found["exit"][-1]["exit_code"]))


def read_mlflow(folder: Path, run_id: str) -> Stored:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("cribo")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_id == run_id
    numbers = {
        (each.step, name): each.value for name in run.data.metrics for each in client.get_metric_history(run_id, name)
    }
    return Stored(str(run.info.run_name), run.data.params, numbers, 0, run.info.status)


def read_trackio(folder: Path, run_id: str) -> Stored:
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    (run,) = [each for each in trackio.Api().runs("cribo") if each.id == run_id]
    logs = SQLiteStorage.get_logs("cribo", run.name, run_id=run_id)
    numbers = {(log["step"], name): value for log in logs for name, value in log.items() if isinstance(value, float)}
    pictures = sum(isinstance(value, dict) for log in logs for value in log.values())
    settings = {name: str(value) for name, value in (run.config or {}).items()}
    return Stored(run.name, settings, numbers, pictures, "alerted" if run.alerts() else "")


READERS: dict[str, Callable[[Path, str], Stored]] = {
    "wandb": read_wandb,
    "mlflow": read_mlflow,
    "trackio": read_trackio,
}


# ------------------------------------------------------------------ a training


class FailAt(L.Callback):
    """Raise an error at a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        if trainer.global_step == self.step:
            raise RuntimeError("power failure")


class Trained(NamedTuple):
    """A run that failed and was resumed."""

    folder: Path
    failed: dict[str, Stored]


@pytest.fixture(scope="module")
def trained(tiny: Callable[..., PretrainConfig], tmp_path_factory: pytest.TempPathFactory) -> Trained:
    def picture(folder: Path, *_: Any, **__: Any) -> None:
        (folder / "report").mkdir()
        Image.fromarray(np.zeros((8, 8, 3), dtype=np.uint8)).save(folder / "report" / "losses.png")

    installed = tuple(
        name for name in SERVICES if all(importlib.util.find_spec(each) for each in SERVICES[name].packages)
    )
    values = {"runtime.logger": installed or ("tensorboard",), "runtime.checkpoint_every": 4, "optim.epochs": 2}
    scored = {"score.root": "scenes", "score.images": (6, 3), "score.neighbours": 10, "score.every_epochs": 1}
    folder = tmp_path_factory.mktemp("out") / "mine"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cribo.pretraining.run.write_report", picture)
        patch.setattr("sys.argv", ["cribo", f"https://host/shards?token={KEY}"])
        with pytest.raises(RuntimeError, match="power failure"):
            pretrain(tiny({**values, **scored}), out=folder.parent, name="mine", callbacks=[FailAt(6)])
        ids = json.loads((folder / RUN_IDS).read_text())
        failed = {name: READERS[name](folder, ids[name]) for name in installed}
        resume(folder)
        assert json.loads((folder / RUN_IDS).read_text()) == ids or not installed
    return Trained(folder, failed)


@pytest.mark.slow
@pytest.mark.parametrize("name", SERVICE_NAMES)
def test_a_resumed_training_is_one_run_with_the_numbers_of_metrics_csv(name: str, trained: Trained) -> None:
    folder = trained.folder
    stored = READERS[name](folder, json.loads((folder / RUN_IDS).read_text())[name])
    expected = {
        (int(row["step"]), column): value
        for row in read_metrics(folder / "metrics.csv")
        for column, value in row.items()
        if column != "step"
    }
    assert {step for step, _ in expected} == {0, *range(1, 9)}
    assert {step for step, column in expected if column == "dense_nn"} == {0, 4, 8}
    assert stored.numbers == expected
    assert stored.name == "mine"
    assert stored.settings["optim.lr"] == "0.02"
    assert stored.settings["backbone.name"] == "vit_tiny_patch16_224"
    assert stored.pictures == {"mlflow": 0}.get(name, 1)  # MLflow's database is beside the report
    assert (trained.failed[name].status, stored.status) == {
        "wandb": ("1", "0"),
        "mlflow": ("FAILED", "FINISHED"),
        "trackio": ("alerted", "alerted"),
    }[name]


@pytest.mark.slow
def test_no_file_contains_the_key(trained: Trained, environment: Path) -> None:
    for path in (*trained.folder.rglob("*"), *environment.rglob("*")):
        assert not path.is_file() or KEY.encode() not in path.read_bytes(), path


# ------------------------------------------------------------------ errors


class Tracking(HTTPServer):
    """A server that speaks as much of MLflow's protocol as a run needs.

    Attributes:
        status: status of its replies; they are errors unless it is 200.
        fails: a call that fails at any status.
        steps: the steps of the numbers that it received.
        params: the hyperparameters that it received.
        ended: the last status of the run.
    """

    status = 200
    fails = ""
    ended = ""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.params: dict[str, str] = {}
        super().__init__(("127.0.0.1", 0), _Request)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://me:secret@127.0.0.1:{self.server_port}"

    def reply(self, call: str, content: dict[str, Any]) -> dict[str, Any]:
        self.steps += [each["step"] for each in content.get("metrics", [])]
        self.params |= {each["key"]: each["value"] for each in content.get("params", [])}
        self.ended = content.get("status", self.ended)
        run = {"info": {"run_id": "a", "run_uuid": "a", "experiment_id": "1", "status": "RUNNING"}, "data": {}}
        return {
            "experiments/get-by-name": {"experiment": {"experiment_id": "1", "name": "cribo"}},
            "runs/create": {"run": run},
            "runs/get": {"run": run},
            "runs/update": {"run_info": run["info"]},
        }.get(call, {})


class _Request(BaseHTTPRequestHandler):
    server: Tracking  # pyright: ignore[reportIncompatibleVariableOverride]

    def answer(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        call = self.path.partition("?")[0].partition("/mlflow/")[2]
        status = 500 if call == self.server.fails else self.server.status
        found = self.server.reply(call, json.loads(content or "{}")) if status == 200 else {}
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(found).encode())

    do_GET = do_POST = answer  # noqa: N815 (names of the standard library)

    def log_message(self, format: str, *args: Any) -> None: ...  # noqa: A002 (name of the standard library)


@pytest.fixture
def tracking(monkeypatch: pytest.MonkeyPatch) -> Iterator[Tracking]:
    server = Tracking()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.url)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    yield server
    server.shutdown()
    server.server_close()


@needs("mlflow")
def test_numbers_of_an_outage_are_sent_afterwards(
    tracking: Tracking, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 1000.0
    monkeypatch.setattr(events, "time", SimpleNamespace(monotonic=lambda: now))
    with open_loggers(["mlflow"], tmp_path, settings={}) as (logger,):
        logger.log_metrics({"loss": 1.0}, 1)
        tracking.status = 500
        logger.log_metrics({"loss": 2.0}, 2)
        now += 61
        logger.log_metrics({"loss": 3.0}, 3)
        tracking.status = 200
        now += 61  # twice as long after the second error
        logger.log_metrics({"loss": 4.0}, 4)
        assert tracking.steps == [1]
        now += 60
        logger.log_metrics({"loss": 5.0}, 5)
        assert tracking.steps == [1, 2, 3, 4, 5]
    assert tracking.ended == "FINISHED"
    (message,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert message.startswith("mlflow: ")
    assert message.endswith("; training continues")
    assert "secret" not in message


@needs("mlflow")
def test_a_service_that_fails_until_the_end_stops_neither_a_run_nor_its_resume(
    tracking: Tracking, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_loggers(["mlflow"], tmp_path, settings={}) as (logger,):
        tracking.status = 500
        logger.log_metrics({"loss": 1.0}, 1)
    assert "mlflow: 1 rows of numbers could not be sent" in caplog.messages
    with open_loggers(["tensorboard", "mlflow"], tmp_path, settings={}) as found:
        assert [type(logger).__name__ for logger in found] == ["Events"]
    assert "mlflow: could not continue run a: " in caplog.messages[-1]


@needs("mlflow")
@pytest.mark.parametrize(
    ("error", "status"), [(RuntimeError, "FAILED"), (KeyboardInterrupt, "KILLED")], ids=["failed", "interrupted"]
)
def test_the_status_of_a_run_that_ends_early(
    tracking: Tracking, tmp_path: Path, error: type[BaseException], status: str
) -> None:
    with pytest.raises(error), open_loggers(["mlflow"], tmp_path, settings={}):
        raise error
    assert tracking.ended == status


@needs("mlflow")
def test_a_new_run_that_cannot_be_created_is_an_error(tracking: Tracking, tmp_path: Path) -> None:
    tracking.status = 500
    with pytest.raises(ConfigError, match="--logger") as caught:
        open_loggers(["mlflow"], tmp_path, settings={}).__enter__()
    assert "secret" not in str(caught.value)


@needs("mlflow")
def test_a_new_run_without_its_settings_is_ended(tracking: Tracking, tmp_path: Path) -> None:
    tracking.fails = "runs/log-batch"
    with pytest.raises(ConfigError, match="could not create a run"):
        open_loggers(["mlflow"], tmp_path, settings={"seed": 3}).__enter__()
    assert tracking.ended == "FAILED"


@needs("mlflow")
def test_settings_are_sent_without_passwords(tracking: Tracking, tmp_path: Path) -> None:
    settings = {
        "data": {"root": "https://me:secret@host/shards"},
        "urls": ["s3://me:secr@t@host", 'https://host?X-Amz-Signature=secret"d'],
        "seed": 3,
    }
    with open_loggers(["mlflow"], tmp_path, settings=settings):
        assert tracking.params == {
            "data.root": "https://***@host/shards",
            "urls": "['s3://***@host', 'https://host?X-Amz-Signature=***\"d']",
            "seed": "3",
        }


def test_a_damaged_file_of_identities_is_refused(tmp_path: Path) -> None:
    (tmp_path / RUN_IDS).write_text("{")
    with pytest.raises(FolderError, match=f"{RUN_IDS} is damaged: remove it"):
        open_loggers(["mlflow"], tmp_path, settings={}).__enter__()


def test_other_ranks_have_no_services(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    with open_loggers(LOGGERS, tmp_path, settings={}) as found:
        assert [type(logger).__name__ for logger in found] == ["Events"]
    assert not (tmp_path / RUN_IDS).exists()


def test_the_name_of_a_training_includes_the_results_it_is_part_of(tmp_path: Path) -> None:
    study = Job(tmp_path / "study", "study").create()
    assert run_name(study / "full-seed0") == "study/full-seed0"
    assert run_name(tmp_path / "other" / "mine") == "mine"


# ------------------------------------------------------------------ options


@pytest.mark.parametrize("value", ["wandb,mlflow", "[wandb, mlflow]"])
def test_files_and_overrides_name_several_loggers(value: str, tmp_path: Path) -> None:
    assert load_config().runtime.logger == ("tensorboard",)
    assert load_config(overrides={"runtime.logger": value}).runtime.logger == ("wandb", "mlflow")
    for text in (f"runtime: {{logger: {value!r}}}", f"logger: {value!r}"):
        (tmp_path / "config.yaml").write_text(text)
        assert load_config(tmp_path / "config.yaml").runtime.logger == ("wandb", "mlflow")


def test_an_unknown_logger_is_refused_with_the_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pretrain", "--logger", "tensorboard,neptune"]) == 2
    assert "tensorboard,wandb,mlflow,trackio, got tensorboard,neptune" in capsys.readouterr().err


def test_a_missing_package_is_an_error_before_any_work(
    tiny: Callable[..., PretrainConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SERVICES["trackio"], "packages", ("no_such_package",))
    with pytest.raises(MissingPackage, match=re.escape(f"needs no_such_package: {install_command('trackio')}")):
        pretrain(tiny({"runtime.logger": ("trackio",)}), out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@needs("wandb")
def test_wandb_without_login_is_an_error_before_any_work(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("WANDB_MODE", "WANDB_API_KEY")}
    program = "from cribo.training.loggers import require_logins; require_logins(['wandb'])"
    command = [sys.executable, "-c", program]
    environment |= {"NETRC": str(tmp_path / "netrc")}
    failed = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert "not logged in to Weights & Biases: run `wandb login`, set WANDB_API_KEY" in failed.stderr
    subprocess.run(command, env=environment | {"WANDB_API_KEY": KEY}, capture_output=True, timeout=60, check=True)


def test_adapt_has_the_same_option() -> None:
    config = AdaptConfig("images", BackboneSource("runs/mine"), training={"optim.lr": 1e-3})
    assert load_recipe(config).runtime.logger == ("tensorboard",)
    config.logger = ("tensorboard", "trackio")
    assert load_recipe(config).runtime.logger == ("tensorboard", "trackio")
