import importlib.metadata
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from cribo.base.packages import install_command
from cribo.cli.doctor.findings import Section
from cribo.cli.doctor.packages import DEVELOPMENT, USES, broken_modules, examine_packages

REPOSITORY = Path(__file__).parents[3]


def test_every_extra_for_users_has_a_use() -> None:
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(USES) == set(extras) - {DEVELOPMENT}


def test_broken_modules_are_found_even_if_they_end_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken.py").write_text("raise ValueError('numpy.dtype size changed\\nsecond line')")
    (tmp_path / "deadly.py").write_text("import os\nprint('output')\nos.abort()")
    (tmp_path / "exits.py").write_text("raise SystemExit(3)")
    (tmp_path / "fine.py").write_text("print('output of an import')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = broken_modules(["fine", "deadly", "broken", "exits", "absent", "json"])
    assert found == (
        {
            "deadly": "the process ended with status -6",
            "broken": "ValueError: numpy.dtype size changed",
            "exits": "SystemExit: 3",
            "absent": "ModuleNotFoundError: No module named 'absent'",
        },
        [],
    )


def test_modules_that_are_not_imported_in_time_are_returned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deadly.py").write_text("import os\nos._exit(3)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    clock = iter([0.0, 0.0, 100.0])  # the start, the first process, and another one after the end of the first
    monkeypatch.setattr("cribo.cli.doctor.packages.time", SimpleNamespace(monotonic=lambda: next(clock)))
    errors, unexamined = broken_modules(["absent", "deadly", "json", "gone"], seconds=60)
    assert errors == {
        "absent": "ModuleNotFoundError: No module named 'absent'",
        "deadly": "the process ended with status 3",
    }
    assert unexamined == ["json", "gone"]


def test_answers_before_the_time_limit_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interpreter = tmp_path / "python"  # starts at once
    interpreter.write_text('#!/bin/sh\nprintf \'absent\\n"its error"\\nfine\\n""\\nslow\\n\'\nexec sleep 60\n')
    interpreter.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(interpreter))
    assert broken_modules(["absent", "fine", "slow", "gone"], seconds=1) == ({"absent": "its error"}, ["slow", "gone"])


def test_missing_outdated_and_broken_packages_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    version = importlib.metadata.version

    def installed(name: str) -> str:
        if name == "faiss-cpu":
            raise importlib.metadata.PackageNotFoundError(name)
        return "0.1" if name == "peft" else version(name)

    monkeypatch.setattr("importlib.metadata.version", installed)
    monkeypatch.setattr(
        "cribo.cli.doctor.packages.broken_modules",
        lambda names: ({"av": "ImportError: libavcodec.so.61: cannot open"}, ["msgpack"]),
    )
    section = Section("Optional packages")
    examine_packages(section)
    assert section.facts["evaluation"] == f"missing: faiss-cpu; for {USES['evaluation']}"
    assert section.hint == f"to install one of them, such as evaluation: {install_command('evaluation')}"
    assert "search" in section.facts  # needs faiss, too
    assert section.facts["lora"].startswith("not the required version: peft<1,>=0.14 is required, 0.1 is installed")
    assert "broken: av cannot be imported" in section.facts["video"]
    assert section.facts["not examined"] == "msgpack: imports took longer than 20 s"
    assert "completion" in section.facts["complete"].split(", ")
    assert "jax" not in section.facts["complete"].split(", ")  # needs msgpack
    assert "lora" not in section.facts["complete"].split(", ")
    assert [problem.partition(":")[0] for problem in sorted(section.problems)] == [
        "optional package av cannot be imported (ImportError",
        "optional package peft<1,>=0.14 is required, 0.1 is installed",
    ]
