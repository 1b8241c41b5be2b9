"""`cribo doctor`: versions, devices, limits of memory and cores, disks, and optional packages of a machine."""

import importlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import metadata
from importlib.resources import files
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cribo.base.arguments import Parser
from cribo.base.console import importing
from cribo.base.machine import available_cores, core_limit, memory_limit
from cribo.base.packages import PACKAGE, install_command
from cribo.base.redaction import without_secrets
from cribo.base.versions import processor_name, project_url
from cribo.cli.command import Call, Command

HELP = """\
Show what cribo finds on this machine: for your own planning, and to send with a bug report.

  cribo doctor
  cribo doctor --json                        the same facts as JSON

The command prints versions, devices, limits of cores and memory, disk space, environment variables (no tokens) and
optional packages. Problems are listed at the end, with what to do. Nothing is written. How long training takes on this
machine, pretrain and adapt print before they begin; `cribo profile` measures the parts of a training step.
"""

USES = {
    "search": "index, search, explore; embed --format lance; --search faiss",
    "explore": "explore",
    "export": "export --to onnx or transformers",
    "jax": "checkpoints of Flax (.msgpack)",
    "evaluation": "evaluate overclustering, discovery and dense-nn --mean matched",
    "detection": "evaluate detection",
    "lora": "pretrain and adapt with backbone.lora",
    "stream": "images, shards and results at s3:// addresses",
    "completion": "completion of commands with the Tab key",
    "video": "video files",
    "tiff": "TIFF with several channels or pages, and compressed",
    "dicom": "DICOM images",
    "slides": "whole slides, such as .svs and .ndpi",
    "geo": "segment --write geotiff and geojson-wgs84",
    "cluster": "--engine ray of embed, index and segment",
    "map": "embed --map umap",
    "regions": "the objective orl",
    "wandb": "--logger wandb",
    "mlflow": "--logger mlflow",
    "trackio": "--logger trackio",
}
"""What each extra is for; tests compare the names with pyproject.toml. Packages come from the metadata."""

DEVELOPMENT = "dev"
"""The extra for work on this package, which is not examined."""

_WIDTH = 80
_GIB = 2**30
_LIBRARIES = ("torch", "torchvision", "timm", "lightning", "numpy")
_VARIABLES = (
    *("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_ENDPOINT", "TORCH_HOME", "XDG_CACHE_HOME"),
    *("CUDA_VISIBLE_DEVICES", "CUDA_HOME", "LD_LIBRARY_PATH", "PYTORCH_CUDA_ALLOC_CONF", "ATEN_CPU_CAPABILITY"),
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY", "RAY_ADDRESS", "SLURM_JOB_ID", "PYTHONPATH"),
)
_GET_TORCH = "see pytorch.org/get-started"
_DRIVER_SECONDS = 20.0  # nvidia-smi hangs on some machines with a broken driver
_LEAST_MEMORY = 4 * _GIB  # adaptation of a ViT-S/14 on a CPU, with the libraries and one worker
_LEAST_SHARED = 2 * _GIB  # batches of a large preset that four workers prepare
_LEAST_DISK = 2 * _GIB
_SHARED = Path("/dev/shm")


@dataclass
class Section:
    """Facts about one subject, and the problems found.

    Attributes:
        title: the subject.
        facts: values by name.
        problems: one sentence each: what is wrong, and what to do.
        hint: a line to print below the facts, or an empty string.
    """

    title: str
    facts: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    hint: str = ""

    def note(self, name: str, read: Callable[[], str]) -> None:
        """Add a fact; if reading it fails, the fact is the error."""
        try:
            self.facts[name] = read()
        except Exception as error:  # of any library or driver
            self.facts[name] = f"unknown ({_described(error)})"


def add_options(parser: Parser) -> None:
    """Add the options of the command."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run(call: Call) -> None:
    """Run the command."""
    as_json = call.options.json
    found: dict[str, object] = {}
    problems: list[str] = []
    for section in examine(call.console):
        found[section.title] = section.facts
        problems += section.problems
        if not as_json:
            _print_section(section, call.console)
    if as_json:
        call.console.print(json.dumps({**found, "problems": problems}, indent=1))
        return
    call.console.print("\nproblems:" if problems else "\nno problems found")
    for problem in problems:
        call.console.print(f"  {problem}")
    if (address := project_url("Issues")) is not None:
        call.console.print(f"\nTo report a problem, send this output: {address}")


def examine(console: Console) -> Iterator[Section]:
    """Examine software, devices, processor, memory and disks, environment and optional packages.

    Nothing is written. What cannot be read is a fact of its section, not an error.

    Args:
        console: shows that slow packages are imported.

    Yields:
        Sections, one after the other.
    """
    for title, fill in _SECTIONS.items():
        section = Section(title)
        try:
            with importing(console):
                fill(section)
        except Exception as error:  # a broken library or driver is what this command is for
            section.facts["error"] = _described(error)
        yield section


def _print_section(section: Section, console: Console) -> None:
    table = Table(title=section.title, title_justify="left", show_header=False, width=_WIDTH)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold", ratio=1)
    for name, value in section.facts.items():
        table.add_row(Text(name), Text(value))
    console.print(table)
    if section.hint:
        console.print(section.hint, soft_wrap=True)  # one line, to copy it


def _software(section: Section) -> None:
    """Add the versions of this package, of Python and of the main libraries, which are imported."""
    section.note("cribo", lambda: f"{metadata.version(PACKAGE)}, {_short(str(files('cribo')))}")
    section.note("python", lambda: f"{platform.python_version()}, {_short(sys.executable)}")
    section.note("system", platform.platform)
    for name in _LIBRARIES:
        failed = ""
        try:
            importlib.import_module(name)
        except Exception as error:  # such as a shared library that is missing, or built for another torch
            failed = ", cannot be imported"
            packages = "torch torchvision" if name in ("torch", "torchvision") else name
            section.problems.append(
                f"{name} cannot be imported ({_described(error)}): reinstall it or the package that the error names, "
                f"such as by pip install --force-reinstall {packages}"
            )
        section.note(name, lambda name=name, failed=failed: f"{metadata.version(name)}{failed or _build(name)}")


def _build(library: str) -> str:
    """Return the kind of build of torch, and an empty string for another library."""
    if library != "torch":
        return ""
    import torch

    if torch.version.hip:
        return f", ROCm {torch.version.hip} build"
    return f", CUDA {torch.version.cuda} build" if torch.version.cuda else ", CPU build"


def _devices(section: Section) -> None:
    """Add the GPUs, with advice if torch cannot use them."""
    installed = _listed_by_driver(section)
    import torch

    with warnings.catch_warnings(action="ignore"):  # torch warns about drivers; the reason is found below
        usable = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for number in range(usable):
        about = torch.cuda.get_device_properties(number)
        free, total = torch.cuda.mem_get_info(number)
        capability = f"compute capability {about.major}.{about.minor}"
        has_bfloat16 = about.major >= 8 or bool(torch.version.hip)
        section.facts[f"cuda:{number}"] = (
            f"{about.name}, {_gib(total)} ({_gib(free)} free), {capability}, "
            f"bfloat16 {'yes' if has_bfloat16 else 'no: use --runtime.precision 16-mixed'}"
        )
        if not torch.version.hip and not supports(torch.cuda.get_arch_list(), about.major, about.minor):
            section.problems.append(
                f"torch{_build('torch')} has no kernels for {about.name}, {capability}: install a build of torch that "
                f"supports it ({_GET_TORCH})"
            )
    if not usable:
        section.facts["GPU"] = installed[0] if installed else "none"
        section.problems += [_unusable(installed[0].partition(",")[0])] if installed else []
        if not installed and torch.version.cuda:
            section.facts["advice"] = f"without a GPU, the CPU build of torch saves gigabytes ({_GET_TORCH})"
    if torch.backends.mps.is_available():
        section.facts["mps"] = "Apple GPU; used only with --device mps or --runtime.accelerator mps"
    if usable > 1:
        section.facts["several GPUs"] = f"pretrain uses one unless --runtime.devices {usable}"
    section.facts["default"] = "cuda:0" if usable else "cpu"


def _listed_by_driver(section: Section) -> list[str]:
    """Return the names of the GPUs that the NVIDIA driver lists, and add its version."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, "--query-gpu=driver_version,name,memory.total", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=_DRIVER_SECONDS, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        section.facts["driver"] = f"nvidia-smi fails ({_described(error)})"
        section.problems.append("the NVIDIA driver does not work (nvidia-smi fails): reinstall it or restart")
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in answer.splitlines() if line.count(",") == 2]
    if rows:
        section.facts["driver"] = rows[0][0]
    return [f"{name}, {memory}" for _, name, memory in rows]


def supports(architectures: list[str], major: int, minor: int) -> bool:
    """Whether a build of torch has kernels for a compute capability, or code that the driver can compile for it.

    Example:
        >>> built = ["sm_80", "sm_90", "compute_90"]
        >>> supports(built, 8, 6), supports(built, 7, 5), supports(built, 12, 0), supports(built[:2], 12, 0)
        (True, False, True, False)
    """
    for architecture in architectures:
        kind, _, digits = architecture.partition("_")
        if found := re.match(r"(\d+)(\d)", digits):
            built = int(found[1]), int(found[2])
            if built <= (major, minor) and (kind == "compute" or built[0] == major):
                return True
    return False


def _unusable(name: str) -> str:
    """Return why torch does not use a GPU that the driver lists."""
    import torch

    if not torch.version.cuda:
        return f"torch is a CPU build, so {name} is not used: install a CUDA build with torchvision ({_GET_TORCH})"
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return f"CUDA_VISIBLE_DEVICES={visible!r} hides {name}: unset it to use the GPU"
    try:
        torch.cuda.init()
        why = "no device is available"
    except Exception as error:
        why = _described(error)
    return (
        f"torch cannot use {name} ({why}): update its driver, or install a build of torch for an older CUDA "
        f"({_GET_TORCH})"
    )


def _processor(section: Section) -> None:
    """Add the model, the cores that this process may use, and the threads of torch."""
    section.note("model", processor_name)
    limit = core_limit()
    by_group = "" if limit is None else f", control group limits them to {limit:g}"
    section.facts["cores"] = f"{available_cores()} of {os.cpu_count()} for this process{by_group}"
    import torch

    threads, cores = torch.get_num_threads(), min(available_cores(), limit or float("inf"))
    section.facts["threads"] = f"{threads} of torch"
    if threads > max(1, round(cores)):
        section.problems.append(
            f"torch uses {threads} threads, but may use {cores:g} cores, so that threads compete for cores: set "
            f"OMP_NUM_THREADS={max(1, int(cores))}"
        )
    if "OMP_NUM_THREADS" in os.environ and 2 * threads <= int(cores) and not torch.cuda.is_available():
        section.problems.append(
            f"OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']} limits torch to {threads} of {int(cores)} cores: unset "
            f"it, or set it to {int(cores)}"
        )


def _storage(section: Section) -> None:
    """Add free memory and disk space, and the problems that they cause."""
    section.note("memory", lambda: _memory(section))
    if _SHARED.is_dir():
        section.note("/dev/shm", lambda: _shared_memory(section))
    section.note("this folder", lambda: _disk(section, "the current folder", Path(), "another folder with --out"))
    for name, (find, advice) in _CACHES.items():
        section.note(name, lambda find=find, name=name, advice=advice: _disk(section, name, find(), advice))


def _memory(section: Section) -> str:
    import psutil

    from cribo.base.devices import available_memory

    free, limit = available_memory("cpu"), memory_limit()
    if free < _LEAST_MEMORY:
        section.problems.append(
            f"only {_gib(free)} of memory is free: training of a ViT-S needs about {_gib(_LEAST_MEMORY)}; end other "
            "programs, raise the limit of the container, or use --optim.micro_batches and a smaller network"
        )
    by_group = "" if limit is None else f", control group limits it to {_gib(limit)}"
    return f"{_gib(free)} free of {_gib(psutil.virtual_memory().total)}{by_group}"


def _shared_memory(section: Section) -> str:
    free = shutil.disk_usage(_SHARED).free
    if free < _LEAST_SHARED:
        section.problems.append(
            f"/dev/shm has {_gib(free)} free, but the workers of a large preset use about {_gib(_LEAST_SHARED)}: start "
            f"the container with more (docker run --shm-size {2 * _LEAST_SHARED // _GIB}g), or use fewer --data.workers"
        )
    return f"{_gib(free)} free, for the data of data loading workers"


def _disk(section: Section, name: str, path: Path, advice: str) -> str:
    """Return the free space of a folder, which need not exist yet, and add its problem."""
    folder = next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())
    free, where = shutil.disk_usage(folder).free, _short(path.absolute())
    if not os.access(folder, os.W_OK):
        section.problems.append(f"{name} cannot be written ({where}): change its permissions, or choose {advice}")
    elif free < _LEAST_DISK:
        section.problems.append(f"{name} has only {_gib(free)} free ({where}): free some space, or choose {advice}")
    return f"{_gib(free)} free, {where}"


def _torch_cache() -> Path:
    import torch

    return Path(torch.hub.get_dir())


def _hub_cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _own_cache() -> Path:
    from cribo.pretraining.config import DataConfig

    return Path(DataConfig.cache_dir).expanduser()


_CACHES: dict[str, tuple[Callable[[], Path], str]] = {
    "cache of torch": (_torch_cache, "another folder with TORCH_HOME"),
    "cache of the Hub": (_hub_cache, "another folder with HF_HOME"),
    "cache of cribo": (_own_cache, "another folder with --data.cache_dir"),
}
"""For each cache, its folder and how to change it."""


def _environment(section: Section) -> None:
    """Add the environment variables that are set, without credentials."""
    for name in _VARIABLES:
        if (value := os.environ.get(name)) is not None:
            section.facts[name] = without_secrets(":".join(_short(part) for part in value.split(os.pathsep)))
    from huggingface_hub import constants, get_token

    section.facts["token of the Hub"] = "none: only public models can be loaded" if get_token() is None else "set"
    if constants.HF_HUB_OFFLINE:
        section.problems.append("HF_HUB_OFFLINE is set: models that are not in the cache cannot be loaded; unset it")


def _extras(section: Section) -> None:
    """Add the extras that are complete, and for the others what is missing or outdated and what needs it."""
    incomplete: list[str] = []
    names = [name for name in metadata.metadata(PACKAGE).get_all("Provides-Extra") or () if name != DEVELOPMENT]
    for name in names:
        missing, outdated = _states(name)
        states = {"missing": missing, "not the required version": outdated}
        if found := "; ".join(f"{state}: {', '.join(packages)}" for state, packages in states.items() if packages):
            section.facts[name] = f"{found}; for {USES.get(name, 'options that name it')}"
            section.problems += [f"optional package {one}: {install_command(name)}" for one in outdated]
            incomplete += [name] if missing else []
    complete = [name for name in names if name not in section.facts]
    section.facts = {"complete": ", ".join(complete) or "none", **section.facts}
    if incomplete:
        section.hint = f"to install one of them, such as {incomplete[0]}: {install_command(incomplete[0])}"


def _states(extra: str) -> tuple[list[str], list[str]]:
    """Return the packages of an extra that are missing, and those in another version, from the package's metadata."""
    from packaging.requirements import Requirement

    missing, outdated = [], []
    for requirement in map(Requirement, metadata.requires(PACKAGE) or ()):
        marker = requirement.marker
        if marker is None or not marker.evaluate({"extra": extra}) or marker.evaluate({"extra": ""}):
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            missing.append(requirement.name)
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            outdated.append(f"{requirement.name}{requirement.specifier} is required, {version} is installed")
    return missing, outdated


_SECTIONS: dict[str, Callable[[Section], None]] = {
    "Software": _software,
    "Devices": _devices,
    "Processor": _processor,
    "Memory and disk": _storage,
    "Environment": _environment,
    "Optional packages": _extras,
}


def _described(error: BaseException) -> str:
    """Return type and first line of an error.

    Example:
        >>> _described(OSError("libcuda.so.1: not found"))
        'OSError: libcuda.so.1: not found'
    """
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}".removesuffix(": ")


def _gib(number: float) -> str:
    """Format bytes in GiB with two digits.

    Example:
        >>> _gib(64 * 2**20), _gib(23.4 * 2**30), _gib(252 * 2**30)
        ('0.062 GiB', '23 GiB', '252 GiB')
    """
    amount = number / _GIB
    return f"{amount:.2g} GiB" if amount < 99.5 else f"{amount:.0f} GiB"


def _short(path: str | Path) -> str:
    """Return a path with `~` for the home folder, whose name may be private.

    Example:
        >>> _short(Path.home() / ".cache" / "torch")
        '~/.cache/torch'
    """
    try:
        return (Path("~") / Path(path).relative_to(Path.home())).as_posix()
    except (ValueError, RuntimeError):  # elsewhere, or no home folder
        return str(path)


COMMAND = Command(
    help=HELP,
    usage="cribo doctor [options]",
    less_memory="end other programs",
    add_options=add_options,
    run=run,
)
