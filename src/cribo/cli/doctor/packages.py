"""Optional packages that are missing, in the wrong version or broken, and the commands that need them."""

import importlib.metadata
import json
import re
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from cribo.base.packages import PACKAGE, install_command
from cribo.cli.doctor.findings import Section, described

DEVELOPMENT = "dev"
"""The extra for work on this package, which is not examined."""

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
    "video": "video files as training data",
    "cluster": "--engine ray of embed, index and segment",
    "regions": "the objective orl",
    "wandb": "--logger wandb",
    "mlflow": "--logger mlflow",
    "trackio": "--logger trackio",
}
"""What each extra is for; tests compare the names with pyproject.toml. Packages come from the metadata."""

_SECONDS = 20.0  # for the import of optional packages; with all extras, it may take longer

_ENDED = "the process ended with status"
_COMPLETE = f"{_ENDED} 0"

_IMPORT = """
import contextlib, importlib, io, json, sys
answers = sys.stdout
for name in sys.argv[1:]:
    print(name, file=answers, flush=True)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            importlib.import_module(name)
        error = ""
    except BaseException as found:
        error = f"{type(found).__name__}: {found}".splitlines()[0]
    print(json.dumps(error), file=answers, flush=True)
"""
"""Program that imports modules: prints the name of each before its import, and its error or "" afterwards."""


@dataclass
class Extra:
    """State of an extra.

    Attributes:
        missing: requirements that are not installed.
        outdated: requirements that are installed in another version, with this version.
        broken: packages that cannot be imported, with the error.
        unexamined: packages that were not imported in time.
    """

    missing: list[str] = field(default_factory=list)
    outdated: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    unexamined: list[str] = field(default_factory=list)


def examine_packages(section: Section) -> None:
    """Add the extras that are complete, and for the others what is missing and what needs it."""
    extras = find_extras()
    complete = [name for name, extra in extras.items() if extra == Extra()]
    section.facts["complete"] = ", ".join(complete) or "none"
    unexamined = {package for extra in extras.values() for package in extra.unexamined}
    if unexamined:
        section.facts["not examined"] = f"{', '.join(sorted(unexamined))}: imports took longer than {_SECONDS:.0f} s"
    for name, extra in extras.items():
        states = {"missing": extra.missing, "not the required version": extra.outdated, "broken": extra.broken}
        found = "; ".join(f"{state}: {', '.join(packages)}" for state, packages in states.items() if packages)
        if found:
            section.facts[name] = f"{found}; for {USES.get(name, 'options that name it')}"
        section.problems += [f"optional package {one}: reinstall it, or uninstall it" for one in extra.broken]
        section.problems += [f"optional package {one}: {install_command(name)}" for one in extra.outdated]
    if missing := [name for name, extra in extras.items() if extra.missing]:
        section.hint = f"to install one of them, such as {missing[0]}: {install_command(missing[0])}"


def find_extras() -> dict[str, Extra]:
    """Return the state of each extra of this package that is for users, from the metadata of the installed package."""
    from packaging.requirements import Requirement

    extras: dict[str, Extra] = {}
    installed: dict[str, list[str]] = defaultdict(list)  # the extras of each package
    modules = _modules()
    for name in importlib.metadata.metadata(PACKAGE).get_all("Provides-Extra") or ():
        if name == DEVELOPMENT:
            continue
        extras[name] = Extra()
        for requirement in map(Requirement, importlib.metadata.requires(PACKAGE) or ()):
            if requirement.marker is None or not requirement.marker.evaluate({"extra": name}):
                continue
            if requirement.marker.evaluate({"extra": ""}):
                continue  # required without the extra, too
            try:
                version = importlib.metadata.version(requirement.name)
            except importlib.metadata.PackageNotFoundError:
                extras[name].missing.append(requirement.name)
                continue
            if requirement.specifier.contains(version, prereleases=True):
                installed[requirement.name].append(name)
            else:
                required = f"{requirement.name}{requirement.specifier}"
                extras[name].outdated.append(f"{required} is required, {version} is installed")
    names = {modules[package][0]: package for package in installed if package in modules}
    errors, unexamined = broken_modules([*names])
    for module, error in errors.items():
        for name in installed[names[module]]:
            extras[name].broken.append(f"{names[module]} cannot be imported ({error})")
    for module in unexamined:
        for name in installed[names[module]]:
            extras[name].unexamined.append(names[module])
    return extras


def _modules() -> dict[str, list[str]]:
    """Return the names of the modules of each installed package."""
    modules: dict[str, list[str]] = defaultdict(list)
    for module, packages in importlib.metadata.packages_distributions().items():
        for package in packages:
            if not module.startswith("_"):
                modules[_normalised(package)].append(module)
    return modules


def _normalised(package: str) -> str:
    return re.sub(r"[-_.]+", "-", package).lower()


def broken_modules(names: Sequence[str], seconds: float = _SECONDS) -> tuple[dict[str, str], list[str]]:
    """Import modules in another process, which they may crash.

    Args:
        names: names of the modules.
        seconds: time for all imports.

    Returns:
        The errors of the modules that cannot be imported, and the names of the modules that were not imported in time.
    """
    errors: dict[str, str] = {}
    left, until = list(names), time.monotonic() + seconds
    while left:
        command = [sys.executable, "-c", _IMPORT, *left]
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, timeout=until - time.monotonic())
            printed, unfinished = done.stdout, f"{_ENDED} {done.returncode}"
        except subprocess.TimeoutExpired as error:
            printed, unfinished = error.stdout or b"", None
        except OSError as error:
            return errors | {left[0]: described(error)}, left[1:]
        lines = printed.decode(errors="replace").splitlines()
        answers = [*map(json.loads, lines[1::2]), unfinished]  # the last one only if an import did not finish
        for name, answer in zip(lines[::2], answers, strict=False):
            if answer is None:
                break
            left.remove(name)
            if answer:
                errors[name] = answer
        if unfinished in (None, _COMPLETE):
            break
    return errors, left
