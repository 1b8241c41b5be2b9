"""Help and argument errors do not import slow packages; commands that only read results do not import torch."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.explorer.conftest import draw_square

import cribo
from cribo.cli import COMMANDS, main
from cribo.cli.evaluate import EVALUATIONS

_DATA = ["--backbone", "x", "--data", "voc"]
REFUSED = {
    "pretrain": ["--optim.epochs", "x"],
    "adapt": ["x", "--backbone", "x", "--minutes", "0"],
    "distill": ["x", "--teacher", "x", "--backbone", "x", "--steps", "0"],
    "study": ["table5_small", "--part", "3/2"],
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
    "merge": ["x"],
    "search": ["--db", "x", "--image", "x", "--k", "0"],
    "serve": ["--memory", "x", "--backbone", "x", "--batch_size", "0"],
    "explore": [],
    "figures": ["--run", "x", "--only", "x"],
    "export": ["--backbone", "x", "--to", "x"],
    "shard": ["x", "y", "--size", "x"],
    "doctor": ["--jsn"],
}
"""A wrong value, or none where one is needed, of each command."""

SEGMENTATIONS = ("evaluate dense-nn", "evaluate linear", "evaluate segmenter")
UNKNOWN_SET = ["--backbone", "x", "--data", "vox", "--data.root", "x"]

HEAVY = ("torch", "timm", "lightning", "transformers", "sklearn", "gradio", "lance", "matplotlib", "numpy")

PROGRAM = """
import contextlib, io, json, sys
from cribo.cli import main

heavy, *commands = (word.split(" ") for word in sys.argv[1:])
for words in commands:
    before, out, err = {*sys.modules}, io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(words)
        except SystemExit as exit:
            status = exit.code
    loaded = [name for name in heavy if name in sys.modules and name not in before]
    print(json.dumps({"status": status, "out": out.getvalue(), "err": err.getvalue(), "loaded": loaded}))
"""


class Done(NamedTuple):
    """What a command returned, printed and imported."""

    status: int
    out: str
    err: str
    loaded: list[str]


def run(*commands: str) -> dict[str, Done]:
    """Run commands one after another in a new process; a module counts for the first that imports it."""
    program = [sys.executable, "-c", PROGRAM, " ".join(HEAVY), *commands]
    lines = subprocess.run(program, capture_output=True, text=True, timeout=900, check=True).stdout.splitlines()
    return {command: Done(**json.loads(line)) for command, line in zip(commands, lines, strict=True)}


@pytest.fixture(scope="module")
def done() -> dict[str, Done]:
    """Run the help and the errors of all commands."""
    return run(
        *(f"{command} {words}" for command in REFUSED for words in ("--help", "--no_such_option 1")),
        *(" ".join([command, *words]) for command, words in REFUSED.items()),
        *(" ".join([command, *UNKNOWN_SET]) for command in SEGMENTATIONS),
    )


def test_almost_nothing_is_imported_before_ctrl_c_is_handled() -> None:
    program = "import sys; before = {*sys.modules}; import cribo.cli; print(*{*sys.modules} - before)"
    command = [sys.executable, "-S", "-c", program]  # without the packages, so that cribo is found by its path
    environment = {**os.environ, "PYTHONPATH": str(Path(cribo.__file__).parents[1])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    allowed = {"cribo", "cribo.cli", "collections", "collections.abc", "keyword", "operator", "reprlib", "itertools"}
    allowed |= {"os", "os.path", "genericpath", "posixpath", "ntpath", "stat"}
    assert {name for name in done.stdout.split() if not name.startswith("_")} <= allowed


def test_each_command_is_tested() -> None:
    assert set(REFUSED) == {
        *(name for name in COMMANDS if name != "evaluate"),
        *(f"evaluate {name}" for name in EVALUATIONS),
    }


@pytest.mark.parametrize("command", REFUSED)
def test_help_and_argument_errors_do_not_import_torch(command: str, done: dict[str, Done]) -> None:
    shown, unknown = done[f"{command} --help"], done[f"{command} --no_such_option 1"]
    assert (shown.status, shown.loaded) == (0, []), shown.err
    assert "usage: cribo" in shown.out
    assert "--config CONFIG " in shown.out or command == "doctor"
    assert "no_such_option" in unknown.err
    refused = done[" ".join([command, *REFUSED[command]])]
    assert "no_such_option" not in refused.err
    for each in (unknown, refused):
        assert (each.status, each.loaded) == (2, []), each.err
        assert "usage: cribo" not in each.out
        assert each.err.startswith(f"cribo {command}: ")
    assert not [each for each in (shown, unknown, refused) if "loading" in each.err]


@pytest.mark.parametrize("command", SEGMENTATIONS)
def test_unknown_sets_are_reported_without_importing_torch(command: str, done: dict[str, Done]) -> None:
    found = done[" ".join([command, *UNKNOWN_SET])]
    assert (found.status, found.loaded) == (2, [])
    assert found.err.startswith(f"cribo {command}: ")
    assert "did you mean 'voc'?" in found.err


def test_a_search_by_entry_imports_neither_torch_nor_matplotlib(tmp_path: Path) -> None:
    pytest.importorskip("lance")
    images = tmp_path / "images"
    images.mkdir()
    for number, colour in enumerate(((200, 40, 40), (210, 50, 50))):
        draw_square(colour, (16, 16 * number)).save(images / f"{number}.png")
    database = tmp_path / "objects.db"
    assert main(["index", "--backbone", "mean-colour", "--images", str(images), "--db", str(database)]) == 0
    [done] = run(f"search --db {database} --image 0.png --object 0 --out {tmp_path / 'found'}").values()
    assert done.status == 0, done.err
    assert done.loaded == ["lance", "numpy"]
    assert "1.png" in done.out
    assert (tmp_path / "found" / "sheet.png").is_file()


def test_a_comparison_does_not_import_torch(tmp_path: Path) -> None:
    words = ("--backbone", "mean-colour", "--data", "scenes", "--draws", "1", "--pictures", "0", "--limit", "20")
    assert main(["evaluate", "dense-nn", *words, "--ratios", "1", "--out", str(tmp_path / "result")]) == 0
    [done] = run(f"evaluate compare {tmp_path / 'result'} --out {tmp_path / 'compared'}").values()
    assert done.status == 0, done.err
    assert done.loaded == ["matplotlib", "numpy"]
    assert "mIoU" in done.out
    assert (tmp_path / "compared" / "compare.png").is_file()
