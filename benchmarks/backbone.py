"""The backbone's part of a training step, relative to the machine's measured peak throughput of matrix products.

    uv run python -m benchmarks.backbone                              # ViT-S/16, on the CPU, some minutes
    uv run python -m benchmarks.backbone --without-compiling          # torch.compile takes minutes on few cores
    uv run python -m benchmarks.backbone --device cuda --name vit_base_patch16_224 --batch 256

The rows are interleaved in one process, so that other load affects all of them; times are medians, "x step" is the
median of the ratios to the first row within rounds, with minimum and maximum. A step consists of the teacher's forward
pass, the student's forward and backward pass with drop path, AdamW and the moving average, without the method and data.
Utilisation is the FLOPs of the network (forward 1, with backward 3, a step 4 times those of one pass;
recomputation does not count) divided by the time and the peak rate of large products of the same precision,
measured before and after the rows. Memory is that of a step without weights, gradients and optimiser state: on
the CPU the growth of the resident set in a new process per row, on a GPU the allocator's value.
"""

import argparse
import copy
import functools
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from benchmarks.measuring import MIB, model_flops, peak_memory, product_ceiling, timed
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from cribo.base.machine import keep_freed_memory
from cribo.models import Backbone, build_backbone
from cribo.models.config import Checkpointing, CompileMode
from cribo.models.linear import Linear

# FLOPs of each measurement, in passes of the network.
PASSES = {"forward": 1, "with backward": 3, "step": 4}


@dataclass(frozen=True)
class Row:
    """A way to run the backbone.

    Attributes:
        dtype: data type of the products.
        plain: use PyTorch's linear layers.
        mode: mode of torch.compile; None disables it.
        checkpointing: activation checkpointing of the blocks.
    """

    dtype: torch.dtype
    plain: bool = False
    mode: CompileMode | None = None
    checkpointing: Checkpointing = "none"


F32, BF16 = torch.float32, torch.bfloat16
CPU_ROWS = {
    "float32, PyTorch's product": Row(F32, plain=True),
    "float32, oneDNN": Row(F32),
    "float32, compiled": Row(F32, mode="default"),
    "bf16": Row(BF16),
    "bf16, compiled": Row(BF16, mode="default"),
    "bf16, selective": Row(BF16, checkpointing="selective"),
    "bf16, blocks": Row(BF16, checkpointing="blocks"),
}
CUDA_ROWS = {
    "bf16": Row(BF16),
    "float32": Row(F32),
    "bf16, compiled": Row(BF16, mode="default"),
    "bf16, reduce-overhead": Row(BF16, mode="reduce-overhead"),
    "bf16, max-autotune": Row(BF16, mode="max-autotune"),
    "bf16, selective": Row(BF16, checkpointing="selective"),
    "bf16, blocks": Row(BF16, checkpointing="blocks"),
    "bf16, compiled, selective": Row(BF16, mode="default", checkpointing="selective"),
    "bf16, compiled, blocks": Row(BF16, mode="default", checkpointing="blocks"),
}


class Pair:
    """Student and teacher, with optimiser and inputs."""

    def __init__(self, row: Row, arguments: argparse.Namespace) -> None:
        self.device = torch.device(arguments.device)
        self.student = self._backbone(row, arguments)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        if row.mode is not None:
            self.student.set_checkpointing(row.checkpointing)
            self.student.compile(row.mode)
            self.teacher.compile(row.mode)
        trained = [parameter for parameter in self.student.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
        generator = torch.Generator().manual_seed(0)
        size = arguments.size
        self.images = torch.randn(arguments.batch, 3, size, size, generator=generator).to(self.device)
        sites = self.student.num_drop_path_sites
        self.noise = torch.rand(arguments.batch, sites, generator=generator).to(self.device) if sites else None

    def _backbone(self, row: Row, arguments: argparse.Namespace) -> Backbone:
        backbone = build_backbone(arguments.name, image_size=arguments.size, drop_path=arguments.drop_path)
        for module in backbone.modules() if row.plain else ():
            if type(module) is Linear:
                object.__setattr__(module, "__class__", nn.Linear)
        return backbone.to(self.device)

    def forward(self) -> None:
        """Run the teacher's forward pass."""
        with torch.no_grad():
            self.teacher(self.images)

    def with_backward(self) -> None:
        """Run the student's forward and backward pass."""
        features = self.student(self.images, drop_path_noise=self.noise)
        loss: Tensor = features.tokens.float().square().mean() + features.global_token.float().square().mean()
        loss.backward()

    def step(self) -> None:
        """Run the backbone's part of a training step."""
        self.optimizer.zero_grad()
        self.forward()
        self.with_backward()
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(  # pyright: ignore[reportPrivateImportUsage]
                list(self.teacher.parameters()), list(self.student.parameters()), 0.004
            )


class Calls:
    """The measured functions of all rows; rows share networks where possible."""

    def __init__(self, rows: dict[str, Row], arguments: argparse.Namespace) -> None:
        self.rows = rows
        self.arguments = arguments
        self._pair = functools.cache(lambda key: Pair(key, arguments))

    def __getitem__(self, place: tuple[str, str]) -> Callable[[], None]:
        name, measurement = place
        row = self.rows[name]
        key = row if row.mode is not None else Row(F32, plain=row.plain)
        pair = self._pair(key)
        run = {"forward": pair.forward, "with backward": pair.with_backward, "step": pair.step}[measurement]

        def call() -> None:
            if row.mode is None:
                pair.student.set_checkpointing(row.checkpointing)
            with torch.autocast(pair.device.type, BF16, enabled=row.dtype == BF16):
                run()

        return call


def measure(calls: Calls, rounds: int, device: str) -> dict[tuple[str, str], list[float]]:
    """Measure the seconds of every row and measurement in every round, with interleaved rows."""
    seconds: dict[tuple[str, str], list[float]] = {}
    for measurement in PASSES:
        for name in calls.rows:  # compilation, selection of kernels, and graph capture
            for _ in range(3):
                calls[name, measurement]()
        for _ in range(rounds):
            for name in calls.rows:
                seconds.setdefault((name, measurement), []).append(timed(calls[name, measurement], device))
    return seconds


def memory(name: str, calls: Calls) -> int | None:
    """Measure the memory in bytes of a row's step, without weights, gradients and optimiser state."""
    arguments = calls.arguments
    if not arguments.device.startswith("cuda"):
        if not sys.platform.startswith("linux"):
            return None
        command = [sys.executable, "-m", "benchmarks.backbone", *sys.argv[1:], "--memory-of", name]
        return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return peak_memory(calls[name, "step"], arguments.device)


def memory_here(name: str, calls: Calls) -> int:
    """Measure `memory` of a row in this process, after a step that allocates the persistent state."""
    calls[name, "step"]()
    return peak_memory(calls[name, "step"], calls.arguments.device)


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--name", default="vit_small_patch16_224", help="timm name of the network")
    parser.add_argument("--size", type=int, default=224, help="size of the views in pixels")
    parser.add_argument("--batch", type=int, default=16, help="number of views per step")
    parser.add_argument("--drop-path", type=float, default=0.1)
    parser.add_argument("--rounds", type=int, default=5, help="number of measurements of each row")
    parser.add_argument("--without-compiling", action="store_true", help="skip compiled rows")
    # Not --only: torch.compile writes command-line arguments after it into generated code without quoting.
    parser.add_argument("--rows", nargs="+", help="rows to measure")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    device = arguments.device
    rows = CUDA_ROWS if device.startswith("cuda") else CPU_ROWS
    if arguments.rows:
        rows = {name: rows[name] for name in arguments.rows}
    if arguments.without_compiling or (device == "cpu" and shutil.which("g++") is None):
        rows = {name: row for name, row in rows.items() if row.mode is None}
    calls = Calls(rows, arguments)
    if arguments.memory_of:
        print(json.dumps(memory_here(arguments.memory_of, calls)))
        return

    if device == "cpu":
        keep_freed_memory()  # as in training
    flops = arguments.batch * model_flops(build_backbone(arguments.name, image_size=arguments.size), arguments.size)
    ceilings = {dtype: product_ceiling(device, dtype) for dtype in {row.dtype for row in rows.values()}}
    seconds = measure(calls, arguments.rounds, device)
    ceilings = {dtype: max(rate, product_ceiling(device, dtype)) for dtype, rate in ceilings.items()}

    where = torch.cuda.get_device_name() if device.startswith("cuda") else f"CPU, {torch.get_num_threads()} threads"
    rates = ", ".join(f"{str(dtype).removeprefix('torch.')} {rate / 1e12:.3g}" for dtype, rate in ceilings.items())
    what = f"{arguments.name}, {arguments.batch} views of {arguments.size}, {flops / 1e9:.0f} GFLOPs a pass"
    table = Table(title=f"{what}; {where}, PyTorch {torch.__version__}; ceilings in TFLOP/s: {rates}")
    for column in ("row", *PASSES, "x step", "utilisation, forward", "with backward", "step", "memory of a step"):
        table.add_column(column, justify="left" if column == "row" else "right")
    first = next(iter(rows))
    for name, row in rows.items():
        medians = {measurement: statistics.median(seconds[name, measurement]) for measurement in PASSES}
        ratios = [slow / own for slow, own in zip(seconds[first, "step"], seconds[name, "step"], strict=True)]
        size = memory(name, calls)
        table.add_row(
            name,
            *(f"{1000 * value:.0f} ms" for value in medians.values()),
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})",
            *(f"{PASSES[key] * flops / value / ceilings[row.dtype]:.0%}" for key, value in medians.items()),
            "?" if size is None else f"{size / MIB:.0f} MiB",
        )
    Console(width=None if sys.stdout.isatty() else 160).print(table)


if __name__ == "__main__":
    main()
