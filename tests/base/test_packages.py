"""The command that installs an extra, for every way to install the package."""

import json
import sys
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

import pytest

from cribo.base.packages import command_for

REPOSITORY = "https://host.example/cribo"
METADATA = """\
Metadata-Version: 2.1
Name: cribo-ssl
Version: 0.2.0
Requires-Dist: numpy>=2.2
Requires-Dist: faiss-cpu>=1.9; extra == "search"
Requires-Dist: ray[data]<3,>=2; extra == "search"
Requires-Dist: winloop; sys_platform == "no system" and extra == "search"
Requires-Dist: msgpack>=1.0; extra == "jax"
"""


def describe(folder: Path, installer: str) -> None:
    """Write the metadata of a distribution."""
    (folder / "METADATA").write_text(METADATA)
    (folder / "INSTALLER").write_text(f"{installer}\n")


@pytest.mark.parametrize(
    ("installer", "source", "expected"),
    [
        ("pip", None, 'pip install "faiss-cpu>=1.9" "ray[data]<3,>=2"'),
        ("uv", None, 'uv pip install "faiss-cpu>=1.9" "ray[data]<3,>=2"'),
        (
            "uv",
            {"url": "file:///home/me/my%20code/cribo", "dir_info": {"editable": True}},
            'uv pip install -e "/home/me/my code/cribo[search]"',
        ),
        (
            "pip",
            {"url": "file:///home/me/cribo", "dir_info": {}},
            'pip install "cribo-ssl[search] @ file:///home/me/cribo"',
        ),
        (
            "pip",
            {"url": REPOSITORY, "vcs_info": {"vcs": "git", "commit_id": "0a1b2c", "requested_revision": "v0.2.0"}},
            f'pip install "cribo-ssl[search] @ git+{REPOSITORY}@v0.2.0"',
        ),
        (
            "pip",
            {"url": REPOSITORY, "vcs_info": {"vcs": "git", "commit_id": "0a1b2c"}, "subdirectory": "python"},
            f'pip install "cribo-ssl[search] @ git+{REPOSITORY}@0a1b2c#subdirectory=python"',
        ),
        (
            "pip",
            {"url": "https://host.example/cribo_ssl-0.2.0-py3-none-any.whl", "archive_info": {}},
            'pip install "cribo-ssl[search] @ https://host.example/cribo_ssl-0.2.0-py3-none-any.whl"',
        ),
    ],
)
def test_extras_come_from_where_the_package_came(
    installer: str, source: dict[str, Any] | None, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    describe(tmp_path, installer)
    if source is not None:
        (tmp_path / "direct_url.json").write_text(json.dumps(source))
    monkeypatch.setenv("VIRTUAL_ENV", sys.prefix)
    monkeypatch.setattr("shutil.which", lambda name: name)
    monkeypatch.setattr(Path, "exists", lambda path: True)
    assert command_for(Distribution.at(tmp_path), "search") == expected


def test_uv_is_told_the_environment_unless_it_is_active(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    describe(tmp_path, "uv")
    monkeypatch.setattr("shutil.which", lambda name: name)
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    command = command_for(Distribution.at(tmp_path), "jax")
    assert command == f'uv pip install --python {sys.executable} "msgpack>=1.0"'


def test_extras_of_an_image_are_installed_by_their_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The image has neither uv nor the source that it was built from."""
    describe(tmp_path, "uv")
    (tmp_path / "direct_url.json").write_text(json.dumps({"url": "file:///no/such/source", "dir_info": {}}))
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert command_for(Distribution.at(tmp_path), "jax") == 'pip install "msgpack>=1.0"'
