"""Fixtures of several protocols."""

from collections.abc import Callable
from pathlib import Path

import pytest

from cribo.cli import main


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command that must fail before it writes a file, and return its error message."""

    def call(*given: str, status: int = 2) -> str:
        before = sorted(Path().rglob("*"))
        capsys.readouterr()
        assert main(list(given)) == status
        assert sorted(Path().rglob("*")) == before
        said = capsys.readouterr().err
        assert "Traceback" not in said
        return said

    return call
