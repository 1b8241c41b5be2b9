"""Work on the parts of a collection by worker processes of Ray Data."""

import contextlib
import logging
import os
import pickle
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cribo.base.errors import ConfigError, WorkerLost
from cribo.base.machine import available_cores
from cribo.base.wording import counted
from cribo.features.spread.config import RayOptions, require_ray
from cribo.features.spread.work import Engine, Part, Result, Work

if TYPE_CHECKING:
    import pyarrow


MAX_DEATHS = 5
"""Number of worker processes that may end during the same part."""

_CORES_PER_WORKER = 4
_OBJECT_STORE_BYTES = 256 << 20  # parts and results are small; Ray's default is a third of the memory
_OPEN_SECONDS = 5.0  # limit for opening a TCP connection
_CONNECT_SECONDS = 30.0  # limit for connecting from another process, which first imports Ray
_CHECK_SECONDS = 300.0  # limit for checking all nodes, which may first start Python
_LONGEST_FOLDER = 36  # characters; Ray's sockets below it must have fewer than 108
_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",  # otherwise Ray reports to its authors over the network
    "RAY_BACKEND_LOG_LEVEL": "fatal",
    "RAY_DATA_LOG_LEVEL": "CRITICAL",
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".*",  # messages of the raylets about workers that ended
    "RAY_SCHEDULER_EVENTS": "0",
    "RAY_worker_niceness": "0",  # as --engine local; Ray's default of 15 starves workers on a busy machine
    # If the driver runs under `uv run`, Ray copies its working folder and reinstalls the project for the workers.
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",  # workers of 0 GPUs see none; unset, Ray prints a notice
}

_log = logging.getLogger(__name__)


# Arguments: a folder to remove, and processes to end, as id:time of start, once the standard input is closed.
_WATCHER = """
import shutil, sys
import psutil
sys.stdin.read()
for word in sys.argv[2:]:
    number, started = word.split(":")
    try:
        process = psutil.Process(int(number))
        if abs(process.create_time() - float(started)) < 2:
            process.kill()
    except psutil.Error:
        pass
shutil.rmtree(sys.argv[1], ignore_errors=True)
"""


class Node(NamedTuple):
    """A machine of a cluster, with its logical CPUs and GPUs."""

    name: str
    cpus: float
    gpus: float

    def workers(self, cpus: int, gpus: float) -> int:
        """Return how many workers of so many CPUs and GPUs fit."""
        by_cpus = int(self.cpus // cpus)
        if gpus == 0:
            return by_cpus
        by_gpus = int(self.gpus // gpus) if gpus >= 1 else int(self.gpus) * int(1 / gpus)  # a fraction is of one GPU
        return min(by_cpus, by_gpus)

    def __str__(self) -> str:
        return f"{self.name}: {self.cpus:g} CPUs, {self.gpus:g} GPUs"


class Workers(NamedTuple):
    """Number of worker processes, and logical CPUs and GPUs of each."""

    number: int
    cpus: int
    gpus: float

    def __str__(self) -> str:
        gpus = f" and {self.gpus:g} GPUs" if self.gpus else ""
        return f"{counted(self.number, 'worker')} of {counted(self.cpus, 'CPU')}{gpus}"


def plan_workers(options: RayOptions, nodes: Sequence[Node]) -> Workers:
    """Complete the options of the workers for a cluster.

    Args:
        options: of the command.
        nodes: of the cluster.

    Raises:
        ConfigError: the workers do not fit on the nodes.

    Example:
        >>> plan_workers(RayOptions(), [Node("a", cpus=16, gpus=2), Node("b", cpus=8, gpus=1)])
        Workers(number=3, cpus=8, gpus=1)
    """
    gpus = options.gpus_per_worker
    if gpus is None:
        gpus = 1 if any(node.gpus >= 1 for node in nodes) else 0
    if gpus > 1 and gpus != int(gpus):
        raise ConfigError(f"ray.gpus_per_worker must be a whole number or less than 1, got {gpus:g}")
    count = options.workers
    if count is None:
        least = options.cpus_per_worker or (1 if gpus else _CORES_PER_WORKER)
        count = max(1, sum(node.workers(least, gpus) for node in nodes))
    most = int(max((node.cpus for node in nodes), default=0))
    sizes = range(most, 0, -1) if options.cpus_per_worker is None else (options.cpus_per_worker,)
    for cpus in sizes:
        if sum(node.workers(cpus, gpus) for node in nodes) >= count:
            return Workers(count, cpus, gpus)
    least = options.cpus_per_worker or 1
    fitting = sum(node.workers(least, gpus) for node in nodes)
    fewer = f"use --ray.workers {fitting}" if fitting else "lower --ray.cpus_per_worker or --ray.gpus_per_worker"
    raise ConfigError(
        f"{count} workers of at least {least} CPUs and {gpus:g} GPUs do not fit on the cluster "
        f"({'; '.join(map(str, nodes)) or 'no nodes'}): {fewer}, or add nodes"
    )


class NodeState(NamedTuple):
    """Name of a node, versions of its packages, and whether it has a file that the driver wrote."""

    name: str
    versions: Mapping[str, str]
    has_probe: bool


def check_nodes(nodes: Sequence[NodeState], versions: Mapping[str, str], writes_to: Path | None) -> None:
    """Check that all nodes have the driver's versions and share its output folder.

    Args:
        nodes: of the cluster.
        versions: version of each package in this process.
        writes_to: the output folder, in which the nodes looked for the file; None for a URL.

    Raises:
        ConfigError: a version differs, a package is missing, or a node does not share the folder.
    """
    for node in nodes:
        for name, expected in versions.items():
            if (found := node.versions.get(name, "not installed")) != expected:
                raise ConfigError(
                    f"node {node.name} has {name} {found}, this process has {expected}: install the same versions on "
                    "all nodes"
                )
        if not node.has_probe:
            raise ConfigError(
                f"{writes_to} is not shared by all nodes of the cluster (node {node.name} lacks it): write to a "
                "folder that all nodes share; cribo index can write to a URL"
            )


@contextlib.contextmanager
def open_ray(options: RayOptions, *, writes_to: Path | None) -> Iterator[Engine]:
    """Connect to a Ray cluster, or start one on this machine, and check that it can run the workers.

    If the caller has called `ray.init`, its cluster is used, and left connected.

    Args:
        options: of the command.
        writes_to: folder to which the work writes, which all nodes must share; None for a URL.

    Raises:
        ConfigError: the address is malformed, the workers do not fit on the cluster, a node has other versions, or
            does not share `writes_to`.
        ConnectionError: the cluster does not answer.
        MissingPackage: Ray is not installed.
    """
    require_ray()
    _set_environment(temporary=options.address is None)
    import ray

    if ray.is_initialized():
        if options.address is not None:
            raise ConfigError(f"ray.address {options.address!r}: this process is already connected to a Ray cluster")
        yield RayEngine(_checked_workers(options, writes_to))
    elif options.address is None:
        with _temporary_cluster(options) as workers:
            yield RayEngine(workers)
    else:
        address = os.environ.get("RAY_ADDRESS", "auto") if options.address == "auto" else options.address
        _require_answer(address)
        with _connected(address):
            yield RayEngine(_checked_workers(options, writes_to))


class RayEngine:
    """Works in processes of the connected Ray cluster, each with its own copy of the work.

    A worker process that ends, or whose node is lost, is replaced, and its part repeated.

    Args:
        workers: number and size of the worker processes.
    """

    def __init__(self, workers: Workers) -> None:
        self.workers = workers

    def run(self, work: Work[Part, Result], parts: Sequence[Part]) -> Generator[Result, None, None]:
        """Yield the result of each part, in the order of completion.

        Raises:
            WorkerLost: a part ended its worker process `MAX_DEATHS` times.
            Exception: the work raised it, in any worker.
        """
        if not parts:
            return
        _log.info("Ray: starting %s, which first open the backbone", self.workers)
        import pyarrow
        import ray.data
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        attempts = ray.remote(_Attempts).options(num_cpus=0, scheduling_strategy=here).remote()
        # One block for each part, since Ray Data schedules blocks.
        blocks = [
            pyarrow.table({"number": [number], "part": [zlib.compress(pickle.dumps(part), 1)]})
            for number, part in enumerate(parts)
        ]
        dataset = ray.data.from_arrow(blocks)
        del blocks
        dataset.context.enable_progress_bars = False
        dataset.context.execution_no_progress_timeout_s = -1  # a part may take hours
        results = dataset.map_batches(
            _Worker,
            fn_constructor_args=(work, attempts),
            batch_size=None,
            batch_format="pyarrow",
            # A second part in the queue of a busy worker could not be taken by an idle one.
            compute=ray.data.ActorPoolStrategy(
                size=min(self.workers.number, len(parts)), max_tasks_in_flight_per_actor=1
            ),
            num_cpus=self.workers.cpus,
            num_gpus=self.workers.gpus,
        )
        for batch in results.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
            for pickled in batch["outcome"]:
                outcome: _Outcome = pickle.loads(pickled.as_py())
                if outcome.warning:
                    _log.warning("%s", outcome.warning)
                if outcome.error is not None:
                    raise outcome.error
                yield outcome.result


class _Outcome(NamedTuple):
    result: Any = None
    error: Exception | None = None
    warning: str = ""


class _Worker:
    """Holds one copy of the work, and applies it to the part of a block."""

    def __init__(self, work: "Work[Any, Any]", attempts: Any) -> None:
        self._work, self._attempts = work, attempts

    def __call__(self, block: "pyarrow.Table") -> "pyarrow.Table":
        import pyarrow
        import ray

        part = pickle.loads(zlib.decompress(block["part"][0].as_py()))
        begun: Any = ray.get(self._attempts.begin.remote(block["number"][0].as_py()))
        try:
            outcome = pickle.dumps(self._outcome(part, begun - 1))
        except Exception as error:  # as a value: Ray would wrap it, and print its own traceback
            outcome = pickle.dumps(_Outcome(error=_portable(error)))
        return pyarrow.table({"outcome": [outcome]})

    def _outcome(self, part: Any, deaths: int) -> _Outcome:
        if deaths >= MAX_DEATHS:
            raise WorkerLost(
                f"the worker process ended {deaths} times during {part!s:.200}, probably for lack of memory: "
                "use fewer --ray.workers, or --engine local to see the error; completed parts are kept"
            )
        (result,) = self._work(iter([part]))
        return _Outcome(result, warning=f"a worker process ended during {part!s:.200}; repeated" if deaths else "")


class _Attempts:
    """Counts how often each part was begun; it outlives the workers."""

    def __init__(self) -> None:
        self._begun: Counter[int] = Counter()

    def begin(self, number: int) -> int:
        self._begun[number] += 1
        return self._begun[number]


def _portable(error: Exception) -> Exception:
    """Return the error, or one of a base class if it cannot be pickled, with the traceback as a note."""
    traced = "".join(["in a worker process:\n", *traceback.format_exception(error)]).rstrip()
    for kind in type(error).__mro__:
        with contextlib.suppress(Exception):
            portable = error if kind is type(error) else kind(str(error))
            portable.add_note(traced)
            portable.__cause__ = portable.__context__ = None
            if type(pickle.loads(pickle.dumps(portable))) is kind:
                return portable
    return RuntimeError(f"{type(error).__name__} without a message")


def _set_environment(*, temporary: bool) -> None:
    """Set Ray's environment variables, except those of the user. Ray reads some when it is imported."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    # Ray's switch for systems on which it uses the loopback address only: on Linux, its processes listen to all others.
    if temporary and "ray" not in sys.modules:
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    # Otherwise Ray would keep a token in the home folder, which changes how the user's own clusters start.
    if temporary and "ray" not in sys.modules and not any(name.startswith("RAY_AUTH_") for name in os.environ):
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


@contextlib.contextmanager
def _temporary_cluster(options: RayOptions) -> Iterator[Workers]:
    """Start a cluster of this machine; end it, with all of its processes and files, afterwards."""
    import torch

    # More workers than cores share the cores.
    cpus = max(available_cores(), (options.workers or 1) * (options.cpus_per_worker or 1))
    gpus = torch.cuda.device_count()
    workers = plan_workers(options, [Node("this machine", cpus, gpus)])
    short = len(tempfile.gettempdir()) <= _LONGEST_FOLDER
    folder = tempfile.mkdtemp(prefix="cribo-", dir=None if short else "/tmp")
    try:
        with (
            _connected(
                "local",  # otherwise the environment variable RAY_ADDRESS overrides it
                num_cpus=cpus,
                num_gpus=gpus,
                object_store_memory=_OBJECT_STORE_BYTES,
                include_dashboard=False,
                _temp_dir=f"{folder}/ray",  # Ray makes it writable for everybody; the folder above is private
            ),
            _ended_with_this_process(folder),
        ):
            yield workers
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _ended_with_this_process(folder: str) -> Iterator[None]:
    """End Ray's agents and remove its folder if this process is killed; Ray leaves agents for minutes."""
    import psutil

    started = [f"{each.pid}:{each.create_time()}" for each in psutil.Process().children(recursive=True)]
    watcher = subprocess.Popen(
        [sys.executable, "-c", _WATCHER, folder, *started],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C does not reach it
    )
    try:
        yield
    finally:
        watcher.kill()
        watcher.wait()


@contextlib.contextmanager
def _connected(address: str, **settings: Any) -> Iterator[None]:
    """Call `ray.init` and `ray.shutdown`, without messages of Ray, and with the caller's handler of SIGTERM."""
    import ray

    in_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    try:
        with _without_stderr():
            ray.init(address, log_to_driver=False, logging_level=logging.CRITICAL, **settings)
        if in_main:  # without a handler, processes of a temporary cluster would be left
            signal.signal(signal.SIGTERM, before if callable(before) else lambda number, frame: sys.exit(128 + number))
        yield
    finally:
        ray.shutdown()
        if in_main:
            signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _require_answer(address: str) -> None:
    """Raise an error unless a Ray cluster answers at the address; `ray.init` would wait for minutes."""
    if address.startswith("ray://"):
        raise ConfigError(
            f"ray.address {address!r} is of a Ray client, over which Ray Data is slow and unsupported: run the command "
            "on a node of the cluster with --ray.address auto, or as ray job submit -- cribo ..."
        )
    if address == "auto":
        reason, advice = "", "give --ray.address host:port, or start a cluster on this machine with `ray start --head`"
    else:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal():
            raise ConfigError(f"ray.address must be host:port, such as 10.0.0.1:6379, or auto, got {address!r}")
        reason = _connect(host.strip("[]"), int(port))
        advice = "check that the head node runs, that the port is the one `ray start --head` printed, and the firewall"
    reason = reason or _try_to_connect(address)
    if reason:
        raise ConnectionError(f"the Ray cluster at {address} does not answer ({reason}): {advice}")


def _connect(host: str, port: int) -> str:
    """Return why no connection can be made; empty if it can."""
    try:
        socket.create_connection((host, port), timeout=_OPEN_SECONDS).close()
    except (OSError, OverflowError) as error:
        return str(error)
    return ""


def _try_to_connect(address: str) -> str:
    """Return why another process cannot connect to the cluster; empty if it can."""
    program = "import ray, sys; ray.init(sys.argv[1], log_to_driver=False)"
    command = (sys.executable, "-c", program, address)
    try:
        tried = subprocess.run(command, capture_output=True, text=True, timeout=_CONNECT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"no answer in {_CONNECT_SECONDS:g} s"
    if tried.returncode == 0:
        return ""
    raised = [*re.finditer(r"^[\w.]+(Error|Exception): ", tried.stderr, re.MULTILINE)]
    return " ".join(tried.stderr[raised[-1].start() :].split()) if raised else f"exit status {tried.returncode}"


@contextlib.contextmanager
def _without_stderr() -> Iterator[None]:
    """Discard what compiled code prints: Ray reports even that its log level was set."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _checked_workers(options: RayOptions, writes_to: Path | None) -> Workers:
    """Plan the workers of the connected cluster, after checking its nodes."""
    import ray

    found = {
        node["NodeID"]: Node(
            node["NodeManagerAddress"], node["Resources"].get("CPU", 0), node["Resources"].get("GPU", 0)
        )
        for node in ray.nodes()
        if node["Alive"]
    }
    workers = plan_workers(options, list(found.values()))
    used = {key: node.name for key, node in found.items() if node.workers(workers.cpus, workers.gpus)}
    check_nodes(_node_states(used, writes_to), _versions_and_probe(None)[0], writes_to)
    needed = {"CPU": workers.number * workers.cpus, "GPU": workers.number * workers.gpus}
    free = ray.available_resources()
    if busy := [name for name, amount in needed.items() if free.get(name, 0) < amount]:
        _log.warning(
            "the workers need %g %ss, %g are free: they start as other jobs of the cluster end",
            needed[busy[0]],
            busy[0],
            free.get(busy[0], 0),
        )
    return workers


def _node_states(names: Mapping[str, str], writes_to: Path | None) -> list[NodeState]:
    """Ask nodes, given as names by id, for their versions, and whether they see a file in `writes_to`."""
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    with contextlib.ExitStack() as stack:
        probe = None
        if writes_to is not None:
            folder = next(each for each in (writes_to.resolve(), *writes_to.resolve().parents) if each.is_dir())
            probe = stack.enter_context(tempfile.NamedTemporaryFile(prefix=".cribo-probe-", dir=folder)).name
        task: Any = ray.remote(_by_value(_versions_and_probe))
        answers = [
            task.options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(probe)
            for node in names
        ]
        try:
            found = ray.get(answers, timeout=_CHECK_SECONDS)
        except RayError as error:
            raise ConnectionError(
                f"a node of the Ray cluster does not run tasks ({type(error).__name__}): check `ray status`"
            ) from error
    return [NodeState(name, *state) for name, state in zip(names.values(), found, strict=True)]


def _versions_and_probe(probe: str | None) -> tuple[dict[str, str], bool]:
    """Return the versions of this node, and whether a file exists there."""
    # Imports only what nodes without cribo have.
    import contextlib
    import platform
    from importlib.metadata import PackageNotFoundError, version
    from pathlib import Path

    found = {"Python": ".".join(platform.python_version_tuple()[:2])}
    for name, package in {"cribo": "cribo-ssl", "torch": "torch"}.items():
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(package).partition("+")[0]  # builds for CPUs and GPUs may be mixed
    return found, probe is None or Path(probe).exists()


def _by_value(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy of a function that is pickled with its code, not as a name in this package."""
    copied = types.FunctionType(function.__code__, {"__builtins__": __builtins__}, function.__name__)
    copied.__module__ = "__main__"
    return copied
