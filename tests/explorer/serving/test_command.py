"""The command `cribo serve`: its errors, its token, and its end."""

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from tests.commands import Commands
from tests.explorer.conftest import Served
from tests.explorer.serving.conftest import draw, png

from cribo.cli import main


def start(commands: Commands, *words: object, prelude: str = "", **environment: str) -> Served:
    """Start `cribo serve` on a free port and wait for its address."""
    environment |= {"COLUMNS": "200"}
    command = commands.fork("serve", *words, "--port", 0, "--device", "cpu", environment=environment, prelude=prelude)
    while "Ctrl-C" not in command.output:
        assert command.wait(0.1) is None, f"the memory was not served: {command.output}"
    return Served(command.output.split(" at ")[1].split(";")[0], command)


STUDIO = ("--label_studio", "http://127.0.0.1:8080")
SLOWLY = """
import time
from cribo.explorer.serving.memory_file import MemoryFile
segment = MemoryFile.segment
def slowly(self, images):
    time.sleep(1)
    return segment(self, images)
MemoryFile.segment = slowly
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_running_requests_are_finished_at_the_end(
    memory_file: Path, run_folder: Path, commands: Commands, number: signal.Signals, status: int
) -> None:
    server = start(commands, "--memory", memory_file, "--backbone", run_folder, prelude=SLOWLY)
    headers = {"content-type": "image/png"}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(httpx.post, f"{server.address}/segment", content=png(draw(0)), headers=headers, timeout=60)
        while httpx.get(f"{server.address}/health").json()["active"] == 0:
            threading.Event().wait(0.01)
        os.kill(server.command.pid, number)
        assert answer.result().status_code == 200
    assert server.command.wait(60) == status
    assert "Traceback" not in server.command.output


def test_the_token_is_that_of_the_file_or_of_the_environment(
    memory_file: Path, run_folder: Path, commands: Commands, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("sesame\n")
    words = ("--memory", memory_file, "--backbone", run_folder, "--host", "0.0.0.0")
    servers = [
        start(commands, *words, "--token_file", tmp_path / "token"),
        start(commands, *words, CRIBO_TOKEN="sesame"),
    ]
    for server in servers:
        assert httpx.get(f"{server.address}/memory").status_code == 401
        assert httpx.get(f"{server.address}/memory", headers={"authorization": "Bearer sesame"}).status_code == 200
        assert "sesame" not in server.command.output
        server.stop()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--memory", "missing.safetensors"), "missing.safetensors"),
        (("--memory", "note.txt"), "note.txt"),
        (("--memory", "halves.safetensors", "--backbone", "mean-colour"), "another backbone"),
        (("--memory", "halves.safetensors", "--host", "0.0.0.0"), "--token_file"),
        (("--memory", "halves.safetensors", "--token_file", "none.txt"), "--token_file"),
        (("--memory", "halves.safetensors", "--token_file", "empty.txt"), "must not be empty"),
        (("--memory", "halves.safetensors", "--token_file", "note.txt", "--no_token"), "exclude"),
        (("--memory", "halves.safetensors", "--port", "99999"), "port"),
        (("--memory", "halves.safetensors", "--host", "nowhere.invalid", "--no_token"), "nowhere.invalid"),
        (("--memory", "halves.safetensors", "--max_waiting", "0"), "max_waiting"),
        (("--memory", "halves.safetensors", "--max_megapixels", "0"), "max_megapixels"),
        (("--memory", "halves.safetensors", "--timeout", "0"), "timeout"),
        (("--memory", "halves.safetensors", "--device", "cuda:99"), "cuda:99"),
        (("--memory", "halves.safetensors", "--label_studio", "127.0.0.1:8080"), "--label_studio"),
        (("--memory", "halves.safetensors", "--label_studio_key_file", "note.txt"), "requires --label_studio"),
        (("--memory", "halves.safetensors", *STUDIO, "--label_studio_key_file", "empty.txt"), "must not be empty"),
        (("--memory", "missing/new.safetensors", *STUDIO), "missing"),
        (("--memory", "note.txt", *STUDIO), "note.txt"),
        (("--memory", "halves.safetensors", *STUDIO, "--backbone", "mean-colour"), "another backbone"),
    ],
    ids=lambda value: " ".join(value[1:]) if isinstance(value, tuple) else value,
)
def test_invalid_options_are_errors(
    words: tuple[str, ...],
    named: str,
    memory_file: Path,
    run_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for variable in ("CRIBO_TOKEN", "LABEL_STUDIO_API_KEY"):
        monkeypatch.delenv(variable, raising=False)
    (tmp_path / "halves.safetensors").symlink_to(memory_file)
    (tmp_path / "note.txt").write_text("a note")
    (tmp_path / "empty.txt").write_text("")
    backbone = () if "--backbone" in words else ("--backbone", str(run_folder))
    assert main(["serve", *words, *backbone, *(() if "--port" in words else ("--port", "0"))]) == 2
    assert named in capsys.readouterr().err
