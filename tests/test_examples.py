"""Every example runs as documented in its docstring."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
TRAINING = ("own_clustering", "own_objective")  # these write a run to the given folder


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(example: Path, tmp_path: Path) -> None:
    words = [str(tmp_path)] if example.stem in TRAINING else []
    done = subprocess.run(
        [sys.executable, str(example), *words],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip()
    if words:
        header = next(tmp_path.glob("*/metrics.csv")).read_text().splitlines()[0]
        assert {"own_clustering": "loss_cross_image", "own_objective": "loss_similarity"}[example.stem] in header
