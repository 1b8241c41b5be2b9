"""Measured fault tests: small ones by default, large ones with `pytest tests/faults --endurance -s`."""

import sys
from collections.abc import Callable

import pytest

_FIGURES = pytest.StashKey[list[str]]()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the measurements."""
    found = config.stash.get(_FIGURES, [])
    if found:
        terminalreporter.section("reliability figures")
        for line in found:
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def figure(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Print a line now and in the summary at the end."""

    def note(line: str) -> None:
        sys.stdout.write(f"\n{line}\n")
        request.config.stash.setdefault(_FIGURES, []).append(line)

    return note


@pytest.fixture(scope="session")
def endurance(request: pytest.FixtureRequest) -> bool:
    """Whether --endurance is set."""
    return bool(request.config.getoption("--endurance"))
