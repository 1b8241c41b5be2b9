"""Every example runs as documented in its docstring."""

from pathlib import Path

import pytest
from tests.commands import Commands

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
SCRIPT = """
import runpy
del sys.argv[0]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""
# These write a run with this loss to the given folder.
TRAINING = {
    "own_clip": "next",
    "own_clustering": "cross_image",
    "own_contrast": "contrast",
    "own_mixture": "mixture",
    "own_objective": "similarity",
}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(example: Path, tmp_path: Path, commands: Commands) -> None:
    words = [tmp_path] if example.stem in TRAINING else []
    done = commands.fork_program(SCRIPT, example, *words)
    assert done.wait(900) == 0, done.output[-3000:]
    assert done.output.strip()
    if words:
        header = next(tmp_path.glob("*/metrics.csv")).read_text().splitlines()[0]
        assert f"loss_{TRAINING[example.stem]}" in header
