"""`cribo study`: train a table of configurations with several seeds, score them, and compare their means."""

import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from cribo.apps.studies.config import load_study, share_of, study_names
from cribo.base.arguments import Parser
from cribo.base.console import Phases, duration, importing, importing_networks
from cribo.base.errors import InputError
from cribo.base.wording import command_line, counted
from cribo.cli.command import Call, Command
from cribo.cli.running import print_places

if TYPE_CHECKING:
    from jsonargparse import Namespace

    from cribo.apps.studies.run import Study

HELP = """\
Train a table of configurations with several seeds, score each, and write the means with intervals of their differences.

  cribo study table5_small
  cribo study table2 --available
  cribo study my-study.yaml --print_plan
  cribo study my-study.yaml --part 2/8
  cribo study my-study.yaml --slurm 8
  cribo study compare studies/before studies/after
  cribo study labels coco/annotations/instances_train2017.json coco/labels

STUDY is a YAML file (docs/studies.md) or one of these: table1 to table12 are the tables of the paper. Those named
_small take minutes, with small networks and images; the others train and evaluate as in the paper:

{names}

Each cell, a row with a seed, is an ordinary run folder. To continue after an interruption, repeat the command: finished
cells are kept. A cell that fails is reported, and the others are trained.
"""

_SLURM = """\
#!/bin/bash
#SBATCH --job-name={job}
#SBATCH --array=1-{parts}
#SBATCH --output={output}
#SBATCH --signal=USR1@120
#SBATCH --requeue
srun {command} --part "$SLURM_ARRAY_TASK_ID/{parts}"
"""


def add_options(parser: Parser) -> None:
    """Add the options of the command."""
    parser.add_argument("study", type=str, help="a YAML file, or the name of a study")
    parser.add_argument("--out", type=Path, default=Path("studies"), help="parent folder of studies")
    parser.add_argument("--name", type=str, help="name of the study's folder; by default that of the file")
    parser.add_argument("--part", type=str, help="i/n: train the i-th of n shares of the cells, for job arrays")
    parser.add_argument(
        "--available",
        action="store_true",
        help="leave out rows and scores whose data or weights are missing; by default, they are an error",
    )
    parser.add_argument(
        "--print_plan",
        action="store_true",
        help="print all rows with their cost in GPU hours or, by timing some steps, on this machine, and what is "
        "missing; and end",
    )
    parser.add_argument(
        "--slurm",
        type=int,
        metavar="N",
        help="write a job file for an array of N parts into the study's folder, and end",
    )


def run(call: Call) -> None:
    """Run the command."""
    name = call.options.name or Path(call.options.study).stem
    config = load_study(call.options.study)
    planned = call.options.print_plan or call.options.slurm is not None
    if call.options.part is not None:
        share_of(call.options.part)
        if planned:
            raise InputError("--part cannot be combined with --print_plan or --slurm: omit it")
    if call.options.slurm is not None and call.options.slurm < 1:
        raise InputError(f"--slurm must be a number of parts >= 1, got {call.options.slurm}")
    with importing_networks(call.console):
        from cribo.apps.studies.run import Study, run_study
        from cribo.apps.studies.table import FIGURE, TABLE

    if planned:
        study = Study(config, call.options.out / name, available=call.options.available)
        if call.options.print_plan:
            _print_plan(study, call.console)
        else:
            _write_job(study, call.options, name, call.console)
        return
    result = run_study(
        config,
        out=call.options.out,
        name=name,
        part=call.options.part,
        available=call.options.available,
        console=call.console,
    )
    call.console.print()
    for table in result.table.tables():
        call.console.print(table)
    for sentence in result.table.sentences:
        call.console.print(sentence, markup=False)
    print_places(call.console, {"table": result.folder / TABLE, "figure": result.folder / FIGURE})
    if result.failed:
        raise InputError(
            f"{counted(len(result.failed), 'cell')} failed, see above; to try again, repeat the command: "
            f"{', '.join(result.failed)}"
        )
    if result.unfinished:
        call.console.print(f"{counted(len(result.unfinished), 'cell')} of other parts or processes are not finished")


def _print_plan(study: "Study", console: Console) -> None:
    from cribo.apps.studies.cells import make_cells
    from cribo.apps.studies.costs import DEVICE
    from cribo.apps.studies.run import missing_lines, named_missing
    from cribo.base.tables import Table, numbers, texts
    from cribo.evaluation.results import NONE

    plans = study.plan()
    cells = make_cells(
        study.study,
        {row: plan.epochs or 1 for row, plan in plans.items() if plan.steps is not None},
        [row for row, weights in study.study.checkpoints.items() if weights.source is not None],
    )
    of_rows = {row: [cell for cell in cells if row in cell.rows] for row in plans}
    needed = {
        "epochs": [None if plan.epochs is None else str(plan.epochs) for plan in plans.values()],
        "steps": [None if plan.steps is None else f"{plan.steps:,}" for plan in plans.values()],
        "time here": [None if plan.seconds is None else duration(plan.seconds) for plan in plans.values()],
        "GPU hours": [None if plan.gpu_seconds is None else _hours(plan.gpu_seconds) for plan in plans.values()],
        "disk": [None if not plan.disk else f"{plan.disk / 2**20:,.0f} MiB" for plan in plans.values()],
    }
    shown = {title: values for title, values in needed.items() if any(values)}
    rows = []
    for place, row in enumerate(plans):
        shares = next((cell.rows[0] for cell in cells if row in cell.rows[1:]), None)
        found = [values[place] or NONE for values in shown.values()]
        about = f" (as {shares})" if shares else ""
        rows.append([f"{row}{about}", str(len(of_rows[row])), *found])
    console.print(Table([*texts("row"), *numbers("cells", *shown)], [rows], f"{study.study.title}, per cell"))
    left = [cell for cell in cells if not study.is_finished(cell, with_missing=True)]
    of_cells = [plans[cell.rows[0]] for cell in left]
    here = [plan.seconds for plan in of_cells if plan.seconds is not None]
    on_gpus = [plan.gpu_seconds for plan in of_cells if plan.gpu_seconds is not None]
    costs = [f"about {duration(sum(here))} of training on this machine"] if here else []
    costs += [f"about {_hours(sum(on_gpus))} GPU hours"] if on_gpus else []
    disk = sum(plan.disk for plan in of_cells)
    costs += [f"{disk / 2**30:.1f} GiB"] if disk else []
    console.print(
        f"{len(left)} of {counted(len(cells), 'cell')} left: {', '.join(costs) or 'their cost is not known'}. Scores: "
        f"{', '.join(study.study.scores)}.",
        markup=False,
    )
    if here:
        console.print("The time on this machine is that of trainings one after the other, without evaluations.")
    if on_gpus:
        unknown = sum(plan.gpu_seconds is None and plan.seconds is None for plan in of_cells)
        console.print(
            f"GPU hours are those of one {DEVICE} in bf16, from profiled steps (benchmarks/RESULTS.md, On a GPU). "
            "Other networks and image sizes are scaled by their operations. Evaluations are counted by the images that "
            "they encode, without heads and reading."
            + (f" The cost of {counted(unknown, 'cell')} is not known." if unknown else "")
        )
    if missing := named_missing(plans, study.scores):
        console.print(f"Missing here:\n{missing_lines(missing)}", markup=False, highlight=False)


def _hours(seconds: float) -> str:
    hours = seconds / 3600
    return f"{hours:,.0f}" if hours >= 10 else f"{hours:.1f}" if hours >= 0.1 else "< 0.1"


def _write_job(study: "Study", parsed: "Namespace", name: str, console: Console) -> None:
    from cribo.base.files import write_text

    study.start()
    # The job's PATH may lack `cribo`, such as after `uv run`.
    program = [sys.executable, "-m", "cribo"]
    available = ["--available"] if parsed.available else []
    command = command_line(*program, "study", parsed.study, "--out", parsed.out, "--name", name, *available)
    path = study.folder / "job.sbatch"
    job, output = command_line(name), command_line(study.folder / "slurm-%A_%a.log")
    write_text(path, _SLURM.format(job=job, parts=parsed.slurm, output=output, command=command))
    print_places(console, {"job": path, "to start it": command_line("sbatch", path)})


def _add_compared(parser: Parser) -> None:
    """Add the options of the comparison."""
    parser.add_argument("before", type=Path, help="folder of a study")
    parser.add_argument("after", type=Path, help="folder of another study")


def _compare(call: Call) -> None:
    """Print the comparison of two studies."""
    with importing(call.console):
        from cribo.apps.studies.comparison import compare_studies

    for table in compare_studies(call.options.before, call.options.after):
        call.console.print(table)


_COMPARE = Command(
    help="Compare the rows that two studies have in common, such as of two versions of a method.",
    usage="cribo study compare BEFORE AFTER",
    less_memory="use a machine with more memory",
    add_options=_add_compared,
    run=_compare,
)


def _add_labels(parser: Parser) -> None:
    """Add the options of the label maps."""
    parser.add_argument("annotations", type=Path, help="a file in COCO's format")
    parser.add_argument("out", type=Path, help="folder of the label maps")
    parser.add_argument("--images", type=Path, help="folder of the images; by default that of COCO's layout")
    parser.add_argument(
        "--stuff", type=Path, help="a file with categories for the pixels outside all objects, stuff_train2017.json"
    )


def _write_labels(call: Call) -> None:
    """Write label maps."""
    with importing(call.console):
        from cribo.apps.studies.label_maps import write_label_maps

    options = call.options
    with Phases(call.console) as progress:
        written = write_label_maps(
            options.annotations, options.out, images=options.images, stuff=options.stuff, progress=progress
        )
    classes = counted(len(written.classes), "class", "classes")
    call.console.print(f"{counted(written.images, 'label map')} of {classes}; 255 is a pixel without a class")
    print_places(call.console, {"label maps": written.folder})


_LABELS = Command(
    help="Draw label maps from annotations in COCO's format, for objective.args.labels of SupervisedCrIBo (table11).",
    usage="cribo study labels ANNOTATIONS OUT [options]",
    less_memory="use a machine with more memory",
    add_options=_add_labels,
    run=_write_labels,
)

COMMAND = Command(
    help=HELP.format(names=textwrap.indent(textwrap.fill(", ".join(study_names()), 100), "  ")),
    usage="cribo study STUDY [options]",
    less_memory="set changes: {optim.micro_batches: 2} in the study, or a smaller batch, with another --name",
    add_options=add_options,
    run=run,
    others={"compare": _COMPARE, "labels": _LABELS},
)
