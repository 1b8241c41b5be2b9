"""The package as people install it: contents of the wheel and the source distribution, and its page on an index."""

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]


def build(source: Path, out: Path, target: str) -> Path:
    """Build a wheel or an sdist, and return its path."""
    command = (sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(out))
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (built,) = out.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    with zipfile.ZipFile(build(REPOSITORY, tmp_path_factory.mktemp("wheel"), "wheel")) as archive:
        yield archive


def source_files() -> set[str]:
    files = (path for path in (REPOSITORY / "src").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(REPOSITORY / "src").as_posix() for path in files}


def test_the_wheel_contains_the_package_alone(wheel: zipfile.ZipFile) -> None:
    about = f"cribo_ssl-{Parser().parsestr(metadata(wheel))['Version']}.dist-info"
    extra = {f"{about}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")}
    assert {*wheel.namelist()} == source_files() | extra
    assert {
        "cribo/py.typed",
        "cribo/pretraining/presets/quickstart.yaml",
        "cribo/explorer/painter/painter.js",
    } <= source_files()


def test_the_source_distribution_builds_the_same_wheel(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    with tarfile.open(build(REPOSITORY, tmp_path / "sdist", "sdist")) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.glob("cribo_ssl-*")
    assert not [name for name in ("tests", "docs", "benchmarks") if (unpacked / name).exists()]
    with zipfile.ZipFile(build(unpacked, tmp_path / "rebuilt", "wheel")) as rebuilt:
        assert {name: rebuilt.read(name) for name in rebuilt.namelist()} == {
            name: wheel.read(name) for name in wheel.namelist()
        }


def test_the_installed_command_runs_from_an_empty_folder(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path / "installed")
    (tmp_path / "empty").mkdir()

    def cribo(*words: str) -> str:
        environment = os.environ | {"PYTHONPATH": str(tmp_path / "installed")}
        command = (sys.executable, "-m", "cribo", *words)
        done = subprocess.run(
            command, cwd=tmp_path / "empty", env=environment, check=True, capture_output=True, text=True
        )
        return done.stdout

    assert cribo("--version") == f"{Parser().parsestr(metadata(wheel))['Version']}\n"
    assert "vit_small_patch16_224" in cribo("pretrain", "--config", "coco_vits16", "--print_config")
    assert not [*(tmp_path / "empty").iterdir()]


# A package index and a code host give such a name to whoever registers it first.
FETCHES = (
    r"(?:pip3? install|pipx (?:install|run)|uvx|uv tool (?:install|run)|uv add|poetry add|conda install)\b[^\n`&|;#]*"
    r"[ \"']cribo(?:-ssl)?(?:\[[\w,]+\])?(?:[=<>~]=?[\d.]+)?[\"'`]?(?=\s|$)(?! @)",
    r"(?:github\.com|raw\.githubusercontent\.com|gitlab\.com|huggingface\.co)/cribo",
    r"cribo[\w-]*\.(?:github\.io|readthedocs|org|com|dev)\b",
    r"pypi\.org/project/cribo",
)


@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        ("pip install cribo-ssl", True),
        ('uv pip install "cribo-ssl[search,export]"', True),
        ("pipx run --spec 'cribo' cribo", True),
        ("uvx cribo", True),
        ("git clone https://github.com/cribo-ssl/cribo", True),
        ("https://cribo-ssl.github.io/cribo/", True),
        ('pip install ".[search]"', False),
        ('pip install "cribo-ssl[search] @ file:///home/me/cribo"', False),
        ("pip install uv && uv run cribo pretrain", False),
    ],
)
def test_fetches_are_recognised(text: str, is_found: bool) -> None:
    assert any(re.search(pattern, text) for pattern in FETCHES) == is_found


def test_nothing_fetches_cribo_by_a_name_that_anyone_can_register() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, check=True, capture_output=True).stdout
    suffixes = {"", ".md", ".py", ".toml", ".yml", ".yaml", ".ipynb", ".cff", ".sbatch", ".html", ".js"}
    places = [REPOSITORY / os.fsdecode(name) for name in listed.split(b"\0") if name]
    found = [
        f"{place.relative_to(REPOSITORY)}: {match[0]}"
        for place in places
        if place.suffix in suffixes and place.is_file() and "tests" not in place.parts
        for pattern in FETCHES
        for match in re.finditer(pattern, place.read_text(encoding="utf-8"))
    ]
    assert found == []


def metadata(wheel: zipfile.ZipFile) -> str:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return wheel.read(name).decode()
