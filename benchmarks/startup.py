"""Start-up cost of commands, relative to `import torch`.

    uv run python -m benchmarks.startup --backbone ../shared/weights/vits14_dinov2_descendant.safetensors

Each command runs in a new process; the rounds of all commands are interleaved. The cost is the processor time of the
process, which depends less on other work on the machine than time by the clock. `search by entry` finds the objects
nearest to one of an indexed image; `segment` is ended when its first label map is written; the first step of the
quickstart is complete when its row is in metrics.csv, after imports, synthetic data, the network and the first score.
"""

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from PIL import Image
from rich.console import Console
from rich.table import Table

from cribo.cli import COMMANDS
from cribo.data.scenes import Scenes

GOALS = {"search by entry": 0.5, "segment, first image": 2.0, **{f"{name} --help": 0.3 for name in COMMANDS}}
"""Relative to `import torch`."""

CRIBO = (sys.executable, "-m", "cribo")
SCENES = Scenes(12, size=224)


def cost(*command: str, until: Callable[[], bool] | None = None) -> float:
    """Measure the processor seconds of a command, which is ended as soon as `until` holds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    if until is not None:
        while not until() and process.poll() is None:
            time.sleep(0.02)
        process.kill()
    if process.wait() and until is None:
        raise RuntimeError(f"{' '.join(command)} ended with status {process.returncode}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def write_images(folder: Path) -> None:
    """Write scenes, and two of them with labels as examples."""
    for number in range(len(SCENES)):
        part = folder / ("examples" if number < 2 else "images")
        part.mkdir(exist_ok=True)
        Image.fromarray(SCENES.load(number).permute(1, 2, 0).numpy()).save(part / f"{number}.jpg")
        if number < 2:
            Image.fromarray(SCENES.labels(number).numpy()).save(part / f"{number}.png")


def first_step() -> float:
    """Measure the processor seconds of `cribo pretrain` until the row of its first step."""
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "quickstart" / "metrics.csv"

        def is_done() -> bool:
            rows = metrics.read_text().splitlines()[1:] if metrics.is_file() else []
            return any(not row.startswith("0,") for row in rows)  # step 0 is the score before training

        return cost(*CRIBO, "pretrain", "--runtime.log_every=1", f"--out={folder}", until=is_done)


def first_image(folder: Path, backbone: str) -> float:
    """Measure the processor seconds of `cribo segment` until its first label map."""
    with tempfile.TemporaryDirectory() as out:
        words = ("--backbone", backbone, "--examples", f"{folder}/examples", "--images", f"{folder}/images")
        labels = Path(out) / "segmented" / "labels"
        return cost(*CRIBO, "segment", *words, "--out", f"{out}/segmented", until=lambda: any(labels.glob("*.png")))


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--backbone", default="mean-colour", help="backbone of segment")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_images(folder)
        index = ("index", "--backbone", "mean-colour", "--images", f"{folder}/images", "--db", f"{folder}/objects.db")
        cost(*CRIBO, *index)
        search = ("search", "--db", f"{folder}/objects.db", "--image", "2.jpg", "--object", "0")
        out = iter(range(sys.maxsize))
        calls: dict[str, Callable[[], float]] = {
            "import torch": lambda: cost(sys.executable, "-c", "import torch"),
            "import timm": lambda: cost(sys.executable, "-c", "import timm"),
            **{f"{name} --help": lambda name=name: cost(*CRIBO, name, "--help") for name in COMMANDS},
            "search by entry": lambda: cost(*CRIBO, *search, "--out", f"{folder}/found-{next(out)}"),
            "segment, first image": lambda: first_image(folder, arguments.backbone),
            "first step of the quickstart": first_step,
        }
        taken: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(arguments.rounds):
            for name, call in calls.items():
                taken[name].append(call())
    table = Table(title=f"Processor seconds of {arguments.rounds} processes each")
    for column in ("command", "median", "minimum", "maximum", "relative to import torch", "goal"):
        table.add_column(column, justify="left" if column == "command" else "right")
    for name, found in taken.items():
        ratios = [value / torch for value, torch in zip(found, taken["import torch"], strict=True)]
        figures = (f"{value:.2f} s" for value in (statistics.median(found), min(found), max(found)))
        table.add_row(name, *figures, f"{statistics.median(ratios):.2f}", f"{GOALS[name]:g}" if name in GOALS else "")
    Console(width=None if sys.stdout.isatty() else 120).print(table)


if __name__ == "__main__":
    main()
