"""The examination finds the facts of this machine, and problems of machines that differ from it."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch

import cribo
from cribo.cli.doctor.examination import examine
from cribo.cli.doctor.findings import Section, short
from cribo.cli.doctor.gpus import examine_devices
from cribo.cli.doctor.processor import examine_processor
from cribo.cli.doctor.software import examine_environment, examine_software
from cribo.cli.doctor.storage import examine_storage, little_shared_memory


def filled(fill: object) -> Section:
    section = Section("")
    fill(section)  # pyright: ignore[reportCallIssue]
    return section


def program(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose driver lists a GPU."""
    program(tmp_path, "nvidia-smi", "echo '550.54, NVIDIA A100-SXM4-80GB, 81920 MiB'")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")


def test_all_sections_have_facts_and_nothing_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    # It has tests of its own, and takes long.
    monkeypatch.setattr("cribo.cli.doctor.packages.broken_modules", lambda names: ({}, []))
    sections = {section.title: section for section in examine()}
    assert list(sections) == [
        *("Software", "Devices", "Processor", "Memory and disk", "Environment", "Optional packages"),
    ]
    for section in sections.values():
        assert section.facts
        assert "error" not in section.facts
        assert not [value for value in section.facts.values() if value.startswith("unknown")]
    software = sections["Software"].facts
    assert software["cribo"].endswith(short(Path(cribo.__file__).parent))
    assert software["numpy"] == numpy.__version__
    assert software["torch"].startswith(torch.__version__.partition("+")[0])
    assert f"{os.cpu_count()}" in sections["Processor"].facts["cores"]


def test_a_system_without_the_expected_files_and_functions_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> None:
        raise FileNotFoundError(2, "No such file or directory", "/proc/stat")

    monkeypatch.setattr("psutil.cpu_percent", missing)
    monkeypatch.setattr("psutil.virtual_memory", missing)
    monkeypatch.setattr("shutil.disk_usage", missing)
    monkeypatch.setattr("shutil.which", missing)
    monkeypatch.setattr("cribo.cli.doctor.packages.find_extras", missing)
    sections = {section.title: section for section in examine()}
    error = "FileNotFoundError: [Errno 2] No such file or directory: '/proc/stat'"
    assert sections["Processor"].facts["other programs"] == f"unknown ({error})"
    assert sections["Memory and disk"].facts["memory"] == f"unknown ({error})"
    assert sections["Memory and disk"].facts["this folder"] == f"unknown ({error})"
    assert sections["Devices"].facts["error"] == error
    assert sections["Optional packages"].facts["error"] == error


def test_a_library_that_cannot_be_imported_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist\\nmore')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torchvision")
    section = filled(examine_software)
    assert section.facts["torchvision"].endswith(", cannot be imported")
    assert section.problems == [
        "torchvision cannot be imported (RuntimeError: operator torchvision::nms does not exist): reinstall it, "
        "pip install --force-reinstall torch torchvision"
    ]


def test_the_package_that_is_broken_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "timm")
    (tmp_path / "timm.py").write_text("import draws")
    for text in ("raise ValueError('numpy.dtype size changed')", "import draws.shapes", "from draws import shapes"):
        (tmp_path / "draws.py").write_text(text)
        (problem,) = filled(examine_software).problems
        assert problem.startswith("timm cannot be imported (")
        assert problem.endswith("): reinstall draws")  # an index may have another package of this name
        sys.modules.pop("draws", None)


def test_the_command_works_without_a_usable_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libtorch_cpu.so: cannot open shared object file')")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    program = """
from cribo.cli import main
from cribo.cli.doctor import packages
packages.broken_modules = lambda names: ({}, [])  # takes long
raise SystemExit(main(["doctor"]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "torch cannot be imported (OSError: libtorch_cpu.so: cannot open shared object file)" in done.stdout
    assert "the speed cannot be measured (OSError: libtorch_cpu.so" in done.stdout
    assert "unknown (OSError" in done.stdout
    assert "Memory and disk" in done.stdout
    assert [path.name for path in tmp_path.iterdir() if path.name != "__pycache__"] == ["torch.py"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.usefixtures("driver")
class TestUnusableGPU:
    def test_by_a_build_for_the_cpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.version, "cuda", None)
        section = filled(examine_devices)
        assert section.facts["driver"] == "550.54"
        assert section.facts["GPU"] == "NVIDIA A100-SXM4-80GB, 81920 MiB"
        (problem,) = section.problems
        assert problem.startswith("torch is a CPU build, so NVIDIA A100-SXM4-80GB is not used: install a CUDA build")

    def test_by_an_environment_variable(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.version, "cuda", "12.6")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        (problem,) = filled(examine_devices).problems
        assert problem == "CUDA_VISIBLE_DEVICES='' hides NVIDIA A100-SXM4-80GB: unset it to use the GPU"

    def test_by_its_driver(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.version, "cuda", "12.6")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        (problem,) = filled(examine_devices).problems
        assert problem.startswith("torch cannot use NVIDIA A100-SXM4-80GB (")
        assert "update its driver" in problem


def test_a_driver_that_fails_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "nvidia-smi", "exit 9")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    section = filled(examine_devices)
    assert "nvidia-smi fails (CalledProcessError" in section.facts["driver"]
    assert len(section.problems) == 1


def test_threads_beyond_the_cores_of_a_container_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cribo.cli.doctor.processor.core_limit", lambda: 0.5)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        section = filled(examine_processor)
    finally:
        torch.set_num_threads(before)
    assert section.facts["cores"].endswith("control group limits them to 0.5")
    assert any("torch uses 2 threads" in each and "OMP_NUM_THREADS=1" in each for each in section.problems)


def test_other_programs_that_use_the_processor_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    for percent, is_problem in ((10.0, False), (93.0, True)):
        monkeypatch.setattr("psutil.cpu_percent", lambda interval, percent=percent: percent)
        problems = "\n".join(filled(examine_processor).problems)
        assert (f"other programs use {percent:.0f}% of the processor" in problems) == is_problem


def test_missing_instructions_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(torch.cpu, "_is_avx2_supported", lambda: False)
    monkeypatch.setattr("cribo.base.devices.multiplies_bfloat16", lambda: False)
    section = filled(examine_processor)
    assert "AVX2" not in section.facts["instructions"].split(", ")
    assert section.facts["bfloat16"].startswith("not native: adapt trains in float32")
    assert any("no AVX2" in problem for problem in section.problems)


def test_little_memory_and_a_read_only_cache_are_problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    monkeypatch.setenv("TORCH_HOME", str(cache))
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=3 * 2**29, total=2**34))
    monkeypatch.setattr("os.access", lambda path, mode: not Path(path).is_relative_to(cache))  # root may write anywhere
    section = filled(examine_storage)
    assert section.facts["memory"].startswith("1.5 GiB free of ")
    assert section.facts["cache of torch"].endswith(f", {cache}/hub")
    problems = "\n".join(section.problems)
    assert "only 1.5 GiB of memory is free" in problems
    assert f"cache of torch cannot be written ({cache}/hub)" in problems
    assert "set TORCH_HOME to another folder" in problems
    assert list(cache.iterdir()) == []


def test_too_little_shared_memory_is_a_problem() -> None:
    assert little_shared_memory(free=2**31, needed=2**31) is None
    problem = little_shared_memory(free=64 * 2**20, needed=3 * 2**30 + 1)
    assert problem is not None
    assert "/dev/shm has 0.062 GiB free" in problem
    assert "--shm-size 4g" in problem


def test_no_credentials_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("HF_ENDPOINT", "https://me:secret@hub.example")
    monkeypatch.setenv("HF_HOME", str(Path.home() / "models"))
    facts = filled(examine_environment).facts
    assert "secret" not in str(facts)
    assert facts["HF_ENDPOINT"] == "https://***@hub.example"
    assert facts["HF_HOME"] == "~/models"
    assert facts["token of the Hub"] == "set"
