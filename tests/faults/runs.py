"""Compare the results of runs."""

import csv
from pathlib import Path
from typing import Any

import torch

from cribo.training.checkpoints import checkpoint_files

CLOCK = ("seconds", "images_per_second")


def rows_of(run: Path) -> list[dict[str, str]]:
    with (run / "metrics.csv").open(newline="") as file:
        return [{name: value for name, value in row.items() if name not in CLOCK} for row in csv.DictReader(file)]


def last_row(run: Path) -> int:
    """Return the last step in metrics.csv, 0 if there is none; the last row may be incomplete."""
    path = run / "metrics.csv"
    rows = path.read_text().splitlines(keepends=True)[1:] if path.is_file() else []
    return max((int(row.partition(",")[0]) for row in rows if row.endswith("\n")), default=0)


def files_of(run: Path) -> set[str]:
    """Return the files of a run, except figures and TensorBoard logs, of which each start writes one."""
    return {
        str(path.relative_to(run))
        for path in run.rglob("*")
        if path.is_file() and not path.name.startswith("events.") and path.suffix != ".png"
    }


def assert_identical(found: Any, expected: Any, where: str = "checkpoint") -> None:
    """Assert bitwise equality, within dictionaries and lists."""
    assert type(found) is type(expected), where
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype, where
        assert torch.equal(found, expected), where
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for name, value in expected.items():
            assert_identical(found[name], value, f"{where}.{name}")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), where
        for place, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert_identical(a, b, f"{where}.{place}")
    else:
        assert found == expected, where


def assert_same_run(run: Path, whole: Path) -> None:
    """Assert bitwise equality of exported backbone, metrics.csv without times, and checkpoints."""
    assert rows_of(run) == rows_of(whole)
    assert files_of(run) == files_of(whole)
    assert (run / "backbone.safetensors").read_bytes() == (whole / "backbone.safetensors").read_bytes()
    for path, expected in zip(checkpoint_files(run), checkpoint_files(whole), strict=True):
        assert path.name == expected.name
        assert_identical(_content(path), _content(expected))


def _content(path: Path) -> dict[str, Any]:
    content = torch.load(path, weights_only=True)
    del content["loops"]  # Lightning counts how often an epoch was started
    return content
