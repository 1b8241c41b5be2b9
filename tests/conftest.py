"""Fixtures shared by tests of several folders."""

import dataclasses
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Processes of `-n` share the cores, so use one thread each. torch
# reads this when it is imported.
if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // int(workers))))

# If pytest runs under `uv run`, Ray reinstalls the project for its workers. It reads this variable on import, and some
# tests import Ray before cribo sets it.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")

import jaxtyping
import pytest
from hypothesis import settings
from tests.commands import Commands

if TYPE_CHECKING:
    from tests.hub_server import Hub

    from cribo.pretraining import PretrainConfig

REPOSITORY = Path(__file__).parents[1]

settings.register_profile("large", max_examples=5000)  # of each test in tests/fuzz: --hypothesis-profile=large

# Check the shapes in signatures during the tests; this must precede the import of the package.
jaxtyping.install_import_hook("cribo.method", "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))")


def pytest_addoption(parser: pytest.Parser) -> None:
    # Defined here, because pytest parses its options before reading conftest files of sub-folders.
    parser.addoption(
        "--endurance", action="store_true", help="tests/faults in large: twenty kills of a run, ten thousand steps, ..."
    )


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return the processes of `-n auto`: at most four, since each imports torch; tests of a file share its fixtures."""
    if config.option.dist == "no":
        config.option.dist = "loadfile"
    return min(4, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("endurance") and not item.config.getoption("--endurance"):
        pytest.skip("only with --endurance")


@pytest.fixture
def unchecked_shapes() -> Iterator[None]:
    """Disable the checks of signatures, as in the installed package, so that invalid shapes reach the code."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    """Start commands and programs in processes with imported packages; kill those that are left."""
    if not sys.platform.startswith("linux"):
        pytest.skip("needs Linux's /proc")
    made = Commands(tmp_path_factory.mktemp("processes").resolve())
    yield made
    made.end()


@pytest.fixture(scope="session")
def camvid() -> Path:
    """Return the folder of CamVid next to the repository; skip the test if it is missing."""
    folder = REPOSITORY.parent / "shared" / "data" / "camvid"
    if not folder.is_dir():
        pytest.skip("needs the CamVid data in ../shared/data/camvid")
    return folder


@pytest.fixture(scope="session")
def tiny() -> "Callable[..., PretrainConfig]":
    """Create the configuration of a run of 12 steps that takes a few seconds, with changed options."""

    from cribo.pretraining import PretrainConfig

    values: dict[str, Any] = {
        "data.workers": 0,
        "data.scenes.count": 36,
        "data.scenes.size": 40,
        "views.size": 32,
        "backbone.name": "vit_tiny_patch16_224",
        "backbone.args": {"patch_size": 8, "depth": 2, "embed_dim": 32, "num_heads": 2},
        "objects.num_objects": 5,
        "objects.group_size": 4,
        "head.hidden_dim": 32,
        "head.bottleneck_dim": 16,
        "head.prototypes": 32,
        "optim.epochs": 3,
        "optim.batch_size": 8,
        "optim.lr": 0.02,
        "optim.warmup_epochs": 1,
        "optim.momentum": (0.9, 1.0),
        "runtime.accelerator": "cpu",
        "runtime.threads": 1,  # spinning threads are far slower than such small networks
        "runtime.precision": "32-true",
        "runtime.log_every": 1,
        "runtime.checkpoint_every": 100,
    }

    def make(changes: Mapping[str, Any] | None = None) -> PretrainConfig:
        return _replaced(PretrainConfig(), {**values, **(changes or {})})

    return make


def _replaced(config: Any, values: Mapping[str, Any]) -> Any:
    own = {name: value for name, value in values.items() if "." not in name}
    for part in {name.partition(".")[0] for name in values if "." in name}:
        inner = {name.partition(".")[2]: value for name, value in values.items() if name.startswith(f"{part}.")}
        own[part] = _replaced(getattr(config, part), inner)
    return dataclasses.replace(config, **own)


@pytest.fixture
def hub(tmp_path: Path) -> "Iterator[Hub]":
    """A stand-in for the Hugging Face hub, which the client in this process uses with an empty cache and no token."""
    from tests.hub_server import client_of, serve_hub

    with serve_hub() as served, client_of(served, tmp_path / "hub-cache"):
        yield served
