import importlib.metadata
import tomllib
from pathlib import Path

import pytest

from cribo.doctor.findings import Section
from cribo.doctor.packages import DEVELOPMENT, USES, broken_modules, examine_packages
from cribo.installation import install_command

REPOSITORY = Path(__file__).parents[2]


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
    assert found == {
        "deadly": "the process ended with status -6",
        "broken": "ValueError: numpy.dtype size changed",
        "exits": "SystemExit: 3",
        "absent": "ModuleNotFoundError: No module named 'absent'",
    }


def test_slow_imports_are_ended_and_earlier_errors_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(60)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert broken_modules(["absent", "slow", "gone"], seconds=3) == {
        "absent": "ModuleNotFoundError: No module named 'absent'"
    }


def test_missing_outdated_and_broken_packages_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    version = importlib.metadata.version

    def installed(name: str) -> str:
        if name == "faiss-cpu":
            raise importlib.metadata.PackageNotFoundError(name)
        return "0.1" if name == "peft" else version(name)

    monkeypatch.setattr("importlib.metadata.version", installed)
    monkeypatch.setattr(
        "cribo.doctor.packages.broken_modules", lambda names: {"av": "ImportError: libavcodec.so.61: cannot open"}
    )
    section = Section("Optional packages")
    examine_packages(section)
    assert section.facts["evaluation"] == (
        f"missing: faiss-cpu\nfor {USES['evaluation']}\n{install_command('evaluation')}"
    )
    assert "search" in section.facts  # needs faiss, too
    assert section.facts["lora"].startswith("not the required version: peft<1,>=0.14 is required, 0.1 is installed")
    assert "broken: av cannot be imported" in section.facts["video"]
    assert "completion" in section.facts["complete"].split(", ")
    assert "lora" not in section.facts["complete"].split(", ")
    assert [problem.partition(":")[0] for problem in sorted(section.problems)] == [
        "optional package av cannot be imported (ImportError",
        "optional package peft<1,>=0.14 is required, 0.1 is installed",
    ]
