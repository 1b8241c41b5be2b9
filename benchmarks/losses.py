"""The prototype loss against the four matrix products that it needs, and the object level against its plain sum.

    uv run python -m benchmarks.losses                  # on the CPU, about three minutes on two idle cores
    uv run python -m benchmarks.losses --device cuda

Versions take turns in one process, so that a busy machine slows all; times are medians, and a ratio is the median of
the rounds' own ratios, beside the least and the largest. The bare products are those of the same blocks of rows by the
fastest library at hand: logits of teacher and student, gradients of embeddings and prototypes, and nothing between
them. Memory is what forward and backward need beyond their inputs, the gradients included: on the CPU the growth of the
resident set in a fresh process, on a GPU the allocator's own figure.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from benchmarks import literal
from benchmarks.measuring import MIB, peak_memory, timed
from rich.console import Console
from rich.table import Table
from torch import Tensor

from cribo.method import (
    PrototypeLayer,
    SelfDistillation,
    cross_image_targets,
    cross_view_targets,
    prototype_loss,
    prototype_losses,
)
from cribo.method.losses import BLOCK_LOGITS, add_product
from cribo.method.products import product

PROTOTYPES, DIM = 65_536, 256
GROUPS = 4
VALID = 0.3  # share of the objects that have a neighbour

Versions = dict[str, Callable[[], object]]


@dataclass(frozen=True)
class Level:
    """Inputs of a level: embeddings, prototypes and a centre."""

    student: Tensor
    teacher: Tensor
    student_prototypes: Tensor
    teacher_prototypes: Tensor
    centre: Tensor

    @staticmethod
    def of(rows: int, device: str) -> "Level":
        """Random directions; the centre is not zero."""

        def unit(count: int) -> Tensor:
            return F.normalize(torch.randn(count, DIM, generator=generator), dim=-1).to(device)

        generator = torch.Generator().manual_seed(0)
        student, prototypes = unit(rows).requires_grad_(), unit(PROTOTYPES).requires_grad_()
        return Level(student, unit(rows), prototypes, unit(PROTOTYPES), torch.zeros(PROTOTYPES, device=device))

    @property
    def distillation(self) -> SelfDistillation:
        """At the usual temperatures."""
        return SelfDistillation(self.student_prototypes, self.teacher_prototypes, self.centre, 0.1, 0.04)

    def gradients(self, loss: Tensor) -> tuple[Tensor, ...]:
        """The loss and what it gives to embeddings and prototypes."""
        return loss.detach(), *torch.autograd.grad(loss, (self.student, self.student_prototypes))

    def literal(self, student: Tensor, teacher: Tensor) -> Tensor:
        """The plain formula."""
        return literal.prototype_loss(
            student, teacher, self.student_prototypes, self.teacher_prototypes, self.centre, 0.1, 0.04
        )


def loss(rows: int, device: str) -> Versions:
    """One loss of R rows, forward and backward."""
    level = Level.of(rows, device)
    block = BLOCK_LOGITS[level.student.device.type] // PROTOTYPES

    @torch.no_grad()
    def bare() -> None:
        gradient = torch.zeros_like(level.student_prototypes)
        for student, teacher in zip(level.student.split(block), level.teacher.split(block), strict=True):
            product(teacher, level.teacher_prototypes)
            logits = product(student, level.student_prototypes)
            product(logits, level.student_prototypes.T)
            add_product(gradient, logits, student)

    @torch.no_grad()
    def bare_whole() -> None:
        torch.mm(level.teacher, level.teacher_prototypes.T)
        logits = torch.mm(level.student, level.student_prototypes.T)
        torch.mm(logits, level.student_prototypes)
        torch.mm(logits.T, level.student)

    return {
        "ours": lambda: level.gradients(prototype_loss(level.student, level.teacher, level.distillation)),
        "bare products": bare,
        "bare products, PyTorch": bare_whole,
        "plain": lambda: level.gradients(level.literal(level.student, level.teacher)),
    }


def object_level(rows: int, device: str) -> Versions:
    """L_cv^o and L_ci^o of R rows, both views together, in four groups: one call, or the literal sum over groups."""
    level = Level.of(rows, device)
    generator = torch.Generator().manual_seed(1)
    valid = torch.rand(2, rows // 2, generator=generator) < VALID
    group_rows = [rows // 2 // GROUPS] * GROUPS
    neighbours = level.teacher.flip(0).split([int(valid[0].sum()), rows - int(valid[0].sum())])
    neighbours = (neighbours[0], neighbours[1][: int(valid[1].sum())])
    teacher = level.teacher.unflatten(0, (2, -1))

    def ours() -> tuple[Tensor, ...]:
        targets = [cross_view_targets(teacher, group_rows), cross_image_targets(neighbours, valid, group_rows)]
        return level.gradients(prototype_losses(level.student, targets, level.distillation).sum())

    def plain() -> tuple[Tensor, ...]:
        views = level.student.unflatten(0, (2, -1))
        total = torch.zeros((), device=device)
        parts = [neighbours[view].split([int(part.sum()) for part in valid[view].split(group_rows)]) for view in (0, 1)]
        for group in range(GROUPS):
            own = slice(group * group_rows[0], (group + 1) * group_rows[0])
            for view in (0, 1):
                student = views[1 - view, own]
                total = total + level.literal(student, teacher[view, own])
                total = total + level.literal(student[valid[view, own].to(device)], parts[view][group])
        return level.gradients(total / 2 / GROUPS)

    return {"ours": ours, "plain": plain}


def prototypes(_: int, device: str) -> Versions:
    """The weight of a last layer from directions and gains, forward and backward."""
    layer, gradient = PrototypeLayer(DIM, PROTOTYPES).to(device), torch.randn(PROTOTYPES, DIM).to(device)

    def through(weight: Tensor) -> tuple[Tensor, ...]:
        return weight.detach(), *torch.autograd.grad(weight, (layer.direction, layer.gain), gradient)

    return {
        "ours": lambda: through(layer.weight),
        "plain": lambda: through(layer.gain * F.normalize(layer.direction, dim=-1)),
    }


CASES: dict[str, tuple[Callable[[int, str], Versions], tuple[int, ...]]] = {
    "one loss": (loss, (512, 2048)),
    "object level": (object_level, (512, 2048)),
    "prototypes": (prototypes, (PROTOTYPES,)),
}
SCALING = (256, 512, 1024, 2048, 4096)


def agreement(versions: Versions) -> str:
    """The largest relative difference between ours and the plain version, over loss and gradients."""
    ours, plain = versions["ours"](), versions["plain"]()
    assert isinstance(ours, tuple)
    assert isinstance(plain, tuple)
    return f"{max(float((a - b).norm() / b.norm()) for a, b in zip(ours, plain, strict=True)):.0e}"


def measured(versions: Versions, device: str, rounds: int) -> dict[str, tuple[float, str]]:
    """Median seconds of each version, and the ratio of ours to it."""
    for call in versions.values():
        call()
    found = [{name: timed(call, device) for name, call in versions.items()} for _ in range(rounds)]
    table = {}
    for name in versions:
        ratios = [turn["ours"] / turn[name] for turn in found]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        table[name] = statistics.median(turn[name] for turn in found), "" if name == "ours" else spread
    return table


def memory(case: str, rows: int, version: str, device: str) -> int | None:
    """Bytes beyond the inputs; on the CPU in a process of its own, and None where the system does not tell."""
    if device.startswith("cuda"):
        return peak_memory(CASES[case][0](rows, device)[version], device)
    if not sys.platform.startswith("linux"):
        return None
    command = [sys.executable, "-m", "benchmarks.losses", "--device", device]
    done = subprocess.run(
        [*command, "--memory-of", case, str(rows), version], check=True, capture_output=True, text=True
    )
    return json.loads(done.stdout)


def _mib(size: int | None) -> str:
    return "?" if size is None else f"{size / MIB:.0f} MiB"


def times_table(title: str, cases: list[str], device: str, rounds: int) -> Table:
    """A row for each version of each case."""
    table = Table(title=title)
    for column in ("part", "rows", "version", "time", "ours / it", "memory", "ours agrees to"):
        table.add_column(column, justify="left" if column in ("part", "version") else "right")
    for case in cases:
        make, sizes = CASES[case]
        for rows in sizes:
            versions = make(rows, device)
            agrees = agreement(versions)
            for name, (seconds, ratio) in measured(versions, device, rounds).items():
                size = _mib(memory(case, rows, name, device))
                found = agrees if name == "plain" else ""
                table.add_row(case, f"{rows:,}", name, f"{1000 * seconds:.0f} ms", ratio, size, found)
    return table


def memory_table(device: str) -> Table:
    """What a loss needs, against the number of its rows."""
    table = Table(title="Memory of one loss, forward and backward, gradients included")
    for column in ("rows", "ours", "plain"):
        table.add_column(column, justify="right")
    for rows in SCALING:
        table.add_row(f"{rows:,}", *(_mib(memory("one loss", rows, version, device)) for version in ("ours", "plain")))
    return table


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=5, help="how often each version is timed")
    parser.add_argument("--only", choices=(*CASES, "memory"), help="one of the parts")
    parser.add_argument("--memory-of", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    device = arguments.device
    if arguments.memory_of:
        case, rows, version = arguments.memory_of
        print(json.dumps(peak_memory(CASES[case][0](int(rows), device)[version], device)))
        return
    console = Console(width=None if sys.stdout.isatty() else 140)
    where = torch.cuda.get_device_name() if device.startswith("cuda") else f"CPU, {torch.get_num_threads()} threads"
    title = f"L = {PROTOTYPES:,}, E = {DIM}, float32, {where}, PyTorch {torch.__version__}"
    cases = [case for case in CASES if arguments.only in (None, case)]
    if cases:
        console.print(times_table(title, cases, device, arguments.rounds))
    if arguments.only in (None, "memory"):
        console.print(memory_table(device))


if __name__ == "__main__":
    main()
