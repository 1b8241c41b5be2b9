"""Start-up cost of commands, relative to `import torch`.

    uv run python -m benchmarks.startup

Each command runs in a new process; the rounds of all commands are interleaved. The cost is the processor time of the
process, which depends less on other work on the machine than time by the clock. `search by entry` finds the objects
nearest to one of an indexed image. `embed` and `segment` read one image of 480 x 360 pixels, with a small network,
tf_efficientnet_lite0. The first step of the quickstart is complete when its row is in metrics.csv, after imports,
synthetic data, the network and the first score; without the score, it is the same command with --score.root null.
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

GOALS = {
    "search by entry": 0.5,
    "embed": 1.8,
    "segment from a memory": 2.0,
    "first step of the quickstart": 2.5,
    **{f"{name} --help": 0.3 for name in COMMANDS},
}
"""Relative to `import torch`."""

CRIBO = (sys.executable, "-m", "cribo")
SCENES = Scenes(12, size=224)
NETWORK = ("--backbone", "tf_efficientnet_lite0", "--pretrained", "false")


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
    """Write the images that the commands read: scenes, two labelled examples, and an image of 480 x 360 pixels."""
    (folder / "one").mkdir()
    Image.fromarray(SCENES.load(2).permute(1, 2, 0).numpy()).resize((480, 360)).save(folder / "one" / "0.jpg")
    for number in range(len(SCENES)):
        part = folder / ("examples" if number < 2 else "images")
        part.mkdir(exist_ok=True)
        Image.fromarray(SCENES.load(number).permute(1, 2, 0).numpy()).save(part / f"{number}.jpg")
        if number < 2:
            Image.fromarray(SCENES.labels(number).numpy()).save(part / f"{number}.png")


def first_step(*options: str) -> float:
    """Measure the processor seconds of `cribo pretrain` until the row of its first step."""
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "quickstart" / "metrics.csv"

        def is_done() -> bool:
            rows = metrics.read_text().splitlines()[1:] if metrics.is_file() else []
            return any(not row.startswith("0,") for row in rows)  # step 0 is the score before training

        return cost(*CRIBO, "pretrain", "--runtime.log_every=1", f"--out={folder}", *options, until=is_done)


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_images(folder)
        index = ("index", "--backbone", "mean-colour", "--images", f"{folder}/images", "--db", f"{folder}/objects.db")
        cost(*CRIBO, *index)
        memory = f"{folder}/memory.safetensors"
        images = ("--images", f"{folder}/one", *NETWORK)
        cost(*CRIBO, "segment", *images, "--examples", f"{folder}/examples", "--memory", memory, f"--out={folder}/made")
        search = ("search", "--db", f"{folder}/objects.db", "--image", "2.jpg", "--object", "0")
        out = iter(range(sys.maxsize))
        calls: dict[str, Callable[[], float]] = {
            "import torch": lambda: cost(sys.executable, "-c", "import torch"),
            "import timm": lambda: cost(sys.executable, "-c", "import timm"),
            **{f"{name} --help": lambda name=name: cost(*CRIBO, name, "--help") for name in COMMANDS},
            "search by entry": lambda: cost(*CRIBO, *search, "--out", f"{folder}/found-{next(out)}"),
            "embed": lambda: cost(*CRIBO, "embed", *images, f"--out={folder}/embedded-{next(out)}"),
            "segment from a memory": lambda: cost(
                *CRIBO, "segment", *images, "--memory", memory, f"--out={folder}/labelled-{next(out)}"
            ),
            "first step of the quickstart": first_step,
            "the same without a score": lambda: first_step("--score.root=null"),
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
