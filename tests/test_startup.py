"""Help and argument errors do not import slow packages; commands that only read results do not import torch."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.explorer.conftest import draw_square

from cribo.cli import COMMANDS
from cribo.cli.evaluate import EVALUATIONS

_DATA = ["--backbone", "x", "--data", "voc"]
REFUSED = {
    "pretrain": ["--optim.epochs", "x"],
    "adapt": ["x", "--backbone", "x", "--minutes", "0"],
    "profile": ["--optim.lr", "-1"],
    "benchmark": ["--backbone", "x", "--data", "x", "--pictures", "-1"],
    "evaluate dense-nn": [*_DATA, "--size", "1", "2", "3"],
    "evaluate linear": [*_DATA, "--learning_rates", "0"],
    "evaluate segmenter": [*_DATA, "--drop_path", "2"],
    "evaluate detection": ["--backbone", "mean-colour", "--data", "coco"],
    "evaluate image-nn": [*_DATA],
    "evaluate overclustering": [*_DATA, "--draws", "0"],
    "evaluate discovery": ["--backbone", "x", "--data", "x", "--methods", "x"],
    "evaluate correspondence": ["--backbone", "x", "--data", "x", "--alphas", "0"],
    "evaluate depth": ["--backbone", "x", "--data", "x", "--methods", "x"],
    "evaluate video": ["--backbone", "x", "--data", "x", "--radius", "0"],
    "evaluate compare": [],
    "segment": ["--backbone", "x", "--examples", "x", "--images", "x", "--out", "x", "--batch_size", "0"],
    "embed": ["x", "--backbone", "x", "--out", "x", "--batch_size", "0"],
    "index": ["--db", "x", "--batch_size", "0"],
    "search": ["--db", "x", "--image", "x", "--k", "0"],
    "explore": [],
    "figures": ["--run", "x", "--only", "x"],
    "export": ["--backbone", "x", "--to", "x"],
    "shard": ["x", "y", "--size", "x"],
}
"""A wrong value, or none where one is needed, of each command."""

UNKNOWN_SET = ["--backbone", "x", "--data", "vox", "--data.root", "x"]

HEAVY = ("torch", "timm", "lightning", "transformers", "sklearn", "gradio", "lance", "matplotlib", "numpy")

PROGRAM = """
import sys
from cribo.cli import main

try:
    status = main(sys.argv[2:])
except SystemExit as exit:
    status = exit.code
print("loaded:", *(name for name in sys.argv[1].split(",") if name in sys.modules))
sys.exit(status)
"""


def run(*words: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-c", PROGRAM, ",".join(HEAVY)]
    return subprocess.run([*program, *words], capture_output=True, text=True, timeout=900, check=False)


def test_each_command_is_tested() -> None:
    assert set(REFUSED) == {
        *(name for name in COMMANDS if name != "evaluate"),
        *(f"evaluate {name}" for name in EVALUATIONS),
    }


@pytest.mark.parametrize("command", REFUSED)
@pytest.mark.parametrize("case", ["help", "unknown option", "wrong value"])
def test_help_and_argument_errors_do_not_import_torch(command: str, case: str) -> None:
    words, status = {
        "help": (["--help"], 0),
        "unknown option": (["--no_such_option", "1"], 2),
        "wrong value": (REFUSED[command], 2),
    }[case]
    done = run(*command.split(), *words)
    assert done.returncode == status, done.stderr
    assert done.stdout.splitlines()[-1].strip() == "loaded:"
    assert ("usage: cribo" in done.stdout) == (case == "help")
    assert done.stderr.startswith(f"cribo {command}: ") == (case != "help")
    assert ("no_such_option" in done.stderr) == (case == "unknown option")
    assert "loading" not in done.stderr


@pytest.mark.parametrize("evaluation", ["dense-nn", "linear", "segmenter"])
def test_unknown_sets_are_reported_without_importing_torch(evaluation: str) -> None:
    done = run("evaluate", evaluation, *UNKNOWN_SET)
    assert done.returncode == 2
    assert done.stdout.splitlines()[-1].strip() == "loaded:"
    assert f"cribo evaluate {evaluation}: " in done.stderr
    assert "unknown segmentation set 'vox'; did you mean 'voc'?" in done.stderr


def imported(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Return the slow packages that a command has imported."""
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1].split()[1:]


def test_a_search_by_entry_imports_neither_torch_nor_matplotlib(tmp_path: Path) -> None:
    pytest.importorskip("lance")
    images = tmp_path / "images"
    images.mkdir()
    for number, colour in enumerate(((200, 40, 40), (210, 50, 50))):
        draw_square(colour, (16, 16 * number)).save(images / f"{number}.png")
    database = ("--db", str(tmp_path / "objects.db"))
    run("index", "--backbone", "mean-colour", "--images", str(images), *database)
    done = run("search", *database, "--image", "0.png", "--object", "0", "--out", str(tmp_path / "found"))
    assert imported(done) == ["lance", "numpy"]
    assert "1.png" in done.stdout
    assert (tmp_path / "found" / "sheet.png").is_file()


def test_a_comparison_does_not_import_torch(tmp_path: Path) -> None:
    words = ("--backbone", "mean-colour", "--data", "scenes", "--draws", "1", "--pictures", "0")
    run("evaluate", "dense-nn", *words, "--out", str(tmp_path / "result"))
    done = run("evaluate", "compare", str(tmp_path / "result"), "--out", str(tmp_path / "compared"))
    assert imported(done) == ["matplotlib", "numpy"]
    assert "mIoU" in done.stdout
    assert (tmp_path / "compared" / "compare.png").is_file()
