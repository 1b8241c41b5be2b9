"""Ctrl-C prints one line, which says what is kept and how to continue."""

import re
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from PIL import Image

from cribo.base.console import Phases
from cribo.cli import main
from cribo.pretraining.loading import dump_config

if TYPE_CHECKING:
    from cribo.pretraining import PretrainConfig


@pytest.fixture
def workspace(tmp_path: Path, tiny: "Callable[..., PretrainConfig]", monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write labelled images, and the configuration of a short run, to the working folder."""
    monkeypatch.chdir(tmp_path)
    for number in range(4):
        labels = (torch.arange(64) > 20 + 3 * number).repeat(64, 1).to(torch.uint8)
        image = Image.fromarray(200 * labels.numpy()).convert("RGB")
        for kind, picture in (("images", image), ("labels", Image.fromarray(labels.numpy()))):
            for folder in (f"{kind}/train", f"{kind}/val", f"examples/{kind}"):
                Path(folder).mkdir(parents=True, exist_ok=True)
                picture.save(f"{folder}/{number}.png")
    (tmp_path / "classes.txt").write_text("dark\nbright\n")
    (tmp_path / "tiny.yaml").write_text(dump_config(tiny()))
    return tmp_path


MEAN = ["--backbone", "mean-colour"]
EXAMPLES = ["--examples", "examples"]

CASES = {
    "pretrain": (
        ["pretrain", "--config", "tiny.yaml", "--name", "mine"],
        "training",
        r"step \d+ was the last, continue with cribo pretrain --resume runs/mine",
    ),
    "evaluate": (
        ["evaluate", "dense-nn", *MEAN, "--data", "folder", "--data.root", ".", "--cache", "none", "--neighbours", "5"],
        "search [%]",
        "nothing was written",
    ),
    "linear": (
        ["evaluate", "linear", *MEAN, "--data", "folder", "--data.root", ".", "--out", "scores", "--schedule", "short"],
        "linear",
        "what is done is kept in scores; to continue, repeat the command with --out scores --resume",
    ),
    "segment before the first image": (
        ["segment", *MEAN, *EXAMPLES, "--images", "images/val", "--out", "segmented"],
        "choosing blocks and head",
        "nothing was written",
    ),
    "segment": (
        ["segment", *MEAN, *EXAMPLES, "--images", "images/val", "--out", "segmented", "--batch_size", "1"],
        "images",
        r"[1-3] of 4 images are done in segmented; to continue, repeat the command with --resume",
    ),
    "embed": (
        ["embed", "images/val", *MEAN, "--out", "features"],
        "images",
        "1 of 1 parts are done in features; to continue, repeat the command with --resume",
    ),
    "index": (
        ["index", *MEAN, "--images", "images/val", "--db", "objects.db"],
        "objects",
        "indexed images are kept; to continue, repeat the command",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_ctrl_c_says_what_is_kept(
    case: str,
    workspace: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    words, phase, message = CASES[case]
    if words[0] == "index":
        pytest.importorskip("lance")
    call = Phases.__call__

    def interrupted(self: Phases, what: str, done: int, *rest: Any) -> None:
        call(self, what, done, *rest)
        if what.startswith(phase) and done:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Phases, "__call__", interrupted)
    request.addfinalizer(partial(signal.signal, signal.SIGINT, signal.getsignal(signal.SIGINT)))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore SIGINT
    assert main(words) == 130
    last = capsys.readouterr().err.splitlines()[-1]
    assert re.fullmatch(rf"cribo {' '.join(words[: 1 + (words[0] == 'evaluate')])}: interrupted; {message}", last), last


def test_ctrl_c_during_imports_exits_at_once() -> None:
    program = """
import signal
import subprocess
import sys
from cribo.base.console import command_console, importing

with importing(command_console()):
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:  # as some packages do while they are imported
        pass
print("went on")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr.strip() == "interrupted; nothing was written"
