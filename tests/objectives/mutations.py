"""Mutations of the objectives, which their tests must notice: `python -m tests.objectives.mutations [OBJECTIVE ...]`.

Each mutation of mutations.yaml replaces one piece of a copy of the package, and the tests of its objective are run.
Mutations that pass them are printed, and the status is 1. A mutation takes about ten seconds.
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import yaml

FOLDER = Path(__file__).parent
REPOSITORY = FOLDER.parents[1]


class Mutation(NamedTuple):
    """What is wrong, a piece of a file in `cribo/objectives`, and what replaces it."""

    name: str
    file: str
    before: str
    after: str


def main(names: list[str]) -> int:
    """Run the mutations of these objectives, or of all; return 1 if any survives."""
    import lightning  # noqa: F401 (imported once for all processes)
    import timm  # noqa: F401
    import torchvision  # noqa: F401

    content = read_mutations()
    if unknown := sorted({*names} - content.keys()):
        print(f"no objective {', '.join(unknown)}: choose from {', '.join(content)}")
        return 2
    survivors = 0
    for name in names or content:
        mutations, tests = content[name]
        if is_noticed(mutations[0]._replace(after=mutations[0].before), tests):
            print(f"{name}: the tests fail without a mutation")
            return 2
        for mutation in mutations:
            found = is_noticed(mutation, tests)
            survivors += not found
            print(f"{name}: {mutation.name}: {'noticed' if found else 'SURVIVES'}", flush=True)
    print(f"{survivors} survive")
    return int(survivors > 0)


def read_mutations() -> dict[str, tuple[list[Mutation], list[str]]]:
    """Return the mutations of each objective, and the files of its tests."""
    content = yaml.safe_load((FOLDER / "mutations.yaml").read_text(encoding="utf-8"))
    return {name: ([Mutation(**row) for row in own["mutations"]], own["tests"]) for name, own in content.items()}


def is_noticed(mutation: Mutation, tests: Sequence[str]) -> bool:
    """Whether a test fails with a mutated copy of the package."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "src"
        shutil.copytree(REPOSITORY / "src", copy, ignore=shutil.ignore_patterns("__pycache__"))
        path = copy / "cribo" / "objectives" / mutation.file
        source = path.read_text(encoding="utf-8")
        path.write_text(source.replace(mutation.before, mutation.after), encoding="utf-8")
        process = os.fork()
        if not process:
            run_tests(copy, tests)
        _, status = os.waitpid(process, 0)
    return os.waitstatus_to_exitcode(status) != 0


def run_tests(source: Path, tests: Sequence[str]) -> None:
    """Run tests with another copy of the package, those of the written steps first, and end the process."""
    import pytest

    sys.path.insert(0, str(source))
    os.chdir(REPOSITORY)
    with Path(os.devnull).open("w") as nothing:
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)
        words = ["-x", "-q", "-m", "not slow and not gpu", "-p", "no:cacheprovider", *(str(FOLDER / t) for t in tests)]
        status = pytest.main([*words, "-k", "written_out"])
        if status in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            status = pytest.main([*words, "-k", "not written_out"])
    os._exit(int(status))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
