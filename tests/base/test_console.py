import io
import logging
import sys

import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cribo.base import console as module
from cribo.base.console import Phases, _SafeConsole, command_console, duration, loading, log_to


def test_durations() -> None:
    found = [duration(seconds) for seconds in (0, 59.6, 61, 3600, 90061)]
    assert found == ["0:00", "1:00", "1:01", "1:00:00", "25:01:01"]


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replace the clock by a number of seconds."""
    now = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    return now


def test_a_log_file_gets_occasional_lines_and_the_end_of_each_phase(now: list[float]) -> None:
    text = io.StringIO()
    with Phases(Console(file=text, width=200)) as progress:
        for done in range(1, 101):
            now[0] += 1
            progress("reading", done, 100)
        for done in range(1, 3):
            progress("searching", done, 2)
    lines = text.getvalue().splitlines()
    assert lines == [
        "reading: 30/100, ETA 1:10",  # after 29 of 30 seconds, since time is measured from the first call
        "reading: 60/100, ETA 0:40",
        "reading: 90/100, ETA 0:10",
        "reading: 100/100, 1:39",
        "searching: 2/2, 0:00",
    ]


def test_the_first_call_of_a_phase_has_no_eta(now: list[float]) -> None:
    text = io.StringIO()
    with Phases(Console(file=text, width=200)) as progress:
        now[0] = 40
        progress("reading", 1, 100)
    assert text.getvalue() == "reading: 1/100\n"


def test_the_eta_of_a_resumed_phase_is_based_on_new_items(now: list[float]) -> None:
    text = io.StringIO()
    with Phases(Console(file=text, width=40), first_line=5.0) as progress:
        for done in range(900, 911):
            progress("training", done, 1000, "epoch 9/10 · 240 img/s · a line is never wrapped")
            now[0] += 1
    assert text.getvalue() == "training: 905/1000, ETA 1:35 epoch 9/10 · 240 img/s · a line is never wrapped\n"


def test_a_terminal_gets_bars_and_is_restored() -> None:
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=100)
    with Phases(console) as progress:
        progress("reading", 3, 3)
    assert "reading" in text.getvalue()
    assert "3/3" in text.getvalue()
    assert text.getvalue().count("\x1b[?25l") == text.getvalue().count("\x1b[?25h")  # the cursor is visible again


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_loading_and_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with loading(Console()):
        assert terminal.getvalue() == "loading…"
    assert terminal.getvalue() == f"loading…\r{' ' * 8}\r"
    with pytest.raises(ImportError), loading(Console()):
        raise ImportError
    assert terminal.getvalue().endswith("\r")


@pytest.mark.parametrize(("stream", "quiet"), [(io.StringIO(), False), (Terminal(), True)])
def test_log_files_and_other_ranks_do_not_show_loading(
    stream: io.StringIO, quiet: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    with loading(Console(quiet=quiet)):
        pass
    assert stream.getvalue() == ""


def test_names_cannot_control_the_terminal(capsys) -> None:
    name = "\x1b[2Jboo\r\x07" + "caf\udce9 \u202e.jpg"
    shown = command_console()
    log_to(shown)
    shown.print(f"plain {name}")
    table = Table(title=Text(name))
    table.add_column("name")
    table.add_row(Text(name))
    shown.print(table)
    logging.getLogger("cribo").warning("logged %s", name)
    text = capsys.readouterr().out
    assert text.count("boo") == 4
    assert not set(text) & set("\x1b\r\x07\u202e")
    assert r"\x1b[2Jboo" in text
    text.encode()


def test_colours_remain_on_a_terminal() -> None:
    file = io.StringIO()
    shown = _SafeConsole(file=file, force_terminal=True, color_system="standard")
    shown.print("red", style="red")
    assert "\x1b[31mred" in file.getvalue()
