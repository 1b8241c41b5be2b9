"""Scaling of a training step with batch, kept objects, bank, patches and processes, compared with the expected law.

    uv run python -m benchmarks.growth                  # on the CPU, about ten minutes on two idle cores
    uv run python -m benchmarks.growth --device cuda

Every point is a profile (`cribo profile`) in a separate process, so that its memory can be measured. The expected law
is fitted to each curve (non-negative least squares); the table shows the largest relative deviation of a point, the
figure shows both. Processes share the cores or the GPU of this machine, with the same total batch.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from scipy.optimize import nnls

from cribo.base.drawing import house_style, write_figure
from cribo.base.files import write_json

Law = Callable[[np.ndarray], list[np.ndarray]]


def constant(x: np.ndarray) -> list[np.ndarray]:
    return [np.ones_like(x)]


def linear(x: np.ndarray) -> list[np.ndarray]:
    return [np.ones_like(x), x]


def quadratic(x: np.ndarray) -> list[np.ndarray]:
    return [np.ones_like(x), x, x**2]


@dataclass(frozen=True)
class Curve:
    """A varied quantity, its values, and the expected laws of time and memory.

    Attributes:
        name: label of the axis.
        values: values of the quantity.
        options: command-line options for a value.
        time, memory: the laws.
        formula: the laws as text.
    """

    name: str
    values: tuple[int, ...]
    options: Callable[[int], dict[str, Any]]
    time: Law
    memory: Law
    formula: str


@dataclass(frozen=True)
class Point:
    """Time in seconds and memory in bytes of one measurement."""

    step: float
    objects: float
    memory: float


def base(device: str) -> dict[str, Any]:
    """Return the options that are common to all curves."""
    small = device == "cpu"
    side, batch = (96, 16) if small else (224, 128)
    return {
        "config": "coco_vits16",
        "data.root": "scenes",
        "data.scenes.count": 512,
        "data.scenes.size": side,
        "data.workers": 1 if small else 15,
        "views.size": side,
        "backbone.name": "vit_tiny_patch16_224" if small else "vit_small_patch16_224",
        "backbone.args": json.dumps({"patch_size": 8}) if small else "{}",
        "objects.num_objects": 32,
        "objects.bank_images": 5_000 if small else 25_000,
        "objects.group_size": 8 if small else 32,
        "optim.batch_size": batch,
        "head.prototypes": 4_096 if small else 65_536,
        "runtime.precision": "32-true" if small else "bf16-mixed",
        "runtime.accelerator": "cpu" if small else "gpu",
        "kept": 8,
        "steps": 3,
    }


def curves(device: str) -> tuple[Curve, ...]:
    small = device == "cpu"
    batches = (8, 16, 32, 64) if small else (32, 64, 128, 256)
    sides = (48, 96, 128, 160) if small else (128, 160, 224, 288)
    patch = 8 if small else 16
    banks = (1_000, 5_000, 10_000, 20_000) if small else (5_000, 10_000, 25_000, 50_000)
    return (
        Curve("images, B", batches, lambda b: {"optim.batch_size": b}, linear, linear, "B"),
        Curve("kept objects an image, n", (4, 8, 16, 32), lambda n: {"kept": n}, quadratic, linear, "n + n², n"),
        Curve("images in the bank, S", banks, lambda s: {"objects.bank_images": s}, linear, linear, "S"),
        Curve(
            "patches a view, N",
            tuple((side // patch) ** 2 for side in sides),
            lambda n: {"views.size": patch * round(n**0.5), "data.scenes.size": patch * round(n**0.5)},
            quadratic,
            quadratic,
            "N + N²",
        ),
    )


def read_points(path: Path, device: str) -> dict[tuple[str, tuple[int, ...]], list[Point]]:
    """Read the previous measurements on this device, by curve and its values."""
    written = json.loads(path.read_text()) if path.is_file() else {"device": device, "curves": []}
    if written["device"] != device:
        return {}
    return {
        (curve["name"], tuple(curve["values"])): [Point(**point) for point in curve["points"]]
        for curve in written["curves"]
    }


def write_points(path: Path, device: str, found: list[tuple[Curve, list[Point]]]) -> None:
    measured = [
        {"name": curve.name, "values": curve.values, "points": [asdict(point) for point in points]}
        for curve, points in found
    ]
    write_json(path, {"device": device, "curves": measured})


def words(options: dict[str, Any]) -> list[str]:
    return [f"--{name}={value}" for name, value in options.items()]


def measure(options: dict[str, Any]) -> Point:
    """Run a profile in a separate process."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "cribo", "profile", *words(options), f"--out={folder}"]
        subprocess.run(command, check=True, capture_output=True)
        (found,) = Path(folder).glob("*/profile.json")
        step = json.loads(found.read_text())["steps"][0]
    return Point(step["step"], step["object_share"] * step["step"], step["peak"])


def measure_processes(options: dict[str, Any], processes: int, images: int) -> Point:
    """Run a short training on several processes; return seconds per step, and memory of rank 0 and its worker."""
    shared = {name: value for name, value in options.items() if name not in ("kept", "steps")}
    shared |= {
        "optim.epochs": 2,
        "data.scenes.count": images,
        "runtime.devices": processes,
        "runtime.log_every": 1,
        "optim.warmup_epochs": 1,
        "losses.cross_image_from_epoch": 0,
    }
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "cribo", "pretrain", *words(shared), f"--out={folder}", "--name=run"]
        subprocess.run(command, check=True, capture_output=True)
        rows = (Path(folder) / "run" / "metrics.csv").read_text().splitlines()
        summary = json.loads((Path(folder) / "run" / "summary.json").read_text())
    place = rows[0].split(",").index("images_per_second")
    rates = [float(row.split(",")[place]) for row in rows[len(rows) // 2 :] if row.split(",")[place]]
    return Point(options["optim.batch_size"] / float(np.median(rates)), 0.0, summary["peak_rss_bytes"])


def fit(law: Law, values: np.ndarray, measured: np.ndarray) -> tuple[Callable[[np.ndarray], np.ndarray], float]:
    """Fit a law; return it and the largest relative deviation."""
    terms = np.stack(law(values), axis=1)
    # Minimise relative errors, so that small and large values have equal weight.
    coefficients, _ = nnls(terms / measured[:, None], np.ones_like(measured))

    def fitted(x: np.ndarray) -> np.ndarray:
        return np.stack(law(x), axis=1) @ coefficients

    return fitted, float(np.abs(fitted(values) / measured - 1).max())


def main() -> None:
    """Measure all curves, print the table and draw the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--processes",
        type=int,
        nargs="*",
        default=None,
        help="numbers of processes; by default 1 2 on a CPU, none on a GPU",
    )
    parser.add_argument(
        "--out", type=Path, help="path of the figure; by default growth.png or growth-cuda.png in this folder"
    )
    parser.add_argument(
        "--only",
        nargs="*",
        help="letters of the curves to measure, such as B S; the others are reused from the previous run",
    )
    arguments = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 150)
    start = base(arguments.device)
    found: list[tuple[Curve, list[Point]]] = []
    out = arguments.out or Path(__file__).parent / ("growth.png" if arguments.device == "cpu" else "growth-cuda.png")
    known = read_points(out.with_suffix(".json"), arguments.device)

    def points_of(curve: Curve, take: Callable[[int], Point]) -> list[Point]:
        """Measure a curve, or return the previous measurements."""
        if arguments.only and curve.name.split()[-1] not in arguments.only and (curve.name, curve.values) in known:
            return known[curve.name, curve.values]
        console.print(f"{curve.name}: {', '.join(map(str, curve.values))}", highlight=False)
        return [take(value) for value in curve.values]

    for curve in curves(arguments.device):
        options = curve.options
        found.append((curve, points_of(curve, lambda value, options=options: measure(start | options(value)))))
    processes = arguments.processes
    if processes is None:
        processes = [1, 2] if arguments.device == "cpu" else []
    if processes:
        batch = {"optim.batch_size": 8 * max(processes)}
        curve = Curve("processes, P", tuple(processes), lambda _: {}, constant, constant, "1, 1 (shared cores)")
        found.append((curve, points_of(curve, lambda count: measure_processes(start | batch, count, 128))))
    write_points(out.with_suffix(".json"), arguments.device, found)

    table = Table(title=f"Scaling of a step, {arguments.device}")
    for column in (
        "of",
        "law (time, memory)",
        "values",
        "step, ms",
        "deviation",
        "objects, ms",
        "peak, MiB",
        "deviation",
    ):
        table.add_column(column)
    for curve, points in found:
        values = np.array(curve.values, dtype=float)
        times, peaks = (np.array([getattr(p, name) for p in points]) for name in ("step", "memory"))
        table.add_row(
            curve.name,
            curve.formula,
            " ".join(f"{value:,}" for value in curve.values),
            " ".join(f"{1000 * t:.0f}" for t in times),
            f"{fit(curve.time, values, times)[1]:.0%}",
            " ".join(f"{1000 * p.objects:.1f}" for p in points) if points[0].objects else "",
            " ".join(f"{p.memory / 2**20:,.0f}" for p in points),
            f"{fit(curve.memory, values, peaks)[1]:.0%}",
        )
    console.print(table)
    console.print(f"  {draw(found, out, start)}", highlight=False)


def draw(found: list[tuple[Curve, list[Point]]], path: Path, start: dict[str, Any]) -> Path:
    with house_style():
        figure = Figure(figsize=(2.6 * len(found), 4.8), layout="constrained")
        axes = figure.subplots(2, len(found), squeeze=False)
        for column, (curve, points) in enumerate(found):
            values = np.array(curve.values, dtype=float)
            fine = np.linspace(values.min(), values.max(), 100)
            for row, (name, law, unit, scale) in enumerate(
                (("step", curve.time, "ms", 1e3), ("memory", curve.memory, "MiB", 2**-20))
            ):
                measured = np.array([getattr(point, name) for point in points])
                axis = axes[row, column]
                axis.plot(fine, scale * fit(law, values, measured)[0](fine), color="0.6", label="law")
                axis.plot(values, scale * measured, "o", color="C0", label="step" if row == 0 else "peak")
                if row == 0 and points[0].objects:
                    axis.plot(values, scale * np.array([p.objects for p in points]), "s", color="C1", label="objects")
                axis.set_ylim(0, 1.1 * scale * measured.max())
                axis.set_xlim(left=0)
                axis.set_ylabel(f"{'step' if row == 0 else 'peak memory'}, {unit}" if column == 0 else "")
                axis.set_xlabel(curve.name if row else f"law: {curve.formula}")
        axes[0, 0].legend(frameon=False)
        network = f"{start['backbone.name']} at {start['views.size']} px, {start['runtime.precision']}"
        sizes = f"B = {start['optim.batch_size']}, n = {start['kept']}, S = {start['objects.bank_images']:,}"
        figure.suptitle(f"{network}, {start['runtime.accelerator']}; unless varied, {sizes}", fontsize=9)
    return write_figure(path, figure)


if __name__ == "__main__":
    main()
