"""The doctor finds the facts of this machine, and problems of machines that differ from it."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from rich.console import Console

import cribo
from cribo.base.packages import install_command
from cribo.cli import main
from cribo.cli.doctor import DEVELOPMENT, USES, Section, examine

REPOSITORY = Path(__file__).parents[2]


def examined() -> dict[str, Section]:
    return {section.title: section for section in examine(Console(quiet=True))}


def problems() -> str:
    return "\n".join(problem for section in examined().values() for problem in section.problems)


def program(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose driver lists a GPU."""
    program(tmp_path, "nvidia-smi", "echo '550.54, NVIDIA A100-SXM4-80GB, 81920 MiB'")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")


def test_all_sections_have_facts_and_nothing_is_unknown() -> None:
    sections = examined()
    for section in sections.values():
        assert section.facts
        assert "error" not in section.facts
        assert not [value for value in section.facts.values() if value.startswith("unknown")]
    software = sections["Software"].facts
    assert Path(software["cribo"].partition(", ")[2]).expanduser() == Path(cribo.__file__).parent
    assert software["numpy"] == numpy.__version__
    assert software["torch"].startswith(torch.__version__.partition("+")[0])
    assert f"{os.cpu_count()}" in sections["Processor"].facts["cores"]


def test_facts_and_problems_are_printed_in_eighty_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["doctor"]) == 0
    shown, _ = re.split(r"\n(?=problems:|no problems found)", capsys.readouterr().out)
    assert max(len(line) for line in shown.splitlines() if not line.startswith("to install")) == 80
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["Software"]["python"]
    assert isinstance(found["problems"], list)
    assert not list(tmp_path.iterdir())


def test_a_system_without_the_expected_files_and_functions_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> None:
        raise FileNotFoundError(2, "No such file or directory", "/proc/stat")

    for name in ("psutil.virtual_memory", "shutil.disk_usage", "shutil.which", "cribo.cli.doctor._states"):
        monkeypatch.setattr(name, missing)
    sections = examined()
    error = "FileNotFoundError: [Errno 2] No such file or directory: '/proc/stat'"
    assert sections["Memory and disk"].facts["memory"] == f"unknown ({error})"
    assert sections["Memory and disk"].facts["this folder"] == f"unknown ({error})"
    assert sections["Devices"].facts["error"] == error
    assert sections["Optional packages"].facts["error"] == error


def test_the_command_works_without_a_usable_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libtorch_cpu.so: cannot open shared object file')")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-m", "cribo", "doctor"],
        env=environment,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "torch cannot be imported (OSError: libtorch_cpu.so: cannot open shared object file)" in done.stdout
    assert "Memory and disk" in done.stdout
    assert [path.name for path in tmp_path.iterdir() if path.name != "__pycache__"] == ["torch.py"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.usefixtures("driver")
class TestUnusableGPU:
    def test_by_a_build_for_the_cpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.version, "cuda", None)
        section = examined()["Devices"]
        assert section.facts["driver"] == "550.54"
        assert section.facts["GPU"] == "NVIDIA A100-SXM4-80GB, 81920 MiB"
        assert "torch is a CPU build, so NVIDIA A100-SXM4-80GB is not used" in "".join(section.problems)

    def test_by_an_environment_variable(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.version, "cuda", "12.6")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        assert "CUDA_VISIBLE_DEVICES='' hides NVIDIA A100-SXM4-80GB" in problems()

    def test_by_its_driver(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.version, "cuda", "12.6")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        assert "torch cannot use NVIDIA A100-SXM4-80GB (" in problems()


def test_a_driver_that_fails_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "nvidia-smi", "exit 9")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    section = examined()["Devices"]
    assert "nvidia-smi fails (CalledProcessError" in section.facts["driver"]
    assert len(section.problems) == 1


def test_threads_beyond_the_cores_of_a_container_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cribo.cli.doctor.core_limit", lambda: 0.5)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        section = examined()["Processor"]
    finally:
        torch.set_num_threads(before)
    assert section.facts["cores"].endswith("control group limits them to 0.5")
    assert any("torch uses 2 threads" in each and "OMP_NUM_THREADS=1" in each for each in section.problems)


def test_little_memory_and_a_read_only_cache_are_problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    monkeypatch.setenv("TORCH_HOME", str(cache))
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=3 * 2**29, total=2**34))
    monkeypatch.setattr("os.access", lambda path, mode: not Path(path).is_relative_to(cache))  # root may write anywhere
    section = examined()["Memory and disk"]
    assert section.facts["memory"].startswith("1.5 GiB free of ")
    assert section.facts["cache of torch"].endswith(f", {cache}/hub")
    found = "\n".join(section.problems)
    assert "only 1.5 GiB of memory is free" in found
    assert f"cache of torch cannot be written ({cache}/hub)" in found
    assert "TORCH_HOME" in found
    assert list(cache.iterdir()) == []


def test_too_little_shared_memory_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=64 * 2**20))
    assert "/dev/shm has 0.062 GiB free" in problems()


def test_no_credentials_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("HF_ENDPOINT", "https://me:secret@hub.example")
    monkeypatch.setenv("HF_HOME", str(Path.home() / "models"))
    facts = examined()["Environment"].facts
    assert "secret" not in str(facts)
    assert facts["HF_ENDPOINT"] == "https://***@hub.example"
    assert facts["HF_HOME"] == "~/models"
    assert facts["token of the Hub"] == "set"


def test_every_extra_for_users_has_a_use() -> None:
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(USES) == set(extras) - {DEVELOPMENT}


def test_missing_and_outdated_packages_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    version = importlib.metadata.version

    def installed(name: str) -> str:
        if name == "faiss-cpu":
            raise importlib.metadata.PackageNotFoundError(name)
        return "0.1" if name == "peft" else version(name)

    monkeypatch.setattr("importlib.metadata.version", installed)
    section = examined()["Optional packages"]
    assert section.facts["evaluation"] == f"missing: faiss-cpu; for {USES['evaluation']}"
    assert section.hint.endswith(install_command("evaluation"))
    assert section.facts["lora"].startswith("not the required version: peft<1,>=0.14 is required, 0.1 is installed")
    assert "completion" in section.facts["complete"].split(", ")
    assert "lora" not in section.facts["complete"].split(", ")
    assert [problem.partition(":")[0] for problem in section.problems] == [
        "optional package peft<1,>=0.14 is required, 0.1 is installed"
    ]
