"""`cribo figures`: draw the figures of a paper from a run."""

from pathlib import Path

from cribo.base.arguments import Parser
from cribo.base.console import Phases, importing_networks
from cribo.base.errors import ConfigError
from cribo.base.wording import counted
from cribo.cli.command import Call, Command
from cribo.cli.running import print_places
from cribo.data.config import READING_SHORT
from cribo.pretraining.figures.config import FigureConfig

HELP = """\
Draw the figures of a paper from a run: vector text in embedded fonts, 300 dpi, two-column layout, no titles.

  cribo figures --run runs/camvid --images CAMVID
  cribo figures --run runs/camvid --features_of 'holiday/*.jpg' --only features
  cribo figures --run runs/a --label "K = 12" --run runs/b --label "K = 64" --only bootstrapping --out compared

  matches        objects of query views and, in the same colour, the nearest object of another image
  clusters       clusters of the same view pairs at several epochs, from the first to the last
  bootstrapping  bootstrapping ratio over the epochs; one curve per --run
  features       images and their dense features as colours (principal components)
  losses, schedules

Captions are written to captions.md.
"""


def add_options(parser: Parser) -> None:
    """Add the options of the command."""
    parser.add_argument("--run", nargs="+", type=Path, required=True, help="a run folder; repeat to compare runs")
    parser.add_argument("--label", nargs="+", type=str, help="name of a run, in the order of --run")
    parser.add_argument("--out", type=Path, help="output folder; by default RUN/figures")
    parser.add_argument("--overwrite", action="store_true", help="replace existing figures in --out")
    parser.add_class_arguments(FigureConfig)
    parser.add_argument("--device", type=str, help="such as cuda:0 or cpu; by default the first GPU, else the CPU")


def run(call: Call) -> None:
    """Run the command."""
    runs: list[Path] = call.options.run
    labels: list[str] = call.options.label or [run.name for run in runs]
    if len(labels) != len(runs) or len(set(labels)) != len(labels):
        raise ConfigError(
            f"each --run needs its own --label, got {counted(len(runs), 'run')} and {', '.join(labels)}: give one "
            "after each"
        )
    config = call.build(FigureConfig)
    with importing_networks(call.console):
        from cribo.base.devices import resolve_devices
        from cribo.pretraining.figures.run import write_figures

    device = resolve_devices([call.options.device] if call.options.device else None, "--device")[0]
    with Phases(call.console) as progress:
        written = write_figures(
            dict(zip(labels, runs, strict=True)),
            call.options.out or runs[0] / "figures",
            config,
            overwrite=call.options.overwrite,
            device=device,
            progress=progress,
        )
    for name, why in written.left_out.items():
        call.console.print(f"skipped {name}: {why}")
    places: dict[str, Path | str] = {name: written.folder / f"{name}.{config.format[0]}" for name in written.captions}
    print_places(call.console, {**places, "captions": written.folder / "captions.md"})


COMMAND = Command(
    help=HELP,
    usage="cribo figures --run RUN [options]",
    short=READING_SHORT,
    less_memory="lower --size or --pictures",
    add_options=add_options,
    run=run,
)
