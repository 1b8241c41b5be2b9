"""Whole commands in the process of the test."""

from collections.abc import Callable
from pathlib import Path

import pytest

from cribo.cli import main

Run = Callable[..., str]


@pytest.fixture
def cribo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command in the folder of the test and returns its output, or its error if it fails."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "1000")

    def run(*words: object, status: int = 0) -> str:
        ended = main([str(word) for word in words])
        shown = capsys.readouterr()
        assert ended == status, shown.err
        assert "Traceback" not in shown.err
        return shown.err if status else shown.out

    return run
