"""`cribo doctor`: examine the machine and the installation."""

import json
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cribo.base.console import Phases, importing, no_progress

if TYPE_CHECKING:
    from cribo.cli.doctor.findings import Section
    from cribo.cli.doctor.speed import Speed

HELP = """\
Show what cribo finds on this machine, and how fast it is: for your own planning, and to send with a bug report.

  cribo doctor
  cribo doctor --no_speed                    without the speed test
  cribo doctor --device cpu                  speed of the CPU on a machine with a GPU
  cribo doctor --no_speed --json             the same facts as JSON

The command prints versions, devices, instructions of the processor, cores, memory, disk space, environment variables
(no tokens) and optional packages. A speed test of about half a minute on two idle cores estimates the durations of
pretrain, adapt and segment. Problems are listed at the end, with what to do. Nothing is written.
"""

LESS_MEMORY = "use --no_speed"

_WIDTH = 80


def run(words: list[str], console: Console) -> None:
    """Run the command."""
    from cribo.base.arguments import Parser

    parser = Parser(prog="cribo doctor", description=HELP, usage="cribo doctor [options]")
    parser.add_argument("--no_speed", action="store_true", help="omit the speed test")
    parser.add_argument(
        "--device",
        type=Literal["cpu", "cuda"] | None,
        help="device of the speed test; by default the first GPU, else the CPU. For another GPU, set "
        "CUDA_VISIBLE_DEVICES",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parsed = parser.parse_args(words)
    if parsed.device is not None:
        _require_device(parsed.device, console)
    sections = []
    for section in _examine(console):
        sections.append(section)
        if not parsed.json:
            _print_section(section, console)
    problems = [problem for section in sections for problem in section.problems]
    speed = None
    if not parsed.no_speed:
        try:
            with importing(console):
                from cribo.cli.doctor.speed import measure_speed
        except Exception as error:  # of a library
            from cribo.cli.doctor.findings import described
            from cribo.cli.doctor.software import reinstall

            problems.append(f"the speed cannot be measured ({described(error)}): {reinstall(error, 'cribo')}")
        else:
            with nullcontext(no_progress) if parsed.json else Phases(console) as progress:
                speed = measure_speed(parsed.device, progress)
            failures = speed.failures.items()
            problems += [f"the speed of {command} could not be measured: {error}" for command, error in failures]
    if parsed.json:
        console.print(json.dumps(_as_json(sections, problems, speed), indent=1))
        return
    if speed is not None:
        _print_speed(speed, console)
    _print_problems(problems, console)


def _require_device(device: str, console: Console) -> None:
    """Raise the error of a device that cannot be used; no-op if torch cannot be imported, which a section reports."""
    try:
        with importing(console):
            from cribo.base.devices import resolve_device
    except Exception:
        return
    resolve_device(device)


def _examine(console: Console) -> "Iterator[Section]":
    """Yield the sections of the examination, each of which may import slow packages."""
    with importing(console):
        from cribo.cli.doctor.examination import examine

        sections = examine()
    while True:
        with importing(console):
            section = next(sections, None)
        if section is None:
            return
        yield section


def _print_section(section: "Section", console: Console) -> None:
    table = Table(title=section.title, title_justify="left", show_header=False, width=_WIDTH)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold", ratio=1)
    for name, value in section.facts.items():
        table.add_row(Text(name), Text(value))
    console.print(table)
    if section.hint:
        console.print(section.hint, soft_wrap=True)  # one line, to copy it


def _print_speed(speed: "Speed", console: Console) -> None:
    from cribo.cli.doctor.expectations import NOT_INCLUDED, expectations

    title = f"Speed on {speed.device}, training in {speed.precision}; measured in {speed.seconds:.0f} s"
    table = Table("command", "measured", "expect about", title=title, title_justify="left", width=_WIDTH)
    for command, (measured, expected) in expectations(speed).items():
        table.add_row(Text(command), Text(measured), Text(expected))
    console.print(table)
    console.print(NOT_INCLUDED, soft_wrap=False, width=_WIDTH)


def _print_problems(problems: list[str], console: Console) -> None:
    from cribo.base.versions import project_url

    console.print()
    console.print("no problems found" if not problems else "problems:")
    for problem in problems:
        console.print(f"  {problem}")
    if (address := project_url("Issues")) is not None:
        console.print(f"\nTo report a problem, send this output: {address}")


def _as_json(sections: "list[Section]", problems: list[str], speed: "Speed | None") -> dict[str, Any]:
    return {
        **{section.title: section.facts for section in sections},
        "problems": problems,
        "speed": None if speed is None else asdict(speed),
    }
