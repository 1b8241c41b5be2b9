"""Start-up time of `cribo --help`, and time to the first training step of the quickstart.

    uv run python -m benchmarks.startup

Each command runs in a new process. The first step is complete when its row is in metrics.csv, which includes imports,
synthetic data, the network and the score before training. Imports of torch and of parts of the package are measured
for comparison.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

GOALS = {"cribo --help": 0.5, "first step of the quickstart": 30.0}


def seconds(*command: str) -> float:
    """Measure the seconds of a command."""
    begun = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - begun


def first_step() -> float:
    """Measure the seconds from the start of `cribo pretrain` to the row of the first step."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "cribo.cli", "pretrain", "--runtime.log_every=1", f"--out={folder}"]
        begun = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        metrics = Path(folder) / "quickstart" / "metrics.csv"
        try:
            while not _has_first_step(metrics):
                if process.poll() is not None:
                    raise RuntimeError(f"cribo pretrain ended with status {process.returncode} before its first step")
                time.sleep(0.05)
            return time.perf_counter() - begun
        finally:
            process.kill()
            process.wait()


def _has_first_step(metrics: Path) -> bool:
    rows = metrics.read_text().splitlines()[1:] if metrics.is_file() else []
    return any(not row.startswith("0,") for row in rows)  # step 0 is the score before training


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    python = sys.executable
    calls = {
        "cribo --help": lambda: seconds(python, "-m", "cribo.cli", "--help"),
        "import torch": lambda: seconds(python, "-c", "import torch"),
        "import cribo.method": lambda: seconds(python, "-c", "import cribo.method"),
        "import cribo.pretrain": lambda: seconds(python, "-c", "from cribo.pretraining import pretrain"),
        "cribo pretrain --help": lambda: seconds(python, "-m", "cribo.cli", "pretrain", "--help"),
        "first step of the quickstart": first_step,
    }
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            taken[name].append(call())
    table = Table(title=f"Start-up time, {rounds} processes each")
    for column in ("command", "median", "minimum", "maximum", "target", "relative to import torch"):
        table.add_column(column, justify="left" if column == "command" else "right")
    torch_seconds = statistics.median(taken["import torch"])
    for name, found in taken.items():
        median = statistics.median(found)
        goal = f"{GOALS[name]:g} s" if name in GOALS else ""
        figures = (f"{value:.2f} s" for value in (median, min(found), max(found)))
        table.add_row(name, *figures, goal, f"{median / torch_seconds:.2f}")
    Console(width=None if sys.stdout.isatty() else 120).print(table)


if __name__ == "__main__":
    main()
